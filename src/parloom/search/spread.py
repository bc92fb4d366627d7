"""Spreading: from the layouts of a few tensors to a decision for every operator.

A forward walk lets each operator take its operands as they lie (`follow`), asking a `choose`
callback first; a backward walk then shards what depends on no tensor of the batch (masks,
positions) the way its consumers read it, where no gradient flows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parloom.ir.factors import Factored, follow
from parloom.ir.graph import FlatNode, Graph, TensorSpec
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule, op_of
from parloom.ir.ops.rule import OFFSET
from parloom.ir.plan import NodeDecision

Assignment = dict[str, tuple[str, ...]]
REPLICATED = Layout()


@dataclass(frozen=True)
class Unfolded:
    """The flat program with everything that a walk over it needs, computed once."""

    graph: Graph
    factored: Factored
    mesh: Mesh
    nodes: tuple[FlatNode, ...] = ()
    rules: tuple[Rule, ...] = ()
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    differentiable: frozenset[str] = frozenset()
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    known: dict[object, Any] = field(default_factory=dict)
    """What was found for an operator of a block kind holds for all of its calls."""

    def operand_layout(self, index: int, position: int, assignment: Assignment) -> Layout:
        """The layout that operator `index` wants operand `position` in."""
        rule = self.rules[index]
        key = "operand", id(rule), position, tuple(assignment.items())
        if key not in self.known:
            self.known[key] = rule.operand_layout(position, assignment, self.mesh)
        found: Layout = self.known[key]
        return found


def unfold(graph: Graph, factored: Factored, mesh: Mesh) -> Unfolded:
    """The view of `graph` that spreading walks."""
    nodes = tuple(graph.flat())
    specs = {i.value.name: i.value.spec for i in graph.inputs}
    flows = {i.value.name for i in graph.of_kind("parameter") if i.trainable}
    readers: dict[str, list[int]] = {}
    for index, flat in enumerate(nodes):
        specs.update((n, v.spec) for n, v in zip(flat.results, flat.node.results, strict=True))
        if op_of(flat.node).differentiable and flows.intersection(flat.operands):
            flows.update(n for n in flat.results if specs[n].is_float)
        for name in dict.fromkeys(flat.operands):
            readers.setdefault(name, []).append(index)
    return Unfolded(
        graph,
        factored,
        mesh,
        nodes,
        tuple(factored.rule(flat.function, flat.node) for flat in nodes),
        specs,
        frozenset(i.value.name for i in graph.of_kind("parameter")),
        frozenset(flows),
        {name: tuple(indices) for name, indices in readers.items()},
    )


Choose = Callable[[int, Assignment, Mapping[str, Layout]], Assignment]


def spread(
    program: Unfolded, seeds: Mapping[str, Layout], choose: Choose | None = None
) -> list[Assignment]:
    """An assignment per node of `program`, from the layouts of main's inputs in `seeds`.

    `choose(index, followed, layouts)` may replace what following the operands gave.
    """
    layouts: dict[str, Layout] = dict(seeds)
    assignments: list[Assignment] = []
    for index in range(len(program.nodes)):
        assignment = followed(program, index, layouts)
        if choose is not None:
            assignment = choose(index, assignment, layouts)
        assignments.append(assignment)
        record(program, index, assignment, layouts)
    _shard_constants(program, assignments, set(seeds))
    return assignments


def followed(program: Unfolded, index: int, layouts: Mapping[str, Layout]) -> Assignment:
    """What operator `index` does when it takes its operands as they lie.

    Where they shard an axis on a dim that is looked up and on one of the indices, the indices stay:
    the result is then sharded, and not a sum that must be reduced.
    """
    lying = tuple(layouts.get(name, REPLICATED) for name in program.nodes[index].operands)
    key = "followed", id(program.rules[index]), lying
    if key not in program.known:
        program.known[key] = _followed(program.rules[index], lying, program.mesh)
    found: Assignment = program.known[key]
    return found


def _followed(rule: Rule, lying: tuple[Layout, ...], mesh: Mesh) -> Assignment:
    found = follow(rule, lying, mesh)
    made = {factor for dims in rule.results for dim in dims for factor in dim}
    looked_up = {a for f, axes in found.items() if rule.kind(f) == OFFSET and f not in made
                 for a in axes}  # fmt: skip
    if looked_up:
        other = follow(rule, (lying[0].without(looked_up), *lying[1:]), mesh)
        if looked_up <= {axis for factor in other if factor in made for axis in other[factor]}:
            return other
    return found


def record(
    program: Unfolded, index: int, assignment: Assignment, layouts: dict[str, Layout]
) -> None:
    """Note the layouts of an operator's results (partial ones as they will be reduced)."""
    rule = program.rules[index]
    key = "made", id(rule), tuple(assignment.items())
    if key not in program.known:
        made = (rule.result_layout(i, assignment, program.mesh) for i in range(len(rule.results)))
        program.known[key] = tuple(layout.without(layout.partial_axes) for layout in made)
    layouts.update(zip(program.nodes[index].results, program.known[key], strict=True))


def _shard_constants(program: Unfolded, assignments: list[Assignment], batch: set[str]) -> None:
    wanted: dict[str, list[Layout]] = {}
    for index in reversed(range(len(program.nodes))):
        flat, rule = program.nodes[index], program.rules[index]
        free = not assignments[index] and not program.differentiable.intersection(flat.results)
        if free:
            assignments[index] = _as_read(rule, flat, wanted, program)
        for position, name in enumerate(flat.operands):
            layout = program.operand_layout(index, position, assignments[index])
            wanted.setdefault(name, []).append(layout)


def _as_read(
    rule: Rule, flat: FlatNode, wanted: Mapping[str, list[Layout]], program: Unfolded
) -> Assignment:
    """The assignment that makes the first result as all its readers want it, or none."""
    for position, name in enumerate(flat.results):
        layouts = wanted.get(name, [])
        if layouts and all(layout == layouts[0] for layout in layouts):
            mirrored = Rule(rule.sizes, (rule.results[position],), (), rule.kinds)
            found = follow(mirrored, (layouts[0],), program.mesh)
            if rule.result_layout(position, found, program.mesh) == layouts[0]:
                return found
    return {}


def decisions(program: Unfolded, assignments: list[Assignment]) -> tuple[NodeDecision, ...]:
    """Assignments as plan decisions; operators without any axis are left out (the default)."""
    return tuple(
        NodeDecision(flat.key, tuple(assignment.items()))
        for flat, assignment in zip(program.nodes, assignments, strict=True)
        if assignment
    )
