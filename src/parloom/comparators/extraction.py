"""The cheapest function in an e-graph, by an integer program (Tensat: Yang et al., MLSys'21,
section 5.1).

A call that is chosen needs a chosen call in each class that it reads. Each class has a place in
time, so that no class needs itself, and operators of the function stay in their order.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parloom.comparators.one_device import FunctionCosts
from parloom.ir.graph import Call, Function, Node, Ref, TensorSpec, Value, numbered, rename_node
from parloom.ir.ops import OPS
from parloom.ir.ops.exact import Given
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class, classes_in
from parloom.rewrite.shapes import Dims, Shapes
from parloom.search.linear import LinearProgram

MS = 1e9  # programs in milliseconds (of ps) are well scaled
# What a call comes after what it reads, in places of operators; and branches of the program, where
# they find a solution, and the share that is left open.
LATER, BRANCHES, GAP = 1e-3, 2_000, 1e-4
# The place of a call that the function has not.
ANY = -1
Item = Node | Call


@dataclass(frozen=True)
class Choice:
    """A call that may be chosen, the classes that it reads and makes (None of no interest), and its
    place where it is an item of the function. It is asked for where something needs it by name.
    """

    item: Item
    reads: tuple[Class, ...]
    makes: tuple[Class | None, ...]
    place: int = ANY
    asked: bool = False


def cheapest(body: Body, ends: Collection[str], costs: FunctionCosts) -> Function:
    """The function of least cost in an e-graph; values at `ends` are read outside of it."""
    choices = Choices(body, ends)
    function = body.function
    every = numbered((*function.body, *choices.new))
    each = costs.each(replace(function, body=every))
    times = [each[i.key] if isinstance(i, Node) else 0.0 for i in every]
    times = [times[at] for at in (*choices.kept, *range(len(function.body), len(every)))]
    return choices.function(Extraction(choices, times).solve())


class Choices:
    """The calls of an e-graph as choices: items of the function, then all others (`new`)."""

    def __init__(self, body: Body, ends: Collection[str]) -> None:
        self.body, self.items, self.specs = body, body.function.body, dict(body.specs)
        values: dict[Class, list[str]] = {}
        for value in body.classes:
            values.setdefault(body.class_of(value), []).append(value)
        # A value of each class.
        self.name = {own: names[0] for own, names in values.items()}
        inputs = {value.name for value in body.function.inputs}
        self.given = {body.class_of(name) for name in inputs}
        named = {name for item in self.items if self.is_opaque(item) for name in _read(item)}
        named = {*named, *ends} - inputs
        self.needed = {body.class_of(name) for name in named}
        self.asked = {name for name in named if len(values[body.class_of(name)]) > 1}
        self.read = {name for item in self.items for name in _read(item)} | set(ends)
        chosen = ((at, self._own(item, at)) for at, item in enumerate(self.items))
        some = [(at, own) for at, own in chosen if own is not None]
        self.kept = [at for at, _ in some]
        self.every = [own for _, own in some]
        self.new: list[Node] = []
        self._add_calls()

    def is_opaque(self, item: Item) -> bool:
        """Whether nothing equals an item."""
        return isinstance(item, Call) or any(self.body.is_given(v.name) for v in item.results)

    def function(self, taken: Mapping[Class, int]) -> Function:
        """The function in which classes are made by these choices."""
        used = self._used(taken)
        own = {v.name for at in used for v in self.every[at].item.results}
        named = dict(self.name)
        for one, at in taken.items():
            choice = self.every[at]
            if at in used and (choice.place != ANY or named[one] in own):
                named[one] = choice.item.results[choice.makes.index(one)].name
        of = {v: named[self.body.class_of(v)] for v in self.body.classes}
        of |= {v: named[one] for one, v in self.name.items()}
        items = []
        for at in sorted(used):
            item = self.every[at].item
            if isinstance(item, Node) and not self.is_opaque(item):
                item = rename_node(item, {name: of[name] for name in item.refs})
            if isinstance(item, Node) and self.every[at].place == ANY:
                results = zip(item.results, self.every[at].makes, strict=True)
                is_taken = ((v, one, one and taken.get(one) == at) for v, one in results)
                item = replace(
                    item,
                    results=tuple(
                        replace(v, name=named[one]) if one and so else v for v, one, so in is_taken
                    ),
                )
            items.append(item)
        return replace(self.body.function, body=numbered(tuple(self._in_order(items))))

    def _in_order(self, items: Sequence[Item]) -> Iterator[Item]:
        """Each after what it reads."""
        left, there = list(items), {value.name for value in self.body.function.inputs}
        while left:
            ready = next(item for item in left if there.issuperset(_read(item)))
            yield ready
            left.remove(ready)
            there.update(value.name for value in ready.results)

    def _used(self, taken: Mapping[Class, int]) -> set[int]:
        """The choices that are asked for, and what these need."""
        found = {at for at, own in enumerate(self.every) if own.asked}
        left = [*self.needed, *(one for at in found for one in self.every[at].reads)]
        while left:
            one = left.pop()
            if one not in self.given and taken[one] not in found:
                found.add(taken[one])
                left += self.every[taken[one]].reads
        return found

    def _own(self, item: Item, place: int) -> Choice | None:
        """An item of the function, of equal ones the first unless more are asked for."""
        names = {value.name for value in item.results}
        makes = tuple(self.body.class_of(value.name) for value in item.results)
        asked = self.is_opaque(item) or names.isdisjoint(self.read)
        asked = asked or not names.isdisjoint(self.asked)
        if not asked and not any(self.name[one] in names for one in makes):
            return None
        return Choice(item, tuple(map(self.body.class_of, _read(item))), makes, place, asked)

    def _add_calls(self) -> None:
        """The calls that the function has not, as operators of one value of each class."""
        graph, own = self.body.graph, self.body.own_calls
        calls: dict[tuple[str, tuple[Any, ...]], dict[int, Class]] = {}
        for (op, args, at), owner in graph.nodes():
            calls.setdefault((op, graph.renewed(args)), {})[at] = owner
        left = {key: made for key, made in calls.items() if key not in own}
        while ready := [key for key in left if self.name.keys() >= set(classes_in(key[1]))]:
            for key in ready:
                self._add_call(*key, left.pop(key))

    def _add_call(self, op: str, args: tuple[Any, ...], made: Mapping[int, Class]) -> None:
        computes, shapes = OPS[op].computes, self.body.graph.shapes
        assert computes is not None
        dims = _mapped(args, lambda one: Dims(shapes[one.number]))
        results = [dims.shape for dims in computes(Shapes(1), Given(dims))]
        node = Node(op, _mapped(args, lambda one: Ref(self.name[one])), (), ())
        read = [self.specs[name] for name in node.refs]
        dtype = next((spec for spec in read if spec.is_float), read[0]).dtype
        name = f"{self.body.function.name}_new_{len(self.new)}"
        values = tuple(
            Value(f"{name}_{at}", TensorSpec(tuple(shape), dtype))
            for at, shape in enumerate(results)
        )
        self.specs |= {value.name: value.spec for value in values}
        self.new.append(replace(node, results=values))
        for at, one in made.items():
            self.name.setdefault(one, values[at].name)
        makes = tuple(made.get(at) for at in range(len(values)))
        self.every.append(Choice(self.new[-1], tuple(classes_in(args)), makes))


class Extraction:
    """The program that chooses, where choices take `times` (ps)."""

    def __init__(self, choices: Choices, times: Sequence[float]) -> None:
        self.choices, self.every, self.given = choices, choices.every, choices.given
        self.last = float(len(choices.items))
        self.program = LinearProgram()
        self.chosen = [
            self.program.column(time / MS, float(own.asked), 1.0, integer=True)
            for time, own in zip(times, self.every, strict=True)
        ]
        self.makers: dict[Class, dict[int, int]] = {}
        for at, own in enumerate(self.every):
            for one in dict.fromkeys(own.makes):
                if one is not None and one not in self.given:
                    self.makers.setdefault(one, {})[at] = self._maker(at)
        self.time = {one: self.program.column(0.0, 0.0, self.last) for one in self.makers}

    def solve(self) -> Mapping[Class, int]:
        """The choice that makes each class, as far as one does."""
        for one in self.choices.needed - self.given:
            self.program.row(dict.fromkeys(self.makers[one].values(), 1.0), 1.0)
        for at, own in enumerate(self.every):
            for one in dict.fromkeys(own.reads):
                if one in self.makers:
                    row = dict.fromkeys(self.makers[one].values(), 1.0)
                    row[self.chosen[at]] = row.get(self.chosen[at], 0.0) - 1.0
                    self.program.row(row, 0.0)
                    self._read_in_time(at, one)
                elif one not in self.given:
                    self.program.row({self.chosen[at]: 1.0}, high=0.0)
        for one, some in self.makers.items():
            for at, column in some.items():
                self._made_in_time(at, column, one)
        answer = self.program.solve(GAP, enough_nodes=BRANCHES)
        assert answer is not None, "the function itself is a solution"
        return {
            one: max(some, key=lambda at: answer.values[some[at]])
            for one, some in self.makers.items()
        }

    def _maker(self, at: int) -> int:
        """A column that says whether a choice makes a class, of its results that one."""
        if len(self.every[at].makes) == 1:
            return self.chosen[at]
        column = self.program.column(0.0, 0.0, 1.0, integer=True)
        self.program.row({column: 1.0, self.chosen[at]: -1.0}, high=0.0)
        return column

    def _read_in_time(self, at: int, one: Class) -> None:
        """What an item of the function reads is there before its place."""
        place = self.every[at].place
        if place != ANY:
            late = self.last - place + LATER
            self.program.row({self.time[one]: 1.0, self.chosen[at]: late}, high=self.last)

    def _made_in_time(self, at: int, column: int, one: Class) -> None:
        """A class is there when the item is that makes it, or after what another call reads."""
        own, late = self.every[at], self.last + LATER
        if own.place != ANY:
            self.program.row({self.time[one]: 1.0, column: -float(own.place)}, 0.0)
            return
        for read in dict.fromkeys(own.reads):
            if read == one:
                self.program.row({column: 1.0}, high=0.0)
            elif read in self.time:
                row = {self.time[one]: 1.0, self.time[read]: -1.0, column: -late}
                self.program.row(row, LATER - late)


def _read(item: Item) -> tuple[str, ...]:
    return item.refs if isinstance(item, Node) else item.args


def _mapped(arg: Any, of: Callable[[Class], Any]) -> Any:
    """Arguments with something in the place of each class."""
    if isinstance(arg, Class):
        return of(arg)
    return tuple(_mapped(own, of) for own in arg) if isinstance(arg, tuple) else arg
