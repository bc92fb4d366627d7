"""What a plan is asked for: the question that every method answers."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from parloom.cost.kernels import Kernels
from parloom.cost.simulate import simulate
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import GLOBAL, Decisions, Optimizer, Prediction
from parloom.search.pinned import NONE, Pinned

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

    def predict(self, pcg: PCG, decisions: Decisions) -> Prediction:
        """The step that is expected of a lowered plan."""
        if self.predicted is not None:
            return self.predicted(pcg, decisions, self.optimizer)
        played = simulate(pcg, self.cluster, decisions, self.optimizer, self.kernels)
        return played.prediction()
