"""Which tensors lie in one memory: autograd may give several readers views of one gradient."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Extent = tuple[int, int]


def memory_of(tensor: Tensor) -> int:
    """The memory that a tensor lies in; of sparse ones nothing is shared."""
    found: int = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
    return found


def apart(
    gradients: Sequence[Tensor | None], others: Iterable[Tensor | None]
) -> list[Tensor | None]:
    """Gradients, copied where they have elements in the memory of those of `others`: one is changed
    in place while the other is still read.
    """
    taken: dict[int, list[Extent]] = {}
    for other in others:
        if other is not None:
            taken.setdefault(memory_of(other), []).append(_extent(other))
    return [g.clone() if g is not None and _meets(g, taken) else g for g in gradients]


def separate(leaves: Iterable[Tensor]) -> None:
    """Give each gradient that autograd left memory of its own, before others are added to it."""
    seen: dict[int, list[Extent]] = {}
    for leaf in leaves:
        if leaf.grad is not None:
            if _meets(leaf.grad, seen):
                leaf.grad = leaf.grad.clone()
            seen.setdefault(memory_of(leaf.grad), []).append(_extent(leaf.grad))


def _meets(tensor: Tensor, taken: dict[int, list[Extent]]) -> bool:
    first, last = _extent(tensor)
    known = taken.get(memory_of(tensor), ())
    return any(first < end and start < last for start, end in known)


def _extent(tensor: Tensor) -> Extent:
    """The bytes of its memory from the first element of a tensor to its last one."""
    if tensor.layout is not torch.strided:
        return 0, 1
    if not tensor.numel():
        return 0, 0
    steps = ((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    width, start = tensor.itemsize, int(tensor.storage_offset())
    return start * width, (start + sum(steps) + 1) * width
