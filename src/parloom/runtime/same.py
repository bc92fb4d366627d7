"""Whether all ranks hold the same values, told from two sums per tensor."""

from collections.abc import Iterable

import torch
from torch import Tensor

from parloom.errors import LaunchError
from parloom.runtime.comm import Comm

PIECE = 1 << 22  # elements that are float64 at a time
# Ranks may sum in another order (threads, vector widths): four thousand roundings of float64. One
# float32 that differs in its last bit is still seen among tens of thousands like it.
TOLERANCE = 1e-12


def check_same_values(
    comm: Comm, tensors: Iterable[tuple[str, Tensor]], device: torch.device | None = None
) -> None:
    """Raise `LaunchError` that names the first of `tensors` that is not equal on all ranks.

    Every rank passes the same names in the same order. Compared are the sum and the sum of squares
    of the finite elements in float64, and how many are NaN and infinite; an exchange of elements
    goes unnoticed, and so does a tensor on the meta device. `device` is where collectives take
    their tensors, the CPU if not given.
    """
    group = comm.group(comm.mesh.space)
    if group.size == 1:
        return
    names, rows = [], []
    for name, tensor in tensors:
        names.append(name)
        rows.append(_sums(tensor.detach()))
    if not names:
        return
    low = torch.stack(rows).to(device or "cpu")
    high = low.clone()
    works = [group.all_reduce(low, "min"), group.all_reduce(high, "max")]
    for work in works:
        work.wait()
    least, most = low.cpu(), high.cpu()
    squares, count = most[:, 1], most[:, 4]
    # The sum of magnitudes is at most sqrt(count * squares).
    allowed = torch.zeros_like(most)
    allowed[:, 0] = TOLERANCE * count.sqrt() * squares.sqrt()
    allowed[:, 1] = TOLERANCE * squares
    differ = (most - least > allowed).any(1).nonzero().flatten().tolist()
    if differ:
        others = len(differ) - 1
        more = f" and {others} more tensor{'s' if others > 1 else ''}" if others else ""
        verb = "differ" if others else "differs"
        raise LaunchError(
            f"{names[differ[0]]}{more} {verb} between ranks; give every rank the same weights:"
            " load the same file, or call torch.manual_seed before the model is made"
        )


def _sums(tensor: Tensor) -> Tensor:
    """Sum and sum of squares of the finite elements, numbers of NaNs, infinities and elements."""
    totals = torch.zeros(5, dtype=torch.float64)
    if tensor.is_meta:
        return totals
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    for piece in torch.split(flat, PIECE):
        values = piece.to(torch.float64)
        finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        counts = (values.isnan().sum(), values.isinf().sum(), torch.tensor(values.numel()))
        sums = (finite.sum(), finite.square().sum())
        totals += torch.stack([n.to("cpu", torch.float64) for n in (*sums, *counts)])
    # Sums that overflow are as good as any number, but must compare.
    return totals.nan_to_num()
