"""What a plan is asked for: the question that every method answers."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from parloom.cost.kernels import Kernels
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Optimizer
from parloom.search.pinned import NONE, Pinned

Say = Callable[[str], None]


class Wanted(Enum):
    """What is wanted of a search: a plan of meshes that are searched whole, the best plan, or the
    best with what was proved of it.
    """

    PRICE = "price"
    PLAN = "plan"
    PROOF = "proof"


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for; `budget` is how much deterministic work a method may do."""

    graph: Graph
    cluster: Cluster
    optimizer: Optimizer
    limit_bytes: int
    num_microbatches: int = 1
    seed: int = 0
    kernels: Kernels | None = None
    budget: int | None = None
    pinned: Pinned = NONE
    wanted: Wanted = Wanted.PROOF
