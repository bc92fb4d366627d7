"""The models of `measured_forms.py`, at the sizes of publications, with batches that one core
trains in 0.05 to 2 seconds; and small copies of them, for tests.

Dropout is left out: forms draw other masks. Those that the zoo has not:

- NasRNN as in TASO's benchmark (jiazhihao/TASO, examples/nasrnn.py): 5 cells of 8 pairs of products
  of width 512, each cell with weights of its own. Its batch is 1; here it is 16.
- SqueezeNet v1.1 (Iandola et al., arXiv:1602.07360; DeepScale/SqueezeNet, v1.1).
- Attention blocks with low-rank adapters on all of their products (Hu et al., "LoRA", 2021, section
  4.1; rank 8). In `lora` the base is frozen; in `lora_frozen` the adapters are, too, and only the
  head trains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Generator, Tensor, cat, nn, randn, relu, sigmoid, tanh, zeros
from torch.nn import functional as F

from parloom import zoo
from parloom.zoo.batches import images, tokens

Built = tuple[nn.Module, dict[str, Tensor]]


class Cell(nn.Module):
    """A cell that architecture search found, of 8 sums of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_input, self.of_state = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8)) for _ in range(2)
        )

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        pairs = zip(self.of_input, self.of_state, strict=True)
        t = [of_input(x) + of_state(state) for of_input, of_state in pairs]
        a = relu(t[0]) + sigmoid(t[3])
        b = sigmoid(t[1]) + tanh(t[2])
        c = sigmoid(t[4]) * tanh(t[5])
        d = sigmoid(t[6]) * relu(t[7])
        e = sigmoid(b) + tanh(c)
        f = tanh(a) * tanh(d)
        return tanh(tanh(e) * tanh(f))


class NasRNN(nn.Module):
    """Cells one after the other, each on an input of its own; mean square of the last state."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(width) for _ in range(length))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        state = zeros(x.shape[0], x.shape[2], device=x.device, dtype=x.dtype)
        for position, cell in enumerate(self.cells):
            state = cell(x[:, position], state)
        return F.mse_loss(state, labels), state


class Fire(nn.Module):
    """A 1x1 convolution, and of its result one with 1x1 and one with 3x3 windows."""

    def __init__(self, channels_in: int, squeezed: int, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels_in, squeezed, 1)
        self.expand_1 = nn.Conv2d(squeezed, channels, 1)
        self.expand_3 = nn.Conv2d(squeezed, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return cat((F.relu(self.expand_1(x)), F.relu(self.expand_3(x))), dim=1)


class SqueezeNet(nn.Module):
    """Fire modules with pools between them; the classifier is a convolution."""

    def __init__(self, narrower: int, classes: int) -> None:
        super().__init__()
        a, b, c, d, e = (n // narrower for n in (64, 128, 192, 256, 128))
        fires = (Fire(a, 16, a), Fire(e, 16, a), nn.MaxPool2d(3, 2, ceil_mode=True),
                 Fire(e, 32, b), Fire(2 * b, 32, b), nn.MaxPool2d(3, 2, ceil_mode=True),
                 Fire(2 * b, 48, c), Fire(2 * c, 48, c), Fire(2 * c, 64, d),
                 Fire(2 * d, 64, d))  # fmt: skip
        self.stem = nn.Conv2d(3, a, 3, 2)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.fires = nn.Sequential(*fires)
        self.head = nn.Conv2d(2 * d, classes, 1)

    def forward(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fires(self.pool(F.relu(self.stem(image))))
        logits = F.relu(self.head(x)).mean((2, 3))
        return F.cross_entropy(logits, labels), logits


class Adapted(nn.Module):
    """A linear layer and the product of two narrow ones beside it."""

    def __init__(self, width_in: int, width: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width, bias=False)
        self.down = nn.Linear(width_in, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return y


class AdaptedBlock(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int, inner: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (
            Adapted(width, width, rank, 2.0 * rank) for _ in range(4)
        )
        self.up = Adapted(width, inner, rank, 2.0 * rank)
        self.down = Adapted(inner, width, rank, 2.0 * rank)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        normed = self.norm_1(x)
        q, k, v = (
            layer(normed).view(batch, positions, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, positions, width))
        z: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return z


class Lora(nn.Module):
    """Adapted blocks under a head that always trains; embedding, base and norms are frozen."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, inner: int, rank: int, frozen: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(AdaptedBlock(width, heads, inner, rank) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Adapted) and not frozen:
                module.down.requires_grad_(True)
                module.up.requires_grad_(True)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits


