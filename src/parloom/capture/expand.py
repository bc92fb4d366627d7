"""Nodes for calls that a trace did not run: those of the call that each repeats, renamed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from torch import fx

from parloom.capture.attention import is_fixed
from parloom.capture.autograd import CHECKPOINT
from parloom.capture.repeats import AGAIN, MARK, SEEN, Unlike
from parloom.ir.graph import Node, TensorSpec, rename_node

ORDINAL = re.compile(r"@\d+")


class Seer(Protocol):
    """What is known of the nodes of a trace so far."""

    names: dict[fx.Node, str | tuple[str, ...]]
    specs: dict[str, TensorSpec]
    nodes: list[Node]
    classes: dict[str, str]
    checkpoints: dict[str, int]

    def value(self, node: fx.Node) -> str: ...
    def origin(self, node: fx.Node) -> tuple[str, str]: ...
    def metadata(self, node: fx.Node) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class First:
    """A call that was run: its nodes, and what of them others see."""

    nodes: tuple[Node, ...]
    operands: tuple[fx.Node, ...]
    results: tuple[str, ...]
    path: str
    source: str
    checkpoint: int | None
    classes: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Expansion:
    """The calls of one trace. `looked` are nodes that were looked at beyond what they return."""

    seer: Seer
    firsts: dict[int, First] = field(default_factory=dict)
    marks: list[frozenset[int]] = field(default_factory=list)  # of the nodes, in their order
    private: dict[str, frozenset[int]] = field(default_factory=dict)  # calls that a value is in
    looked: set[fx.Node] = field(default_factory=set)
    numbers: Any = field(default_factory=lambda: count(-1, -1))

    def takes(self, node: fx.Node) -> bool:
        """Translate a node that stands for a call, or tells of one; whether it is one."""
        if node.target is SEEN:
            self.see(node)
        elif node.target is AGAIN:
            self.repeat(node)
        return node.target in (SEEN, AGAIN)

    def made(self, node: fx.Node, new: Node) -> None:
        """Note a node of the graph that a node of the trace became."""
        marks = frozenset((self.seer.metadata(node).get("custom") or {}).get(MARK) or ())
        self.marks.append(marks)
        self.private.update((v.name, marks) for v in new.results if marks)

    def see(self, node: fx.Node) -> None:
        """The end of a call that was run."""
        operands, results, number = node.args
        path, source = self.seer.origin(node)
        nodes = tuple(
            n for n, marks in zip(self.seer.nodes, self.marks, strict=True) if number in marks
        )
        names = tuple(self.seer.value(result) for result in listed(results))
        for name in names:
            if name in self.private:
                self.private[name] -= {number}
        plain = ORDINAL.sub("", path)
        classes = tuple(
            (name.removeprefix(plain), kind)
            for name, kind in self.seer.classes.items()
            if f"{name}.".startswith(f"{plain}.")
        )
        around = (self.seer.metadata(node).get("custom") or {}).get(CHECKPOINT)
        assert isinstance(number, int)
        self.firsts[number] = First(
            nodes, listed(operands), names, path, source, around, classes
        )  # fmt: skip

    def repeat(self, node: fx.Node) -> None:
        """The nodes of a call that was not run, after those of the graph."""
        operands, number, _, aside = node.args
        assert isinstance(number, int)
        first = self.firsts.get(number)
        if first is None:
            raise Unlike("a call is repeated before it is seen")
        path, source = self.seer.origin(node)
        self.seer.classes.update(
            (ORDINAL.sub("", path) + below, kind) for below, kind in first.classes
        )
        traced = iter(listed(operands))
        theirs = tuple(f"state:{name}" if name else next(traced) for name in strings(aside))
        names = self.operand_names(node, first.operands, theirs)
        own = {v.name: f"{node.name}/{v.name}" for n in first.nodes for v in n.results}
        names |= own
        numbers: dict[int, int] = {}
        around = (self.seer.metadata(node).get("custom") or {}).get(CHECKPOINT)
        for old in first.nodes:
            if not names.keys() >= set(old.refs):
                raise Unlike(f"{old.key} reads what is no operand of its call")
            if not f"{old.path}.".startswith(f"{first.path}."):
                raise Unlike(f"{old.key} is not in {first.path}")
            if old.source == first.source and source != first.source:
                raise Unlike(f"{old.key} has the line of the call")
            new = rename_node(old, names)
            new = replace(new, path=path + old.path.removeprefix(first.path))
            self.seer.nodes.append(new)
            self.made(node, new)
            self.seer.specs.update((v.name, v.spec) for v in new.results)
            inner = self.seer.checkpoints.get(old.results[0].name)
            if inner is not None and inner != first.checkpoint:
                inside = numbers.setdefault(inner, next(self.numbers))
                self.seer.checkpoints |= {v.name: inside for v in new.results}
            elif around is not None:
                self.seer.checkpoints |= {v.name: around for v in new.results}
        if not names.keys() >= set(first.results):
            raise Unlike("a result is from outside of its call")
        self.seer.names[node] = tuple(names[result] for result in first.results)

    def operand_names(
        self, node: fx.Node, ours: Sequence[fx.Node], theirs: Sequence[fx.Node | str]
    ) -> dict[str, str]:
        """What the operands of the first call are in another one, where some have a name already.

        Raises: `Unlike` where the two may have been translated in another way.
        """
        names: dict[str, str] = {}
        if is_fixed(node):
            raise Unlike("a call that is the same for all batches")
        for one, other in zip(ours, theirs, strict=True):
            old = self.seer.value(one)
            new = other if isinstance(other, str) else self.seer.value(other)
            if names.setdefault(old, new) != new:
                raise Unlike(f"two operands of one call are {old}")
            fixed = is_fixed(one) or (isinstance(other, fx.Node) and is_fixed(other))
            if one is not other and (one in self.looked or fixed):
                raise Unlike(f"{old} was looked into")
        return names

    def check(self, returned: Iterable[str]) -> None:
        """Raise `Unlike` where a value of a call leaves it around its results."""
        private = {
            name: numbers
            for name, marks in self.private.items()
            if (numbers := marks & self.firsts.keys())
        }
        for node, marks in zip(self.seer.nodes, self.marks, strict=True):
            if any(not private[name] <= marks for name in node.refs if name in private):
                raise Unlike(f"{node.key} reads a value from inside of a call")
        if not private.keys().isdisjoint(returned):
            raise Unlike("a value from inside of a call is returned")


def strings(argument: Any) -> tuple[str, ...]:
    """The strings in a list that is an argument."""
    return tuple(argument)


def listed(argument: Any) -> tuple[fx.Node, ...]:
    """The nodes in a list that is an argument."""
    return tuple(argument)
