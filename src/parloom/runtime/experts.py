"""Mixture of experts on one rank: rows of its own experts, sorted by expert and then by token.

`places` holds, per row, expert x pairs + pair with pair = token x slots + slot, in global indices
and ascending, so everything about a row can be read from it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from parloom.runtime.context import Context
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
    token = indices(ctx, digits).unsqueeze(1)
    pair = token * slots + torch.arange(slots, device=index.device)
    keys = (index * _pairs(ctx, digits, slots) + pair).flatten()
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
    weighted = rows * weights.flatten()[pair].unsqueeze(-1)
    found = weighted.new_zeros(weights.numel(), rows.shape[1])
    found.index_copy_(0, pair, weighted)
    return found.view(-1, slots, rows.shape[1]).sum(1)


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
