"""Meshes of three and four axes: what is kept on them holds what is found with everything."""

from dataclasses import replace
from itertools import product
from math import comb
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.search import domains, refine
from parloom.search.auto import search
from parloom.search.choices import assignments
from parloom.search.closing import close
from parloom.search.finer import CUTS, refinements
from parloom.search.layouts import LayoutProblem
from parloom.search.master import MeshSearch
from parloom.search.meshes import NAMES, logical_meshes
from parloom.search.program import program_of
from parloom.search.question import Question
from parloom.search.refine import Tally, kept
from parloom.search.single import Single
from parloom.search.storage import WEIGHT_PARTS
from parloom.search.sums import Worth, summed
from tests.property.searched import ADAM, random_graph
from tests.unit.test_simulate import model

CLUSTER = load_cluster("2x4xH100")
PLENTY = 1e15


def problem_of(graph: Graph, mesh: Mesh, tally: Tally | None = None) -> LayoutProblem:
    """The problem on a mesh: everything, or what a tally keeps."""
    factored = factorize(graph)
    program = program_of(graph, factored)
    menus = kept(program, Single(graph, factored, mesh), tally).menus if tally else ()
    return LayoutProblem(program, Walker({}, mesh, CLUSTER), Decisions(mesh), ADAM, menus=menus)


def tally_of(graph: Graph) -> Tally:
    """What the meshes of one and two axes say."""
    tally = Tally()
    for mesh in logical_meshes(CLUSTER):
        found = MeshSearch(problem_of(graph, mesh), PLENTY)
        found.run()
        tally.add(found)
    return tally


def sizes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(axis.size for axis in mesh.axes)


def test_every_refinement_cuts_one_axis_and_the_levels_come_first() -> None:
    (mesh,) = (m for m in logical_meshes(load_cluster("8x8xH100")) if sizes(m) == (64,))
    assert [sizes(m) for m in refinements(mesh, 9)] == [(8, 8), (32, 2), (16, 4), (4, 16), (2, 32)]
    assert len(refinements(mesh)) == CUTS
    finest = mesh
    for count in range(2, len(NAMES) + 1):
        finest = refinements(finest)[0]
        assert len(finest.axes) == count
        assert [p for a in finest.axes for p in a.primes] == list(mesh.axes[0].primes)
    assert refinements(finest) == ()


def test_no_mesh_is_searched_twice_and_the_order_of_equal_links_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Permutations of prime axes are not enumerated; 2x4 is no copy of 4x2 over the same links."""
    meshes = [tuple(a.primes for a in m.axes) for m in logical_meshes(load_cluster("8x8xH100"), 4)]
    assert len(meshes) == len(set(meshes)) == sum(comb(5, cuts) for cuts in range(4))
    one_level = load_cluster("1x8xH100")
    monkeypatch.setattr("tests.property.test_refine.CLUSTER", one_level)
    steps = {}
    for mesh in logical_meshes(one_level):
        search = MeshSearch(problem_of(random_graph(Random(0), 5), mesh), PLENTY)
        search.run(1e-9)
        steps[sizes(mesh)] = close(search, np.inf, 1e-9).candidates[0].sums.step_ps
    assert steps[4, 2] < steps[2, 4]


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_what_is_kept_holds_the_best_of_all(seed: int) -> None:
    graph = random_graph(Random(seed))
    (mesh,) = (m for m in logical_meshes(CLUSTER, 3) if len(m.axes) == 3)
    every = MeshSearch(problem_of(graph, mesh), PLENTY).run()
    few = MeshSearch(problem_of(graph, mesh, tally_of(graph)), PLENTY).run()
    best = every.candidates[0].sums.step_ps
    assert every.bound_ps - 0.5 <= few.candidates[0].sums.step_ps <= best * (1 + 1e-3)


def test_what_is_kept_may_be_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with two choices of each operator, some best plan is lost."""
    monkeypatch.setattr(refine, "KEPT_CHOICES", (2,))
    lost = 0
    for seed in range(6):
        graph = random_graph(Random(seed))
        (mesh,) = (m for m in logical_meshes(CLUSTER, 3) if len(m.axes) == 3)
        every = MeshSearch(problem_of(graph, mesh), PLENTY).run().candidates[0]
        few = MeshSearch(problem_of(graph, mesh, tally_of(graph)), PLENTY).run().candidates[0]
        lost += few.sums.step_ps > every.sums.step_ps * (1 + 1e-3)
    assert lost


