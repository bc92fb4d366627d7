"""Factors across the graph: where one operator cuts a dim, its neighbors can cut there too.

A view that splits 3.heads.head_dim lets the linear layer before it shard heads, three operators
away. `factorize` carries such cuts along values and through rules, in both directions and across
block calls, to a fixed point; every operator's rule is then split into the finest factors that
some neighbor understands.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from parloom.errors import CaptureError, LayoutError
from parloom.ir.graph import Call, Function, Graph, Node, TensorSpec
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule, Site, op_of
from parloom.ir.ops.cuts import KnownCuts, NodeCuts, extend, parts, units
from parloom.ir.ops.rule import HALO, RING, WHOLE
from parloom.ir.sums import linear_operators


@dataclass(frozen=True)
class Factored:
    """The refined rule of every node, by (function name, node key)."""

    graph: Graph
    rules: Mapping[tuple[str, str], Rule]

    def rule(self, function: str, node: Node) -> Rule:
        return self.rules[function, node.key]


def site_of(node: Node, specs: Mapping[str, TensorSpec]) -> Site:
    """The node with the specs of its operands."""
    return Site(node, tuple(specs[name] for name in node.refs))


def factorize(graph: Graph) -> Factored:
    """Refined rules for every node of `graph`; raises `CaptureError` for operators without one."""
    functions = {f.name: f for f in (graph.main, *graph.functions)}
    specs = {name: function.specs() for name, function in functions.items()}
    nodes: dict[tuple[str, str], NodeCuts] = {}
    for function in functions.values():
        for item in function.body:
            if isinstance(item, Node):
                rule = _base_rule(item, specs[function.name])
                nodes[function.name, item.key] = NodeCuts(function.name, item, rule)
    known, carriers = KnownCuts(), list[Callable[[KnownCuts], None]]()
    for function in functions.values():
        own = [
            partial(_carry_through_call, function.name, item, functions[item.function], specs)
            if isinstance(item, Call)
            else nodes[function.name, item.key].carry
            for item in function.body
        ]
        carriers += (*own, *reversed(own))
    known.settle(carriers)
    rules = {key: node.refined(known) for key, node in nodes.items()}
    for function in functions.values():
        own_rules = {key: rule for (name, key), rule in rules.items() if name == function.name}
        for key, adds in linear_operators(graph, function, own_rules).items():
            rules[function.name, key] = replace(own_rules[key], linear=True, adds=adds)
    return Factored(graph, rules)


def _base_rule(node: Node, specs: Mapping[str, TensorSpec]) -> Rule:
    try:
        return op_of(node).rule(site_of(node, specs))
    except LayoutError as error:
        where = f"in module {node.path or '(top)'!r}" + (f" ({node.source})" if node.source else "")
        raise CaptureError(f"operator {node.op!r} {where} has no rule: {error}") from error


def _carry_through_call(
    function: str,
    call: Call,
    callee: Function,
    specs: Mapping[str, Mapping[str, TensorSpec]],
    known: KnownCuts,
) -> None:
    """Carry the cuts of a call's values to those of the function that it calls, and back."""
    actual = (*call.args, *(v.name for v in call.results))
    formal = (*(v.name for v in callee.inputs), *callee.outputs)
    for outer, inner in zip(actual, formal, strict=True):
        for dim, size in enumerate(specs[callee.name][inner].shape):
            there, here = (function, outer, dim), (callee.name, inner, dim)
            known.add(there, known.of(here), size)
            known.add(here, known.of(there), size)


def follow(rule: Rule, operands: tuple[Layout, ...], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The assignment that takes operands as they lie: each axis goes to the factor it shards.

    The first operand that shards an axis decides; axes that lie on no shardable factor, or do not
    divide there, are left out (the operand is then gathered). An axis that lies on both factors of
    a route is on both, but for blocks that go around (`RING`): these only do so where a decision
    says it.
    """
    chosen: dict[str, list[tuple[int, str]]] = {}
    on: dict[str, tuple[str, ...]] = {}
    for layout, dims in zip(operands, rule.operands, strict=True):
        for shard in layout.shards:
            for factor, unit in units(rule, dims[shard.dim]):
                top = unit * rule.size(factor)
                place = (*on.get(shard.axis, ()), factor)
                free = len(place) == 1 or place in rule.routes or place[::-1] in rule.routes
                if rule.kind(factor) == RING:
                    continue
                if unit <= shard.stride < top and factor in rule.shardable and free:
                    chosen.setdefault(factor, []).append((-shard.stride, shard.axis))
                    on[shard.axis] = place
    assignment = {}
    for factor, axes in chosen.items():
        names: tuple[str, ...] = ()
        for _, axis in sorted(axes):
            if rule.size(factor) % mesh.size((*names, axis)) == 0:
                names = (*names, axis)
        if names:
            assignment[factor] = names
    return assignment


def cut_to(rule: Rule, operands: tuple[Layout, ...], mesh: Mesh) -> Rule:
    """`rule` with factors split where the operands' shards begin, so that `follow` is exact."""
    cuts: dict[str, set[int]] = {}
    for layout, dims in zip(operands, rule.operands, strict=True):
        for shard in layout.shards:
            for factor, unit in units(rule, dims[shard.dim]):
                top = unit * rule.size(factor)
                if unit <= shard.stride < top and rule.kind(factor) not in (HALO, WHOLE):
                    cuts.setdefault(factor, set()).add(shard.stride * mesh[shard.axis].size // unit)
    return rule.split(
        {
            f: parts(extend(frozenset(), frozenset(c), rule.size(f)), rule.size(f))
            for f, c in cuts.items()
        }
    )
