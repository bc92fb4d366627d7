"""Whether anything that the planned program was captured from is another one since `parallelize`.

Before every call of the trainer, attributes, containers, closures, globals and classes that forward
or the loss function can reach are looked at: by identity, so that a look costs a microsecond for
each. Where one is another one, the model is captured again and compared with the plan.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy
from torch import Tensor, nn

from parloom.capture.state.aspects import NOT_OF_CLASSES, Aspect, Look, is_plain, text_of
from parloom.capture.state.bytecode import ABSENT
from parloom.capture.state.reach import Reached, class_name, path_of, walk
from parloom.errors import FingerprintError
from parloom.execute.handed_over import Original

LARGEST = 1 << 16  # bytes of an array that are compared in every call
SHOWN = 60  # characters of a value in a message

State = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Watch:
    """One way in which an object holds others; `state` is what it held when it was looked at.

    `parts` keeps these alive, so that no other object gets one of their identities.
    """

    held: Reached
    read: Callable[[Aspect], State]
    state: State
    parts: dict[Any, Any]

    @property
    def guarded(self) -> bool:
        """Whether it is of a module that was handed over, which refuses to be written to."""
        style = self.held.aspect.style
        above = isinstance(self.held.owner, nn.Module) and self.held.found.startswith("self")
        return style == "modules" or (style == "attributes" and above)


class Unchanged:
    """All that the model and the loss function can reach, but weights and what moves by itself:
    iterators, generators of random numbers, files, and arrays of more than 64 KiB.

    `compare` raises `FingerprintError` where the model is not the planned one any more.
    """

    def __init__(self, original: Original, loss: object, compare: Callable[[], None]) -> None:
        self.original = original
        self.loss = loss
        self.compare = compare
        self.watches: tuple[Watch, ...] = ()
        self.guarded: tuple[Watch, ...] = ()
        self.looks = 0
        self.seen: dict[str, int] = {}  # how often a path was another one
        self.refused = ""
        self.begin()

    def begin(self) -> None:
        """Take everything as it is now for unchanged."""
        with self.original.restored():
            found = list(walk(self.original.model, self.loss, LARGEST))
        weights = set(map(id, _weights(self.original.model)))
        watches = [
            Watch(held, READ[held.aspect.style], (), dict(held.aspect.parts))
            for held in found
            if held.aspect.style in READ and id(held.owner) not in weights
        ]
        for watch in watches:
            watch.state = watch.read(watch.held.aspect)
        self.guarded = tuple(w for w in watches if w.guarded)
        self.watches = tuple(w for w in watches if not w.guarded)

    def check(self) -> None:
        """Raise `FingerprintError` that names what is another one, if the program is another too.

        A path that changes again and again is compared at its first, second, fourth, eighth, ...
        change: a capture takes as long as many steps.
        """
        found = dict(self._changes())
        for path in found:
            self.seen[path] = self.seen.get(path, 0) + 1
        if any(_is_power_of_two(self.seen[path]) for path in found) or (found and self.refused):
            self._compare("; ".join(list(found.values())[:3]))
        if self.refused:
            raise FingerprintError(self.refused)

    def _compare(self, what: str) -> None:
        start = time.perf_counter()
        self.refused = ""
        try:
            self.compare()
        except FingerprintError as error:
            self.refused = (
                f"{what}, since parallelize; the trainer runs what was planned, and this is"
                f" another program: {error}"
            )
        else:
            line = f"{what}, since parallelize; captured the model again in"
            line += f" {time.perf_counter() - start:.1f} s: it is the planned one all the same"
            print(line, file=sys.stderr, flush=True)
        self.begin()  # a trace gives modules copies of the containers that they had

    def _changes(self) -> Iterator[tuple[str, str]]:
        """(path, sentence) of what is another one since it was last asked.

        Modules that refuse to be written to are looked at in the first call, the second, the
        fourth, the eighth, ...: only what goes around them (`vars(module)`) is to be found there.
        """
        self.looks += 1
        rare = self.guarded if _is_power_of_two(self.looks) else ()
        for watch in (*self.watches, *rare):
            state = watch.read(watch.held.aspect)
            if state != watch.state:
                watch.state = state
                yield from self._told(watch)

    def _told(self, watch: Watch) -> Iterator[tuple[str, str]]:
        """The parts that differ; none where equal values took the places of others."""
        held, old = watch.held, watch.parts
        with self.original.restored():
            new = dict(_parts_now(held.aspect))
        watch.parts = new
        if held.aspect.style in ("tensor", "array", "bytes") or held.aspect.content is not None:
            path = path_of((held.above, held.name))
            yield path, f"the values of {path} were written to"
            return
        for name in dict.fromkeys((*old, *new)):
            before, now = old.get(name, ABSENT), new.get(name, ABSENT)
            if before is now or (is_plain(now) and _shown(before) == _shown(now)):
                continue
            path = path_of((held, name))
            yield path, f"{path} was {_shown(before)} and is {_shown(now)}"


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _weights(model: nn.Module) -> Iterator[Any]:
    """The dicts and stand-ins of modules that were handed over."""
    for module in model.modules():
        for tensors in (vars(module)["_parameters"], vars(module)["_buffers"]):
            yield from dict.values(tensors)


def _parts_now(aspect: Aspect) -> Iterator[tuple[Any, Any]]:
    """The parts of the same aspect of the same object, as it is now."""
    if aspect.style == "global":
        yield from ((name, aspect.owner.get(name, ABSENT)) for name, _ in aspect.parts)
        return
    if aspect.style == "modules":
        yield from aspect.owner.items()
        return
    for found in Look(LARGEST).aspects(aspect.owner):
        if found.style == aspect.style:
            yield from found.parts


def _shown(value: object) -> str:
    """A value in a message."""
    if value is ABSENT:
        return "not there"
    text = text_of(value) if is_plain(value) else f"a {class_name(type(value))}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _ids(values: Any) -> State:
    return tuple(map(id, values))


def _of_mapping(aspect: Aspect) -> State:
    return _ids((*dict.keys(aspect.owner), *dict.values(aspect.owner)))


def _of_slots(aspect: Aspect) -> State:
    return _ids(getattr(aspect.owner, str(name), ABSENT) for name, _ in aspect.parts)


def _of_items(aspect: Aspect) -> State:
    owner = aspect.owner
    return _ids(owner.ravel().tolist() if isinstance(owner, numpy.ndarray) else iter(owner))


def _of_cell(aspect: Aspect) -> State:
    with suppress(ValueError):
        return (id(aspect.owner.cell_contents),)
    return ()


def _of_tensor(aspect: Aspect) -> State:
    tensor: Tensor = aspect.owner
    version = 0 if tensor.is_inference() else tensor._version
    return version, 0 if tensor.is_meta else tensor.data_ptr()


def _of_array(aspect: Aspect) -> State:
    array = aspect.owner
    return (array.tobytes(),) if array.nbytes <= LARGEST else ()


READ: Mapping[str, Callable[[Aspect], State]] = MappingProxyType({
    "attributes": lambda a: _ids(vars(a.owner).values()),
    "modules": _of_mapping,
    "dict": _of_mapping,
    "list": _of_items,
    "deque": _of_items,
    "set": _of_items,
    "slots": _of_slots,
    "cell": _of_cell,
    "function": lambda a: _ids((a.owner.__code__, a.owner.__defaults__, a.owner.__kwdefaults__)),
    "class": lambda a: _ids(v for n, v in vars(a.owner).items() if n not in NOT_OF_CLASSES),
    "global": lambda a: _ids(a.owner.get(name, ABSENT) for name, _ in a.parts),
    "tensor": _of_tensor,
    "array": _of_array,
    "bytes": lambda a: (bytes(a.owner),),
})  # fmt: skip
