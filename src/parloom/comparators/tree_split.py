"""Stages from the series and parallel parts of a model, the slowest of which is the fastest.

A stage has parts of the tree that are next to each other: a range of the parts of a series, or of
parallel ones; and what joins parallel parts may be in a stage with the ends of the last of them.
Its devices replicate it. Under 1F1B it has as many microbatches in flight as there are stages on
the longest path from it to the end (its depth).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf

from parloom.ir.series_parallel import Parallel, Series, Tree, items_in
from parloom.search.pipelines.costs import ItemCosts

# Halving ends where the slowest stage is known to this share.
PRECISION = 1e-3
Stop = tuple[int, int]
"""Parts of a node that are left, and parts of the next one."""


@dataclass(frozen=True, slots=True)
class Block:
    """Parts `first` to `last` - 1 of one node of the tree as a stage on `size` devices: what it
    takes of a step, and the bytes that `ItemCosts` tells apart. `items` are places in the order
    of the tree. Of parallel parts `first` those
    of `front` are left in front of it. With `cut` it has only the first parts of its last one: it
    is for parallel parts that end there.
    """

    first: int
    last: int
    size: int
    items: range
    ps: int
    stored_bytes: int
    kept_bytes: int
    passing_bytes: int
    front: Stop | None = None
    cut: Stop | None = None

    def peak_bytes(self, in_flight: int) -> int:
        """What each device holds with so many microbatches in flight."""
        return self.stored_bytes + in_flight * self.kept_bytes + self.passing_bytes


@dataclass(frozen=True, slots=True)
class _Choice:
    """Parts from a first one to `last` - 1 on `size` devices: a stage, behind parts `front` of the
    first one that have `behind` stages behind them; one of both at least.
    """

    last: int
    size: int
    block: Block | None
    front: Stop | None
    behind: int


Table = dict[tuple[int, int], tuple[int, _Choice | None]]
"""(first part, devices) -> the least depth of these parts and all behind them, and its choice."""


def tree_split(
    tree: Tree, costs: Mapping[int, ItemCosts], devices: int, limit_bytes: int
) -> list[tuple[tuple[int, ...], int]] | None:
    """The items and the number of devices of stages on `devices` whose slowest takes the least, in
    the order of the tree; None where no stages fit into `limit_bytes`.

    GraphPipe (Jeon et al., ASPLOS'25, section 5): halving of the time that a stage may take, and a
    dynamic program over the tree for the fewest microbatches in flight within it. A stage takes its
    passes and its share of the reduction of gradients, or what it receives or sends where that
    takes longer. `costs` are by the sizes that stages may have.
    """
    search = _Search(tree, costs, devices, limit_bytes)
    low = high = search.least_ps
    found: list[Block] | None = None
    while found is None:
        if high > search.most_ps:
            return None
        low, high = high, 2 * high
        found = search.within(high)
    high = max(block.ps for block in found)
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        better = search.within(middle)
        if better is None:
            low = middle
        else:
            found, high = better, max(block.ps for block in better)
    order = items_in(tree)
    return [(tuple(order[i] for i in block.items), block.size) for block in found]


class _Blocks:
    """Makes the stages that there may be."""

    def __init__(self, tree: Tree, costs: Mapping[int, ItemCosts]) -> None:
        self.costs = costs
        self.touched = {size: _touched(own) for size, own in costs.items()}
        self.place = {item: place for place, item in enumerate(items_in(tree))}

    def of(self, node: Series | Parallel) -> Iterator[Block]:
        """All stages that parts of a node can be."""
        parts = [items_in(part) for part in node.parts]
        for size in self.costs:
            for first, part in enumerate(node.parts):
                yield from self._grown(size, first, parts[first:])
                if isinstance(node, Series) and isinstance(part, Parallel):
                    for front, ends in _ends(part):
                        grown = self._grown(size, first, [ends, *parts[first + 1 :]])
                        yield from (replace(b, front=front) for b in grown if b.last > first + 1)
                if isinstance(node, Parallel):
                    for cut, begins in _begins(node, first):
                        grown = self._grown(size, first, [*parts[first : cut[0]], begins])
                        yield from (replace(b, cut=cut) for b in grown if b.last > cut[0])

    def _grown(self, size: int, first: int, parts: Sequence[tuple[int, ...]]) -> Iterator[Block]:
        """Stages of parts from `first` on, of which one is there more each time."""
        own = self.costs[size]
        border = _Border(own, self.touched[size])
        begin = end = self.place[parts[0][0]]
        loads, stored, kept, passing = own.stage_ps, 0, 0, 0
        for last, new in enumerate(parts, first + 1):
            border.take(new)
            end += len(new)
            at = list(new)
            loads += int(own.loads_ps[at].sum())
            stored += int(own.stored_bytes[at].sum())
            kept += int(own.kept_bytes[at].sum())
            passing = max(passing, int(own.passing_bytes[at].max()))
            ps = max(loads, own.num_microbatches * max(border.in_ps, border.out_ps))
            yield Block(first, last, size, range(begin, end), ps, stored, kept, passing)


class _Search:
    """The dynamic program; nodes of the tree are those that have parts, by their numbers."""

    def __init__(
        self,
        tree: Tree,
        costs: Mapping[int, ItemCosts],
        devices: int,
        limit_bytes: int,
    ) -> None:
        self.devices, self.limit_bytes = devices, limit_bytes
        self.microbatches = next(iter(costs.values())).num_microbatches
        self.nodes: list[Series | Parallel] = []
        self.inner: list[list[int | None]] = []
        _number(Series((tree,)) if isinstance(tree, int) else tree, self.nodes, self.inner)
        # Devices times time that the items take at least.
        count = len(items_in(tree))
        least = [min(int(s * own.loads_ps[i]) for s, own in costs.items()) for i in range(count)]
        self.work = [[sum(least[i] for i in items_in(p)) for p in n.parts] for n in self.nodes]
        possible = _Blocks(tree, costs)
        self.blocks = [list(possible.of(node)) for node in self.nodes]
        self.least_ps = max(1.0, sum(self.work[0]) / devices)
        self.most_ps = max(block.ps for own in self.blocks for block in own)
        self.within_ps = inf
        self.fast: list[list[list[Block]]] = []
        self.tables: dict[tuple[int, Stop, int], Table] = {}

    def within(self, ps: float) -> list[Block] | None:
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
        whole = len(self.nodes[0].parts), 0
        if (0, self.devices) not in self.table(0, whole, 0):
            return None
        return list(self._stages(0, whole, 0, self.devices))

    def table(self, number: int, stop: Stop, behind: int) -> Table:
        """The least depth of parts of a node with `behind` stages behind them, from the last ones
        on.
        """
        key = number, stop, behind
        if key in self.tables:
            return self.tables[key]
        whole, more = stop
        work = self.work[number][:whole]
        if more:
            inner = self.inner[number][whole]
            assert inner is not None
            work = [*work, sum(self.work[inner][:more])]
        before = list(accumulate(work, initial=0))
        others = sum(self.work[0]) - before[-1]
        found: Table = {(len(work), 0): (behind, None)}
        for first in reversed(range(len(work))):
            needed = self._needed(before[-1] - before[first])
            most = self.devices - self._needed(others + before[first])
            for used in range(max(1, needed), most + 1):
                best = self._best(key, first, used, found)
                if best is not None:
                    found[first, used] = best
        self.tables[key] = found
        return found

    def _best(
        self, key: tuple[int, Stop, int], first: int, used: int, found: Table
    ) -> tuple[int, _Choice | None] | None:
        """The choice with the least depth for parts from `first` on, on all of `used` devices."""
        number, stop, behind = key
        in_series = isinstance(self.nodes[number], Series)
        best: tuple[int, _Choice | None] | None = None
        for last, size, block, front in self._choices(number, stop, first, used):
            rest = found.get((last, used - size))
            if rest is None or (best is not None and rest[0] >= best[0]):
                continue
            depth: int | None = rest[0] if in_series else behind
            after = depth
            if block is not None:
                depth = after = self._in_front(block, depth)
            if front is not None and depth is not None:
                inner = self.inner[number][first]
                assert inner is not None
                left = size - (block.size if block is not None else 0)
                depth, _ = self.table(inner, front, depth).get((0, left), (None, None))
            if depth is None or after is None:
                continue
            depth = depth if in_series else max(depth, rest[0])
            if best is None or depth < best[0]:
                best = depth, _Choice(last, size, block, front, after)
        return best

    def _choices(
        self, number: int, stop: Stop, first: int, used: int
    ) -> Iterator[tuple[int, int, Block | None, Stop | None]]:
        """(last part + 1, devices, stage, parts in front of it) of all that may begin with a part
        on at most so many devices.
        """
        whole, more = stop
        for block in self.fast[number][first]:
            there = block.last <= whole if block.cut is None else block.cut == stop
            if block.size > used or not there:
                continue
            if block.front is None:
                yield block.last, block.size, block, None
            else:
                for size in range(block.size + 1, used + 1):
                    yield block.last, size, block, block.front
        inner = self.inner[number][first]
        if inner is not None:
            front = (len(self.nodes[inner].parts), 0) if first < whole else (more, 0)
            for size in range(1, used + 1):
                yield first + 1, size, None, front

    def _in_front(self, block: Block, behind: int | None) -> int | None:
        """The depth of a stage in front of so many; None where it does not fit."""
        if behind is None:
            return None
        in_flight = min(behind + 1, self.microbatches)
        return behind + 1 if block.peak_bytes(in_flight) <= self.limit_bytes else None

    def _needed(self, work: int) -> int:
        """Devices that so much work needs at least."""
        return ceil(work / self.within_ps * (1 - 1e-12))

    def _stages(self, number: int, stop: Stop, behind: int, used: int) -> Iterator[Block]:
        """The stages that were chosen for parts of a node."""
        table, first = self.table(number, stop, behind), 0
        while True:
            choice = table[first, used][1]
            if choice is None:
                return
            block, left = choice.block, choice.size
            if choice.front is not None:
                inner = self.inner[number][first]
                assert inner is not None
                left -= block.size if block is not None else 0
                yield from self._stages(inner, choice.front, choice.behind, left)
            if block is not None:
                yield block
            first, used = choice.last, used - choice.size


def _number(
    node: Series | Parallel, nodes: list[Series | Parallel], inner: list[list[int | None]]
) -> int:
    """Append a node and those in it to `nodes`, and to `inner` the node that each of its parts is,
    None for an item; return its number.
    """
    number = len(nodes)
    nodes.append(node)
    inner.append([])
    for part in node.parts:
        inner[number].append(None if isinstance(part, int) else _number(part, nodes, inner))
    return number


def _ends(node: Parallel) -> Iterator[tuple[Stop, tuple[int, ...]]]:
    """What may be in a stage with all that joins parallel parts: the last of them, and of the one
    before these the last parts; with what is left in front.
    """
    behind: tuple[int, ...] = ()
    for index in reversed(range(len(node.parts))):
        part = node.parts[index]
        if isinstance(part, Series):
            for more in reversed(range(1, len(part.parts))):
                own = (i for inner in part.parts[more:] for i in items_in(inner))
                yield (index, more), (*own, *behind)
        behind = (*items_in(part), *behind)
        if index:
            yield (index, 0), behind


def _begins(node: Parallel, first: int) -> Iterator[tuple[Stop, tuple[int, ...]]]:
    """The first parts of all parallel parts from `first` on, with where these parts end then."""
    for index, part in enumerate(node.parts[first:], first):
        if isinstance(part, Series):
            for more in range(1, len(part.parts)):
                yield (
                    (index, more),
                    tuple(i for inner in part.parts[:more] for i in items_in(inner)),
                )


def _touched(costs: ItemCosts) -> list[list[int]]:
    """By item, the values that it makes or reads."""
    found: list[list[int]] = [[] for _ in costs.passes_ps]
    for index, value in enumerate(costs.sent):
        for item in (value.source, *value.targets):
            found[item].append(index)
    return found


class _Border:
    """What values take that cross the border of a growing set of items."""

    def __init__(self, costs: ItemCosts, touched: Sequence[Sequence[int]]) -> None:
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
                self.in_ps += sign * value.ps[-1] * (read > 0)
            else:
                self.out_ps += sign * value.ps[-1] * (read < len(value.targets))
