"""Gradients stored in chunks: reduced in every microbatch, accumulated by their owners only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parloom.runtime.chunks import Pool, layout
from parloom.runtime.comm import Comm, Work
from parloom.runtime.program import StepNode
from parloom.runtime.sharded_parameter import ShardedParameter

Path = tuple[StepNode, ...]


class ChunkedReduction:
    """Parameters of equal storage whose gradients run through the same `nodes` together.

    A reduce-scatter over the storage axes, then an all-reduce over others. Without the first one
    (where gradients are equal along a storage axis) nothing can be scattered: the gradients are
    all-reduced, and each rank keeps its chunk.
    """

    def __init__(
        self, helds: list[ShardedParameter], nodes: Path, comm: Comm, pool: Pool, dtype: torch.dtype
    ) -> None:
        axes = {node.kind: node.axes for node in nodes}
        self.helds = helds
        self.pool = pool
        self.dtype = dtype
        self.parts = helds[0].parts
        self.index = helds[0].index
        self.scatters = "reduce_scatter" in axes
        self.scatter = comm.group(axes.get("reduce_scatter", ()))
        self.rest = comm.group(axes.get("all_reduce", ()))
        self.sections, self.total = layout(
            [(held.home, held.spec.storage.dim) for held in helds], self.parts
        )


class _Flight:
    """One reduction under way."""

    def __init__(self, kind: ChunkedReduction, gradients: Sequence[Tensor | None]) -> None:
        self._kind = kind
        self._reached = [gradient is not None for gradient in gradients]
        self._staging = kind.pool.take(kind.parts * kind.total, kind.dtype)
        buffer = self._staging.view(kind.parts, kind.total)
        for section, gradient in zip(kind.sections, gradients, strict=True):
            if gradient is not None:
                section.pack(gradient, buffer)
        self._chunks = torch.empty(kind.total, dtype=kind.dtype, device=kind.pool.device)
        self._work: Work = (
            kind.scatter.reduce_scatter(self._chunks, buffer)
            if kind.scatters
            else kind.rest.all_reduce(self._staging)
        )
        self._proceeded = not kind.scatters or kind.rest.size == 1

    def proceed(self) -> None:
        """Launch the second collective, where there is one, when the first is over."""
        if not self._proceeded:
            self._work.wait()
            self._work = self._kind.rest.all_reduce(self._chunks)
            self._proceeded = True

    def land(self) -> None:
        """Wait, and hand every owner its chunk."""
        self.proceed()
        self._work.wait()
        kind = self._kind
        if not kind.scatters:
            self._chunks.copy_(self._staging.view(kind.parts, kind.total)[kind.index])
        kind.pool.give(self._staging)
        for section, held, reached in zip(kind.sections, kind.helds, self._reached, strict=True):
            if reached:
                held.add_gradient(section.part(self._chunks, kind.index))


class Traffic:
    """The chunked reductions under way, oldest first; at most two hold staging memory."""

    def __init__(self) -> None:
        self._flights: list[_Flight] = []

    def launch(self, kind: ChunkedReduction, gradients: Sequence[Tensor | None]) -> None:
        """Start to reduce home-shard gradients; None where the loss does not reach a parameter."""
        for flight in self._flights:
            flight.proceed()
        while len(self._flights) > 1:
            self._flights.pop(0).land()
        self._flights.append(_Flight(kind, gradients))

    def land(self) -> None:
        """Wait for all of them."""
        while self._flights:
            self._flights.pop(0).land()
