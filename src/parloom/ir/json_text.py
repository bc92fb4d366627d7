"""JSON as text: a rendering that diffs well, and the line and column of a value."""

import json
from typing import Any

from parloom.errors import has_controls

WIDTH = 100
DEEP = 4
Path = tuple[str | int, ...]


def render(value: Any, indent: int = 0, *, item: bool = False) -> str:
    """JSON with one entry a line, where the entries of lists and what lies deep are one line each.

    So the keys of the document, of its sections and of their maps have a line each, and a changed
    decision is one changed line.
    """
    if not isinstance(value, dict | list) or not value:
        return _dump(value)
    if item or indent > DEEP:
        whole = _dump(value)
        if len(whole) <= WIDTH - indent:
            return whole
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        entries = [f"{_dump(k)}: {render(v, indent + 2)}" for k, v in value.items()]
        opening, closing = "{", "}"
    else:
        entries = [render(v, indent + 2, item=True) for v in value]
        opening, closing = "[", "]"
    body = ",\n".join(pad + entry for entry in entries)
    return f"{opening}\n{body}\n{' ' * indent}{closing}"


def with_controls(value: Any, path: Path = ()) -> Path | None:
    """Where a document has a key or a string with control characters; None where it has none."""
    if isinstance(value, str):
        return path if has_controls(value) else None
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        bad = isinstance(key, str) and has_controls(key)
        found = path if bad else with_controls(item, (*path, key))
        if found is not None:
            return found
    return None


def line_and_column(text: str, path: Path, *, at_key: bool = False) -> tuple[int, int] | None:
    """Where the value at `path` (or its key) begins, from 1; None where the path does not exist.

    `text` must be valid JSON.
    """
    position = _space(text, 0)
    for depth, part in enumerate(path):
        found = _child(text, position, part)
        if found is None:
            return None
        key, position = found
        if at_key and depth == len(path) - 1:
            position = key
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


def _child(text: str, position: int, part: str | int) -> tuple[int, int] | None:
    """Positions of the key and of the value of entry `part` of the container at `position`."""
    decoder = json.JSONDecoder()
    if text[position] not in "{[":
        return None
    named, index = text[position] == "{", 0
    position = _space(text, position + 1)
    while text[position] not in "}]":
        key, name = position, str(index)
        if named:
            name, position = decoder.raw_decode(text, position)
            position = _space(text, _space(text, position) + 1)
        if name == str(part):
            return key, position
        _, position = decoder.raw_decode(text, position)
        position = _space(text, position)
        if text[position] == ",":
            position = _space(text, position + 1)
        index += 1
    return None
