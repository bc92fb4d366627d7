"""What readers pay of a movement that they share, against what it costs."""

from itertools import product
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.search.domains import balance
from parloom.search.eliminate import Factor, Table
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.master import multipliers
from parloom.search.meshes import logical_meshes
from parloom.search.shares import Payer, Pool
from parloom.search.sums import Worth
from tests.property.searched import random_graph
from tests.property.test_search import EIGHT, cost_of, problem_of

Case = tuple[list[int], list[Factor], Pool, Table]


@st.composite
def pools(draw: st.DrawFn) -> Case:
    """Readers of what variable 0 makes, other tables, and the price of each state."""
    readers = draw(st.integers(2, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=readers + 1, max_size=readers + 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    prices = rng.integers(0, 20, (sizes[0], 4)).astype(float)
    payers = []
    for variable in range(1, readers + 1):
        wanted = rng.permutation(4)[: rng.integers(1, 5)]
        index = rng.integers(0, len(wanted), sizes[variable])
        share = np.full((sizes[0], len(wanted)), 1 / readers)
        payers.append(Payer(0, variable, index, wanted.tolist(), prices[:, wanted], share))
    pairs = draw(st.sets(st.tuples(*[st.integers(0, len(sizes) - 1)] * 2), max_size=4))
    scopes = [*((v,) for v in range(len(sizes))), *(p for p in sorted(pairs) if p[0] != p[1])]
    tables = [rng.integers(-3, 20, [sizes[v] for v in scope]).astype(float) for scope in scopes]
    factors = [Factor(scope, costs) for scope, costs in zip(scopes, tables, strict=True)]
    return sizes, factors, Pool(payers), prices


def paid(pool: Pool) -> list[Factor]:
    """What readers pay as tables."""
    return [
        Factor((pool.source, p.variable), (share * p.prices)[:, p.index])
        for p, share in zip(pool.payers, pool.shares(), strict=True)
    ]


def truth(case: Case, values: tuple[int, ...]) -> float:
    """What values cost where every state that is wanted is paid once."""
    _, factors, pool, prices = case
    wanted = {int(np.array(p.states)[p.index[values[p.variable]]]) for p in pool.payers}
    return cost_of(factors, values) + float(prices[values[0], sorted(wanted)].sum())


@settings(max_examples=300)
@given(pools())
def test_what_is_paid_together_is_never_above_the_truth(case: Case) -> None:
    sizes, factors, pool, _ = case
    every = list(product(*map(range, sizes)))
    balance(sizes, [*factors, *paid(pool)], [pool])
    counted = {values: cost_of([*factors, *paid(pool)], values) for values in every}
    assert all(cost <= truth(case, values) + 1e-6 for values, cost in counted.items())
    assert all((share >= 0).all() for share in pool.shares())


def test_the_reader_that_wants_it_anyway_pays_alone() -> None:
    """One must have the state, the other would do without: half and half bounds nothing."""
    prices, index, half = np.array([[0.0, 10.0]]), np.array([0, 1]), np.full((1, 2), 0.5)
    pool = Pool([Payer(0, v, index, "ab", prices, half) for v in (1, 2)])
    others = [Factor((1,), np.array([np.inf, 0.0])), Factor((2,), np.array([0.0, 7.0]))]
    every = list(product(range(1), range(2), range(2)))
    assert min(cost_of([*others, *paid(pool)], v) for v in every) == 5.0
    balance([1, 2, 2], [*others, *paid(pool)], [pool])
    assert min(cost_of([*others, *paid(pool)], v) for v in every) == 10.0


def truth_of(problem: LayoutProblem, values: tuple[int, ...], multipliers: Multipliers) -> float:
    found = problem.evaluate(values, multipliers)
    return float(multipliers.passes @ found.passes) + float(multipliers.weights @ found.weights)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_tables_of_a_mesh_are_never_above_the_truth(seed: int, one: float, other: float) -> None:
    """Shares balanced under some multipliers hold under others; what they leave out is known."""
    rng = Random(seed)
    graph, mesh = random_graph(rng, num_operators=5), rng.choice(list(logical_meshes(EIGHT)))
    problem = problem_of(graph, mesh, EIGHT)
    worths = Worth(one, other), Worth(other, one, 0.01)
    some_multipliers = [multipliers(worth) for worth in worths]
    bounds = [problem.solve(some).bound for some in some_multipliers]
    problem.balance(some_multipliers[0])
    for _ in range(20):
        values = tuple(rng.randrange(size) for size in problem.sizes)
        for some, bound in zip(some_multipliers, bounds, strict=True):
            counted = cost_of(problem.factors(some), values)
            if np.isfinite(counted):
                cost = truth_of(problem, values, some)
                assert counted <= cost + 1.0
                assert bound <= cost + 1.0
                assert abs(counted + problem.unpaid(values, some) - cost) <= 1.0
