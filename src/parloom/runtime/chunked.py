"""Gradients that leave in chunks: scattered to their owners, and accumulated by them only.

A gradient is stored in chunks over axes G, its optimizer state over S, which begins with G. In
every microbatch a reduce-scatter over G leaves a chunk, which accumulates; once a step a
reduce-scatter over the other axes of S and an all-reduce over those that replicate the state leave
the owned chunk. Along an axis over which a gradient is not partial nothing is sent: each rank keeps
its chunk.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parloom.runtime.chunks import Pool, layout
from parloom.runtime.comm import Comm
from parloom.runtime.program import StepNode
from parloom.runtime.quantized import over
from parloom.runtime.sharded_parameter import ShardedParameter, owner_axes
from parloom.runtime.work import Work

Path = tuple[StepNode, ...]
Axes = tuple[str, ...]


class _Stage:
    """From chunks over `have` (or whole home shards) to chunks over `want`, by the collectives of
    `nodes`.
    """

    def __init__(
        self, helds: Sequence[ShardedParameter], have: Axes, want: Axes, nodes: Path, comm: Comm
    ) -> None:
        kinds = {node.kind: node for node in nodes}
        none = StepNode("REDUCE", "", ())
        scatter, rest = (kinds.get(kind, none) for kind in ("reduce_scatter", "all_reduce"))
        scattered, new, mesh = scatter.axes, want[len(have) :], comm.mesh
        self.scatter = over(comm.weights.group(scattered), scatter.dtype)
        self.rest = over(comm.weights.group(rest.axes), rest.dtype)
        self.align = max(scatter.align, rest.align)
        sections = (held.section(comm, have, want) for held in helds)
        self.sections, self.total = layout(sections, self.align)
        self.mine = mesh.index(new, comm.rank)
        # The chunks of those among whom this rank scatters: all, or those along its own ones.
        self.indices = [mesh.index(new, rank) for rank in mesh.group(scattered, comm.rank)]

    @property
    def num_collectives(self) -> int:
        return 1 + (self.rest.size > 1)

    @property
    def numel(self) -> int:
        """Elements of the chunks that a rank packs."""
        return len(self.indices) * self.total

    def pack(self, tensors: Sequence[Tensor | None], staging: Tensor) -> Tensor:
        """Flat `staging` memory as [indices, total], with their chunks."""
        staging = staging.view(len(self.indices), self.total)
        if self.align > 1:
            staging.zero_()
        for section, tensor in zip(self.sections, tensors, strict=True):
            if tensor is not None:
                section.pack(tensor, staging, self.indices)
        return staging


class ChunkedReduction:
    """Parameters of equal storage whose gradients run through the same nodes together.

    `each` runs in every microbatch, `once` in the last; one of them may be missing.
    """

    def __init__(
        self, helds: list[ShardedParameter], nodes: Path, comm: Comm, pool: Pool, dtype: torch.dtype
    ) -> None:
        self.helds = helds
        self.pool = pool
        self.dtype = dtype
        gradient, state = helds[0].spec.storage.gradient, owner_axes(helds[0].spec)
        early = tuple(node for node in nodes if node.when == "microbatch")
        late = tuple(node for node in nodes if node.when == "step")
        self.each = self.once = None
        if comm.mesh.size(gradient) > 1:
            self.each = _Stage(helds, (), gradient, early, comm)
        if late or comm.mesh.size(gradient) < comm.mesh.size(state):
            self.once = _Stage(helds, gradient, state, late, comm)

    def stages(self, last: bool) -> list[_Stage]:
        """Those that run in a microbatch."""
        return [stage for stage in (self.each, self.once if last else None) if stage is not None]


class _Flight:
    """One reduction under way; `collected`: of gradients that were there since other microbatches,
    so that staging memory takes the place of theirs.
    """

    def __init__(
        self,
        kind: ChunkedReduction,
        gradients: Sequence[Tensor | None],
        last: bool,
        collected: bool,
    ) -> None:
        self.kind, self.collected = kind, collected
        stages = kind.stages(last)
        staging = stages[0].pack(gradients, self._staging(stages[0]))
        for held, gradient in zip(kind.helds, gradients, strict=True):
            held.tell(gradient)
        reached = [gradient is not None for gradient in gradients]
        self._works = self._run(stages, staging, reached)
        del staging
        self._work = next(self._works)
        self._later = sum(stage.num_collectives for stage in stages) - 1

    def proceed(self) -> None:
        """Launch all collectives but the first, each when the one before is over."""
        while self._later:
            self._work.wait()
            self._work = next(self._works)
            self._later -= 1

    def land(self) -> None:
        """Wait, and hand every owner its chunk."""
        self.proceed()
        self._work.wait()
        next(self._works, None)

    def _staging(self, stage: _Stage) -> Tensor:
        pool, dtype = self.kind.pool, self.kind.dtype
        if self.collected:
            return torch.empty(stage.numel, dtype=dtype, device=pool.device)
        return pool.take(stage.numel, dtype)

    def _run(
        self, stages: list[_Stage], staging: Tensor | None, reached: list[bool]
    ) -> Iterator[Work]:
        """The collectives; each is over when the next one is asked for."""
        kind = self.kind
        for stage in stages:
            if staging is None:
                reached = [held.collected is not None for held in kind.helds]
                staging = stage.pack([h.collected for h in kind.helds], self._staging(stage))
                for held in kind.helds:
                    held.collected = None
            chunks = torch.empty(stage.total, dtype=kind.dtype, device=kind.pool.device)
            yield stage.scatter.reduce_scatter(chunks, staging)
            if not self.collected:
                kind.pool.give(staging.view(-1))
            staging = None
            if stage.rest.size > 1:
                yield stage.rest.all_reduce(chunks)
            for section, held, there in zip(stage.sections, kind.helds, reached, strict=True):
                if there:
                    held.add_gradient(section.part(chunks, stage.mine))


class Traffic:
    """The chunked reductions under way, oldest first; at most two hold memory of their own.

    `last`: no microbatch of this step comes after.
    """

    def __init__(self) -> None:
        self.last = True
        self._flights: list[_Flight] = []

    def launch(
        self,
        kind: ChunkedReduction,
        gradients: Sequence[Tensor | None],
        *,
        collected: bool = False,
    ) -> None:
        """Start to reduce home-shard gradients; None where the loss does not reach a parameter.
        `collected`: they are the sums of several microbatches.
        """
        for flight in self._flights:
            flight.proceed()
        # What goes on in the last microbatch is the sum of all, those before included.
        while not collected and self._are_many(kind):
            self._flights.pop(0).land()
        self._flights.append(_Flight(kind, gradients, self.last, collected))

    def land(self) -> None:
        """Wait for all of them."""
        while self._flights:
            self._flights.pop(0).land()

    def _are_many(self, kind: ChunkedReduction) -> bool:
        own = sum(not flight.collected for flight in self._flights)
        return own > 1 or any(flight.kind is kind for flight in self._flights)
