"""Recomputation of whole calls: all that autograd saves is dropped, and made again once.

The first tensor that a backward pass asks for runs the call again, up to the last one that was
saved, and each is freed as autograd frees it. torch's own checkpoint runs a call again for every
backward pass through it, of which a pass in two halves has many.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parloom.errors import VerifyError
from parloom.runtime.saved import Saved

Run = Callable[..., Any]


class _Saved(Saved):
    """A tensor that autograd saves: `packed` once it was made again."""

    __slots__ = ("filled",)

    def __init__(self) -> None:
        super().__init__()
        self.filled = False


class _Done(Exception):
    """All that was saved has been made again."""


class Replay:
    """One call; `pack` and `unpack` are the hooks that it would have had otherwise.

    What is saved refers to it, and it refers to nothing that refers to it.
    """

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], run: Run
    ) -> None:
        self._pack, self._unpack, self._again = pack, unpack, run
        self._saved: list[weakref.ref[_Saved]] = []
        # Until all that was saved has been made again.
        self._inputs: list[tuple[Any, bool]] | None = None

    def run(self, *inputs: Tensor) -> Any:
        """The results of the call."""
        # Detached: what is saved must not refer to the graph that it is saved in.
        self._inputs = [(self._pack(t.detach()), t.requires_grad) for t in inputs]
        with saved_tensors_hooks(self._save, self._restore):
            return self._again(*inputs)

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved()
        self._saved.append(weakref.ref(saved))
        return saved

    def _restore(self, saved: _Saved) -> Tensor:
        saved.check()
        if self._inputs is not None:
            packed, self._inputs = self._inputs, None
            self._make(packed)
        if not saved.filled:
            raise VerifyError("a call that was run again did not save what it had saved before")
        return self._unpack(saved.packed)

    def _make(self, packed: list[tuple[Any, bool]]) -> None:
        count = 0

        def keep(tensor: Tensor) -> None:
            nonlocal count
            if count == len(self._saved):
                raise VerifyError("a call that was run again saved more than it had saved before")
            saved = self._saved[count]()
            count += 1
            if saved is not None and not saved.gone:
                saved.packed, saved.filled = self._pack(tensor.detach()), True
            if count == len(self._saved):
                raise _Done

        inputs = [self._unpack(p).detach().requires_grad_(needed) for p, needed in packed]
        try:
            # As in the forward pass: torch may choose other kernels where nothing needs a gradient.
            with torch.enable_grad(), saved_tensors_hooks(keep, _refuse):
                self._again(*inputs)
        except _Done:
            pass


def _refuse(packed: None) -> Tensor:
    raise VerifyError("a backward pass went through values that were made again")
