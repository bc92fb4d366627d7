"""Plans by cost and by memory, against everything else that is found on small graphs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest

from parloom.candidates import candidates
from parloom.choose import choose
from parloom.cost.cluster_file import read_cluster_text
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.money import HOUR_S, Prices, usd_per_step
from parloom.ir.expected import OF_INFERENCE, Objective, Status
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, HourlyPrice
from parloom.ir.regular_parts import used_devices
from parloom.objectives import proposed, rank, value_of
from parloom.search.request import Request, ScoredPlan
from tests.property.searched import ADAM, random_graph
from tests.property.test_parts import PLENTY, slow
from tests.unit.graphs import perceptron

PRICES = Prices((("", HourlyPrice(2.0, "test")),))
NODES = PRICES.on(load_cluster("2x2xH100"))
LAB = """
name: lab
join: {name: Ethernet, bandwidth: 25Gbit/s}
parts:
  - name: old
    device: V100
    price_per_hour: 1USD
    levels: [{name: NVLink2, size: 2, bandwidth: 150GB/s}]
  - name: new
    device: A100
    price_per_hour: 4USD
    levels: [{name: NVLink3, size: 2, bandwidth: 300GB/s}]
"""


def silent(text: str) -> None:
    """Nothing is said."""


def asked(graph: Graph, cluster: Cluster, objective: Objective, limit: int = PLENTY) -> Request:
    return Request(graph, DataSheets(cluster), ADAM, limit, all_devices=False, objective=objective)


@cache
def others(seed: int, cluster: Cluster) -> tuple[tuple[Cluster, ScoredPlan], ...]:
    """Random plans on every part of a cluster: none of them comes from the search."""

    def drawn() -> Iterator[tuple[Cluster, ScoredPlan]]:
        request = asked(random_graph(Random(seed), 2), cluster, Objective.TIME)
        for own in (request.on(cluster.num_devices), *request.parts()):
            part = replace(own, method="random", seed=seed, budget=20)
            for plan in candidates(part, silent).found:
                yield cluster, plan

    return tuple(drawn())


@pytest.mark.parametrize(("seed", "factor"), [(0, 1.0), (2, 50.0)])
def test_no_other_plan_is_cheaper(seed: int, factor: float) -> None:
    cluster = slow(NODES, factor)
    request = asked(random_graph(Random(seed), 2), cluster, Objective.COST)
    found = choose(request, silent)
    assert found.aim is not None
    assert found.aim.value == usd_per_step(
        cluster, found.best.decisions, found.best.prediction.step_s
    )
    step_s, count = found.best.prediction.step_s, found.best.decisions.num_ranks
    assert found.aim.value == pytest.approx(step_s * count * 2.0 / HOUR_S)
    for there, plan in others(seed, cluster):
        usd = usd_per_step(there, plan.decisions, plan.prediction.step_s)
        assert usd is not None
        assert usd >= found.aim.value * (1 - 1e-9)
        if found.aim.bound:
            assert usd >= found.aim.bound * (1 - 1e-9)
    assert found.bound_s is None
    assert {plan.decisions.num_ranks for plan in found.scored} == {1, 2, 4}


def test_objectives_differ() -> None:
    """Else the tests here would say nothing of any."""
    graph, cluster = random_graph(Random(1), 2), NODES
    of_training = [objective for objective in Objective if objective not in OF_INFERENCE]
    best = {o: choose(asked(graph, cluster, o), silent).best for o in of_training}
    for objective in of_training:
        request = asked(graph, cluster, objective)
        mine = value_of(request, best[objective])
        for other in of_training:
            if other is not objective:
                assert value_of(request, best[other]) > mine


@pytest.mark.parametrize("seed", [1])
def test_no_other_plan_is_smaller(seed: int) -> None:
    request = asked(random_graph(Random(seed), 2), NODES, Objective.MEMORY)
    found = choose(request, silent)
    assert found.aim is not None
    assert found.aim.value == found.best.prediction.peak_bytes
    for _, plan in others(seed, NODES):
        assert plan.prediction.peak_bytes >= found.aim.value
    if found.aim.bound is not None:
        assert found.aim.bound <= found.aim.value
    as_small = [p for p in found.scored if p.prediction.peak_bytes == found.aim.value]
    assert found.best.prediction.step_s == min(p.prediction.step_s for p in as_small)


def test_a_mixed_cluster_is_paid_by_the_type() -> None:
    cluster, _ = read_cluster_text(LAB, "lab.yaml")
    graph = random_graph(Random(2), 2)
    request = asked(graph, cluster, Objective.COST)
    found = choose(request, silent)
    seen = {
        tuple((device.name, count) for device, count in used_devices(cluster, plan.decisions))
        for plan in found.scored
    }
    assert {(("V100-SXM2-16GB", 1),), (("A100-SXM4-80GB", 2),)} <= seen
    dollars = {"V100-SXM2-16GB": 1.0, "A100-SXM4-80GB": 4.0}
    for plan in found.scored:
        used = used_devices(cluster, plan.decisions)
        an_hour = sum(dollars[device.name] * count for device, count in used)
        usd = an_hour * plan.prediction.step_s / HOUR_S
        assert value_of(request, plan) == pytest.approx(usd)
        assert usd >= value_of(request, found.best) * (1 - 1e-9)
    assert found.aim is not None
    assert found.aim.bound is None


def test_sizes_and_devices_that_are_asked_for() -> None:
    request = asked(perceptron(), NODES, Objective.COST)
    found = proposed(replace(request, sizes=(2,)), silent)
    assert {plan.decisions.num_ranks for plan in found.found} == {2}
    whole = proposed(replace(request, all_devices=True, method="fsdp"), silent)
    assert {plan.decisions.num_ranks for plan in whole.found} == {4}


def test_ctrl_c_keeps_the_sizes_that_are_done() -> None:
    def stop(text: str) -> None:
        if text == f"on {last} of 4 devices":
            raise KeyboardInterrupt

    request = asked(perceptron(), NODES, Objective.COST)
    last = 4
    found = proposed(request, stop)
    assert found.status is Status.INTERRUPTED
    assert found.aim_bound is None
    assert {plan.decisions.num_ranks for plan in found.found} == {1, 2}
    last = 1
    with pytest.raises(KeyboardInterrupt):
        proposed(request, stop)


def test_a_device_without_a_price_is_never_the_cheapest() -> None:
    free = load_cluster("2xcpu")
    request = asked(perceptron(), free, Objective.COST)
    (plan, *_) = candidates(replace(request, objective=Objective.TIME), silent).found
    assert value_of(request, plan) == inf
    assert rank(request)(plan)[1] == plan.prediction.step_s
