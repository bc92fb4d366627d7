"""The body of a function as an e-graph: what equals its values by rules.

A call takes part where its entry says what it computes and all its floating tensors have one dtype;
results of other calls are inputs. Dims are counted from the last, as rules count them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parloom.ir.graph import Arg, Call, Function, Node, Ref, TensorSpec
from parloom.ir.ops import OPS
from parloom.rewrite.egraph import Class, EGraph, Key
from parloom.rewrite.rules import Rule
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Name, Term

# Where an operator says a dim, or dims.
DIMS: Mapping[str, int] = {
    "cat": 1, "stack": 1, "split_with_sizes": 2, "softmax": 1, "sum": 1, "mean": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Equal:
    """A call that the body has not: a result of it equals `value`, the first of those of its class;
    empty of one that only other such calls read.
    """

    key: Key
    value: str


class Body:
    """The values of a function, and what equals them."""

    def __init__(self, function: Function, most_nodes: int) -> None:
        self.function, self.graph = function, EGraph(most_nodes, one=1)
        self.specs = function.specs()
        self.classes: dict[str, Class] = {}
        # The item that makes a value, by its place; inputs come before all.
        self.places: dict[str, int] = {}
        self._own: list[tuple[str, tuple[Any, ...], int]] = []
        for value in function.inputs:
            self._given(value.name, -1)
        for place, item in enumerate(function.body):
            if isinstance(item, Call) or not self._takes_part(item):
                for value in item.results:
                    self._given(value.name, place)
            else:
                self._call(item, place)

    def saturate(self, rules: Sequence[Rule], rounds: int) -> bool:
        """Apply rules; whether nothing changes any more."""
        return self.graph.saturate(rules, rounds)

    def class_of(self, value: str) -> Class:
        """The class that a value is in."""
        return self.graph.find(self.classes[value])

    def equal(self) -> Iterator[Equal]:
        """The calls that the body has not, as far as all that they read is made before what they
        equal: those that others read first.
        """
        ranks, first = self._ranks(), dict[Class, str]()
        for value in self.classes:
            first.setdefault(self.class_of(value), value)
        own = {self._renewed(key) for key in self._own}
        found = []
        for key, owner in self.graph.nodes():
            before = max((ranks[child] for child in _classes(key[1])), default=-1)
            value = first.get(owner, "")
            if key in own or before >= len(self.function.body):
                continue
            if not value or before < self.places[value]:
                found.append((before, key, value))
        for _, key, value in sorted(found, key=lambda own: (own[0], str(own[1]))):
            yield Equal(key, value)

    def _ranks(self) -> dict[Class, int]:
        """The place of the last item that has to be made before each class can be."""
        end = len(self.function.body)
        ranks: dict[Class, int] = {}
        for value in self.classes:
            ranks.setdefault(self.class_of(value), self.places[value])
        nodes = list(self.graph.nodes())
        changed = True
        while changed:
            changed = False
            for key, owner in nodes:
                before = max((ranks.get(child, end) for child in _classes(key[1])), default=-1)
                if before < ranks.get(owner, end):
                    ranks[owner] = before
                    changed = True
        return {**dict.fromkeys((owner for _, owner in nodes), end), **ranks}

    def _given(self, name: str, place: int) -> None:
        self.classes[name] = self.graph.input(name, self.specs[name].shape)
        self.places[name] = place

    def _call(self, node: Node, place: int) -> None:
        """Add a call, or its results as inputs where its shapes are not what is said of it."""
        args = tuple(self._arg(node, i, arg) for i, arg in enumerate(node.args))
        try:
            made = [
                self.graph.add(Term(node.op, args, i), self.classes, {})
                for i in range(len(node.results))
            ]
        except (NotExpressed, NotImplementedError):
            made = []
        for index, value in enumerate(node.results):
            self.places[value.name] = place
            if made and self.graph.shapes[made[index].number] == value.spec.shape:
                self.classes[value.name] = made[index]
                renewed = tuple(self.graph.add(arg, self.classes, {}) for arg in args)
                self._own.append((node.op, renewed, index))
            else:
                self._given(value.name, place)

    def _arg(self, node: Node, position: int, arg: Arg) -> TermArg:
        """An argument of a call as that of a term."""
        if DIMS.get(node.op) == position and not isinstance(arg, (Ref, str, float)):
            first = node.refs[0]
            return _from_last(arg, len(self.specs[first].shape))
        return _term_arg(arg)

    def _takes_part(self, node: Node) -> bool:
        op = OPS.get(node.op)
        if op is None or op.computes is None or op.random or node.kwargs:
            return False
        specs = [self.specs[name] for name in node.refs]
        specs += [value.spec for value in node.results]
        return _one_dtype(specs) and not any(_has_dtype(arg) for arg in node.args)

    def _renewed(self, key: tuple[str, tuple[Any, ...], int]) -> Key:
        op, args, result = key

        def now(arg: Any) -> Any:
            if isinstance(arg, Class):
                return self.graph.find(arg)
            return tuple(map(now, arg)) if isinstance(arg, tuple) else arg

        return op, tuple(map(now, args)), result


def _one_dtype(specs: Sequence[TensorSpec]) -> bool:
    return len({spec.dtype for spec in specs if spec.is_float}) <= 1


def _has_dtype(arg: Arg) -> bool:
    """Whether an argument says a dtype or a flag, which no term does."""
    if isinstance(arg, tuple):
        return any(map(_has_dtype, arg))
    return not (arg is None or isinstance(arg, (Ref, int, float, str))) or isinstance(arg, bool)


def _term_arg(arg: Arg) -> TermArg:
    if isinstance(arg, Ref):
        return Name(arg.name)
    if isinstance(arg, tuple):
        return tuple(map(_term_arg, arg))
    assert arg is None or isinstance(arg, (int, float, str)), "it was looked at"
    return arg


def _from_last(arg: Arg, rank: int) -> TermArg:
    """A dim, or dims, counted from the last."""
    if isinstance(arg, tuple):
        return tuple(_from_last(own, rank) for own in arg)
    if isinstance(arg, int):
        return arg if arg < 0 else arg - rank
    return _term_arg(arg)


def _classes(args: Sequence[Any]) -> Iterator[Class]:
    for arg in args:
        if isinstance(arg, Class):
            yield arg
        elif isinstance(arg, tuple):
            yield from _classes(arg)
