"""The body of a function as an e-graph: what equals its values by rules.

A call takes part where its entry says what it computes and all its tensors are floating or complex
ones of one dtype, but for the places of a lookup; results of other calls are inputs. Arithmetic of
integers and masks is not that of numbers: sums wrap around, and those of masks are "or". Dims are
counted from the last, as rules count them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from parloom.ir.graph import Arg, Call, Function, Node, Ref, TensorSpec
from parloom.ir.ops import OPS
from parloom.rewrite.egraph import Class, EGraph, Key, May, always, classes_in
from parloom.rewrite.rules import Rule
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.take import NONE, Take, term_of
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Name, Term, in_pairs, joined_at_once, names_in

# Where an operator says a dim, or dims.
DIMS: Mapping[str, int] = {
    "cat": 1, "stack": 1, "split_with_sizes": 2, "softmax": 1, "sum": 1, "mean": 1,
}  # fmt: skip

# Operators of which rules say flags.
FLAGGED = frozenset({"batch_norm"})

# The operand that says places of another one.
PLACES: Mapping[str, int] = {"embedding": 1}

# The operand whose dims behind the first two are places of windows.
KERNELS: Mapping[str, int] = {"conv1d": 1, "conv2d": 1, "conv3d": 1}

# The argument that says how many groups there are (the factor "g" of the operator's rule), or the
# shape of the result.
GROUPS: Mapping[str, int] = {"conv1d": 6, "conv2d": 6, "conv3d": 6}
SHAPES: Mapping[str, int] = {"view": 1, "expand": 1}

# Terms of what no value of the function is, and calls of these.
FORMS, COMBINED = 2, 4


class Body:
    """The values of a function, and what equals them."""

    def __init__(self, function: Function, most_nodes: int) -> None:
        self.function, self.graph = function, EGraph(most_nodes, one=1)
        self.specs = function.specs()
        self.classes: dict[str, Class] = {}
        # The item that makes a value, by its place; inputs come before all.
        self.places: dict[str, int] = {}
        self._own: list[Key] = []
        self._inputs: set[str] = set()
        for value in function.inputs:
            self._given(value.name, -1)
        for place, item in enumerate(function.body):
            if isinstance(item, Call) or not takes_part(item, self.specs):
                for value in item.results:
                    self._given(value.name, place)
            else:
                self._call(item, place)

    def saturate(self, rules: Sequence[Rule], rounds: int, may: May = always) -> bool:
        """Apply rules that `may` be; whether nothing changes any more."""
        return self.graph.saturate(rules, rounds, may)

    def class_of(self, value: str) -> Class:
        """The class that a value is in."""
        return self.graph.find(self.classes[value])

    def is_given(self, value: str) -> bool:
        """Whether nothing is said of how a value is made."""
        return value in self._inputs

    @property
    def own_calls(self) -> set[tuple[str, tuple[Any, ...]]]:
        """The calls of the function, of the classes that there are now."""
        return {(op, self.graph.renewed(args)) for op, args, _ in self._own}

    def takes(self, most: int) -> Iterator[Take]:
        """Other ways to compute values, at most so many of each, of what is made before these; by
        all rules that changed anything.
        """
        rules = tuple(self.graph.fired)
        first: dict[Class, str] = {}
        for value in self.classes:
            first.setdefault(self.class_of(value), value)
        terms: dict[Class, list[TermArg]] = {own: [Name(value)] for own, value in first.items()}
        alike = {
            _unordered((op, self.graph.renewed(args), result)) for op, args, result in self._own
        }
        counts = Counter[str]()
        for key, owner in self._by_operands():
            value = first.get(owner, "")
            place = self.places[value] if value else len(self.function.body)
            if _unordered(key) in alike or value in self._inputs:
                continue
            for term in self._terms(key, terms, place):
                if not value and len(terms.setdefault(owner, [])) < FORMS:
                    terms[owner].append(term)
                elif value and counts[value] < most:
                    counts[value] += 1
                    call = joined_at_once(term)
                    assert isinstance(call, Term)
                    values = (*(NONE,) * (call.result or 0), value)
                    yield Take(self.function.name, values, replace(call, result=None), rules)

    def _terms(
        self, key: Key, terms: Mapping[Class, Sequence[TermArg]], place: int
    ) -> Iterator[Term]:
        """A call of terms that are made before an item."""
        children = list(dict.fromkeys(classes_in(key[1])))
        before = [
            [term for term in terms.get(child, ()) if self._is_before(term, place)]
            for child in children
        ]
        for some in islice(product(*before), COMBINED):
            known = dict(zip(children, some, strict=True))
            yield Term(key[0], tuple(_with_terms(arg, known) for arg in key[1]), key[2])

    def _by_operands(self) -> Iterator[tuple[Key, Class]]:
        """All calls, those of which what they read is there first; in one order for equal ones."""
        there = {self.class_of(value) for value in self.classes}
        left = sorted(self.graph.nodes(), key=lambda own: str(own[0]))
        while ready := [own for own in left if there.issuperset(classes_in(own[0][1]))]:
            yield from ready
            there.update(owner for _, owner in ready)
            left = [own for own in left if own not in ready]

    def _is_before(self, term: TermArg, place: int) -> bool:
        """Whether all that a term is of is made before an item."""
        return all(self.places[name] < place for name in names_in(term))

    def _given(self, name: str, place: int) -> None:
        self.classes[name] = self.graph.input(name, self.specs[name].shape)
        self.places[name] = place
        self._inputs.add(name)

    def _call(self, node: Node, place: int) -> None:
        """Add a call, or its results as inputs where its shapes are not what is said of it."""
        args = term_of_node(node, self.specs).args
        calls = [in_pairs(Term(node.op, args, i)) for i in range(len(node.results))]
        try:
            made = [self.graph.add(call, self.classes, {}) for call in calls]
        except NotExpressed:
            made = []
        for index, value in enumerate(node.results):
            self.places[value.name] = place
            if made and self.graph.shapes[made[index].number] == value.spec.shape:
                self.classes[value.name] = made[index]
                call = calls[index]
                assert isinstance(call, Term)
                renewed = tuple(self.graph.add(arg, self.classes, {}) for arg in call.args)
                self._own.append((call.op, renewed, call.result or 0))
            else:
                self._given(value.name, place)


def takes_part(node: Node, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a call can be written as a term of which it is known what it computes."""
    op = OPS.get(node.op)
    if op is None or op.computes is None or op.random or node.kwargs:
        return False
    places = PLACES.get(node.op)
    own = [specs[name] for at, name in enumerate(node.refs) if at != places]
    own += [value.spec for value in node.results]
    told = (arg for arg in node.args if not (isinstance(arg, bool) and node.op in FLAGGED))
    return _one_dtype(own) and not any(map(_has_dtype, told))


