"""Attention whose queries are sharded: blocks of keys and values one after the other.

Each block gives a part of the result and, per query, the logarithm of the sum of its exponentials,
by which parts are merged exactly (Milakov and Gimelshein, 2018; Liu et al., 2023, section 3). The
blocks of other ranks come around a ring, the next one while one is computed; or all keys are there
and a block is what some rank has of the positions, so that what a causal mask hides is left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from parloom.runtime.comm import DistributedGroup, Group, SingleGroup
from parloom.runtime.context import Context
from parloom.runtime.moves import named_group
from parloom.runtime.sharding import Digit, global_shape, indices, take
from parloom.runtime.work import DONE, Work

Digits = tuple[Digit, ...]

# What queries see of a block: all of it, nothing, keys up to their own place in it, keys before
# that, or what a comparison of global indices says.
ALL, NOTHING, UP_TO, BEFORE, COMPARED = range(5)


class Blocks(NamedTuple):
    """The blocks of keys, in the order of the members that have them.

    `seen` says so for each, `rows` the global indices of queries and `columns` those of each
    block's keys, both empty where nothing is compared. `places` [block, key] are those of each
    block in keys that are all here; without them blocks come around `group`.
    """

    seen: list[int]
    rows: Tensor
    columns: Tensor
    places: Tensor | None
    scale: float


def ring_attention(  # noqa: PLR0917 - of three tensors, and where they lie
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    queries: Digits,
    keys: Digits,
    axes: tuple[str, ...],
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of local queries to the keys and values of all members of the group of `axes`.

    `queries` and `keys` are the digits of their positions, the dim before the last one. Keys with
    fewer heads (dim -3) than queries are shared by groups of these.
    """
    members = _coordinates(ctx, axes)
    seen = [_seen(queries, keys, ctx, there) if causal else ALL for there in members]
    compared = causal and COMPARED in seen
    rows, columns = _compared(ctx, queries, keys, members, q) if compared else _none(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _attend(q, k, v, Blocks(seen, rows, columns, None, scale), ctx.group(axes))


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, queries: Digits, scale: float | None = None
) -> Tensor:
    """Causal attention of local queries to as many keys as there are queries, which are all here.

    A block is what a rank has of the positions: what no local query sees is not computed.
    """
    axes = tuple([digit for digit in queries if isinstance(digit, str)])
    members = _coordinates(ctx, axes)
    seen = [_seen(queries, queries, ctx, there) for there in members]
    places = torch.stack([_indices(ctx, queries, there) for there in members])
    if COMPARED in seen:
        rows, columns = indices(ctx, queries), places
    else:
        rows, columns = _none(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _attend(q, k, v, Blocks(seen, rows, columns, places, scale), SingleGroup())


def _coordinates(ctx: Context, axes: tuple[str, ...]) -> list[dict[str, int]]:
    """The coordinates of each member of the group of `axes`, the first of which is outermost."""
    found = [dict(ctx.coordinates)]
    for axis in axes:
        found = [here | {axis: i} for here in found for i in range(ctx.mesh[axis].size)]
    return found


def _seen(queries: Digits, keys: Digits, ctx: Context, there: Mapping[str, int]) -> int:
    """What this rank's queries see of the keys that are at the coordinates `there`.

    Local indices ascend as global ones do, so that the outermost digit that differs decides, among
    positions that are alike in what lies outside of it.
    """
    if queries != keys:
        return COMPARED
    here = ctx.coordinates
    for position, digit in enumerate(queries):
        if isinstance(digit, int) or here[digit] == there[digit]:
            continue
        outer = any(isinstance(d, int) for d in queries[:position])
        inner = any(isinstance(d, int) for d in queries[position + 1 :])
        later = here[digit] > there[digit]
        if outer and inner:
            return COMPARED
        if outer:
            return UP_TO if later else BEFORE
        return ALL if later else NOTHING
    return UP_TO


def _indices(ctx: Context, digits: Digits, there: Mapping[str, int]) -> Tensor:
    (size,) = global_shape((digits,), ctx.mesh)
    return take(torch.arange(size, device=ctx.device), (digits,), ctx.mesh, there)


def _compared(
    ctx: Context, queries: Digits, keys: Digits, members: list[dict[str, int]], q: Tensor
) -> tuple[Tensor, Tensor]:
    """Global indices of queries, and of each member's keys."""
    columns = torch.stack([_indices(ctx, keys, there) for there in members])
    return indices(ctx, queries), columns


def _none(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(0, dtype=torch.int64), q.new_empty(0, 0, dtype=torch.int64)


# The two passes.


def _forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, group: Group
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of the sum of exponentials per query."""
    total, sums = None, None
    for index, key, value in _around(k, v, blocks, group):
        if blocks.seen[index] == NOTHING:
            continue
        part, logs = _part(q, key, value, blocks, index)
        if total is None or sums is None:
            total, sums = part, logs
            continue
        both = torch.logaddexp(sums, logs)
        safe = both.masked_fill(both == float("-inf"), 0)  # where nothing was seen yet
        total = total * (sums - safe).exp().unsqueeze(-1) + part * (logs - safe).exp().unsqueeze(-1)
        sums = both
    assert total is not None, "queries see the block of their own rank"
    assert sums is not None
    return total.to(q.dtype).contiguous(), sums.contiguous()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    blocks: Blocks,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; those of blocks travel on with these."""
    of_q = torch.zeros_like(q, dtype=sums.dtype)
    whole = blocks.places is not None
    of_keys = (torch.zeros_like(k), torch.zeros_like(v)) if whole else None
    flat = torch.zeros(0)
    work: Work = DONE
    came = torch.zeros(0)
    for index, key, value in _around(k, v, blocks, group):
        own = None
        if blocks.seen[index] != NOTHING:
            mine, *own = _part_backward(grad, q, key, value, out, sums, blocks, index)
            of_q += mine
        if of_keys is not None:
            for gradient, added in zip(of_keys, own or (), strict=False):
                assert blocks.places is not None
                gradient.index_add_(-2, blocks.places[index], added.to(gradient.dtype))
            continue
        work.wait()
        flat = came if came.numel() else k.new_zeros(k.numel() + v.numel())
        if own is not None:
            flat = flat + torch.cat([x.to(k.dtype).reshape(-1) for x in own])
        came, work = _shift(flat, group)
    if of_keys is not None:
        return of_q.to(q.dtype), *of_keys
    work.wait()
    return of_q.to(q.dtype), *_unpacked(came, k, v)


def _around(
    k: Tensor, v: Tensor, blocks: Blocks, group: Group
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each block with its index, own keys first; the next one comes while one is used."""
    if blocks.places is not None:
        for index, places in enumerate(blocks.places):
            if blocks.seen[index] != NOTHING:
                yield index, k.index_select(-2, places), v.index_select(-2, places)
        return
    flat, size = torch.cat([k.reshape(-1), v.reshape(-1)]), group.size
    for step in range(size):
        came, work = _shift(flat, group) if step + 1 < size else (flat, DONE)
        yield (group.index - step) % size, *_unpacked(flat, k, v)
        work.wait()
        flat = came


def _unpacked(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the two halves of a tensor that travels, in the shapes of keys and values."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def _shift(flat: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Start to send a tensor to the next member, and to receive that of the one before."""
    size, received = group.size, torch.empty_like(flat)
    outgoing, incoming = [0] * size, [0] * size
    outgoing[(group.index + 1) % size] = incoming[(group.index - 1) % size] = flat.numel()
    return received, group.all_to_all(received, flat, incoming, outgoing)


# One block.


def _part(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, index: int) -> tuple[Tensor, Tensor]:
    """Result and logarithms of sums over one block, at least in float32."""
    k, v, seen = _heads(q, k), _heads(q, v), blocks.seen[index]
    if _has_kernel(q, v, seen):
        causal, scale = seen == UP_TO, blocks.scale
        if q.is_cuda:
            out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, scale=scale
            )
        else:
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, scale=scale
            )
        return out.to(sums.dtype), sums
    scores = _scores(q, k, blocks, index)
    sums = scores.logsumexp(-1)
    return _shares(scores, sums) @ v.to(scores.dtype), sums


def _part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    blocks: Blocks,
    index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block gives to the gradient of queries, and the gradients of its keys and values.

    `out` and `sums` are those of all blocks, so that probabilities are those of the whole.
    """
    heads, seen = k.shape, blocks.seen[index]
    k, v = _heads(q, k), _heads(q, v)
    if _has_kernel(q, v, seen):
        of_q, of_k, of_v = _kernel_backward(grad, q, k, v, out, sums, seen == UP_TO, blocks.scale)
    else:
        shares = _shares(_scores(q, k, blocks, index), sums)
        wide = grad.to(shares.dtype)
        of_shares = wide @ v.to(shares.dtype).mT
        lost = (wide * out).sum(-1, keepdim=True)
        of_scores = shares * (of_shares - lost) * blocks.scale
        of_q, of_k = of_scores @ k.to(shares.dtype), of_scores.mT @ q.to(shares.dtype)
        of_v = shares.mT @ wide
    return of_q.to(sums.dtype), _of_groups(of_k, heads), _of_groups(of_v, heads)


def _kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor]
    if not q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, 0.0, causal, scale=scale
        )
        return found
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is not
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, sums, None, None, q.shape[-2], k.shape[-2], 0.0, causal, seed,
        torch.zeros((), dtype=torch.uint64, device=q.device), scale=scale,
    )  # fmt: skip
    return found


def _has_kernel(q: Tensor, v: Tensor, seen: int) -> bool:
    """Whether one of torch's fused kernels takes a block."""
    if q.dim() != 4 or q.shape[-1] != v.shape[-1] or seen not in (ALL, UP_TO):
        return False
    if not q.is_cuda:
        return q.is_cpu
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0


def _scores(q: Tensor, k: Tensor, blocks: Blocks, index: int) -> Tensor:
    """Scores of a block, -inf where a query does not see a key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * blocks.scale
    seen = blocks.seen[index]
    if seen == ALL:
        return scores
    if seen == COMPARED:
        kept = blocks.rows.unsqueeze(1) >= blocks.columns[index]
    else:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        kept = kept.tril(-1 if seen == BEFORE else 0)
    return scores.masked_fill(~kept, float("-inf"))


def _shares(scores: Tensor, sums: Tensor) -> Tensor:
    """Probabilities, zero for a query that sees nothing."""
    sums = sums.masked_fill(sums == float("-inf"), 0)
    return (scores - sums.unsqueeze(-1)).exp()


def _heads(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values with a head for each of the queries'."""
    if x.dim() < 3 or x.shape[-3] == q.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _of_groups(gradient: Tensor, shape: torch.Size) -> Tensor:
    """A gradient summed over the heads that share a key head, of which there are `shape[-3]`."""
    if gradient.dim() < 3 or gradient.shape[-3] == shape[-3]:
        return gradient
    split = (*gradient.shape[:-3], shape[-3], -1, *gradient.shape[-2:])
    return gradient.reshape(split).sum(-3)


# For autograd, and as one operator for torch.compile, as other exchanges are.


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, group: Group) -> Tensor:
        out, sums = _forward(q, k, v, blocks, group)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.blocks, ctx.group = blocks, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        found = _backward(gradients[0], q, k, v, out, sums, ctx.blocks, ctx.group)
        return (*found, None, None)


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, group: Group) -> Tensor:
    if not torch.compiler.is_compiling():
        made: Tensor = _Attend.apply(q, k, v, blocks, group)  # type: ignore[no-untyped-call]
        return made
    named, members, rank = "", [0], 0
    if isinstance(group, DistributedGroup):
        named, members, rank = group.name, list(group.members), group.rank
    places = _none(q)[1] if blocks.places is None else blocks.places
    out, _ = torch.ops.parloom.attend(
        q, k, v, blocks.seen, blocks.rows, blocks.columns, places, blocks.scale, named, members,
        rank,
    )  # fmt: skip
    compiled: Tensor = out
    return compiled


