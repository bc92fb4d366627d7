"""The memory that operators allocate, counted by what torch dispatches: the same in every run."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parloom.runtime import Trainer


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of storages that operators have made: `held` now, and `most` at once.

    What a kernel needs while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor.untyped_storage(), 0)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            self._note(storage, storage.nbytes())
        self.most = max(self.most, self.held)
        return result

    def _note(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Count a storage that is new; one that an operator reads first was there before."""
        key = storage._cdata
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.held -= size_bytes

        self._known[key] = weakref.ref(storage, freed)
        self.held += size_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def allocated(trainer: Trainer, batch: dict[str, Tensor]) -> int:
    """The most bytes that a step holds above what is there when it begins."""
    found = Allocations()
    with found:
        trainer.step(batch)
    return found.most
