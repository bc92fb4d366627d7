"""Parts of a graph: what they cost together, and time against memory, against enumeration."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.walk import Walker
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, part_of
from parloom.ir.plan import Decisions
from parloom.ir.text import parse_graph
from parloom.search.closing import TOLERANCE
from parloom.search.estimate import Estimate, estimate
from parloom.search.layouts import LayoutProblem, Multipliers, Totals
from parloom.search.master import MeshSearch
from parloom.search.meshes import logical_meshes
from parloom.search.prices import BACKWARD, FORWARD_SENT, KEPT, PARTS
from parloom.search.program import Flow, Reader, State, program_of
from parloom.search.question import Question
from parloom.search.slices import PerMicrobatch, front, frontier
from parloom.search.storage import WEIGHT_PARTS
from parloom.search.sums import summed
from tests.property.searched import ADAM, every_plan, random_graph
from tests.unit.test_simulate import model

TWO, FOUR = load_cluster("2xH100"), load_cluster("2x2xH100")
PLENTY = 1e15
TIMES = [part for part in range(PARTS) if part != KEPT]


def problem_of(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    part: range | None = None,
    *,
    apart: bool = False,
    in_flight: int = 1,
    num_microbatches: int = 1,
) -> LayoutProblem:
    program = program_of(graph, factorize(graph), apart=apart, part=part)
    walker, base = Walker({}, mesh, cluster), Decisions(mesh, num_microbatches=num_microbatches)
    storage = PerMicrobatch(walker, base, ADAM)
    return LayoutProblem(program, walker, base, ADAM, storage=storage, in_flight=in_flight)


def some_layouts(problem: LayoutProblem, rng: Random) -> tuple[int, ...]:
    """Layouts that may be, the best under random multipliers."""
    some = np.array([rng.random() for _ in range(PARTS)])
    weights = np.array([rng.random() for _ in range(WEIGHT_PARTS)])
    return problem.solve(Multipliers(some, weights)).values


def cut(count: int, rng: Random) -> list[range]:
    """`count` items in up to three parts."""
    ends = sorted({0, count, *(rng.randrange(1, count) for _ in range(rng.randrange(3)))})
    return [range(low, high) for low, high in pairwise(ends)]


def same(whole: LayoutProblem, values: tuple[int, ...], part: LayoutProblem) -> tuple[int, ...]:
    """The same layouts of operators where these are counted otherwise."""
    found = [0] * len(part.sizes)
    for key, index in part.program.index.items():
        at = whole.program.index[key]
        chosen = whole.menus[at].choices[values[at]]
        # What a call without gradients leaves partial is not looked at.
        alike = (c.assignment == chosen.assignment for c in part.menus[index].choices)
        found[index] = list(alike).index(True)
    return tuple(found)


def moved(problem: LayoutProblem, values: tuple[int, ...], index: int) -> Totals:
    """What a flow costs in all calls."""
    return problem.program.flows[index].count * problem._moved(index, values)


def brought(
    problem: LayoutProblem, values: tuple[int, ...], flow: Flow, source: State, readers: set[Reader]
) -> Totals:
    """What it costs in all calls that `readers` of a flow get it from `source`."""
    found, there = np.zeros(PARTS, dtype=np.int64), set[object]()
    for state in (wish(problem, values, reader) for reader in flow.readers if reader in readers):
        wanted = state if flow.differentiable else state.layout
        if wanted not in there:
            there.add(wanted)
            price = problem.prices.movement(flow.spec, flow.differentiable, source, state)
            assert price is not None
            found += flow.count * price
    return found


def wish(problem: LayoutProblem, values: tuple[int, ...], reader: Reader) -> State:
    """How a reader wants its operand."""
    return problem.menus[reader.operator].choices[values[reader.operator]].operands[reader.operand]


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_parts_cost_what_the_whole_costs_without_what_crosses(seed: int) -> None:
    """Every operator and every movement inside a part once, to the picosecond."""
    rng = Random(seed)
    graph = random_graph(rng, num_operators=5) if rng.random() < 0.7 else model(depth=3)
    mesh = rng.choice(list(logical_meshes(FOUR)))
    folded = problem_of(graph, mesh, FOUR)
    values = some_layouts(folded, rng)
    parts = [problem_of(graph, mesh, FOUR, part) for part in cut(len(graph.main.body), rng)]
    total = np.zeros(PARTS, dtype=np.int64)
    for part in parts:
        chosen = same(folded, values, part)
        total += part.passes(chosen)
        for index, flow in enumerate(part.program.flows):
            if flow.operator < 0:
                there = moved(part, chosen, index)
                total -= there
            if flow.like is not None:
                first = wish(part, chosen, flow.like)
                again = brought(part, chosen, flow, first, set(flow.readers))
                assert list(there[TIMES]) == list(again[TIMES])
    # Every call by itself, as which part a call is in differs from call to call.
    whole = problem_of(graph, mesh, FOUR, apart=True)
    chosen = same(folded, values, whole)
    where = {whole.program.index[key]: part for part in parts for key in part.program.index}
    expected = whole.passes(chosen)
    for index, flow in enumerate(whole.program.flows):
        expected -= moved(whole, chosen, index)
        if flow.operator >= 0:
            source = whole.menus[flow.operator].choices[chosen[flow.operator]].results[flow.result]
            near = {r for r in flow.readers if where[r.operator] is where[flow.operator]}
            expected += brought(whole, chosen, flow, source, near)
    assert list(total[TIMES]) == list(expected[TIMES])


def test_what_crosses_counts() -> None:
    """Negative control: with layouts that change at the cut, a part is cheaper than its share."""
    graph, mesh = model(depth=3), next(iter(logical_meshes(FOUR)))
    folded = problem_of(graph, mesh, FOUR)
    items = range(len(graph.main.body))
    parts = [problem_of(graph, mesh, FOUR, part) for part in (items[:2], items[2:])]
    sent = []
    for seed in range(20):
        values = some_layouts(folded, Random(seed))
        apart = sum(int(part.passes(same(folded, values, part))[FORWARD_SENT]) for part in parts)
        sent.append((apart, int(folded.passes(values)[FORWARD_SENT])))
    assert any(apart < whole for apart, whole in sent)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_every_weight_belongs_to_the_parts_that_read_it(seed: int) -> None:
    rng = Random(seed)
    graph = random_graph(rng, num_operators=5) if rng.random() < 0.7 else model(depth=3)
    factored, items = factorize(graph), list(graph.flat())
    listed = []
    for part in cut(len(graph.main.body), rng):
        program = program_of(graph, factored, part=part)
        targets = [target for weight in program.weights for target in weight.targets]
        read = {n for flat in items if flat.key in program.index for n in flat.operands}
        entries = graph.of_kind("parameter")
        unread = {e.target for e in entries if e.value.name not in graph.uses and not part.start}
        assert set(targets) - unread == {e.target for e in entries if e.value.name in read}
        assert len(set(targets)) == len(targets)
        listed += targets
    assert set(listed) == {entry.target for entry in graph.of_kind("parameter")}


def test_all_items_are_the_whole_graph() -> None:
    graph = model(depth=3)
    factored = factorize(graph)
    every = program_of(graph, factored, part=range(len(graph.main.body)))
    assert every == program_of(graph, factored)


@pytest.mark.parametrize(
    "part", [range(0), range(2, 2), range(-1, 2), range(10**6), range(0, 4, 2)]
)
def test_items_that_main_does_not_have_are_refused(part: range) -> None:
    graph = model(depth=3)
    with pytest.raises(InputError, match="are no part of main, which has"):
        program_of(graph, factorize(graph), part=part)


def test_gradients_flow_in_a_part_as_in_the_whole() -> None:
    """A part of operators without weights still has a backward pass."""
    graph = parse_graph(
        'graph "G" training=True\n\ninput w: float32[512, 512] = parameter("w", trainable=True)\n'
        'input x: float32[512, 512] = batch("x")\n\nmain main:\n'
        "    a: float32[512, 512] = tanh(x)  # a\n    b: float32[512, 512] = linear(a, w)  # b\n"
        "    c: float32[512, 512] = tanh(b)  # c\n    d: float32[512, 512] = tanh(c)  # d\n"
        "    loss: float32[] = sum(d)  # e\n    return loss\n\nloss loss\n"
    )
    (mesh,) = logical_meshes(TWO)
    before, after = (problem_of(graph, mesh, TWO, part) for part in (range(1), range(2, 4)))
    assert not before.passes([0] * len(before.sizes))[BACKWARD]
    assert after.passes([0] * len(after.sizes))[BACKWARD] > 0
    (arriving,) = (flow for flow in after.program.flows if flow.outside)
    assert arriving.differentiable
    # What arrives is kept where its reader needs it (tanh needs its result).
    kept = [p.passes([0] * len(p.sizes))[KEPT] for p in (after, before)]
    assert kept == [2 * 512 * 512 * 4, 0]
    product = problem_of(graph, mesh, TWO, range(1, 2))
    assert product.passes([0] * len(product.sizes))[KEPT] == 512 * 512 * 4


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_microbatches_in_flight_keep_their_activations(seed: int) -> None:
    """As many times as one, in all calls and in one; nothing else changes."""
    rng = Random(seed)
    graph, mesh = model(depth=3), rng.choice(list(logical_meshes(FOUR)))
    one, three = (problem_of(graph, mesh, FOUR, in_flight=count) for count in (1, 3))
    values, times = some_layouts(one, rng), np.where(np.arange(PARTS) == KEPT, 3, 1)
    assert one.passes(values)[KEPT] > 0
    assert list(three.passes(values)) == list(times * one.passes(values))
    for block in one.program.blocks:
        once = one.passes_of(block, values)
        assert list(three.passes_of(block, values)) == list(times * once)


@settings(max_examples=12)
@given(st.integers(0, 10**6))
def test_points_are_what_enumeration_finds(seed: int) -> None:
    """Within the memory of each point, and of the least and the most that any plan takes."""
    rng = Random(seed)
    (mesh,) = logical_meshes(TWO)
    graph = random_graph(rng, num_operators=rng.choice((2, 3)))
    part = rng.choice(cut(len(graph.main.body), rng))
    problem = problem_of(graph, mesh, TWO, part, in_flight=rng.choice((1, 3)))
    every = [summed(*costs) for costs in every_plan(problem)]
    points = front([problem], PLENTY)
    assert points[0].held_bytes == min(plan.held_bytes for plan in every)
    assert points[-1].step_ps <= (1 + TOLERANCE) * min(plan.step_ps for plan in every)
    for point in points:
        least = min(p.step_ps for p in every if p.held_bytes <= point.held_bytes)
        assert point.bound_ps <= least + 0.5
        assert least <= point.step_ps <= least * (1 + TOLERANCE)


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from((2, 16)))
def test_bounds_are_of_steps_of_many_microbatches(seed: int, count: int) -> None:
    rng = Random(seed)
    (mesh,) = logical_meshes(TWO)
    graph = random_graph(rng, num_operators=rng.choice((2, 3)))
    every = [
        (summed(passes, weights).held_bytes, Estimate(passes, weights, count).step_ps)
        for passes, weights in every_plan(problem_of(graph, mesh, TWO))
    ]
    for point in front([problem_of(graph, mesh, TWO, num_microbatches=count)], PLENTY):
        least = min(step for held, step in every if held <= point.held_bytes)
        assert point.bound_ps <= least + 0.5
        assert least <= point.step_ps
        assert count * (point.forward_ps + point.backward_ps) + point.once_ps == point.step_ps
        assert (point.held_bytes, point.step_ps) in every


def test_with_more_microbatches_passes_count_more() -> None:
    """The fastest of many has passes as fast as that of one, and may take longer for the rest."""
    graph = model(depth=3)
    one, many = (
        front(
            [problem_of(graph, m, FOUR, num_microbatches=count) for m in logical_meshes(FOUR)],
            PLENTY,
        )[-1]
        for count in (1, 64)
    )
    each = [point.forward_ps + point.backward_ps for point in (one, many)]
    assert each[1] < each[0]
    assert many.once_ps > one.once_ps


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_a_front_is_strict_and_within_its_limit(seed: int) -> None:
    """Of blocks that may be recomputed, on several meshes: points that add up."""
    rng = Random(seed)
    graph, in_flight = model(depth=4), rng.choice((1, 2, 4))
    part = rng.choice(cut(len(graph.main.body), rng))
    problems = [
        problem_of(graph, mesh, FOUR, part, in_flight=in_flight) for mesh in logical_meshes(FOUR)
    ]
    every = front(problems, PLENTY)
    low, high = every[0].held_bytes, every[-1].held_bytes
    limit = low + rng.random() * (high - low)
    some = front(problems, limit)
    for points in (every, some):
        for less, more in pairwise(points):
            assert less.held_bytes < more.held_bytes
            assert less.step_ps > more.step_ps
    assert some[-1].held_bytes <= limit
    assert some[-1].step_ps >= every[-1].step_ps
    for point in (*every, *some):
        assert point.bound_ps <= point.step_ps + 0.5
        assert point.held_bytes == point.stored_bytes + in_flight * point.kept_bytes
        assert point.step_ps == point.candidate.sums.step_ps
        assert point.forward_ps + point.backward_ps + point.once_ps == point.step_ps


def test_nothing_is_on_a_front_that_does_not_fit() -> None:
    (mesh,) = logical_meshes(TWO)
    problem = problem_of(model(depth=3), mesh, TWO)
    least = front([problem], PLENTY)[0].held_bytes
    assert [point.held_bytes for point in front([problem], least)] == [least]
    assert front([problem], least - 1) == ()


def test_a_bound_is_of_its_memory_only() -> None:
    """Negative control: with more memory there are plans below the bound of the smallest."""
    (mesh,) = logical_meshes(TWO)
    points = front([problem_of(model(depth=3), mesh, TWO)], PLENTY)
    assert len(points) > 2
    assert points[-1].step_ps < points[0].bound_ps


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_all_items_on_some_devices_are_what_the_search_finds_there(devices: int) -> None:
    graph = model(depth=3)
    cluster = part_of(load_cluster("2x4xH100"), devices)
    limit = cluster.device.memory_bytes
    points = frontier(Question(graph, cluster, ADAM, limit))
    estimates = (
        MeshSearch(problem_of(graph, mesh, cluster), limit).run().candidates[0].sums.step_ps
        for mesh in logical_meshes(cluster)
    )
    best = points[-1]
    assert best.mesh.num_ranks == devices
    assert best.step_ps == min(estimates)
    pcg = lower(graph, best.decisions(Decisions(best.mesh)))
    assert estimate(pcg, Walker({}, best.mesh, cluster), ADAM).step_ps == best.step_ps
