"""A plain multi-layer perceptron that classifies."""

from itertools import pairwise

from torch import Generator, Tensor, nn, randint, randn
from torch.nn import functional as F


class MLP(nn.Module):
    """`depth` hidden layers with ReLU, then class logits and their cross-entropy."""

    def __init__(self, features: int, hidden: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [features] + [hidden] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = F.relu(layer(x))
        logits = self.head(x)
        return F.cross_entropy(logits, labels), logits


def build(
    *,
    batch: int = 64,
    seq: int | None = None,
    scale: float = 1.0,
    features: int = 256,
    hidden: int = 1024,
    depth: int = 3,
    classes: int = 16,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """2.4 M parameters at scale 1; x [batch, features], labels [batch]; `seq` is unused."""
    features, hidden = max(1, round(features * scale)), max(1, round(hidden * scale))
    g = Generator().manual_seed(0)
    x = randn(batch, features, generator=g, device="cpu")
    labels = randint(0, classes, (batch,), generator=g, device="cpu")
    return MLP(features, hidden, depth, classes), {"x": x, "labels": labels}
