"""Meshes of three and four axes: what is kept on them holds what is found with everything."""

from math import comb
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.plan import Decisions
from parloom.search.choices import Menu, assignments
from parloom.search.contexts import ContextSearch
from parloom.search.finer import CHOICES, CUTS, LeastCosts, promising, refinements
from parloom.search.meshes import NAMES, logical_meshes
from parloom.search.optimize import search
from parloom.search.request import Request, Wanted
from parloom.search.step_rows import ShadowPrices
from tests.examples import examples
from tests.property.searched import ADAM, PLENTY, context_of, random_graph

CLUSTER = load_cluster("2x4xH100")
(THREE,) = (m for m in logical_meshes(CLUSTER, 3) if len(m.axes) == 3)


def least_costs(graph: Graph) -> LeastCosts:
    """What the meshes of one and two axes say."""
    costs = LeastCosts()
    for mesh in logical_meshes(CLUSTER):
        costs.add(searched(graph, mesh))
    return costs


def searched(
    graph: Graph, mesh: Mesh, menus: tuple[Menu, ...] = (), cluster: Cluster = CLUSTER
) -> ContextSearch:
    context = context_of(graph, cluster, mesh, menus=menus)
    context.run(ShadowPrices())
    return context


def best_ps(context: ContextSearch) -> float:
    return next(context.candidates()).sums.step_ps


def kept(graph: Graph, at_most: int) -> tuple[tuple[Menu, ...], bool]:
    """What is kept on the mesh of three axes."""
    program = context_of(graph, CLUSTER, next(iter(logical_meshes(CLUSTER)))).layouts.program
    return promising(program, THREE, least_costs(graph), at_most)


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


def test_no_mesh_is_searched_twice_and_the_order_of_equal_links_matters() -> None:
    """Permutations of prime axes are not enumerated; 2x4 is no copy of 4x2 over the same links."""
    meshes = [tuple(a.primes for a in m.axes) for m in logical_meshes(load_cluster("8x8xH100"), 4)]
    assert len(meshes) == len(set(meshes)) == sum(comb(5, cuts) for cuts in range(4))
    one_level, graph = load_cluster("1x8xH100"), random_graph(Random(0), 5)
    steps = {
        sizes(mesh): best_ps(searched(graph, mesh, cluster=one_level))
        for mesh in logical_meshes(one_level)
    }
    assert steps[4, 2] < steps[2, 4]


@examples(4)
@given(st.integers(0, 10**6))
def test_what_is_kept_holds_the_best_of_all(seed: int) -> None:
    graph = random_graph(Random(seed))
    menus, left_out = kept(graph, CHOICES)
    assert left_out
    every, few = searched(graph, THREE), searched(graph, THREE, menus)
    assert best_ps(few) <= best_ps(every) * (1 + 1e-3)
    assert every.columns.bound_ps(PLENTY) <= best_ps(few) * (1 + 1e-9)


def test_what_is_kept_may_be_too_few() -> None:
    """Negative control: with two choices of each operator, some best plan is lost."""
    lost = 0
    for seed in range(4):
        graph = random_graph(Random(seed))
        every, few = searched(graph, THREE), searched(graph, THREE, kept(graph, 2)[0])
        lost += best_ps(few) > best_ps(every) * (1 + 1e-3)
    assert lost


def test_everything_is_kept_where_there_is_room() -> None:
    graph = random_graph(Random(1))
    menus, left_out = kept(graph, 10**4)
    assert not left_out
    program = context_of(graph, CLUSTER, THREE, menus=menus).layouts.program
    for operator, menu in zip(program.operators, menus, strict=True):
        found = {frozenset(choice.assignment) for choice in menu.choices}
        assert found == {frozenset(a.items()) for a in assignments(operator.rule, THREE)}


@pytest.mark.parametrize("wanted", [Wanted.PRICE, Wanted.PROOF])
def test_a_search_looks_at_finer_meshes_and_never_ends_below_its_bound(wanted: Wanted) -> None:
    said: list[str] = []
    graph = random_graph(Random(4), num_operators=4)
    request = Request(graph, DataSheets(CLUSTER), ADAM, PLENTY, 1, wanted=wanted)
    found = search(request, Decisions(), said.append)
    assert any("z=" in line for line in said) == (wanted is Wanted.PROOF)
    least = min(p.estimate_ps for p in found.proposals)
    if wanted is Wanted.PROOF:
        assert found.estimate_bound_ps <= least * (1 + 1e-9)
        for mesh in logical_meshes(CLUSTER, 3):
            assert least <= best_ps(searched(graph, mesh)) * 1.01
