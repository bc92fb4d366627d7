"""parloom: finds, proves, predicts and runs parallel training plans for PyTorch models."""

__version__ = "0.1.0"
