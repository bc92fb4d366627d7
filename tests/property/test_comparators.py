"""Methods of other systems: what they find against enumeration; whether their plans are legal."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp, inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.candidates import COMPARATORS, candidates
from parloom.comparators import alpa, chains
from parloom.comparators.call_costs import Assignment, CallCosts
from parloom.comparators.chains import BETA, acceptance
from parloom.comparators.delta import Delta
from parloom.comparators.flexflow import Search
from parloom.comparators.ilp import least
from parloom.comparators.layers import chain_of, clustered
from parloom.comparators.plans import asked_program, communicated, planned, samples_of
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.stages import simulate_stages
from parloom.cost.walk import Walker
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Cluster, Mesh, MeshAxis
from parloom.ir.plan import ActivationDecision, Decisions, one_stage
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph
from parloom.search.choices import Menus, assignments
from parloom.search.fates import REGATHER, REMAKE
from parloom.search.layout_model import ROWS, LayoutModel
from parloom.search.meshes import logical_meshes
from parloom.search.model import Floats, Model, Term, Variable, View
from parloom.search.prices import BACKWARD, BACKWARD_SENT, FORWARD, FORWARD_SENT, KEPT
from parloom.search.request import Request
from parloom.search.solve.elimination import Elimination
from parloom.search.step_rows import NUM_ROWS
from parloom.search.storage import AFTER, REDUCED, UPDATED, Level
from tests.examples import examples
from tests.property.estimate import estimate
from tests.property.searched import ADAM, random_graph
from tests.property.test_solvers import enumerated, models
from tests.unit.test_simulate import model

ONE, TWO, FOUR, EIGHT, SIX = (
    load_cluster(spec) for spec in ("1xH100", "2xH100", "2x2xH100", "2x4xH100", "2x3xH100")
)
METHODS = tuple(COMPARATORS)
PLENTY = 10**15
BASE = Decisions()


def request_of(graph: Graph, cluster: Cluster, budget: int = 300, seed: int = 0) -> Request:
    return Request(graph, DataSheets(cluster), ADAM, PLENTY, seed=seed, budget=budget)


def silent(text: str) -> None:
    """Drop progress."""


def plans(method: str, asked: Request) -> list[Decisions]:
    return list(COMPARATORS[method](asked, BASE, silent))


# Every method.


def enough(method: str, graph: Graph, count: int) -> bool:
    """Whether there are items, or layers, for so many stages."""
    if method == "gpipe":
        return len(stage_items(graph)) >= count
    return len(clustered(chain_of(graph, factorize(graph)), 2 * count)) >= count


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
@examples(8)
@given(st.integers(0, 10**6))
def test_plans_are_legal_and_use_the_whole_cluster(method: str, seed: int) -> None:
    """FlexFlow's placements may leave devices idle."""
    rng = Random(seed)
    cluster = rng.choice((TWO, FOUR, SIX, EIGHT))
    graph = random_graph(rng)
    if method in ("gpipe", "alpa_inter") and not enough(method, graph, cluster.num_devices):
        with pytest.raises(InputError, match=f"do not make {cluster.num_devices} stages, one each"):
            plans(method, request_of(graph, cluster, 60))
        return
    found = plans(method, request_of(graph, cluster, 60))
    assert found
    for plan in found:
        placed = method == "flexflow" and len(plan.stages) > 1
        assert plan.num_ranks == cluster.num_devices or (placed and plan.num_ranks > 1)
        lowered = lower_stages(graph, plan)
        assert simulate_stages(lowered, cluster, plan, ADAM).step_ps > 0


