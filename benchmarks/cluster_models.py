"""Models of the cluster benchmarks, as factories for `parloom plan`: (model, global batch).

No label is ignored, so that the mean of the ranks' losses is the loss of the whole batch, which is
what torch's DDP and FSDP2 take for granted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import zoo

Built = tuple[nn.Module, dict[str, Tensor]]


class Regression(nn.Module):
    """Equal linear layers with ReLU and a mean squared error."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, y)


def mlp() -> Built:
    """1.8 M parameters, batch 512."""
    torch.manual_seed(0)
    model = Regression(width=672, depth=4)
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(512, 672, generator=g) for _ in range(2))
    return model, {"x": x, "y": y}


def _gpt(width: int, depth: int) -> Built:
    torch.manual_seed(0)
    model, batch = zoo.build("gpt", batch=8, seq=64, vocab=512, width=width, depth=depth, heads=4)
    return model, {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}


def gpt() -> Built:
    """1.7 M parameters with a tied head; batch 8, sequence 64."""
    return _gpt(width=160, depth=5)


def gpt_of_four() -> Built:
    """As `gpt`, in four blocks: 1.9 M parameters."""
    return _gpt(width=192, depth=4)


def _zoo(name: str, **sizes: Any) -> Built:
    """A model of the zoo whose layers keep the size of what flows, so that few steps teach it."""
    torch.manual_seed(0)
    model, batch = zoo.build(name, **sizes)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model, batch


def mlp_unify() -> Built:
    """The two towers of Unity's artifact at 1/32 of their widths: 0.9 M parameters, batch 512."""
    return _zoo("mlp_unify", batch=512, features=32, hidden=256)


def candle_uno() -> Built:
    """Unity's CANDLE-Uno, about 1/16 wide, half as deep: 1.6 M parameters, batch 256."""
    return _zoo(
        "candle_uno_artifact", batch=256, rnaseq=60, descriptors=328, fingerprints=128,
        hidden=256, depth=4, top_depth=4,
    )  # fmt: skip


def dlrm() -> Built:
    """Four tables of 4,096 rows, 64 wide: 1.2 M parameters, batch 512."""
    return _zoo("dlrm", batch=512)


def cnn() -> Built:
    """Unity's AlexNet, half as wide, on images of 99 pixels: 2.5 M parameters, batch 64."""
    return _zoo("alexnet_artifact", batch=64, channels=32, hidden=1024, crop=99)


MODELS = {
    "mlp": mlp,
    "gpt": gpt,
    "gpt_of_four": gpt_of_four,
    "mlp_unify": mlp_unify,
    "candle_uno": candle_uno,
    "dlrm": dlrm,
    "cnn": cnn,
}

# Learning rates with which a few steps of SGD change the loss, and do not blow it up.
RATES = {"candle_uno": 1e-3, "cnn": 1e-3}


def rate_of(name: str) -> float:
    """The learning rate of a model."""
    return RATES.get(name, 0.05)
