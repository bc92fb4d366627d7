"""All forms of a graph at once: where a value can be computed in several ways, each is there.

An operator `parloom.either` takes one of equal values. Such a graph is searched and never runs:
`Forms.form` is the graph in which each of them takes what was chosen, with the rewrites that make
it of the graph that was asked about. What only some forms need may be left out.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import combinations
from operator import and_, or_

from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Call, Function, Graph, Node, Ref, Value, rename_node
from parloom.ir.ops import OPS, Rule
from parloom.ir.ops.shape import EITHER
from parloom.rewrite.take import (
    Body,
    Item,
    NewCalls,
    Origin,
    Take,
    ends_of,
    in_order,
    taken_bodies,
    with_bodies,
    with_results,
)
from parloom.rewrite.terms import Name, Term

Place = tuple[str, str]
"""A block kind and the key of an operator in it."""
Made = tuple[str, Origin]
"""A block kind, and what an item of it was."""
Condition = tuple[Place, int]
"""An operator that takes one of several values, and the operand that it takes."""
Needed = Mapping[Place, frozenset[int]]
"""By operators that take one of several values, which operands they may take."""


@dataclass(frozen=True)
class Form:
    """A graph, and the rewrites that make it; `places` says which operator of the graph with all
    forms each of its operators is.
    """

    factored: Factored
    rewrites: tuple[str, ...] = ()
    places: Mapping[Place, Place] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.factored.graph

    @cached_property
    def rules(self) -> Mapping[Place, Rule]:
        """The rules of the operators, by where these are in the graph with all forms."""
        return {
            self.places[own.name, item.key]: self.factored.rule(own.name, item)
            for own in (*self.graph.functions, self.graph.main)
            for item in own.body
            if isinstance(item, Node)
        }

    def key_of(self, function: str, key: str) -> str:
        """The key here of an operator in a block of the graph with all forms; other names stay."""
        found = (own for (name, own), old in self.places.items() if old == (function, key))
        return next(found, key)


class Forms:
    """The forms of `asked` with some of these takes, of which several may be of one value. `graph`
    has all; operators at the places `optional` may be left out. Of a pair of conditions in
    `together` both are true or none, as far as both operators are there.

    A batch tensor comes as its first reader wants it. Where that may be left out, an operator of
    one operand stands for how it comes; one of the readers at `first` is there and takes it so.
    """

    def __init__(self, asked: Graph, takes: Sequence[Take]) -> None:
        self.asked, self.takes = asked, tuple(takes)
        functions = (*asked.functions, asked.main)
        self._ends = {own.name: ends_of(asked, own) for own in functions}
        bodies = {own.name: self._superposed(own) for own in functions}
        optional, first = self._optional(bodies), set[Made]()
        for entry in reversed(asked.of_kind("batch")):
            readers = list(_first_readers(asked, bodies, asked.main.name, entry.value, optional))
            if optional.intersection(readers):
                bodies[asked.main.name] = _with_source(asked.main, bodies, entry.value)
                first.update(readers)
        self.graph = with_bodies(asked, bodies)
        self._places = {
            (own.name, origin): (own.name, item.key)
            for own in (*self.graph.functions, self.graph.main)
            for item, (_, origin) in zip(own.body, bodies[own.name], strict=True)
            if isinstance(item, Node)
        }
        self.first = frozenset(self._places[made] for made in first)
        self.optional = frozenset(self._places[made] for made in self._optional(bodies))
        self.positions = {take: tuple(self._taken_by(take)) for take in takes}
        self.together = tuple(
            pair for own in self.positions.values() for pair in combinations(own, 2)
        )
        self._num_operands = {
            (own.name, item.key): len(item.refs)
            for own in (*self.graph.functions, self.graph.main)
            for item in own.body
            if isinstance(item, Node)
        }
        self._same = self._true_together()
        self._needed, self._enough = dict[Place, Needed](), dict[Place, frozenset[Condition]]()
        for place, needed, enough in self._conditions():
            self._needed[place], self._enough[place] = needed, enough
        self._known: dict[tuple[Take, ...], Form] = {}

    def place_of(self, function: str, origin: Origin) -> Place:
        """Where an operator of the graph that was asked about is, or a call of a take."""
        return self._places[function, origin]

    def form(self, taken: Mapping[Place, int]) -> Form:
        """The graph in which operators at these places take the operands in these positions, as far
        as they are there.
        """
        takes = tuple(
            take
            for take, positions in self.positions.items()
            if any(taken.get(place) == at for place, at in positions)
        )
        if takes not in self._known:
            self._known[takes] = self.of(takes)
        return self._known[takes]

    def of(self, takes: Sequence[Take]) -> Form:
        """The graph with these takes."""
        bodies = taken_bodies(self.asked, takes)
        graph = with_bodies(self.asked, bodies) if takes else self.asked
        places = {
            (own.name, item.key): self._places[own.name, origin]
            for own in (*graph.functions, graph.main)
            for item, (_, origin) in zip(own.body, bodies.get(own.name) or _as_is(own), strict=True)
            if isinstance(item, Node)
        }
        return Form(factorize(graph), tuple(map(str, takes)), places)

    def meet(self, one: Place, other: Place) -> bool:
        """Whether two operators may be there together."""
        mine, its = self._needed.get(one, {}), self._needed.get(other, {})
        return not any(mine[either].isdisjoint(its[either]) for either in mine.keys() & its.keys())

    def one_is_there(self, places: Collection[Place]) -> bool:
        """Whether every form has one of these operators, as far as one choice says it."""
        if not self.optional.issuperset(places):
            return True
        enough = set[Condition]().union(*(self._enough.get(place, ()) for place in places))
        return any(
            all((either, at) in enough for at in range(self._num_operands[either]))
            for either in {either for either, _ in enough}
        )

    def _superposed(self, function: Function) -> Body:
        """The function with all takes of its values beside these."""
        takes = [take for take in self.takes if take.function == function.name]
        if not takes:
            return _as_is(function)
        calls = NewCalls(function, takes, beside=True)
        others: dict[str, list[str]] = {}
        for take in takes:
            for index, value in take.taken:
                name = calls.result(Term(take.call.op, take.call.args, index))
                others.setdefault(value, []).append(name)
        alone = {value: calls.unused(f"{value}_apart") for value in others}
        items, paths = Body(), calls.paths
        for item in function.body:
            items.append((with_results(item, alone), item))
            for own in item.results if isinstance(item, Node) else ():
                if own.name in others:
                    refs = tuple(map(Ref, (alone[own.name], *others[own.name])))
                    either = Node(EITHER, refs, (), (own,), paths[own.name])
                    items.append((either, _either(own.name)))
        return in_order(function, items, calls.nodes.items())

    def _taken_by(self, take: Take) -> Iterator[tuple[Place, int]]:
        """The operators that take the results of a take, and the positions of these there."""
        for _, value in take.taken:
            others = [
                other
                for other in self.takes
                if other.function == take.function and value in other.values
            ]
            yield self._places[take.function, _either(value)], 1 + others.index(take)

    def _optional(self, bodies: Mapping[str, Body]) -> frozenset[Made]:
        return frozenset(
            (name, origin)
            for name, body in bodies.items()
            for origin in _optional(body, self._ends[name])
        )

    def _true_together(self) -> Mapping[Condition, frozenset[Condition]]:
        """All conditions that are true with one, by it."""
        links, counts = set(self.together), Counter[Place]()
        for own in self.positions.values():
            counts.update(place for place, _ in own)
        shared = Counter((one[0], other[0]) for one, other in self.together)
        # Those that have the same takes leave values as they are together, too.
        for (one, other), count in shared.items():
            if count == counts[one] == counts[other]:
                links.add(((one, 0), (other, 0)))
        found: dict[Condition, frozenset[Condition]] = {}
        for pair in sorted(links):
            both = frozenset().union(*(found.get(own, {own}) for own in pair))
            found |= dict.fromkeys(both, both)
        return found

    def _same_as(self, one: Condition) -> frozenset[Condition]:
        return self._same.get(one, frozenset({one}))

    def _conditions(self) -> Iterator[tuple[Place, Needed, frozenset[Condition]]]:
        """Of each operator that may be left out, what is taken in all forms that have it, and of
        what each by itself is enough for it to be there.
        """
        for own in (*self.graph.functions, self.graph.main):
            needs: dict[str, Needed] = {name: {} for name in self._ends[own.name]}
            enough: dict[str, frozenset[Condition]] = {}
            for item in reversed(own.body):
                read = [needs[v.name] for v in item.results if v.name in needs]
                known = reduce(_either_of, read) if read else {}
                sure = frozenset[Condition]().union(*(enough.get(v.name, ()) for v in item.results))
                place = own.name, item.key if isinstance(item, Node) else ""
                is_there = isinstance(item, Call) or place not in self.optional
                known, sure = ({}, frozenset()) if is_there else (known, sure)
                if not is_there:
                    yield place, known, sure
                for at, name in enumerate(_read(item)):
                    here, by = known, sure
                    if _takes(item):
                        same = self._same_as((place, at))
                        here = _both_of(known, {either: frozenset({to}) for either, to in same})
                        by = frozenset(c for c in same if is_there and c[0] not in self.optional)
                    needs[name] = _either_of(needs[name], here) if name in needs else here
                    enough[name] = enough.get(name, frozenset()) | by


def _either_of(one: Needed, other: Needed) -> Needed:
    """What holds where one of two does."""
    return {either: one[either] | other[either] for either in one.keys() & other.keys()}


def _both_of(one: Needed, other: Needed) -> Needed:
    """What holds where both do."""
    shared = {either: one[either] & other[either] for either in one.keys() & other.keys()}
    return {**one, **other, **shared}


def _as_is(function: Function) -> Body:
    return [(item, item) for item in function.body]


def _either(value: str) -> Term:
    """What stands for the operator that takes one of the forms of a value."""
    return Term(EITHER, (Name(value),))


def _takes(item: Item) -> bool:
    return isinstance(item, Node) and item.op == EITHER and len(item.refs) > 1


def _read(item: Item) -> tuple[str, ...]:
    return item.refs if isinstance(item, Node) else item.args


def _optional(body: Body, ends: Collection[str]) -> Iterator[Origin]:
    """The operators that are read, but not needed in every form."""
    # What each value needs in every form, as bits of items.
    needs: dict[str, int] = {}
    read = {name for item, _ in body for name in _read(item)}
    for index, (item, _) in enumerate(body):
        each = [needs.get(name, 0) for name in _read(item)]
        found = reduce(and_ if _takes(item) else or_, each) if each else 0
        needs |= {value.name: found | 1 << index for value in item.results}
    always = 0
    for item, _ in body:
        names = {value.name for value in item.results}
        stays = isinstance(item, Call) or OPS[item.op].random
        if stays or read.isdisjoint(names) or not names.isdisjoint(ends):
            always |= reduce(or_, (needs[name] for name in names), 0)
    for index, (item, origin) in enumerate(body):
        if isinstance(item, Node) and not always >> index & 1:
            yield origin


def _first_readers(
    graph: Graph, bodies: Mapping[str, Body], name: str, value: Value, optional: Collection[Made]
) -> Iterator[Made]:
    """The first readers of a value of a function, as many as it takes for one of them to be there
    in every form.
    """
    body, chosen = bodies[name], set[Origin]()
    for reader, own in body:
        if isinstance(reader, Call) and value.name in reader.args:
            inner = graph.by_name[reader.function].inputs[reader.args.index(value.name)]
            yield from _first_readers(graph, bodies, reader.function, inner, optional)
            return
        if isinstance(reader, Call) or value.name not in reader.refs:
            continue
        yield name, own
        chosen.add(own)
        # What is made in every form by one of those that were chosen.
        made: set[str] = set()
        for item, origin in body:
            among = [operand in made for operand in _read(item)]
            if origin in chosen or (all(among) if _takes(item) else any(among)):
                made.update(result.name for result in item.results)
                if isinstance(item, Call) or (name, origin) not in optional:
                    return


def _with_source(function: Function, bodies: Mapping[str, Body], value: Value) -> Body:
    """The body in which one operator reads an input, and all others its result."""
    body = bodies[function.name]
    used = {own.name for item, _ in body for own in item.results}
    used |= {own.name for own in function.inputs}
    name = f"{value.name}_given"
    while name in used:
        name += "_"
    source = Node(EITHER, (Ref(value.name),), (), (Value(name, value.spec),))
    renamed = [(_reading(item, {value.name: name}), origin) for item, origin in body]
    return [(source, _either(value.name)), *renamed]


def _reading(item: Item, names: dict[str, str]) -> Item:
    """An item that reads other values."""
    if isinstance(item, Node):
        return rename_node(item, names)
    return replace(item, args=tuple(names.get(name, name) for name in item.args))
