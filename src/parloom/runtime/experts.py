"""Mixture of experts on one rank: rows of its own experts, sorted by expert and then by token.

`places` holds, per row, expert x pairs + pair with pair = token x slots + slot, in global indices
and ascending, so everything about a row can be read from it.

Where tokens and experts are sharded over the same axes, rows are routed: `route` sends every row to
the rank that has its expert, `unroute` sends it back. Ranks tell each other first how many rows
come, so any routing is exact: no row is padded or dropped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, get_ctx

from parloom.runtime.comm import DistributedGroup, Group
from parloom.runtime.context import Context
from parloom.runtime.moves import Place, named_group, primitive_of
from parloom.runtime.operators import local_positions
from parloom.runtime.sharding import Digit, global_shape, indices

Digits = tuple[Digit, ...]
ALIGNED_BYTES = 16  # what the kernel of `F.grouped_mm` asks of rows


def dispatch(
    tokens: Tensor, index: Tensor, experts: Tensor, total: int, ctx: Context, digits: Digits
) -> tuple[Tensor, Tensor]:
    """Rows and places of the (token, slot) pairs whose expert is among `experts`.

    `index` [token, slot] names the expert of every pair, `total` is how many experts there are, and
    `digits` are those of the tokens' dim.
    """
    slots = index.shape[1]
    keys = _places(index, ctx, digits).flatten()
    if len(experts) == total:
        places, chosen = keys.sort()
    else:
        own = torch.isin(index, experts).flatten().nonzero().squeeze(1)
        places, order = keys[own].sort()
        chosen = own[order]
    return tokens[chosen // slots], places


def collect(rows: Tensor, places: Tensor, weights: Tensor, ctx: Context, digits: Digits) -> Tensor:
    """Per token the sum of its slots' rows, each times its weight; rows that are not here are zero.

    `weights` is [token, slot].
    """
    slots = weights.shape[1]
    pair = places % _pairs(ctx, digits, slots)
    if any(isinstance(digit, str) for digit in digits):
        token, _ = local_positions(pair // slots, ctx, digits)
        pair = token * slots + pair % slots
    return _summed(rows, pair, weights)


def _summed(rows: Tensor, pair: Tensor, weights: Tensor) -> Tensor:
    """Per token the sum of its rows times their weights; `pair` is each row's place in `weights`
    [token, slot].
    """
    weighted = rows * weights.flatten()[pair].unsqueeze(-1)
    found = weighted.new_zeros(weights.numel(), rows.shape[1])
    found.index_copy_(0, pair, weighted)
    return found.view(*weights.shape, rows.shape[1]).sum(1)


def route(
    tokens: Tensor,
    index: Tensor,
    ctx: Context,
    digits: Digits,
    experts: Digits,
    axes: tuple[str, ...],
) -> tuple[Tensor, Tensor]:
    """As `dispatch`, for the pairs of all ranks along `axes`, each of which has tokens of its own.

    `digits` are those of the tokens' dim and `experts` those of the experts'; both have `axes`.
    """
    group = ctx.group(axes)
    places, chosen, sent = _outgoing(index, ctx, digits, experts, axes)
    received = primitive_of("all_to_all")(sent, group, Place())
    arrived = _send(places, sent, received, None, group)
    places, order = arrived.sort()
    rows = _send(tokens[chosen // index.shape[1]], sent, received, places, group)
    return rows[order], places


def unroute(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    index: Tensor,
    ctx: Context,
    digits: Digits,
    experts: Digits,
    axes: tuple[str, ...],
) -> Tensor:
    """As `collect`, for rows that `route` made: each goes back to the rank that has its token."""
    group = ctx.group(axes)
    slots = weights.shape[1]
    _, chosen, received = _outgoing(index, ctx, digits, experts, axes)
    token = places % _pairs(ctx, digits, slots) // slots
    member, order = _member(token, ctx, digits, axes).sort(stable=True)
    sent = _counts(member, group.size)
    return _summed(_send(rows[order], sent, received, chosen, group), chosen, weights)


def _outgoing(
    index: Tensor, ctx: Context, digits: Digits, experts: Digits, axes: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank sends along `axes`: the places of its rows, the position of each in `index`
    [token, slot], both by receiver and then by place, and the number of rows per receiver.

    Rows of experts that other ranks have on axes beside `axes` are not among them.
    """
    span = global_shape((experts,), ctx.mesh)[0] * _pairs(ctx, digits, index.shape[1])
    expert, places = index.flatten(), _places(index, ctx, digits).flatten()
    others = tuple(ctx.mesh[d].size if d in axes else d for d in experts)
    own = local_positions(expert, ctx, others)[1].nonzero().squeeze(1)
    keys, order = (_member(expert[own], ctx, experts, axes) * span + places[own]).sort()
    return keys % span, own[order], _counts(keys // span, ctx.group(axes).size)


def _counts(member: Tensor, size: int) -> Tensor:
    """How often each of `size` members stands in the ascending `member`."""
    return torch.searchsorted(member, torch.arange(size + 1, device=member.device)).diff()


def _places(index: Tensor, ctx: Context, digits: Digits) -> Tensor:
    """The places of all pairs of local tokens, [token, slot]."""
    slots = index.shape[1]
    token = indices(ctx, digits).unsqueeze(1)
    pair = token * slots + torch.arange(slots, device=index.device)
    return index * _pairs(ctx, digits, slots) + pair


def _member(index: Tensor, ctx: Context, digits: Digits, axes: tuple[str, ...]) -> Tensor:
    """Which member of the group of `axes` has each global index of a dim of these digits."""
    strides, stride = {}, 1
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= ctx.mesh[axis].size
    member, unit = torch.zeros_like(index), 1
    for digit in reversed(digits):
        size = digit if isinstance(digit, int) else ctx.mesh[digit].size
        if digit in axes:
            member = member + index // unit % size * strides[str(digit)]
        unit *= size
    return member


def grouped_mm(
    rows: Tensor, matrices: Tensor, places: Tensor, experts: Tensor, pairs: int
) -> Tensor:
    """Each row times the matrix of its expert; `matrices` are those of `experts`."""
    ends = torch.searchsorted(places, (experts + 1) * pairs).to(torch.int32)
    result: Tensor = torch.ops.parloom.grouped_mm(rows, matrices, ends)
    return result


def expert_rows(table: Tensor, places: Tensor, experts: Tensor, pairs: int) -> Tensor:
    """The row of each row's expert in `table` [expert, width]."""
    return table[torch.searchsorted(experts, places // pairs)]


def _pairs(ctx: Context, digits: Digits, slots: int) -> int:
    return global_shape((digits,), ctx.mesh)[0] * slots


class _Send(torch.autograd.Function):
    """Rows that go to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Tensor, received: Tensor, like: Tensor, group: Group
    ) -> Tensor:
        ctx.save_for_backward(rows.new_empty(len(rows), 0), sent, received)
        ctx.group = group
        return _exchanged(rows, sent, received, like, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        like, sent, received = ctx.saved_tensors
        return _exchanged(gradients[0], received, sent, like, ctx.group), None, None, None, None


def _send(
    rows: Tensor, sent: Tensor, received: Tensor, like: Tensor | None, group: Group
) -> Tensor:
    """Rows that members of `group` have for this one, in their order.

    `sent` and `received` are numbers of rows by member; as many come as `like` has, where given.
    """
    if like is None or not (rows.requires_grad and torch.is_grad_enabled()):
        return _exchanged(rows, sent, received, like, group)
    made: Tensor = _Send.apply(rows, sent, received, like, group)  # type: ignore[no-untyped-call]
    return made


def _exchanged(
    rows: Tensor, sent: Tensor, received: Tensor, like: Tensor | None, group: Group
) -> Tensor:
    if not torch.compiler.is_compiling():
        return _exchange(rows, sent, received, group)
    assert isinstance(group, DistributedGroup)
    size = -1 if like is None else like.shape[0]
    made: Tensor = torch.ops.parloom.exchange_rows(
        rows, sent, received, size, group.name, list(group.members), group.rank
    )
    return made


def _exchange(rows: Tensor, sent: Tensor, received: Tensor, group: Group) -> Tensor:
    sizes, counts = torch.stack([sent, received]).tolist()
    result = rows.new_empty(sum(counts), *rows.shape[1:])
    group.all_to_all(result, rows.contiguous(), counts, sizes).wait()
    return result


# For torch.compile an exchange is one operator, as other moves are; `size` rows come, or so many as
# the others have where it is -1.


@custom_op("parloom::exchange_rows", mutates_args=())
def _exchange_rows(
    rows: Tensor, sent: Tensor, received: Tensor, size: int, group: str, members: list[int],
    rank: int,
) -> Tensor:  # fmt: skip
    return _exchange(rows, sent, received, named_group(group, members, rank))


@_exchange_rows.register_fake
def _(
    rows: Tensor, sent: Tensor, received: Tensor, size: int, group: str, members: list[int],
    rank: int,
) -> Tensor:  # fmt: skip
    come = get_ctx().new_dynamic_size() if size == -1 else size
    return rows.new_empty(come, *rows.shape[1:])


# The product is one operator for autograd and for torch.compile, which need not look into a loop
# whose bounds depend on the tokens.


@custom_op("parloom::grouped_mm", mutates_args=())
def _grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if _kernel_takes(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    result = rows.new_empty(len(rows), matrices.shape[2])
    stop = 0
    for matrix, start, stop in _groups(matrices, ends):
        torch.mm(rows[start:stop], matrix, out=result[start:stop])
    result[stop:] = 0  # rows of no expert
    return result


@custom_op("parloom::grouped_mm_backward", mutates_args=())
def _grouped_mm_backward(
    rows: Tensor, matrices: Tensor, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    if _kernel_takes(rows, matrices):
        of_rows = F.grouped_mm(grad, matrices.transpose(1, 2), offs=ends)
        if matrices.stride(1) == 1:  # transposed, as `empty_like` would make it
            return of_rows, F.grouped_mm(grad.t(), rows, offs=ends).transpose(1, 2)
        return of_rows, F.grouped_mm(rows.t(), grad, offs=ends)
    of_rows, of_matrices = torch.zeros_like(rows), torch.empty_like(matrices)
    for i, (matrix, start, stop) in enumerate(_groups(matrices, ends)):
        torch.mm(grad[start:stop], matrix.t(), out=of_rows[start:stop])
        torch.mm(rows[start:stop].t(), grad[start:stop], out=of_matrices[i])
    return of_rows, of_matrices


def _groups(matrices: Tensor, ends: Tensor) -> list[tuple[Tensor, int, int]]:
    """(matrix, first row, row after the last) of every expert."""
    stops: list[int] = ends.tolist()
    return list(zip(matrices.unbind(), [0, *stops[:-1]], stops, strict=True))


def _kernel_takes(rows: Tensor, matrices: Tensor) -> bool:
    if not rows.is_cuda or not rows.dtype == matrices.dtype == torch.bfloat16:
        return False
    aligned = ALIGNED_BYTES // rows.element_size()
    fits = len(rows) > 0 and all(n % aligned == 0 for n in matrices.shape[1:])
    return fits and torch.cuda.get_device_capability(rows.device) >= (8, 0)


@_grouped_mm.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_grouped_mm_backward.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(matrices)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = ctx.saved_tensors
    return (*torch.ops.parloom.grouped_mm_backward(rows, matrices, ends, grad), None)


_grouped_mm.register_autograd(_backward, setup_context=_keep)
