"""Splits into stages against all of them, on small models with any costs."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from parloom.cost.clusters import load_cluster
from parloom.ir.mesh import grid
from parloom.ir.plan import Decisions, one_stage
from parloom.ir.regular_parts import RegularPart
from parloom.search.pipelines import split as split_module
from parloom.search.pipelines.costs import ItemCosts, Sent
from parloom.search.pipelines.parts import PartCosts, uneven_splits
from parloom.search.pipelines.split import Split, even_splits, merges

# Where there are too many cuts, boundaries come from targets: the busiest group is at most so much
# above the least.
ABOVE = 1.35


def _costs(rng: random.Random, count: int, size: int = 1, scale: float = 1.0) -> ItemCosts:
    mesh = grid({"x": size})
    whole = Decisions(stages=one_stage(mesh), num_microbatches=4)
    passes = np.array([max(1, int(scale * rng.randint(1, 100))) for _ in range(count)])
    none = np.zeros(count, dtype=np.int64)
    items = tuple(f"item {index}" for index in range(count))
    return ItemCosts(whole, items, passes, none, none, none, none, none, 0, (), (), none)


def _cuts(items: int, stages: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, items), stages - 1):
        yield (*ends, items)


def _slowest(costs: ItemCosts, groups: tuple[int, ...], ends: tuple[int, ...]) -> int:
    loads: dict[int, int] = {}
    for (first, last), group in zip(pairwise((0, *ends)), groups, strict=True):
        loads[group] = loads.get(group, 0) + int(costs.loads_ps[first:last].sum())
    return max(loads.values())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("enumerated", [split_module.ENUMERATED, 0])
def test_even_splits_are_the_best_of_all(
    seed: int, enumerated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every placement that they propose; near it where cuts are not enumerated."""
    monkeypatch.setattr(split_module, "ENUMERATED", enumerated)
    rng = random.Random(seed)
    costs, groups = _costs(rng, rng.randint(6, 11)), rng.randint(2, 4)
    found = list(even_splits(costs, groups))
    items, above = len(costs.passes_ps), dict[tuple[int, ...], float]()
    for split in found:
        assert split.ends[-1] == items
        assert all(first < last for first, last in split.ranges)
        own = max(split.loads_ps())
        assert own == _slowest(costs, split.groups, split.ends)
        least = min(_slowest(costs, split.groups, e) for e in _cuts(items, len(split.ends)))
        above[split.groups] = min(own / least, above.get(split.groups, ABOVE))
    assert min(above.values()) >= 1
    assert max(above.values()) <= (1 if enumerated else ABOVE)
    assert {len(split.ends) for split in found} >= {groups, groups + 1}


