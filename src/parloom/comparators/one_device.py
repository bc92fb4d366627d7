"""What one device computes in the functions of a graph, while one of them is rewritten."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from parloom.ir.graph import Function, Graph, Node, Ref
from parloom.ir.ops import op_of
from parloom.rewrite.substitutions import with_function
from parloom.search.contexts import Contexts
from parloom.search.least_compute import times_on_one_device
from parloom.search.pinned import NONE
from parloom.search.request import Request, base_of

Flowing = frozenset[str]
"""The values of a call that gradients flow through."""


class FunctionCosts:
    """Times (ps) of a whole step in all calls of one function, whatever its body.

    An operator takes as long as one that is made alike, of operands of the same shapes: where there
    is none yet, the graph with that body is priced as the search prices it.
    """

    def __init__(self, request: Request, name: str) -> None:
        self.request, self.name = replace(request, pinned=NONE, takes=()), name
        self._calls = Counter(_flowing_in(request.graph, name).values())
        self._known: dict[object, float] = {}

    def of(self, body: Function) -> float:
        """The time of all its operators."""
        return sum(self.each(body).values())

    def each(self, body: Function) -> Mapping[str, float]:
        """The time of each operator, by its key."""
        alike = {node.key: own for node, own in self._alike(body)}
        if not self._known.keys() >= set(alike.values()):
            self._price(body, alike)
        return {key: self._known[own] for key, own in alike.items()}

    def _price(self, body: Function, alike: Mapping[str, object]) -> None:
        graph = with_function(self.request.graph, body)
        own = replace(self.request, graph=graph)
        count, program, times = times_on_one_device(Contexts(own, base_of(own)))
        for key, made in alike.items():
            self._known.setdefault(made, float(count * times[program.indices[self.name, key]]))

    def _alike(self, body: Function) -> Iterator[tuple[Node, object]]:
        """The operators, and what their times depend on."""
        specs = body.specs()
        makers = {v.name for item in body.body if isinstance(item, Node) for v in item.results}
        calls = [(set(flowing - makers), count) for flowing, count in self._calls.items()]
        for node in (item for item in body.body if isinstance(item, Node)):
            op, flags = op_of(node), Counter[tuple[bool, ...]]()
            for flowing, count in calls:
                own = tuple(name in flowing for name in node.refs)
                flags[own] += count
                if op.differentiable and any(own):
                    flowing.update(
                        value.name
                        for at, value in enumerate(node.results)
                        if value.spec.is_float and at not in op.detached
                    )
            yield (
                node,
                (
                    node.op,
                    _without_names(node.args),
                    _without_names(node.kwargs),
                    tuple(specs[name] for name in node.refs),
                    tuple(value.spec for value in node.results),
                    tuple(sorted(flags.items())),
                ),
            )


def _flowing_in(graph: Graph, name: str) -> Mapping[str, Flowing]:
    """The values that operators of a function read and that gradients flow through, by its
    calls.
    """
    flowing = {entry.value.name for entry in graph.inputs if entry.trainable}
    found: dict[str, set[str]] = {}
    for flat in graph.flat():
        op = op_of(flat.node)
        flows = op.differentiable and not flowing.isdisjoint(flat.operands)
        for at, (value, made) in enumerate(zip(flat.node.results, flat.results, strict=True)):
            if flows and value.spec.is_float and at not in op.detached:
                flowing.add(made)
        if flat.function == name:
            own = found.setdefault(flat.prefix, set())
            pairs = zip(flat.node.refs, flat.operands, strict=True)
            own.update(local for local, operand in pairs if operand in flowing)
    return {prefix: frozenset(own) for prefix, own in found.items()}


def _without_names(arg: object) -> object:
    """Arguments with a mark in the place of each value, and numbers told apart by their types."""
    if isinstance(arg, Ref):
        return Ref
    return tuple(map(_without_names, arg)) if isinstance(arg, tuple) else (type(arg), arg)
