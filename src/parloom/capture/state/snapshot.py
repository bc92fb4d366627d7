"""Snapshots of all mutable state that a call can reach: what it changed, and how to put it back."""

import array
import marshal
from collections import deque
from collections.abc import Callable, Collection, Mapping
from copy import copy
from ctypes import addressof, memmove, sizeof
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from parloom.capture.owners import attributes_of, is_a
from parloom.capture.state.aspects import (
    DATA_OF_C,
    NOT_OF_CLASSES,
    Aspect,
    OfKey,
    is_plain,
    own_names,
    text_of,
)
from parloom.capture.state.bytecode import ABSENT
from parloom.capture.state.reach import Reached, Walk, walk

LARGEST = 1 << 22  # bytes of a tensor or array that are kept
IMMUTABLE = ("tuple", "frozen", "of", "closure", "opaque", "weights", "draws")
ORDERED = ("dict", "hooks", "modules")
# Iterators of which a copy goes on alone.
ITERATED: tuple[Any, ...] = (
    [], (), range(0), range(1 << 70), "", b"", {}, {}.values(), {}.items(), set(), reversed([]),
)  # fmt: skip
COPIED = (count, *(type(iter(value)) for value in ITERATED))
Key = tuple[int, str]  # identity of an object, style of an aspect
Change = tuple[Reached, Any]  # an aspect and a part of it


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every aspect that can be reached, by its object; `kept` keeps the objects alive."""

    held: Mapping[Key, Reached]
    parts: Mapping[Key, dict[Any, Any]]
    copies: Mapping[int, Any]
    kept: Walk

    @classmethod
    def of(cls, model: nn.Module, loss: object) -> "Snapshot":
        """The state as it is now, also inside of a trace."""
        held: dict[Key, Reached] = {}
        parts: dict[Key, dict[Any, Any]] = {}
        copies: dict[int, Any] = {}
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = walk(model, loss, LARGEST)
            for item in found:
                aspect = item.aspect
                key = id(aspect.owner), aspect.style
                held.setdefault(key, item)
                # Functions read different globals of one file.
                parts.setdefault(key, {}).update(aspect.parts)
                if type(aspect.owner) in COPIED:
                    with catch_warnings():
                        simplefilter("ignore")
                        copies[id(aspect.owner)] = copy(aspect.owner)
        return cls(held, parts, copies, found)

    def changes(self, before: "Snapshot") -> dict[Key, Reached]:
        """Mutable aspects of objects that were there before and are not as they were."""
        return {
            key: before.held[key]
            for key in before.held.keys() & self.held.keys()
            if key[1] not in IMMUTABLE and self.differs(before, key)
        }

    def differs(self, before: "Snapshot", key: Key) -> bool:
        """Whether one aspect is another one."""
        old, new = before.held[key].aspect, self.held[key].aspect
        if old.fixed != new.fixed or old.content != new.content:
            return True
        return contents(before.parts[key], key[1]) != contents(self.parts[key], key[1])

    def changed_parts(self, before: "Snapshot", key: Key) -> list[Any]:
        """The names of the parts of one aspect that are others; the empty string for itself."""
        old, new = before.parts[key], self.parts[key]
        names = [*old, *(n for n in new if n not in old)]
        found = [n for n in names if token(old.get(n, ABSENT)) != token(new.get(n, ABSENT))]
        return found or [""]

    def copy_of(self, held: Reached) -> Any:
        """A copy of an iterator where it is, if it can be put in the place of the other one."""
        above = held.above
        if above is None or above.aspect.style in (*IMMUTABLE, "iterator"):
            return None
        return self.copies.get(id(held.owner))

    def put_copy(self, held: Reached) -> None:
        """Put the copy of an iterator, if there is one, into what holds it."""
        above, copied = held.above, self.copy_of(held)
        if above is not None and copied is not None:
            parts = self.parts[id(above.owner), above.aspect.style]
            write(above.aspect, {**parts, held.name: copied})

    def put(self, keys: Collection[Key]) -> None:
        """Make aspects as they are here; iterators and generators stay where they are."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for key, held in self.held.items():
                # torch.export gives modules copies of the containers that they had.
                own = key[1] == "attributes" and isinstance(held.owner, nn.Module)
                if own or key in keys:
                    write(self.held[key].aspect, self.parts[key])


