"""What is left of every variable against enumeration."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parloom.search.domains import _Passing, cost_of, narrow_minimum, narrowed
from parloom.search.eliminate import Factor, minimum, reduced

Case = tuple[list[int], list[Factor]]


@st.composite
def sums(draw: st.DrawFn) -> Case:
    """Tables over one and two of a few variables, some of them forbidding what they can."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    variables = range(len(sizes))
    pairs = draw(st.sets(st.tuples(st.sampled_from(variables), st.sampled_from(variables))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scopes = [*((v,) for v in variables), *(p for p in sorted(pairs) if p[0] != p[1]), ()]
    factors = []
    for scope in scopes:
        costs = rng.integers(-3, 10, [sizes[v] for v in scope]).astype(float)
        if len(scope) == 2:
            costs[rng.random(costs.shape) < 0.2] = np.inf
        factors.append(Factor(scope, np.asarray(costs)))
    return sizes, factors


def priced(case: Case) -> dict[tuple[int, ...], float]:
    sizes, factors = case
    return {
        values: sum(float(f.costs[tuple(values[v] for v in f.scope)]) for f in factors)
        for values in product(*map(range, sizes))
    }


@settings(max_examples=300)
@given(sums(), st.booleans())
def test_the_minimum_is_that_of_all_solutions(case: Case, first: bool) -> None:
    sizes, factors = case
    costs = priced(case)
    found = narrow_minimum(sizes, factors, [0] * len(sizes) if first else None, many=0)
    assert found.cost == min(costs.values())
    assert bool(found.values) == np.isfinite(found.cost)
    assert not found.values or costs[found.values] == found.cost


@settings(max_examples=300)
@given(sums(), st.sampled_from([1, 2]), st.sampled_from([4, 10**6]))
def test_what_is_left_of_few_variables_has_the_same_minimum(
    case: Case, touched: int, most: int
) -> None:
    sizes, factors = case
    costs = priced(case)
    left = reduced(sizes, factors, touched, most)
    assert len(left.variables) + len(left.best) == len(sizes)
    for values, cost in priced(([*left.sizes], [*left.factors])).items():
        whole = left.whole(values)
        assert [whole[v] for v in left.variables] == [*values]
        beside = [c for v, c in costs.items() if all(v[u] == whole[u] for u in left.variables)]
        assert cost == min(beside) == costs[whole]


def test_a_cycle_is_reduced_to_nothing_and_a_clique_of_four_is_not() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    cycle = [Factor(pair, np.ones((2, 2))) for pair in pairs]
    assert reduced([2] * 4, cycle, 2, 100).variables == ()
    clique = [*cycle, Factor((0, 2), np.ones((2, 2))), Factor((1, 3), np.ones((2, 2)))]
    assert reduced([2] * 4, clique, 2, 100).variables == (0, 1, 2, 3)


@settings(max_examples=300)
@given(sums(), st.floats(0.0, 1.0), st.sampled_from([0, 10**6]))
def test_near_enough_is_what_it_says(case: Case, share: float, too_many: int) -> None:
    sizes, factors = case
    costs = priced(case)
    least = min(costs.values())
    found = narrow_minimum(sizes, factors, many=0, too_many=too_many, share=share)
    assert found.cost <= least
    if too_many and np.isfinite(least):
        assert costs[found.values] <= found.cost + share * abs(found.cost) + 1e-6
    if np.isfinite(least):
        enough = narrow_minimum(sizes, factors, many=0, enough=least - 1)
        assert least - 1 <= enough.cost <= least


@settings(max_examples=300)
@given(sums())
def test_where_tables_stay_too_large_the_minimum_is_between_bound_and_answer(case: Case) -> None:
    sizes, factors = case
    costs = priced(case)
    found = narrow_minimum(sizes, factors, many=0, too_many=0)
    assert found.cost <= min(costs.values())
    assert not found.values or min(costs.values()) <= costs[found.values] < np.inf


def test_where_the_cheapest_values_are_not_possible_others_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And negative control: without that, nothing is found."""
    rng, sizes = np.random.default_rng(13), [3] * 8
    factors = [Factor((v,), rng.integers(0, 10, 3).astype(float)) for v in range(8)]
    for pair in combinations(range(8), 2):
        if rng.random() < 0.6:
            forbidden = rng.random((3, 3)) < 0.35
            factors.append(Factor(pair, np.where(forbidden, np.inf, 0.0)))
    found = narrow_minimum(sizes, factors, many=0, too_many=1)
    assert found.cost <= minimum(sizes, factors).cost <= cost_of(factors, found.values) < np.inf
    monkeypatch.setattr(_Passing, "_dive", lambda _: None)
    assert not narrow_minimum(sizes, factors, many=0, too_many=1).values


@settings(max_examples=300)
@given(sums(), st.integers(0, 5))
def test_every_solution_up_to_the_limit_is_kept(case: Case, above: int) -> None:
    sizes, factors = case
    costs = priced(case)
    limit = min(costs.values()) + above
    assume(bool(limit < np.inf))
    left = [set(map(int, k)) for k in narrowed(sizes, factors, limit, many=0)]
    for values, cost in costs.items():
        if cost <= limit:
            assert all(x in k for x, k in zip(values, left, strict=True))


def test_a_chain_keeps_nothing_but_its_best_values() -> None:
    rng = np.random.default_rng(0)
    sizes = [5] * 6
    factors = [Factor((v, v + 1), rng.random((5, 5))) for v in range(5)]
    best = minimum(sizes, factors)
    assert tuple(map(tuple, narrowed(sizes, factors, best.cost))) == tuple(
        (x,) for x in best.values
    )


def test_a_limit_that_is_too_low_leaves_nothing() -> None:
    factors = [Factor((0, 1), np.array([[1.0, 2.0], [3.0, 4.0]]))]
    assert all(len(k) == 0 for k in narrowed([2, 2], factors, 0.5))
