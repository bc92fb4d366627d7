"""What a plan is asked for: every method answers the same request."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from parloom.cost.hardware import Hardware
from parloom.errors import InputError
from parloom.ir.expected import Objective, Prediction
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import LoweredStages, lower_stages
from parloom.ir.mesh import Cluster, part_sizes
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import GLOBAL, MICROBATCH, Decisions, Optimizer
from parloom.ir.regular_parts import RegularPart, memory_of
from parloom.ir.samples import num_samples
from parloom.rewrite.rewrites import rewritten
from parloom.rewrite.take import Take
from parloom.search.pinned import NONE, Pinned
from parloom.search.pins import Kind

AUTO = "auto"
LOW_PRECISION = ("bfloat16", "float16")
Say = Callable[[str], None]


class Peaks(Protocol):
    """What a device holds at most: of all, and of each type on a cluster of several types."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def peaks(self) -> tuple[tuple[str, int], ...]: ...


class Wanted(Enum):
    """What is wanted of a search: a plan of meshes that are searched whole, the best plan, or the
    best with what was proved of it.
    """

    PRICE = "price"
    PLAN = "plan"
    PROOF = "proof"


@dataclass(frozen=True, slots=True)
class Request:
    """A plan for training `graph` on `machine`, with at most `limit_bytes` on each device.

    `num_microbatches`: so many, None for any number; `method`: a name of `arguments.METHODS` or the
    path of a plan; `budget`: how much deterministic work a method may do. With `all_devices` no
    plan leaves some of them idle; `sizes` are numbers of devices that the objective `cost` looks
    at, all of which there are parts where it is empty. `takes` are other ways to compute values, of
    which `auto` may use any. Where `batch_semantics` are by microbatch, `graph` is the program of
    one microbatch. With `quantizes` gradients and weights may travel quantized. Where
    `passes_follow` each other, as forward passes of many batches do that leave nothing to the next
    one, a plan of several stages counts by the time from one pass to the next.
    """

    graph: Graph
    machine: Hardware
    optimizer: Optimizer
    limit_bytes: int
    num_microbatches: int | None = None
    seed: int = 0
    budget: int | None = None
    pinned: Pinned = NONE
    wanted: Wanted = Wanted.PROOF
    batch_semantics: str = GLOBAL
    method: str = AUTO
    all_devices: bool = True
    objective: Objective = Objective.TIME
    sizes: tuple[int, ...] = ()
    takes: tuple[Take, ...] = ()
    quantizes: bool = False
    passes_follow: bool = False

    @property
    def cluster(self) -> Cluster:
        return self.machine.cluster

    @property
    def apart(self) -> int:
        """Microbatches each of which is computed by itself; 1 where there are none such."""
        return (self.num_microbatches or 1) if self.batch_semantics == MICROBATCH else 1

    @property
    def samples(self) -> int:
        """The size of the batch."""
        return num_samples(factorize(self.graph)) * self.apart

    def on(self, num_devices: int) -> "Request":
        """The same of that many of the first devices, all of which are used."""
        return replace(self, machine=self.machine.part(num_devices), all_devices=True)

    def of(self, decisions: Decisions) -> "Request":
        """The same of the devices that a plan uses; raises `InputError` for others than it may."""
        return replace(self, machine=self.machine.used_by(decisions), all_devices=True)

    def regular(self) -> tuple[tuple[RegularPart, "Request"], ...]:
        """The request on each regular part of the cluster."""
        return tuple(
            (part, replace(self, machine=machine, limit_bytes=limit))
            for part, machine in self.machine.regular()
            for limit in [self.limit_of(part.cluster.device.name)]
        )

    def limit_of(self, device: str) -> int:
        """What a device of this type may hold."""
        if not self.cluster.parts:
            return self.limit_bytes
        return min(self.limit_bytes, memory_of(self.cluster, device))

    def fits(self, found: Peaks) -> bool:
        """Whether no device holds more than it may."""
        peaks = found.peaks or (("", found.peak_bytes),)
        return all(size <= self.limit_of(device) for device, size in peaks)

    def placed(self, decisions: Decisions) -> Prediction:
        """The step of a plan on the devices that it uses, which may be some of these."""
        return self.by_type(self.of(decisions).predict(decisions), decisions)

    def by_type(self, found: Prediction, decisions: Decisions) -> Prediction:
        """A prediction with its peak by type of device, where a plan uses one of several types."""
        if found.peaks or not self.cluster.parts:
            return found
        return replace(found, peaks=((self.of(decisions).cluster.device.name, found.peak_bytes),))

    def parts(self) -> Iterator["Request"]:
        """The request on every part of the cluster that a plan may use, the largest first."""
        if not self.all_devices:
            yield from map(self.on, part_sizes(self.cluster))

    def repeated(self) -> Iterator["Request"]:
        """Where all devices must be used, and no pin is about meshes, the request on every part of
        the cluster whose work the others may repeat, the largest first.
        """
        free = not any(pin.kind is Kind.MESH for pin in self.pinned.pins)
        if self.all_devices and free and not self.cluster.parts:
            primes = set(self.cluster.prime_axes())
            for part in map(self.on, part_sizes(self.cluster)):
                if primes.issuperset(part.cluster.prime_axes()):
                    yield part

    def microbatch_counts(self, factored: Factored) -> tuple[int, ...]:
        """The numbers of microbatches that a plan may have; `factored` is of `graph`."""
        if self.num_microbatches is not None or self.batch_semantics != GLOBAL:
            return (self.num_microbatches or 1,)
        return legal_microbatches(factored).counts

    def predict(self, decisions: Decisions, factored: Factored | None = None) -> Prediction:
        """The step that is expected of a plan; `factored` is of the graph that its rewrites make,
        or of `graph`.

        Raises `LayoutError` where it cannot be lowered.
        """
        if factored is None or (decisions.rewrites and factored.graph is self.graph):
            factored = factorize(rewritten(self.graph, decisions.rewrites))
        if len(decisions.stages) > 1:
            lowered = lower_stages(factored.graph, decisions, factored=factored)
            return self.predict_stages(lowered, decisions)
        pcg = lower(factored.graph, decisions, factored=factored)
        return self.machine.predict(pcg, decisions, self.optimizer)

    def predict_stages(self, lowered: LoweredStages, decisions: Decisions) -> Prediction:
        """The step that is expected of a plan of several stages."""
        return self.machine.predict_stages(
            lowered, decisions, self.optimizer, repeated=self.passes_follow
        )


