"""Single substitutions on a function: one rule at one place, or one merge of two products.

What follows one after the other is said of the first function at once by `takes_between`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parloom.errors import InputError
from parloom.ir.graph import Function, Graph, Node, Ref, TensorSpec
from parloom.rewrite import merge
from parloom.rewrite.bodies import Body, takes_part, term_of_node
from parloom.rewrite.egraph import Binding, Class, Way, ways
from parloom.rewrite.follows import MOST_NODES, follows, rules_for, with_few_rules
from parloom.rewrite.known import is_proved
from parloom.rewrite.rules import Rule
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.take import NONE, Take, ends_of, term_of, with_takes
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Extent, Name, Term, joined_at_once, size_in

COMMUTATIVE = ("add", "mul")


@dataclass(frozen=True)
class Substitution:
    """Takes that are made together by one rule."""

    takes: tuple[Take, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """The rule that it is of."""
        return self.takes[0].rules


def directions(function: Function, more: Iterable[Rule] = ()) -> tuple[Way, ...]:
    """All rules for a function, and these, in both directions."""
    return tuple(way for rule in (*rules_for(function), *more) for way in ways(rule))


def substitutions(graph: Graph, function: Function, of: Sequence[Way]) -> Iterator[Substitution]:
    """All that apply to `function` as it is: merges of two products, and rules in the directions
    given wherever they match.
    """
    for take in merge.merges_of_two(function):
        yield Substitution((take,))
    yield from by_rules(graph, function, of)


def by_rules(graph: Graph, function: Function, of: Iterable[Way]) -> Iterator[Substitution]:
    """Those by rules in the directions given."""
    body, ends = Body(function, MOST_NODES), ends_of(graph, function)
    first: dict[Class, str] = {}
    for name in body.classes:
        first.setdefault(body.class_of(name), name)
    for match in list(body.graph.all_matches(of)):
        value = first.get(match.owner)
        if value is None or body.places[value] < 0 or not is_proved(match):
            continue
        way, rules = match.way, (match.way.rule.id,)
        try:
            term = joined_at_once(
                _Instance(body, first, match.binding, body.places[value]).of(way.result)
            )
        except NotExpressed:
            continue
        if isinstance(term, Term):
            values = (*(NONE,) * (term.result or 0), value)
            yield Substitution((Take(function.name, values, Term(term.op, term.args), rules),))
        elif isinstance(term, Name) and term.name != value and value not in ends:
            takes = tuple(_reading(body, value, term.name, rules))
            if takes:
                yield Substitution(takes)


def applied(graph: Graph, function: Function, found: Substitution) -> Function | None:
    """The function with a substitution, `graph` having it as it was; None where what it makes would
    be read too early.
    """
    whole = with_function(graph, function)
    try:
        made = with_takes(whole, found.takes)
    except InputError:
        return None
    return {own.name: own for own in (*made.functions, made.main)}[function.name]


def with_function(graph: Graph, function: Function) -> Graph:
    """`graph` with another body of one of its functions."""
    functions = tuple(function if own.name == function.name else own for own in graph.functions)
    main = function if graph.main.name == function.name else graph.main
    return replace(graph, functions=functions, main=main)


def takes_between(
    before: Function, after: Function, rules: Sequence[str]
) -> tuple[Take, ...] | None:
    """The takes that make `after` of `before` at once, which differ by these rules: each by as many
    of them as are needed. None where one does not follow from them in few rounds.
    """
    found = []
    for take in differences(before, after, tuple(rules)):
        named = with_few_rules(before, take)
        if named is not None:
            found.append(named)
        elif not follows(before, take, ()):  # otherwise it is the same in other words
            return None
    return tuple(found)


class _Instance:
    """The terms of a rule where it matches, of values that are made before `place`."""

    def __init__(
        self, body: Body, first: Mapping[Class, str], binding: Binding, place: int
    ) -> None:
        self.body, self.first, self.binding, self.place = body, first, binding, place

    def of(self, arg: TermArg) -> TermArg:
        """A side of the rule, or a part of it."""
        if isinstance(arg, tuple):
            return tuple(map(self.of, arg))
        if isinstance(arg, Extent):
            size: int = size_in(arg.size, self.binding.sizes, 1)
            return size
        if not isinstance(arg, (Term, Name)):
            return arg
        owner = self.body.graph.add(arg, self.binding.inputs, self.binding.sizes)
        value = self.first.get(owner)
        if value is not None and self.body.places[value] < self.place:
            return Name(value)
        if isinstance(arg, Name):
            raise NotExpressed(f"{value} comes too late")
        return Term(arg.op, tuple(map(self.of, arg.args)), arg.result)


def _reading(body: Body, value: str, other: str, rules: tuple[str, ...]) -> Iterator[Take]:
    """What reads a value, reading an equal one; nothing where not all of it can."""
    readers = [
        item
        for item in body.function.body
        if value in (item.refs if isinstance(item, Node) else item.args)
    ]
    if all(isinstance(item, Node) and takes_part(item, body.specs) for item in readers):
        for item in readers:
            assert isinstance(item, Node)
            call = _renamed(term_of_node(item, body.specs), value, other)
            assert isinstance(call, Term)
            yield Take(body.function.name, tuple(v.name for v in item.results), call, rules)


def _renamed(arg: TermArg, value: str, other: str) -> TermArg:
    if isinstance(arg, Name):
        return Name(other) if arg.name == value else arg
    if isinstance(arg, Term):
        return replace(arg, args=tuple(_renamed(own, value, other) for own in arg.args))
    return tuple(_renamed(own, value, other) for own in arg) if isinstance(arg, tuple) else arg


def differences(before: Function, after: Function, rules: tuple[str, ...]) -> Iterator[Take]:
    """The values of one function that another one computes in another way, by any of these rules.

    Values are named where both the first function makes them before, and in other words otherwise:
    each take is of what the first function has.
    """
    made = {v.name: (item, i) for item in before.body for i, v in enumerate(item.results)}
    places = {v.name: at for at, item in enumerate(before.body) for v in item.results}
    first, second = before.specs(), after.specs()

    def is_kept(node: Node) -> bool:
        """Whether it is an operator of the first function; some of its results may be others'."""
        known = [made[v.name] for v in node.results if v.name in made]
        return any(
            isinstance(item, Node)
            and node.results[at].name == item.results[at].name
            and _called(first, item) == _called(second, node)
            for item, at in known
            if at < len(node.results)
        )

    new = {
        v.name: (item, i)
        for item in after.body
        if isinstance(item, Node) and not is_kept(item)
        for i, v in enumerate(item.results)
    }

    def term(arg: TermArg, place: int) -> TermArg:
        if isinstance(arg, tuple):
            return tuple(term(own, place) for own in arg)
        if not isinstance(arg, Name) or arg.name not in new:
            return arg
        if arg.name in made and places[arg.name] < place:
            return arg
        node, at = new[arg.name]
        result = at if len(node.results) > 1 else None
        return Term(node.op, tuple(term(term_of(own), place) for own in node.args), result)

    for item in {id(item): item for item, _ in new.values()}.values():
        names = [v.name if v.name in made else NONE for v in item.results]
        while names and names[-1] == NONE:
            names.pop()
        if names:
            place = min(places[name] for name in names if name != NONE)
            call = Term(item.op, tuple(term(term_of(own), place) for own in item.args))
            yield Take(before.name, tuple(names), call, rules)


