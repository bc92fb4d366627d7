"""A small residual convolutional network with batch norm that classifies."""

from torch import Generator, Tensor, nn, randint, randn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm and a skip, projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.skip = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.skip(x))


class CNN(nn.Module):
    """Stem, two residual stages, average pool, class logits and their cross-entropy."""

    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(2)
        first = [Block(channels, channels, 1) for _ in range(depth)]
        second = [
            Block(channels if i == 0 else 2 * channels, 2 * channels, 2 if i == 0 else 1)
            for i in range(depth)
        ]
        self.blocks = nn.ModuleList(first + second)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pool(F.relu(self.norm(self.stem(image))))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.average(x).flatten(1))
        return F.cross_entropy(logits, labels), logits


def build(
    *,
    batch: int = 16,
    seq: int | None = None,
    scale: float = 1.0,
    channels: int = 32,
    depth: int = 2,
    classes: int = 10,
    image: int = 32,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """0.2 M parameters at scale 1; image [batch, 3, image, image], labels [batch].

    `scale` multiplies the channels; `seq` is unused.
    """
    channels = max(1, round(channels * scale))
    g = Generator().manual_seed(0)
    pixels = randn(batch, 3, image, image, generator=g, device="cpu")
    labels = randint(0, classes, (batch,), generator=g, device="cpu")
    return CNN(channels, depth, classes), {"image": pixels, "labels": labels}
