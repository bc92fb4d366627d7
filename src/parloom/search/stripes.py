"""A plan with stripes of the positions in place of chunks, where causal attention then has less to
do on its slowest rank.

The search knows no stripes: they would cut every factor of positions in two. What it finds is tried
with them: each axis that attention has on its queries moves from a chunk of the positions to every
so manyth of them, in all operators alike, so that what moved before moves as it did.
"""

from collections.abc import Iterator
from dataclasses import replace

from parloom.cost.kernels import ATTENTION
from parloom.ir.factors import Factored, factorize, follow
from parloom.ir.graph import FlatNode, Graph, Input
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule
from parloom.ir.ops.rule import OFFSET
from parloom.ir.plan import Decisions, NodeDecision
from parloom.rewrite.rewrites import rewritten
from parloom.rewrite.stripes import Stripe

Axes = tuple[str, ...]
VIEWS = 2  # that a stripe puts in front of the others


def with_stripes(graph: Graph, decisions: Decisions) -> Decisions | None:
    """`decisions` of `graph` with stripes; None where no causal attention has chunks, or where the
    positions do not divide.
    """
    chunked = rewritten(graph, decisions.rewrites)
    factored = factorize(chunked)
    axes, positions = _chunks(chunked, factored, decisions)
    ranks = decisions.mesh.size(axes)
    if ranks == 1 or positions % ranks:
        return None
    stripes = [
        Stripe(entry.target, 1, ranks)
        for entry in chunked.of_kind("batch")
        if entry.value.spec.shape[1:2] == (positions,)
    ]
    striped = rewritten(chunked, tuple(map(str, stripes)))
    return _Moved(chunked, factored, striped, decisions, axes).run(stripes)


def _chunks(graph: Graph, factored: Factored, decisions: Decisions) -> tuple[Axes, int]:
    """The axes that all causal attention of a plan has on its queries, and the number of these."""
    chosen = {node.key: dict(node.factors) for node in decisions.nodes}
    found: set[tuple[Axes, int]] = set()
    for flat in graph.flat():
        if flat.node.op != ATTENTION:
            continue
        rule = factored.rule(flat.function, flat.node)
        queries = [f for f, _ in rule.sizes if rule.kind(f) == OFFSET]
        if len(queries) == 1:  # otherwise not causal, or cut already
            axes = chosen.get(flat.key, {}).get(queries[0], ())
            found.add((axes, rule.size(queries[0])))
    return found.pop() if len(found) == 1 else ((), 0)


class _Moved:
    """Decisions of one graph as those of the same graph with stripes."""

    def __init__(
        self, old: Graph, factored: Factored, new: Graph, decisions: Decisions, axes: Axes
    ) -> None:
        self.new, self.decisions, self.axes = new, decisions, axes
        self.old_rules, self.rules = factored, factorize(new)
        self.flats = tuple(old.flat())
        self.mesh: Mesh = decisions.mesh

    def run(self, stripes: list[Stripe]) -> Decisions | None:
        """None where an axis finds no place."""
        added = VIEWS * len(stripes)
        flats = tuple(self.new.flat())
        chosen = {node.key: dict(node.factors) for node in self.decisions.nodes}
        nodes: list[NodeDecision] = []
        for old, new in zip(self.flats, flats[added:], strict=True):
            moved = self._node(old, new, chosen.get(old.key, {}))
            if moved is None:
                return None
            nodes.append(NodeDecision(new.key, tuple(moved.items())))
        by_key = {node.key: dict(node.factors) for node in nodes}
        for stripe in stripes:
            nodes += self._views(stripe, flats, by_key)
        rewrites = _in_order(self.decisions.rewrites, tuple(map(str, stripes)))
        return replace(
            self.decisions, nodes=tuple(n for n in nodes if n.factors), rewrites=rewrites
        )

    def _node(
        self, old: FlatNode, new: FlatNode, chosen: dict[str, Axes]
    ) -> dict[str, Axes] | None:
        before = self.old_rules.rule(old.function, old.node)
        after = self.rules.rule(new.function, new.node)
        parts = _parts(before, after)
        found: dict[str, Axes] = {}
        for factor, axes in chosen.items():
            into = parts.get(factor, (factor,))
            inner = tuple(a for a in axes if len(into) > 1 and a in self.axes)
            outer = tuple(a for a in axes if a not in inner)
            for name, there in ((into[-1], inner), (into[0], outer)):
                if there and after.size(name) % self.mesh.size(there):
                    return None
                if there:
                    found[name] = there
        return found

    def _views(
        self, stripe: Stripe, flats: tuple[FlatNode, ...], chosen: dict[str, dict[str, Axes]]
    ) -> Iterator[NodeDecision]:
        """The two views of a stripe, which make what the first reader of the tensor wants."""
        entry: Input = next(i for i in self.new.of_kind("batch") if i.target == stripe.name)
        first = next(flat for flat in flats if entry.value.name in flat.operands)
        second = next(flat for flat in flats if first.results[0] in flat.operands)
        reader = next((flat for flat in flats if second.results[0] in flat.operands), None)
        if reader is None:
            return
        rule = self.rules.rule(reader.function, reader.node)
        at = reader.operands.index(second.results[0])
        layout = rule.operand_layout(at, chosen.get(reader.key, {}), self.mesh)
        for flat in (second, first):
            own = self.rules.rule(flat.function, flat.node)
            assignment = _made(own, layout, self.mesh)
            layout = own.operand_layout(0, assignment, self.mesh)
            yield NodeDecision(flat.key, tuple(assignment.items()))


def _made(rule: Rule, layout: Layout, mesh: Mesh) -> dict[str, Axes]:
    """The assignment that makes the result so."""
    return follow(Rule(rule.sizes, (rule.results[0],), (), rule.kinds), (layout,), mesh)


def _parts(before: Rule, after: Rule) -> dict[str, tuple[str, ...]]:
    """The factors that each factor is now, outermost first: those of the same elements of a dim."""
    found: dict[str, tuple[str, ...]] = {}
    tensors = zip(
        (*before.operands, *before.results), (*after.operands, *after.results), strict=True
    )
    for old, new in (dims for pair in tensors for dims in zip(*pair, strict=True)):
        rest = list(new)
        for factor in old:
            parts, size = [rest.pop(0)], 1
            size = after.size(parts[0])
            while size < before.size(factor):
                parts.append(rest.pop(0))
                size *= after.size(parts[-1])
            found[factor] = tuple(parts)
    return found


def _in_order(rewrites: tuple[str, ...], stripes: tuple[str, ...]) -> tuple[str, ...]:
    """Rewrites of tensors before blocks, which are made last."""
    blocks = tuple(text for text in rewrites if text.startswith("block "))
    return (*(text for text in rewrites if text not in blocks), *stripes, *blocks)
