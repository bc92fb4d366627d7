"""Models of the reality benchmark, as factories for `parloom plan`: (model, global batch)."""

from typing import Any

import torch
import transformers
from cluster_models import Built, gpt, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import zoo
from parloom.capture.hugging_face import build_from_config

BATCH, SEQ = 16, 64


def _hugging_face(name: str, batch: int = BATCH, **sizes: Any) -> Built:
    torch.manual_seed(0)
    config = getattr(transformers, name).config_class(**sizes)
    config.architectures = [name]
    return build_from_config(config, batch, SEQ)


def llama() -> Built:
    """Hugging Face's Llama: 1.5 M parameters; batch 16, sequence 64."""
    return _hugging_face(
        "LlamaForCausalLM", vocab_size=512, hidden_size=160, intermediate_size=432,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip


def bert() -> Built:
    """Hugging Face's Bert for masked tokens, without dropout: 1.7 M parameters; batch 16."""
    return _hugging_face(
        "BertForMaskedLM", vocab_size=512, hidden_size=160, intermediate_size=640,
        num_hidden_layers=5, num_attention_heads=4, max_position_embeddings=SEQ,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def cnn() -> Built:
    """The zoo's CNN: 1.2 M parameters, batch 32."""
    torch.manual_seed(0)
    return zoo.build("cnn", batch=32, channels=80, image=16, depth=2, classes=16)


class _Mixing(nn.Module):
    """Two layers over the last dim and a residual."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(F.gelu(self.wide(x)))
        return out


class _MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = _Mixing(tokens, 2 * tokens), _Mixing(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.second(x))
        return out


class _Mixer(nn.Module):
    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList(_MixerBlock(64, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(dim=1)), labels)


def mixer() -> Built:
    """MLP-Mixer (arXiv:2105.01601): 1.7 M parameters; 16 images of 32 pixels, patches of 4."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 32, 32, generator=g)
    labels = torch.randint(0, 10, (16,), generator=g)
    return _Mixer(width=256, depth=6, classes=10), {"images": images, "labels": labels}


class _Ranking(nn.Module):
    """Cross layers x0 * (W x + b) + x beside a deep tower, on embeddings of sparse features."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        size = tables * width
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.cross = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.deep = nn.Sequential(
            nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size), nn.ReLU()
        )
        self.head = nn.Linear(2 * size, 1)

    def forward(self, features: Tensor, clicks: Tensor) -> Tensor:
        columns = [table(features[:, i]) for i, table in enumerate(self.tables)]
        base = torch.cat(columns, dim=-1)
        crossed = base
        for layer in self.cross:
            crossed = base * layer(crossed) + crossed
        logits = self.head(torch.cat((crossed, self.deep(base)), dim=-1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


def ranking() -> Built:
    """DCN-v2 (arXiv:2008.13535): 1.5 M parameters; batch 256, 8 tables of 4,096 rows."""
    return _ranking(batch=256, rows=4096, width=32)


def ranking_small() -> Built:
    """The same with steps of some tens of milliseconds: 0.2 M parameters, batch 64."""
    return _ranking(batch=64, rows=512, width=16)


def _ranking(batch: int, rows: int, width: int) -> Built:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    features = torch.randint(0, rows, (batch, 8), generator=g)
    clicks = torch.randint(0, 2, (batch,), generator=g).float()
    return _Ranking(tables=8, rows=rows, width=width), {"features": features, "clicks": clicks}


def t5() -> Built:
    """Hugging Face's T5 without dropout: 4.9 M parameters; batch 16, sequence 64."""
    return _t5(BATCH)


def t5_long() -> Built:
    """The same with steps of some seconds: batch 96."""
    return _t5(96)


def _t5(batch: int) -> Built:
    return _hugging_face(
        "T5ForConditionalGeneration", batch, vocab_size=1024, d_model=224, d_kv=56, d_ff=640,
        num_layers=4, num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip


MODELS = {
    "mlp": mlp,
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "cnn": cnn,
    "mixer": mixer,
    "ranking": ranking,
    "t5": t5,
    "ranking_small": ranking_small,
    "t5_long": t5_long,
}
