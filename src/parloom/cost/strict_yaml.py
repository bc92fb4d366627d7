"""Strict YAML: every key is expected, every complaint has file:line:column.

Only nodes are composed; nothing is constructed, so a tag in the file can run nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import yaml

from parloom.errors import InputError, nearest

T = TypeVar("T")
D = TypeVar("D")

# A file that says more than this is no description of a machine (or names itself over and over).
MOST_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of a file: its values are read by key and parsed on the way."""

    where: str
    node: yaml.MappingNode

    def error(self, node: yaml.Node, message: str) -> InputError:
        return InputError(f"{self.at(node)}: {message}")

    def check(self, required: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Raise `InputError` for a key that is unknown, repeated or missing."""
        needed = tuple(required)
        known = (*needed, *optional)
        seen: set[str] = set()
        for key, _ in self.node.value:
            name = self._scalar(key)
            if name not in known:
                raise self.error(key, f"unknown key {name!r}{nearest(name, known)}")
            if name in seen:
                raise self.error(key, f"key {name!r} is given twice")
            seen.add(name)
        missing = [name for name in needed if name not in seen]
        if missing:
            raise self.error(
                self.node, f"missing key {missing[0]!r}; known keys: {', '.join(known)}"
            )

    def names(self) -> tuple[str, ...]:
        """The keys, in file order."""
        return tuple(self._scalar(key) for key, _ in self.node.value)

    def named(self) -> tuple[str, ...]:
        """The keys, in file order, where they are names that the file gives: each once."""
        if not self.node.value:
            raise self.error(self.node, "expected at least one name")
        seen: set[str] = set()
        for key, _ in self.node.value:
            name = self._scalar(key)
            if name in seen:
                raise self.error(key, f"the name {name!r} is given twice")
            if not name.strip():
                raise self.error(key, "a name is empty")
            seen.add(name)
        return self.names()

    def key(self, name: str) -> yaml.Node:
        """Where the key itself is, and not its value."""
        return next((k for k, _ in self.node.value if self._scalar(k) == name), self.node)

    def at(self, node: yaml.Node) -> str:
        """`file:line:column`."""
        mark = node.start_mark
        return f"{self.where}:{mark.line + 1}:{mark.column + 1}"

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def parse(self, name: str, parser: Callable[[str], T]) -> T:
        """The scalar at `name` through `parser`, whose `InputError` gets the position."""
        node = self.get(name)
        text = self._scalar(node)
        try:
            return parser(text)
        except InputError as error:
            raise self.error(node, f"{name}: {error}") from None

    def parse_or(self, name: str, parser: Callable[[str], T], default: D) -> T | D:
        """As `parse`, or `default` where the key is missing."""
        return self.parse(name, parser) if self.has(name) else default

    def flag(self, name: str) -> bool:
        """`true` or `false`; a missing key is false."""
        text = self.text_or(name, "false")
        if text not in ("true", "false"):
            raise self.error(self.get(name), f"{name}: expected true or false, got {text!r}")
        return text == "true"

    def text(self, name: str) -> str:
        return self.parse(name, str)

    def text_or(self, name: str, default: str) -> str:
        return self.text(name) if self.has(name) else default

    def integer(self, name: str) -> int:
        """A whole number >= 1."""
        return self._whole(self.get(name), name)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers >= 1."""
        return tuple(self._whole(node, name) for node in self._items(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of scalars; a missing key is an empty list."""
        return tuple(self._scalar(node) for node in self._items(name)) if self.has(name) else ()

    def section(self, name: str) -> "Section":
        return self._section(self.get(name), name)

    def sections(self, name: str) -> tuple["Section", ...]:
        return tuple(self._section(node, name) for node in self._items(name))

    def is_list(self, name: str) -> bool:
        return isinstance(self._find(name), yaml.SequenceNode)

    def is_mapping(self, name: str) -> bool:
        return isinstance(self._find(name), yaml.MappingNode)

    def get(self, name: str) -> yaml.Node:
        node = self._find(name)
        if node is None:
            raise self.error(self.node, f"missing key {name!r}")
        return node

    def _find(self, name: str) -> yaml.Node | None:
        for key, value in self.node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == name:
                found: yaml.Node = value
                return found
        return None

    def _items(self, name: str) -> tuple[yaml.Node, ...]:
        node = self.get(name)
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self.error(node, f"{name}: expected a list with at least one entry")
        return tuple(node.value)

    def _section(self, node: yaml.Node, name: str) -> "Section":
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{name}: expected keys and values")
        return Section(self.where, node)

    def _whole(self, node: yaml.Node, name: str) -> int:
        text = self._scalar(node)
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
            raise self.error(node, f"{name}: expected a whole number >= 1, got {text!r}")
        return int(text)

    def _scalar(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, "expected a plain value")
        text = str(node.value)
        if not text.isprintable():
            raise self.error(node, f"{text!r} has characters that cannot be printed on one line")
        return text


def read(text: str, where: str) -> Section:
    """The root mapping of a YAML document; raises `InputError` with the position."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise InputError(f"{where}{position}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise InputError(f"{where}: not YAML: {reason}") from None
    except RecursionError:
        raise InputError(f"{where}: not YAML: too deep") from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{where}:1:1: expected keys and values, as in `name: lab`")
    root = Section(where, node)
    _check_finite(root)
    return root


def _check_finite(root: Section) -> None:
    """Raise `InputError` where an alias makes the document contain itself, or grow beyond reason.

    Nodes are entered and left in the order of the text; those entered and not left are above.
    """
    above: set[int] = set()
    todo: list[tuple[yaml.Node, bool]] = [(root.node, True)]
    seen = 0
    while todo:
        node, entering = todo.pop()
        if not entering:
            above.discard(id(node))
            continue
        if id(node) in above:
            raise root.error(node, "a cycle: an alias makes this part contain itself")
        seen += 1
        if seen > MOST_NODES:
            raise root.error(node, f"more than {MOST_NODES} values, aliases written out")
        if isinstance(node, yaml.CollectionNode):
            above.add(id(node))
            todo.append((node, False))
            inside = [part for item in node.value for part in _parts(item)]
            todo.extend((part, True) for part in reversed(inside))


def _parts(item: yaml.Node | tuple[yaml.Node, yaml.Node]) -> tuple[yaml.Node, ...]:
    return item if isinstance(item, tuple) else (item,)
