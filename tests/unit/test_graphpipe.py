"""GraphPipe's stages: the dynamic program against all splits of small trees, and placement."""

from collections.abc import Iterator
from itertools import count, pairwise
from random import Random

import pytest

from parloom.comparators.graphpipe import placed
from parloom.comparators.pipelines import Items, Sent
from parloom.comparators.tree_split import PRECISION, tree_split
from parloom.cost.clusters import load_cluster
from parloom.ir.plan import Decisions
from parloom.ir.series_parallel import Parallel, Series, Tree, decompose, items_in
from tests.property.test_series_parallel import closure, numbered, ordered

Split = list[tuple[tuple[int, ...], int]]
Costs = dict[int, Items]
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


def case(seed: int) -> tuple[Tree, Costs, int, int, int]:
    """A tree of at most six items, what they cost, devices, microbatches and a limit of memory."""
    rng = Random(seed)
    size, devices = rng.randint(1, 6), rng.randint(1, 4)
    kinds: list[Kind] = [Series, Series, Parallel]
    tree = numbered(shape(size, rng.choice(kinds), rng), count())

    def numbers(most: int) -> list[int]:
        return [rng.randint(1, most) for _ in range(size)]

    passes, reduced, held, kept, passing = (numbers(most) for most in (50, 20, 9, 9, 9))
    pairs = sorted(ordered(tree))
    ends = [rng.choice(pairs) for _ in range(rng.randint(0, 4)) if pairs]
    times = [rng.randint(0, 40) for _ in ends]
    costs = {
        each: Items(
            Decisions(),
            tuple(-(-v // each) for v in passes),
            tuple(0 if each == 1 else v for v in reduced),
            tuple(held),
            tuple(-(-v // each) for v in kept),
            tuple(passing),
            tuple(Sent(a, (b,), ps) for (a, b), ps in zip(ends, times, strict=True)),
        )
        for each in (1, 2, 4)
        if each <= devices
    }
    limit = rng.choice([rng.randint(15, 90), 10_000])
    return tree, costs, devices, rng.randint(1, 3), limit


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


def value(tree: Tree, costs: Costs, split: Split, microbatches: int, limit: int) -> float | None:
    """The slowest stage; None where one does not fit."""
    pairs = ordered(tree)
    depths = [1] * len(split)
    for index in reversed(range(len(split))):
        for later in range(index + 1, len(split)):
            if any((a, b) in pairs for a in split[index][0] for b in split[later][0]):
                depths[index] = max(depths[index], 1 + depths[later])
    worst = 0.0
    for (items, size), depth in zip(split, depths, strict=True):
        own, inside = costs[size], set(items)
        kept = min(depth, microbatches) * sum(own.kept_bytes[i] for i in items)
        held = sum(own.held_bytes[i] for i in items)
        if held + kept + max(own.passing_bytes[i] for i in items) > limit:
            return None
        entering = sum(v.ps for v in own.sent if v.source not in inside and inside & {*v.targets})
        leaving = sum(v.ps for v in own.sent if v.source in inside and {*v.targets} - inside)
        reduced = sum(own.reduced_ps[i] for i in items) / microbatches
        worst = max(worst, sum(own.passes_ps[i] for i in items) + reduced, entering, leaving)
    return worst


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 1000, 100)])
def test_the_split_is_the_best_of_all(seeds: range) -> None:
    found = [compared(*case(seed)) for seed in seeds]
    assert 10 < sum(found) < len(found)


def compared(tree: Tree, costs: Costs, devices: int, microbatches: int, limit: int) -> bool:
    """Whether there is a split; it is compared with all."""
    values = (
        value(tree, costs, split, microbatches, limit)
        for split in splits(tree, devices, list(costs))
    )
    best = min((v for v in values if v is not None), default=None)
    found = tree_split(tree, costs, devices, microbatches, limit)
    if best is None:
        assert found is None
        return False
    assert found is not None
    assert sum(size for _, size in found) == devices
    assert sorted(i for items, _ in found for i in items) == sorted(items_in(tree))
    place = {item: stage for stage, (items, _) in enumerate(found) for item in items}
    assert all(place[a] <= place[b] for a, b in ordered(tree))
    reached = value(tree, costs, found, microbatches, limit)
    assert reached is not None
    assert best <= reached <= best * (1 + 2 * PRECISION)
    return True


def even(size: int, passes_ps: int = 10, kept_bytes: int = 0) -> Costs:
    """Items that are all alike."""
    nothing = (0,) * size
    alike = Items(
        Decisions(), (passes_ps,) * size, nothing, nothing, (kept_bytes,) * size, nothing, ()
    )
    return {1: alike}


def test_branches_lie_beside_each_other() -> None:
    """Two branches and an end on five devices: three stages in a row at most. What does not fit
    with the microbatches that a row holds fits so.
    """
    edges = {(0, 1), (2, 3), (1, 4), (3, 4)}
    branches, row = decompose(5, edges), Series(tuple(range(5)))
    assert len(closure(5, edges)) < 10
    costs = even(5, kept_bytes=10)
    assert tree_split(branches, costs, 5, 8, 30) == [((i,), 1) for i in range(5)]
    assert tree_split(row, costs, 5, 8, 30) is None
    assert tree_split(row, costs, 5, 8, 50) == [((i,), 1) for i in range(5)]
    # Fewer microbatches than stages hold no more.
    assert tree_split(row, costs, 5, 3, 30) is not None


@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [("2x4xH100", [1, 2, 4, 1]), ("2x3xH100", [1, 2, 1, 2]), ("2x4xH100", [8]), ("6xH100", [2, 3])],
)
def test_stages_lie_on_few_nodes(cluster: str, sizes: list[int]) -> None:
    there = load_cluster(cluster)
    found = placed(sizes, there)
    assert found is not None
    assert list(map(len, found)) == sizes
    devices = sorted(d for own in found for d in own)
    assert devices == list(range(sum(sizes)))
    per_node = there.levels[0].size
    for own in found:
        nodes = {device // per_node for device in own}
        assert len(nodes) == max(1, len(own) // per_node)
        assert all(b - a == 1 for a, b in pairwise(own))


def test_stages_that_lie_on_too_many_nodes() -> None:
    assert placed([2, 2, 2], load_cluster("2x3xH100")) is None