def _called(specs: Mapping[str, TensorSpec], node: Node) -> object:
    """A call with dims counted from the last, where rules may say something of it."""
    if takes_part(node, specs):
        return term_of_node(node, specs)
    return node.op, node.args, node.kwargs


Structure = tuple[frozenset[int], tuple[object, ...]]
"""The calls of a function and its outputs."""


def structure(function: Function, known: dict[object, int]) -> Structure:
    """A function without names and order: equal ones compute the same by the same calls. `known`
    numbers the calls of all functions that are compared.
    """
    of: dict[str, object] = {value.name: value.name for value in function.inputs}

    def placed(arg: object) -> object:
        if isinstance(arg, Ref):
            return Ref, of[arg.name]
        return tuple(map(placed, arg)) if isinstance(arg, tuple) else (type(arg), arg)

    found = set[int]()
    for item in function.body:
        key: object
        if isinstance(item, Node):
            args: object = tuple(map(placed, item.args))
            if item.op in COMMUTATIVE and len(item.args) == 2 and not item.kwargs:
                args = frozenset(Counter(map(placed, item.args)).items())
            key = item.op, args, tuple((name, placed(arg)) for name, arg in item.kwargs)
        else:
            key = item.function, item.prefix, tuple(of[name] for name in item.args)
        number = known.setdefault(key, len(known))
        found.add(number)
        of |= {value.name: (number, at) for at, value in enumerate(item.results)}
    return frozenset(found), tuple(of[name] for name in function.outputs)
