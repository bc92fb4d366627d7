"""Stages from the series and parallel parts of a model, the slowest of which is the fastest.

A stage has parts of the tree that are next to each other: a range of the parts of a series, or of
parallel ones. Its devices replicate it. Under 1F1B it has as many microbatches in flight as there
are stages on the longest path from it to the end (its depth).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf

from parloom.comparators.pipelines import Items
from parloom.ir.series_parallel import Parallel, Series, Tree, items_in

# Halving ends where the slowest stage is known to this share.
PRECISION = 1e-3


@dataclass(frozen=True, slots=True)
class Block:
    """Parts `first` to `last` - 1 of one node of the tree as a stage on `size` devices: what it
    takes for a microbatch, and the bytes that `Items` tells apart.
    """

    first: int
    last: int
    size: int
    ps: float
    held_bytes: int
    kept_bytes: int
    passing_bytes: int

    def peak_bytes(self, in_flight: int) -> int:
        """What each device holds with so many microbatches in flight."""
        return self.held_bytes + in_flight * self.kept_bytes + self.passing_bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """A part `first` that is split further, with so many devices, in front of `behind` stages."""

    first: int
    size: int
    behind: int

    @property
    def last(self) -> int:
        return self.first + 1


Choice = Block | _Part
Table = dict[tuple[int, int], tuple[int, Choice | None]]
"""(first part, devices) -> the least depth of these parts and all behind them, and its choice."""


def tree_split(
    tree: Tree, costs: Mapping[int, Items], devices: int, microbatches: int, limit_bytes: int
) -> list[tuple[tuple[int, ...], int]] | None:
    """The items and the number of devices of stages on `devices` whose slowest takes the least, in
    the order of the tree; None where no stages fit into `limit_bytes`.

    GraphPipe (Jeon et al., ASPLOS'25, section 5): halving of the time that a stage may take, and a
    dynamic program over the tree for the fewest microbatches in flight within it. A stage takes its
    passes and its share of the reduction of gradients, or what it receives or sends where that
    takes longer. `costs` are by the sizes that stages may have.
    """
    search = _Search(tree, costs, devices, microbatches, limit_bytes)
    low = high = search.least_ps
    found: list[tuple[tuple[int, ...], Block]] | None = None
    while found is None:
        if high > search.most_ps:
            return None
        low, high = high, 2 * high
        found = search.within(high)
    high = max(block.ps for _, block in found)
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        better = search.within(middle)
        if better is None:
            low = middle
        else:
            found, high = better, max(block.ps for _, block in better)
    return [(items, block.size) for items, block in found]


class _Search:
    """The dynamic program; nodes of the tree are those that have parts, by their numbers."""

    def __init__(
        self,
        tree: Tree,
        costs: Mapping[int, Items],
        devices: int,
        microbatches: int,
        limit_bytes: int,
    ) -> None:
        self.devices, self.microbatches, self.limit_bytes = devices, microbatches, limit_bytes
        self.costs = dict(costs)
        self.nodes: list[Series | Parallel] = []
        # The node that a part of a node is, None for an item.
        self.inner: list[list[int | None]] = []
        self._add(Series((tree,)) if isinstance(tree, int) else tree)
        # Devices times time that the items take at least.
        least = [min(size * own.passes_ps[i] for size, own in costs.items()) for i in self._all()]
        self.work = [[sum(least[i] for i in items_in(p)) for p in n.parts] for n in self.nodes]
        self.blocks = [list(self._blocks(node)) for node in self.nodes]
        self.least_ps = max(1.0, sum(self.work[0]) / devices)
        self.most_ps = max(block.ps for own in self.blocks for block in own)
        self.within_ps = inf
        self.fast: list[list[list[Block]]] = []
        self.tables: dict[tuple[int, int], Table] = {}

    def _add(self, node: Series | Parallel) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        self.inner.append([])
        for part in node.parts:
            self.inner[number].append(None if isinstance(part, int) else self._add(part))
        return number

    def _all(self) -> range:
        return range(len(items_in(self.nodes[0])))

    def _blocks(self, node: Series | Parallel) -> Iterator[Block]:
        """All stages that parts of a node can be, by their first parts."""
        parts = [items_in(part) for part in node.parts]
        for size, own in self.costs.items():
            read = _read_by(own, len(self._all()))
            for first in range(len(parts)):
                border = _Border(own, read)
                passes = reduced = held = kept = passing = 0
                for last, items in enumerate(parts[first:], first + 1):
                    border.take(items)
                    passes += sum(own.passes_ps[i] for i in items)
                    reduced += sum(own.reduced_ps[i] for i in items)
                    held += sum(own.held_bytes[i] for i in items)
                    kept += sum(own.kept_bytes[i] for i in items)
                    passing = max(passing, *(own.passing_bytes[i] for i in items))
                    ps = max(passes + reduced / self.microbatches, border.in_ps, border.out_ps)
                    yield Block(first, last, size, ps, held, kept, passing)

    def within(self, ps: float) -> list[tuple[tuple[int, ...], Block]] | None:
        """Stages of which each takes at most `ps`, or None."""
        self.within_ps = ps
        self.tables.clear()
        self.fast = []
        for node, blocks in zip(self.nodes, self.blocks, strict=True):
            by_first: list[list[Block]] = [[] for _ in node.parts]
            for block in blocks:
                if block.ps <= ps:
                    by_first[block.first].append(block)
            self.fast.append(by_first)
        table = self.table(0, 0)
        return list(self._stages(0, 0, self.devices)) if (0, self.devices) in table else None

    def table(self, number: int, behind: int) -> Table:
        """The least depth of a node with `behind` stages behind it, from its last parts on."""
        if (number, behind) in self.tables:
            return self.tables[number, behind]
        in_series = isinstance(self.nodes[number], Series)
        work = self.work[number]
        count, before = len(work), list(accumulate(work, initial=0))
        others = sum(self.work[0]) - before[-1]
        found: Table = {(count, 0): (behind, None)}
        for first in reversed(range(count)):
            needed = self._needed(before[-1] - before[first])
            most = self.devices - self._needed(others + before[first])
            for used in range(max(1, needed), most + 1):
                best: tuple[int, Choice | None] | None = None
                for choice in self._choices(number, first, used):
                    rest = found.get((choice.last, used - choice.size))
                    if rest is None or (best is not None and rest[0] >= best[0]):
                        continue
                    depth = self._depth(number, choice, rest[0] if in_series else behind)
                    if depth is None:
                        continue
                    if not in_series:
                        depth = max(depth, rest[0])
                    if best is None or depth < best[0]:
                        best = depth, self._placed(choice, rest[0] if in_series else behind)
                if best is not None:
                    found[first, used] = best
        self.tables[number, behind] = found
        return found

    def _choices(self, number: int, first: int, used: int) -> Iterator[Choice]:
        """The stages that begin with a part, and the part itself with some of the devices."""
        yield from (block for block in self.fast[number][first] if block.size <= used)
        if self.inner[number][first] is not None:
            yield from (_Part(first, size, 0) for size in range(1, used + 1))

    def _depth(self, number: int, choice: Choice, behind: int) -> int | None:
        """The depth of what is chosen in front of `behind` stages; None where it does not fit."""
        if isinstance(choice, Block):
            in_flight = min(behind + 1, self.microbatches)
            return behind + 1 if choice.peak_bytes(in_flight) <= self.limit_bytes else None
        inner = self.inner[number][choice.first]
        assert inner is not None
        found = self.table(inner, behind).get((0, choice.size))
        return None if found is None else found[0]

    @staticmethod
    def _placed(choice: Choice, behind: int) -> Choice:
        return choice if isinstance(choice, Block) else _Part(choice.first, choice.size, behind)

    def _needed(self, work: int) -> int:
        """Devices that so much work needs at least."""
        return ceil(work / self.within_ps * (1 - 1e-12))

    def _stages(
        self, number: int, behind: int, used: int
    ) -> Iterator[tuple[tuple[int, ...], Block]]:
        """The stages that were chosen for a node, with their items."""
        table, first = self.table(number, behind), 0
        while True:
            choice = table[first, used][1]
            if choice is None:
                return
            if isinstance(choice, Block):
                parts = self.nodes[number].parts[choice.first : choice.last]
                yield tuple(i for part in parts for i in items_in(part)), choice
            else:
                inner = self.inner[number][choice.first]
                assert inner is not None
                yield from self._stages(inner, choice.behind, choice.size)
            first, used = choice.last, used - choice.size


def _read_by(costs: Items, count: int) -> list[list[int]]:
    """By item, the values that it makes or reads."""
    found: list[list[int]] = [[] for _ in range(count)]
    for index, value in enumerate(costs.sent):
        for item in (value.source, *value.targets):
            found[item].append(index)
    return found


class _Border:
    """What values take that cross the border of a growing set of items."""

    def __init__(self, costs: Items, touched: Sequence[Sequence[int]]) -> None:
        self.costs, self.touched = costs, touched
        self.inside: set[int] = set()
        self.in_ps = self.out_ps = 0

    def take(self, items: Sequence[int]) -> None:
        """Put items inside."""
        near = {value for item in items for value in self.touched[item]}
        self._count(near, -1)
        self.inside.update(items)
        self._count(near, 1)

    def _count(self, values: set[int], sign: int) -> None:
        for value in (self.costs.sent[index] for index in values):
            read = sum(target in self.inside for target in value.targets)
            if value.source not in self.inside:
                self.in_ps += sign * value.ps * (read > 0)
            else:
                self.out_ps += sign * value.ps * (read < len(value.targets))
