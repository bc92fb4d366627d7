"""A small GPT: learned positions, fused QKV, pre-norm blocks, tied head.

Shape suffixes: B batch, S sequence, D model width, H heads, K head width.
"""

from torch import Tensor, arange, nn
from torch.nn import functional as F

from parloom.zoo.batches import tokens


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, D // self.heads).unbind(2)
        dropout = self.dropout if self.training else 0.0
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y_BHSK = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        y: Tensor = self.out(y_BHSK.transpose(1, 2).reshape(B, S, D))
        return y


class Block(nn.Module):
    """Attention and a four times wider perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        inner = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
        y: Tensor = x + self.dropout(self.down(inner))
        return y


class GPT(nn.Module):
    """Next-token loss over the whole batch; `labels` equal to -100 do not count."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, positions: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids)
        x = x + self.positions(arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits


def build(
    *,
    batch: int = 8,
    seq: int = 128,
    scale: float = 1.0,
    vocab: int = 257,
    width: int = 256,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """3.3 M parameters at scale 1; input_ids and labels [batch, seq], of which some are -100.

    `scale` multiplies the width (rounded to a multiple of the heads), never the odd vocabulary.
    """
    width = heads * max(1, round(width * scale / heads))
    return GPT(vocab, width, depth, heads, seq, dropout), tokens(batch, seq, vocab)