def test_everything_is_kept_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "KEPT_CHOICES", (10**4,))
    monkeypatch.setattr(refine, "CELLS", float("inf"))
    graph = random_graph(Random(1))
    (mesh,) = (m for m in logical_meshes(CLUSTER, 3) if len(m.axes) == 3)
    problem = problem_of(graph, mesh, tally_of(graph))
    for operator, menu in zip(problem.program.operators, problem.menus, strict=True):
        found = {frozenset(choice.assignment) for choice in menu.choices}
        assert found == {frozenset(a.items()) for a in assignments(operator.rule, mesh)}


@settings(max_examples=2)
@given(st.integers(0, 10**6), st.floats(0.2, 1.0))
def test_search_finds_what_enumeration_finds_on_three_axes(seed: int, share: float) -> None:
    """Every layout with every storage of its weights, as far as they are within the limit."""
    (mesh,) = (m for m in logical_meshes(CLUSTER, 3) if len(m.axes) == 3)
    problem = problem_of(random_graph(Random(seed), num_operators=1), mesh)
    every = []
    for values in product(*map(range, problem.sizes)):
        passes = problem.passes(values)
        weights = range(len(problem.program.weights))
        options = [list(problem.storage.options(problem.stored(i, values))[1]) for i in weights]
        for chosen in product(*options):
            every.append(summed(passes, sum(chosen, np.zeros(WEIGHT_PARTS, dtype=np.int64))))
    low, high = min(s.held_bytes for s in every), max(s.held_bytes for s in every)
    limit = low + share * (high - low)
    least = min(s.step_ps for s in every if s.held_bytes <= limit)
    searching = MeshSearch(problem, limit)
    searching.run(tolerance=1e-9)
    found = close(searching, np.inf, tolerance=1e-9, listed=10**5)
    assert found.bound_ps <= least + 0.5
    assert found.candidates[0].sums.step_ps == least
    assert MeshSearch(problem, limit).prove(Worth(), 1e18) <= least + 0.5


def test_a_search_looks_at_finer_meshes_and_never_ends_below_its_bound() -> None:
    said: list[str] = []
    graph = random_graph(Random(4), num_operators=4)
    question = Question(graph, CLUSTER, ADAM, int(PLENTY))
    found = search(question, Decisions(Mesh(())), said.append)
    assert any("z=" in line for line in said)
    least = min(p.estimate_ps for p in found.proposals)
    assert found.estimate_bound_ps <= least + 0.5
    for mesh in logical_meshes(CLUSTER, 3):
        best = MeshSearch(problem_of(graph, mesh), PLENTY).run().candidates[0].sums.step_ps
        assert least <= best * 1.01


def test_where_recomputing_all_is_too_dear_a_tally_has_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is worth next to nothing: narrowing leaves no plan that recomputes everything."""
    mesh = next(m for m in logical_meshes(CLUSTER) if len(m.axes) == 2)
    found = MeshSearch(problem_of(model(), mesh), PLENTY)
    found.run()
    found.worth, found.limit_bytes = replace(found.worth, held=1e-6), 0.0
    monkeypatch.setattr(refine, "BEYOND", 0.01)
    plain, narrowed = Tally(), Tally()
    plain.add(found)
    monkeypatch.setattr(domains, "MANY", 0)
    narrowed.add(found)
    limit = found.best_ps * (1 + refine.BEYOND)
    known, told = (
        {where: min(cost, limit) for where, cost in tally.least.items()}
        for tally in (plain, narrowed)
    )
    assert told == pytest.approx(known)
    assert min(told.values()) < limit