def _alpa(costs: dict[int, ItemCosts], ends: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The sum of all stages."""
    return sum(
        int(costs[size].loads_ps[first:last].sum())
        for (first, last), size in zip(pairwise((0, *ends)), sizes, strict=True)
    )


def _uneven(costs: dict[int, ItemCosts], devices: int) -> Iterator[Split]:
    return uneven_splits(PartCosts(RegularPart(0, load_cluster(f"{devices}xcpu")), 2**50, costs))


def _all_sizes(devices: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    def visit(used: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if used == devices:
            yield chosen
        for size in sizes:
            if used + size <= devices and used % size == 0:
                yield from visit(used + size, (*chosen, size))

    yield from visit(0, ())


@pytest.mark.parametrize("seed", range(25))
def test_uneven_splits_have_the_least_sum_of_their_slowest(seed: int) -> None:
    """No split whose slowest stage takes no longer has a smaller sum."""
    rng = random.Random(seed)
    items, devices = rng.randint(3, 6), rng.choice([4, 8])
    first = _costs(rng, items)
    costs = {1: first, 2: _scaled(first, 2, 0.6), 4: _scaled(first, 4, 0.35)}
    every = [
        (ends, sizes)
        for sizes in _all_sizes(devices, [1, 2, 4])
        if len(sizes) <= items
        for ends in _cuts(items, len(sizes))
    ]
    for split in _uneven(costs, devices):
        sizes = tuple(c.num_devices for c in split.costs)
        assert sum(sizes) == devices
        assert len(set(sizes)) > 1
        slowest, own = max(split.loads_ps()), _alpa(costs, split.ends, sizes)
        least = min(
            _alpa(costs, ends, other)
            for ends, other in every
            if _slowest_of(costs, ends, other) <= slowest
        )
        assert own == least


def _scaled(costs: ItemCosts, size: int, share: float) -> ItemCosts:
    passes = np.maximum(1, (costs.passes_ps * share).astype(np.int64))
    return replace(costs, whole=_costs(random.Random(0), 1, size).whole, passes_ps=passes)


def _slowest_of(costs: dict[int, ItemCosts], ends: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    return max(
        int(costs[size].loads_ps[first:last].sum())
        for (first, last), size in zip(pairwise((0, *ends)), sizes, strict=True)
    )


@pytest.mark.parametrize("sizes", [(2, 3), (3, 5), (4, 6), (1, 3), (2, 6, 4)])
@pytest.mark.parametrize("devices", [6, 12, 15])
def test_uneven_groups_have_the_devices_that_there_are(
    sizes: tuple[int, ...], devices: int
) -> None:
    """Whatever their sizes, each begins at a multiple of its own."""
    first = _costs(random.Random(devices), 7)
    costs = {size: _scaled(first, size, 1 / size) for size in sizes}
    for split in _uneven(costs, devices):
        at = 0
        for own in split.costs:
            assert at % own.num_devices == 0
            at += own.num_devices
        assert at == devices


def test_larger_microbatches_divide_each_other() -> None:
    """Of the busiest group, in all sizes that divide those of others or that they divide."""
    costs = replace(_costs(random.Random(3), 4), whole=Decisions(num_microbatches=12))
    split = Split((3, 4), (0, 1), (costs, costs), at_once=(2, 1))
    counts = (1, 2, 3, 4, 6, 12, 24)
    found = {one.at_once for one in merges(split, counts)}
    assert found == {(3, 1), (4, 1), (6, 1), (12, 1)}
    other = replace(split, at_once=(1, 2))
    assert {one.at_once for one in merges(other, counts)} == {(2, 2), (4, 2), (6, 2), (12, 2)}
    assert next(merges(other, counts)).at_once == (2, 2)


def test_the_last_items_may_take_no_time() -> None:
    """Of more items than places, all are in some stage."""
    costs = _costs(random.Random(1), 300)
    passes = np.concatenate([costs.passes_ps[:-3], np.zeros(3, dtype=np.int64)])
    sent = tuple(Sent(a, (b,), (0,), (0,)) for a, b in pairwise(range(300)))
    costs = replace(costs, passes_ps=passes, sent=sent)
    for split in even_splits(costs, 2):
        assert split.ends[-1] == 300
        assert split.step_ps >= max(split.loads_ps())
        if len(split.ends) == 2:
            break


def test_a_worse_cut_is_seen() -> None:
    """The oracle of the tests above can fail."""
    costs = _costs(random.Random(1), 8)
    split = next(iter(even_splits(costs, 2)))
    worse = replace(split, ends=(1, 8))
    assert isinstance(worse, Split)
    least = min(_slowest(costs, split.groups, e) for e in _cuts(8, 2))
    assert max(worse.loads_ps()) > ABOVE * least


@pytest.mark.parametrize("seed", range(20))
def test_splits_that_store_little_are_found(seed: int) -> None:
    """Buffers count once in each stage, updates once in each group: as a sum over stages says it;
    of all splits some are small enough, and then those that are found are.
    """
    rng = random.Random(seed)
    stored, buffers, updating = (
        np.array([rng.choice([0, rng.randint(1, most)]) for _ in range(9)]) for most in (20, 40, 30)
    )
    costs = replace(
        _costs(rng, 9), stored_bytes=stored, buffer_bytes=buffers, updating_bytes=updating
    )
    for groups in ((0, 1), (0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0)):
        every = [Split(ends, groups, (costs, costs)) for ends in _cuts(9, len(groups))]
        for split in every:
            held, more = [0, 0], [0, 0]
            for (first, last), group in zip(split.ranges, groups, strict=True):
                own = range(first, last)
                held[group] += sum(stored[own]) + max(buffers[own])
                more[group] = max(more[group], sum(updating[own]))
            assert split.stored_bytes() == max(map(sum, zip(held, more, strict=True)))
        sizes = sorted(split.stored_bytes() for split in every)
        limit_bytes = sizes[len(sizes) // 3]
        found = [s for s in even_splits(costs, 2, limit_bytes) if s.groups == groups]
        assert found
        assert any(split.stored_bytes() <= limit_bytes for split in found)
