"""Where partial sums may be added before they are summed over ranks.

A product whose contracted factor is split leaves every rank a part of a sum. Where several are
added, their parts may be added first, so that one sum over ranks is left of many: of towers, of
attention beside a feed-forward layer, of experts beside a shared one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from parloom.ir.graph import Call, Function, Graph, Node
from parloom.ir.ops import Rule, op_of
from parloom.ir.ops.rule import OFFSET
from parloom.ir.ops.shape import EITHER

Keys = frozenset[str]


def linear_operators(
    graph: Graph, function: Function, rules: Mapping[str, Rule]
) -> Mapping[str, bool]:
    """The keys of operators of a function that make parts of results of parts of all operands, and
    whether they add several sums, or are between such an addition and a sum.

    What is between is read once, so that no more is summed than before. What reads inputs of the
    graph is left out: these lie whole as their first reader wants them.
    """
    found = _Sums(graph, function, rules)
    adding = found.adding()
    return {key: key in adding for key in found.linear}


def _inputs(graph: Graph, function: Function) -> frozenset[str]:
    """The inputs of a function that are inputs of the graph in some call."""
    inputs = {entry.value.name for entry in graph.inputs}
    if function is graph.main:
        return frozenset(inputs)
    calls = (item for item in graph.main.body if isinstance(item, Call))
    every = [call.args for call in calls if call.function == function.name]
    return frozenset(
        value.name
        for at, value in enumerate(function.inputs)
        if any(args[at] in inputs for args in every)
    )


class _Sums:
    """What makes the values of a function, and what their parts would be made by."""

    def __init__(self, graph: Graph, function: Function, rules: Mapping[str, Rule]) -> None:
        self.rules, self.specs, self.inputs = rules, function.specs(), _inputs(graph, function)
        self.nodes = [item for item in function.body if isinstance(item, Node)]
        for node in self.nodes:
            if node.op == EITHER and not self.inputs.isdisjoint(node.refs):
                self.inputs |= {value.name for value in node.results}
        self.makers = {value.name: node for node in self.nodes for value in node.results}
        self.ends = {*function.outputs, *(graph.ends if function is graph.main else ())}
        self.readers: dict[str, list[str]] = defaultdict(list)
        for item in function.body:
            for name in item.refs if isinstance(item, Node) else item.args:
                self.readers[name].append(item.key if isinstance(item, Node) else "")
        self.optional = frozenset(self._optional())
        self.linear = {node.key: node for node in self.nodes if self._is_linear(node)}
        self.known: dict[str, Keys | None] = {}

    def adding(self) -> Keys:
        """The operators of all additions of several sums."""
        marked = set[str]()
        for node in filter(self._may_add, self.nodes):
            parts = [own for own in map(self._made, node.refs) if own is not None]
            if len(parts) > 1:
                marked.update((node.key,), *parts)
        return frozenset(marked)

    def _optional(self) -> Iterator[str]:
        """Operators that only some forms of a graph have (`rewrite.forms`)."""
        found = {node.key for node in self.nodes if node.op == EITHER}
        for node in reversed(self.nodes):  # readers first: what only they read is found by them
            names = [value.name for value in node.results]
            if self.ends.isdisjoint(names) and node.op != EITHER:
                readers = [key for name in names for key in self.readers[name]]
                if readers and found.issuperset(readers):
                    found.add(node.key)
                    yield node.key

    def _made(self, name: str) -> Keys | None:
        """The linear operators that make a value of a sum; None where nothing does."""
        if name not in self.known:
            self.known[name] = self._makes(name)
        return self.known[name]

    def _makes(self, name: str) -> Keys | None:
        node = self.makers.get(name)
        read = [key for key in self.readers[name] if key not in self.optional]
        if node is None or name in self.ends or len(read) > 1:
            return None
        if _is_sum(self.rules[node.key], [value.name for value in node.results].index(name)):
            return frozenset()
        if not self._may_add(node) and node.op != EITHER:
            return None
        parts = [own for own in map(self._made, node.refs) if own is not None]
        between = [node.key] if node.op != EITHER else []
        return frozenset(between).union(*parts) if parts else None

    def _is_linear(self, node: Node) -> bool:
        """Whether parts of the result are made of parts of all operands, in their dtype."""
        specs = [*(self.specs[name] for name in node.refs), *(v.spec for v in node.results)]
        alike = len({spec.dtype for spec in specs}) == 1 and specs[0].is_float
        linear = op_of(node).passes_partial(node, (True,) * len(node.refs))
        whole = len(node.results) == 1 and bool(specs[-1].shape) and not node.kwarg("rounding_mode")
        return alike and linear and whole

    def _may_add(self, node: Node) -> bool:
        return node.key in self.linear and self.inputs.isdisjoint(node.refs)


def _is_sum(rule: Rule, result: int) -> bool:
    """Whether a result is a sum over a factor that may be split."""
    have = {factor for dim in rule.results[result] for factor in dim}
    kinds = {rule.kind(factor) for factor in rule.shardable if factor not in have}
    return rule.reduction == "sum" and not kinds.isdisjoint(("plain", OFFSET))
