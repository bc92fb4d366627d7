"""What a call left for the next one, and how it is put in its place."""

import io
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from parloom.capture.owners import is_a
from parloom.capture.state.aspects import ITEMS, OfKey, is_plain, tensor_bytes
from parloom.capture.state.numbers import Number, Reads, Term, is_number
from parloom.capture.state.paths import State
from parloom.capture.state.reach import Reached
from parloom.capture.state.snapshot import Change, Key, Snapshot, token, write

Route = tuple[Any, ...]  # how an object is reached, and the name of a part of it
SETTLES = 4  # values of one part after which it is taken to be another one in every call
GROWS = 3  # the same of the items of a container
WITHIN = ("attributes", "slots", "cell", *ITEMS)  # aspects of new objects that count


@dataclass(frozen=True, slots=True)
class Left:
    """What a call left: the state before and after it, and the tensors in it that it made.

    `made` are buffers that it registered, which go again; `values` are those of tensors, by
    identity, that are the same in every call. `terms` are the numbers in the state after it that
    it made of those that it found, and `counted` the aspects that they are in.
    """

    before: Snapshot
    after: Snapshot
    changed: Mapping[Key, Reached]
    made: tuple[tuple[nn.Module, str, Tensor], ...]
    values: Mapping[int, Tensor]
    drawn: frozenset[str]
    ends: Mapping[str, object]
    terms: Mapping[Route, Term]
    counted: frozenset[Key]

    @property
    def is_clean(self) -> bool:
        """Whether the next call finds what this one found."""
        return not self.changed and not self.drawn and not self.made


