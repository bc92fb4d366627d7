"""Alpa's layers and stages: what its dynamic programs find against enumeration."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parloom.comparators import slices
from parloom.comparators.alpa_inter import StageSearch, model_layers
from parloom.comparators.alpa_stages import laid_out, submeshes
from parloom.comparators.layers import IMBALANCE, Chain, clustered
from parloom.comparators.pipelines import even
from parloom.comparators.slices import EPSILON_PS, Option, fits, sliced, total_ps
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.ir.plan import Decisions
from parloom.search.request import Request
from tests.examples import examples
from tests.property.searched import ADAM, random_graph
from tests.unit.graphs import stack


def drawn(seed: int) -> tuple[list[Option], int, int, int]:
    """Options of all ranges of a few layers, with devices and microbatches."""
    rng = Random(seed)
    layers, devices = rng.randint(1, 5), rng.choice((1, 2, 3, 4, 6))
    options = [
        Option(first, last, size, rng.randint(1, 60), rng.randint(0, 6), way)
        for first, last in combinations(range(layers + 1), 2)
        for size in (1, 2, 4)
        for way in range(rng.randint(0, 2))
    ]
    return options, layers, devices, rng.randint(1, 6)


def pipelines(
    options: Sequence[Option], layers: int, devices: int, first: int = 0
) -> Iterator[tuple[Option, ...]]:
    """All stages on all devices, whether they fit or not."""
    if first == layers:
        if devices == 0:
            yield ()
        return
    for option in options:
        if option.first == first and option.size <= devices:
            for rest in pipelines(options, layers, devices - option.size, option.last):
                yield (option, *rest)


def least_ps(seed: int) -> int | None:
    """The least of all pipelines that fit, by enumeration."""
    options, layers, devices, count = drawn(seed)
    found = (some for some in pipelines(options, layers, devices) if fits(some, count))
    return min((total_ps(some, count) for some in found), default=None)


def chosen(seed: int) -> tuple[tuple[Option, ...] | None, int]:
    """What the dynamic program finds, and the microbatches."""
    options, layers, devices, count = drawn(seed)
    return sliced(options, layers, devices, count, epsilon_ps=0), count


def found_ps(seed: int) -> int | None:
    (found, count), devices = chosen(seed), drawn(seed)[2]
    if found is None:
        return None
    assert fits(found, count)
    assert sum(option.size for option in found) == devices
    return total_ps(found, count)


@examples(150)
@given(st.integers(0, 10**6))
def test_the_stages_are_the_best_of_all(seed: int) -> None:
    assert found_ps(seed) == least_ps(seed)


def test_enumeration_sees_a_program_that_ignores_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that stops at the first slowest stage that has an answer."""
    monkeypatch.setattr(slices._Program, "rows", lambda self, option: self.num_stages)
    assert any(some is not None and not fits(some, count) for some, count in map(chosen, range(99)))
    monkeypatch.undo()
    monkeypatch.setattr(slices, "total_ps", lambda stages, count: 0)
    assert any(found_ps(seed) != least_ps(seed) for seed in range(1000))


def test_stages_that_are_tried_together_cost_no_more_than_epsilon_each() -> None:
    for seed in range(100):
        options, layers, devices, count = drawn(seed)
        found, best = sliced(options, layers, devices, count, epsilon_ps=5), least_ps(seed)
        if best is not None and found is not None:
            assert total_ps(found, count) <= best + count * 5


@examples(100)
@given(st.integers(0, 10**6))
def test_layers_are_the_best_of_all(seed: int) -> None:
    """The bytes that enter one, then all bytes, then how unequal they are."""
    rng = Random(seed)
    size = rng.randint(1, 7)
    flops = tuple(float(rng.choice((0, 1, 1, 2, 5))) for _ in range(size))
    values = tuple(
        (rng.randint(1, 4), at, tuple(sorted(rng.sample(range(at + 1, size), 1))))
        for at in range(size - 1)
    )
    chain = Chain(tuple(map(str, range(size))), flops, values)
    asked = rng.randint(1, size)
    ends = clustered(chain, asked)
    count = min(asked, max(1, sum(f > 0 for f in flops)))
    assert len(ends) == count
    most = max((1 + IMBALANCE) * sum(flops) / count, *flops, 0.0)

    def costs(cuts: Sequence[int], most: float) -> tuple[int, int, float] | None:
        each = [sum(flops[first:last]) for first, last in pairwise((0, *cuts))]
        if max(each) > most * 1.0001:
            return None
        enters = [
            sum(n for n, maker, (reader,) in values if maker < first <= reader < last)
            for first, last in pairwise((0, *cuts))
        ]
        return max(enters), sum(enters), sum(f * f for f in each)

    every = [(*cuts, size) for cuts in combinations(range(1, size), count - 1)]
    known: list[tuple[int, int, float]] = []
    while not known:
        known = [found for cuts in every if (found := costs(cuts, most)) is not None]
        most *= 1 + IMBALANCE
    assert costs(ends, most) == min(known)


def test_equal_shares_are_as_near_as_items_allow() -> None:
    assert even([1.0, 1.0, 1.0, 1.0], [1] * 2) == [0, 2, 4]
    assert even([6.0, 1.0, 1.0, 1.0], [1] * 3) == [0, 1, 2, 4]
    assert even([0.0, 0.0, 9.0], [1] * 3) == [0, 1, 2, 3]
    assert even([1.0, 1.0, 1.0, 1.0], [3, 1]) == [0, 3, 4]
    assert even([1.0, 1.0, 1.0, 1.0], [1, 3]) == [0, 1, 4]


@examples(4)
@given(st.integers(0, 10**6))
def test_playing_ranges_only_where_they_are_chosen_changes_nothing(seed: int) -> None:
    """Every range on every number of devices, played alone, has the same best stages, where the
    best ones take no less than ranges are taken to need.
    """
    graph, cluster = random_graph(Random(seed)), load_cluster("2x2xH100")
    asked = Request(graph, DataSheets(cluster), ADAM, 10**15)
    base = replace(Decisions(), num_microbatches=2)
    search = StageSearch(asked, base, model_layers(graph, 3), submeshes(cluster), laid_out(asked))
    least = {key: options[0].latency_ps for key, options in search.options.items()}
    found = search.best()
    every = [option for key in search.options for option in search.played(*key)]
    best = sliced(every, len(search.ranges.layers), 4, 2)
    assert found is not None
    assert best is not None
    assume(all(o.latency_ps >= least[o.first, o.last, o.size] for o in best))
    assert total_ps(found, 2) <= total_ps(best, 2) + 2 * EPSILON_PS


def test_equal_ranges_have_one_form() -> None:
    """Blocks in the middle, not the first or the last ones."""
    graph, cluster = stack(6), load_cluster("2x2xH100")
    asked = Request(graph, DataSheets(cluster), ADAM, 10**15)
    base = replace(Decisions(), num_microbatches=2)
    layers = model_layers(graph, 6)
    ranges = StageSearch(asked, base, layers, (1,), laid_out(asked)).ranges
    forms = [ranges.form(at, at + 1).form for at in range(len(layers))]
    assert len(set(forms)) < len(forms)
    assert forms[0] not in forms[1:]
    assert forms[-1] not in forms[:-1]
