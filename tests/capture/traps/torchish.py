"""A user's file whose name begins like torch's: nothing in it is torch's."""

from torch import Tensor, nn

CALLS = {"all": 0}


class Policy:
    """Scales by how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def scale(self) -> float:
        self.count += 1
        return float(self.count)


class Warming(nn.Module):
    """Keeps its counter in an object of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.policy.scale()


def asked() -> int:
    """How often it was called."""
    CALLS["all"] += 1
    return CALLS["all"]