def _one_dtype(specs: Sequence[TensorSpec]) -> bool:
    return all(s.is_float for s in specs) and len({spec.dtype for spec in specs}) <= 1


def _has_dtype(arg: Arg) -> bool:
    """Whether an argument says a dtype or a flag, which no term does."""
    if isinstance(arg, tuple):
        return any(map(_has_dtype, arg))
    return not (arg is None or isinstance(arg, (Ref, int, float, str))) or isinstance(arg, bool)


def term_of_node(node: Node, specs: Mapping[str, TensorSpec]) -> Term:
    """A call as a term, with dims counted from the last."""
    return Term(node.op, tuple(from_last(node, i, arg, specs) for i, arg in enumerate(node.args)))


def from_last(node: Node, position: int, arg: Arg, specs: Mapping[str, TensorSpec]) -> TermArg:
    """An argument of a call as that of a term: dims are counted from the last."""
    if DIMS.get(node.op) == position and not isinstance(arg, (Ref, str, float)):
        return _from_last(arg, len(specs[node.refs[0]].shape))
    return term_of(arg)


def _from_last(arg: Arg, rank: int) -> TermArg:
    """A dim, or dims, counted from the last."""
    if isinstance(arg, tuple):
        return tuple(_from_last(own, rank) for own in arg)
    if isinstance(arg, int):
        return arg if arg < 0 else arg - rank
    return term_of(arg)


def _unordered(key: Key) -> Any:
    """A call without the order of its operands, where that makes no difference."""
    op, args, result = key
    return (op, frozenset(Counter(args).items()), result) if op in ("add", "mul") else key


def _with_terms(arg: Any, terms: Mapping[Class, TermArg]) -> TermArg:
    if isinstance(arg, Class):
        return terms[arg]
    found: TermArg = (
        tuple(_with_terms(own, terms) for own in arg) if isinstance(arg, tuple) else arg
    )
    return found
