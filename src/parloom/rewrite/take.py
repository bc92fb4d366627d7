"""Values computed in another way, as text in a plan: `take q, k, v in block by RULES: CALL`.

The results of a call of the graph's own operators in the place of values of a function, in order,
which they equal by these rules; `_` stands for one that takes the place of none. Calls inside of it
are made once, whatever reads them. Operators that only what was replaced had read are gone. In a
repeated block it holds for all calls of it.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parloom.errors import InputError
from parloom.ir.graph import (
    Arg,
    Call,
    Function,
    Graph,
    Node,
    Ref,
    TensorSpec,
    Value,
    iter_refs,
    numbered,
)
from parloom.ir.ops import OPS
from parloom.rewrite.shapes import Dims, Shapes, results_of
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Name, Term, calls_in, names_in, parse_call

TAKE = re.compile(r"take (\w+(?:, \w+)*) in (\w+) by (\w+(?:, \w+)*): (.+)")
NONE = "_"
Item = Node | Call
Origin = Item | Term
"""What an item of a rewritten function was: an item of it, or a call of a take."""
Body = list[tuple[Item, Origin]]
"""Items, and what each was."""


@dataclass(frozen=True, slots=True)
class Take:
    """The results of `call` in the place of these values of a function, by `rules`."""

    function: str
    values: tuple[str, ...]
    call: Term
    rules: tuple[str, ...]

    def __str__(self) -> str:
        values, rules = ", ".join(self.values), ", ".join(self.rules)
        return f"take {values} in {self.function} by {rules}: {self.call}"

    @property
    def top(self) -> Term:
        """The call, whatever result."""
        return Term(self.call.op, self.call.args)

    @property
    def taken(self) -> Iterator[tuple[int, str]]:
        """The results that take the place of values, with these."""
        return ((i, name) for i, name in enumerate(self.values) if name != NONE)


def parse_take(text: str) -> Take | None:
    """The inverse of `str`; None for another rewrite. Raises `InputError`."""
    found = TAKE.fullmatch(text)
    if found is None:
        return None
    values, rules = (tuple(found[i].split(", ")) for i in (1, 3))
    if set(values) == {NONE}:
        raise InputError(f"{text}: it takes the place of no value")
    return Take(found[2], values, parse_call(found[4]), rules)


def ends_of(graph: Graph, function: Function) -> frozenset[str]:
    """The values of a function that are read outside of it."""
    is_main = function.name == graph.main.name
    return frozenset((*function.outputs, *(graph.ends if is_main else ())))


def with_takes(graph: Graph, takes: Sequence[Take]) -> Graph:
    """`graph` with values computed as takes say; raises `InputError` where they cannot be."""
    return with_bodies(graph, taken_bodies(graph, takes))


def taken_bodies(graph: Graph, takes: Sequence[Take]) -> Mapping[str, Body]:
    """The bodies of the functions that takes change; raises `InputError` where they cannot."""
    functions = {own.name: own for own in (*graph.functions, graph.main)}
    found = {}
    for name in dict.fromkeys(take.function for take in takes):
        if name not in functions:
            raise InputError(f"{graph.name} has no function {name}; plan again")
        own = [take for take in takes if take.function == name]
        found[name] = _taken(functions[name], own, ends_of(graph, functions[name]))
    return found


def with_bodies(graph: Graph, bodies: Mapping[str, Body]) -> Graph:
    """`graph` whose functions have these bodies."""

    def renewed(own: Function) -> Function:
        items = tuple(item for item, _ in bodies.get(own.name, ()))
        return replace(own, body=numbered(items)) if items else own

    functions = tuple(map(renewed, graph.functions))
    return replace(graph, functions=functions, main=renewed(graph.main))


def _taken(function: Function, takes: Sequence[Take], ends: Collection[str]) -> Body:
    """The items of a function with these takes, and what each was."""
    names = [name for take in takes for _, name in take.taken]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{twice[0]} of {function.name} is taken twice")
    unknown = set(names) - {value.name for item in function.body for value in item.results}
    if unknown:
        raise InputError(f"no operator of {function.name} makes {min(unknown)}; plan again")
    calls = NewCalls(function, takes)
    gone = {name: calls.unused(f"{name}_before") for name in names}
    items: Body = [(with_results(item, gone), item) for item in function.body]
    every = in_order(function, items, calls.nodes.items())
    return _without_unread(every, function, ends, names)


def term_of(arg: Arg) -> TermArg:
    """An argument of an operator as that of a term."""
    if isinstance(arg, Ref):
        return Name(arg.name)
    if isinstance(arg, tuple):
        return tuple(map(term_of, arg))
    assert arg is None or isinstance(arg, (int, float, str)), "terms have no dtypes"
    return arg


class NewCalls:
    """The operators that takes add to a function, by their calls, each after those that it reads;
    with `beside`, results have names of their own beside those of the values that they are.
    """

    def __init__(self, function: Function, takes: Iterable[Take], beside: bool = False) -> None:
        self.function, self.specs = function, function.specs()
        self.used = set(self.specs)
        self.nodes: dict[Term, Node] = {}
        self.paths = {v.name: i.path for i in function.body if isinstance(i, Node)
                      for v in i.results}  # fmt: skip
        every, named = list(takes), dict[Term, dict[int, str]]()
        for take in () if beside else every:
            if take.top in named:
                raise InputError(f"{take.top} is taken twice in {function.name}")
            named[take.top] = dict(take.taken)
        for take in every:
            for call in calls_in(take.call):
                if call not in self.nodes:
                    self.nodes[call] = self._node(call, take, named.get(call, {}))

    def unused(self, name: str) -> str:
        """This name, or with underscores one that is not used yet."""
        while name in self.used:
            name = f"{name}_"
        self.used.add(name)
        return name

    def result(self, term: Term) -> str:
        """The value that a term is."""
        return self.nodes[Term(term.op, term.args)].results[term.result or 0].name

    def _node(self, call: Term, take: Take, own: Mapping[int, str]) -> Node:
        values = [name for _, name in take.taken]
        shapes, dtype = self._made(call)
        results = []
        for index, shape in enumerate(shapes):
            name = own.get(index) or self.unused(f"{values[0]}_form")
            spec = TensorSpec(tuple(shape), dtype)
            if index in own and self.specs[own[index]] != spec:
                raise InputError(f"{take}: result {index} is {spec}, not {self.specs[own[index]]}")
            self.specs[name] = spec
            results.append(Value(name, spec))
        paths = [self.paths.get(name, "").split(".") for name in values]
        args, path = tuple(map(self._arg, call.args)), _common(paths)
        return Node(call.op, args, (), tuple(results), path, source="+".join(take.rules))

    def _made(self, call: Term) -> tuple[list[tuple[int, ...]], str]:
        """The shapes of the results of a call, and their dtype."""
        try:
            made = results_of(call.op, Shapes(1), tuple(map(self._dims, call.args)))
        except NotExpressed as error:
            raise InputError(f"{call}: {error}") from None
        specs = [self.specs[name] for name in iter_refs(tuple(map(self._arg, call.args)))]
        # Of a table and numbers of its rows the dtype is the table's.
        dtypes = {spec.dtype for spec in specs if spec.is_float} or {spec.dtype for spec in specs}
        if len(dtypes) != 1:
            raise InputError(f"{call} is of tensors of {' and '.join(sorted(dtypes)) or 'none'}")
        return [dims.shape for dims in made], dtypes.pop()

    def _arg(self, arg: TermArg) -> Arg:
        if isinstance(arg, Name):
            if arg.name not in self.specs:
                raise InputError(f"{self.function.name} has no value {arg.name}; plan again")
            return Ref(arg.name)
        if isinstance(arg, Term):
            return Ref(self.result(arg))
        if isinstance(arg, tuple):
            return tuple(map(self._arg, arg))
        assert arg is None or isinstance(arg, (int, float, str)), "calls have no sizes by name"
        return arg

    def _dims(self, arg: TermArg) -> Any:
        given = self._arg(arg)
        if isinstance(given, Ref):
            return Dims(self.specs[given.name].shape)
        return tuple(map(self._dims, arg)) if isinstance(arg, tuple) else given


def compatible(function: Function, takes: Iterable[Take]) -> list[Take]:
    """As many of these as may be ways to compute values at once, the first ones first: no value is
    made of itself, whichever ways are taken.
    """
    reads: dict[str, set[str]] = {}
    for item in function.body:
        for value in item.results:
            reads.setdefault(value.name, set()).update(_read(item))
    found = []
    for take in takes:
        values, seen = {name for _, name in take.taken}, set[str]()
        left = read = set(names_in(take.call))
        while left:
            seen |= left
            left = set[str]().union(*(reads.get(name, ()) for name in left)) - seen
        if values.isdisjoint(seen):
            found.append(take)
            for name in values & reads.keys():
                reads[name] |= read
    return found


def in_order(
    function: Function,
    items: Iterable[tuple[Item, Origin]],
    new: Iterable[tuple[Term, Node]],
) -> Body:
    """Items in their order, those that read what is made later after it, and new ones as soon as
    there is what they read; raises `InputError` where there is no such order, or where random
    operators would be in another one, by which their keys are.
    """
    given = list(items)
    left: Body = [(node, term) for term, node in new]
    defined, found = {value.name for value in function.inputs}, Body()

    def add(own: tuple[Item, Origin]) -> None:
        found.append(own)
        defined.update(value.name for value in own[0].results)

    def add_ready() -> None:
        while ready := [own for own in left if defined.issuperset(_read(own[0]))]:
            for own in ready:
                left.remove(own)
                add(own)

    add_ready()
    for own in given:
        if defined.issuperset(_read(own[0])):
            add(own)
        else:
            left.append(own)
        add_ready()
    if left:
        missing = min(set(_read(left[0][0])) - defined)
        raise InputError(f"{missing} of {function.name} would be made after it is read")
    if _random(given) != [own for own in _random(found) if own in _random(given)]:
        raise InputError(f"random operators of {function.name} would be in another order")
    return found


def _random(items: Body) -> list[int]:
    """Which items are random operators, or calls that may have some."""
    return [id(item) for item, _ in items if isinstance(item, Call) or OPS[item.op].random]


def with_results(item: Item, names: Mapping[str, str]) -> Item:
    """An operator whose results have other names; those of calls stay."""
    if isinstance(item, Call) or not any(value.name in names for value in item.results):
        return item
    results = (Value(names.get(value.name, value.name), value.spec) for value in item.results)
    return replace(item, results=tuple(results))


def _without_unread(
    items: Body, function: Function, ends: Collection[str], names: Collection[str]
) -> Body:
    """Without operators that were read, or made these values, and are not read any more."""
    before = {name for item in function.body for name in _read(item)} | {*ends, *names}
    read, kept = set(ends), Body()
    for item, origin in reversed(items):
        if read.isdisjoint(value.name for value in item.results) and _may_go(origin, before):
            continue
        read.update(_read(item))
        kept.append((item, origin))
    return kept[::-1]


def _may_go(origin: Origin, before: Collection[str]) -> bool:
    """Whether this is an operator with results among those that were read `before`; a random one
    stays: keys of later ones count it.
    """
    if not isinstance(origin, Node) or OPS[origin.op].random:
        return False
    return any(value.name in before for value in origin.results)


def _read(item: Item) -> tuple[str, ...]:
    return item.refs if isinstance(item, Node) else item.args


def _common(paths: Sequence[Sequence[str]]) -> str:
    """The module that has all of them."""
    common = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
