"""What closes gaps against enumeration: no layout may be lost that costs less than the bound."""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.ir.text import parse_graph
from parloom.search import domains
from parloom.search.closing import _Closing, close
from parloom.search.eliminate import Factor, Indices, Table, regrets
from parloom.search.fronts import Fronts, Joint, Patience, Sum, _Following, fronts
from parloom.search.master import MeshSearch, multipliers
from parloom.search.meshes import logical_meshes
from parloom.search.polish import polish
from parloom.search.sums import Worth
from tests.property.searched import random_graph
from tests.property.test_search import EIGHT, PLENTY, TWO, cost_of, problem_of

CALLS = """graph "Calls" training=True

input w0: float32[512, 512] = parameter("0.weight", trainable=True)
input w1: float32[512, 512] = parameter("1.weight", trainable=True)
input x: float32[1024, 512] = batch("x")

def block(
    hidden: float32[1024, 512],
    weight: float32[512, 512],
):
    made: float32[1024, 512] = linear(hidden, weight)  # up
    out: float32[1024, 512] = add(made, hidden)  # add
    return out

main main:
    h: float32[1024, 512] = block["0"](x, w0)
    y: float32[1024, 512] = block["1"](h, w1)
    loss: float32[] = sum(y)
    return loss

loss loss
"""
Drawn = tuple[list[int], list[list[Factor]], list[Table], tuple[int, ...]]


