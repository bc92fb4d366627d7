"""Recomputation by value: what autograd saved of dropped memory is made again when it is asked for.

Autograd saves a result inside of the operator that makes it, before generated code sees it. So
everything that a block saves is held until its forward pass is over. Then what lies in the memory
of a dropped value becomes a place in that memory; and what an operator saves that is made again
becomes a number: whatever it is, the operator will save it again. The first one that the backward
pass asks for makes all of them again, and each is freed as autograd frees it.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parloom.errors import VerifyError
from parloom.runtime.saved import Saved

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


class _Inside(NamedTuple):
    """What an operator that is made again saves: which of all that it does in which part."""

    part: int
    number: int
    size: tuple[int, ...]
    dtype: torch.dtype


class Parts:
    """Which part of a block that is made again is run, for the first time or for the second."""

    def __init__(self) -> None:
        self._part: int | None = None
        self._count = 0

    @contextmanager
    def run(self, part: int) -> Iterator[None]:
        """Within this context runs a part."""
        self._part, self._count = part, 0
        try:
            yield
        finally:
            self._part = None

    def next(self, tensor: Tensor) -> _Inside | None:
        """Which one a tensor is that an operator saves; None outside of all parts."""
        if self._part is None:
            return None
        self._count += 1
        return _Inside(self._part, self._count, tuple(tensor.shape), tensor.dtype)


class _Saved(Saved):
    """A tensor that autograd saves: `packed`, or None while it is to be made again from `place`."""

    __slots__ = ("inside", "place")

    def __init__(self, packed: Any, inside: _Inside | None) -> None:
        super().__init__(packed)
        self.inside = inside
        self.place: _Place | _Inside | None = None


class Remaking:
    """What one call saves; `pack` and `unpack` are the hooks that it would have had otherwise.

    What is saved refers to it, and it refers to nothing that refers to it.
    """

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], parts: Parts
    ) -> None:
        self._pack, self._unpack, self._parts = pack, unpack, parts
        self._saved: list[_Saved] = []
        self._waiting: list[weakref.ref[_Saved]] = []
        self._kept: list[tuple[Any, bool]] = []
        self._again: Again | None = None

    def saving(self) -> saved_tensors_hooks:
        """Within this context autograd saves what can be dropped afterwards."""
        return saved_tensors_hooks(self._save, self._restore)

    def drop(self, made: Made, again: Again) -> None:
        """The forward pass is over: let go of what `again` makes of `made.kept`."""
        memory = {_memory(t): i for i, t in enumerate(made.dropped)}
        kept = {_memory(t) for t in made.kept}
        for saved in self._saved:
            address = _memory(saved.packed)
            if saved.inside is None and address in memory:
                saved.place = _place(saved.packed, memory[address])
            elif address not in kept:
                saved.place = saved.inside
            if saved.place is not None:
                saved.packed = None
                self._waiting.append(weakref.ref(saved))
        self._saved = []
        if self._waiting:
            # Detached: what is saved must not refer to the graph that it is saved in.
            self._kept = [(self._pack(t.detach()), t.requires_grad) for t in made.kept]
            self._again = again

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self._pack(tensor), self._parts.next(tensor))
        if isinstance(saved.packed, Tensor):
            self._saved.append(saved)
        return saved

    def _restore(self, saved: _Saved) -> Tensor:
        saved.check()
        if saved.packed is None:
            self._make()
        return self._unpack(saved.packed)

    def _make(self) -> None:
        assert self._again is not None
        alive = (saved for reference in self._waiting if (saved := reference()) is not None)
        waiting = [saved for saved in alive if not saved.gone]
        wanted = {saved.place for saved in waiting}
        inside: dict[_Inside, Tensor] = {}

        def keep(tensor: Tensor) -> None:
            place = self._parts.next(tensor)
            if place is not None and place in wanted:
                inside[place] = tensor.detach()

        kept = [self._unpack(p).detach().requires_grad_(needed) for p, needed in self._kept]
        # As in the forward pass: torch may choose other kernels where nothing needs a gradient.
        with torch.enable_grad(), saved_tensors_hooks(keep, _refuse):
            made = self._again(*kept)
        for saved in waiting:
            if isinstance(saved.place, _Place):
                saved.packed = saved.place.of(made[saved.place.value].detach())
            elif saved.place is not None and saved.place in inside:
                saved.packed = inside[saved.place]
            else:
                raise VerifyError(f"an operator that was run again did not save {saved.place}")
        self._waiting, self._kept, self._again = [], [], None


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor lies in, of all that is there: empty ones have no address.

    Ranks may have nothing of a tensor (rows of an expert), and must make the same again as others.
    """
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _place(tensor: Tensor, value: int) -> _Place | None:
    """Where a tensor lies in the memory of a dropped value."""
    storage = tensor.untyped_storage()
    # A view that negates when it is read is more than a place.
    if tensor.is_conj() or tensor.is_neg():
        return None
    offset, size, stride = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _Place(value, int(offset), size, stride, tensor.dtype, storage.nbytes())


def _refuse(packed: None) -> Tensor:
    raise VerifyError("a backward pass went through values that were made again")
