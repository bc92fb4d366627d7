"""What is left of every variable against enumeration."""

from itertools import product

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parloom.search.domains import narrow_minimum, narrowed
from parloom.search.eliminate import Factor, minimum

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
    assert np.isinf(found.cost) or costs[found.values] == found.cost


@settings(max_examples=300)
@given(sums())
def test_where_tables_stay_too_large_the_minimum_is_between_bound_and_answer(case: Case) -> None:
    sizes, factors = case
    costs = priced(case)
    found = narrow_minimum(sizes, factors, many=0, too_many=0)
    assert found.cost <= min(costs.values()) <= costs[found.values]


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
