"""A plan's decisions in words that need no knowledge of rules and factors."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType

from parloom.cost.units import format_bytes, format_seconds
from parloom.ir.factors import factorize
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import MeshAxis
from parloom.ir.plan import Constraint, Decisions, Plan, Storage
from parloom.rewrite.pad import rewritten

WARNING = "warning: "
MOST = 6
MOST_WAYS = 3
SAMPLES, OUTPUTS, INPUTS = "samples", "output features", "input features"
ENTRIES, HEADS = "entries of tables", "heads"
LOOKUPS = frozenset({"embedding", "parloom.embedding_bag"})
ATTENTION = "scaled_dot_product_attention"


def words(graph: Graph, decisions: Decisions) -> tuple[str, ...]:
    """Per mesh axis what it splits, and how parameters are stored; `graph` as captured."""
    ways = ways_of(graph, decisions)
    lines = [_axis_words(axis, ways[axis.name]) for axis in decisions.mesh.axes]
    stored = Counter(
        (role, storage.axes, storage.memory)
        for parameter in decisions.parameters
        for role, storage in (
            ("weights", parameter.weight),
            ("gradients", parameter.gradient),
            ("optimizer state", parameter.optimizer),
        )
        if storage != Storage()
    )
    for (role, axes, memory), count in stored.most_common(MOST):
        over = f"in parts over {', '.join(axes)}" if axes else "whole"
        where = " in host memory" if memory == "host" else ""
        lines.append(f"{role} of {_count(count, 'parameter')} stored {over}{where}")
    if len(stored) > MOST:
        lines.append(f"and {len(stored) - MOST} more ways to store parameters")
    if not stored and decisions.mesh.num_ranks > 1:
        features = any(w.keys() & {OUTPUTS, INPUTS, ENTRIES} for w in ways.values())
        kept = "its part of the split weights and all others" if features else "all weights"
        lines.append(f"every device stores {kept}, with their gradients and optimizer state")
    policies = Counter(a.policy for a in decisions.activations if a.policy != "keep")
    lines += [
        f"{policy} activations of {_count(count, 'block')}" for policy, count in policies.items()
    ]
    return tuple(lines)


def checkpoint_words(graph: Graph) -> tuple[str, ...]:
    """What becomes of the checkpoints that the model itself asks for."""
    blocks = graph.recomputed_calls
    lines = []
    if blocks:
        lines.append(f"{_count(len(blocks), 'block')} recomputed, as the model's checkpoints ask")
    kept = [path for path in graph.recompute if path not in blocks]
    if kept:
        some = ", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "")
        lines.append(
            "kept in memory although the model checkpoints it, because it is only a part of a"
            f" block or of a module: {some}; checkpoint whole blocks to have it recomputed"
        )
    return tuple(lines)


def idle_axes(decisions: Decisions) -> tuple[MeshAxis, ...]:
    """The axes of more than one device that split no operator: their devices do the same work."""
    used = {a for node in decisions.nodes for _, axes in node.factors for a in axes}
    return tuple(
        axis
        for axis in decisions.mesh.axes
        if axis.size > 1 and not axis.steps and axis.name not in used
    )


def idle_words(decisions: Decisions) -> tuple[str, ...]:
    """A warning where devices do the same work as others."""
    idle, ranks = idle_axes(decisions), decisions.mesh.num_ranks
    if idle and prod(axis.size for axis in idle) == ranks:
        what = f"nothing is split: all {ranks} devices do all the work, no faster than one"
        return (f"{WARNING}{what}; try a --batch that divides over them, or another --cluster",)
    return tuple(
        f"{WARNING}axis {axis.name} splits no operator: its {axis.size} devices do the same work"
        for axis in idle
    )


def ways_of(graph: Graph, decisions: Decisions) -> Mapping[str, Counter[str]]:
    """Per mesh axis: what it splits, in words, with the number of operators."""
    ways: dict[str, Counter[str]] = {axis.name: Counter() for axis in decisions.mesh.axes}
    for _, axis, what in named_ways(rewritten(graph, decisions.rewrites), decisions):
        ways[axis][what] += 1
    return ways


def named_ways(graph: Graph, decisions: Decisions) -> Iterator[tuple[FlatNode, str, str]]:
    """Operator, axis, and what the axis splits of it in words, in the order of the program `graph`,
    which is rewritten as `decisions` say.

    What a batch tensor's first dim or a weight's features are called goes with the values that
    are made of them, as long as they lie as they were made.
    """
    factored = factorize(graph)
    decided = {node.key: dict(node.factors) for node in decisions.nodes}
    naming = Naming(graph)
    for flat in graph.flat():
        assignment = decided.get(flat.key, {})
        rule = factored.rule(flat.function, flat.node)
        operands = tuple(
            rule.operand_layout(i, assignment, decisions.mesh) for i in range(len(flat.operands))
        )
        results = tuple(
            rule.result_layout(i, assignment, decisions.mesh) for i in range(len(flat.results))
        )
        for axis in (a for axes in assignment.values() for a in axes):
            yield flat, axis, naming.name(flat, axis, operands, results)


class Naming:
    """Names what an axis splits of one operator after the other, in the order of the program."""

    def __init__(self, graph: Graph) -> None:
        self.parameters = {i.value.name for i in graph.of_kind("parameter")}
        shapes = {i.value.name: i.value.spec.shape for i in graph.of_kind("batch")}
        sizes = [shape[0] for shape in shapes.values() if shape]
        self.batch = {n for n, shape in shapes.items() if shape and shape[0] == sizes[0]}
        self.known: dict[tuple[str, str], tuple[Shard, str]] = {}  # by value and axis

    def name(
        self, flat: FlatNode, axis: str, operands: tuple[Layout, ...], results: tuple[Layout, ...]
    ) -> str:
        """What `axis` splits of this operator, noted for those that read its results."""
        what = self._what(flat, axis, operands, results)
        for name, layout in zip(flat.results, results, strict=True):
            shard = layout.shard(axis)
            if shard is not None:
                self.known[name, axis] = shard, what
        return what

    def _what(
        self, flat: FlatNode, axis: str, operands: tuple[Layout, ...], results: tuple[Layout, ...]
    ) -> str:
        made = next((s for s in (layout.shard(axis) for layout in results) if s), None)
        of_parameter, carried = False, ""
        for name, layout in zip(flat.operands, operands, strict=True):
            shard = layout.shard(axis)
            if shard is None:
                continue
            of_parameter = of_parameter or name in self.parameters
            lies, what = self.known.get((name, axis), (None, ""))
            if name in self.batch and shard.dim == 0:
                lies, what = shard, SAMPLES
            carried = carried or (what if lies == shard else "")
        if of_parameter and made is None:
            return ENTRIES if flat.node.op in LOOKUPS else INPUTS
        rank = len(flat.node.results[0].spec.shape)
        if flat.node.op == ATTENTION and made is not None and made.dim == rank - 3 > 0:
            return HEADS
        if carried or of_parameter:
            return carried or OUTPUTS
        return "a summed dim" if made is None else f"dim {made.dim} of the result"


def _axis_words(axis: MeshAxis, ways: Counter[str]) -> str:
    if axis.steps:
        return f"{axis.name} = {axis.size} microbatches one after the other"
    over = f"axis {axis.name} over {_count(axis.size, 'device')} splits"
    if not ways:
        same = ": they all do the same work" if axis.size > 1 else ""
        return f"{over} no operator{same}"
    parts = [f"{what} in {_count(n, 'operator')}" for what, n in ways.most_common(MOST_WAYS)]
    rest = sum(n for _, n in ways.most_common()[MOST_WAYS:])
    if rest:
        parts.append(f"other dims in {_count(rest, 'operator')}")
    return f"{over} {', '.join(parts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


SOURCES = MappingProxyType(
    {
        "spec": "from data sheets, not calibrated: compare plans with it, not clocks",
        "calibrated": "from measured rates",
        "measured": "from measured operators",
    }
)


def constraint_line(constraint: Constraint, found: Plan) -> str:
    """What a constraint costs, in words."""
    assert found.prediction is not None
    step_s, peak = found.prediction.step_s, found.prediction.peak_bytes
    without = format_seconds(constraint.step_s), format_bytes(constraint.peak_bytes)
    if constraint.step_s == step_s:
        return f"{constraint.text} costs nothing"
    return (
        f"{constraint.text} costs {format_seconds(step_s - constraint.step_s)}"
        f" ({step_s / constraint.step_s - 1:+.1%}): {format_seconds(step_s)} and"
        f" {format_bytes(peak)} with it, {' and '.join(without)} without"
    )


def source_words(source: str, error: float, step_s: float) -> str:
    """Where a predicted time comes from, and between which times the step is likely to be."""
    if not error:
        return SOURCES[source]
    least, most = (format_seconds(step_s * math.exp(sign * error)) for sign in (-1, 1))
    return f"{SOURCES[source]}; likely {least} .. {most}"
