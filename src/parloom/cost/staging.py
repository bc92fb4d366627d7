"""Memory that a movement of an activation needs beside its operand and its result.

What `runtime.moves` allocates on the way: rows per rank copied out of the operand, received rows
that are joined into the result, and what the back end copies itself.
"""

from math import prod

from parloom.ir.layout import Shape
from parloom.ir.moves import Step


def staging_bytes(
    primitive: str,
    step: Step,
    ranks: int,
    source: tuple[Shape, int],
    target: tuple[Shape, int],
    scratch_bytes: int = 0,
    undone: bool = False,
) -> int:
    """Bytes that `primitive` takes while it runs, the result apart.

    `source` and `target` are local shapes with their bytes; `undone`: it is the backward primitive
    of `step`; `scratch_bytes` are the back end's.
    """
    (before, source_bytes), (after, target_bytes) = source, target
    here = step.dim, step.inner
    if primitive == "all_gather":  # the back end is through when the rows are joined
        return max(_inside(after, *here, ranks) * target_bytes, scratch_bytes)
    if primitive == "reduce_scatter":
        return _inside(before, *here, ranks) * source_bytes + scratch_bytes
    if primitive == "all_to_all":
        cut, join = (here, step.split) if undone else (step.split, here)
        sent = _inside(before, *cut, ranks) * source_bytes
        return sent + _inside(after, *join, ranks) * target_bytes + scratch_bytes
    if primitive in ("halo_exchange", "halo_add"):  # rows to send and received, dim 0 in front
        moved = abs(target_bytes - source_bytes)
        return 2 * moved + (prod(after[: step.dim]) > 1) * target_bytes + scratch_bytes
    return 0


def _inside(shape: Shape, dim: int, inner: int, ranks: int) -> bool:
    """Whether a digit of `ranks` is not the outermost in memory, so that its rows are copies."""
    return prod(shape[:dim]) * (shape[dim] // (ranks * inner)) > 1
