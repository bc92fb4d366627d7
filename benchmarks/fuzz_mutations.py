"""Mutations of files: of their bytes, of their lines, and of the values that they hold.

All are functions of a `random.Random`, so that a seed names a file.
"""

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

Path = tuple[str | int, ...]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 100, 10**6, 10**9, 2**31, 2**63, 10**30, -(10**9),
    0.0, 0.5, -0.5, 2.0, 1e-30, 1e30, math.nan, math.inf, -math.inf,
    "", " ", "x", "0", "-1", "1e3", "nan", "none", "true", "é\u202e\u0000", "\x1b[31m\nforged",
    "a" * 5000, "../..", "/etc/passwd", "gelu", "cpu", "float32", "data",
    [], [None], [0], [1, 2, 3], ["x"], {}, {"a": 1}, {"": {}},
)  # fmt: skip


def nested(depth: int, mapping: bool) -> Any:
    """A value inside of so many lists or mappings."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if mapping else [value]
    return value


def paths(document: Any, at: Path = ()) -> list[Path]:
    """Where the values of a document are; the document itself is not among them."""
    found: list[Path] = []
    entries: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        entries = list(document.items())
    elif isinstance(document, list):
        entries = list(enumerate(document))
    for key, value in entries:
        found += [(*at, key), *paths(value, (*at, key))]
    return found


def value_at(document: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        document = document[key]
    return document


def other_value(value: Any, rng: random.Random) -> Any:
    """A value like the given one, or unlike it."""
    near: list[Any] = [[value], {"a": value}, str(value), *([value] if value is None else [])]
    if isinstance(value, bool):
        near = [not value, int(value), str(value)]
    elif isinstance(value, int | float):
        near += [-value, value + 1, value - 1, value * 2, value // 2, value * 16, float(value)]
        near += [value + 0.5, value * 1e9]
    elif isinstance(value, str):
        middle = len(value) // 2
        near += [value[:-1], value[middle:], value.upper(), value + "x", f" {value}", value * 2]
        near += [f"-{value}", f"1e400{value}", f"0{value}"]
    elif isinstance(value, list):
        near += [value[:-1], value[1:], value * 2, [*value, *value[:1]], value[::-1]]
    elif isinstance(value, dict):
        near += [dict(list(value.items())[1:]), {**value, "extra": 1}, list(value)]
    kind = rng.random()
    if kind < 0.5:
        return copy.deepcopy(rng.choice(near))
    if kind < 0.97:
        return copy.deepcopy(rng.choice(VALUES))
    return nested(rng.choice((5, 90, 250)), rng.random() < 0.5)


def changed(document: Any, rng: random.Random, at: Path | None = None) -> tuple[Any, str]:
    """The document with one value or key changed, and the last key on the way to it."""
    document = copy.deepcopy(document)
    every = paths(document)
    if not every:
        return rng.choice(VALUES), ""
    path = rng.choice(every) if at is None else at
    owner, key = value_at(document, path[:-1]), path[-1]
    kind = rng.random()
    if kind < 0.75:
        owner[key] = other_value(owner[key], rng)
    elif kind < 0.85:
        del owner[key]
    elif kind < 0.9:
        owner[key] = copy.deepcopy(value_at(document, rng.choice(every)))
    elif isinstance(owner, dict):
        name = str(key)
        renamed = rng.choice((name[:-1], name + "_", name.upper(), "", "é", f"{name}\n", "class"))
        owner[renamed] = owner.pop(key)
    else:
        owner.insert(rng.randrange(len(owner) + 1), copy.deepcopy(owner[key]))
    return document, next(str(k) for k in reversed(path) if isinstance(k, str) or k == path[0])


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Some bits other than they were."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        if result:
            result[rng.randrange(len(result))] ^= 1 << rng.randrange(8)
    return bytes(result)


def cut(data: bytes, rng: random.Random) -> bytes:
    """The beginning, the end, or all but a part of the middle."""
    if not data:
        return data
    begin, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return rng.choice((data[:begin], data[end:], data[:begin] + data[end:]))


def lines_changed(data: bytes, rng: random.Random) -> bytes:
    """A line fewer, twice, elsewhere, or indented otherwise."""
    lines = data.split(b"\n")
    line = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[line]
    elif kind == 1:
        lines.insert(line, lines[line])
    elif kind == 2:
        lines.insert(rng.randrange(len(lines)), lines.pop(line))
    else:
        lines[line] = rng.choice((b" ", b"\t", b"- ", b"? ", b"&a ", b"*a ", b"!!x ")) + lines[line]
    return b"\n".join(lines)


def inserted(data: bytes, rng: random.Random) -> bytes:
    """Something in between that the format may not have."""
    at = rng.randrange(len(data) + 1)
    pieces = (
        b"\x00",
        b"\xff\xfe",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"#",
        b"\\u0000",
        b"-",
        b"NaN",
        b"1e999",
        b"\r",
        b"\xc3\xa9",
        b"\xe2\x80\xae",
        b"null",
        b"[" * 5000,
        b"9" * 5000,
    )
    return data[:at] + rng.choice(pieces) + data[at:]


def encoded(data: bytes, rng: random.Random) -> bytes:
    """Other bytes for the same text, or no text at all."""
    text = data.decode("utf-8", errors="replace")
    return rng.choice(
        (
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16"),
            text.encode("utf-32"),
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            data.replace(b" ", "\u00a0".encode()),
            b"",
            b"\n",
            b"\x80\x04K\x01.",
            b"PK\x03\x04" + rng.randbytes(60),
            rng.randbytes(500),
            data + data,
        )
    )


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flipped, cut, lines_changed, inserted, encoded,
)  # fmt: skip


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to three mutations of the bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(BYTES)(data, rng)
    return data


def as_json(document: Any) -> bytes:
    """JSON with NaN and infinities, as Python writes and reads it."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    return text.encode("utf-8", errors="surrogatepass")