def _given(
    seen: list[int], rows: Tensor, columns: Tensor, places: Tensor, scale: float, name: str,
    members: list[int], rank: int,
) -> tuple[Blocks, Group]:  # fmt: skip
    """What an operator was given, as values."""
    blocks = Blocks(seen, rows, columns, places if places.numel() else None, scale)
    return blocks, named_group(name, members, rank) if name else SingleGroup()


@custom_op("parloom::attend", mutates_args=())
def _attend_op(  # noqa: PLR0913, PLR0917 - an operator's schema has no structures
    q: Tensor, k: Tensor, v: Tensor, seen: list[int], rows: Tensor, columns: Tensor,
    places: Tensor, scale: float, name: str, members: list[int], rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(q, k, v, *_given(seen, rows, columns, places, scale, name, members, rank))


@custom_op("parloom::attend_backward", mutates_args=())
def _attend_backward_op(  # noqa: PLR0913, PLR0917
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seen: list[int],
    rows: Tensor, columns: Tensor, places: Tensor, scale: float, name: str, members: list[int],
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = _given(seen, rows, columns, places, scale, name, members, rank)
    of_q, of_k, of_v = _backward(grad, q, k, v, out, sums, *given)
    return of_q, of_k.clone(), of_v.clone()  # of one tensor that came, which an operator refuses


@_attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide)


@_attend_backward_op.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, seen, rows, columns, places, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, rows, columns, places)
    ctx.seen, ctx.rest = seen, rest


def _of_op(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, sums, rows, columns, places = ctx.saved_tensors
    found = torch.ops.parloom.attend_backward(
        grad.contiguous(), q, k, v, out, sums, ctx.seen, rows, columns, places, *ctx.rest
    )
    return (*found, *(None for _ in range(8)))


_attend_op.register_autograd(_of_op, setup_context=_keep)
