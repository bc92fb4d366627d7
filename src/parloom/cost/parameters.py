"""Traffic and memory of parameters: every transfer of the step program, and what is stored.

The step program says which collectives there are; this says how the runtime batches them: units
that are gathered together, buckets of gradients in the order in which they become ready.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from parloom.cost.price import Price
from parloom.cost.quantized import Coding, Quantized
from parloom.cost.walk import Walker
from parloom.cost.works import Exchange, Pass, Sizes, Track, summed
from parloom.ir.graph import CACHE, DTYPE_BYTES
from parloom.ir.pcg import PCG, TIME, WHOLE, PParameter
from parloom.ir.plan import Decisions, Optimizer, Storage
from parloom.ir.step_program import (
    EACH_MICROBATCH,
    EACH_PASS,
    EACH_STEP,
    MIN_BUCKET_BYTES,
    StepNode,
    step_program,
)
from parloom.quantization import in_blocks


@dataclass(frozen=True, slots=True)
class Transfer:
    """Parameters that travel together, by the collectives `exchanges` one after the other.

    `num_bytes` are those of the whole tensors. What is `chunked` travels through `staging_bytes` of
    memory, `parts` chunks padded to equal length. `unit` as in `StepNode`; `when` is when the
    gradients are reduced, and `then` what the last microbatch goes on with: from chunks of
    gradients to those that are updated. `coding`: it is quantized.
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
    chunked: bool = False
    then: "Transfer | None" = None
    coding: Coding | None = None

    def chain(self) -> tuple["Transfer", ...]:
        """This and `then`."""
        return (self,) if self.then is None else (self, self.then)

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
            self._gather(f"gather {node.unit or 'main'} {index}", node, node.parameters)
            for index, node in enumerate(self.nodes)
            if (node.action, node.when) == ("GATHER", EACH_PASS)
        )

    @cached_property
    def unit_reductions(self) -> tuple[Transfer, ...]:
        """Gradients of weights stored in chunks, by unit."""
        found: list[Transfer] = []
        for gather in self.gathers:
            alike: dict[object, list[PParameter]] = {}
            for parameter in (self.by_name[n] for n in gather.parameters):
                if parameter.input.trainable:
                    alike.setdefault(self._kind(parameter), []).append(parameter)
            for members in alike.values():
                name = f"reduce {gather.unit or 'main'} {len(found)}"
                found.append(self._reduction(name, tuple(members), gather.unit))
        return tuple(found)

    def buckets(self, backward: Track) -> tuple[Transfer, ...]:
        """Gradients of other weights, in buckets as they become ready in the pass `backward`."""
        inputs = self.pcg.main.inputs
        arrival = [inputs[index].name for index in self.walker.arrival(backward)]
        gathered = {name for gather in self.gathers for name in gather.parameters}
        filling: dict[object, list[PParameter]] = {}
        filled_bytes: dict[object, int] = {}
        full: list[list[PParameter]] = []
        begun: set[object] = set()
        for name in arrival:
            parameter = self.by_name[name]
            path = self._path(parameter)
            if name in gathered or not (path or parameter.decision.optimizer.axes):
                continue
            kind = self._kind(parameter)
            filling.setdefault(kind, []).append(parameter)
            filled_bytes[kind] = filled_bytes.get(kind, 0) + self.gradient_bytes(parameter)
            limit = (
                self._full_bytes(self.nodes[path[0]], self.gradient_width(parameter)) if path else 0
            )
            if kind not in begun:  # a small one first, to start early
                limit = min(limit, MIN_BUCKET_BYTES)
            if filled_bytes[kind] >= limit:
                begun.add(kind)
                full.append(filling.pop(kind))
                filled_bytes[kind] = 0
        full += filling.values()
        return tuple(
            self._reduction(f"bucket {i}", tuple(members)) for i, members in enumerate(full)
        )

    @cached_property
    def publications(self) -> tuple[Transfer, ...]:
        """Whole weights that are gathered after the update."""
        found: list[Transfer] = []
        for node in self.nodes:
            if (node.action, node.when) != ("GATHER", EACH_STEP):
                continue
            filling: list[PParameter] = []
            for parameter in node.parameters:
                filling.append(parameter)
                limit = self._full_bytes(node, self.width(parameter))
                full = sum(map(self.home_bytes, filling)) >= limit
                if full or parameter is node.parameters[-1]:
                    name = f"publish {len(found)}"
                    found.append(self._gather(name, node, tuple(filling)))
                    filling = []
        return tuple(found)

    def _full_bytes(self, node: StepNode, width: int) -> int:
        """The bytes at which a bucket of a node is full."""
        least, per_rank = self.walker.kernels.software.bucket_elements
        elements = max(least, per_rank * self.pcg.mesh.size(node.axes))
        return elements * width or node.bucket_bytes

    def reduces(self, parameter: PParameter) -> bool:
        """Whether a gradient leaves autograd partial."""
        return bool(self._path(parameter))

    def update(self) -> Pass:
        """The optimizer's update of what this rank owns."""
        mesh = self.pcg.mesh
        touched = sum(
            p.elements(mesh, p.decision.optimizer) * self.master_width(p) for p in self.trained
        )
        kernels = self.walker.kernels
        seconds = kernels.update_s(touched, self.optimizer.num_states)
        norms = kernels.stream_s(self.optimizer.norm_passes * touched)
        return Pass(Price(seconds + norms))

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

    def update_sizes(self) -> Sizes:
        """What the optimizer needs beside its states: Adam's denominators, unless it is one kernel,
        and copies of gradients in the dtype of the master weights.

        For all parameters at once on GPUs (torch's `foreach`). On CPUs for one after the other:
        its root and the quotient, while the quotient of the one before is still there.
        """
        software, mesh = self.walker.kernels.software, self.pcg.mesh
        owned = [(p, p.elements(mesh, p.decision.optimizer)) for p in self.trained]
        copies = [
            [n * width for p, n in owned if self.gradient_width(p) < self.master_width(p)]
            for width in software.memory.copies
        ]
        if software.memory.at_once:
            copies = [[sum(sizes)] for sizes in copies]
        found = [size for sizes in copies for size in sizes]
        if self.optimizer.num_states >= 2 and not software.fused_optimizer:
            sizes = [n * self.master_width(p) for p, n in owned]
            if self.walker.cluster.backend == "gloo":
                most = max((2 * now + last for last, now in pairwise([0, *sizes])), default=0)
                sizes = [most]
            found += sizes
        return tuple(size for size in found if size)

    def norm_bytes(self) -> int:
        """What the norm of a gradient takes: of the largest one, or of a rank's part."""
        width = self.walker.kernels.software.memory.norm_bytes
        if not width or not self.trained:
            return 0
        largest = max(self._elements(p) for p in self.trained)
        owned = sum(self._elements(p, p.decision.optimizer) for p in self.trained)
        return width * min(largest, owned)

    def bucket_bytes(self) -> int:
        """A buffer for gradients that are reduced, and what is reduced of it."""
        count = self.walker.kernels.software.memory.bucket_elements
        reduced = [p for p in self.trained if self.reduces(p)]
        if not count or not reduced:
            return 0
        widths = max(map(self.gradient_width, reduced))
        return 2 * min(count * widths, sum(map(self.gradient_bytes, reduced)))

    def lies_whole(self, parameter: PParameter) -> bool:
        """Whether a whole gradient lies in a buffer that stays, and leaves from there."""
        in_place = self.walker.kernels.software.memory.in_place
        return in_place and not parameter.decision.gradient.axes

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
        if parameter.input.value.name in self._gathered_in_blocks:
            found["weights"] = self._in_blocks(parameter, decision.weight) * width
        alone = self.walker.kernels.software.memory.masters_alone
        if alone and decision.weight.axes and self.master_width(parameter) != width:
            found["weights"] = 0
        if parameter.input.trainable:
            gradient = self.gradient_width(parameter)
            found["gradients"] = self._on("device", parameter, decision.gradient, gradient)
            found["optimizer"] = self.state_bytes(parameter, "device")
        return found

    def state_bytes(self, parameter: PParameter, memory: str) -> int:
        """Bytes of optimizer states and master weights that are kept in `memory`."""
        master = self.master_width(parameter)
        # What is updated lies in the memory of the weight, if it has the same dtype.
        width = master * (self.optimizer.num_states + (master != self.width(parameter)))
        return self._on(memory, parameter, parameter.decision.optimizer, width)

    def held_bytes(self) -> int:
        """Module buffers, caches and the batch."""
        entries = zip(self.pcg.graph.inputs, self.pcg.main.inputs, strict=True)
        return self.cache_bytes() + sum(
            value.spec.num_bytes if entry.kind == "batch" else self.walker.local_bytes(value)
            for entry, value in entries
            if entry.kind in ("buffer", "batch") and not entry.trainable
        )

    def cache_bytes(self) -> int:
        """Caches of all microbatches."""
        entries = zip(self.pcg.graph.inputs, self.pcg.main.inputs, strict=True)
        caches = [value for entry, value in entries if entry.kind == CACHE]
        times = (self.pcg.num_microbatches if v.layout.shard(TIME) else 1 for v in caches)
        sizes = map(self.walker.local_bytes, caches)
        return sum(count * size for count, size in zip(times, sizes, strict=True))

    def home_bytes(self, parameter: PParameter) -> int:
        """Bytes of a whole home shard, as computed with."""
        return self._elements(parameter) * self.width(parameter)

    def kept_bytes(self, parameter: PParameter) -> int:
        """Bytes of the weight as it is stored."""
        return self._elements(parameter, parameter.decision.weight) * self.width(parameter)

    def gradient_bytes(self, parameter: PParameter) -> int:
        """Bytes of a home shard's gradient, as reduced."""
        return self._elements(parameter) * self.gradient_width(parameter)

    def collects_whole(self, parameter: PParameter) -> bool:
        """Whether a whole gradient adds up over the microbatches before it leaves in chunks."""
        decision = parameter.decision
        chunked = decision.optimizer.axes and not decision.gradient.axes
        return bool(chunked) and self.pcg.num_microbatches > 1

    def updated_gradient_bytes(self, parameter: PParameter) -> int:
        """Bytes of the gradient that the optimizer reads: the whole home shard, or a chunk."""
        elements = self._elements(parameter, parameter.decision.optimizer)
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
        """The nodes that reduce a gradient, in order."""
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

    @cached_property
    def _gathered_in_blocks(self) -> frozenset[str]:
        """Weights whose chunks lie in whole blocks, as they are quantized to be gathered."""
        gathers = (n for n in self.nodes if (n.action, n.when) == ("GATHER", EACH_PASS) and n.dtype)
        return frozenset(p.input.value.name for node in gathers for p in node.parameters)

    def _on(self, memory: str, parameter: PParameter, storage: Storage, width: int) -> int:
        elements = self._elements(parameter, storage)
        return elements * width if storage.memory == memory else 0

    def _kind(self, parameter: PParameter) -> object:
        """What gradients that travel together have in common."""
        decision = parameter.decision
        stored = decision.gradient.axes, decision.optimizer.axes
        return self._path(parameter), *stored, self.gradient_width(parameter)

    def _gather(self, name: str, node: StepNode, members: tuple[PParameter, ...]) -> Transfer:
        """Weights: for a pass from their chunks, or after the update from smaller ones."""
        mesh, dtype, late = self.pcg.mesh, members[0].input.value.spec.dtype, node.unit is None
        wholes = [p.decision.weight if late else WHOLE for p in members]
        owned = [p.decision.optimizer if late else p.decision.weight for p in members]
        size, chunk = (
            sum(map(self._elements, members, stored)) * DTYPE_BYTES[dtype]
            for stored in (wholes, owned)
        )
        parts = mesh.size(node.axes)
        elements = sum(map(self._in_blocks, members, owned))
        exchange, coding = self._sent(node, size, parts * elements, DTYPE_BYTES[dtype])
        if coding:
            chunk = elements * DTYPE_BYTES[dtype]
        if late and all(map(self.lies_whole, members)):
            chunk = 0  # gathered where they lie
        return Transfer(
            name, _names(members), (exchange,), size, node.when, node.unit, dtype, parts,
            parts * chunk, chunked=True, coding=coding,
        )  # fmt: skip

    def _sent(
        self, node: StepNode, num_bytes: int, elements: int, width: int
    ) -> tuple[Exchange, Coding | None]:
        """The collective of a node on so many bytes, or on so many elements in blocks."""
        if not node.dtype:
            return self.walker.exchange(node.kind, node.axes, num_bytes), None
        prices = Quantized(self.walker.exchange, self.walker.kernels, self.pcg.mesh)
        sent = node.kind, node.axes, elements, width
        return prices.exchange(*sent), prices.coding(*sent)

    def _in_blocks(self, parameter: PParameter, storage: Storage) -> int:
        """Elements of one rank's chunk of a home shard where it is quantized."""
        return in_blocks(self._elements(parameter, storage))

    def _reduction(
        self, name: str, members: tuple[PParameter, ...], unit: str | None = None
    ) -> Transfer:
        """Gradients of equal storage on their way to how they are stored, and to their owners."""
        decision, mesh = members[0].decision, self.pcg.mesh
        gradient, state = (mesh.size(s.axes) for s in (decision.gradient, decision.optimizer))
        late = any(self.nodes[i].when == EACH_STEP for i in self._path(members[0]))
        if gradient == 1:
            return self._stage(name, members, EACH_STEP, unit, state)
        first = self._stage(name, members, EACH_MICROBATCH, unit, gradient)
        if gradient == state and not late:
            return first
        other = self._stage(f"{name} to owners", members, EACH_STEP, unit, state)
        return replace(first, then=other)

    def _stage(
        self, name: str, members: tuple[PParameter, ...], when: str, unit: str | None, parts: int
    ) -> Transfer:
        """The collectives of one time, which leave one of so many parts of each gradient."""
        mesh, dtype = self.pcg.mesh, members[0].input.value.spec.dtype
        dtype = self.decisions.reduce_dtype or dtype
        size = sum(map(self.gradient_bytes, members))
        nodes = [n for n in map(self.nodes.__getitem__, self._path(members[0])) if n.when == when]
        scattered = mesh.size(next((n.axes for n in nodes if n.kind == "reduce_scatter"), ()))
        stored = [
            p.decision.gradient if when == EACH_MICROBATCH else p.decision.optimizer
            for p in members
        ]
        elements, width = sum(map(self._in_blocks, members, stored)), DTYPE_BYTES[dtype]
        sent = [
            self._sent(n, size // parts * times, elements * times, width)
            for n in nodes
            for times in [scattered if n.kind == "reduce_scatter" else 1]
        ]
        coding = next((found for _, found in sent if found), None)
        chunk = elements * width if coding else sum(map(self._elements, members, stored)) * width
        if all(map(self.lies_whole, members)):
            chunk = 0  # scattered where they lie
        return Transfer(
            name, _names(members), tuple(e for e, _ in sent), size, when, unit, dtype, scattered,
            scattered * chunk, chunked=bool(members[0].decision.optimizer.axes), coding=coding,
        )  # fmt: skip


def _names(members: tuple[PParameter, ...]) -> tuple[str, ...]:
    return tuple(p.input.value.name for p in members)
