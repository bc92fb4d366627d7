"""An e-graph: many equal programs at once (Nelson, 1980).

Classes hold calls of classes that are equal; rules add calls and unite classes, and calls that
became equal are united after each round (egg: Willsey et al., POPL'21, section 3). Each class knows
its shape, and rules match where the shapes of their inputs do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from parloom.errors import InputError
from parloom.rewrite.parallel import quotient
from parloom.rewrite.rules import Rule
from parloom.rewrite.shapes import Dims, Shape, Shapes, results_of
from parloom.rewrite.symbolic import ONE, NotExpressed, inner_of
from parloom.rewrite.terms import (
    LEAD,
    Arg,
    Extent,
    Input,
    Name,
    Size,
    Term,
    calls_in,
    extents_in,
    has_minus_zero,
    names_in,
    size_in,
)

MOST_NODES = 20_000


@dataclass(frozen=True, slots=True)
class Class:
    """A class by its number, which it keeps until it is united with another one."""

    number: int


Key = tuple[str, tuple[Any, ...], int]
"""Operator, arguments with classes in the place of terms, result."""
Sizes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Binding:
    """What a rule's inputs and sizes are, where it matches; `lead` are the dims of `*`."""

    inputs: Mapping[str, Class]
    sizes: Mapping[str, Any]
    lead: Shape | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """One output of a rule in one direction; `ops` are the operators of its pattern."""

    rule: Rule
    pattern: Term
    result: Arg
    inputs: Mapping[str, Input]
    ops: frozenset[str]


@dataclass(frozen=True, slots=True)
class Match:
    """A class that a rule matches."""

    way: Way
    owner: Class
    binding: Binding


May = Callable[[Match], bool]
"""Whether a rule that matches is applied."""


def always(_: Match) -> bool:
    """Apply all."""
    return True


