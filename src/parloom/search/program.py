"""What a layout search chooses about: operators by block kind, values that flow between them, and
weights.

Calls of one block kind share their choices, so everything is counted: an operator stands for as
many as there are calls, a flow for as many equal ways from a source to the readers in one call
(the first call of a block reads the embedding, the others read the call before). Movements are
made once for all readers in a call that want the same, so these stand together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from parloom.ir.factors import Factored
from parloom.ir.graph import Graph, Node, TensorSpec, with_operands
from parloom.ir.layout import Layout
from parloom.ir.ops import Rule
from parloom.ir.ops.shape import EITHER
from parloom.rewrite.forms import Form, Forms, Place
from parloom.search.pinned import NONE, Pinned
from parloom.search.pins import Pin

WIDTH = 4  # bytes of a gradient as it is reduced, as a rule
Axes = tuple[str, ...]
Flags = tuple[bool, ...]
CallKey = tuple[str, str]  # block kind and prefix


@dataclass(frozen=True, slots=True)
class State:
    """One end of a way: a layout, and the axes over which the cotangent is partial."""

    layout: Layout
    varying: Axes = ()
    absent: bool = False
    """Whether there is no value, or nothing wants it."""


ABSENT = State(Layout(), (), absent=True)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a block kind.

    `flows` counts its calls by the operands through which gradients flow. `derived`: it makes of
    weights what does not depend on the batch, so that gradients pass it as partial as they come
    (`ir.lower`). `exposed`: they might, because all it has gradients of are weights that several
    operators read, or derived. `optional`: it may be left out. `adjacent`: the arguments that are
    weights which, where they are trained alike, may lie one after the other (`ir.adjacent`).
    """

    function: str
    node: Node
    rule: Rule
    operands: tuple[TensorSpec, ...]
    flows: tuple[tuple[Flags, int], ...]
    derived: bool
    exposed: bool
    optional: bool = False
    adjacent: tuple[int, ...] = ()

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.function, self.node.key

    @property
    def takes(self) -> bool:
        """Whether it takes one of several equal values."""
        return self.node.op == EITHER and len(self.operands) > 1

    @property
    def count(self) -> int:
        """How many calls run it."""
        return sum(count for _, count in self.flows)

    @property
    def is_scalar(self) -> bool:
        """Whether it reads and makes nothing but scalars."""
        return not any(s.shape for s in (*self.operands, *(v.spec for v in self.node.results)))


@dataclass(frozen=True, slots=True, order=True)
class Reader:
    """Operand `operand` of operator `operator` (an index into `Program.operators`)."""

    operator: int
    operand: int


@dataclass(frozen=True, slots=True)
class Flow:
    """A value with all that read it in one call, `count` times.

    The source is result `result` of operator `operator`, or the weight `weight` (an index, where
    several operators read it); a batch tensor comes as the reader `like` wants it; with none of
    these the value is replicated. `whole` flows end replicated (buffers that are written back).
    """

    spec: TensorSpec
    differentiable: bool
    readers: tuple[Reader, ...]
    count: int
    operator: int = -1
    result: int = 0
    like: Reader | None = None
    weight: int = -1
    whole: bool = False
    crosses: bool = False
    """Whether another call makes it than reads it."""
    as_made: tuple[Reader, ...] = ()
    """Those of the readers that take it as it is made, if they are there."""


@dataclass(frozen=True, slots=True)
class Weight:
    """`count` equal parameters, each read by `readers`, in the order of the program.

    `block`: only one block call reads each, so that its chunks are gathered for that call, together
    with those of others: `unit_elements` in all. `last`: gradients are among the last to arrive.
    `apart`: one of its readers is in every form, and it lies as that wants it.
    """

    spec: TensorSpec
    trainable: bool
    readers: tuple[Reader, ...]
    targets: tuple[str, ...]
    block: bool
    unit_elements: int
    last: bool = False
    pins: tuple[Pin, ...] = ()
    reached: bool = True
    apart: bool = False

    @property
    def count(self) -> int:
        return len(self.targets)

    @property
    def is_shared(self) -> bool:
        """Whether several operators may read it that are there together."""
        return len(self.readers) > 1 and not self.apart


@dataclass(frozen=True, slots=True)
class Block:
    """Calls of a block kind that cost the same: their prefixes, the flows into their operators (by
    index), and the operators that they run with the operands through which gradients flow.
    """

    function: str
    prefixes: tuple[str, ...]
    flows: tuple[int, ...]
    operators: tuple[tuple[int, Flags], ...]


class Kind:
    """All that menus and prices of an operator depend on: operators made alike have equal kinds, in
    whatever program they are. It is hashed once.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: object) -> None:
        self._parts, self._hash = parts, hash(parts)

    @classmethod
    def of(cls, operator: Operator) -> "Kind":
        """The kind of an operator."""
        names = tuple(f"operand{i}" for i in range(len(operator.operands)))
        node = with_operands(operator.node, names)
        made = tuple(value.spec for value in node.results)
        return cls(
            node.op, node.args, node.kwargs, operator.operands, made,
            operator.rule, operator.derived, operator.adjacent,
        )  # fmt: skip

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Kind) and self._hash == other._hash and self._parts == other._parts


@dataclass(frozen=True)
class Program:
    """All of a graph that layouts are chosen for; `index`: the operator of a call, by its key."""

    graph: Graph
    factored: Factored
    operators: tuple[Operator, ...]
    flows: tuple[Flow, ...]
    weights: tuple[Weight, ...]
    blocks: tuple[Block, ...]
    index: dict[str, int]
    pinned: Pinned = NONE
    units: int = 1
    """Block calls that read weights of their own."""
    forms: Forms | None = None
    """What `graph` is made of, where it has several forms; `rewrites` make one of these forms."""
    rewrites: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every operator."""
        known: dict[Kind, Kind] = {}
        return tuple(known.setdefault(kind, kind) for kind in map(Kind.of, self.operators))

    @cached_property
    def sources(self) -> Mapping[Reader, tuple[int, int]]:
        """Operator and result that each operand comes from, where an operator makes it."""
        return {
            reader: (flow.operator, flow.result)
            for flow in self.flows
            if flow.operator >= 0
            for reader in flow.readers
        }

    @cached_property
    def indices(self) -> Mapping[Place, int]:
        """Which operator is at each place."""
        return {operator.place: index for index, operator in enumerate(self.operators)}

    @cached_property
    def together(self) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
        """Pairs of operators, and operands of both that are taken by both of them or by none."""
        found = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
        for (one, at), (other, to) in self.forms.together if self.forms is not None else ():
            found[self.indices[one], self.indices[other]].append((at, to))
        return found

    def meet(self, one: Reader | None, other: Reader | None) -> bool:
        """Whether two readers may be there together."""
        if self.forms is None or one is None or other is None:
            return True
        places = (self.operators[reader.operator].place for reader in (one, other))
        return self.forms.meet(*places)

    def index_of(self, form: Form) -> Mapping[str, int]:
        """`index` of the operators of one form, by their keys there."""
        if self.forms is None:
            return self.index
        return {
            flat.key: self.indices[form.places[flat.function, flat.node.key]]
            for flat in form.graph.flat()
        }

    def form(self, taken: Mapping[int, int]) -> Form:
        """The graph in which operators (by index) take the operands in these positions."""
        if self.forms is None:
            return Form(self.factored, self.rewrites)
        return self.forms.form({self.operators[i].place: at for i, at in taken.items()})

    @cached_property
    def trained_elements(self) -> int:
        """Elements of all weights whose gradients are reduced."""
        return sum(w.count * w.spec.num_elements for w in self.weights if w.trainable)