@dataclass(slots=True)
class History:
    """What calls that were traced one after the other changed.

    `restless` are parts that are something else after every call, and are not waited for.
    """

    first: Left
    touched: dict[Key, Reached] = field(default_factory=dict)
    names: dict[Key, set[Any]] = field(default_factory=dict)
    numbers: dict[Route, int] = field(default_factory=dict)
    taken: dict[Route, set[object]] = field(default_factory=dict)
    restless: set[Route] = field(default_factory=set)

    def add(self, left: Left) -> None:
        """One more call."""
        self.touched.update(left.changed)
        for held, name in parts_of(left):
            self.names.setdefault((id(held.owner), held.aspect.style), set()).add(name)
        for route, value in self.parts(left):
            if not is_number(value):
                known = self.taken.setdefault(route, set())
                known.add(self.canonical(left, value))
                if len(known) >= (GROWS if route[-1] == ("items", "") else SETTLES):
                    self.restless.add(route[:-1] if route[-1] == ("items", "") else route)

    def is_waited_for(self, route: Route) -> bool:
        """Whether a part is not one that every call changes."""
        return not self.restless or all(
            route[:length] not in self.restless for length in range(1, len(route) + 1)
        )

    def restless_parts(self, held: Reached, parts: Mapping[Any, Any]) -> Mapping[Any, Any] | None:
        """The parts of an aspect that are not waited for; None where there are none."""
        own, style = route_of(held), held.aspect.style
        if not self.is_waited_for((*own, (style, ""))):
            return parts
        kept = {n: v for n, v in parts.items() if not self.is_waited_for((*own, (style, n)))}
        return kept or None

    def is_open(self, key: Key) -> bool:
        """Whether an aspect was changed, or belongs to a new object."""
        return key in self.touched or key not in self.first.before.held

    def parts(self, left: Left) -> Iterator[tuple[Route, Any]]:
        """Every part that calls change, and those of new objects, with its route."""
        for key, held in left.after.held.items():
            old, style = key in self.first.before.held, held.aspect.style
            if not (key in self.touched if old else style in WITHIN):
                continue
            parts, own = left.after.parts[key], route_of(held)
            parts = {n: v for n, v in parts.items() if not isinstance(n, OfKey)}
            if style in ITEMS:
                sized = style in ("list", "tuple", "deque")
                names = (len(parts),) if sized else tuple(map(key_token, parts))
                yield (*own, ("items", "")), names
            elif old:
                parts = {n: v for n, v in parts.items() if n in self.names.get(key, ())}
            for name, value in parts.items():
                yield from flat((*own, (style, name)), value)
            if old:
                told = (repr(held.aspect.fixed), held.aspect.content)
                yield (*own, (style, "")), told

    def canonical(self, left: Left, value: Any) -> object:
        """A value that is equal where the next call finds the same."""
        if is_a(value, Tensor):
            known = left.values.get(id(value))
            if known is None and not is_a(value, FakeTensor) and not value.is_meta:
                known = value
            found = None if known is None else tensor_bytes(known)
            content = None if found is None else bytes(found)
            return "tensor", tuple(map(int, value.shape)), value.dtype, content
        if type(value) is tuple:
            return value
        if is_plain(value) or is_a(value, numpy.generic):
            return token(value)
        known_before = id(value) in self.first.before.kept.numbers
        return ("object", id(value)) if known_before else ("new", type(value).__qualname__)

    def state(self, left: Left) -> State:
        """What the next call finds."""
        values: dict[int, Any] = {}
        rest: dict[Route, object] = {}
        for route, value in self.parts(left):
            if not self.is_waited_for(route):
                continue
            if is_number(value) and route[-1][0] != "set":
                values[self.numbers.setdefault(route, len(self.numbers))] = value
            else:
                rest[route] = self.canonical(left, value)
        return State(values, frozenset(rest.items()))

    def terms(self, left: Left, state: State) -> dict[int, Term]:
        """How the numbers of a state come about."""

        def constant(value: Any) -> Term:
            return lambda _: value

        routes = {number: route for route, number in self.numbers.items()}
        return {
            number: left.terms.get(routes[number]) or constant(value)
            for number, value in state.values.items()
        }

    def put(self, left: Left, values: Mapping[int, Any], reads: Reads | None) -> dict[int, Change]:
        """Put what a call left in place for the next one; the tensors that got no values.

        Those are on the meta device: nothing can be computed of them together with others.
        Numbers have other `values`, and note what is read of them.
        """
        left.after.put(self.touched)
        made = Made(left, values, self.numbers, reads)
        for key, held in left.after.held.items():
            if not self.is_open(key):
                continue
            parts, own = left.after.parts[key], route_of(held)
            style = held.aspect.style
            now = {n: made.real((*own, (style, n)), v, (held, n)) for n, v in parts.items()}
            if key in left.counted or any(now[n] is not v for n, v in parts.items()):
                write(held.aspect, now)
        for module, name, tensor in left.made:
            held = left.after.held[id(module), "attributes"]
            module._buffers[name] = made.real((), tensor, (held, name))
        return made.empty

    def put_back(self) -> None:
        """Make everything as it was before the first call."""
        put_back(self.first, self.touched)


class Made:
    """The values that are put in the place of those that a call left."""

    def __init__(
        self, left: Left, values: Mapping[int, Any], numbers: Mapping[Route, int],
        reads: Reads | None,
    ) -> None:  # fmt: skip
        self.left, self.values, self.numbers, self.reads = left, values, numbers, reads
        self.known = {id(t) for t in traced_tensors(left.before)}
        self.kept: dict[int, Tensor] = {}
        self.empty: dict[int, Change] = {}

    def real(self, route: Route, value: Any, change: Change) -> Any:
        """One value: a number that notes what is read of it, a tensor that is none of a trace."""
        if is_a(value, tuple):
            return with_items(
                value, [self.real((*route, ("tuple", i)), v, change) for i, v in enumerate(value)]
            )
        if is_number(value):
            number = self.numbers.get(route)
            if number is None or number not in self.values:
                return value
            found = self.values[number]
            return found if self.reads is None else Number.variable(number, found, self.reads)
        if not is_a(value, FakeTensor) or id(value) in self.known:
            return value
        if id(value) not in self.kept:
            known = self.left.values.get(id(value))
            if known is None:
                sizes = [int(n) for n in value.shape]
                known = torch.zeros(sizes, dtype=value.dtype, device="meta")
                self.empty[id(known)] = change
            else:
                known = known.to(value.device)
            self.kept[id(value)] = known
        return self.kept[id(value)]


