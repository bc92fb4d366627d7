"""Stages that are lowered once where they are equal: runs of calls of the same blocks with the same
layouts, which differ in names only.
"""

from collections.abc import Hashable, Iterator

from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.ir.stages import ARRIVING, Cut, StageDecisions


class AlikeStages:
    """Lowers the stages of one graph; keeps what it has lowered."""

    def __init__(self) -> None:
        self._known: dict[Hashable, PCG] = {}
        # By identity: with their graphs, which nothing else may keep.
        self._factored: dict[int, tuple[Graph, Factored]] = {}

    def lower(self, parts: Cut, decisions: Decisions) -> LoweredStages:
        """The programs of all stages, one object for equal ones, in which values, parameters and
        calls have the names that they have in one of these.

        Raises `LayoutError` for an illegal decision.
        """
        chosen = StageDecisions(decisions, parts)
        pairs = ((graph, chosen.of(index)) for index, graph in enumerate(parts.graphs))
        return LoweredStages(parts, tuple(self._lowered(*pair) for pair in pairs))

    def stage(self, parts: Cut, decisions: Decisions, index: int) -> PCG:
        """The program of one stage; see `lower`."""
        return self._lowered(parts.graphs[index], StageDecisions(decisions, parts).of(index))

    def factored(self, graph: Graph) -> Factored:
        """The graph of a stage with the factors of its operators."""
        if id(graph) not in self._factored:
            self._factored[id(graph)] = graph, factorize(graph)
        return self._factored[id(graph)][1]

    def _lowered(self, graph: Graph, own: Decisions) -> PCG:
        key = tuple(_form(graph, own))
        if key not in self._known:
            self._known[key] = lower(graph, own, factored=self.factored(graph))
        return self._known[key]


def _form(graph: Graph, decisions: Decisions) -> Iterator[Hashable]:
    """A graph and what is decided about it without the names of values, parameters and calls.

    Operators of main keep theirs: equal stages compute the same ones for themselves, or none.
    """
    numbers: dict[str, int] = {}

    def number(name: str | None) -> int | None:
        return None if name is None else numbers.setdefault(name, len(numbers))

    yield decisions.mesh, decisions.num_microbatches, graph.recompute != ()
    stored = {p.name: (p.weight, p.gradient, p.optimizer) for p in decisions.parameters}
    for entry in graph.inputs:
        own = entry.kind == "parameter"
        named = None if own or entry.kind == ARRIVING else entry.target
        about = stored.get(entry.target) if own else None
        yield entry.kind, entry.trainable, entry.value.spec, number(entry.value.name), named, about
    layouts = {node.key: node.factors for node in decisions.nodes}
    remade = {a.prefix: (a.policy, a.values, a.moves) for a in decisions.activations}
    inside: dict[str, list[Hashable]] = {}
    for flat in graph.flat():
        if flat.prefix:
            inside.setdefault(flat.prefix, []).append(layouts.get(flat.key))
    for item in graph.main.body:
        made = tuple((number(value.name), value.spec) for value in item.results)
        if isinstance(item, Call):
            read = tuple(map(number, item.args))
            chosen = tuple(inside.get(item.prefix, ()))
            yield item.function, read, made, chosen, remade.get(item.prefix)
            yield item.prefix in graph.recompute
        else:
            yield item.key, tuple(map(number, item.refs)), made, layouts.get(item.key)
    boundary = graph.boundary
    assert boundary is not None, "stages are cut with their boundary"
    for name, layout in boundary.in_time.items():
        if name in numbers:
            yield number(name), layout, name in boundary.flowing
    yield tuple(map(number, graph.leaving)), number(graph.loss)
    for kind in (graph.outputs, graph.updates):
        yield tuple((name, number(value)) for name, value in kind)