@dataclass(frozen=True, slots=True)
class ScoredPlan:
    """A plan with the step that is expected of it, the method that proposed it, and its name in
    tables.
    """

    decisions: Decisions
    prediction: Prediction
    method: str = AUTO
    name: str = ""


def base_of(request: Request) -> Decisions:
    """What holds for all plans that are searched."""
    base = Decisions(batch_semantics=request.batch_semantics)
    return with_dtypes(request.graph, base)


def with_dtypes(graph: Graph, decisions: Decisions) -> Decisions:
    """Weights of low precision are updated in float32, and their gradients reduced in it.

    All gradients are reduced in one dtype: float64 where weights have it. Raises `InputError` where
    others are complex.
    """
    trained = any(i.trainable for i in graph.of_kind("parameter"))
    dtypes = {i.value.spec.dtype for i in graph.of_kind("parameter")}
    if not trained or dtypes.isdisjoint(LOW_PRECISION):
        return decisions
    for entry in graph.of_kind("parameter"):
        if entry.trainable and entry.value.spec.dtype.startswith("complex"):
            raise InputError(
                f"{entry.target} is {entry.value.spec.dtype} beside weights in half precision, and"
                " all gradients are reduced in one dtype; train in float32 (--dtype fp32), or keep"
                " the weight as pairs of real numbers and use torch.view_as_complex"
            )
    reduce_dtype = "float64" if "float64" in dtypes else "float32"
    return replace(decisions, master_dtype="float32", reduce_dtype=reduce_dtype)
