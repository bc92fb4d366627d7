"""Where partial sums may be added before they are summed over ranks.

A product whose contracted factor is split leaves every rank a part of a sum. Where several are
added, their parts may be added first, so that one sum over ranks is left of many: of towers, of
attention beside a feed-forward layer, of experts beside a shared one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from parloom.ir.graph import Call, Function, Graph, Node
from parloom.ir.ops import Rule, op_of
from parloom.ir.ops.rule import OFFSET

Keys = frozenset[str]


def summing(graph: Graph, function: Function, rules: Mapping[str, Rule]) -> Keys:
    """The keys of operators of a function that may compute parts of sums: additions of two or more
    values that are sums over a factor, or are made of such by linear operators, and these.

    What is between is read once, so that no more is summed than before. Inputs of the graph lie as
    their first reader wants them, which is whole.
    """
    ends = (*function.outputs, *(graph.ends if function is graph.main else ()))
    return _Sums(function, rules, ends, _inputs(graph, function)).found()


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

    def __init__(
        self, function: Function, rules: Mapping[str, Rule], ends: Iterable[str], inputs: Keys
    ) -> None:
        self.rules, self.specs, self.inputs = rules, function.specs(), inputs
        self.nodes = [item for item in function.body if isinstance(item, Node)]
        self.makers = {value.name: node for node in self.nodes for value in node.results}
        every = (own.refs if isinstance(own, Node) else own.args for own in function.body)
        self.read = Counter([*ends, *(name for names in every for name in names)])
        self.known: dict[str, Keys | None] = {}

    def found(self) -> Keys:
        """The operators of all additions of several sums."""
        marked = set[str]()
        for node in self.nodes:
            parts = [own for own in map(self._made, node.refs) if own is not None]
            if len(parts) > 1 and self._is_linear(node):
                marked.update((node.key,), *parts)
        return frozenset(marked)

    def _made(self, name: str) -> Keys | None:
        """The linear operators that make a value of a sum; None where nothing does."""
        if name not in self.known:
            self.known[name] = self._makes(name)
        return self.known[name]

    def _makes(self, name: str) -> Keys | None:
        node = self.makers.get(name)
        if node is None or self.read[name] != 1:
            return None
        if _is_sum(self.rules[node.key], [value.name for value in node.results].index(name)):
            return frozenset()
        if not self._is_linear(node):
            return None
        parts = [own for own in map(self._made, node.refs) if own is not None]
        return frozenset([node.key]).union(*parts) if parts else None

    def _is_linear(self, node: Node) -> bool:
        """Whether parts of the result are made of parts of all operands, in their dtype."""
        specs = [*(self.specs[name] for name in node.refs), *(v.spec for v in node.results)]
        alike = len({spec.dtype for spec in specs}) == 1 and specs[0].is_float
        alike = alike and self.inputs.isdisjoint(node.refs)
        linear = op_of(node).passes_partial((True,) * len(node.refs))
        whole = len(node.results) == 1 and bool(specs[-1].shape) and not node.kwarg("rounding_mode")
        return alike and linear and whole


def _is_sum(rule: Rule, result: int) -> bool:
    """Whether a result is a sum over a factor that may be split."""
    have = {factor for dim in rule.results[result] for factor in dim}
    kinds = {rule.kind(factor) for factor in rule.shardable if factor not in have}
    return rule.reduction == "sum" and not kinds.isdisjoint(("plain", OFFSET))