def nasrnn(*, batch: int = 16, width: int = 512, length: int = 5) -> Built:
    """21 M parameters; x [batch, length, width], labels [batch, width]."""
    g = Generator().manual_seed(0)
    x = randn(batch, length, width, generator=g)
    return NasRNN(width, length), {"x": x, "labels": 0.1 * randn(batch, width, generator=g)}


def squeezenet(*, batch: int = 4, crop: int = 224, classes: int = 1000, narrower: int = 1) -> Built:
    """1.2 M parameters; image [batch, 3, crop, crop], labels [batch]."""
    return SqueezeNet(narrower, classes), images(batch, crop, classes)


def lora(
    *,
    batch: int = 1,
    seq: int = 256,
    vocab: int = 4096,
    width: int = 1024,
    depth: int = 2,
    heads: int = 16,
    inner: int = 4096,
    rank: int = 8,
    frozen: bool = False,
) -> Built:
    """25 M parameters of two blocks of GPT-2 medium with adapters."""
    model = Lora(vocab, width, depth, heads, inner, rank, frozen)
    return model, tokens(batch, seq, vocab)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with the sizes that are measured, and those of a small copy."""

    build: Callable[..., Built]
    sizes: dict[str, Any]
    small: dict[str, Any]

    def built(self, *, small: bool) -> Built:
        """The model in training mode and its batch."""
        model, batch = self.build(**(self.sizes | self.small if small else self.sizes))
        return model.train(), batch


def _of_zoo(name: str) -> Callable[..., Built]:
    def build(**sizes: Any) -> Built:
        return zoo.build(name, **sizes)

    return build


_SMALL_LORA = {"vocab": 64, "width": 32, "heads": 2, "inner": 64, "seq": 16}
SUBJECTS = MappingProxyType(
    {
        # BERT-base (Devlin et al.) on 64 tokens, as many as TASO's example has.
        "bert": Subject(
            _of_zoo("bert_large"),
            {"batch": 1, "seq": 64, "width": 768, "depth": 12, "heads": 12, "inner": 3072,
             "dropout": 0.0},
            {"seq": 16, "vocab": 64, "width": 32, "depth": 2, "heads": 2, "inner": 64},
        ),
        "resnext50": Subject(
            _of_zoo("resnext50"), {"batch": 2}, {"scale": 0.25, "cardinality": 4, "crop": 64}
        ),
        "inception_v3": Subject(
            _of_zoo("inception_v3"),
            {"batch": 2, "dropout": 0.0},
            {"scale": 0.125, "classes": 10, "crop": 75},
        ),
        "squeezenet": Subject(squeezenet, {}, {"narrower": 8, "crop": 64, "classes": 10}),
        "nasrnn": Subject(nasrnn, {}, {"batch": 4, "width": 16, "length": 2}),
        # Two blocks of Llama-3.2-1B, under a small vocabulary.
        "llama_block": Subject(
            _of_zoo("llama"),
            {"batch": 1, "seq": 128, "depth": 2, "width": 2048, "heads": 32, "groups": 8,
             "inner": 8192},
            {"seq": 16, "width": 32, "heads": 4, "groups": 2, "inner": 64, "vocab": 64},
        ),
        "lora": Subject(lora, {}, _SMALL_LORA),
        "lora_frozen": Subject(lora, {"frozen": True}, _SMALL_LORA),
    }
)  # fmt: skip
