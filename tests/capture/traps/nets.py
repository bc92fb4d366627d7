"""A small network whose forward is a function, for traps that are a few lines."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, dict[str, Tensor]]]
Body = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """Layers, a running mean and a table, and a forward that is given."""

    seen: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.full((4,), 0.5))
        self.notes: dict[str, Any] = {}
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self, x)
        return result


def forward(body: Body) -> Build:
    """A factory of a network with this forward."""

    @wraps(body)
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        return Net(body), {"x": torch.linspace(-2.0, 2.0, 12).reshape(3, 4)}

    del build.__wrapped__
    return build
