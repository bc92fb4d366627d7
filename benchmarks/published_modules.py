"""Models of published runs that the zoo has not, as plain `nn.Module`s.

Shape suffixes: B samples, S positions, M positions of memory, D width, H heads, K head width, T
tokens, P pairs of token and expert.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.zoo import bert, llama


class WideAttention(llama.Attention):
    """Grouped attention whose heads together may be wider or narrower than the model.

    Kernels read key heads where they are, for all of their query heads, as those of frameworks do.
    With `window`, a position sees about `window` of those before it: positions are cut into runs of
    twice that many, in each of which attention is causal. That is as much work as a sliding window,
    and as many bytes; which positions are seen differs.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        head_width: int,
        window: int = 0,
        bias: bool = False,
    ) -> None:
        super().__init__(heads * head_width, heads, groups)
        self.window = window
        self.q = nn.Linear(width, heads * head_width, bias=bias)
        self.k = nn.Linear(width, groups * head_width, bias=bias)
        self.v = nn.Linear(width, groups * head_width, bias=bias)
        self.out = nn.Linear(heads * head_width, width, bias=bias)

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        B, S, D = x.shape
        run = 2 * self.window
        if not run or run >= S or S % run:
            return self._attend(x, cos_SK, sin_SK)
        runs = x.reshape(B * (S // run), run, D)
        return self._attend(runs, cos_SK[:run], sin_SK[:run]).reshape(B, S, D)

    def _attend(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, self.heads, self.head_width).transpose(1, 2)
        k = self.k(x).view(B, S, self.groups, self.head_width).transpose(1, 2)
        v = self.v(x).view(B, S, self.groups, self.head_width).transpose(1, 2)
        q, k = llama.rotate(q, cos_SK, sin_SK), llama.rotate(k, cos_SK, sin_SK)
        grouped = self.heads != self.groups
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        z: Tensor = self.out(y.transpose(1, 2).reshape(B, S, self.heads * self.head_width))
        return z


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Queries, and keys with values, go through a narrow vector each; `rope` of each key's width is
    rotated and shared by all heads, `nope` of it is not rotated. `q_rank` 0: queries are projected
    at once.
    """

    def __init__(
        self, width: int, heads: int, *, q_rank: int, kv_rank: int, nope: int, rope: int, value: int
    ) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.value = heads, nope, rope, value
        self.kv_rank = kv_rank
        if q_rank:
            self.q_down = nn.Linear(width, q_rank, bias=False)
            self.q_norm = llama.RMSNorm(q_rank)
        self.q = nn.Linear(q_rank or width, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(width, kv_rank + rope, bias=False)
        self.kv_norm = llama.RMSNorm(kv_rank)
        self.kv = nn.Linear(kv_rank, heads * (nope + value), bias=False)
        self.out = nn.Linear(heads * value, width, bias=False)
        self.q_rank = q_rank

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.q_norm(self.q_down(x)) if self.q_rank else x
        q = self.q(q).view(B, S, self.heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope], -1)
        kv = self.kv(self.kv_norm(latent)).view(B, S, self.heads, self.nope + self.value)
        k_nope, v = kv.transpose(1, 2).split([self.nope, self.value], -1)
        q_rope = llama.rotate(q_rope, cos_SK, sin_SK)
        k_rope = llama.rotate(k_rope.unsqueeze(1), cos_SK, sin_SK)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand(B, self.heads, S, self.rope)), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.out(y.transpose(1, 2).reshape(B, S, self.heads * self.value))
        return z


class SwiGLU(nn.Module):
    """A gated perceptron."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """Every token to the best experts of its router; pairs of token and slot with their matrices.

    All tokens go through `shared` experts beside these, which are one perceptron as wide as all.
    """

    def __init__(self, width: int, inner: int, experts: int, slots: int, shared: int = 0) -> None:
        super().__init__()
        self.slots = slots
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        self.shared = SwiGLU(width, shared * inner) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, 1)
        weights, ids = torch.softmax(self.router(x_TD), -1, dtype=torch.float32).topk(self.slots)
        rows_PD, ids_P = x_TD.repeat_interleave(self.slots, 0), ids.reshape(-1)
        gate, up = torch.bmm(self.up[ids_P], rows_PD.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        inner = (F.silu(gate) * up).unsqueeze(-1)
        rows_PD = torch.bmm(self.down[ids_P], inner).squeeze(-1)
        rows_PD = rows_PD * weights.to(x.dtype).reshape(-1).unsqueeze(-1)
        y = rows_PD.view(len(x_TD), self.slots, -1).sum(1).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class AnyBlock(nn.Module):
    """A Llama's block of any attention and any perceptron or mixture of experts."""

    def __init__(self, width: int, attention: nn.Module, rest: nn.Module) -> None:
        super().__init__()
        self.attention_norm = llama.RMSNorm(width)
        self.attention = attention
        self.mlp_norm = llama.RMSNorm(width)
        self.rest = rest

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos_SK, sin_SK)
        y: Tensor = x + self.rest(self.mlp_norm(x))
        return y


class Pair(nn.Module):
    """Two blocks that differ, such as one with a window and one without."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x, cos_SK, sin_SK), cos_SK, sin_SK)
        return y


class Adapted(nn.Module):
    """A frozen linear layer and beside it two narrow ones (LoRA, Hu et al., arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.up(self.down(x))
        return y


def adapted(model: nn.Module, rank: int, names: Sequence[str]) -> None:
    """Freeze a model, and adapt those of its linear layers that end in one of `names`; in place."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in names:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, Adapted(module, rank))


class GatheredBERT(bert.BERT):
    """BERT whose masked-language-model head sees the masked positions alone.

    Devlin et al., public code, run_pretraining.py, gather_indexes: `max_predictions_per_seq` of
    every sample. `masked` [B, predictions] are their numbers, of which `labels` are the words.
    """

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        masked: Tensor,
        labels: Tensor,
        next_sentence_label: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        positions = self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.tokens(input_ids) + positions + self.segments(token_type_ids)
        x = self.dropout(self.norm(x))
        mask = attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, mask)
        seen = x.gather(1, masked.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        logits = self.head(self.transform_norm(F.gelu(self.transform(seen))))
        follows = self.next(torch.tanh(self.pooler(x[:, 0])))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + F.cross_entropy(follows, next_sentence_label), logits, follows


class RelativeAttention(nn.Module):
    """Attention to a segment and the memory before it, by relative positions.

    Dai et al., Transformer-XL (arXiv:1901.02860), section 3.3 and appendix B.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.position = nn.Linear(width, heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.content_bias = nn.Parameter(torch.empty(heads, 1, head_width))
        self.position_bias = nn.Parameter(torch.empty(heads, 1, head_width))

    def forward(self, x: Tensor, memory: Tensor, places_MD: Tensor, seen: Tensor) -> Tensor:
        B, S, _ = x.shape
        both = torch.cat((memory, x), 1)
        M, H, K = both.shape[1], self.heads, self.head_width
        q, k, v = self.qkv(both).view(B, M, 3, H, K).unbind(2)
        q_BHSK = q[:, M - S :].transpose(1, 2)
        r_HKM = self.position(places_MD).view(M, H, K).permute(1, 2, 0)
        content = torch.matmul(q_BHSK + self.content_bias, k.permute(0, 2, 3, 1))
        place = torch.matmul(q_BHSK + self.position_bias, r_HKM)
        # Row i of the places is shifted left by S - 1 - i.
        place = F.pad(place, (1, 0)).view(B, H, M + 1, S)[:, :, 1:].reshape(B, H, S, M)
        scores = (content + place) * K**-0.5
        scores = scores.masked_fill(~seen, -30000.0)
        y = torch.matmul(torch.softmax(scores, -1), v.transpose(1, 2))
        z: Tensor = self.out(y.transpose(1, 2).reshape(B, S, H * K))
        return z


class RelativeBlock(nn.Module):
    """Relative attention and a perceptron, each with a skip and a layer norm behind it."""

    def __init__(self, width: int, heads: int, head_width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = RelativeAttention(width, heads, head_width)
        self.norm_1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm_2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, places_MD: Tensor, seen: Tensor) -> Tensor:
        x = self.norm_1(x + self.dropout(self.attention(x, memory, places_MD, seen)))
        inner = self.dropout(F.relu(self.up(x)))
        y: Tensor = self.norm_2(x + self.dropout(self.down(inner)))
        return y


class TransformerXL(nn.Module):
    """Words by how common they are: `bands` of the vocabulary, each in an embedding of its width.

    Adaptive softmax (Grave et al., arXiv:1609.04309) as in NVIDIA's DeepLearningExamples: every
    token is judged among the most common words and the other bands, and those of a rarer band among
    its words, too. Of each sample the first tokens stand for these, in the shares of `rare`.
    """

    places: Tensor

    def __init__(
        self,
        bands: Sequence[int],
        widths: Sequence[int],
        rare: Sequence[int],
        depth: int,
        sizes: tuple[int, int, int, int],
        positions: int,
        dropout: float,
    ) -> None:
        super().__init__()
        width, heads, head_width, inner = sizes
        self.register_buffer("places", torch.empty(positions, width))
        self.rare = tuple(rare)
        self.tables = nn.ModuleList(nn.Embedding(n, w) for n, w in zip(bands, widths, strict=True))
        self.projections = nn.ModuleList(
            nn.Linear(w, width, bias=False) if w != width else nn.Identity() for w in widths
        )
        self.others = nn.Linear(width, len(bands) - 1)
        self.blocks = nn.ModuleList(
            RelativeBlock(width, heads, head_width, inner, dropout) for _ in range(depth)
        )

    def forward(self, input_ids: Tensor, labels: Tensor, memory: Tensor) -> tuple[Tensor]:
        S, M = input_ids.shape[1], memory.shape[1] + input_ids.shape[1]
        x = self.tables[0](input_ids)
        rows = torch.arange(S, device=input_ids.device)[:, None]
        seen = torch.arange(M, device=input_ids.device)[None, :] <= rows + (M - S)
        for block in self.blocks:
            x = block(x, memory, self.places, seen)
        first, *others = (table.weight for table in self.tables)
        assert isinstance(first, Tensor)
        common = F.linear(x, first)
        logits = torch.cat((common, self.others(x)), -1)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        for count, weight, projection in zip(self.rare, others, self.projections[1:], strict=True):
            y = x[:, :count]
            if isinstance(projection, nn.Linear):
                y = F.linear(y, projection.weight.t())
            assert isinstance(weight, Tensor)
            tail = F.linear(y, weight).flatten(0, 1).float()
            loss = loss + F.cross_entropy(tail, labels[:, :count].flatten())
        return (loss,)
