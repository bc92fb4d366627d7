"""The search against what it must agree with: enumeration, lowered plans, its own bounds."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer, Prediction
from parloom.ir.text import parse_graph
from parloom.search import layouts
from parloom.search.auto import search
from parloom.search.closing import close
from parloom.search.domains import narrow_minimum
from parloom.search.eliminate import Factor, Minimum, marginals, minimum, near, regrets
from parloom.search.estimate import estimate
from parloom.search.layouts import LayoutProblem
from parloom.search.master import Found, MeshSearch, multipliers
from parloom.search.meshes import logical_meshes
from parloom.search.polish import Candidate, decisions, least_bytes, polish
from parloom.search.prices import KEPT
from parloom.search.program import program_of
from parloom.search.question import Question
from parloom.search.storage import STORED
from parloom.search.sums import Worth, summed
from tests.property.searched import ADAM, every_plan, least_step_ps, random_graph
from tests.unit.test_simulate import chunked, model

TWO, FOUR, EIGHT = (load_cluster(spec) for spec in ("2xH100", "2x2xH100", "2x4xH100"))
MESHED = load_cluster("8xV100-16GB")
PLENTY = 1e15
GOLDEN = Path(__file__).parents[1] / "golden" / "data"


def problem_of(graph: Graph, mesh: Mesh, cluster: Cluster) -> LayoutProblem:
    program = program_of(graph, factorize(graph))
    return LayoutProblem(program, Walker({}, mesh, cluster), Decisions(mesh), ADAM)


def exact(problem: LayoutProblem, limit: float) -> Found:
    """The best on a mesh, as near to its bound as can be proved."""
    searching = MeshSearch(problem, limit)
    searching.run(tolerance=1e-9)
    return close(searching, np.inf, tolerance=1e-9, listed=10**5)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[Factor]]:
    """A few variables and random tables over some of them."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    scopes = draw(
        st.lists(
            st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True),
            min_size=1,
            max_size=6,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = [
        Factor(tuple(scope), rng.integers(0, 50, [sizes[v] for v in scope]).astype(float))
        for scope in scopes
    ]
    return sizes, factors


def cost_of(factors: list[Factor], values: tuple[int, ...]) -> float:
    return sum(float(f.costs[tuple(values[v] for v in f.scope)]) for f in factors)


@given(tables())
def test_elimination_finds_the_minimum(drawn: tuple[list[int], list[Factor]]) -> None:
    sizes, factors = drawn
    found = minimum(sizes, factors)
    assert cost_of(factors, found.values) == found.cost
    assert found.cost == min(cost_of(factors, v) for v in product(*map(range, sizes)))


@given(tables(), st.floats(0.0, 30.0))
def test_near_lists_all_that_is_near(drawn: tuple[list[int], list[Factor]], slack: float) -> None:
    sizes, factors = drawn
    every = {v: cost_of(factors, v) for v in product(*map(range, sizes))}
    least = min(every.values())
    if np.isinf(least):
        return
    wanted = {v for v, cost in every.items() if cost <= least + slack}
    found = near(sizes, factors, least + slack, len(every))
    assert found is not None
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert near(sizes, factors, least + slack, len(wanted) - 1) is None


@given(tables())
def test_marginals_are_the_least_cost_with_each_value(
    drawn: tuple[list[int], list[Factor]],
) -> None:
    sizes, factors = drawn
    found = marginals(*regrets(sizes, factors))
    every = {v: cost_of(factors, v) for v in product(*map(range, sizes))}
    for variable, size in enumerate(sizes):
        for value in range(size):
            least = min(cost for v, cost in every.items() if v[variable] == value)
            assert found[variable][value] == least


def test_nothing_is_near_a_cost_below_the_least() -> None:
    factors = [Factor((0,), np.array([1.0, 2.0])), Factor((0, 1), np.zeros((2, 2)))]
    assert near([2, 2], factors, 0.5, 10) == ()
    assert near([2, 2], factors, 1.0, 10) == ((0, 0), (0, 1))