def contents(parts: Mapping[Any, Any], style: str) -> object:
    """What tells the parts of an aspect apart: plain values by value, objects by identity."""
    if style == "set":
        return frozenset(map(token, parts.values()))
    found = [(token(n), token(v)) for n, v in parts.items() if not isinstance(n, OfKey)]
    return found if style in ORDERED else dict(found)


def token(value: Any) -> tuple[str, object]:
    """A plain value, or the identity of another."""
    if is_plain(value) or is_a(value, numpy.generic):
        return type(value).__name__, value if isinstance(value, str) else text_of(value)
    return "object", id(value)


def write(aspect: Aspect, parts: Mapping[Any, Any]) -> None:
    """Make one aspect of an object hold `parts`, and its own content."""
    owner, style = aspect.owner, aspect.style
    if style in ("list", "dict") and aspect.content is not None:
        items = marshal.loads(aspect.content)
        parts = dict(items) if style == "dict" else dict(enumerate(items))
    if style in ("attributes", "global"):
        own: Any = owner if style == "global" else attributes_of(owner)
        extra = own.keys() - parts.keys() - own_names(owner) if style == "attributes" else ()
        named({**dict.fromkeys(extra, ABSENT), **parts}, own.__setitem__, own.__delitem__, own)
    elif style == "class":
        own = vars(owner)
        extra = own.keys() - parts.keys() - NOT_OF_CLASSES
        now = {**dict.fromkeys(extra, ABSENT), **parts}
        named(now, partial(type.__setattr__, owner), partial(type.__delattr__, owner), own)
    elif style in ("slots", "function", "cell"):
        own = {name: getattr(owner, name, ABSENT) for name in parts}
        set_, delete = partial(object.__setattr__, owner), partial(object.__delattr__, owner)
        named(parts, set_, delete, own)
    elif style in ORDERED:
        type(owner).clear(owner)
        for name, value in parts.items():
            if not isinstance(name, OfKey):
                owner[name] = value
    elif style in ("list", "deque", "set"):
        fill(owner, style, list(parts.values()))
    elif style == "variable" and parts["value"] is not ABSENT:
        owner.set(parts["value"])
    else:
        write_content(owner, aspect)


def named(
    parts: Mapping[Any, Any],
    change: Callable[[Any, Any], None],
    delete: Callable[[Any], None],
    now: Mapping[Any, Any],
) -> None:
    """Set and delete the names that are not as in `parts`."""
    for name, value in parts.items():
        if now.get(name, ABSENT) is value:
            continue
        if value is ABSENT:
            delete(name)
        else:
            change(name, value)


def fill(owner: Any, style: str, items: list[Any]) -> None:
    """Other items in a list, deque or set, whatever its subclass does when it is written to."""
    if is_a(owner, numpy.ndarray):
        owner.ravel()[:] = items
    elif style == "list":
        list.__setitem__(owner, slice(None), items)
    elif style == "deque":
        deque.clear(owner)
        deque.extend(owner, items)
    else:
        set.clear(owner)
        set.update(owner, items)


def write_content(owner: Any, aspect: Aspect) -> None:
    """Other values in arrays and tensors, another position in a file, an empty cache."""
    style, content = aspect.style, aspect.content or b""
    if style == "bytes" and is_a(owner, DATA_OF_C):
        memmove(addressof(owner), content, sizeof(owner))
    elif style == "bytes" and is_a(owner, array.array):
        del owner[:]
        owner.frombytes(content)
    elif style == "bytes" and is_a(owner, memoryview) and not owner.readonly:
        owner.cast("B")[:] = content
    elif style == "bytes" and not is_a(owner, memoryview):
        owner[:] = content
    elif style == "array" and aspect.content is not None:
        owner[...] = numpy.frombuffer(content, owner.dtype).reshape(owner.shape)
    elif style == "tensor" and content:
        flat = torch.frombuffer(bytearray(content), dtype=owner.dtype)
        owner.detach().copy_(flat.reshape(owner.shape))
    elif style == "cache":
        owner.cache_clear()
    elif style == "file" and aspect.fixed is not None:
        for _, written in aspect.parts:
            owner.seek(0)
            owner.truncate()
            owner.write(written)
        owner.seek(aspect.fixed)