@st.composite
def sums(draw: st.DrawFn) -> Drawn:
    """Sums of tables over the same few variables; and what some cost together."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    variables = st.integers(0, len(sizes) - 1)
    some = st.lists(variables, min_size=1, max_size=3, unique=True)
    scopes = draw(st.lists(some, min_size=1, max_size=6))
    count = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def tables() -> list[Factor]:
        shapes = [[sizes[v] for v in scope] for scope in scopes]
        found = [rng.integers(0, 50, shape).astype(float) for shape in shapes]
        return [Factor(tuple(s), costs) for s, costs in zip(scopes, found, strict=True)]

    all_sums = [tables() for _ in range(count)]
    scope = tuple(sorted(draw(some)))
    together = [rng.integers(0, 20, [sizes[v] for v in scope]) for _ in range(count)]
    return sizes, all_sums, [t.astype(float) for t in together], scope


def followed(drawn: Drawn, limit: float, grid: float, at_most: int = 10**6) -> Fronts | None:
    sizes, all_sums, together, scope = drawn
    eliminated = [Sum(*regrets(sizes, factors)) for factors in all_sums]

    def costs(rows: Indices) -> Table:
        at = tuple(rows[:, v] for v in scope)
        return np.stack([table[at] for table in together], axis=1)

    return fronts(
        eliminated, [Joint(frozenset(scope), costs)], limit, grid, at_most, Patience(10**9)
    )


def costs_of(drawn: Drawn) -> dict[tuple[int, ...], float]:
    """What all values cost."""
    sizes, all_sums, together, scope = drawn
    found = {}
    for values in product(*map(range, sizes)):
        joint = [float(table[tuple(values[v] for v in scope)]) for table in together]
        found[values] = max(
            cost_of(factors, values) + more for factors, more in zip(all_sums, joint, strict=True)
        )
    return found


@given(sums(), st.floats(0.0, 40.0))
def test_all_that_cost_little_are_listed(drawn: Drawn, slack: float) -> None:
    every = costs_of(drawn)
    limit = min(every.values()) + slack
    found = followed(drawn, limit, 0.0)
    assert found is not None
    listed = {tuple(map(int, v)): b for v, b in zip(found.values, found.bounds, strict=True)}
    assert listed == {v: cost for v, cost in every.items() if cost <= limit}
    assert list(found.bounds) == sorted(found.bounds)
    assert len(listed) < 2 or followed(drawn, limit, 0.0, at_most=0) is None


@given(sums(), st.floats(0.0, 40.0), st.sampled_from([2.0**-20, 1.0, 3.0]))
def test_what_is_left_out_costs_no_less(drawn: Drawn, slack: float, grid: float) -> None:
    every = costs_of(drawn)
    least, limit = min(every.values()), min(every.values()) + slack
    found = followed(drawn, limit, grid)
    assert found is not None
    assert least - grid * len(drawn[0]) <= found.bounds[0] <= least
    for values, bound in zip(found.values, found.bounds, strict=True):
        cost = every[tuple(map(int, values))]
        assert cost - grid * len(drawn[0]) <= bound <= cost


@given(st.integers(0, 10**6), st.sampled_from([0, 2, 32]))
def test_of_each_kind_only_what_no_other_undercuts_is_kept(seed: int, few: int) -> None:
    """Whether sets of rows are compared one by one, or many at once; the first of equal rows."""
    rng = np.random.default_rng(seed)
    kinds, above = rng.integers(0, 4, (12, 1)), rng.integers(0, 4, (12, 3)).astype(float)
    following = _Following([Sum(0.0, ())] * 3, (), np.inf, 1.0, 99, Patience(10**9))
    following.found, following.above = kinds, above
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parloom.search.fronts.FEW", few)
        following._thin([0])
    rows = [(int(kind), tuple(costs)) for (kind,), costs in zip(kinds, above.tolist(), strict=True)]
    front = {
        (kind, costs)
        for kind, costs in rows
        if not any(
            kind == other
            and less != costs
            and all(a <= b for a, b in zip(less, costs, strict=True))
            for other, less in rows
        )
    }
    left = zip(following.found.tolist(), following.above.tolist(), strict=True)
    found = [(kind, tuple(costs)) for (kind,), costs in left]
    assert set(found) == front
    assert len(found) == len(front)


def test_of_what_is_alike_the_cheaper_is_kept() -> None:
    """Negative control: dearer in one of the sums it is not alike."""
    even = Factor((0,), np.array([1.0, 0.0, 2.0]))
    odd = Factor((0,), np.array([0.0, 1.0, 2.0]))
    pair = Factor((0, 1), np.zeros((3, 1)))
    both = [[even, pair], [odd, pair]]
    nothing = [np.zeros(3)] * 2
    found = followed(([3, 1], both, nothing, (0,)), 10.0, 1e-6)
    assert found is not None
    assert {v for v, _ in found.values.tolist()} == {0, 1}
    found = followed(([3, 1], both[:1], nothing[:1], (0,)), 10.0, 1e-6)
    assert found is not None
    assert {v for v, _ in found.values.tolist()} == {1}


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.booleans())
def test_no_layout_is_below_a_closed_bound(seed: int, tight: bool) -> None:
    """Random layouts with the best storage, on two axes, with and without a limit."""
    rng = Random(seed)
    graph = random_graph(rng, num_operators=5)
    mesh = rng.choice(list(logical_meshes(EIGHT)))
    problem = problem_of(graph, mesh, EIGHT)
    searching = MeshSearch(problem, PLENTY)
    limit = PLENTY
    if tight:
        limit = 0.7 * searching.run().candidates[0].sums.held_bytes
        searching = MeshSearch(problem, limit)
    before = searching.run()
    after = close(searching, np.inf)
    assert after.bound_ps >= before.bound_ps
    if not after.candidates:
        return
    assert after.bound_ps <= after.candidates[0].sums.step_ps <= before.candidates[0].sums.step_ps
    for _ in range(40):
        values = list(rng.choice(after.candidates).values)
        for variable in rng.sample(range(len(values)), min(2, len(values))):
            values[variable] = rng.randrange(problem.sizes[variable])
        found = polish(problem, values, limit)
        factors = problem.factors(multipliers(Worth()))
        if found is not None and np.isfinite(cost_of(factors, tuple(values))):
            assert found.sums.step_ps >= after.bound_ps - 0.5


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_layouts_that_are_listed_cost_what_they_do_in_truth(share: float) -> None:
    """Under a limit policies are variables; two readers in a block bring a value there once."""
    problem = problem_of(parse_graph(CALLS), next(iter(logical_meshes(TWO))), TWO)
    limit = share * MeshSearch(problem, PLENTY).run().candidates[0].sums.held_bytes
    searching = MeshSearch(problem, limit)
    searching.run()
    closing = _Closing(searching, searching.best_ps, 1e-9, 64)
    assert bool(closing.counts) == (share < 1)
    sizes = problem.domains(closing._multipliers(closing.worths[0]))
    closing.kept = [np.arange(size) for size in sizes]
    closing.joined = dict.fromkeys(i for i, ways in enumerate(problem.ways_of) if len(ways) > 1)
    found = closing._follow(1.5 * closing.best, 10**5, whole=True)
    assert found is not None
    together = 0
    for values, bound in zip(found.values, found.bounds, strict=True):
        costs = []
        for worth in closing.worths:
            counted = closing._multipliers(worth)
            truth = problem.evaluate(values, counted)
            cost = truth.passes @ counted.passes + truth.weights @ counted.weights
            costs.append(cost - worth.held * limit)
            together += problem.unpaid(values, counted) > 0
        assert bound == pytest.approx(max(costs))
    assert together


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_whatever_answer_is_claimed_no_bound_is_above_the_least(share: float) -> None:
    problem = problem_of(random_graph(Random(3)), next(iter(logical_meshes(TWO))), TWO)
    searching = MeshSearch(problem, PLENTY)
    least = searching.run(1e-9).candidates[0].sums.step_ps
    found = close(searching, share * least, tolerance=1e-6)
    assert found.bound_ps <= least + 0.5


def test_where_nothing_is_as_cheap_as_the_answer_that_is_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables are narrowed until no choice is left; a dearer answer is no bound."""
    monkeypatch.setattr(domains, "MANY", 0)
    problem = problem_of(random_graph(Random(3)), next(iter(logical_meshes(TWO))), TWO)
    for share, proved in ((0.5, True), (1.5, False)):
        searching = MeshSearch(problem, PLENTY)
        least = searching.run(1e-9).candidates[0].sums.step_ps
        searching.bound = 0.1 * least
        found = close(searching, share * least)
        assert (found.bound_ps == share * least) == proved
        assert found.bound_ps <= least + 0.5