class EGraph:
    """Equal programs of inputs whose shapes are known, in symbols, or in numbers (`one` is 1)."""

    def __init__(self, most_nodes: int = MOST_NODES, one: Any = ONE) -> None:
        self.most_nodes, self.algebra = most_nodes, Shapes(one)
        self.fired: dict[str, None] = {}
        self.shapes: list[Shape] = []
        self._parent: list[int] = []
        self._nodes: dict[Key, Class] = {}
        self._of_class: dict[int, dict[Key, None]] = {}
        self._readers: dict[int, dict[Key, None]] = defaultdict(dict)
        self._of_op: dict[str, dict[Key, None]] = defaultdict(dict)
        self._inputs: dict[str, Class] = {}
        self._pending: list[int] = []

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def nodes(self) -> Iterator[tuple[Key, Class]]:
        """All calls, with the class that each is in."""
        return ((key, self.find(owner)) for key, owner in self._nodes.items())

    def input(self, name: str, shape: Shape) -> Class:
        """An input, the same for the same name."""
        if name not in self._inputs:
            self._inputs[name] = self._new(shape)
        return self.find(self._inputs[name])

    def find(self, one: Class) -> Class:
        """The class that one is now."""
        number = one.number
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return Class(number)

    def add(self, arg: Arg, inputs: Mapping[str, Class], sizes: Sizes) -> Any:
        """A term as a class, any other argument as nodes have it. Raises `NotExpressed` where its
        shapes do not fit.
        """
        if isinstance(arg, Name):
            return self.find(inputs[arg.name])
        if isinstance(arg, Extent):
            return size_in(arg.size, sizes, self.algebra.one)
        if isinstance(arg, tuple):
            return tuple(self.add(own, inputs, sizes) for own in arg)
        if not isinstance(arg, Term):
            return arg
        args = tuple(self.add(own, inputs, sizes) for own in arg.args)
        return self._call(arg.op, args, arg.result or 0)

    def unite(self, one: Class, other: Class) -> bool:
        """Make two classes one; whether they were two."""
        one, other = self.find(one), self.find(other)
        if one == other:
            return False
        if self.shapes[one.number] != self.shapes[other.number]:
            raise InputError(
                f"equal terms of shapes {self.shapes[one.number]} and {self.shapes[other.number]}"
            )
        if len(self._of_class[one.number]) < len(self._of_class[other.number]):
            one, other = other, one
        self._parent[other.number] = one.number
        self._of_class[one.number] |= self._of_class.pop(other.number)
        self._readers[one.number] |= self._readers.pop(other.number, {})
        self._pending.append(one.number)
        return True

    def rebuild(self) -> None:
        """Unite what became equal: equal calls of equal classes."""
        while self._pending:
            number = self.find(Class(self._pending.pop())).number
            for key in list(self._readers[number]):
                owner = self._nodes.pop(key, None)
                if owner is None:
                    continue
                owner = self.find(owner)
                self._of_class[owner.number].pop(key, None)
                renewed = (key[0], self.renewed(key[1]), key[2])
                known = self._nodes.get(renewed)
                self._nodes[renewed] = owner
                self._of_op[key[0]][renewed] = None
                self._of_class[owner.number][renewed] = None
                for child in classes_in(renewed[1]):
                    self._readers[child.number][renewed] = None
                if known is not None:
                    self.unite(known, owner)

    def saturate(self, rules: Sequence[Rule], rounds: int, may: May = always) -> bool:
        """Apply rules in both directions until nothing changes, in at most so many rounds; whether
        nothing changes any more. One that matches is asked for by `may` first, and counts as
        `fired` where something changes.
        """
        directed = [way for rule in rules for way in ways(rule)]
        applied = set[object]()
        for _ in range(rounds):
            found = list(self.all_matches(directed))
            before = self.num_nodes
            changed = False
            for match in found:
                if self.num_nodes > self.most_nodes:
                    self.rebuild()
                    return False
                key = self._place(match)
                if key in applied or not may(match):
                    continue
                applied.add(key)
                try:
                    made = self.add(match.way.result, match.binding.inputs, match.binding.sizes)
                except NotExpressed:
                    continue
                if self.unite(match.owner, made):
                    changed, self.fired[match.way.rule.id] = True, None
            self.rebuild()
            if not changed and self.num_nodes == before:
                return True
        return False

    def _place(self, match: Match) -> object:
        """What tells a match from others of the same rules."""
        inputs = ((name, self.find(own)) for name, own in match.binding.inputs.items())
        sizes = match.binding.sizes.items()
        return id(match.way), self.find(match.owner), tuple(inputs), tuple(sizes)

    def all_matches(self, directed: Iterable[Way]) -> Iterator[Match]:
        """The classes that rules match."""
        there = {op for op, keys in self._of_op.items() if keys}
        for way in directed:
            if way.ops <= there:
                for owner, binding in self.matches(way.pattern, way.inputs):
                    yield Match(way, owner, binding)

    def call(self, op: str, args: tuple[Any, ...], result: int) -> Class | None:
        """The class of a call of classes, where it is there."""
        owner = self._nodes.get((op, self.renewed(args), result))
        return None if owner is None else self.find(owner)

    def calls_of(self, one: Class) -> Iterator[Key]:
        """The calls of a class."""
        return iter(self._of_class[self.find(one).number])

    def matches(
        self, pattern: Term, inputs: Mapping[str, Input]
    ) -> Iterator[tuple[Class, Binding]]:
        """Classes that a pattern matches, with what its names are."""
        for key in list(self._of_op[pattern.op]):
            owner = self._nodes.get(key)
            if owner is None:  # it was renewed
                del self._of_op[pattern.op][key]
                continue
            for binding in self._call_matches(pattern, key, inputs, Binding({}, {})):
                yield self.find(owner), binding

    def _call_matches(
        self, pattern: Term, key: Key, inputs: Mapping[str, Input], known: Binding
    ) -> Iterator[Binding]:
        op, args, result = key
        if op != pattern.op or result != (pattern.result or 0) or len(args) != len(pattern.args):
            return
        yield from self._all_match(pattern.args, args, inputs, known, told_first(pattern.args))

    def _all_match(
        self,
        patterns: tuple[Arg, ...],
        args: Sequence[Any],
        inputs: Mapping[str, Input],
        known: Binding,
        order: tuple[int, ...],
    ) -> Iterator[Binding]:
        if not order:
            yield known
            return
        for binding in self._matches(patterns[order[0]], args[order[0]], inputs, known):
            yield from self._all_match(patterns, args, inputs, binding, order[1:])

    def _matches(
        self, pattern: Arg, arg: Any, inputs: Mapping[str, Input], known: Binding
    ) -> Iterator[Binding]:
        if isinstance(pattern, Name):
            found = (
                self._bound(inputs[pattern.name], arg, known) if isinstance(arg, Class) else None
            )
            if found is not None:
                yield found
        elif isinstance(pattern, Term):
            if isinstance(arg, Class):
                for key in list(self._of_class[self.find(arg).number]):
                    yield from self._call_matches(pattern, key, inputs, known)
        elif isinstance(pattern, tuple):
            if isinstance(arg, tuple) and len(arg) == len(pattern):
                yield from self._all_match(pattern, arg, inputs, known, told_first(pattern))
        elif isinstance(pattern, Extent):
            sized = _sized(pattern.size, arg, known, self.algebra.one)
            if sized is not None:
                yield sized
        elif pattern == arg and type(pattern) is type(arg):
            yield known

    def _bound(self, declared: Input, one: Class, known: Binding) -> Binding | None:
        """What is known where an input is a class, None where it cannot be."""
        one = self.find(one)
        if declared.name in known.inputs:
            return known if self.find(known.inputs[declared.name]) == one else None
        shape, sizes = self.shapes[one.number], declared.sizes
        found: Binding | None = Binding(
            {**known.inputs, declared.name: one}, known.sizes, known.lead
        )
        if sizes[:1] == (LEAD,):
            number = len(shape) - len(sizes) + 1
            # Proofs are for one dim and more: dims that are counted from the last would be others.
            if number < 1 or known.lead not in (None, shape[:number]):
                return None
            assert found is not None
            found = Binding(found.inputs, found.sizes, shape[:number])
            shape, sizes = shape[number:], sizes[1:]
        if len(shape) != len(sizes):
            return None
        for size, own in zip(sizes, shape, strict=True):
            if found is not None and not isinstance(size, str):
                found = _sized(size, own, found, self.algebra.one)
        return found

    def _call(self, op: str, args: tuple[Any, ...], result: int) -> Class:
        key: Key = (op, self.renewed(args), result)
        if has_minus_zero(args):
            raise NotExpressed(f"{op} of -0.0")
        if key in self._nodes:
            return self.find(self._nodes[key])
        made = results_of(op, self.algebra, self._as_dims(key[1]))
        if result >= len(made):
            raise NotExpressed(f"{op} has {len(made)} results")
        found = self._new(made[result].shape)
        self._nodes[key] = found
        self._of_op[op][key] = None
        self._of_class[found.number][key] = None
        for child in classes_in(key[1]):
            self._readers[child.number][key] = None
        return found

    def _new(self, shape: Shape) -> Class:
        number = len(self._parent)
        self._parent.append(number)
        self.shapes.append(shape)
        self._of_class[number] = {}
        return Class(number)

    def renewed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the classes that theirs are now."""

        def now(arg: Any) -> Any:
            if isinstance(arg, Class):
                return self.find(arg)
            return tuple(map(now, arg)) if isinstance(arg, tuple) else arg

        return tuple(map(now, args))

    def _as_dims(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        def shown(arg: Any) -> Any:
            if isinstance(arg, Class):
                return Dims(self.shapes[arg.number])
            return tuple(map(shown, arg)) if isinstance(arg, tuple) else arg

        return tuple(map(shown, args))


@cache
def ways(rule: Rule) -> tuple[Way, ...]:
    """The directions of a rule in which a match says what all inputs are."""
    inputs, found = {own.name: own for own in rule.inputs}, list[Way]()
    for one, other in zip(rule.left, rule.right, strict=True):
        for pattern, result in ((one, other), (other, one)):
            if isinstance(pattern, Term) and set(names_in(result)) <= set(names_in(pattern)):
                ops = frozenset(call.op for call in calls_in(pattern))
                found.append(Way(rule, pattern, result, inputs, ops))
    return tuple(found)


_ORDERS: dict[int, tuple[tuple[Arg, ...], tuple[int, ...]]] = {}


def told_first(patterns: tuple[Arg, ...]) -> tuple[int, ...]:
    """The order in which arguments are matched. Sizes that are told come first, and calls that are
    told some: of an input whose size is a sum or a product, all but one have to be known.
    """
    known = _ORDERS.get(id(patterns))
    if known is None or known[0] is not patterns:
        numbers = range(len(patterns))
        order = tuple(sorted(numbers, key=lambda i: _is_told(patterns[i])))
        known = _ORDERS[id(patterns)] = patterns, order
    return known[1]


def _is_told(pattern: Arg) -> tuple[bool, bool]:
    """False for a size alone; of what has inputs false where it is told one."""
    return any(True for _ in names_in(pattern)), not any(True for _ in extents_in(pattern))


def _sized(size: Size, own: Any, known: Binding, one: Any) -> Binding | None:
    """What is known where a size is `own`, None where it cannot be."""
    if isinstance(one, int) != isinstance(own, int) or not isinstance(own, (int, tuple)):
        return None
    if all(name in known.sizes for block in size for name in block):
        return known if size_in(size, known.sizes, one) == own else None
    if len(size) == 1 and len(size[0]) == 1:
        return Binding(known.inputs, {**known.sizes, size[0][0]: own}, known.lead)
    if isinstance(own, int):
        return _solved(size, own, known)
    divided = _divided(size, own, known, one)
    if divided is not None:
        return divided
    if len(size) == len(own):  # block by block
        found: Binding | None = known
        for block, digits in zip(size, own, strict=True):
            if len(block) != len(digits):
                return None
            for name, digit in zip(block, digits, strict=True):
                if found is not None:
                    found = _sized(((name,),), ((digit,),), found, one)
        return found
    return None


def _divided(size: Size, own: Any, known: Binding, one: Any) -> Binding | None:
    """What is known where a product is `own` of which the first or the last name is not known."""
    (block, *others) = size
    names = [name for name in block if name not in known.sizes]
    if others or len(names) != 1 or len(block) < 2 or names[0] not in (block[0], block[-1]):
        return None
    known_part = tuple(name for name in block if name in known.sizes)
    factor = size_in((known_part,), known.sizes, one)
    try:
        rest = inner_of(own, factor) if names[0] == block[-1] else quotient(own, factor)
    except NotExpressed:
        return None
    return Binding(known.inputs, {**known.sizes, names[0]: rest}, known.lead)


def _solved(size: Size, own: int, known: Binding) -> Binding | None:
    """What is known where a number is `own` of which one name is not known."""
    names = [name for block in size for name in block if name not in known.sizes]
    if len(names) != 1:
        return None
    rest, factor = own, 1
    for block in size:
        product = int(prod(known.sizes[name] for name in block if name in known.sizes))
        if names[0] in block:
            factor = product
        else:
            rest -= product
    if rest <= 0 or rest % factor:
        return None
    return Binding(known.inputs, {**known.sizes, names[0]: rest // factor}, known.lead)


def classes_in(args: Sequence[Any]) -> Iterator[Class]:
    """The classes among arguments."""
    for arg in args:
        if isinstance(arg, Class):
            yield arg
        elif isinstance(arg, tuple):
            yield from classes_in(arg)
