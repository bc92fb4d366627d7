"""AlexNet: five convolutions and three linear layers.

`build` is the network of Krizhevsky et al., "ImageNet Classification with Deep Convolutional
Neural Networks" (NIPS 2012), section 3.5: grouped convolutions (two GPUs), local response
normalization (3.3), overlapping pooling (3.4), dropout (4.2). Its input is 227 wide; the 224 of the
paper gives no whole number of windows. `build_artifact` is FlexFlow's (flexflow/FlexFlow,
examples/cpp/AlexNet/alexnet.cc), which follows "One weird trick" (arXiv:1404.5997).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from parloom.zoo.batches import images
from parloom.zoo.rounding import scaled


def response() -> nn.LocalResponseNorm:
    """Section 3.3: n = 5, k = 2, alpha = 1e-4, beta = 0.75; torch divides alpha by n."""
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)


def pooled(size: int) -> int:
    """Positions of a window of 3 with stride 2."""
    return (size - 3) // 2 + 1


class AlexNet(nn.Module):
    """Convolutions, then a classifier of two hidden layers; cross-entropy."""

    def __init__(self, convolutions: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.convolutions = convolutions
        self.classifier = classifier

    def forward(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classifier(self.convolutions(image).flatten(1))
        return F.cross_entropy(logits, labels), logits


def build(
    *,
    batch: int = 128,
    seq: int | None = None,
    scale: float = 1.0,
    channels: int = 96,
    hidden: int = 4096,
    classes: int = 1000,
    crop: int = 227,
    dropout: float = 0.5,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """61 M parameters; image [batch, 3, crop, crop], labels [batch].

    `scale` multiplies the channels of all layers, in their ratios, and the hidden width; a crop has
    at least 67 pixels. `seq` is unused.
    """
    # 96, 256, 384, 384 and 256 in the paper, each cut into two groups.
    unit = scaled(channels, scale, 6) // 6
    hidden = scaled(hidden, scale)
    one, two, three = 6 * unit, 16 * unit, 24 * unit
    convolutions = nn.Sequential(
        nn.Conv2d(3, one, 11, 4), nn.ReLU(), response(), nn.MaxPool2d(3, 2),
        nn.Conv2d(one, two, 5, padding=2, groups=2), nn.ReLU(), response(), nn.MaxPool2d(3, 2),
        nn.Conv2d(two, three, 3, padding=1), nn.ReLU(),
        nn.Conv2d(three, three, 3, padding=1, groups=2), nn.ReLU(),
        nn.Conv2d(three, two, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    size = pooled(pooled(pooled((crop - 11) // 4 + 1)))
    classifier = nn.Sequential(
        nn.Dropout(dropout), nn.Linear(two * size**2, hidden), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip
    return AlexNet(convolutions, classifier), images(batch, crop, classes)


def build_artifact(
    *,
    batch: int = 64,
    seq: int | None = None,
    scale: float = 1.0,
    channels: int = 64,
    hidden: int = 4096,
    classes: int = 10,
    crop: int = 229,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """57 M parameters; image [batch, 3, crop, crop], labels [batch].

    `scale` as for `build`; `seq` is unused.
    """
    # 64, 192, 384, 256 and 256 in the artifact.
    unit, hidden = scaled(channels, scale), scaled(hidden, scale)
    convolutions = nn.Sequential(
        nn.Conv2d(3, unit, 11, 4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(unit, 3 * unit, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(3 * unit, 6 * unit, 3, padding=1), nn.ReLU(),
        nn.Conv2d(6 * unit, 4 * unit, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4 * unit, 4 * unit, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    size = pooled(pooled(pooled((crop - 7) // 4 + 1)))
    classifier = nn.Sequential(
        nn.Linear(4 * unit * size**2, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip
    return AlexNet(convolutions, classifier), images(batch, crop, classes)
