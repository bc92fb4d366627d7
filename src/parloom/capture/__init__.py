"""nn.Module -> Graph."""

from parloom.capture.build import capture, capture_flat, parameters_of

__all__ = ["capture", "capture_flat", "parameters_of"]
