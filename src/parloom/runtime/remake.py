"""Recomputation by value: what autograd saved of dropped memory is made again when it is asked for.

Autograd saves a result inside of the operator that makes it, before generated code sees it. So
everything that a block saves is held until its forward pass is over; then what lies in the memory
of a dropped value becomes a place in that memory. The first one that the backward pass asks for
makes all of them again, and each is freed as autograd frees it.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parloom.errors import VerifyError

Again = Callable[..., tuple[Tensor, ...]]


class Made(NamedTuple):
    """What a block function returns that drops values: its results, the values that the dropped
    ones are made of beside its own weights, and those that are dropped.
    """

    results: Any
    kept: tuple[Tensor, ...]
    dropped: tuple[Tensor, ...]


class _Place(NamedTuple):
    """A tensor without its memory, which is that of the dropped value number `value`."""

    value: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int  # of the whole memory

    def of(self, made: Tensor) -> Tensor:
        """The tensor, in the memory of the value that was made again."""
        storage = made.untyped_storage()
        if storage.nbytes() != self.num_bytes:
            raise VerifyError(
                f"a value that was made again has {storage.nbytes()} bytes, and had"
                f" {self.num_bytes} when it was dropped"
            )
        empty = torch.empty(0, dtype=self.dtype, device=made.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class _Saved:
    """A tensor that autograd saves: `packed`, or None while it is to be made again at `place`."""

    __slots__ = ("__weakref__", "packed", "place")

    def __init__(self, packed: Any) -> None:
        self.packed = packed
        self.place: _Place | None = None


class Remaking:
    """What one call saves; `pack` and `unpack` are the hooks that it would have had otherwise."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self._unpack = pack, unpack
        self._saved: list[_Saved] = []
        self._waiting: list[weakref.ref[_Saved]] = []
        self._kept: list[tuple[Any, bool]] = []
        self._again: Again | None = None

    def saving(self) -> saved_tensors_hooks:
        """Within this context autograd saves what can be dropped afterwards."""
        return saved_tensors_hooks(self._save, self._restore)

    def drop(self, made: Made, again: Again) -> None:
        """The forward pass is over: let go of what `again` makes of `made.kept`."""
        memory = {t.untyped_storage().data_ptr(): i for i, t in enumerate(made.dropped)}
        for saved in self._saved:
            saved.place = _place(saved.packed, memory)
            if saved.place is not None:
                saved.packed = None
                self._waiting.append(weakref.ref(saved))
        self._saved = []
        if self._waiting:
            # Detached: what is saved must not refer to the graph that it is saved in.
            self._kept = [(self._pack(t.detach()), t.requires_grad) for t in made.kept]
            self._again = again

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self._pack(tensor))
        if isinstance(saved.packed, Tensor):
            self._saved.append(saved)
        return saved

    def _restore(self, saved: _Saved) -> Tensor:
        if saved.packed is None:
            self._make()
        return self._unpack(saved.packed)

    def _make(self) -> None:
        assert self._again is not None
        kept = [self._unpack(p).detach().requires_grad_(needed) for p, needed in self._kept]
        # As in the forward pass: torch may choose other kernels where nothing needs a gradient.
        with torch.enable_grad(), saved_tensors_hooks(_forget, _refuse):
            made = self._again(*kept)
        for reference in self._waiting:
            saved = reference()
            if saved is not None and saved.place is not None:
                saved.packed = saved.place.of(made[saved.place.value].detach())
        self._waiting, self._kept, self._again = [], [], None


def _place(tensor: Tensor, memory: dict[int, int]) -> _Place | None:
    """Where a tensor lies in dropped memory, by the address; None where it does not."""
    storage = tensor.untyped_storage()
    index = memory.get(storage.data_ptr())
    # A view that negates when it is read is more than a place.
    if index is None or not storage.nbytes() or tensor.is_conj() or tensor.is_neg():
        return None
    offset, size, stride = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _Place(index, int(offset), size, stride, tensor.dtype, storage.nbytes())


def _forget(tensor: Tensor) -> None:
    """Nothing goes backward through what is made again."""


def _refuse(packed: None) -> Tensor:
    raise VerifyError("a backward pass went through values that were made again")
