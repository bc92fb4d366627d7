"""The multi-modal Transformer that GraphPipe is evaluated with (Jeon et al., ASPLOS 2025).

Appendix A.2 (arXiv:2406.17145): four branches of eight Transformer layers each, concatenated at
the end. The layers are those of Vaswani et al. (arXiv:1706.03762, section 3.1). The paper says
nothing of inputs and loss: here each branch reads vectors of a modality, and one number for each
position is predicted from the concatenation.

Shape suffixes: B batch, S sequence, D model width.
"""

from torch import Generator, Tensor, cat, nn, randn
from torch.nn import functional as F

from parloom.zoo.bert import Attention
from parloom.zoo.rounding import scaled

MODALITIES = ("text", "image", "audio", "video")


class Layer(nn.Module):
    """Attention and a perceptron, each with a skip and a layer norm behind it."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm_1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm_2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x + self.attention(x))
        y: Tensor = self.norm_2(x + self.down(F.relu(self.up(x))))
        return y


class MultiModalTransformer(nn.Module):
    """A branch of layers for each modality; the mean squared error of a number per position."""

    def __init__(self, width: int, depth: int, heads: int, inner: int) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(
            {
                name: nn.ModuleList(Layer(width, heads, inner) for _ in range(depth))
                for name in MODALITIES
            }
        )
        self.head = nn.Linear(len(MODALITIES) * width, 1)

    def forward(
        self, text: Tensor, image: Tensor, audio: Tensor, video: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        ends = []
        for layers, x_BSD in zip(self.branches.values(), (text, image, audio, video), strict=True):
            for layer in layers:  # type: ignore[attr-defined]
                x_BSD = layer(x_BSD)
            ends.append(x_BSD)
        predicted = self.head(cat(ends, dim=-1))
        return F.mse_loss(predicted, labels), predicted


def build(
    *,
    batch: int = 64,
    seq: int = 256,
    scale: float = 1.0,
    width: int = 1024,
    depth: int = 8,
    heads: int = 16,
    inner: int = 4096,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """403 M parameters; a tensor [batch, seq, width] for each modality, labels [batch, seq, 1].

    `depth` is that of each branch; `scale` multiplies width and inner width.
    """
    width, inner = scaled(width, scale, heads), scaled(inner, scale)
    g = Generator().manual_seed(0)
    found = {name: randn(batch, seq, width, generator=g, device="cpu") for name in MODALITIES}
    found["labels"] = randn(batch, seq, 1, generator=g, device="cpu")
    return MultiModalTransformer(width, depth, heads, inner), found
