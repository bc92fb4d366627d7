"""A small Llama: RMS norm, rotary positions, grouped key and value heads, SwiGLU, untied head.

Shape suffixes: B batch, S sequence, D model width, H query heads, G key heads, K head width.
"""

from torch import Tensor, arange, cat, nn, ones, rsqrt
from torch.nn import functional as F

from parloom.zoo.batches import tokens


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, computed in the dtype of x."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotate the halves of the head width by the position's angles."""
    first, second = x_BHSK.chunk(2, dim=-1)
    return x_BHSK * cos_SK + cat((-second, first), dim=-1) * sin_SK


class Attention(nn.Module):
    """Causal attention in which `heads / groups` query heads share a key and value head."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = heads, groups, width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, groups * self.head_width, bias=False)
        self.v = nn.Linear(width, groups * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, self.heads, self.head_width).transpose(1, 2)
        k = self.k(x).view(B, S, self.groups, self.head_width).transpose(1, 2)
        v = self.v(x).view(B, S, self.groups, self.head_width).transpose(1, 2)
        q, k = rotate(q, cos_SK, sin_SK), rotate(k, cos_SK, sin_SK)
        k = self._repeat(k)
        v = self._repeat(v)
        y_BHSK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(y_BHSK.transpose(1, 2).reshape(B, S, self.heads * self.head_width))
        return y

    def _repeat(self, x_BGSK: Tensor) -> Tensor:
        B, G, S, K = x_BGSK.shape
        times = self.heads // self.groups
        return x_BGSK[:, :, None].expand(B, G, times, S, K).reshape(B, self.heads, S, K)


class Block(nn.Module):
    """Attention and a gated perceptron, each behind an RMS norm."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.mlp_norm = RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos_SK, sin_SK)
        h = self.mlp_norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


class Llama(nn.Module):
    """Next-token loss over the whole batch; `labels` equal to -100 do not count."""

    frequencies: Tensor

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, groups: int, inner: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        head_width = width // heads
        frequencies = 10000.0 ** (-arange(0, head_width, 2) / head_width)  # RoFormer, section 3.2.2
        self.register_buffer("frequencies", frequencies, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids)
        positions = arange(input_ids.shape[1], device=x.device, dtype=x.dtype)
        angles = positions[:, None] * self.frequencies.to(x.dtype)
        angles_SK = cat((angles, angles), dim=-1)
        cos_SK, sin_SK = angles_SK.cos(), angles_SK.sin()
        for block in self.blocks:
            x = block(x, cos_SK, sin_SK)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits


def build(
    *,
    batch: int = 8,
    seq: int = 128,
    scale: float = 1.0,
    vocab: int = 512,
    width: int = 256,
    depth: int = 4,
    heads: int = 8,
    groups: int = 4,
    inner: int = 768,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """3.4 M parameters at scale 1; input_ids and labels [batch, seq], of which some are -100.

    `scale` multiplies width and inner width; `groups` key heads must divide `heads`.

    Raises:
        ValueError: `groups` does not divide `heads`.
    """
    if heads % groups:
        raise ValueError(f"zoo:llama: {groups} key heads do not divide {heads} query heads")
    # Rotary positions need an even head width.
    width = 2 * heads * max(1, round(width * scale / (2 * heads)))
    inner = heads * max(1, round(inner * scale / heads))
    model = Llama(vocab, width, depth, heads, groups, inner)
    return model, tokens(batch, seq, vocab)
