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


def _gpt(count: int, width: int, depth: int) -> Built:
    torch.manual_seed(0)
    model, batch = zoo.build(
        "gpt", batch=count, seq=64, vocab=512, width=width, depth=depth, heads=4
    )
    return model, {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}


def gpt() -> Built:
    """1.7 M parameters with a tied head; batch 8, sequence 64."""
    return _gpt(8, width=160, depth=5)


def small_gpt() -> Built:
    """Four blocks, 0.5 M parameters with a tied head; batch 32, sequence 64."""
    return _gpt(32, width=96, depth=4)


def heavy_head() -> Built:
    """Six blocks of width 256 with a tied head that takes as long as two and a half of them."""
    torch.manual_seed(0)
    model, batch = zoo.build("gpt", batch=16, seq=64, vocab=8000, width=256, depth=6, heads=4)
    return model, {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}


def _zoo(name: str, **sizes: Any) -> Built:
    """A model of the zoo whose layers keep the size of what flows, so that few steps teach it."""
    torch.manual_seed(0)
    model, batch = zoo.build(name, **sizes)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model, batch


def mlp_unify() -> Built:
    """The two towers of Unity's artifact, 1/43 as wide: 0.5 M parameters, batch 2048."""
    return _zoo("mlp_unify", batch=2048, features=32, hidden=192)


def candle_uno() -> Built:
    """Unity's CANDLE-Uno, 1/16 to 1/32 as wide, half as deep: 0.5 M parameters, batch 2048."""
    return _zoo(
        "candle_uno_artifact", batch=2048, rnaseq=60, descriptors=328, fingerprints=128,
        hidden=128, depth=4, top_depth=4,
    )  # fmt: skip


def dlrm() -> Built:
    """Four tables of 1,024 rows, 64 wide: 0.6 M parameters, batch 4096."""
    return _zoo("dlrm", batch=4096, rows=1024, hidden=512)


def mmt() -> Built:
    """GraphPipe's multi-modal transformer, a quarter as wide and deep: 6 M parameters, batch 32."""
    return _zoo("mmt", batch=32, seq=16, width=256, inner=1024, depth=2, heads=4)


def small_cnn() -> Built:
    """Unity's AlexNet, half as wide, on images of 99 pixels: 1.2 M parameters, batch 128."""
    return _zoo("alexnet_artifact", batch=128, channels=32, hidden=512, crop=99)


class LinearAttention(nn.Module):
    """Attention without softmax (Katharopoulos et al., ICML'20), in the order of the formula: the
    scores of all pairs of positions before the values.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            own(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for own in (self.query, self.key, self.value)
        )
        scores = F.elu(query) @ F.elu(key).transpose(-1, -2) / x.shape[1]
        made: Tensor = self.out((scores @ value).transpose(1, 2).flatten(2))
        return x + made


class LinearAttentions(nn.Module):
    """Blocks of linear attention under a mean squared error."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LinearAttention(width, heads) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def linear_attention() -> Built:
    """Three blocks, 0.1 M parameters; batch 16, 256 positions."""
    torch.manual_seed(0)
    model = LinearAttentions(width=96, heads=3, depth=3)
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 256, 96, generator=g) for _ in range(2))
    return model, {"x": x, "y": y}


class FactorizedEmbeddings(nn.Module):
    """ALBERT's embeddings of few numbers each (Lan et al., ICLR'20, section 3.1) of characters, and
    layers on them.
    """

    def __init__(self, vocab: int, narrow: int, width: int, depth: int) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(vocab, narrow), nn.Linear(narrow, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wide(self.table(ids))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def factorized_embeddings() -> Built:
    """128 characters, 0.2 M parameters; batch 32, 128 positions."""
    torch.manual_seed(0)
    model = FactorizedEmbeddings(vocab=128, narrow=96, width=256, depth=2)
    g = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 128, (32, 128), generator=g) for _ in range(2))
    return model, {"ids": ids, "labels": labels}


class Siamese(nn.Module):
    """One tower for two inputs, and the distance of what it makes of them."""

    def __init__(self, features: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [features, *[width] * depth]
        self.tower = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, left: Tensor, right: Tensor, distance: Tensor) -> Tensor:
        for layer in self.tower:
            left, right = F.relu(layer(left)), F.relu(layer(right))
        return F.mse_loss((left - right).square().mean(-1), distance)


def siamese() -> Built:
    """A tower of 0.3 M parameters; batch 256."""
    torch.manual_seed(0)
    model = Siamese(features=128, width=320, depth=4)
    g = torch.Generator().manual_seed(1)
    left, right = (torch.randn(256, 128, generator=g) for _ in range(2))
    return model, {"left": left, "right": right, "distance": torch.rand(256, generator=g)}


def llama() -> Built:
    """Two blocks of the zoo's Llama, 0.4 M parameters; batch 16, sequence 64."""
    torch.manual_seed(0)
    model, batch = zoo.build("llama", batch=16, seq=64, vocab=256, width=128, depth=2, heads=4)
    return model, {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}


MODELS = {
    "mlp": mlp,
    "gpt": gpt,
    "small_gpt": small_gpt,
    "heavy_head": heavy_head,
    "mlp_unify": mlp_unify,
    "candle_uno": candle_uno,
    "dlrm": dlrm,
    "small_cnn": small_cnn,
    "mmt": mmt,
    "linear_attention": linear_attention,
    "factorized_embeddings": factorized_embeddings,
    "siamese": siamese,
    "llama": llama,
}

# Learning rates with which a few steps of SGD change the loss, and do not blow it up.
RATES = {"candle_uno": 1e-3, "dlrm": 5e-3, "small_cnn": 1e-3, "mmt": 1e-4}


def rate_of(name: str) -> float:
    """The learning rate of a model."""
    return RATES.get(name, 0.05)
