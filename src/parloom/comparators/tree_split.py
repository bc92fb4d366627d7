"""Stages from the series and parallel parts of a model, the slowest of which is the fastest.

A stage has parts of the tree that are next to each other: a range of the parts of a series, or of
parallel ones; and what joins parallel parts may be in a stage with the ends of the last of them.
Its devices replicate it, and come behind those of the stages before it in the order of the tree.
Under 1F1B it has as many microbatches in flight as there are stages on the longest path from it to
the end (its depth); of equal depths, the longest way is to be short.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parloom.ir.mesh import Cluster
from parloom.ir.regular_parts import aligned, crossed
from parloom.ir.series_parallel import Parallel, Series, Tree, items_in
from parloom.search.pipelines.costs import ItemCosts

# Halving ends where the slowest stage is known to this share.
PRECISION = 1e-3
# Blocks whose borders are looked at together.
TOGETHER = 4096
# A depth that is none, and what a stage counts beside its share of the time of a way: of equal
# depths the one with the shortest way is taken.
NONE, DEPTH = 1 << 100, 1 << 40
# What stages take is counted in so many parts of the least that one can take.
PARTS = 1 << 10
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Stop = tuple[int, int]
"""Parts of a node that are left, and parts of the next one."""
Key = tuple[int, Stop, int, int]
"""Parts of a node: its number, where they end, the stages behind them, and how many devices behind
them are no whole node."""


class Block(NamedTuple):
    """Parts `first` to `last` - 1 of one node of the tree as a stage, which are at places `begin`
    to `end` - 1 in the order of the tree.

    Of parallel parts `first` those of `front` are left in front of it. With `cut` it has only the
    first parts of its last one: it is for parallel parts that end there. `after` and `before`:
    whether all that it reads comes from the item before it, and all that reads it is behind it.
    """

    node: int
    first: int
    last: int
    begin: int
    end: int
    after: bool
    before: bool
    front: Stop | None = None
    cut: Stop | None = None


class Stage(NamedTuple):
    """A block on `size` devices: the depth with which it no longer fits into memory; by the devices
    behind it its times, and what it adds to a depth; and the least of its times.
    """

    block: Block
    size: int
    too_deep: int
    times: list[float]
    adds: list[int]
    least_ps: float


Choice = tuple[int, int, Stage | None, Stop | None, int]
"""Parts from a first one to a last one, that not included, on so many devices: a stage, behind
parts of the first one that are in front of it and have so many stages behind them; one of both at
least."""


class Table(NamedTuple):
    """[first part][devices] -> the least depth of these parts and all behind them, its choice; and
    the numbers of devices that there may be.
    """

    depths: list[list[int]]
    choices: list[list[Choice | None]]
    ranges: list[range]


def tree_split(
    tree: Tree, costs: Mapping[int, ItemCosts], cluster: Cluster, limit_bytes: int
) -> list[tuple[tuple[int, ...], int]] | None:
    """The items and the number of devices of stages on `cluster` whose slowest takes the least, in
    the order of the tree; None where no stages fit into `limit_bytes`.

    GraphPipe (Jeon et al., ASPLOS'25, section 5): halving of the time that a stage may take, and a
    dynamic program over the tree for the fewest microbatches in flight within it. A stage takes its
    passes and its share of the reduction of gradients, or what it receives or sends where that
    takes longer: over the links at its ends between items in a row, over the slowest ones where
    parallel parts begin or end. `costs` are by the sizes that stages may have.
    """
    search = _Search(tree, costs, cluster, limit_bytes)
    low = high = search.least_ps
    found: list[tuple[Stage, float]] | None = None
    while found is None:
        if high > search.most_ps:
            return None
        low, high = high, 2 * high
        found = search.within(high)
    high = max(ps for _, ps in found)
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        better = search.within(middle)
        if better is None:
            low = middle
        else:
            found, high = better, max(ps for _, ps in better)
    order = items_in(tree)
    return [(order[stage.block.begin : stage.block.end], stage.size) for stage, _ in found]


class _Nodes:
    """The nodes of a tree that have parts, by number: where their parts begin and end in the order
    of the tree, and the nodes that the parts are, None for an item.
    """

    def __init__(self, tree: Tree) -> None:
        self.nodes: list[Series | Parallel] = []
        self.inner: list[list[int | None]] = []
        self.bounds: list[list[int]] = []
        self._add(Series((tree,)) if isinstance(tree, int) else tree, 0)

    def _add(self, node: Series | Parallel, begin: int) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        self.inner.append([])
        self.bounds.append([begin])
        for part in node.parts:
            self.inner[number].append(None if isinstance(part, int) else self._add(part, begin))
            begin += len(items_in(part))
            self.bounds[number].append(begin)
        return number

    def blocks(self) -> Iterator[Block]:
        """All stages that there may be, but for their sizes."""
        for number, node in enumerate(self.nodes):
            bounds, inner = self.bounds[number], self.inner[number]
            count = len(inner)
            for first, own in enumerate(inner):
                if isinstance(node, Parallel):
                    for last in range(first + 1, count + 1):
                        yield Block(number, first, last, bounds[first], bounds[last], False, False)
                    for cut, end in self._begins(number, first):
                        about = number, first, cut[0] + 1, bounds[first], end
                        yield Block(*about, False, False, cut=cut)
                    continue
                for last in range(first + 1, count + 1):
                    after = first > 0 and inner[first - 1] is None
                    before = last < count and inner[last] is None
                    about = number, first, last, bounds[first], bounds[last]
                    yield Block(*about, after, before)
                    if own is not None and last > first + 1:
                        for front, begin in self._ends(own):
                            about = number, first, last, begin, bounds[last]
                            yield Block(*about, False, before, front)

    def _ends(self, number: int) -> Iterator[tuple[Stop, int]]:
        """What of parallel parts may be in a stage with all that joins them: the last of them, and
        of the one before these the last parts; what is left in front, and where the stage begins.
        """
        for index, inner in enumerate(self.inner[number]):
            if index:
                yield (index, 0), self.bounds[number][index]
            for more in range(1, 0 if inner is None else len(self.inner[inner])):
                assert inner is not None
                yield (index, more), self.bounds[inner][more]

    def _begins(self, number: int, first: int) -> Iterator[tuple[Stop, int]]:
        """The first parts of all parallel parts from `first` on, and where these end."""
        for index, inner in enumerate(self.inner[number][first:], first):
            if inner is not None:
                for more in range(1, len(self.inner[inner])):
                    yield (index, more), self.bounds[inner][more]


class _Priced:
    """Blocks on so many devices: the time of each by the devices behind it, as far as these are no
    whole nodes (infinite where it would lie over more nodes than it needs), and the most
    microbatches in flight that fit.
    """

    def __init__(
        self, size: int, own: ItemCosts, order: Sequence[int], blocks: Sequence[Block], limit: int
    ) -> None:
        self.size, self.own, self.blocks = size, own, blocks
        at = list(order)
        self.begin, self.end = (
            np.array([block[place] for block in blocks], dtype=np.int64) for place in (3, 4)
        )
        self.loads = self._sum(own.adds_ps[at]) + own.stage_ps
        kept = self._sum(own.kept_bytes[at])
        ends = np.column_stack([self.begin, self.end]).ravel()
        passing, buffers = (
            np.maximum.reduceat(np.append(values[at], 0), ends)[::2]
            for values in (own.passing_bytes, own.buffer_bytes)
        )
        free = limit - self._sum(own.stored_bytes[at]) - buffers - passing
        deepest = np.where(free < 0, 0, own.num_microbatches)
        np.floor_divide(free, kept, out=deepest, where=(free >= 0) & (kept > 0))
        # No more are in flight than there are.
        self.deepest = np.minimum(deepest, own.num_microbatches)

    def _sum(self, values: Ints) -> Ints:
        sums = np.concatenate([[0], np.cumsum(values)])
        found: Ints = sums[self.end] - sums[self.begin]
        return found

    def times(self, enters: Floats, leaves: Floats, cluster: Cluster, period: int) -> Floats:
        """[devices behind, block]; `enters` and `leaves` are of a microbatch, by level of links."""
        after, before = (np.array([block[place] for block in self.blocks]) for place in (5, 6))
        found = np.full((period, len(self.blocks)), inf)
        for behind in range(period):
            begin = (-behind - self.size) % period
            devices = range(begin, begin + self.size)
            if not aligned(devices, cluster):
                continue
            sent = self.loads.astype(float)
            for ends, in_row, near in ((enters, after, begin - 1), (leaves, before, devices.stop)):
                level = crossed((devices, [near]), cluster)
                crossing = np.where(in_row, ends[level], ends[-1])
                sent = np.maximum(sent, self.own.num_microbatches * crossing)
            found[behind] = sent
        return found


def _crossing(
    costs: Sequence[ItemCosts], order: Sequence[int], blocks: Sequence[Block], levels: int
) -> Iterator[tuple[Floats, Floats]]:
    """What the values take that enter and leave each block, [level of links, block], by costs."""
    sent, count = costs[0].sent, len(order)
    ps = np.array([[v.ps for v in own.sent] for own in costs], dtype=float)
    ps = ps.reshape(len(costs), len(sent), levels).swapaxes(1, 2)
    place = np.empty(count, dtype=np.int64)
    place[list(order)] = np.arange(count)
    source = place[[v.source for v in sent]][:, None] if sent else np.empty((0, 1))
    # The first reader of each value at a place or behind it, and its last one.
    readers = np.full((len(sent), count + 1), NONE)
    last = np.zeros((len(sent), 1))
    for index, value in enumerate(sent):
        found = np.sort(place[list(value.targets)])
        readers[index] = np.append(found, NONE)[np.searchsorted(found, np.arange(count + 1))]
        last[index] = found[-1]
    enters, leaves = np.zeros((2, len(costs), levels, len(blocks)))
    for start in range(0, len(blocks), TOGETHER):
        part = slice(start, start + TOGETHER)
        begin = np.array([block.begin for block in blocks[part]])
        end = np.array([block.end for block in blocks[part]])
        inside = (begin <= source) & (source < end)
        enters[..., part] = ps @ ((source < begin) & (readers[:, begin] < end)).astype(float)
        leaves[..., part] = ps @ (inside & (last >= end)).astype(float)
    yield from zip(enters, leaves, strict=True)


def _period(cluster: Cluster) -> int:
    """What matters of a place is where in a node it is."""
    return cluster.num_devices // cluster.levels[-1].size


def _possible(
    tree: Tree,
    nodes: _Nodes,
    costs: Mapping[int, ItemCosts],
    cluster: Cluster,
    limit_bytes: int,
    least_ps: float,
) -> Iterator[Stage]:
    """All stages that may fit, the largest blocks first; ways count in parts of `least_ps`."""
    order, blocks = items_in(tree), list(nodes.blocks())
    crossing = _crossing(list(costs.values()), order, blocks, len(cluster.levels))
    for (size, own), ends in zip(costs.items(), crossing, strict=True):
        priced = _Priced(size, own, order, blocks, limit_bytes)
        times = priced.times(*ends, cluster, _period(cluster))
        parts = np.where(np.isfinite(times), times, 0) * PARTS / least_ps
        adds = DEPTH + parts.astype(np.int64)
        for index in np.flatnonzero(priced.deepest > 0)[::-1]:
            deepest, each = int(priced.deepest[index]), times[:, index]
            too_deep = NONE if deepest == own.num_microbatches else (deepest + 1) * DEPTH
            about = blocks[index], size, too_deep, each.tolist(), adds[:, index].tolist()
            yield Stage(*about, float(each.min()))


class _Search:
    """The dynamic program."""

    def __init__(
        self, tree: Tree, costs: Mapping[int, ItemCosts], cluster: Cluster, limit_bytes: int
    ) -> None:
        tree_nodes = _Nodes(tree)
        self.nodes, self.inner = tree_nodes.nodes, tree_nodes.inner
        self.devices = cluster.num_devices
        self.period = _period(cluster)
        # Devices times time that the items take at least.
        least = np.min([size * own.adds_ps.clip(0) for size, own in costs.items()], axis=0)
        sums = np.concatenate([[0], np.cumsum(least[list(items_in(tree))])])
        self.work = [np.diff(sums[bounds]).tolist() for bounds in tree_nodes.bounds]
        self.least_ps = max(1.0, sum(self.work[0]) / self.devices)
        # By node and first part; the largest first: they leave the fewest stages behind them.
        self.stages: list[list[list[Stage]]] = [[[] for _ in node.parts] for node in self.nodes]
        found = list(_possible(tree, tree_nodes, costs, cluster, limit_bytes, self.least_ps))
        for stage in found:
            self.stages[stage.block.node][stage.block.first].append(stage)
        self.most_ps = max((ps for stage in found for ps in stage.times if ps < inf), default=0)
        # Where what is in flight fits anyway, stages behind others are only added to their depths.
        self.roomy = all(stage.too_deep == NONE for stage in found)
        self.within_ps = inf
        self.fast = self.stages
        self.tables: dict[Key, Table] = {}

    def within(self, ps: float) -> list[tuple[Stage, float]] | None:
        """Stages of which each takes at most `ps`, and their times, or None."""
        self.within_ps = ps
        self.tables.clear()
        self.fast = [
            [[stage for stage in stages if stage.least_ps <= ps] for stages in own]
            for own in self.stages
        ]
        key = 0, (len(self.nodes[0].parts), 0), 0, 0
        if self.table(key).depths[0][self.devices] == NONE:
            return None
        return list(self._stages(key, self.devices))

    def table(self, key: Key) -> Table:
        """The least depth of parts of a node."""
        if key in self.tables:
            return self.tables[key]
        number, (whole, more), behind, _ = key
        work = self.work[number][:whole]
        if more:
            inner = self.inner[number][whole]
            assert inner is not None
            work = [*work, sum(self.work[inner][:more])]
        before = list(accumulate(work, initial=0))
        others = sum(self.work[0]) - before[-1]
        width = self.devices + 1
        needs = [self._needed(before[-1] - done) for done in before]
        mosts = [self.devices - self._needed(others + done) for done in before]
        ranges = [range(max(1, a), b + 1) for a, b in zip(needs, mosts, strict=True)]
        found = Table(
            [[NONE] * width for _ in before],
            [[None] * width for _ in before],
            [*ranges[:-1], range(1)],
        )
        found.depths[-1][0] = behind
        for first in reversed(range(len(work))):
            self._add_stages(key, found, first)
            self._add_parts(key, found, first)
        self.tables[key] = found
        return found

    def _add_stages(self, key: Key, found: Table, first: int) -> None:
        """Choices of a stage that begins with part `first`."""
        number, stop, behind, tail = key
        in_series = isinstance(self.nodes[number], Series)
        period, most_ps = self.period, self.within_ps
        depths, choices, wanted = found.depths[first], found.choices[first], found.ranges[first]
        for stage in self.fast[number][first]:
            block, size, too_deep, times, adds, _ = stage
            there = block.last <= stop[0] if block.cut is None else block.cut == stop
            if block.front is not None or not there:
                continue
            last = block.last
            row, later = found.depths[last], found.ranges[last]
            for left in range(
                max(later.start, wanted.start - size), min(later.stop, wanted.stop - size)
            ):
                rest, place = row[left], (tail + left) % period
                if times[place] > most_ps:
                    continue
                own = adds[place] + (rest if in_series else behind)
                depth = own if own > rest else rest
                if depth < depths[left + size] and own < too_deep:
                    depths[left + size] = depth
                    choices[left + size] = last, size, stage, None, own

    def _add_parts(self, key: Key, found: Table, first: int) -> None:
        """Choices in which part `first` is several stages, alone or with its end in one more."""
        number, stop, behind, tail = key
        inner = self.inner[number][first]
        if inner is None:
            return
        in_series = isinstance(self.nodes[number], Series)
        depths, choices, wanted = found.depths[first], found.choices[first], found.ranges[first]
        alone = (len(self.inner[inner]), 0) if first < stop[0] else (stop[1], 0)
        for stage in (None, *self.fast[number][first]):
            last, size, front = first + 1, 0, alone
            if stage is not None:
                if stage.block.front is None or stage.block.last > stop[0]:
                    continue
                last, size, front = stage.block.last, stage.size, stage.block.front
            row, later = found.depths[last], found.ranges[last]
            for left in range(later.start, min(later.stop, wanted.stop - size - 1)):
                rest = row[left]
                after, place = rest if in_series else behind, (tail + left) % self.period
                if rest == NONE or (stage and stage.times[place] > self.within_ps):
                    continue
                after += stage.adds[place] if stage else 0
                if stage and after >= stage.too_deep:
                    continue
                later_key, more = self._behind(inner, front, after, place + size)
                own = self.table(later_key).depths[0]
                for used in range(max(wanted.start, left + size + 1), wanted.stop):
                    depth = max(rest, own[used - left - size] + more)
                    if depth < depths[used]:
                        depths[used] = depth
                        choices[used] = last, used - left, stage, front, after

    def _behind(self, number: int, stop: Stop, behind: int, tail: int) -> tuple[Key, int]:
        """The table of parts that have so many stages behind them, and what its depths lack."""
        more = behind if self.roomy else behind % DEPTH
        return (number, stop, behind - more, tail % self.period), more

    def _needed(self, work: int) -> int:
        """Devices that so much work needs at least."""
        return ceil(work / self.within_ps * (1 - 1e-12))

    def _stages(self, key: Key, used: int) -> Iterator[tuple[Stage, float]]:
        """The stages that were chosen for parts of a node, and their times."""
        choices, first = self.table(key).choices, 0
        number, tail = key[0], key[-1]
        while (choice := choices[first][used]) is not None:
            inner = self.inner[number][first]
            first, count, stage, front, behind = choice
            used -= count
            size = 0 if stage is None else stage.size
            place = (tail + used) % self.period
            if front is not None:
                assert inner is not None
                later, _ = self._behind(inner, front, behind, place + size)
                yield from self._stages(later, count - size)
            if stage is not None:
                yield stage, stage.times[place]
