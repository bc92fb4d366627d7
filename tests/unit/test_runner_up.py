"""The next best way of an operator or parameter is that of an enumeration."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.comparators.baselines import data_parallel, fsdp, megatron, random_plans
from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.cost.timeline import Timeline
from parloom.errors import LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision, Storage
from parloom.search.runner_up import MOST, Ways, assignment_of, operator_ways, parameter_ways
from tests.examples import examples
from tests.property.searched import every_assignment
from tests.unit.explained import ADAM
from tests.unit.graphs import stack

CLUSTER = load_cluster("2x2xcpu")
GRAPH = stack(2)
FACTORED = factorize(GRAPH)
PLENTY = 2**60


def play(pcg: PCG, plan: Decisions) -> Timeline:
    return simulate(pcg, CLUSTER, plan, ADAM)


def flat_of(key: str, graph: Graph = GRAPH) -> FlatNode:
    return next(flat for flat in graph.flat() if flat.key == key)


def ways_of(plan: Decisions, key: str, limit: int = PLENTY, most: int = MOST) -> Ways:
    pcg = lower(GRAPH, plan)
    walker = priced(pcg, CLUSTER, plan, ADAM).walker
    return operator_ways(
        FACTORED, pcg, walker, flat_of(key), lambda t: t.peak_bytes <= limit, play, most
    )


def enumerated(plan: Decisions, key: str) -> list[tuple[int, int]]:
    """(step, peak) of every other assignment, all calls changed that are assigned alike."""
    flat = flat_of(key)
    now = assignment_of(plan, key)
    alike = {
        f.key
        for f in GRAPH.flat()
        if (f.function, f.node) == (flat.function, flat.node) and assignment_of(plan, f.key) == now
    }
    others = tuple(n for n in plan.nodes if n.key not in alike)
    found = []
    for factors in every_assignment(FACTORED.rule(flat.function, flat.node), plan.mesh):
        changed = tuple(NodeDecision(k, factors) for k in sorted(alike))
        if dict(changed[0].factors) == dict(now):
            continue
        if any(list(axes) != sorted(axes, key=plan.mesh.names.index) for _, axes in factors):
            continue  # no other order of axes on a factor is looked at (docs/explanation/search.md)
        other = replace(plan, nodes=(*others, *changed))
        try:
            played = play(lower(GRAPH, other), other)
        except LayoutError:
            continue
        found.append((played.step_ps, played.peak_bytes))
    return sorted(found)


KEYS = ("blocks.0.up:linear#0", "blocks.1:add#0", "tokens:embedding#0", "head:linear#0")


@pytest.mark.sample(2)
@pytest.mark.parametrize("key", KEYS)
def test_the_best_ways_of_an_operator_are_those_of_an_enumeration(key: str) -> None:
    for plan in (*megatron(GRAPH, CLUSTER), *data_parallel(GRAPH, CLUSTER)):
        found = ways_of(plan, key)
        wanted = enumerated(plan, key)
        assert found.total == len(wanted) == found.tried <= MOST
        assert [(w.timeline.step_ps, w.timeline.peak_bytes) for w in found.best] == wanted[:3]


@examples(4)
@given(st.integers(0, 1000), st.sampled_from(KEYS))
def test_ways_in_any_plan(seed: int, key: str) -> None:
    plan = next(random_plans(GRAPH, CLUSTER, seed=seed))
    plan = replace(plan, parameters=())
    found = ways_of(plan, key)
    wanted = enumerated(plan, key)
    assert [(w.timeline.step_ps, w.timeline.peak_bytes) for w in found.best] == wanted[:3]


@pytest.mark.sample(1)
@pytest.mark.parametrize("key", KEYS)
def test_of_many_ways_the_best_are_tried(key: str) -> None:
    """Prices beside the neighbors put the best way of all among the first third."""
    for count in (1, 2):
        for plan in megatron(GRAPH, CLUSTER, count):
            all_ways = ways_of(plan, key)
            few = max(1, all_ways.total // 3)
            found = ways_of(plan, key, most=few)
            assert found.total == all_ways.total
            assert found.tried <= few
            assert found.best[0].timeline.step_ps == all_ways.best[0].timeline.step_ps


def test_what_is_decided_alike_changes_together() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    found = ways_of(plan, "blocks.0.up:linear#0")
    assert found.keys == ("blocks.0.up:linear#0", "blocks.1.up:linear#0")
    for way in found.best:
        changed = {n.key for n in way.decisions.nodes} ^ {n.key for n in plan.nodes}
        assert changed <= set(found.keys)
        kept = [n for n in way.decisions.nodes if n.key not in found.keys]
        assert kept == [n for n in plan.nodes if n.key not in found.keys]
    nodes = tuple(n for n in plan.nodes if n.key != "blocks.1.up:linear#0")
    assert ways_of(replace(plan, nodes=nodes), "blocks.0.up:linear#0").keys == (
        "blocks.0.up:linear#0",
    )


def test_a_limit_of_memory_picks_another() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    free = ways_of(plan, "head:linear#0")
    assert free.fitting == free.best[0]
    peak = free.best[0].timeline.peak_bytes
    tight = ways_of(plan, "head:linear#0", peak - 1)
    assert tight.fitting is None or tight.fitting.timeline.peak_bytes < peak


def test_storage_gives_way_to_layouts() -> None:
    (plan,) = fsdp(GRAPH, CLUSTER)
    found = ways_of(plan, "blocks.0.up:linear#0")
    for way in found.best:
        by_name = {p.input.target: p for p in way.pcg.parameters}
        weight = by_name["blocks.0.up.weight"]
        assert not set(weight.layout.axes) & set(weight.decision.optimizer.axes)
        other = by_name["blocks.0.down.weight"]
        assert other.decision.weight == Storage(("data",))
    assert found.tried == found.total


def test_the_best_storage_is_that_of_an_enumeration() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    pcg = lower(GRAPH, plan)
    names = ("blocks.0.up.weight", "blocks.1.up.weight")
    parameter = next(p for p in pcg.parameters if p.input.target == names[0])
    walker = priced(pcg, CLUSTER, plan, ADAM).walker
    found = parameter_ways(FACTORED, pcg, walker, ADAM, parameter, names, lambda t: True, play)
    wanted = []
    whole, parts = Storage(), Storage(("data",), 0)
    for storage in ((whole, whole, parts), (whole, parts, parts), (parts, parts, parts)):
        other = replace(plan, parameters=tuple(ParameterDecision(name, *storage) for name in names))
        played = play(lower(GRAPH, other), other)
        wanted.append((played.step_ps, played.peak_bytes))
    assert found.keys == names
    assert [(w.timeline.step_ps, w.timeline.peak_bytes) for w in found.best] == sorted(wanted)