def test_elimination_sees_every_table() -> None:
    """Negative control: what the last table forbids is not chosen."""
    factors = [Factor((0,), np.array([0.0, 1.0])), Factor((0, 1), np.zeros((2, 2)))]
    assert minimum([2, 2], factors).values[0] == 0
    factors.append(Factor((1, 0), np.array([[np.inf, 0.0], [np.inf, 0.0]])))
    assert minimum([2, 2], factors).values[0] == 1


def test_a_solution_that_was_seen_is_not_lost_where_no_better_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables that are too large leave a bound alone, here when prices are exact."""
    rounds: list[Minimum] = []

    def bound_only(*given: Any, **more: Any) -> Minimum:
        rounds.append(narrow_minimum(*given, **more))
        return Minimum(rounds[-1].cost, ()) if rounds[1:] else rounds[0]

    monkeypatch.setattr(layouts, "narrow_minimum", bound_only)
    mesh = next(iter(logical_meshes(TWO)))
    found = problem_of(random_graph(Random(3)), mesh, TWO).solve(multipliers(Worth()))
    assert len(rounds) > 1
    assert found.values == rounds[0].values
    assert found.bound == rounds[-1].cost
    rounds.clear()
    below = problem_of(random_graph(Random(3)), mesh, TWO)
    assert not below.solve(multipliers(Worth()), enough=found.bound).values


@settings(max_examples=12)
@given(st.integers(0, 10**6))
def test_search_finds_what_enumeration_finds(seed: int) -> None:
    graph = random_graph(Random(seed))
    (mesh,) = logical_meshes(TWO)
    least = least_step_ps(graph, mesh, Walker({}, mesh, TWO))
    found = exact(problem_of(graph, mesh, TWO), PLENTY)
    assert found.candidates[0].sums.step_ps == least
    assert least is not None
    assert least * (1 - 1e-6) <= found.bound_ps <= least + 0.5


def test_search_finds_what_enumeration_finds_on_two_axes() -> None:
    graph = random_graph(Random(2), num_operators=2)
    mesh = next(m for m in logical_meshes(FOUR) if len(m.axes) == 2)
    least = least_step_ps(graph, mesh, Walker({}, mesh, FOUR))
    found = exact(problem_of(graph, mesh, FOUR), PLENTY)
    assert found.candidates[0].sums.step_ps == least


def every_limit(seed: int) -> tuple[LayoutProblem, Callable[[float], tuple[float, int]]]:
    """A small problem in which memory may cost time (weights are as small as messages are slow);
    and a limit, a share of the way from the least to the most that is held, with the least
    estimate under it of every layout with every storage of its weights.
    """
    (mesh,) = logical_meshes(TWO)
    graph = random_graph(Random(seed), num_operators=3, rows=(64,), columns=(64,))
    problem = problem_of(graph, mesh, TWO)
    every = [summed(*costs) for costs in every_plan(problem)]
    low, high = min(s.held_bytes for s in every), max(s.held_bytes for s in every)

    def least(share: float) -> tuple[float, int]:
        limit = low + share * (high - low)
        return limit, min(s.step_ps for s in every if s.held_bytes <= limit)

    return problem, least


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_search_finds_what_enumeration_finds_under_a_limit(seed: int, share: float) -> None:
    problem, least = every_limit(seed)
    limit, least_ps = least(share)
    found = exact(problem, limit)
    assert found.candidates[0].sums.held_bytes <= limit + 1
    assert found.candidates[0].sums.step_ps == least_ps
    assert found.bound_ps <= least_ps + 0.5


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_what_one_limit_shows_holds_under_another(seed: int, share: float, other: float) -> None:
    problem, least = every_limit(seed)
    searching = MeshSearch(problem, least(share)[0])
    searching.run(tolerance=1e-9)
    limit, least_ps = least(other)
    assert searching.bound_under(limit) <= least_ps + 0.5
    again = searching.under(limit)
    again.run(tolerance=1e-9)
    found = close(again, np.inf, tolerance=1e-9, listed=10**5)
    assert found.candidates[0].sums.step_ps == least_ps
    assert found.bound_ps <= least_ps + 0.5


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_what_one_limit_shows_holds_under_another_where_calls_recompute(
    seed: int, share: float, other: float
) -> None:
    (mesh,) = logical_meshes(TWO)
    problem = problem_of(model(3 + seed % 4), mesh, TWO)
    held = MeshSearch(problem, PLENTY).run().candidates[0].sums.held_bytes
    searching = MeshSearch(problem, (0.5 + share / 2) * held)
    searching.run()
    limit = (0.5 + other / 2) * held
    best = [c.sums.step_ps for c in MeshSearch(problem, limit).run().candidates]
    assert all(searching.bound_under(limit) <= step_ps + 0.5 for step_ps in best)
    again = searching.under(limit)
    assert [c.sums.step_ps for c in again.run().candidates[:1]] == best[:1]
    proved = MeshSearch(problem, limit).prove(searching.worth, 1e18)
    assert all(proved <= step_ps + 0.5 for step_ps in best)


def test_a_bound_under_one_limit_is_none_under_a_larger() -> None:
    """Negative control: bounds that were kept as they are would be wrong."""
    wrong = 0
    for seed in range(10):
        problem, least = every_limit(seed)
        found = MeshSearch(problem, least(0.0)[0]).run(tolerance=1e-9)
        wrong += found.bound_ps > least(1.0)[1] + 0.5
    assert wrong > 2


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_the_folded_price_is_that_of_the_lowered_plan(share: float) -> None:
    """Six blocks that are chosen for once, with storage, and some of them recomputed."""
    graph = model()
    for mesh in logical_meshes(EIGHT):
        problem = problem_of(graph, mesh, EIGHT)
        roomy = MeshSearch(problem, PLENTY).run().candidates[0]
        kept = sum(
            len(block.prefixes) * int(problem.passes_of(block, roomy.values)[KEPT])
            for block in problem.program.blocks
        )
        # Less than without recomputation, however weights are stored.
        stored = least_bytes(problem, roomy.values) + kept
        limit = stored - share * kept if share else roomy.sums.held_bytes
        candidate = polish(problem, roomy.values, limit)
        assert candidate is not None
        assert candidate.sums.held_bytes <= limit + 1
        assert candidate.sums.step_ps >= roomy.sums.step_ps
        assert bool(sum(candidate.recomputed)) == bool(share)
        pcg = lower(graph, decisions(problem, candidate, Decisions(mesh)))
        assert estimate(pcg, Walker({}, mesh, EIGHT), ADAM).step_ps == candidate.sums.step_ps


def test_the_folded_price_counts_every_block() -> None:
    """Negative control: a plan with one block less is not the same price."""
    mesh = next(iter(logical_meshes(EIGHT)))
    problem = problem_of(model(), mesh, EIGHT)
    candidate = MeshSearch(problem, PLENTY).run().candidates[0]
    other = problem_of(model(depth=5), mesh, EIGHT)
    pcg = lower(model(depth=5), decisions(other, replace(candidate, levels=tuple(
        tuple((level, weight.count) for level, _ in chosen[:1])
        for chosen, weight in zip(candidate.levels, other.program.weights, strict=True)
    )), Decisions(mesh)))  # fmt: skip
    assert estimate(pcg, Walker({}, mesh, EIGHT), ADAM).step_ps != candidate.sums.step_ps


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_redistributions_cost_what_the_planner_of_movements_makes_of_them(seed: int) -> None:
    """On meshes of up to four axes, in every pair of states that operators make and want."""
    rng = Random(seed)
    graph, cluster = random_graph(rng), rng.choice((EIGHT, MESHED))
    problem = problem_of(graph, rng.choice(list(logical_meshes(cluster, 4))), cluster)
    for way in problem.ways:
        table, asked = way.table, way.table.request
        for _ in range(10):
            source = rng.randrange(len(asked.sources))
            target = rng.randrange(len(asked.targets))
            states = asked.sources[source], asked.targets[target]
            price = problem.prices.movement(asked.spec, asked.flows, *states)
            assert (price is not None) == table.legal[source, target]
            if price is not None and asked.spec.shape:
                assert price.tolist() == table.parts[:, source, target].tolist()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_storage_is_priced_as_the_cost_layer_counts_it(level: int) -> None:
    """The search's own prices of weights against `cost.parameters`, whatever the ZeRO level."""
    plan = chunked(EIGHT, level=level)
    pcg = lower(model(), plan)
    found = priced(pcg, EIGHT, plan, ADAM).parameters
    weights = estimate(pcg, Walker({}, pcg.mesh, EIGHT), ADAM).weights
    assert weights[STORED] == sum(found.stored_bytes().values())


