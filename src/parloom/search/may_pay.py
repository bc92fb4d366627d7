"""Which rules may pay where they match: e-graphs with these alone stay small.

What a rule adds to the e-graph of a function may cost one device little more than the calls that it
may replace. Under data parallelism a device computes its share of what depends on the batch, and
all of what is made of weights alone: it may be the one that has the whole batch, or only its share,
of which launches are more and products reach less of their rate.

What is made of weights alone has a gradient where one of them trains: of a frozen weight and the
product of two small factors that train, one as large as the frozen weight, in every pass. No rule
may pay that makes of weights what has a gradient, and more elements than those of them that train.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parloom.ir.graph import Node, Ref, TensorSpec, Value
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class, Match, classes_in
from parloom.rewrite.known import is_proved
from parloom.rewrite.shapes import Dims, Shapes, results_of
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.terms import Arg, Extent, Name, Term, size_in
from parloom.search.one_device import FunctionCosts, flowing_results
from parloom.search.program import Flags

# How many times as much as what it may replace a rule may cost.
LITTLE_MORE = 1.1
Weights = frozenset[tuple[str, int]]
"""Weights by name, with their elements."""
Costs = tuple[int, ...]
"""Times (ps) on a device that has the whole batch, and on those that have a share of it."""


@dataclass(frozen=True, slots=True)
class Made:
    """A value: whether gradients flow through it, in each kind of calls of the function, whether it
    is made of weights alone, and then, in each kind of calls, of which that train.
    """

    spec: TensorSpec
    flows: Flags
    of_weights: bool
    trained: tuple[Weights, ...]

    @property
    def grows(self) -> bool:
        """Whether its gradient is larger than those of the weights that it is made of."""
        most = (sum(size for _, size in own) for own in self.trained)
        return any(0 < own < self.spec.num_elements for own in most)


class Values:
    """What is known of the classes in the e-graph of a function, of which `weights` are inputs, and
    of calls of them. `costs` are those of the whole batch, and of shares.
    """

    def __init__(
        self, body: Body, costs: Sequence[FunctionCosts], weights: Collection[str]
    ) -> None:
        self.body, self.costs = body, costs
        flowing, of_weights = costs[0].flowing(body.function), set(weights)
        for item in body.function.body:
            read = item.refs if isinstance(item, Node) else item.args
            if read and of_weights.issuperset(read):
                of_weights.update(value.name for value in item.results)
        self._known = {
            body.class_of(name): Made(
                body.specs[name],
                tuple(name in own for own in flowing),
                name in of_weights,
                tuple(
                    Weights([(name, body.specs[name].num_elements)])
                    if name in of_weights and name in own
                    else Weights()
                    for own in flowing
                ),
            )
            for name in body.classes
        }

    def grows(self, call: Term, classes: Mapping[str, Class]) -> bool:
        """Whether a call of values with these classes makes of weights what has a gradient, and
        more elements than those of them that train.
        """
        found: list[Made] = []

        def made(arg: Any) -> Any:
            if isinstance(arg, Name):
                return self.made(self.body.graph.find(classes[arg.name]))
            if isinstance(arg, Term):
                results, _ = self.called(arg.op, tuple(map(made, arg.args)), {})
                found.extend(results)
                return results[arg.result or 0]
            return tuple(map(made, arg)) if isinstance(arg, tuple) else arg

        try:
            made(call)
        except NotExpressed:  # no rule says what such calls make of weights
            return False
        return any(own.grows for own in found)

    def made(self, one: Class) -> Made:
        """What is known of a class, by one of its calls."""
        graph = self.body.graph
        if graph.find(one) not in self._known:  # classes may be others since they were united
            self._known |= {graph.find(own): made for own, made in self._known.items()}
        found = self._made(one, frozenset())
        assert found is not None, "each class is made of inputs in some way"
        return found

    def _made(self, one: Class, within: frozenset[Class]) -> Made | None:
        own = self.body.graph.find(one)
        if own not in self._known:
            for op, args, result in self.body.graph.calls_of(own):
                read = [self.body.graph.find(child) for child in classes_in(args)]
                if {own, *within}.isdisjoint(read):
                    parts = [self._made(child, within | {own}) for child in read]
                    if None not in parts:
                        made, _ = self.called(op, args, dict(zip(read, parts, strict=True)))
                        self._known[own] = made[result]
                        break
        return self._known.get(own)

    def called(
        self, op: str, args: tuple[Any, ...], known: Mapping[Class, Any]
    ) -> tuple[list[Made], Costs]:
        """The results of a call, and what it costs."""
        graph, parts = self.body.graph, list[Made]()

        def shown(arg: Any) -> Any:
            if isinstance(arg, (Class, Made)):
                parts.append(known[graph.find(arg)] if isinstance(arg, Class) else arg)
                return Dims(parts[-1].spec.shape)
            return tuple(map(shown, arg)) if isinstance(arg, tuple) else arg

        shapes = results_of(op, Shapes(1), tuple(map(shown, args)))
        if not parts:
            raise NotExpressed(f"{op} is of nothing")
        specs = [part.spec for part in parts]
        dtype = next((spec for spec in specs if spec.is_float), specs[0]).dtype
        values = (Value("", TensorSpec(tuple(dims.shape), dtype)) for dims in shapes)
        node = Node(op, _with_refs(args), (), tuple(values))
        every = list(zip(*(part.flows for part in parts), strict=True))
        flows = zip(*(flowing_results(node, flags) for flags in every), strict=True)
        of_weights = all(part.of_weights for part in parts)
        kinds = zip(*(part.trained for part in parts), strict=True)
        trained = tuple(Weights().union(*own) if of_weights else Weights() for own in kinds)
        made = [
            Made(value.spec, own, of_weights, trained)
            for value, own in zip(node.results, flows, strict=True)
        ]
        priced = [self.costs[0]] * len(self.costs) if of_weights else self.costs
        return made, tuple(own.device.ps(node, specs, own.flows(every)) for own in priced)


class MayPay:
    """Whether a rule that matches in the e-graph of a function may pay on one device that has the
    whole batch or a share of it.
    """

    def __init__(self, values: Values) -> None:
        self.values, self.body = values, values.body
        # Operators of the function that are of weights and of other values: those.
        self._products = [
            (item, rest)
            for item in self.body.function.body
            if isinstance(item, Node) and 0 < len(rest := self._rest(item)) < len(item.refs)
        ]

    def __call__(self, match: Match) -> bool:
        added, replaced = dict[object, Costs](), dict[object, Costs]()
        try:
            self._priced(match.way.result, match, added, False)
            self._priced(match.way.pattern, match, replaced, True)
        except NotExpressed:
            return False
        return is_proved(match) and any(
            new <= LITTLE_MORE * old
            for new, old in zip(self._sum(added), self._sum(replaced), strict=True)
        )

    def _sum(self, costs: Mapping[object, Costs]) -> list[int]:
        return [sum(own[at] for own in costs.values()) for at in range(len(self.values.costs))]

    def _priced(self, arg: Arg, match: Match, costs: dict[object, Costs], every: bool) -> Any:
        """An argument as calls have it, with what its calls cost: `every` one, or those that the
        e-graph has not, whose results are `Made`.
        """
        graph, binding = self.body.graph, match.binding
        if isinstance(arg, Name):
            return graph.find(binding.inputs[arg.name])
        if isinstance(arg, Extent):
            return size_in(arg.size, binding.sizes, 1)
        if isinstance(arg, tuple):
            return tuple(self._priced(own, match, costs, every) for own in arg)
        if not isinstance(arg, Term):
            return arg
        args, at = tuple(self._priced(own, match, costs, every) for own in arg.args), arg.result
        # The value that a rule replaces has a gradient already: what it makes on the way may not.
        if any(own.grows for own in _mades_in(args)):
            raise NotExpressed(f"{arg.op} reads what makes more gradients of weights")
        there = None if any(_mades_in(args)) else graph.call(arg.op, args, at or 0)
        if there is None or every:
            known = {child: self.values.made(child) for child in classes_in(args)}
            made, costs[arg.op, args] = self.values.called(arg.op, args, known)
            if there is None and self._may_be_added_up(arg.op, args, made):
                costs[arg.op, args] = (0,) * len(self.values.costs)
            return made[at or 0] if there is None else there
        return there

    def _may_be_added_up(self, op: str, args: tuple[Any, ...], made: Sequence[Made]) -> bool:
        """Whether an operator of the function is of the same values that depend on the batch, by
        other weights, with a result as large: where both are added up, both are one, of the sum of
        the weights, as those of a low-rank adapter beside its weight.
        """
        find, shapes = self.body.graph.find, [own.spec.shape for own in made]
        if not any(self._is_of_weights(child) for child in classes_in(args)) and not any(
            own.of_weights for own in _mades_in(args)
        ):
            return False
        read = {find(child) for child in classes_in(args) if not self._is_of_weights(child)}
        return any(
            own.op == op
            and [value.spec.shape for value in own.results] == shapes
            and read == {self.body.class_of(name) for name in names}
            for own, names in self._products
        )

    def _rest(self, node: Node) -> list[str]:
        """What a node reads that is not made of weights alone."""
        return [name for name in node.refs if not self._is_of_weights(self.body.class_of(name))]

    def _is_of_weights(self, one: Class) -> bool:
        return self.values.made(one).of_weights


def _mades_in(args: Iterable[Any]) -> Iterable[Made]:
    for arg in args:
        if isinstance(arg, Made):
            yield arg
        elif isinstance(arg, tuple):
            yield from _mades_in(arg)


def _with_refs(arg: Any) -> Any:
    """Arguments with a value without a name in the place of each class."""
    if isinstance(arg, (Class, Made)):
        return Ref("")
    return tuple(map(_with_refs, arg)) if isinstance(arg, tuple) else arg
