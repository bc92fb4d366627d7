"""Splits over several parts of a mixed cluster against all of them, and the bound of all plans."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from parloom.ir.mesh import Cluster, Device, Level, Link, grid
from parloom.ir.plan import Decisions, one_stage
from parloom.ir.regular_parts import RegularPart
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.mixed import shared_bound_ps
from parloom.search.pipelines.parts import (
    LIMITS,
    Group,
    PartCosts,
    few_sizes,
    in_turns,
    splits_over_parts,
)
from parloom.search.pipelines.split import Split

Placed = tuple[Group, ...]


def _costs(rng: random.Random, count: int, size: int, scale: float) -> ItemCosts:
    whole = Decisions(stages=one_stage(grid({"x": size})), num_microbatches=4)
    passes = np.array([max(1, int(scale * rng.randint(1, 100) / size)) for _ in range(count)])
    stored = np.array([rng.randint(1, 10) for _ in range(count)])
    buffers = np.array([rng.choice([0, rng.randint(1, 15)]) for _ in range(count)])
    none = np.zeros(count, dtype=np.int64)
    items = tuple(map(str, range(count)))
    return ItemCosts(
        whole, items, passes, none, none, stored, buffers, none, rng.randint(0, 5), (), (), none
    )


def _part(first: int, devices: int) -> RegularPart:
    device = Device("d", (("float32", 1.0),), 1, 1.0)
    levels = (Level("l", devices, Link(1.0, 0.0)),)
    return RegularPart(first, Cluster("c", device, levels), (first,))


def _parts(rng: random.Random, count: int) -> list[PartCosts]:
    """A fast and a slow part of some devices, whose memory may be short."""
    found, first = [], 0
    for scale in (1.0, rng.uniform(1.2, 3)):
        devices = rng.choice([2, 4])
        sizes = rng.sample([1, 2, 4][: devices // 2 + 1], rng.randint(1, 2))
        costs = {size: _costs(rng, count, size, scale) for size in sizes}
        found.append(PartCosts(_part(first, devices), rng.choice([25, 1000]), costs))
        first += devices
    return found


def _placements(parts: list[PartCosts], most: int) -> Iterator[Placed]:
    """All groups in all orders, each part's beginning at multiples of their sizes."""

    def visit(used: tuple[int, ...], chosen: Placed) -> Iterator[Placed]:
        if chosen:
            yield chosen
        for place, part in enumerate(parts) if len(chosen) < most else ():
            for size in part.costs:
                after = used[place] + size
                if used[place] % size == 0 and after <= part.part.cluster.num_devices:
                    yield from visit(
                        (*used[:place], after, *used[place + 1 :]), (*chosen, (place, size))
                    )

    yield from visit((0,) * len(parts), ())


def _stages(parts: list[PartCosts], placed: Placed, ends: tuple[int, ...]) -> list[float]:
    found: list[float] = []
    for (first, last), (place, size) in zip(pairwise((0, *ends)), placed, strict=True):
        costs = parts[place].costs[size]
        held = costs.stored_bytes[first:last].sum() + costs.buffer_bytes[first:last].max()
        fits = held <= parts[place].limit_bytes
        load = int(costs.loads_ps[first:last].sum()) + costs.stage_ps
        found.append(load if fits else inf)
    return found


def _all(parts: list[PartCosts], count: int) -> Iterator[tuple[Placed, list[float]]]:
    for placed in _placements(parts, count):
        for inner in combinations(range(1, count), len(placed) - 1):
            yield placed, _stages(parts, placed, (*inner, count))


def _used(placed: Placed) -> tuple[int, int]:
    first = sum(size for place, size in placed if place == 0)
    return first, sum(size for _, size in placed) - first


def _of(parts: list[PartCosts], split: Split) -> Placed:
    second = parts[1].part.first
    return tuple(
        (int(begin >= second), costs.num_devices)
        for begin, costs in zip(split.begins, split.costs, strict=True)
    )