def test_the_bound_holds_for_every_plan_found() -> None:
    for cluster in (TWO, EIGHT):
        question = Question(model(), cluster, ADAM, int(PLENTY))
        found = search(question, Decisions(Mesh(())), lambda text: None)
        assert found.proposals
        assert 0 < found.bound_ps <= min(p.estimate_ps for p in found.proposals)
        for proposal in found.proposals:
            assert found.estimate_bound_ps <= proposal.estimate_ps + 0.5
            pcg = lower(model(), proposal.decisions)
            assert found.bound_ps <= simulate(pcg, cluster, proposal.decisions, ADAM).step_ps


def test_proposals_are_ordered_by_the_prediction_that_is_asked_for() -> None:
    """As where a calibration says what overlaps: here meshes of three axes are said to be slow."""

    def predicted(pcg: PCG, plan: Decisions, optimizer: Optimizer) -> Prediction:
        found = simulate(pcg, EIGHT, plan, optimizer).prediction()
        return replace(found, step_s=found.step_s * (2 if len(plan.mesh.axes) == 3 else 1))

    question = Question(model(), EIGHT, ADAM, int(PLENTY))
    base = Decisions(Mesh(()))
    plain = search(question, base, lambda text: None).proposals[0]
    found = search(replace(question, predicted=predicted), base, lambda text: None).proposals
    assert len(plain.decisions.mesh.axes) == 3, "otherwise nothing is shown"
    assert len(found[0].decisions.mesh.axes) < 3
    for proposal in found:
        expected = predicted(lower(model(), proposal.decisions), proposal.decisions, ADAM)
        assert proposal.prediction == expected


