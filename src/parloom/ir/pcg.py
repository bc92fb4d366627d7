"""The parallel computation graph: every movement is a node, every layout is derived.

`lower(graph, decisions)` (`ir.lower`) makes it; simulator, cost and code generation read it. The
name and the idea are Unity's (OSDI'22 section 3).
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from parloom.ir.graph import CACHE, Graph, Input, Node, TensorSpec
from parloom.ir.layout import REPLICATED, Layout, local_shape
from parloom.ir.mesh import Mesh
from parloom.ir.moves import Step
from parloom.ir.ops import Rule
from parloom.ir.plan import Decisions, ParameterDecision, Storage

WHOLE = Storage()
TIME = "micro"  # the mesh axis in time: microbatches


@dataclass(frozen=True, slots=True)
class PValue:
    """A distributed tensor: global spec, layout, and axes over which its cotangent is partial.

    `halo` holds extra border rows (dim, below, above) that the local tensor carries.
    """

    name: str
    spec: TensorSpec
    layout: Layout = REPLICATED
    varying: tuple[str, ...] = ()
    differentiable: bool = False
    halo: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local shards: `operands` are values in the order of `node.refs`.

    `adjacent` are the arguments (by position) that are several parameters which it reads as one
    where they lie (`PCG.adjacent`).
    """

    node: Node
    rule: Rule
    assignment: tuple[tuple[str, tuple[str, ...]], ...]
    operands: tuple[PValue, ...]
    results: tuple[PValue, ...]
    adjacent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Movement:
    """One movement of a value (a row of `moves.ADJOINTS`)."""

    step: Step
    operand: PValue
    result: PValue


@dataclass(frozen=True, slots=True)
class Transfer:
    """A movement from stage `source` of a pipeline to stage `target`: the value as it is sent and
    as it arrives, a message for each microbatch; of a differentiable one the gradient comes back.
    Unity's parallel operator `pipeline` cuts the batch in time for it (OSDI'22 section 3).
    """

    source: int
    target: int
    sent: PValue
    received: PValue


@dataclass(frozen=True, slots=True)
class PCall:
    """A call of a lowered block function."""

    function: str
    prefix: str
    args: tuple[PValue, ...]
    results: tuple[PValue, ...]
    policy: str = "keep"


Item = Compute | Movement | PCall


def operands_of(item: Item) -> tuple[PValue, ...]:
    """The values that an item reads."""
    if isinstance(item, Movement):
        return (item.operand,)
    return item.operands if isinstance(item, Compute) else item.args


def results_of(item: Item) -> tuple[PValue, ...]:
    """The values that an item makes."""
    return (item.result,) if isinstance(item, Movement) else item.results


@dataclass(frozen=True, slots=True)
class Remake:
    """What a block function makes again in its backward pass: `body` makes `outputs` of `inputs`,
    which are inputs of the function and values that it keeps.

    `dropped` names all values that lie in memory which is not kept for the backward pass.
    """

    name: str
    inputs: tuple[PValue, ...]
    body: tuple[Item, ...]
    outputs: tuple[PValue, ...]
    dropped: frozenset[str]


@dataclass(frozen=True, slots=True)
class PFunction:
    """A lowered function; one block kind has a variant per distinct set of decisions."""

    name: str
    kind: str
    inputs: tuple[PValue, ...]
    body: tuple[Item, ...]
    outputs: tuple[PValue, ...]
    remake: Remake | None = None


@dataclass(frozen=True, slots=True)
class PParameter:
    """A parameter: its compute layout, the axes its gradient is partial over, its storage."""

    input: Input
    layout: Layout
    reduce: tuple[str, ...]
    decision: ParameterDecision

    def elements(self, mesh: Mesh, storage: Storage = WHOLE) -> int:
        """Elements of one rank's (largest) chunk of the home shard under `storage`.

        The larger chunks of a weight or gradient are made of those of the optimizer state, padding
        included.
        """
        shape = list(local_shape(self.layout, self.input.value.spec.shape, mesh))
        if storage.axes and shape:
            parts = mesh.size(storage.axes)
            finest = max(parts, mesh.size(self.decision.optimizer.axes))
            shape[storage.dim] = ceil(shape[storage.dim] / finest) * (finest // parts)
        return prod(shape)


@dataclass(frozen=True)
class PCG:
    """A lowered program.

    `leaving` are the values for later pipeline stages, as they are sent. `prologue` computes, per
    microbatch and from the batch alone, the values named `hoisted`, which
    the executor sums over microbatches before the first forward pass. `adjacent` are parameters, by
    the user's names, whose home shards lie one after the other in one memory.
    """

    graph: Graph
    decisions: Decisions
    mesh: Mesh
    functions: tuple[PFunction, ...]
    main: PFunction
    parameters: tuple[PParameter, ...]
    loss: PValue | None
    outputs: tuple[tuple[str, PValue], ...]
    updates: tuple[tuple[str, PValue], ...]
    leaving: tuple[PValue, ...] = ()
    prologue: tuple[Item, ...] = ()
    hoisted: tuple[tuple[PValue, PValue], ...] = ()
    adjacent: tuple[tuple[str, ...], ...] = ()

    @property
    def num_microbatches(self) -> int:
        return self.decisions.num_microbatches

    @cached_property
    def by_name(self) -> dict[str, PFunction]:
        return {f.name: f for f in self.functions}

    @property
    def homes(self) -> dict[str, Layout]:
        """Where what other programs of a plan have, too, lies: parameters and caches by name."""
        inputs = zip(self.graph.inputs, self.main.inputs, strict=True)
        found = {entry.target: value.layout for entry, value in inputs if entry.kind == CACHE}
        return {p.input.target: p.layout for p in self.parameters} | found
