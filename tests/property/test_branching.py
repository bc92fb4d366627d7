"""Branch and bound against enumeration: no part has a layout that costs less than its bound."""

from itertools import product
from math import inf, isinf
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.search.branching import branch
from parloom.search.eliminate import Factor
from parloom.search.layouts import LayoutProblem
from parloom.search.master import MeshSearch, multipliers
from parloom.search.meshes import logical_meshes
from parloom.search.polish import polish
from parloom.search.sums import Worth
from tests.property.searched import random_graph
from tests.property.test_recomputation import blocks
from tests.property.test_search import PLENTY, TWO, cost_of, problem_of

SLOW = load_cluster(str(Path(__file__).parents[2] / "benchmarks" / "2x4xRTX4090-25gbit.yaml"))
Steps = dict[tuple[int, ...], float]


def every_step(problem: LayoutProblem, limit: float) -> Steps:
    """What all layouts cost that are possible, with the best storage."""
    factors = problem.factors(multipliers(Worth()))
    found = {}
    for values in product(*map(range, problem.sizes)):
        if not isinf(cost_of(factors, values)):
            candidate = polish(problem, values, limit)
            found[values] = inf if candidate is None else float(candidate.sums.step_ps)
    return found


def least(steps: Steps, barred: tuple[Factor, ...] = ()) -> float:
    """The least of those that no table of `barred` forbids."""
    allowed = (step for values, step in steps.items() if not cost_of(list(barred), values))
    return min(allowed, default=inf)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.booleans())
def test_no_part_has_what_is_below_its_bound(seed: int, tight: bool) -> None:
    """Parts of parts, the menu of any operator divided anyhow."""
    rng = Random(seed)
    (mesh,) = logical_meshes(TWO)
    problem = problem_of(random_graph(rng), mesh, TWO)
    limit = PLENTY
    if tight:
        limit = 0.7 * MeshSearch(problem, limit).run().candidates[0].sums.held_bytes
    part = MeshSearch(problem, limit)
    part.run()
    steps = every_step(problem, limit)
    for _ in range(3):
        variable = rng.randrange(len(problem.menus))
        mine = np.array([rng.random() < 0.5 for _ in range(problem.sizes[variable])])
        parts = [part.part(Factor((variable,), np.where(some, 0.0, inf))) for some in (mine, ~mine)]
        for some in parts:
            some.run(enough=rng.choice((inf, least(steps))))
            assert part.bound <= some.bound <= least(steps, some.barred) + 0.5
        together = min(least(steps, some.barred) for some in parts)
        assert together == least(steps, part.barred)
        part = rng.choice(parts)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.floats(0.5, 1.0))
def test_the_bound_of_all_parts_is_one_of_the_whole(seed: int, share: float) -> None:
    (mesh,) = logical_meshes(TWO)
    problem = problem_of(random_graph(Random(seed)), mesh, TWO)
    limit = share * MeshSearch(problem, PLENTY).run().candidates[0].sums.held_bytes
    search = MeshSearch(problem, limit)
    found = search.run()
    bound = branch(search, inf, 1e-6)
    assert found.bound_ps <= bound <= least(every_step(problem, limit)) + 0.5


def slow(seed: int) -> MeshSearch:
    """A search on a slow link, with less memory than would be best."""
    mesh = next(m for m in logical_meshes(SLOW) if [axis.size for axis in m.axes] == [2, 4])
    problem = problem_of(random_graph(Random(seed), 4), mesh, SLOW)
    limit = 0.7 * MeshSearch(problem, PLENTY).run(1e-9).candidates[0].sums.held_bytes
    return MeshSearch(problem, limit)


def recomputing(rng: Random, share: float) -> MeshSearch:
    """A search where some calls of a block have to recompute."""
    (mesh,) = logical_meshes(TWO)
    problem = problem_of(blocks(rng, 4), mesh, TWO)
    held = MeshSearch(problem, PLENTY).run().candidates[0].sums.held_bytes
    return MeshSearch(problem, share * held)


def possible(search: MeshSearch, values: tuple[int, ...]) -> bool:
    """Whether there is such a layout."""
    return not isinf(cost_of(search.problem.factors(multipliers(Worth())), values))


def test_parts_close_a_gap_that_a_mixture_leaves() -> None:
    """And have a better layout than those of the mixture."""
    search = slow(4)
    found = search.run(1e-9)
    best_ps = found.candidates[0].sums.step_ps
    assert found.bound_ps < 0.8 * best_ps
    bound = branch(search, inf, 1e-6)
    assert search.best_ps * (1 - 1e-6) <= bound <= search.best_ps + 0.5
    assert search.best_ps < 0.95 * best_ps


def test_one_part_alone_bounds_nothing() -> None:
    """Negative control: without what the best layout does, a bound is above the best."""
    (mesh,) = logical_meshes(TWO)
    search = MeshSearch(problem_of(random_graph(Random(1)), mesh, TWO), PLENTY)
    best = search.run().candidates[0]
    bounds = []
    for variable, size in enumerate(search.problem.sizes):
        others = np.arange(size) != best.values[variable]
        part = search.part(Factor((variable,), np.where(others, 0.0, inf)))
        part.run()
        bounds.append(part.bound)
    assert max(bounds) > best.sums.step_ps


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.floats(0.4, 0.9))
def test_no_part_that_recomputes_so_much_has_what_is_below_its_bound(
    seed: int, share: float
) -> None:
    """Calls of each block kind divided anyhow; parts of parts."""
    rng = Random(seed)
    search = recomputing(rng, share)
    search.run()
    for position, policy in enumerate(search.policies):
        if policy.least == policy.most:
            continue
        few = rng.randrange(policy.least, policy.most)
        parts = [
            search.recomputing(position, policy.least, few),
            search.recomputing(position, few + 1, policy.most),
        ]
        for part in parts:
            part.run()
        for values in product(*map(range, search.problem.sizes)):
            found = (
                None if rng.random() < 0.8 else polish(search.problem, values, search.limit_bytes)
            )
            if found is not None and possible(search, values):
                part = parts[found.recomputed[position] > few]
                assert part.bound <= found.sums.step_ps + 0.5


def test_a_fraction_of_a_call_is_none() -> None:
    """All layouts of the mixture are alike."""
    search = recomputing(Random(27), 0.6)
    found = search.run(1e-9)
    assert found.bound_ps < 0.96 * search.best_ps
    bound = branch(search, inf, 1e-6)
    assert search.best_ps * (1 - 1e-6) <= bound <= search.best_ps + 0.5


def test_the_same_parts_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fewer of them, if no more may be looked at: then the bound is what it is."""
    bounds = []
    for _ in range(2):
        search = slow(2)
        search.run(1e-9)
        bounds.append((branch(search, inf, 1e-6), search.problem.work.spent, search.best_ps))
    assert bounds[0] == bounds[1]
    monkeypatch.setattr("parloom.search.branching.MOST", 0)
    search = slow(2)
    found = search.run(1e-9)
    assert branch(search, inf, 1e-6) == found.bound_ps < bounds[0][0]