def test_frugal_storage_takes_fewer_collectives_and_never_a_better_estimate() -> None:
    graph = random_graph(Random(3))
    for mesh in logical_meshes(EIGHT):
        problem = problem_of(graph, mesh, EIGHT)
        values = MeshSearch(problem, PLENTY).run().candidates[0].values
        best = polish(problem, values, PLENTY)
        frugal = polish(problem, values, PLENTY, frugal=True)
        assert best is not None
        assert frugal is not None
        assert best.sums.step_ps <= frugal.sums.step_ps
        assert len(kinds_of(frugal)) <= len(kinds_of(best))


def kinds_of(candidate: Candidate) -> set[object]:
    """The distinct ways in which weights are stored in chunks."""
    levels = (level for chosen in candidate.levels for level, _ in chosen if level.axes)
    return {(level.axes, level.weight, level.gradient) for level in levels}


def test_nothing_is_proposed_that_does_not_fit() -> None:
    question = Question(model(), EIGHT, ADAM, 10**6)
    assert not search(question, Decisions(Mesh(())), lambda text: None).proposals


def test_flows_come_in_the_order_of_the_program_whatever_names_hash_to() -> None:
    """What is written back and read by nothing: in the order in which the graph writes it."""
    graph = parse_graph((GOLDEN / "cnn.graph").read_text())
    program = program_of(graph, factorize(graph))
    made = {
        name: (program.index[flat.key], position)
        for flat in graph.flat()
        for position, name in enumerate(flat.results)
    }
    written = dict.fromkeys(made.get(graph.flat_ids[name]) for _, name in graph.updates)
    found = [(f.operator, f.result) for f in program.flows if f.whole and not f.readers]
    assert len(found) > 4
    assert found == [place for place in written if place in found]
