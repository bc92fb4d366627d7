"""A backward pass in two halves: gradients of what arrived, and later those of weights.

An operator that reads a weight and an activation has one node in the autograd graph for both
gradients, of which autograd computes those that are asked for. So the first half asks for the
gradients of what arrived and for those that flow into such nodes, and keeps the latter; the second
half begins at these nodes and asks for the weights (Qi et al., ICLR'24, section 2). Both run
through no node twice but these. What all others have saved goes as the first half runs them, as it
would in a whole backward pass.

A weight's gradient comes with the first half where the halves could not be told apart: where
several operators read it, where it has left for another stage as it is, and where a function in
Python computes both gradients at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from parloom.runtime.memory import apart
from parloom.runtime.saved import Saved, refuse

LEAF, UNIT = "AccumulateGrad", "_WeightsBackward"
"""Behind these nodes are weights: a leaf, and all that a unit gathers (`runtime.units`)."""
JOINED = "_JoinedBackward"
"""Weights that an operator reads as one (`runtime.operators`)."""


@dataclass(eq=False)
class _Source:
    """A weight: the node behind which it is, the nodes that read it, and whether it has left for
    another stage as it is.
    """

    node: Node
    number: int
    readers: list[Node] = field(default_factory=list)
    leaves: bool = False


class SplitBackward:
    """The backward pass from `roots` to `arrived`, tensors that other stages have made."""

    def __init__(self, roots: Sequence[GradientEdge], arrived: Sequence[Tensor]) -> None:
        self._roots = list(roots)
        self._arrived = [get_gradient_edge(tensor) for tensor in arrived]
        self._graph = _Graph(self._roots, {edge.node for edge in self._arrived})
        self._late: list[tuple[list[GradientEdge], list[Tensor], list[GradientEdge]]] = []
        self._early: list[tuple[GradientEdge, Tensor]] = []

    def inputs(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what arrived, from those of the roots."""
        graph = self._graph
        early = graph.early()
        readers = [node for node in graph.readers if graph.sources_of(node)]
        entries = {node: graph.entries(node) for node in readers}
        wanted = [*self._arrived, *early]
        wanted += [edge for edges in entries.values() for edge in edges]
        if not (wanted and self._roots):
            return [None] * len(self._arrived)
        found = self._gradients(wanted, gradients)
        count = len(self._arrived)
        own, found = found[:count], apart(found[count:], found[:count])
        self._early = [(e, g) for e, g in zip(early, found, strict=False) if g is not None]
        found = found[len(early) :]
        for node, edges in entries.items():
            mine, found = found[: len(edges)], found[len(edges) :]
            pairs = [(e, g) for e, g in zip(edges, mine, strict=True) if g is not None]
            if pairs:
                begins, given = [e for e, _ in pairs], [g for _, g in pairs]
                self._late.append((begins, given, graph.sources_of(node)))
        return own

    def _gradients(
        self, wanted: Sequence[GradientEdge], given: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the first half: a node that the second half does not run lets go of what
        it has saved.
        """
        passed = [node for node in self._graph.passed() if _saved_names(node)]
        handles = [node.register_hook(partial(_let_go, node)) for node in passed]
        try:
            found = torch.autograd.grad(
                self._roots, wanted, given, retain_graph=True, allow_unused=True
            )
            return list(found)
        finally:
            for handle in handles:  # each refers to its node
                handle.remove()

    def weights(self) -> None:
        """Give the gradients of weights to their leaves and units."""
        delivery = _Delivery(
            [edge for edge, _ in self._early] + [e for *_, edges in self._late for e in edges]
        )
        for edge, gradient in self._early:
            delivery.give(edge, gradient)
        self._early = []
        while self._late:
            begins, given, edges = self._late.pop(0)
            if all(_name(edge.node) == LEAF for edge in edges):
                # Each is read here alone: autograd takes the gradients home itself.
                leaves = [_leaf(edge.node) for edge in edges]
                torch.autograd.backward(begins, given, inputs=leaves)
                continue
            found = torch.autograd.grad(begins, edges, given, allow_unused=True)
            for edge, gradient in zip(edges, found, strict=True):
                delivery.give(edge, gradient)
        self._roots, self._arrived = [], []


class _Graph:
    """The nodes between roots and ends: `behind` are those that a node gives gradients to."""

    def __init__(self, roots: Iterable[GradientEdge], ends: set[Node]) -> None:
        self.ends = ends
        self.begin = list(roots)
        self.weights: set[Node] = set()
        self.behind: dict[Node, list[tuple[Node, int]]] = {}
        self.order = self._topological()
        self._entries: dict[Node, dict[int, None]] = {}
        for edge in self.begin:
            self._entries.setdefault(edge.node, {})[edge.output_nr] = None
        for node in self.order:
            for following, number in self.behind[node]:
                self._entries.setdefault(following, {})[number] = None
        # Chains of one operand behind which are weights: casts, transposes, lookups; or of several
        # that are read as one.
        self.chains = set(self.weights)
        for node in reversed(self.order):
            behind = self.behind[node]
            is_link = len(behind) == 1 or (len(behind) > 1 and _name(node) == JOINED)
            if is_link and all(following in self.chains for following, _ in behind):
                self.chains.add(node)
        self.readers = [node for node in self.order if self._reads(node)]
        self.sources: dict[tuple[Node, int], _Source] = {}
        self._sources_of: dict[Node, list[_Source]] = {}
        for node in self.readers:
            for key in self._weights_behind(node):
                source = self.sources.setdefault(key, _Source(*key))
                source.readers.append(node)
                self._sources_of.setdefault(node, []).append(source)
        for edge in self.begin:
            if edge.node in self.weights:
                key = edge.node, edge.output_nr
                self.sources.setdefault(key, _Source(*key)).leaves = True

    def _topological(self) -> list[Node]:
        """All nodes that the roots reach, each before those that it gives gradients to."""
        done: list[Node] = []
        stack = [(edge.node, False) for edge in reversed(self.begin)]
        while stack:
            node, closes = stack.pop()
            if closes:
                done.append(node)
            elif node not in self.behind:
                self.behind[node] = behind = self._next(node)
                stack.append((node, True))
                stack.extend((following, False) for following, _ in behind)
        return list(reversed(done))

    def _next(self, node: Node) -> list[tuple[Node, int]]:
        if node in self.ends:
            return []
        if _is_weight(node):
            self.weights.add(node)
            return []
        return [(following, number) for following, number in node.next_functions if following]

    def _reads(self, node: Node) -> bool:
        if node in self.chains:
            return any(edge.node is node for edge in self.begin) and node not in self.weights
        return any(following in self.chains for following, _ in self.behind[node])

    def _weights_behind(self, node: Node) -> list[tuple[Node, int]]:
        """The weights that a reader reads, through chains."""
        behind: dict[tuple[Node, int], None] = {}
        stack = [key for key in reversed(self.behind[node]) if key[0] in self.chains]
        while stack:
            at, place = stack.pop()
            if at in self.weights:
                behind[at, place] = None
            else:
                stack.extend(reversed(self.behind[at]))
        return list(behind)

    def early(self) -> list[GradientEdge]:
        """The weights whose gradients come with the first half."""
        return [GradientEdge(s.node, s.number) for s in self.sources.values() if self._is_early(s)]

    def sources_of(self, reader: Node) -> list[GradientEdge]:
        """The weights of a reader whose gradients come with the second half."""
        mine = self._sources_of.get(reader, ())
        return [GradientEdge(s.node, s.number) for s in mine if not self._is_early(s)]

    def passed(self) -> list[Node]:
        """The nodes that the second half does not run."""
        late = {node for node in self.readers if self.sources_of(node)}
        stack = list(late)
        while stack:
            behind = {following for following, _ in self.behind[stack.pop()]}
            stack += (behind & self.chains) - late
            late |= behind & self.chains
        return [node for node in self.order if node not in late and node not in self.ends]

    def entries(self, node: Node) -> list[GradientEdge]:
        """Where gradients flow into a node."""
        return [GradientEdge(node, number) for number in self._entries[node]]

    def _is_early(self, source: _Source) -> bool:
        return source.leaves or len(source.readers) > 1 or _in_python(source.readers[0])


class _Delivery:
    """Hands leaves their gradients, and units all of theirs at once."""

    def __init__(self, edges: Iterable[GradientEdge]) -> None:
        self._missing: dict[Node, int] = {}
        self._found: dict[Node, dict[int, Tensor]] = {}
        for edge in edges:
            node, _ = _home(edge.node)
            self._missing[node] = self._missing.get(node, 0) + 1

    def give(self, edge: GradientEdge, gradient: Tensor | None) -> None:
        """Take a gradient; with the last one of a leaf or a unit they go home."""
        node, number = _home(edge.node)
        self._missing[node] -= 1
        found = self._found.setdefault(node, {})
        if gradient is not None:
            found[number] = found[number] + gradient if number in found else gradient
        if not self._missing[node] and found:
            edges = [GradientEdge(node, i) for i in found]
            torch.autograd.backward(edges, list(found.values()))
            self._found[node] = {}


def _is_weight(node: Node) -> bool:
    """Whether one weight is behind a node: a leaf, or what a unit has of it."""
    if _name(node) == LEAF:
        return True
    following = node.next_functions
    return len(following) == 1 and following[0][0] is not None and _name(following[0][0]) == UNIT


def _home(node: Node) -> tuple[Node, int]:
    """Where the gradient of the weight behind a node goes: a leaf, or one of those of a unit."""
    if _name(node) == LEAF:
        return node, 0
    unit, number = node.next_functions[0]
    assert unit is not None
    return unit, number


def _leaf(node: Any) -> Tensor:
    leaf: Tensor = node.variable
    return leaf


def _name(node: Node) -> str:
    return type(node).__name__


def _in_python(node: Any) -> bool:
    """Whether a function in Python is behind a node, which computes all its gradients at once."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _saved_names(node: Node) -> tuple[str, ...]:
    """The attributes of a node that are what it has saved."""
    # Each function in Python has a type of its own, which a cache would keep.
    return ("_raw_saved_tensors",) if _in_python(node) else _names_of_kind(type(node))


@cache
def _names_of_kind(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _let_go(node: Node, *_: object) -> None:
    """Free what a node has saved, which nothing asks for any more."""
    for name in _saved_names(node):
        found = getattr(node, name)
        for saved in found if isinstance(found, tuple) else (found,):
            data = saved.data
            if isinstance(data, Saved):
                data.let_go()
            elif isinstance(data, Tensor) and data.dim() and saved.unpack_hook is None:
                # Not of numbers: dispatch modes get them as such, and there is nothing to free.
                saved.register_hooks(_nothing, refuse)


def _nothing(tensor: Tensor) -> None:
    return None