@pytest.mark.parametrize("method", METHODS)
def test_one_device_has_nothing_to_choose(method: str) -> None:
    asked = replace(request_of(model(), ONE), method=method)
    (plan,) = candidates(asked, silent).found
    assert plan.decisions.mesh.num_ranks == 1
    lower(model(), plan.decisions)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_question_has_the_same_plans(method: str) -> None:
    cluster = TWO if method in ("gpipe", "alpa_inter") else EIGHT  # the model has few items
    one, other = (plans(method, request_of(model(), cluster)) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("method", METHODS)
def test_plans_have_as_many_microbatches_as_asked(method: str) -> None:
    asked, base = request_of(model(2), TWO, 60), replace(BASE, num_microbatches=4)
    for plan in COMPARATORS[method](replace(asked, num_microbatches=4), base, silent):
        assert plan.num_microbatches == 4
        assert simulate_stages(lower_stages(model(2), plan), TWO, plan, ADAM).step_ps > 0
    with pytest.raises(InputError, match="7 microbatches: the samples do not divide"):
        list(COMPARATORS[method](asked, replace(BASE, num_microbatches=7), silent))


def sent_ps(graph: Graph, plan: Decisions, cluster: Cluster) -> float:
    """What a step of a lowered plan sends; infinite where the plan is not legal."""
    try:
        pcg = lower(graph, plan)
    except LayoutError:
        return inf
    found = estimate(pcg, Walker(pcg.by_name, pcg.mesh, cluster), ADAM)
    weights = found.weights[REDUCED] + found.weights[AFTER] - found.weights[UPDATED]
    passes = found.passes[[FORWARD_SENT, BACKWARD_SENT]].sum()
    return float(plan.num_microbatches * passes + weights)


# alpa.


@examples(60)
@given(models())
def test_the_integer_program_finds_the_minimum(drawn: tuple[Model, Floats]) -> None:
    some, prices = drawn
    expected, every = enumerated(some, prices * 1e9)
    found = least(some, prices * 1e9)
    assert (found is None) == (expected == inf)
    if found is not None:
        assert found.cost == pytest.approx(expected, abs=10)
        assert every[found.values] == pytest.approx(expected, abs=10)


@examples(6)
@given(st.integers(0, 10**6), st.sampled_from([TWO, FOUR]), st.sampled_from([1, 2]))
def test_alpa_finds_what_enumeration_of_its_space_finds(
    seed: int, cluster: Cluster, count: int
) -> None:
    """Of lowered plans, each walked by itself; weights that are read twice included."""
    graph = random_graph(Random(seed), 3)
    base = replace(BASE, num_microbatches=count)
    program = asked_program(request_of(graph, cluster), base)
    for mesh in alpa.views(cluster):
        walker, asked = Walker({}, mesh, cluster), request_of(graph, cluster)
        layouts = alpa.layouts_of(program, walker, base, asked.optimizer, samples_of(program))
        followed = alpa.followers(layouts, samples_of(program))
        found = alpa.solve(layouts, followed, count, 10_000)
        assert found is not None

        def sent(values: tuple[int, ...], layouts: LayoutModel = layouts) -> float:
            levels = [Level() for _ in program.weights]
            return sent_ps(graph, planned(layouts, values, levels, base), cluster)

        leaders = sorted({i for i in followed.leader if i < len(layouts.options)})
        best = inf
        for picked in product(*(range(len(layouts.variables[leader])) for leader in leaders)):
            at = dict(zip(leaders, picked, strict=True))
            every = zip(followed.leader, followed.values, strict=True)
            best = min(best, sent(tuple(int(v[at.get(leader, 0)]) for leader, v in every)))
        assert found.cost == pytest.approx(best, rel=1e-6, abs=1)
        assert sent(found.values) == pytest.approx(best, rel=1e-6, abs=1)


@examples(6)
@given(st.integers(0, 10**6))
def test_without_followers_the_program_agrees_with_elimination(seed: int) -> None:
    graph = random_graph(Random(seed))
    program = asked_program(request_of(graph, FOUR), BASE)
    for mesh in logical_meshes(FOUR):
        walker = Walker({}, mesh, FOUR)
        layouts = alpa.layouts_of(program, walker, BASE, ADAM, None)
        found = alpa.solve(layouts, alpa.nobody(layouts), 1, 10_000)
        assert found is not None
        exact = Elimination(layouts.model(several(layouts)))
        assert found.cost == pytest.approx(exact.minimum(communicated(1))[0], rel=1e-6, abs=1)


class Underpaid:
    """One variable; its first option costs 3 in truth, of which its readers' shares say 1."""

    parts = None

    def model(self, joint: Collection[int] = ()) -> Model:
        costs = np.array([[[3e9 if joint else 1e9], [2e9]]])
        sent = slice(FORWARD_SENT, FORWARD_SENT + 1)
        term = Term((View(0, np.arange(2), 2),), ((costs, None),), sent)
        return Model(ROWS, (Variable("v", (0, 1)),), (term,))

    def evaluate(self, values: Sequence[int], prices: Floats) -> Floats:
        rows = np.zeros(NUM_ROWS)
        rows[FORWARD_SENT] = (3e9, 2e9)[values[0]]
        return rows

    def unshared(self, values: Sequence[int], prices: Floats) -> dict[int, float]:
        return {} if values[0] else {0: 2e9}


def test_where_the_shares_of_readers_are_too_little_alpa_solves_again() -> None:
    followed = alpa.Followed((0,), (np.arange(2),))
    assert alpa.solve(Underpaid(), followed, 1, 100) == alpa.Answer((1,), 2e9)


def test_a_view_of_alpa_keeps_its_inner_axis_in_a_node() -> None:
    views = [[axis.size for axis in mesh.axes] for mesh in alpa.views(load_cluster("4x4xH100"))]
    assert sorted(views) == [[4, 4], [8, 2], [16]]


def test_alpa_splits_products_over_all_devices_and_samples_over_the_first_axis() -> None:
    for plan in plans("alpa_intra", request_of(model(), EIGHT)):
        products = [n for n in plan.nodes if "linear" in n.key]
        assert products
        for node in products:
            axes = [axis for _, some in node.factors for axis in some]
            assert sorted(axes) == sorted(plan.mesh.names)
            if len(plan.mesh.axes) > 1:
                assert plan.mesh.names[1] not in dict(node.factors).get("d0", ())


def test_alpa_scatters_gradients_that_are_summed() -> None:
    """And with several microbatches it adds them up first."""
    asked = request_of(model(), TWO)
    for count in (1, 2):
        base = replace(BASE, num_microbatches=count)
        (plan,) = COMPARATORS["alpa_intra"](replace(asked, num_microbatches=count), base, silent)
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


def searching(
    graph: Graph, cluster: Cluster, seed: int = 0, limit: int = PLENTY, count: int = 1
) -> Search:
    base = replace(BASE, num_microbatches=count)
    program = asked_program(request_of(graph, cluster), base, apart=True)
    walker = Walker({}, fine(cluster), cluster)
    delta = Delta(CallCosts(program, walker, base, ADAM), count)
    return Search(delta, limit, Random(seed))


def whole(search: Search) -> list[Assignment]:
    """Nothing is split."""
    return [()] * len(search.factors)


def splits(search: Search, index: int) -> list[Assignment]:
    """Every split that an operator may have."""
    rule, factors = search.delta.program.operators[index].rule, {*search.factors[index]}
    every = (a for a in assignments(rule, search.mesh) if a.keys() <= factors)
    return [tuple(sorted(one.items())) for one in every]


def lowered_ps(search: Search, graph: Graph, cluster: Cluster) -> int:
    delta = search.delta
    asked = tuple(ActivationDecision(p, "recompute") for p in graph.recomputed_calls)
    plan = Decisions(
        one_stage(delta.costs.mesh),
        delta.nodes(delta.assignments()),
        (),
        asked,
        delta.passes.num_microbatches,
    )
    pcg = lower(graph, plan)
    return estimate(pcg, Walker(pcg.by_name, pcg.mesh, cluster), ADAM).step_ps


def checkpointed(graph: Graph) -> Graph:
    """The graph with its calls checkpointed by the user's model."""
    calls = (item.prefix for item in graph.main.body if isinstance(item, Call))
    return replace(graph, recompute=tuple(calls))


@examples(12)
@given(st.integers(0, 10**6))
def test_the_running_estimate_is_that_of_the_lowered_plan(seed: int) -> None:
    """After every change, with blocks whose calls differ or are checkpointed, for weights that are
    shared, and with microbatches.
    """
    rng = Random(seed)
    graph = model(3) if rng.random() < 0.5 else random_graph(rng, 4)
    if rng.random() < 0.5:
        graph = checkpointed(graph)
    cluster = rng.choice((TWO, FOUR, SIX))
    search = searching(graph, cluster, seed, count=rng.choice((1, 2)))
    assert search.delta.start(whole(search))
    for _ in range(6):
        index = rng.choice(search.free)
        change = search.delta.change(index, search.draw(index))
        if change is not None:
            search.delta.accept(change)
            assert search.delta.sums().step_ps == lowered_ps(search, graph, cluster)


@examples(12)
@given(st.integers(0, 10**6))
def test_what_is_kept_is_the_least_that_the_layout_model_counts(seed: int) -> None:
    """Without recomputation; once, where a producer keeps what its reader keeps, too."""
    rng = Random(seed)
    graph = model(2) if rng.random() < 0.4 else random_graph(rng, 4)
    search = searching(graph, TWO, seed)
    delta = search.delta
    assert delta.start(whole(search))
    for index in search.free:
        change = delta.change(index, search.draw(index))
        if change is not None:
            delta.accept(change)
    walker = Walker({}, delta.costs.mesh, TWO)
    every = Menus(delta.program, delta.costs.prices.single)
    given_menus = [every.of(i, [dict(a)]) for i, a in enumerate(delta.assignments())]
    layouts = LayoutModel(delta.program, walker, BASE, ADAM, given=given_menus)
    allowed = [np.ones(len(v), dtype=bool) for v in layouts.model(several(layouts)).variables]
    for some, options in zip(allowed, layouts.options, strict=False):
        for value in range(len(some)):
            some[value] = options.option(value)[1] not in (REGATHER, REMAKE)
    small, kept = layouts.model(several(layouts)).restricted(allowed)
    prices = np.zeros(NUM_ROWS)
    # What is recomputed would hold less, and costs more than any byte.
    prices[[FORWARD, FORWARD_SENT, BACKWARD, BACKWARD_SENT]], prices[KEPT] = 1e6, 1.0
    _, found = Elimination(small).minimum(prices)
    values = [int(k[v]) for k, v in zip(kept, found, strict=True)]
    assert delta.rows[KEPT] == layouts.evaluate(values, prices)[KEPT]


def several(layouts: LayoutModel) -> list[int]:
    """The flows that several readers share."""
    return [number for number, edges in enumerate(layouts.flows.edges) if len(edges) > 1]


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
    assert search.delta.start(whole(search))
    assert search.delta.rows[KEPT] == 512 * 512 * 4
    # Split over rows, its maker keeps a part, and the product what was gathered.
    rows = next(way for way in splits(search, 1) if "d0" in dict(way))
    change = search.delta.change(1, rows)
    assert change is not None
    assert change.rows[KEPT] == 512 * 512 * 4 + 512 * 512 * 4 // 2


def test_what_a_view_reads_is_kept_for_the_reader_of_the_view() -> None:
    """Once, and as a copy where the reader wants it in another layout."""
    graph = parse_graph(
        'graph "G" training=True\n\n'
        'input v: float32[512, 512] = parameter("v", trainable=True)\n'
        'input w: float32[512, 512] = parameter("w", trainable=True)\n'
        'input x: float32[64, 512] = batch("x")\n\nmain main:\n'
        "    a: float32[64, 512] = linear(x, w)  # a\n"
        "    b: float32[8, 8, 512] = view(a, (8, 8, 512))  # b\n"
        "    c: float32[8, 8, 512] = linear(b, v)  # c\n"
        "    loss: float32[] = sum(c)\n    return loss\n\nloss loss\n"
    )
    search = searching(graph, TWO)
    assert search.delta.start(whole(search))
    assert search.delta.rows[KEPT] == 64 * 512 * 4
    change = search.delta.change(2, (("d0", ("a0",)),))
    assert change is not None
    assert change.rows[KEPT] == 64 * 512 * 4 // 2


def test_a_change_that_is_not_accepted_leaves_no_trace() -> None:
    search = searching(model(2), FOUR)
    assert search.delta.start(whole(search))
    before = search.cost(), search.delta.assignments()
    index = search.free[0]
    change = search.delta.change(index, splits(search, index)[-1])
    assert change is not None
    assert search.cost(change) != before[0]
    assert (search.cost(), search.delta.assignments()) == before


def test_worse_proposals_are_accepted_as_metropolis_and_hastings_say() -> None:
    ms = 1e9
    assert acceptance(10 * ms, 9 * ms, 10 * ms) == 1.0
    assert acceptance(10 * ms, 10 * ms, 10 * ms) == 1.0
    for scale in (1 * ms, 100 * ms):  # of the step, so that no unit of time matters
        slower = scale * (1 + 2 / BETA)
        assert acceptance(scale, slower, scale) == pytest.approx(exp(-2.0))


def test_proposals_are_drawn_alike_from_all_splits() -> None:
    """Over any of the links, on one factor or several."""
    search = searching(model(2), EIGHT)
    (index,) = {i for i in search.free[:1]}
    every = splits(search, index)
    assert len(every) > 3 ** len(search.mesh.axes) / 2
    drawn = [search.draw(index) for _ in range(60 * len(every))]
    counts = [drawn.count(one) for one in every]
    assert sum(counts) == len(drawn)
    assert 30 < min(counts) <= max(counts) < 100


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_reaches_the_optimum_of_a_tiny_graph(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it accepts enough that is worse."""
    monkeypatch.setattr(chains, "BETA", 1.0)
    graph = random_graph(Random(seed), 2)
    search = searching(graph, TWO, seed)
    best = inf
    for picked in product(*(splits(search, index) for index in range(len(search.factors)))):
        if search.delta.start(picked):
            best = min(best, search.cost())
    cost, plan = search.chain(whole(search), 1200)
    assert cost == best
    assert search.delta.start(plan)
    assert search.cost() == best


def test_a_chain_ends_where_half_of_its_budget_brings_nothing() -> None:
    search = searching(random_graph(Random(0), 2), TWO)
    proposed: list[int] = []
    change = search.delta.change
    search.delta.change = lambda *given: proposed.append(1) or change(*given)  # type: ignore[method-assign, func-returns-value]
    search.chain(whole(search), 1000)
    assert 500 <= len(proposed) < 1000


def test_memory_above_the_limit_costs_a_millisecond_a_megabyte() -> None:
    roomy, tight = searching(model(2), FOUR), searching(model(2), FOUR, limit=0)
    for search in (roomy, tight):
        assert search.delta.start(whole(search))
    held = roomy.delta.sums().held_bytes
    assert held > 0
    assert tight.cost() - roomy.cost() == pytest.approx(held / 1e6 * 1e9)


def test_calls_of_a_block_may_differ() -> None:
    """Blocks whose weights are worth splitting otherwise stand for themselves."""
    search = searching(model(2), TWO)
    up = [search.delta.program.index[f"{i}.up:linear#0"] for i in range(2)]
    assert up[0] != up[1]
    assert search.delta.start(whole(search))
    change = search.delta.change(up[0], (("n", ("a0",)),))
    assert change is not None
    search.delta.accept(change)
    keyed: Mapping[str, object] = {
        n.key: n.factors for n in search.delta.nodes(search.delta.assignments())
    }
    assert keyed["0.up:linear#0"] != keyed["1.up:linear#0"]
    assert search.delta.rows[KEPT] > 0


def test_what_is_checkpointed_is_not_kept_and_runs_again() -> None:
    plain, again = searching(model(2), TWO), searching(checkpointed(model(2)), TWO)
    for search in (plain, again):
        assert search.delta.start(whole(search))
    assert again.delta.rows[KEPT] == 0 < plain.delta.rows[KEPT]
    more = sum(plain.delta.terms["operator", index][FORWARD] for index in again.delta.costs.again)
    assert again.delta.rows[BACKWARD] == plain.delta.rows[BACKWARD] + more
