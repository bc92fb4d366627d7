"""Traffic and memory of parameters: every transfer of the step program, and what is stored.

The step program says which collectives there are; this says how the runtime batches them: units
that are gathered together, buckets of gradients in the order in which they become ready.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from parloom.cost.price import Price
from parloom.cost.walk import Walker
from parloom.cost.works import Exchange, Pass, Track, summed
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.pcg import PCG, WHOLE, PParameter
from parloom.ir.plan import Decisions, Optimizer, Storage
from parloom.ir.step_program import (
    EACH_MICROBATCH,
    EACH_PASS,
    EACH_STEP,
    MIN_BUCKET_BYTES,
    step_program,
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Parameters that travel together, by the collectives `exchanges` one after the other.

    `num_bytes` are those of the whole tensors. What is stored in `parts` chunks travels through
    `staging_bytes` of memory, chunks padded to equal length. `unit` as in `StepNode`; `when` is
    when the gradients are reduced.
    """

    name: str
    parameters: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    num_bytes: int
    when: str = EACH_STEP
    unit: str | None = None
    dtype: str = ""
    parts: int = 1
    staging_bytes: int = 0

    @property
    def scratch_bytes(self) -> int:
        """What the back end takes while the longest of its collectives runs."""
        return max((exchange.scratch_bytes for exchange in self.exchanges), default=0)

    @property
    def chunk_bytes(self) -> int:
        """One rank's part of the staging memory."""
        return self.staging_bytes // self.parts

    def total(self) -> Pass:
        """What it costs."""
        return summed(exchange.total() for exchange in self.exchanges)


