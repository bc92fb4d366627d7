"""GraphPipe's stages: the dynamic program against all splits of small trees."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from random import Random

import numpy as np
import pytest

from parloom.comparators.pipelines import split
from parloom.comparators.tree_split import PRECISION, tree_split
from parloom.cost.clusters import load_cluster
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Decisions
from parloom.ir.regular_parts import aligned, crossed
from parloom.ir.series_parallel import Parallel, Series, Tree, decompose, items_in
from parloom.search.pipelines.costs import Ints, ItemCosts, Sent
from tests.property.test_series_parallel import closure, numbered, ordered

Split = list[tuple[tuple[int, ...], int]]
Costs = dict[int, ItemCosts]
Kind = type[Series] | type[Parallel]


def shape(leaves: int, kind: Kind, rng: Random) -> Tree:
    """A tree with so many items, whose parts are of both kinds in turns."""
    if leaves == 1:
        return 0
    ends = sorted(rng.sample(range(1, leaves), rng.randint(1, min(3, leaves - 1))))
    sizes = [b - a for a, b in pairwise([0, *ends, leaves])]
    if kind is Series:
        return Series(tuple(shape(size, Parallel, rng) for size in sizes))
    return Parallel(tuple(shape(size, Series, rng) for size in sizes))


def case(seed: int) -> tuple[Tree, Costs, Cluster, int]:
    """A tree of at most six items, what they cost, devices and a limit of memory."""
    rng = Random(seed)
    size = rng.randint(1, 6)
    cluster = load_cluster(rng.choice(["1xH100", "2xH100", "3xH100", "4xH100", "2x2xH100"]))
    devices, microbatches = cluster.num_devices, rng.randint(1, 3)
    kinds: list[Kind] = [Series, Series, Parallel]
    tree = numbered(shape(size, rng.choice(kinds), rng), count())

    def numbers(most: int) -> Ints:
        return np.array([rng.randint(1, most) for _ in range(size)])

    passes, once, stored, kept, passing, buffers = (numbers(n) for n in (50, 60, 9, 9, 9, 9))
    pairs = sorted(ordered(tree))
    ends = [rng.choice(pairs) for _ in range(rng.randint(0, 4)) if pairs]
    # The outer level is the slower one.
    times = [sorted(rng.randint(0, 40) for _ in cluster.levels) for _ in ends]
    costs = {
        each: ItemCosts(
            Decisions(num_microbatches=microbatches),
            tuple(map(str, range(size))),
            passes_ps=-(-passes // each),
            once_ps=once if each > 1 else 0 * once,
            kept_bytes=-(-kept // each),
            stored_bytes=stored,
            buffer_bytes=buffers,
            passing_bytes=passing,
            stage_ps=each,
            sent=tuple(
                Sent(a, (b,), tuple(ps), None) for (a, b), ps in zip(ends, times, strict=True)
            ),
            shared_ps=(),
            updating_bytes=0 * stored,
        )
        for each in (1, 2, 4)
        if each <= devices
    }
    limit = rng.choice([rng.randint(15, 90), 10_000])
    return tree, costs, cluster, limit


def splits(tree: Tree, devices: int, sizes: list[int]) -> Iterator[Split]:
    """All ways to put the parts of a tree into stages on so many devices."""
    if isinstance(tree, int):
        if devices in sizes:
            yield [((tree,), devices)]
        return
    yield from rows(tree, tree.parts, devices, sizes)


def joined(part: Parallel) -> Iterator[tuple[tuple[int, ...], Tree]]:
    """The ends of parallel parts that what is behind them can be in a stage with, and the rest: the
    last items, as they are listed, that are whole parts of a part.
    """
    items = items_in(part)
    for ends in range(1, len(items)):
        left, cut = items[:-ends], []
        for own in part.parts:
            pieces = own.parts if isinstance(own, Series) else (own,)
            kept = tuple(p for p in pieces if set(items_in(p)) <= set(left))
            if kept:
                cut.append(Series(kept) if len(kept) > 1 else kept[0])
        if sum(len(items_in(own)) for own in cut) == len(left):
            yield items[-ends:], Parallel(tuple(cut))


def rows(
    node: Series | Parallel, parts: tuple[Tree, ...], devices: int, sizes: list[int]
) -> Iterator[Split]:
    """All ways for parts of a node, from one of them on."""
    if not parts:
        if not devices:
            yield []
        return
    for used in range(1, devices + 1):
        rests = [
            list(rows(node, parts[n:], devices - used, sizes)) for n in range(1, len(parts) + 1)
        ]
        for last, later in enumerate(rests, 1):
            items = tuple(i for part in parts[:last] for i in items_in(part))
            if used in sizes:
                yield from ([(items, used), *rest] for rest in later)
        if not isinstance(parts[0], int):
            for own in splits(parts[0], used, sizes):
                yield from ([*own, *rest] for rest in rests[0])
        if isinstance(node, Series) and isinstance(parts[0], Parallel):
            yield from rows_of_ends(parts[0], parts[1:], used, sizes, rests[1:])


def rows_of_ends(
    part: Parallel, later: tuple[Tree, ...], used: int, sizes: list[int], rests: list[list[Split]]
) -> Iterator[Split]:
    for size in (size for size in sizes if size < used):
        for ends, front in joined(part):
            for last, behind in enumerate(rests, 1):
                items = (*ends, *(i for part in later[:last] for i in items_in(part)))
                for own in splits(front, used - size, sizes):
                    yield from ([*own, (items, size), *rest] for rest in behind)


def in_row(tree: Tree, own: range) -> tuple[bool, bool]:
    """Whether what a stage reads comes from the item before it, and whether what reads it is behind
    it; `own` are places in the order of the tree.
    """
    order = items_in(tree)
    found = [False, False]

    def visit(node: Tree, begin: int) -> None:
        if isinstance(node, int):
            return
        places = [begin]
        for part in node.parts:
            visit(part, places[-1])
            places.append(places[-1] + len(items_in(part)))
        if isinstance(node, Series) and begin <= own.start and own.stop <= places[-1]:
            at, until = places.index, set(places)
            if own.start in until and own.start > begin:
                found[0] |= isinstance(node.parts[at(own.start) - 1], int)
            if own.stop in until and own.stop < places[-1]:
                found[1] |= isinstance(node.parts[at(own.stop)], int)

    visit(tree, 0)
    assert own.stop <= len(order)
    return found[0], found[1]


def value(tree: Tree, costs: Costs, split: Split, cluster: Cluster, limit: int) -> float | None:
    """The slowest stage; None where one does not fit, or lies over too many nodes."""
    pairs, order = ordered(tree), items_in(tree)
    depths = [1] * len(split)
    for index in reversed(range(len(split))):
        for later in range(index + 1, len(split)):
            if any((a, b) in pairs for a in split[index][0] for b in split[later][0]):
                depths[index] = max(depths[index], 1 + depths[later])
    worst, device = 0.0, 0
    for (items, size), depth in zip(split, depths, strict=True):
        own, inside, devices = costs[size], set(items), range(device, device + size)
        device += size
        steps, at = own.num_microbatches, list(items)
        held = own.stored_bytes[at].sum() + min(depth, steps) * own.kept_bytes[at].sum()
        held += own.buffer_bytes[at].max()
        if held + own.passing_bytes[at].max() > limit or not aligned(devices, cluster):
            return None
        begin = min(order.index(i) for i in items)
        after, before = in_row(tree, range(begin, begin + len(items)))
        near = [crossed((devices, [other]), cluster) for other in (devices.start - 1, device)]
        levels = near[0] if after else -1, near[1] if before else -1
        entering = sum(
            v.ps[levels[0]] for v in own.sent if v.source not in inside and inside & {*v.targets}
        )
        leaving = sum(
            v.ps[levels[1]] for v in own.sent if v.source in inside and {*v.targets} - inside
        )
        worst = max(worst, own.adds_ps[at].sum() + own.stage_ps, steps * max(entering, leaving))
    return float(worst)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 1000, 100)])
def test_the_split_is_the_best_of_all(seeds: range) -> None:
    found = [compared(*case(seed)) for seed in seeds]
    assert 10 < sum(found) < len(found)


def compared(tree: Tree, costs: Costs, cluster: Cluster, limit: int) -> bool:
    """Whether there is a split; it is compared with all."""
    devices = cluster.num_devices
    values = (
        value(tree, costs, split, cluster, limit) for split in splits(tree, devices, list(costs))
    )
    best = min((v for v in values if v is not None), default=None)
    found = tree_split(tree, costs, cluster, limit)
    if best is None:
        assert found is None
        return False
    assert found is not None
    assert sum(size for _, size in found) == devices
    assert sorted(i for items, _ in found for i in items) == sorted(items_in(tree))
    place = {item: stage for stage, (items, _) in enumerate(found) for item in items}
    assert all(place[a] <= place[b] for a, b in ordered(tree))
    reached = value(tree, costs, found, cluster, limit)
    assert reached is not None
    assert best <= reached <= best * (1 + 2 * PRECISION)
    return True


def even(size: int, microbatches: int = 8) -> Costs:
    """Items that are all alike."""
    ten, nothing = np.full(size, 10), np.zeros(size, dtype=np.int64)
    whole = Decisions(num_microbatches=microbatches)
    names = tuple(map(str, range(size)))
    none = nothing
    return {1: ItemCosts(whole, names, ten, none, ten, none, none, none, 0, (), (), none)}


def test_branches_lie_beside_each_other() -> None:
    """Two branches and an end on five devices: three stages in a row at most. What does not fit
    with the microbatches that a row holds fits so.
    """
    edges = {(0, 1), (2, 3), (1, 4), (3, 4)}
    branches, row = decompose(5, edges), Series(tuple(range(5)))
    assert len(closure(5, edges)) < 10
    costs, five = even(5), load_cluster("5xH100")
    assert tree_split(branches, costs, five, 30) == [((i,), 1) for i in range(5)]
    assert tree_split(row, costs, five, 30) is None
    assert tree_split(row, costs, five, 50) == [((i,), 1) for i in range(5)]
    # Fewer microbatches than stages hold no more.
    assert tree_split(row, even(5, 3), five, 30) is not None


def test_stages_are_cut_where_links_are_fast() -> None:
    """Four items on two nodes: the cheap boundaries lie between devices of a node."""
    items, nothing = np.array([10, 10, 10, 10]), np.zeros(4, dtype=np.int64)
    sent = tuple(Sent(i, (i + 1,), (1, 100 if i != 1 else 5), None) for i in range(3))
    costs = {
        1: replace(even(4)[1], whole=Decisions(), passes_ps=items, kept_bytes=nothing, sent=sent)
    }
    each = [((i,), 1) for i in range(4)]
    assert tree_split(Series((0, 1, 2, 3)), costs, load_cluster("2x2xH100"), 10) == each
    assert split(costs, load_cluster("2x2xH100")) == [(i, i + 1, 1) for i in range(4)]
