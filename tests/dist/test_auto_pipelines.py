"""Pipelines that `auto` proposes: equal to one device, within bounds, limits and budgets."""

from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest

from parloom import api, zoo
from parloom.api import Captured
from parloom.capture import capture
from parloom.cost.stages import simulate_stages
from parloom.execute.machine import machine_for
from parloom.ir.factors import factorize
from parloom.ir.lower_stages import lower_stages, staged
from parloom.ir.plan import Optimizer, Plan, Status
from parloom.search.contexts import Contexts
from parloom.search.optimize import least_passes_ps, least_work_ps
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.pipelines.auto import BESIDE_PINS, PipelineSearch
from parloom.search.prices import Prices
from parloom.search.request import Request, base_of

# One worker plans for all tests.
pytestmark = pytest.mark.xdist_group("pipelines that auto proposes")

# Four slow processors over a slow network: only stages keep what is sent small.
CLUSTER = """
name: slow
device:
  name: core
  memory: 2GiB
  memory_bandwidth: 5GB/s
  rates: {fp32: 12GFLOP/s, fp64: 6GFLOP/s, bf16: 12GFLOP/s, fp16: 12GFLOP/s}
  price_per_hour: 0.01USD
backend: gloo
levels:
  - {name: net, size: 4, bandwidth: 100Mbit/s, latency: 200us, efficiency: 0.96}
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("cluster") / "slow.yaml"
    path.write_text(CLUSTER)
    return str(path)


@cache
def captured() -> Captured:
    return api.capture("zoo:gpt", batch=16, seq=32, optimizer="sgd")


@pytest.fixture(scope="module")
def found(slow: str) -> Plan:
    return api.search(captured(), cluster=slow)


def test_a_pipeline_is_the_fastest_over_slow_links(found: Plan, slow: str) -> None:
    """Faster than all plans of one stage, and not below the bound, which is of pipelines, too."""
    assert found.prediction is not None
    assert found.bound_s is not None
    assert len(found.decisions.stages) > 1
    assert found.bound_s <= found.prediction.step_s
    alone = [a.step_s for a in found.alternatives if "stages on" not in a.name]
    assert found.prediction.step_s < min(alone)
    machine = machine_for(slow, None)
    memory = machine.cluster.device.memory_bytes
    request = Request(captured().graph, machine, captured().optimizer, memory, all_devices=False)
    least_s = least_work_ps(Contexts(request, base_of(request))) / 4 / 1e12
    assert found.bound_s <= least_s * (1 + 1e-9)


def test_it_is_equal_to_one_device(found: Plan) -> None:
    report = api.verify(found)
    assert report.passed, str(report)


def test_equal_stages_that_are_lowered_once_take_as_long(found: Plan, slow: str) -> None:
    """What the search plays is what the plan says, to the picosecond."""
    graph, decisions = captured().graph, found.decisions
    machine = machine_for(slow, None)
    factored = factorize(graph)
    shared = AlikeStages().lower(staged(factored, decisions), decisions)
    assert len({id(pcg) for pcg in shared.pcgs}) < len(shared.pcgs)
    apart = lower_stages(graph, decisions, factored=factored)
    assert len({id(pcg) for pcg in apart.pcgs}) == len(apart.pcgs)
    one, other = (
        simulate_stages(lowered, machine.cluster, decisions, captured().optimizer, machine.kernels)
        for lowered in (shared, apart)
    )
    assert one.step_ps == other.step_ps
    assert one.peak_bytes == other.peak_bytes


def test_limits_are_kept(found: Plan, slow: str) -> None:
    assert found.prediction is not None
    limit = int(found.prediction.peak_bytes * 0.8)
    tight = api.search(captured(), cluster=slow, memory=limit)
    assert tight.prediction is not None
    assert tight.prediction.peak_bytes <= limit
    assert tight.prediction.step_s >= found.prediction.step_s


def test_the_same_question_has_the_same_answer(found: Plan, slow: str) -> None:
    again = api.search(captured(), cluster=slow)
    assert again.decisions == found.decisions


def test_a_budget_ends_it(slow: str) -> None:
    whole = api.search(captured(), cluster=slow, budget=40)
    assert whole.status is Status.OUT_OF_BUDGET
    assert whole.bound_s is not None
    assert whole.prediction is not None
    assert whole.bound_s <= whole.prediction.step_s


def test_pins_leave_pipelines_out(slow: str) -> None:
    """And a note says so."""
    pinned = api.search(captured(), cluster=slow, pin=["mesh=x:4"])
    assert len(pinned.decisions.stages) == 1
    assert any(BESIDE_PINS in note for note in pinned.notes), pinned.notes


def test_nodes_of_one_device_have_stages_on_one_device(tmp_path: Path) -> None:
    """Nothing crosses the level inside a node, which has one child: several stages on one device
    were refused there.
    """
    path = tmp_path / "nodes.yaml"
    inside = "  - {name: loopback, size: 1, bandwidth: 1GB/s, latency: 1us}\n  - {name: net"
    path.write_text(CLUSTER.replace("  - {name: net", inside))
    machine = machine_for(str(path), None)
    memory = machine.cluster.device.memory_bytes
    request = Request(captured().graph, machine, captured().optimizer, memory)
    search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
    search._look(1, 4)  # noqa: SLF001 - one context is enough
    several = [split for split in search.splits if len(split.groups) > len(split.costs)]
    assert several
    assert all(search.tried.play(split) is not None for split in several)
    assert not search.tried.refused


SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 1, "seq": 64},
    "mmt": {"batch": 1, "seq": 16, "width": 64, "depth": 2, "heads": 4, "inner": 128},
    "dlrm": {"batch": 2, "tables": 4, "rows": 24, "width": 12, "hidden": 24, "dense": 12, "bag": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_no_pipeline_is_below_the_bound(name: str, slow: str) -> None:
    """One microbatch, branches, split backward passes: where what computes at the same time could
    make it wrong. What all operators compute one after the other is no bound: some are below it.
    """
    graph = capture(*zoo.build(name, **SMALL[name]))
    machine = machine_for(slow, None).part(2)
    request = Request(graph, machine, Optimizer("sgd", 0), 2**40, all_devices=False)
    contexts = Contexts(request, base_of(request))
    search = PipelineSearch(contexts, inf, lambda text: None)
    (mesh,) = contexts.on_part(request.on(1)).meshes
    program = contexts.program(1)
    assert program is not None
    serial_ps = least_passes_ps(program, Prices(program, contexts.walker(mesh), contexts.shared))
    steps: list[int] = []
    for count in contexts.counts:
        search._look(1, count)  # noqa: SLF001 - every split, not only those that promise most
    for split in search.splits:
        found = search.tried.judge.judge(split)
        if found is not None:
            steps.append(found.timeline.step_ps)
    assert len(steps) > 3
    assert search.least_ps > 0
    assert search.least_ps <= min(steps)
    if name == "mmt":
        assert min(steps) < serial_ps
