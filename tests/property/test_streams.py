"""What no step of the space undercuts, against plans of the space."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.errors import LayoutError
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.search.layouts import LayoutProblem
from parloom.search.master import MeshSearch, multipliers
from parloom.search.meshes import logical_meshes
from parloom.search.polish import Candidate, decisions, polish, uniform
from parloom.search.streams import least_compute_ps, least_step_ps
from parloom.search.sums import Worth
from tests.property.searched import ADAM, random_graph
from tests.property.test_search import EIGHT, PLENTY, cost_of, problem_of
from tests.unit.test_simulate import model

SLOW = load_cluster("4x2xRTX4090")
LEVELS = ((True, True, True), (False, True, True), (False, False, True), (False, False, False))


def plans(problem: LayoutProblem, rng: Random) -> Iterator[Candidate]:
    """Good layouts, changed here and there, with storage of all kinds."""
    searching = MeshSearch(problem, PLENTY)
    found = searching.run().candidates
    for _ in range(6):
        values = list(rng.choice(found).values)
        for variable in rng.sample(range(len(values)), rng.randrange(3)):
            values[variable] = rng.randrange(problem.sizes[variable])
        candidate = polish(problem, values, PLENTY)
        factors = problem.factors(multipliers(Worth()))
        if candidate is not None and np.isfinite(cost_of(factors, tuple(values))):
            yield candidate
            yield uniform(problem, candidate, rng.choice(LEVELS))
            some = tuple(rng.randrange(len(b.prefixes) + 1) for b in problem.program.blocks)
            yield replace(candidate, recomputed=some)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.booleans())
@example(7, True)  # with a weight that nothing reads
def test_no_plan_of_the_space_is_below_the_bound(seed: int, slow: bool) -> None:
    rng = Random(seed)
    cluster = SLOW if slow else EIGHT
    graph = model() if seed % 5 == 0 else random_graph(rng, num_operators=4)
    mesh = rng.choice(list(logical_meshes(cluster)))
    problem = problem_of(graph, mesh, cluster)
    candidates = list(plans(problem, rng))
    bound = least_step_ps(problem)
    assert bound >= least_compute_ps(problem)
    for candidate in candidates:
        plan = decisions(problem, candidate, Decisions(Mesh(())))
        try:
            pcg = lower(graph, plan)
        except LayoutError:
            continue
        played = simulate(pcg, cluster, plan, ADAM)
        assert bound <= played.bound_ps <= played.step_ps


def test_links_bound_where_they_are_slow() -> None:
    """Negative control: computing alone says less, and twice the bound is too much."""
    graph = random_graph(Random(1), num_operators=5)
    best, bounds = [], []
    for mesh in logical_meshes(SLOW):
        problem = problem_of(graph, mesh, SLOW)
        bounds.append(least_step_ps(problem))
        assert bounds[-1] > 1.05 * least_compute_ps(problem)
        candidate = MeshSearch(problem, PLENTY).run().candidates[0]
        plan = decisions(problem, candidate, Decisions(mesh))
        best.append(simulate(lower(graph, plan), SLOW, plan, ADAM).step_ps)
    assert min(bounds) <= min(best) < 3 * min(bounds)


def test_what_is_enough_is_not_improved() -> None:
    problem = problem_of(random_graph(Random(1)), next(iter(logical_meshes(SLOW))), SLOW)
    assert least_step_ps(problem, 0.0) == least_compute_ps(problem)