def _least_sums(
    every: list[tuple[Placed, list[float]]], limit: float
) -> Mapping[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for placed, stages in every:
        if max(stages) <= limit:
            used = _used(placed)
            found[used] = min(found.get(used, inf), sum(stages))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_splits_over_parts_are_the_best_of_all(seed: int) -> None:
    """Of every number of devices used, the least sum of stages under every limit."""
    rng = random.Random(seed)
    count = rng.randint(3, 5)
    parts = _parts(rng, count)
    every = list(_all(parts, count))
    found = [(_of(parts, split), split) for split in splits_over_parts(parts)]
    sums = {(placed, split.ends): _stages(parts, placed, split.ends) for placed, split in found}
    assert [sum(split.loads_ps()) for _, split in found] == [
        sum(stages) for stages in sums.values()
    ]
    mine = [(placed, stages) for (placed, _), stages in sums.items()]
    share = 1 / sum(part.rate for part in parts)
    for limit in (share * LIMITS).tolist():
        assert _least_sums(mine, limit) == _least_sums(every, limit)


def test_both_orders_of_parts_are_found() -> None:
    """And an enumeration that knows one order only finds less."""
    orders = set()
    for seed in range(20):
        rng = random.Random(seed)
        parts = _parts(rng, 4)
        splits = [s for s in splits_over_parts(parts) if len(s.ends) > 1]
        best = min(splits, key=lambda s: max(s.loads_ps()), default=None)
        orders.add(best and tuple(place for place, _ in _of(parts, best)))
    assert {(0, 1), (1, 0)} <= orders
    parts = _parts(random.Random(1), 4)
    every = list(_all(parts, 4))
    in_order = [(p, s) for p, s in every if [g for g, _ in p] == sorted(g for g, _ in p)]
    assert any(
        _least_sums(in_order, limit) != _least_sums(every, limit)
        for limit in {max(stages) for _, stages in every}
    )


def test_devices_of_a_part_are_taken_in_turns() -> None:
    """No device is in two groups, and none outside of its part."""
    parts = _parts(random.Random(3), 5)
    for split in splits_over_parts(parts):
        taken: list[int] = []
        for begin, costs in zip(split.begins, split.costs, strict=True):
            taken += range(begin, begin + costs.num_devices)
            assert begin % costs.num_devices == 0
        assert len(set(taken)) == len(taken)
        assert max(taken) < sum(part.part.cluster.num_devices for part in parts)


def test_small_groups_are_left_out_of_large_parts() -> None:
    assert few_sizes([[1, 2, 4], [1, 2]], [4, 2]) == [[1, 2, 4], [1, 2]]
    ((*large,), (*small,)) = few_sizes([[1, 2, 4, 8, 64], [2, 4]], [64, 64])
    assert (large[0], small[0]) == (2, 2)


@pytest.mark.parametrize("seed", range(30))
def test_no_sharing_of_operators_is_below_the_bound(seed: int) -> None:
    """Even where one part is better at some operators; and the bound is near the best sharing."""
    rng = np.random.default_rng(seed)
    times = rng.uniform(1, 10, size=(2, 8))
    bound = shared_bound_ps(times)
    least = inf
    for choice in range(2**8):  # whole operators
        mask = np.array([choice >> i & 1 for i in range(8)], dtype=bool)
        least = min(least, max(times[0][mask].sum(), times[1][~mask].sum()))
    assert bound <= least * (1 + 1e-9)
    ratios = np.argsort(times[0] / times[1])  # the best sharing: all but one are on one part
    best = inf
    for cut in range(8):
        first, between, rest = ratios[:cut], ratios[cut], ratios[cut + 1 :]
        for share in np.linspace(0, 1, 201):
            mine = times[0][first].sum() + share * times[0][between]
            its = times[1][rest].sum() + (1 - share) * times[1][between]
            best = min(best, max(mine, its))
    assert bound <= best * (1 + 1e-9)
    assert bound >= 0.98 * best


def test_rates_added_up_are_no_bound() -> None:
    """Where each part has what it is better at, a step is shorter than 1 / (1 / a + 1 / b)."""
    times = np.array([[1.0, 1.0], [2.0, 1.0]])
    together = 1 / (1 / times[0].sum() + 1 / times[1].sum())
    assert together > 1.0  # the first operator on the first part, the second on the second one
    assert shared_bound_ps(times) <= 1.0


@pytest.mark.parametrize("seed", range(20))
def test_groups_take_stages_in_turns(seed: int) -> None:
    """Every stage has items; groups are as busy as their speed, as near as items allow."""
    rng = random.Random(seed)
    costs = tuple(replace(_costs(rng, 40, 1, scale), stage_ps=0) for scale in (1.0, 2.0))
    base = Split((20, 40), (0, 1), costs, (0, 4))
    found = list(in_turns(base))
    assert {len(split.ends) for split in found} >= {3, 4, 5, 6, 8}
    share = 1 / sum(1 / float(own.loads_ps.sum()) for own in costs)
    for split in found:
        assert split.begins == base.begins
        assert all(first < last for first, last in split.ranges)
        assert split.ends[-1] == 40
    loads = [max(split.loads_ps()) for split in found]
    assert min(loads) <= 1.15 * share
    assert min(loads) >= share * 0.5
