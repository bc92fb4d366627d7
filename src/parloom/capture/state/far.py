"""State as many calls leave it: counts go on as they went, and lists grow on."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy

from parloom.capture.state.aspects import OfKey
from parloom.capture.state.snapshot import Key, Snapshot

MARKS = (10, 100, 1000)  # calls after which to look
LONGEST = 100_000  # items that a container is made to have


def ahead(
    before: Snapshot, after: Snapshot, changed: Mapping[Key, object], calls: int
) -> Iterator[tuple[Key, dict[Any, Any], bytes | None]]:
    """The aspects that go on, as they are `calls` calls after `after`: parts and content."""
    for key in changed:
        old, new = before.parts.get(key, {}), after.parts.get(key, {})
        one, other = before.held[key].aspect, after.held[key].aspect
        if key[1] in ("list", "dict") and other.content is not None:
            continue  # large, and plain
        if key[1] == "array" and one.content is not None and other.content is not None:
            yield key, {}, array_later(one, other, calls)
        elif key[1] in ("list", "deque", "set") or (key[1] == "dict" and len(new) > len(old)):
            grown = longer(list(old.items()), list(new.items()), calls, key[1])
            if grown is not None:
                yield key, grown, None
        else:
            later = {n: value_later(old.get(n, 0), v, calls) for n, v in new.items()}
            if any(later[n] is not v for n, v in new.items()):
                yield key, later, None


def value_later(old: Any, new: Any, calls: int) -> Any:
    """A number, a string or a tuple that goes on as it went from `old` to `new`."""
    kinds = (type(old), type(new))
    if kinds == (int, int) and old != new:
        return new + (new - old) * calls
    if kinds in ((float, float), (int, float)) and old != new:
        ratio = new / old if old else 0.0
        return new * ratio**calls if 0 < ratio < 1 else new + (new - old) * calls
    if isinstance(new, numpy.number) and kinds[0] is kinds[1] and old != new:
        return type(new)(new + (new - old) * calls)
    if kinds[0] is kinds[1] and kinds[0] in (str, bytes, tuple) and new[: len(old)] == old:
        more = new[len(old) :]
        return new + more * min(calls, LONGEST) if more else new
    return new


def longer(
    old: list[tuple[Any, Any]], new: list[tuple[Any, Any]], calls: int, style: str
) -> dict[Any, Any] | None:
    """A container that grows, with more of its last items; None where it does not grow."""
    new = [(n, v) for n, v in new if not isinstance(n, OfKey)]
    old = [(n, v) for n, v in old if not isinstance(n, OfKey)]
    more = (len(new) - len(old)) * min(calls, LONGEST)
    if style in ("dict", "set"):
        keys = [n if style == "dict" else v for n, v in new]
        if more <= 0 or not all(type(k) is int for k in keys):
            return None
        last = max(keys)
        added = range(last + 1, last + 1 + more)
        return dict(new) | {k: new[-1][1] if style == "dict" else k for k in added}
    values = [v for _, v in new]
    if more > 0:
        values += islice(cycled(values[len(old) :]), more)
    elif len(new) == len(old):
        values = [value_later(o, n, calls) for (_, o), n in zip(old, values, strict=True)]
    return dict(enumerate(values))


def cycled(values: list[Any]) -> Iterator[Any]:
    """The values over and over."""
    while True:
        yield from values


def array_later(one: Any, other: Any, calls: int) -> bytes | None:
    """The bytes of an array whose elements go on as they went."""
    kind = other.owner.dtype
    if kind.kind not in "iuf" or one.fixed != other.fixed:
        return None
    old = numpy.frombuffer(one.content, kind)
    new = numpy.frombuffer(other.content, kind)
    with numpy.errstate(all="ignore"):
        return bytes((new + (new - old) * calls).astype(kind).tobytes())


def advance(iterator: Any, calls: int) -> None:
    """Draw that many items, or all that there are."""
    deque(islice(iterator, calls), maxlen=0)
