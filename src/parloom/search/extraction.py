"""The cheapest function in an e-graph, by an integer program (Tensat: Yang et al., MLSys'21,
section 5.1).

A call that is chosen needs a chosen call in each class that it reads, and no class needs itself:
where a solution has some that do, a row asks for calls that make one of them of others. What
operators of the function read is there before their places, so that random ones stay in their
order. Calls that are fused are one choice.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from parloom.ir.graph import Call, Function, Node, Ref, TensorSpec, Value, numbered, rename_node
from parloom.ir.ops import OPS
from parloom.ir.ops.exact import Given
from parloom.linear_program import LinearProgram
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class, classes_in
from parloom.rewrite.shapes import Dims, Shapes
from parloom.rewrite.take import NewCalls, Take
from parloom.rewrite.terms import calls_in, names_in
from parloom.search.one_device import FunctionCosts

MS = 1e9  # programs in milliseconds (of ps) are well scaled
# What a call comes after what it reads, in places of operators; and branches of the program, where
# they find a solution, and the share that is left open.
LATER, BRANCHES, GAP = 1e-3, 500, 1e-4
# What of a call counts as chosen, and how often rows are added where classes need themselves.
CHOSEN, ROUNDS = 1e-6, 50
# The place of a call that the function has not.
ANY = -1
Item = Node | Call
Lacking = list[tuple[int | None, set[Class]]]
"""Items that come before what they read, or None for what is needed at the end, with classes that
chosen calls make of one another alone until then.
"""


@dataclass(frozen=True)
class Choice:
    """A call that may be chosen, the classes that it reads and makes (None of no interest), and its
    place where it is an item of the function. It is asked for where something needs it by name.
    `take` is what fuses calls; `inner` are the calls that it makes before.
    """

    item: Item
    reads: tuple[Class, ...]
    makes: tuple[Class | None, ...]
    place: int = ANY
    asked: bool = False
    take: Take | None = None
    inner: tuple[Node, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        """All its calls."""
        return (*self.inner, self.item)


def cheapest(body: Body, ends: Collection[str], costs: FunctionCosts) -> Function:
    """The function of least cost in an e-graph; values at `ends` are read outside of it."""
    choices = Choices(body, ends)
    return choices.function(Extraction(choices, choices.times(costs)).solve())


class Choices:
    """The calls of an e-graph as choices: items of the function, then all others; and calls that
    are fused.
    """

    def __init__(self, body: Body, ends: Collection[str], fused: Sequence[Take] = ()) -> None:
        self.body, self.items, self.specs = body, body.function.body, dict(body.specs)
        values: dict[Class, list[str]] = {}
        for value in body.classes:
            values.setdefault(body.class_of(value), []).append(value)
        # A value of each class.
        self.name = {own: names[0] for own, names in values.items()}
        inputs = {value.name for value in body.function.inputs}
        self.given = {body.class_of(name) for name in inputs}
        opaque = filter(self.is_opaque, self.items)
        read = dict.fromkeys((*(name for item in opaque for name in _read(item)), *sorted(ends)))
        named = [name for name in read if name not in inputs]
        self.needed = tuple(dict.fromkeys(map(body.class_of, named)))
        self.asked = {name for name in named if len(values[body.class_of(name)]) > 1}
        self.read = {name for item in self.items for name in _read(item)} | set(ends)
        self.every: list[Choice] = []
        self._add_items()
        self._add_calls()
        self._add_fused(fused)

    def times(self, costs: FunctionCosts) -> list[int]:
        """What each choice takes."""
        new = {n.results[0].name: n for own in self.every if own.place == ANY for n in own.items
               if isinstance(n, Node)}  # fmt: skip
        every = numbered((*self.items, *new.values()))
        each = costs.each(replace(self.body.function, body=every))
        of = {item.results[0].name: each[item.key] for item in every if isinstance(item, Node)}
        return [sum(of.get(item.results[0].name, 0) for item in own.items) for own in self.every]

    def is_opaque(self, item: Item) -> bool:
        """Whether nothing equals an item."""
        return isinstance(item, Call) or any(self.body.is_given(v.name) for v in item.results)

    def function(self, taken: Mapping[Class, int]) -> Function:
        """The function in which classes are made by these choices."""
        used = self.used(taken)
        own = {v.name for at in used for v in self.every[at].item.results}
        named = dict(self.name)
        for one, at in taken.items():
            choice = self.every[at]
            if at in used and (choice.place != ANY or named[one] in own):
                named[one] = choice.item.results[choice.makes.index(one)].name
        of = {v: named[self.body.class_of(v)] for v in self.body.classes}
        of |= {v: named[one] for one, v in self.name.items()}
        items = dict[str, Item]()
        for at in sorted(used):
            for inner in self.every[at].inner:
                read = {name: of.get(name, name) for name in inner.refs}
                items[inner.results[0].name] = rename_node(inner, read)
            item = self.every[at].item
            if isinstance(item, Node) and not self.is_opaque(item):
                item = rename_node(item, {name: of.get(name, name) for name in item.refs})
            if isinstance(item, Node) and self.every[at].place == ANY:
                makes, results = self.every[at].makes, list(item.results)
                for one in {one for one in makes if one is not None and taken.get(one) == at}:
                    first = makes.index(one)
                    results[first] = replace(results[first], name=named[one])
                item = replace(item, results=tuple(results))
            items[item.results[0].name] = item
        body = numbered(tuple(self._in_order(list(items.values()))))
        return replace(self.body.function, body=body)

    def takes(self, taken: Mapping[Class, int]) -> list[Take]:
        """The calls that are fused in the function in which classes are made by these choices."""
        found = (self.every[at].take for at in sorted(self.used(taken)))
        return [take for take in found if take is not None]

    def _in_order(self, items: Sequence[Item]) -> Iterator[Item]:
        """Each after what it reads."""
        left, there = list(items), {value.name for value in self.body.function.inputs}
        while left:
            ready = next(item for item in left if there.issuperset(_read(item)))
            yield ready
            left.remove(ready)
            there.update(value.name for value in ready.results)

    def used(self, taken: Mapping[Class, int]) -> set[int]:
        """The choices that are asked for, and what these need."""
        found = {at for at, own in enumerate(self.every) if own.asked}
        left = [*self.needed, *(one for at in found for one in self.every[at].reads)]
        while left:
            one = left.pop()
            if one not in self.given and taken[one] not in found:
                found.add(taken[one])
                left += self.every[taken[one]].reads
        return found

    def _add_items(self) -> None:
        """The items of the function, of the same calls the first unless more are asked for."""
        calls = set[object]()
        for place, item in enumerate(self.items):
            names = {value.name for value in item.results}
            makes = tuple(self.body.class_of(value.name) for value in item.results)
            asked = self.is_opaque(item) or names.isdisjoint(self.read)
            asked = asked or not names.isdisjoint(self.asked)
            call = self.body.call_of(item.results[0].name)
            if asked or call not in calls:
                reads = tuple(map(self.body.class_of, _read(item)))
                self.every.append(Choice(item, reads, makes, place, asked))
            calls.add(call)

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
        name = f"{self.body.function.name}_new_{len(self.every)}"
        values = tuple(
            Value(f"{name}_{at}", TensorSpec(tuple(shape), dtype))
            for at, shape in enumerate(results)
        )
        self.specs |= {value.name: value.spec for value in values}
        for at, one in made.items():
            self.name.setdefault(one, values[at].name)
        makes = tuple(made.get(at) for at in range(len(values)))
        self.every.append(Choice(replace(node, results=values), tuple(classes_in(args)), makes))

    def _add_fused(self, fused: Sequence[Take]) -> None:
        """Calls that are fused, of values of the function."""
        calls = NewCalls(self.body.function, fused, beside=True)
        for take in fused:
            *inner, item = (calls.nodes[call] for call in calls_in(take.call))
            made = {at: self.body.class_of(name) for at, name in take.taken}
            makes = tuple(made.get(at) for at in range(len(item.results)))
            reads = tuple(map(self.body.class_of, dict.fromkeys(names_in(take.call))))
            self.every.append(Choice(item, reads, makes, take=take, inner=tuple(inner)))


def dominated(choices: Choices, times: Sequence[float]) -> set[int]:
    """The calls that the function has not and that no cheapest function needs: another one makes
    the same of no more, in no more time, first of an operator that the function has.
    """
    ops = {item.op for item in choices.items if isinstance(item, Node)}
    calls = [at for at, own in enumerate(choices.every) if own.place == ANY and not own.inner]

    def rank(at: int) -> tuple[float, bool, int]:
        item = choices.every[at].item
        return times[at], isinstance(item, Node) and item.op not in ops, at

    kept, found = dict[tuple[Class | None, ...], list[frozenset[Class]]](), set[int]()
    for at in sorted(calls, key=rank):
        own = choices.every[at]
        reads, known = frozenset(own.reads), kept.setdefault(own.makes, [])
        if reads.issuperset(filter(None, own.makes)) or any(other <= reads for other in known):
            found.add(at)
        else:
            known.append(reads)
    return found


class Order:
    """Which chosen calls come one after the other: items of the function in their order, others as
    soon as what they read is there.
    """

    def __init__(self, every: Sequence[Choice], given: Collection[Class]) -> None:
        self.every = every
        self.reads = [frozenset(own.reads).difference(given) for own in every]
        self.makes = [frozenset(filter(None, own.makes)).difference(given) for own in every]

    def of(
        self, chosen: Iterable[int], needed: Collection[Class]
    ) -> tuple[Mapping[Class, int], Lacking]:
        """The choice that makes each class first; and what is lacking at its place."""
        taken, lacking = dict[Class, int](), Lacking()
        left, items = list[int](), list[int]()
        for at in chosen:
            (left if self.every[at].place == ANY else items).append(at)
        for item in (*sorted(items, key=lambda at: self.every[at].place), None):
            while ready := [at for at in left if self.reads[at] <= taken.keys()]:
                left = [at for at in left if at not in ready]
                for at in ready:
                    taken = dict.fromkeys(self.makes[at], at) | taken
            missing = (needed if item is None else self.reads[item]) - taken.keys()
            if missing:
                lacking.append((item, self._lacked(missing, left, taken)))
            if item is not None:
                taken = dict.fromkeys(self.makes[item], item) | taken
        return taken, lacking

    def _lacked(
        self, missing: Collection[Class], calls: Sequence[int], taken: Mapping[Class, int]
    ) -> set[Class]:
        """Classes with one that is missing of which each of these calls, which wait for what they
        read, makes none without another one.
        """
        left = [min(missing, key=_number)]
        found = set(left)
        while left:
            one = left.pop()
            for reads in (self.reads[at] for at in calls if one in self.makes[at]):
                if reads.isdisjoint(found):
                    left.append(min(reads - taken.keys(), key=_number))
                    found.add(left[-1])
        return found


def needs_of(
    makers: Mapping[Class, Collection[int]], reads: Sequence[frozenset[Class]]
) -> Mapping[Class, frozenset[Class]]:
    """What each class needs: what each of its makers needs, by itself or in each way to make what
    it reads (dominators, by the greatest fixed point; Allen, 1970). What nothing makes needs all.
    """
    every = frozenset(makers)
    needs, changed = dict.fromkeys(makers, every), True

    def of(at: int) -> frozenset[Class]:
        return reads[at].union(*(needs.get(one, every) for one in reads[at]))

    while changed:
        changed = False
        for one, some in makers.items():
            now = frozenset.intersection(needs[one], *map(of, some))
            changed, needs[one] = changed or now != needs[one], now
    return needs


class Extraction:
    """The program that chooses, where choices take `times` (ps)."""

    def __init__(self, choices: Choices, times: Sequence[float]) -> None:
        self.choices, self.every, self.given = choices, choices.every, choices.given
        self.times = times
        self.left_out = dominated(choices, times)
        self.last = float(len(choices.items))
        self.program = LinearProgram()
        self.chosen = [
            self.program.column(
                time / MS, float(own.asked), float(at not in self.left_out), integer=True
            )
            for at, (time, own) in enumerate(zip(times, self.every, strict=True))
        ]
        self.makers: dict[Class, dict[int, int]] = {}
        for at, own in enumerate(self.every):
            for one in dict.fromkeys(own.makes) if at not in self.left_out else ():
                if one is not None and one not in self.given:
                    self.makers.setdefault(one, {})[at] = self._maker(at)
        self.order = Order(self.every, self.given)
        self.reads = self.order.reads
        self.needed = self._needed()
        for one in self.needed:
            self.program.row(dict.fromkeys(self.makers[one].values(), 1.0), 1.0)
        for at, reads in enumerate(self.reads):
            for one in sorted(reads, key=_number):
                row = dict.fromkeys(self.makers.get(one, {}).values(), 1.0)
                row[self.chosen[at]] = row.get(self.chosen[at], 0.0) - 1.0
                self.program.row(row, 0.0)
        self._add_pairs()

    def _needed(self) -> set[Class]:
        """The classes that are in every function: without rows of them two ways to make a class,
        each by half, need half of what both read.
        """
        asked = (one for own in self.every if own.asked for one in own.reads)
        needed = {one for one in (*self.choices.needed, *asked) if one not in self.given}
        needs = needs_of(self.makers, self.reads)
        return needed.union(*(needs[one] for one in needed))

    def solve(self) -> Mapping[Class, int]:
        """The choice that makes each class, as far as one does."""
        self._tighten()
        taken, lacking = self._solved(self.program)
        if lacking:
            self._add_support(lacking)
            self._add_times()
            taken, lacking = self._solved(self.program)
        items = [at for at, own in enumerate(self.every) if own.place != ANY]
        by_order = self.order.of(items, self.needed)[0]
        return by_order if lacking else min(taken, by_order, key=self._cost)

    def _cost(self, taken: Mapping[Class, int]) -> float:
        return sum(self.times[at] for at in self.choices.used(taken))

    def _tighten(self) -> None:
        """Add rows to the relaxation until what it chooses is in order, and keep those that bind:
        others make branches slower.
        """
        relaxed = replace(self.program, integers=[False] * len(self.program.integers))
        rows, first = self.program.rows, len(self.program.rows)
        for _ in range(ROUNDS):
            _, lacking = self._solved(relaxed)
            if not lacking:
                break
            self._add_support(lacking)  # to `rows`, which both programs have
        if len(rows) > first and (answer := relaxed.solve(GAP)) is not None:
            values = answer.values
            each = (
                (row, sum(by * values[at] for at, by in row[0].items())) for row in rows[first:]
            )
            rows[first:] = [row for row, value in each if value - row[1] < CHOSEN]

    def _solved(self, program: LinearProgram) -> tuple[Mapping[Class, int], Lacking]:
        """The choice that makes each class, and what does not come one after the other."""
        answer = program.solve(GAP, enough_nodes=BRANCHES)
        assert answer is not None, "the function itself is a solution"
        some = (at for at, column in enumerate(self.chosen) if answer.values[column] > CHOSEN)
        return self.order.of(some, self.needed)

    def _add_support(self, lacking: Lacking) -> None:
        """Rows that each ask for a call that makes one of some classes of others, before the place
        of an item that reads one, or else at all (loop formulas: Lin and Zhao, Artificial
        Intelligence 157, 2004).
        """
        for at, lacked in lacking:
            place = inf if at is None else self.every[at].place
            row = {
                column: 1.0
                for one in lacked
                for other, column in self.makers.get(one, {}).items()
                if self.every[other].place < place and self.reads[other].isdisjoint(lacked)
            }
            if at is None:
                self.program.row(row, 1.0)
            else:
                self.program.row({**row, self.chosen[at]: -1.0}, 0.0)

    def _add_pairs(self) -> None:
        """Two calls of which each makes what the other reads are not both chosen."""
        for one, some in self.makers.items():
            for at, column in some.items():
                reads = dict.fromkeys(self.every[at].reads)
                if one in reads:
                    self.program.row({column: 1.0}, high=0.0)
                for read in reads:
                    for other, its in self.makers.get(read, {}).items():
                        if at < other and one in self.every[other].reads:
                            self.program.row({column: 1.0, its: 1.0}, high=1.0)

    def _add_times(self) -> None:
        """Each class has a place in time."""
        time = {one: self.program.column(0.0, 0.0, self.last) for one in self.makers}
        for at, own in enumerate(self.every):
            for one in dict.fromkeys(own.reads) if own.place != ANY else ():
                if one in time:  # it is there before the place of the item
                    late = self.last - own.place + LATER
                    self.program.row({time[one]: 1.0, self.chosen[at]: late}, high=self.last)
        for one, some in self.makers.items():
            for at, column in some.items():
                own, late = self.every[at], self.last + LATER
                if own.place != ANY:  # it is there when the item is
                    self.program.row({time[one]: 1.0, column: -float(own.place)}, 0.0)
                    continue
                for read in dict.fromkeys(own.reads):
                    if read in time and read != one:  # or after what the call reads
                        row = {time[one]: 1.0, time[read]: -1.0, column: -late}
                        self.program.row(row, LATER - late)

    def _maker(self, at: int) -> int:
        """A column that says whether a choice makes a class, of its results that one: what is asked
        for by name is there whether it does or not.
        """
        if len(self.every[at].makes) == 1 and not self.every[at].asked:
            return self.chosen[at]
        column = self.program.column(0.0, 0.0, 1.0, integer=True)
        self.program.row({column: 1.0, self.chosen[at]: -1.0}, high=0.0)
        return column


def _number(one: Class) -> int:
    return one.number


def _read(item: Item) -> tuple[str, ...]:
    return item.refs if isinstance(item, Node) else item.args


def _mapped(arg: Any, of: Callable[[Class], Any]) -> Any:
    """Arguments with something in the place of each class."""
    if isinstance(arg, Class):
        return of(arg)
    return tuple(_mapped(own, of) for own in arg) if isinstance(arg, tuple) else arg