def with_items(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of its own class with other items; itself where they are the same."""
    if all(made is item for made, item in zip(items, value, strict=True)):
        return value
    return type(value)(items) if not hasattr(value, "_fields") else type(value)(*items)


def key_token(key: Any) -> object:
    """A key of a dict by its value, also where it is a tuple."""
    return tuple(map(key_token, key)) if type(key) is tuple else token(key)


def was_read(left: Left, held: Reached) -> bool:
    """Whether a call went on in a file that it did not write to."""
    file, key = held.owner, (id(held.owner), held.aspect.style)
    if held.aspect.style != "file":
        return False
    if isinstance(file, io.StringIO | io.BytesIO):
        return left.before.parts[key] == left.after.parts[key]
    return file.closed or not file.writable()


def route_of(held: Reached) -> Route:
    """How an object is reached."""
    if held.above is None:
        return (held.name,)
    return (*route_of(held.above), (held.above.aspect.style, held.name))


def flat(route: Route, value: Any) -> Iterator[tuple[Route, Any]]:
    """A part, or the items of a tuple."""
    if not is_a(value, tuple) or is_a(value, torch.Size):
        yield route, value
        return
    for index, item in enumerate(value):
        yield from flat((*route, ("tuple", index)), item)


def terms_in(state: Snapshot) -> tuple[dict[Route, Term], frozenset[Key]]:
    """The terms of the numbers in a state, which are made plain, and the aspects they are in."""
    found: dict[Route, Term] = {}
    counted: set[Key] = set()

    def bare(route: Route, value: Any, key: Key) -> Any:
        if type(value) is Number:
            found[route] = value.term
            counted.add(key)
            return value.value
        if is_a(value, tuple) and not is_a(value, torch.Size):
            items = [bare((*route, ("tuple", i)), item, key) for i, item in enumerate(value)]
            return with_items(value, items)
        return value

    for key, parts in state.parts.items():
        own, style = route_of(state.held[key]), key[1]
        now = {bare((), n, key): bare((*own, (style, n)), v, key) for n, v in parts.items()}
        if key in counted:
            parts.clear()
            parts.update(now)
    return found, frozenset(counted)


def parts_of(left: Left) -> Iterator[Change]:
    """All parts that a call changed."""
    for key in left.changed:
        for part in left.after.changed_parts(left.before, key):
            yield left.after.held[key], part
    for module, name, _ in left.made:
        yield left.after.held[id(module), "attributes"], name


def put_back(first: Left, touched: Mapping[Key, Reached]) -> None:
    """Make everything as it was before the first call."""
    first.before.put(touched)
    for module, name, _ in first.made:
        module._buffers.pop(name, None)
    for (_, style), held in touched.items():
        if style == "iterator":
            first.before.put_copy(held)


def traced_tensors(state: Snapshot) -> Iterator[Tensor]:
    """Tensors that a trace made, outside of parameters and buffers."""
    for key, parts in state.parts.items():
        if key[1] != "weights":
            yield from (v for v in parts.values() if is_a(v, FakeTensor))


def node_of(tensor: Tensor, tracer: Any) -> fx.Node | None:
    """The node of a trace that made a tensor."""
    found: Any = get_proxy_slot(tensor, tracer, None)
    return None if found is None else found.proxy.node


def host_generators(state: Snapshot) -> dict[str, object]:
    """The states of the generators that Python code draws from: global ones, and all in reach."""
    numpy_state = plain(numpy.random.get_state(legacy=False))
    found: dict[str, object] = {"random": random.getstate(), "numpy.random": numpy_state}
    for (_, style), held in state.held.items():
        if style == "draws":
            found[held.found] = held.aspect.fixed
    return found


def plain(state: Any) -> object:
    """What numpy tells of a generator, as values that can be compared."""
    if is_a(state, dict):
        return {name: plain(part) for name, part in state.items()}
    return state.tobytes() if is_a(state, numpy.ndarray) else state
