"""Prices of the search against the cost layer, for random plans of small graphs: what storage
takes, and how far the estimate of a step is from the simulated one.
"""

from dataclasses import replace
from math import log
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.parameters import Parameters
from parloom.cost.simulate import simulate
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.search.baselines import random_plan
from parloom.search.estimate import estimate
from parloom.search.meshes import logical_meshes
from parloom.search.storage import STORED, UPDATED, StoragePrices, Stored
from tests.property.searched import ADAM, random_graph
from tests.unit.test_simulate import model

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
        weight = Stored(spec, parameter.input.trainable, False, parameter.layout, parameter.reduce)
        level = rng.choice(storage.options(weight)[0])
        stored += [level.decision(parameter.input.target)] if level.axes else []
    plan = replace(plan, parameters=tuple(stored))
    return plan, lower(graph, plan, factored=factored)


@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS), st.booleans())
def test_what_is_stored_is_what_the_cost_layer_counts(
    seed: int, cluster: Cluster, blocks: bool
) -> None:
    """Weights, gradients and states, to the byte; main's own weights are there whole while they are
    in chunks, with their gradients. And the update, but for its launch.
    """
    plan, pcg = planned(seed, cluster, blocks)
    walker = Walker({}, plan.mesh, cluster)
    found = estimate(pcg, walker, ADAM).weights
    costs = Parameters(pcg, walker, plan, ADAM)
    gathered = 0
    for parameter in pcg.parameters:
        if parameter.decision.weight.axes and parameter.input.target[0] == "w":
            gathered += costs.home_bytes(parameter) + costs.gradient_bytes(parameter)
    assert int(found[STORED]) == sum(costs.stored_bytes().values()) + gathered
    launch = walker.kernels.software.launch_s
    update_ps = (costs.update().price.compute_s - launch) * 1e12
    assert abs(int(found[UPDATED]) - update_ps) <= len(pcg.parameters)


@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS), st.booleans())
def test_the_estimate_is_near_the_simulation(seed: int, cluster: Cluster, blocks: bool) -> None:
    plan, pcg = planned(seed, cluster, blocks)
    expected = estimate(pcg, Walker({}, plan.mesh, cluster), ADAM).step_ps
    played = simulate(pcg, cluster, plan, ADAM).step_s * 1e12
    assert abs(log(played / expected)) <= log(APART)