class Parameters:
    """The parameters of a lowered program; their names here are those of main's values."""

    def __init__(
        self, pcg: PCG, walker: Walker, decisions: Decisions, optimizer: Optimizer
    ) -> None:
        self.pcg, self.walker = pcg, walker
        self.decisions, self.optimizer = decisions, optimizer
        self.by_name = {p.input.value.name: p for p in pcg.parameters}
        self.trained = tuple(p for p in pcg.parameters if p.input.trainable)
        self.nodes = tuple(n for n in step_program(pcg) if pcg.mesh.size(n.axes) > 1)
        self._known: dict[tuple[str, Storage], int] = {}

    @cached_property
    def gathers(self) -> tuple[Transfer, ...]:
        """Weights stored in chunks, by unit in order of first use."""
        return tuple(
            self._transfer(f"gather {node.unit or 'main'} {index}", node.parameters, (index,))
            for index, node in enumerate(self.nodes)
            if (node.action, node.when) == ("GATHER", EACH_PASS)
        )

    @cached_property
    def unit_reductions(self) -> tuple[Transfer, ...]:
        """Gradients of weights stored in chunks, by unit."""
        found: list[Transfer] = []
        for gather in self.gathers:
            alike: dict[tuple[int, ...], list[PParameter]] = {}
            for parameter in (self.by_name[n] for n in gather.parameters):
                if parameter.input.trainable:
                    alike.setdefault(self._path(parameter), []).append(parameter)
            for path, members in alike.items():
                name = f"reduce {gather.unit or 'main'} {len(found)}"
                found.append(self._transfer(name, tuple(members), path, gather.unit))
        return tuple(found)

    def buckets(self, backward: Track) -> tuple[Transfer, ...]:
        """Gradients of other weights, in buckets as they become ready in the pass `backward`."""
        inputs = self.pcg.main.inputs
        arrival = [inputs[index].name for index in self.walker.arrival(backward)]
        gathered = {name for gather in self.gathers for name in gather.parameters}
        filling: dict[object, list[PParameter]] = {}
        full: list[list[PParameter]] = []
        begun: set[object] = set()
        for name in arrival:
            parameter = self.by_name[name]
            path = self._path(parameter)
            if name in gathered or not (path or parameter.decision.gradient.axes):
                continue
            kind = path, parameter.decision.gradient, self.gradient_width(parameter)
            bucket = filling.setdefault(kind, [])
            bucket.append(parameter)
            limit = self.nodes[path[0]].bucket_bytes if path else 0
            if kind not in begun:  # a small one first, to start early
                limit = min(limit, MIN_BUCKET_BYTES)
            if sum(self.gradient_bytes(p) for p in bucket) >= limit:
                begun.add(kind)
                full.append(filling.pop(kind))
        full += filling.values()
        return tuple(
            self._transfer(f"bucket {i}", tuple(members), self._path(members[0]))
            for i, members in enumerate(full)
        )

    @cached_property
    def publications(self) -> tuple[Transfer, ...]:
        """Whole weights that are gathered after the update."""
        found: list[Transfer] = []
        for index, node in enumerate(self.nodes):
            if (node.action, node.when) != ("GATHER", EACH_STEP):
                continue
            filling: list[PParameter] = []
            for parameter in node.parameters:
                filling.append(parameter)
                full = sum(map(self.home_bytes, filling)) >= node.bucket_bytes
                if full or parameter is node.parameters[-1]:
                    name = f"publish {len(found)}"
                    found.append(self._transfer(name, tuple(filling), (index,)))
                    filling = []
        return tuple(found)

    def reduces(self, parameter: PParameter) -> bool:
        """Whether a gradient leaves autograd partial."""
        return bool(self._path(parameter))

    def update(self) -> Pass:
        """The optimizer's update of what this rank owns."""
        mesh = self.pcg.mesh
        touched = sum(
            p.elements(mesh, p.decision.optimizer) * self.master_width(p) for p in self.trained
        )
        return Pass(Price(self.walker.kernels.update_s(touched, self.optimizer.num_states)))

    def collect(self) -> Pass:
        """Adding a microbatch's gradients to where they collect: two are read, one is written.

        What is stored in chunks is reduced in every microbatch, and its chunks are added.
        """
        if self.pcg.num_microbatches == 1:
            return Pass()
        mesh = self.pcg.mesh
        added = sum(
            p.elements(mesh, p.decision.gradient) * self.gradient_width(p) for p in self.trained
        )
        return Pass(Price(self.walker.kernels.stream_s(3 * added)))

    def update_bytes(self) -> int:
        """What the optimizer needs beside its states: Adam's denominators, unless it is one kernel.

        For all parameters at once on GPUs (torch's `foreach`). On CPUs for one after the other:
        its root and the quotient, while the quotient of the one before is still there.
        """
        if self.optimizer.num_states < 2 or self.walker.kernels.software.fused_optimizer:
            return 0
        mesh = self.pcg.mesh
        sizes = [
            p.elements(mesh, p.decision.optimizer) * self.master_width(p) for p in self.trained
        ]
        if self.walker.cluster.backend != "gloo":
            return sum(sizes)
        return max((2 * now + last for last, now in pairwise([0, *sizes])), default=0)

    def stored_bytes(self) -> dict[str, int]:
        """Device bytes of weights, gradients and optimizer states between steps."""
        found = {"weights": 0, "gradients": 0, "optimizer": 0}
        for parameter in self.pcg.parameters:
            for name, size in self.stored_of(parameter).items():
                found[name] += size
        return found

    def stored_of(self, parameter: PParameter) -> dict[str, int]:
        """The same of one parameter."""
        decision, width = parameter.decision, self.width(parameter)
        found = {"weights": self._on("device", parameter, decision.weight, width)}
        if parameter.input.trainable:
            gradient = self.gradient_width(parameter)
            found["gradients"] = self._on("device", parameter, decision.gradient, gradient)
            found["optimizer"] = self.state_bytes(parameter, "device")
        return found

    def state_bytes(self, parameter: PParameter, memory: str) -> int:
        """Bytes of optimizer states and master weights that are kept in `memory`."""
        decision, master = parameter.decision, self.master_width(parameter)
        own_copy = decision.optimizer.axes != decision.weight.axes or master != self.width(
            parameter
        )
        width = master * (self.optimizer.num_states + own_copy)
        return self._on(memory, parameter, decision.optimizer, width)

    def held_bytes(self) -> int:
        """Module buffers and the batch."""
        entries = zip(self.pcg.graph.inputs, self.pcg.main.inputs, strict=True)
        return sum(
            value.spec.num_bytes if entry.kind == "batch" else self.walker.local_bytes(value)
            for entry, value in entries
            if entry.kind in ("buffer", "batch") and not entry.trainable
        )

    def home_bytes(self, parameter: PParameter) -> int:
        """Bytes of a whole home shard, as computed with."""
        return self._elements(parameter) * self.width(parameter)

    def gradient_bytes(self, parameter: PParameter) -> int:
        """Bytes of a home shard's gradient, as reduced."""
        return self._elements(parameter) * self.gradient_width(parameter)

    def kept_gradient_bytes(self, name: str) -> int:
        """Bytes of the gradient that outlives a microbatch: the whole home shard, or a chunk."""
        parameter = self.by_name[name]
        elements = self._elements(parameter, parameter.decision.gradient)
        return elements * self.gradient_width(parameter)

    def width(self, parameter: PParameter) -> int:
        return DTYPE_BYTES[parameter.input.value.spec.dtype]

    def gradient_width(self, parameter: PParameter) -> int:
        dtype = self.decisions.reduce_dtype
        return DTYPE_BYTES[dtype] if dtype else self.width(parameter)

    def master_width(self, parameter: PParameter) -> int:
        dtype = self.decisions.master_dtype
        return DTYPE_BYTES[dtype] if dtype else self.width(parameter)

    def _elements(self, parameter: PParameter, storage: Storage = WHOLE) -> int:
        """See `PParameter.elements`."""
        key = parameter.input.value.name, storage
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = parameter.elements(self.pcg.mesh, storage)
        return known

    def _path(self, parameter: PParameter) -> tuple[int, ...]:
        """The nodes that make a gradient whole, in order."""
        return self._paths.get(parameter.input.value.name, ())

    @cached_property
    def _paths(self) -> dict[str, tuple[int, ...]]:
        paths: dict[str, tuple[int, ...]] = {}
        for index, node in enumerate(self.nodes):
            if node.action == "REDUCE":
                for parameter in node.parameters:
                    name = parameter.input.value.name
                    paths[name] = (*paths.get(name, ()), index)
        return paths

    def _on(self, memory: str, parameter: PParameter, storage: Storage, width: int) -> int:
        elements = self._elements(parameter, storage)
        return elements * width if storage.memory == memory else 0

    def _transfer(
        self,
        name: str,
        members: tuple[PParameter, ...],
        path: tuple[int, ...],
        unit: str | None = None,
    ) -> Transfer:
        nodes = [self.nodes[index] for index in path]
        gathers = bool(nodes) and nodes[0].action == "GATHER"
        size = sum(map(self.home_bytes if gathers else self.gradient_bytes, members))
        dtype = members[0].input.value.spec.dtype
        dtype = dtype if gathers else self.decisions.reduce_dtype or dtype
        chunk = sum(self._elements(p, _owner(p)) for p in members)
        parts = self.pcg.mesh.size(_owner(members[0]).axes)
        exchanges, left = [], size
        for node in nodes:
            exchanges.append(self.walker.exchange(node.kind, node.axes, left))
            if node.kind == "reduce_scatter":
                left //= self.pcg.mesh.size(node.axes)
        names = tuple(p.input.value.name for p in members)
        when = nodes[0].when if nodes else EACH_MICROBATCH
        return Transfer(
            name,
            names,
            tuple(exchanges),
            size,
            when,
            nodes[0].unit if gathers else unit,
            dtype,
            parts,
            parts * chunk * DTYPE_BYTES[dtype],
        )


def _owner(parameter: PParameter) -> Storage:
    """How what a rank updates of a parameter, or has of a frozen one, is stored."""
    decision = parameter.decision
    return decision.optimizer if parameter.input.trainable else decision.weight
