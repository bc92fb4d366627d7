"""Inputs that every sample shares."""

import torch
from torch import Tensor, nn

from tests.capture.traps.corpus import equal


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        loss: Tensor = (self.a(x) * scale).square().mean()
        return loss


@equal
def one_input_without_samples() -> tuple[nn.Module, dict[str, Tensor]]:
    return Weighted(), {"x": torch.randn(6, 4), "scale": torch.rand(4)}
