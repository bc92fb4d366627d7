"""One operator lowered by itself: its items and the states of its results."""

from dataclasses import dataclass

from parloom.cost.kernels import ATTENTION
from parloom.ir.factors import Factored
from parloom.ir.graph import Call, Function, Graph, Node, Value, with_operands
from parloom.ir.layout import Layout
from parloom.ir.lower_body import Assignment, Body, Hoist
from parloom.ir.mesh import Mesh
from parloom.ir.ops import op_of
from parloom.ir.ops.rule import HALO, LOCAL, OFFSET, RING
from parloom.ir.pcg import Item, PFunction, PValue
from parloom.search.program import Axes, Flags, Operator, State


@dataclass(frozen=True, slots=True)
class Lowered:
    """What one call of an operator becomes, from operands that lie as it wants them."""

    operands: tuple[PValue, ...]
    items: tuple[Item, ...]
    results: tuple[PValue, ...]


class Single:
    """Lowers single operators of `graph` on `mesh`."""

    def __init__(self, graph: Graph, factored: Factored, mesh: Mesh) -> None:
        self.graph, self.factored, self.mesh = graph, factored, mesh
        self.steps = 1
        self.policies: dict[str, str] = {}
        self.hoist = Hoist()
        # What was lowered to see its layouts, and has not been asked for since.
        self.made: dict[object, Lowered] = {}

    def lower(
        self,
        operator: Operator,
        assignment: dict[str, Axes],
        operands: tuple[State, ...],
        flags: Flags,
    ) -> Lowered:
        """One call in which gradients flow through the operands that `flags` say."""
        known = self.made.pop(_key(operator, assignment, operands, flags), None)
        if known is not None:
            return known
        names = tuple(f"operand{i}" for i in range(len(flags)))
        node = with_operands(operator.node, names)
        given = tuple(
            PValue(name, spec, state.layout, state.varying if flows else (), flows)
            for name, spec, state, flows in zip(
                names, operator.operands, operands, flags, strict=True
            )
        )
        inputs = tuple(Value(v.name, v.spec) for v in given)
        outputs = tuple(v.name for v in node.results)
        body = Body(self, Function("", inputs, (node,), outputs), "", given)
        body.lower_node(node, operator.rule, dict(assignment))
        return Lowered(given, tuple(body.items), tuple(body.values[name] for name in outputs))

    def result_layouts(
        self, operator: Operator, assignment: dict[str, Axes], operands: tuple[State, ...]
    ) -> tuple[Layout, ...]:
        """Layouts of the results where the rule does not say them: those of a local program."""
        flags = tuple(any(flows) for flows in zip(*(f for f, _ in operator.flows), strict=True))
        found = self.lower(operator, assignment, operands, flags)
        self.made[_key(operator, assignment, operands, flags)] = found
        return tuple(value.layout for value in found.results)

    def assignment(self, prefix: str, node: Node) -> Assignment:
        raise AssertionError("a single operator is given its assignment")

    def adjacent(self, prefix: str, node: Node) -> tuple[int, ...]:
        return ()

    def call(self, call: Call, inputs: tuple[PValue, ...]) -> PFunction:
        raise AssertionError("a single operator calls no block")


def _key(
    operator: Operator, assignment: dict[str, Axes], operands: tuple[State, ...], flags: Flags
) -> object:
    return operator, tuple(sorted(assignment.items())), operands, flags


def sees_place(operator: Operator, assignment: dict[str, Axes]) -> bool:
    """Whether the price depends on which axes are on a factor: ranks have more or less to do by
    where their positions are, or blocks go around.
    """
    kinds = {operator.rule.kind(factor) for factor in assignment}
    return operator.node.op == ATTENTION and bool(kinds & {OFFSET, RING})


def is_local_program(operator: Operator, assignment: dict[str, Axes]) -> bool:
    """Whether more than local sizes matter: parts run in its place, or neighbors give rows."""
    kinds = {operator.rule.kind(factor) for factor in assignment}
    return bool(kinds & {LOCAL, HALO}) or not op_of(operator.node).emit
