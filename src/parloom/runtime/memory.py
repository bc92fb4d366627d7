"""Which tensors lie in one memory: autograd may give several readers views of one gradient."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """The memory that a tensor lies in; of sparse ones nothing is shared."""
    found: int = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
    return found


def apart(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients, copied where they lie in the memory of `others`: one is changed in place while
    the other is still read.
    """
    taken = {memory_of(other) for other in others if other is not None}
    return [g.clone() if g is not None and memory_of(g) in taken else g for g in gradients]


def separate(leaves: Iterable[Tensor]) -> None:
    """Give each gradient that autograd left memory of its own, before others are added to it."""
    seen: set[int] = set()
    for leaf in leaves:
        if leaf.grad is not None:
            if memory_of(leaf.grad) in seen:
                leaf.grad = leaf.grad.clone()
            seen.add(memory_of(leaf.grad))
