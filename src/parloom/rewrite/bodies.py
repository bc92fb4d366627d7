"""The body of a function as an e-graph: what equals its values by rules.

A call takes part where its entry says what it computes and all its tensors are floating or complex
ones of one dtype, but for the places of a lookup; results of other calls are inputs. Arithmetic of
integers and masks is not that of numbers: sums wrap around, and those of masks are "or". Dims are
counted from the last, as rules count them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from parloom.ir.graph import Arg, Call, Function, Node, Ref, TensorSpec
from parloom.ir.ops import OPS
from parloom.rewrite.egraph import Class, EGraph, Key, May, always
from parloom.rewrite.rules import Rule
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.take import Take, term_of
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Term, has_minus_zero, in_pairs

# Where an operator says a dim, or dims, and of which it is the first where that is not said.
DIMS: Mapping[str, int] = {
    "cat": 1, "stack": 1, "split_with_sizes": 2, "softmax": 1, "sum": 1, "mean": 1,
}  # fmt: skip
FIRST_DIM = frozenset({"cat", "stack", "split_with_sizes"})

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


class Body:
    """The values of a function, and what equals them."""

    def __init__(self, function: Function, most_nodes: int) -> None:
        self.function, self.graph = function, EGraph(most_nodes, one=1)
        self.specs = function.specs()
        self.classes: dict[str, Class] = {}
        # The item that makes a value, by its place; inputs come before all.
        self.places: dict[str, int] = {}
        self._own: dict[str, Key] = {}
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

    def unite(self, take: Take, names: Mapping[str, Class]) -> None:
        """Add the results of a call, of values with these classes, which they equal."""
        for index, value in take.taken:
            made = self.graph.add(Term(take.call.op, take.call.args, index), names, {})
            self.graph.unite(self.graph.find(names[value]), made)
        self.graph.rebuild()

    def class_of(self, value: str) -> Class:
        """The class that a value is in."""
        return self.graph.find(self.classes[value])

    def is_given(self, value: str) -> bool:
        """Whether nothing is said of how a value is made."""
        return value in self._inputs

    @property
    def own_calls(self) -> set[tuple[str, tuple[Any, ...]]]:
        """The calls of the function, of the classes that there are now."""
        return {(op, self.graph.renewed(args)) for op, args, _ in self._own.values()}

    def call_of(self, value: str) -> tuple[str, tuple[Any, ...]] | None:
        """The call of the function that makes a value, of the classes that there are now; None
        where nothing is said of it.
        """
        if value not in self._own:
            return None
        op, args, _ = self._own[value]
        return op, self.graph.renewed(args)

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
                self._own[value.name] = call.op, renewed, call.result or 0
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
    # Calls are compared, by which 0.0 is -0.0.
    return _one_dtype(own) and not any(_has_dtype(arg) or has_minus_zero(arg) for arg in told)


def _one_dtype(specs: Sequence[TensorSpec]) -> bool:
    return all(s.is_float for s in specs) and len({spec.dtype for spec in specs}) <= 1


def _has_dtype(arg: Arg) -> bool:
    """Whether an argument says a dtype or a flag, which no term does."""
    if isinstance(arg, tuple):
        return any(map(_has_dtype, arg))
    return not (arg is None or isinstance(arg, (Ref, int, float, str))) or isinstance(arg, bool)


def term_of_node(node: Node, specs: Mapping[str, TensorSpec]) -> Term:
    """A call as a term, with dims counted from the last."""
    args = node.args
    if node.op in FIRST_DIM and len(args) == DIMS[node.op]:
        args = (*args, 0)
    return Term(node.op, tuple(from_last(node, i, arg, specs) for i, arg in enumerate(args)))


def from_last(node: Node, position: int, arg: Arg, specs: Mapping[str, TensorSpec]) -> TermArg:
    """An argument of a call as that of a term: dims are counted from the last."""
    if DIMS.get(node.op) == position and not isinstance(arg, (Ref, str, float)):
        # `stack` says where among the dims of its result the new one is.
        return _from_last(arg, len(specs[node.refs[0]].shape) + (node.op == "stack"))
    return term_of(arg)


def _from_last(arg: Arg, rank: int) -> TermArg:
    """A dim, or dims, counted from the last."""
    if isinstance(arg, tuple):
        return tuple(_from_last(own, rank) for own in arg)
    if isinstance(arg, int):
        return arg if arg < 0 else arg - rank
    return term_of(arg)
