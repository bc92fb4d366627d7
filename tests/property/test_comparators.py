"""Methods of other systems: what they find against enumeration; whether their plans are legal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp, inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis
from parloom.ir.plan import Decisions
from parloom.ir.text import parse_graph
from parloom.search.candidates import COMPARATORS
from parloom.search.comparators import alpa
from parloom.search.comparators.delta import Assignment, Delta
from parloom.search.comparators.flexflow import Search, acceptance
from parloom.search.comparators.ilp import least
from parloom.search.comparators.plans import communicated
from parloom.search.eliminate import Factor, minimum
from parloom.search.estimate import estimate
from parloom.search.layouts import LayoutProblem
from parloom.search.meshes import logical_meshes
from parloom.search.prices import KEPT
from parloom.search.program import State, program_of
from parloom.search.question import Question
from parloom.search.storage import REDUCED
from tests.property.searched import ADAM, random_graph
from tests.property.test_search import cost_of, tables
from tests.unit.test_simulate import model

ONE, TWO, FOUR, EIGHT, SIX = (
    load_cluster(spec) for spec in ("1xH100", "2xH100", "2x2xH100", "2x4xH100", "2x3xH100")
)
METHODS = tuple(COMPARATORS)
PLENTY = 10**15
BASE = Decisions(Mesh(()))


def question(graph: Graph, cluster: Cluster, budget: int = 300, seed: int = 0) -> Question:
    return Question(graph, cluster, ADAM, PLENTY, seed=seed, budget=budget)


def silent(text: str) -> None:
    """Drop progress."""


def plans(method: str, asked: Question) -> list[Decisions]:
    return list(COMPARATORS[method](asked, BASE, silent))


# Every method.


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_plans_are_legal_and_use_the_whole_cluster(method: str, seed: int) -> None:
    rng = Random(seed)
    cluster = rng.choice((TWO, FOUR, SIX, EIGHT))
    graph = random_graph(rng)
    found = plans(method, question(graph, cluster, 60))
    assert found
    for plan in found:
        assert plan.mesh.num_ranks == cluster.num_devices
        pcg = lower(graph, plan)
        assert simulate(pcg, cluster, plan, ADAM).step_ps > 0


@pytest.mark.parametrize("method", METHODS)
def test_one_device_has_nothing_to_choose(method: str) -> None:
    (plan,) = plans(method, question(model(), ONE))
    assert plan.mesh.num_ranks == 1
    lower(model(), plan)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_question_has_the_same_plans(method: str) -> None:
    assert plans(method, question(model(), EIGHT)) == plans(method, question(model(), EIGHT))


# alpa.


@given(tables())
def test_the_integer_program_finds_the_minimum(drawn: tuple[list[int], list[Factor]]) -> None:
    sizes, factors = drawn
    factors = [f for f in factors if len(f.scope) < 3]
    scaled = [Factor(f.scope, f.costs * 1e9) for f in factors]
    found = least(sizes, scaled)
    assert found is not None
    assert cost_of(scaled, found.values) == pytest.approx(found.cost, abs=1)
    assert found.cost == pytest.approx(minimum(sizes, scaled).cost, abs=1)


def test_the_integer_program_takes_nothing_that_is_forbidden() -> None:
    tied = np.array([[inf, 1e9], [2e9, inf]])
    factors = [Factor((1, 0), tied), Factor((0,), np.array([5e9, 0.0]))]
    found = least([2, 2], factors)
    assert found is not None
    assert found.values == (1, 0)
    neither = [Factor((v,), np.array([inf, 0.0])) for v in (0, 1)]
    assert least([2, 2], [*factors, *neither]) is None


def counted(problem: LayoutProblem, values: Sequence[int]) -> float:
    """What a choice for each operator communicates, without any table: infinite where illegal."""
    program, prices, total = problem.program, problem.prices, 0.0
    chosen = [menu.choices[v] for menu, v in zip(problem.menus, values, strict=False)]
    for index, operator in enumerate(program.operators):
        for flags, count in operator.flows:
            total += count * float(prices.operator(index, chosen[index], flags)[[1, 3]].sum())
    for flow in program.flows:
        source = State(problem.home(flow.weight, values)[0], problem.home(flow.weight, values)[1])
        if flow.operator >= 0:
            source = chosen[flow.operator].results[flow.result]
        if flow.like is not None:
            source = chosen[flow.like.operator].operands[flow.like.operand]
        for reader in flow.readers:
            if reader == flow.like:
                continue
            target = chosen[reader.operator].operands[reader.operand]
            price = prices.movement(flow.spec, flow.differentiable, source, target)
            if price is None:
                return inf
            total += flow.count * float(price[[1, 3]].sum()) / len(flow.readers)
    for index, weight in enumerate(program.weights):
        stored = problem.stored(index, values)
        total += weight.count * float(problem.storage.options(stored)[1][0][REDUCED])
    return total


def without_sharing(seed: int) -> Graph:
    """A random graph in which no weight is read twice (homes are variables of their own)."""
    rng = Random(seed)
    while True:
        graph = random_graph(rng, 4)
        program = program_of(graph, factorize(graph))
        if all(len(weight.readers) < 2 for weight in program.weights):
            return graph


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from([TWO, FOUR]))
def test_alpa_finds_what_enumeration_of_its_space_finds(seed: int, cluster: Cluster) -> None:
    graph = without_sharing(seed)
    program = program_of(graph, factorize(graph))
    samples = alpa.samples_of(program, cluster)
    for mesh in alpa.views(cluster):
        walker = Walker({}, mesh, cluster)
        problem = alpa.problem_of(program, walker, BASE, question(graph, cluster), samples)
        followed = alpa.followers(problem)
        found = alpa.solve(problem, followed, 10_000)
        assert found is not None
        leaders = sorted(set(followed.leader))
        best = inf
        for picked in product(*(range(problem.sizes[leader]) for leader in leaders)):
            at = dict(zip(leaders, picked, strict=True))
            every = zip(followed.leader, followed.values, strict=True)
            best = min(best, counted(problem, [int(v[at[leader]]) for leader, v in every]))
        assert found.cost == pytest.approx(best, rel=1e-6, abs=1)
        assert counted(problem, found.values) == pytest.approx(best, rel=1e-6, abs=1)


@settings(max_examples=6)
@given(st.integers(0, 10**6))
def test_without_followers_the_program_agrees_with_elimination(seed: int) -> None:
    """Shared weights included."""
    graph = random_graph(Random(seed))
    program = program_of(graph, factorize(graph))
    for mesh in logical_meshes(FOUR):
        walker = Walker({}, mesh, FOUR)
        problem = alpa.problem_of(program, walker, BASE, question(graph, FOUR), None)
        found = alpa.solve(problem, alpa.nobody(problem), 10_000)
        assert found is not None
        eliminated = problem.solve(communicated())
        assert found.cost == pytest.approx(eliminated.bound, rel=1e-6, abs=1)


def test_a_view_of_alpa_keeps_its_inner_axis_in_a_node() -> None:
    views = [[axis.size for axis in mesh.axes] for mesh in alpa.views(load_cluster("4x4xH100"))]
    assert sorted(views) == [[4, 4], [8, 2], [16]]


def test_alpa_splits_products_over_all_devices_and_samples_over_the_first_axis() -> None:
    for plan in plans("alpa", question(model(), EIGHT)):
        products = [n for n in plan.nodes if "linear" in n.key]
        assert products
        for node in products:
            axes = [axis for _, some in node.factors for axis in some]
            assert sorted(axes) == sorted(plan.mesh.names)
            if len(plan.mesh.axes) > 1:
                assert plan.mesh.names[1] not in dict(node.factors).get("d0", ())


def test_alpa_scatters_gradients_that_are_summed() -> None:
    """And with several microbatches it adds them up first."""
    asked = question(model(), TWO)
    for count in (1, 2):
        base = replace(BASE, num_microbatches=count)
        (plan,) = COMPARATORS["alpa"](replace(asked, num_microbatches=count), base, silent)
        assert plan.num_microbatches == count
        partial = {p.input.target for p in lower(model(), plan).parameters if p.reduce}
        stored = {p.name: p for p in plan.parameters}
        assert partial == stored.keys()
        for parameter in stored.values():
            assert parameter.optimizer.axes == ("x",)
            assert bool(parameter.gradient.axes) is (count == 1)
            assert not parameter.weight.axes


# flexflow.


def fine(cluster: Cluster) -> Mesh:
    primes = reversed(cluster.prime_axes())
    return Mesh(tuple(MeshAxis(f"a{i}", (prime,)) for i, prime in enumerate(primes)))


def searching(graph: Graph, cluster: Cluster, seed: int = 0, limit: int = PLENTY) -> Search:
    program = program_of(graph, factorize(graph), apart=True)
    walker = Walker({}, fine(cluster), cluster)
    return Search(Delta(program, walker, BASE, ADAM), limit, Random(seed))


def lowered_ps(search: Search, graph: Graph, cluster: Cluster) -> int:
    delta = search.delta
    plan = Decisions(delta.mesh, delta.nodes(delta.assignments()))
    pcg = lower(graph, plan)
    return estimate(pcg, Walker({}, delta.mesh, cluster), ADAM).step_ps


@settings(max_examples=12)
@given(st.integers(0, 10**6))
def test_the_running_estimate_is_that_of_the_lowered_plan(seed: int) -> None:
    """After every change, with blocks whose calls differ, and for weights that are shared."""
    rng = Random(seed)
    graph = model(3) if rng.random() < 0.4 else random_graph(rng, 4)
    cluster = rng.choice((TWO, FOUR, SIX))
    search = searching(graph, cluster, seed)
    assert search.delta.start([()] * len(search.menus))
    for _ in range(6):
        index = rng.choice(search.free)
        change = search.delta.change(index, rng.choice(search.menus[index]))
        if change is not None:
            search.delta.accept(change)
            assert search.delta.step_ps() == lowered_ps(search, graph, cluster)


@settings(max_examples=12)
@given(st.integers(0, 10**6))
def test_what_is_kept_is_what_the_search_counts(seed: int) -> None:
    """Once, where a producer keeps what its reader keeps, too."""
    rng = Random(seed)
    graph = model(2) if rng.random() < 0.4 else random_graph(rng, 4)
    search = searching(graph, TWO, seed)
    delta = search.delta
    assert delta.start([()] * len(search.menus))
    for index, menu in enumerate(search.menus):
        change = delta.change(index, rng.choice(menu))
        if change is not None:
            delta.accept(change)
    problem = LayoutProblem(delta.program, Walker({}, delta.mesh, TWO), BASE, ADAM)
    values = [0] * len(problem.sizes)
    for index, found in enumerate(problem.menus):
        values[index] = found.choices.index(delta.choices[index])
    assert delta.passes[KEPT] == problem.passes(values)[KEPT]


def test_a_value_that_its_maker_keeps_is_counted_once() -> None:
    """A hyperbolic tangent keeps its result, which the product behind it reads as it is made."""
    shape = "float32[512, 512]"
    graph = parse_graph(
        f'graph "G" training=True\n\ninput w: {shape} = parameter("w", trainable=True)\n'
        f'input x: {shape} = batch("x")\n\nmain main:\n    a: {shape} = linear(x, w)  # a\n'
        f"    b: {shape} = tanh(a)  # b\n    c: {shape} = linear(b, w)  # c\n"
        "    loss: float32[] = sum(c)\n    return loss\n\nloss loss\n"
    )
    search = searching(graph, TWO)
    assert search.delta.start([()] * len(search.menus))
    assert search.delta.passes[KEPT] == 512 * 512 * 4
    # Split over rows, its maker keeps a part, and the product what was gathered.
    rows = next(way for way in search.menus[1] if "d0" in dict(way))
    change = search.delta.change(1, rows)
    assert change is not None
    assert change.passes[KEPT] == 512 * 512 * 4 + 512 * 512 * 4 // 2


def test_a_change_that_is_not_accepted_leaves_no_trace() -> None:
    search = searching(model(2), FOUR)
    assert search.delta.start([()] * len(search.menus))
    before = search.cost(), search.delta.assignments()
    index = search.free[0]
    change = search.delta.change(index, search.menus[index][-1])
    assert change is not None
    assert search.cost(change) != before[0]
    assert (search.cost(), search.delta.assignments()) == before


def test_worse_proposals_are_accepted_as_metropolis_and_hastings_say() -> None:
    ms = 1e9
    assert acceptance(10 * ms, 9 * ms) == 1.0
    assert acceptance(10 * ms, 10 * ms) == 1.0
    assert acceptance(10 * ms, 30 * ms) == pytest.approx(exp(-1.0))


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_reaches_the_optimum_of_a_tiny_graph(seed: int) -> None:
    graph = random_graph(Random(seed), 2)
    search = searching(graph, TWO, seed)
    best = inf
    for picked in product(*search.menus):
        if search.delta.start(picked):
            best = min(best, search.cost())
    start: list[Assignment] = [()] * len(search.menus)
    cost, plan = search.chain(start, 600)
    assert cost == best
    assert search.delta.start(plan)
    assert search.cost() == best


def test_a_chain_ends_where_half_of_its_budget_brings_nothing() -> None:
    search = searching(random_graph(Random(0), 2), TWO)
    proposed: list[int] = []
    change = search.delta.change
    search.delta.change = lambda *given: proposed.append(1) or change(*given)  # type: ignore[method-assign, func-returns-value]
    search.chain([()] * len(search.menus), 1000)
    assert 500 <= len(proposed) < 1000


def test_memory_above_the_limit_costs_a_millisecond_a_megabyte() -> None:
    roomy, tight = searching(model(2), FOUR), searching(model(2), FOUR, limit=0)
    for search in (roomy, tight):
        assert search.delta.start([()] * len(search.menus))
    held = roomy.delta.held_bytes()
    assert held > 0
    assert tight.cost() - roomy.cost() == pytest.approx(held / 1e6 * 1e9)


def test_calls_of_a_block_may_differ() -> None:
    """Blocks whose weights are worth splitting otherwise stand for themselves."""
    search = searching(model(2), TWO)
    up = [search.delta.program.index[f"{i}.up:linear#0"] for i in range(2)]
    assert up[0] != up[1]
    assert search.delta.start([()] * len(search.menus))
    change = search.delta.change(up[0], (("n", ("a0",)),))
    assert change is not None
    search.delta.accept(change)
    keyed: Mapping[str, object] = {
        n.key: n.factors for n in search.delta.nodes(search.delta.assignments())
    }
    assert keyed["0.up:linear#0"] != keyed["1.up:linear#0"]
    assert search.delta.passes[KEPT] > 0
