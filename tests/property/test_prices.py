"""Prices of the search against the cost layer, for random plans of small graphs: what storage
takes, and how far the estimate of a step is from the simulated one.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.comparators.baselines import random_plan
from parloom.cost.clusters import load_cluster
from parloom.cost.parameters import Parameters, Transfer
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, TensorSpec
from parloom.ir.layout import Layout
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from parloom.ir.step_program import EACH_MICROBATCH, EACH_STEP
from parloom.ir.text import parse_graph
from parloom.search.folding import reached
from parloom.search.least import batch_bytes
from parloom.search.meshes import logical_meshes
from parloom.search.storage import (
    AFTER,
    ALONE,
    CHUNKED,
    COLLECTED,
    MOVING,
    REDUCED,
    STORED,
    UPDATED,
    UPDATING,
    StoragePrices,
    StoredWeight,
)
from tests.property.estimate import estimate
from tests.property.searched import ADAM, counted_bytes, random_graph
from tests.unit.test_simulate import chunked, model

CLUSTERS = tuple(map(load_cluster, ("2x2xH100", "8xV100-16GB", "2x2xcpu")))
# Scalars are not counted, messages are shared evenly, and what overlaps is summed up: of 1,000
# random plans none was further from the simulated step than this factor, one way or the other.
APART = 1.5


def planned(seed: int, cluster: Cluster, blocks: bool) -> tuple[Decisions, PCG]:
    """A random plan whose weights are stored at a level of the search each, at random."""
    rng = Random(seed)
    graph = model(3) if blocks else random_graph(rng, num_operators=4)
    factored, mesh = factorize(graph), rng.choice(list(logical_meshes(cluster)))
    plan = replace(random_plan(graph, factored, mesh, seed), parameters=())
    plan = replace(plan, reduce_dtype=None, master_dtype=None)
    storage = StoragePrices(Walker({}, mesh, cluster), plan, ADAM)
    stored = []
    for parameter in lower(graph, plan, factored=factored).parameters:
        spec = parameter.input.value.spec
        weight = StoredWeight(
            spec, parameter.input.trainable, False, parameter.layout, parameter.reduce
        )
        level = rng.choice(storage.options(weight)[0])
        stored += [level.decision(parameter.input.target)] if level.optimizer else []
    plan = replace(plan, parameters=tuple(stored))
    return plan, lower(graph, plan, factored=factored)


@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS), st.booleans())
def test_what_is_stored_is_what_the_cost_layer_counts(
    seed: int, cluster: Cluster, blocks: bool
) -> None:
    """Weights, gradients and states, to the byte; gradients of main's own weights that are in
    chunks are whole at once. And the update, but for its launch.
    """
    plan, pcg = planned(seed, cluster, blocks)
    walker = Walker({}, plan.mesh, cluster)
    found = estimate(pcg, walker, ADAM).weights
    costs = Parameters(pcg, walker, plan, ADAM)
    gathered = updated = buffers = 0
    trained = reached(pcg.graph)
    for parameter in pcg.parameters:
        chunked = bool(parameter.decision.weight.axes)
        if parameter.decision.weight != parameter.decision.optimizer:
            buffers += costs.kept_bytes(parameter)
        if parameter.input.value.name not in trained:
            continue
        if chunked and not blocks:
            gathered += costs.gradient_bytes(parameter)
            buffers += 2 * costs.home_bytes(parameter)
        if parameter.decision.optimizer.axes or not costs.reduces(parameter):
            updated += costs.updated_gradient_bytes(parameter)
    known = int(found[STORED] + found[COLLECTED]) - sum(costs.stored_bytes().values())
    assert known == buffers or blocks
    assert int(found[MOVING]) == gathered
    if cluster.backend != "gloo":
        assert int(found[UPDATING]) == sum(costs.update_sizes()) + updated
    launch = walker.kernels.software.launch_s
    update_ps = (costs.update().price.compute_s - launch) * 1e12
    assert abs(int(found[UPDATED]) - update_ps) <= len(pcg.parameters)


def counted_and_held(graph: Graph, plan: Decisions, cluster: Cluster) -> tuple[int, int]:
    """What the model counts of a step, and what it is simulated to hold but for the batch."""
    pcg = lower(graph, plan)
    kept = priced(pcg, cluster, plan, ADAM).main.inside_bytes
    found = estimate(pcg, Walker({}, pcg.mesh, cluster), ADAM).weights
    counted = counted_bytes(kept, found, plan.num_microbatches)
    return counted, simulate(pcg, cluster, plan, ADAM).peak_bytes - batch_bytes(graph)


@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS), st.sampled_from([1, 2, 4]))
def test_no_more_is_counted_than_a_simulated_step_holds(
    seed: int, cluster: Cluster, count: int
) -> None:
    plan, pcg = planned(seed, cluster, blocks=False)
    plan = replace(plan, num_microbatches=count)
    counted, held = counted_and_held(pcg.graph, plan, cluster)
    assert counted <= held


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_no_more_is_counted_of_blocks_than_a_simulated_step_holds(
    cluster: Cluster, level: int, depth: int
) -> None:
    for count in (1, 2, 4):
        plan = chunked(cluster, depth=depth, level=level, num_microbatches=count)
        counted, held = counted_and_held(model(depth), plan, cluster)
        assert counted <= held


@pytest.mark.parametrize("level", [0, 3])
def test_all_that_a_step_holds_between_its_passes_is_counted(level: int) -> None:
    """So that to count more would be to count what is not there."""
    plan = chunked(CLUSTERS[1], depth=6, level=level, num_microbatches=2)
    pcg = lower(model(6), plan)
    counted = estimate(pcg, Walker({}, pcg.mesh, CLUSTERS[1]), ADAM).weights[STORED]
    *base, buffers = simulate(pcg, CLUSTERS[1], plan, ADAM).processes[0].base
    assert buffers == batch_bytes(pcg.graph)
    assert sum(base) - 6 <= counted <= sum(base)


@given(
    st.integers(1, 400), st.sampled_from([1, 7, 4096]), st.sampled_from(CLUSTERS), st.booleans(),
    st.data(),
)  # fmt: skip
def test_storage_that_is_left_out_is_nowhere_better(
    rows: int, columns: int, cluster: Cluster, block: bool, data: st.DataObject
) -> None:
    mesh = data.draw(st.sampled_from(list(logical_meshes(cluster))))
    reduce = tuple(a for a in mesh.names if data.draw(st.booleans()))
    storage = StoragePrices(Walker({}, mesh, cluster), Decisions(one_stage(mesh)), ADAM)
    weight = StoredWeight(
        TensorSpec((rows, columns), "float32"), True, block, Layout(), reduce, 9 * rows, units=3
    )
    _, prices = storage.options(weight)
    every = list(storage._levels(weight))
    assert len(set(every)) == len(every) == {1: 4, 2: 13}[len(mesh.names)]
    for level in every:
        assert (prices <= storage.price(weight, level)).all(-1).any()


@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from(CLUSTERS), st.integers(1, 2), st.data()
)
def test_what_a_weight_sends_is_what_the_lowered_plan_sends(
    rows: int, columns: int, cluster: Cluster, count: int, data: st.DataObject
) -> None:
    """Gathers, reductions of each microbatch and each step, and what is gathered at the end."""
    graph = parse_graph(
        f'graph "One" training=True\n\ninput w: float32[{rows}, {columns}] = parameter("w",'
        f' trainable=True)\ninput x: float32[64, {columns}] = batch("x")\n\nmain main:\n'
        f"    y: float32[64, {rows}] = linear(x, w)  # m\n    loss: float32[] = sum(y)\n"
        "    return loss\n\nloss loss\n"
    )
    mesh = data.draw(st.sampled_from(list(logical_meshes(cluster))))
    # Along the axes that split nothing all ranks have the same gradient.
    split = tuple(a for a in mesh.names if data.draw(st.booleans()))
    nodes = tuple(NodeDecision(key, (("d0", split),)) for key in ("m:linear#0", ":sum#0"))
    plan = Decisions(one_stage(mesh), nodes, num_microbatches=count)
    walker = Walker({}, mesh, cluster)
    storage = StoragePrices(walker, plan, ADAM)
    (parameter,) = lower(graph, plan).parameters
    reduce = tuple(a for a in parameter.reduce if a in mesh.names)
    stored = StoredWeight(
        parameter.input.value.spec, True, False, parameter.layout, reduce, last=False
    )
    level = data.draw(st.sampled_from(storage.options(stored)[0]))
    found = storage.price(stored, level)
    plan = replace(plan, parameters=(level.decision("w"),))
    pcg = lower(graph, plan)
    costs = priced(pcg, cluster, plan, ADAM)

    def ps(transfers: Iterable[Transfer]) -> float:
        return sum(e.seconds for t in transfers for e in t.exchanges) * 1e12

    early = ps(t for t in costs.reductions if t.when == EACH_MICROBATCH)
    late = ps(t for t in costs.reductions if t.when == EACH_STEP)
    each, once = early + ps(costs.parameters.gathers), late + ps(costs.parameters.publications)
    assert abs(found[[ALONE, CHUNKED]].sum() - each) < 5
    assert abs(found[[REDUCED, AFTER]].sum() - found[UPDATED] - once) < 5


@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS), st.booleans())
def test_the_estimate_is_near_the_simulation(seed: int, cluster: Cluster, blocks: bool) -> None:
    plan, pcg = planned(seed, cluster, blocks)
    expected = estimate(pcg, Walker({}, plan.mesh, cluster), ADAM).step_ps
    played = simulate(pcg, cluster, plan, ADAM).step_s * 1e12
    assert abs(log(played / expected)) <= log(APART)
