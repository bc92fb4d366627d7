"""What a plan is asked for: the question that every method answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from parloom.cost.kernels import Kernels
from parloom.cost.simulate import simulate
from parloom.errors import InputError
from parloom.ir.factors import Factored
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, part_sizes
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.pcg import PCG
from parloom.ir.plan import GLOBAL, Decisions, Optimizer, Prediction
from parloom.search.pinned import NONE, Pinned

LOW_PRECISION = ("bfloat16", "float16")
Say = Callable[[str], None]
Predict = Callable[[PCG, Decisions, Optimizer], Prediction]


class Wanted(Enum):
    """What is wanted of a search: a plan of meshes that are searched whole, the best plan, or the
    best with what was proved of it.
    """

    PRICE = "price"
    PLAN = "plan"
    PROOF = "proof"


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for, of so many microbatches (None: any number); `budget` is how much
    deterministic work a method may do, `predicted` how a lowered plan's step is predicted (None: as
    the data sheets say).

    Where `batch_semantics` are by microbatch, `graph` is the program of one microbatch.
    """

    graph: Graph
    cluster: Cluster
    optimizer: Optimizer
    limit_bytes: int
    num_microbatches: int | None = None
    seed: int = 0
    kernels: Kernels | None = None
    budget: int | None = None
    pinned: Pinned = NONE
    wanted: Wanted = Wanted.PROOF
    predicted: Predict | None = None
    batch_semantics: str = GLOBAL
    on: Callable[[int], "Question"] | None = None

    def parts(self) -> Iterator["Question"]:
        """The question on every part of the cluster, the largest first; none where `on`, which asks
        it on so many of the first devices, is left out.
        """
        if self.on is not None:
            yield from map(self.on, part_sizes(self.cluster))

    def microbatch_counts(self, factored: Factored) -> tuple[int, ...]:
        """The numbers of microbatches that a plan may have; `factored` is of `graph`."""
        if self.num_microbatches is not None or self.batch_semantics != GLOBAL:
            return (self.num_microbatches or 1,)
        return legal_microbatches(factored).counts

    def predict(self, pcg: PCG, decisions: Decisions) -> Prediction:
        """The step that is expected of a lowered plan."""
        if self.predicted is not None:
            return self.predicted(pcg, decisions, self.optimizer)
        played = simulate(pcg, self.cluster, decisions, self.optimizer, self.kernels)
        return played.prediction()


def base_of(question: Question) -> Decisions:
    """What holds for all plans that are searched."""
    base = Decisions(batch_semantics=question.batch_semantics)
    return with_dtypes(question.graph, base)


def with_dtypes(graph: Graph, decisions: Decisions) -> Decisions:
    """Weights of low precision are updated in float32, and their gradients reduced in it.

    All gradients are reduced in one dtype: float64 where weights have it. Raises `InputError` where
    others are complex.
    """
    dtypes = {i.value.spec.dtype for i in graph.of_kind("parameter")}
    if dtypes.isdisjoint(LOW_PRECISION):
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
