"""Plans for clusters of several types of devices: equal to one device, bounded, within memory."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor, nn

from parloom import api
from parloom.api import Captured
from parloom.candidates import candidates
from parloom.cost.calibration import calibration_to_json
from parloom.cost.clusters import resolve_cluster
from parloom.cost.stages import simulate_stages
from parloom.errors import BudgetError, InfeasibleError, InputError
from parloom.execute.machine import machine_for, machine_of
from parloom.ir.factors import factorize
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh, grid
from parloom.ir.plan import Decisions, Plan, Stage
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.regular_parts import memory_of
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph
from parloom.report.terminal import plan_screen
from parloom.report.words import words
from parloom.search.contexts import Contexts
from parloom.search.pipelines.mixed import across_parts, least_shared_ps
from parloom.search.request import Request, ScoredPlan, base_of
from parloom.zoo import gpt, mlp
from tests.dist.staged import even
from tests.unit.test_calibration import MADE

CLUSTER = """
name: two
backend: gloo
join: {{name: net, bandwidth: {net}, latency: 200us, efficiency: 0.96}}
parts:
  - name: quick
    device: {{name: fast, memory: 2GiB, memory_bandwidth: 10GB/s, rates: {{fp32: 24GFLOP/s}}}}
    levels: [{{name: lan, size: 2, bandwidth: 100Mbit/s, latency: 100us, efficiency: 0.9}}]
  - name: slow
    device: {{name: tired, memory: {memory}, memory_bandwidth: 5GB/s, rates: {{fp32: {rate}}}}}
    levels: [{{name: lan, size: 1, bandwidth: 100Mbit/s, latency: 100us, efficiency: 0.9}}]
"""


def cluster(
    folder: Path, rate: str = "12GFLOP/s", memory: str = "1GiB", net: str = "1Gbit/s"
) -> str:
    path = folder / "two.yaml"
    path.write_text(CLUSTER.format(rate=rate, memory=memory, net=net))
    return str(path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cluster(tmp_path_factory.mktemp("cluster"))


def five_blocks() -> tuple[nn.Module, dict[str, Tensor]]:
    """Three blocks on a fast device without the slow one, two with it."""
    return gpt.build(batch=8, seq=64, width=128, depth=5, heads=2, vocab=64)


@cache
def captured() -> Captured:
    return api.capture(f"{__file__}:five_blocks", optimizer="sgd")


@pytest.fixture(scope="module")
def found(two: str) -> Plan:
    return api.search(captured(), cluster=two)


def request_of(two: str, memory: int | None = None, method: str = "auto") -> Request:
    machine = machine_for(two, None)
    limit = memory or memory_of(machine.cluster)
    return Request(
        captured().graph, machine, captured().optimizer, limit, method=method, all_devices=False
    )


@pytest.mark.slow
def test_slow_devices_get_fewer_layers(found: Plan) -> None:
    """All devices work, and the answer says what they are worth."""
    blocks = {
        devices: sum(item.startswith("blocks") for item in stage.items)
        for stage in found.decisions.stages
        for devices in stage.devices
    }
    assert set().union(*blocks) == {0, 1, 2}
    slow = sum(count for devices, count in blocks.items() if 2 in devices)
    quick = sum(blocks.values()) - slow
    assert slow < quick / 2 + 1
    assert all(devices[0] < 2 or devices[0] == 2 == devices[-1] for devices in blocks)
    assert found.prediction is not None
    assert found.bound_s is not None
    assert found.bound_s <= found.prediction.step_s
    alone = [a.step_s for a in found.alternatives if "on quick" in a.name]
    assert found.prediction.step_s < min(alone)
    assert any("all devices are used: without 1 x tired" in note for note in found.notes)


def test_it_is_equal_to_one_device(found: Plan) -> None:
    report = api.verify(found)
    assert report.passed, str(report)
    assert report.num_ranks == 3


def test_it_is_saved_and_read_back(found: Plan, tmp_path: Path) -> None:
    again = api.load(api.save(found, tmp_path)["plan"])
    assert again == found
    assert again.prediction is not None
    assert dict(again.prediction.peaks).keys() == {"fast", "tired"}
    assert api.simulate(again).step_s == pytest.approx(again.prediction.step_s)


def test_what_users_see(found: Plan, two: str, tmp_path: Path) -> None:
    """Both types on the screens; the share of memory is that of each type."""
    console = Console(width=200, file=StringIO())
    console.print(plan_screen(found, resolve_cluster(two).cluster, {"plan": tmp_path}, None))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "five_blocks on two (2 x fast + 1 x tired): auto" in text
    assert "of 2 GiB" in text
    assert "of 1 GiB" in text
    assert "two (2 x fast + 1 x tired)" in api.explain(found).document["title"]


def test_no_split_is_below_the_bound(two: str, found: Plan) -> None:
    """In both orders of the parts, wherever the boundary is and whatever is left idle; none is
    faster than the plan that was found.
    """
    request = request_of(two)
    bound_ps = least_shared_ps([Contexts(own, base_of(own)) for _, own in request.regular()])
    graph, items = request.graph, stage_items(request.graph)
    factored = factorize(graph)
    steps = []
    for cut in range(1, len(items)):
        for other, devices in product(
            range(cut, len(items)), ((0, 2), (2, 0), (0, 1, 2), (2, 0, 1), (0, 2, 1))
        ):
            if (len(devices) == 2) != (other == cut):
                continue
            ends = tuple(dict.fromkeys((0, cut, other, len(items))))
            stages = tuple(
                Stage(items[a:b], (range(d, d + 1),), Mesh(()))
                for a, b, d in zip(ends, ends[1:], devices, strict=False)
            )
            plan = Decisions(stages, num_microbatches=8, schedule="1f1b")
            lowered = lower_stages(graph, plan, factored=factored)
            steps.append(simulate_stages(lowered, request.cluster, plan, request.optimizer).step_ps)
    assert bound_ps <= min(steps)
    assert bound_ps > min(steps) / 4
    assert found.prediction is not None
    assert found.prediction.step_s * 1e12 <= min(steps)


@pytest.mark.slow
def test_no_type_of_device_holds_more_than_it_has(two: str, found: Plan, tmp_path: Path) -> None:
    """What a type may hold is kept although another type has more."""
    assert found.prediction is not None
    limit = int(dict(found.prediction.peaks)["tired"] * 0.8)
    tight = cluster(tmp_path, memory=f"{limit}B")
    plan = api.search(captured(), cluster=tight)
    assert plan.prediction is not None
    peaks = dict(plan.prediction.peaks)
    assert peaks.get("tired", 0) <= limit < dict(found.prediction.peaks)["tired"]
    assert max(peaks.values()) > limit
    request = request_of(tight)
    assert request.fits(plan.prediction)
    assert not request.fits(found.prediction)
    assert request_of(two).fits(found.prediction)


@pytest.mark.slow
def test_what_is_too_slow_is_left_out(tmp_path: Path) -> None:
    """With both figures; the plan of one stage on the first part, or on the second."""
    slow = cluster(tmp_path, rate="200MFLOP/s")
    plan = api.search(captured(), cluster=slow)
    assert all(devices.stop <= 2 for stage in plan.decisions.stages for devices in stage.devices)
    assert plan.prediction is not None
    assert api.simulate(plan).step_s == pytest.approx(plan.prediction.step_s)
    (line,) = (note for note in plan.notes if "stay idle" in note)
    assert line.startswith("1 x tired stay idle: with them ")
    assert plan.prediction is not None
    others = [a.step_s for a in plan.alternatives if a.step_s > plan.prediction.step_s]
    assert others


def test_a_plan_on_the_second_part(tmp_path: Path) -> None:
    """Its devices begin at 2; it is proved, simulated, saved and read."""
    quick = cluster(tmp_path, rate="500GFLOP/s")
    plan = api.search(captured(), cluster=quick, method="data_parallel")
    assert plan.decisions.stages[0].devices == (range(2, 3),)
    assert machine_of(plan).cluster.device.name == "tired"
    assert plan.prediction is not None
    assert dict(plan.prediction.peaks).keys() == {"tired"}
    again = api.load(api.save(plan, tmp_path / "plan")["plan"])
    assert again == plan
    assert api.simulate(again).step_s == pytest.approx(plan.prediction.step_s)
    assert api.verify(again).passed


def _used(plan: ScoredPlan) -> set[int]:
    return {d for stage in plan.decisions.stages for devices in stage.devices for d in devices}


@pytest.mark.parametrize("method", ["gpipe", "megatron", "tofu"])
def test_other_methods_are_asked_on_each_part(method: str, two: str) -> None:
    """On that which may be the faster one alone."""
    proposed = candidates(request_of(two, method=method), lambda text: None)
    assert set().union(*map(_used, proposed.found)) == {0, 1}


def test_whale_has_stages_on_all_parts(two: str) -> None:
    """By the rates of their devices: the first stage has two of them, which are twice as fast."""
    request = request_of(two, method="whale")
    proposed = candidates(request, lambda text: None)
    assert proposed.found
    for plan in proposed.found:
        assert _used(plan) == {0, 1, 2}
        first, second = (
            sum(item.startswith("blocks") for item in stage.items)
            for stage in plan.decisions.stages
        )
        assert first > second


def test_what_cannot_be(two: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="devices are no part of two"):
        api.search(captured(), cluster=two, devices=2)
    path = tmp_path / "measured.json"
    path.write_text(calibration_to_json(MADE))
    # Of one type only, and no part is of it: it says so.
    different = ("device: cpu, not fast", "device: cpu, not tired")
    assert machine_for(two, path).different == different
    graph = captured().graph
    stages = tuple(
        Stage(items, (devices,), mesh)
        for items, devices, mesh in zip(
            even(graph, 2), (range(1), range(1, 3)), (Mesh(()), grid({"x": 2})), strict=True
        )
    )
    plan = Decisions(stages, num_microbatches=2, schedule="1f1b")
    lowered = lower_stages(graph, plan)
    with pytest.raises(InputError, match=r"devices 1 to 2 of two are not all in one of its parts"):
        simulate_stages(lowered, resolve_cluster(two).cluster, plan)
    with pytest.raises(InfeasibleError, match=r"no plan fits on two; the nearest found, .* needs"):
        api.search(captured(), cluster=two, memory="500KiB")


def test_all_devices_where_they_are_asked_for(tmp_path: Path) -> None:
    slow = cluster(tmp_path, rate="200MFLOP/s")
    request = replace(request_of(slow), all_devices=True, budget=400)
    found = candidates(request, lambda text: None).found
    assert {plan.decisions.num_ranks for plan in found} == {3}
    with pytest.raises(BudgetError, match="no plan within its budget"):
        candidates(replace(request, budget=3), lambda text: None)


def test_a_budget_ends_the_search_over_parts(two: str) -> None:
    request = replace(request_of(two), budget=3)
    across = across_parts(request, base_of(request), 1e18, lambda text: None)
    assert across.status.value == "out of budget"


def many_samples() -> tuple[nn.Module, dict[str, Tensor]]:
    """Much to compute, few weights whose gradients are summed, and few numbers of microbatches."""
    return mlp.build(batch=16 * 4099, features=64, hidden=64, depth=4, classes=8)


@pytest.mark.slow
def test_replicas_run_as_much_as_they_are_fast(two: str, tmp_path: Path) -> None:
    """Each device has the whole model; the slow one runs half as many microbatches."""
    plan = api.plan(f"{__file__}:many_samples", cluster=two, optimizer="sgd")
    assert plan.decisions.schedule == "replicas"
    shares = {s.devices[0][0]: len(s.microbatches) for s in plan.decisions.stages}
    assert shares.keys() == {0, 1, 2}
    assert abs(shares[0] - shares[1]) <= 1
    assert shares[2] < shares[0] < 3 * shares[2]
    assert plan.prediction is not None
    assert plan.bound_s is not None
    assert plan.bound_s <= plan.prediction.step_s
    assert plan.prediction.step_s < min(a.step_s for a in plan.alternatives if "on quick" in a.name)
    api.save(plan, tmp_path / "plan")
    assert api.load(tmp_path / "plan") == plan
    for key, value, said in (
        ("microbatches", "3,1", "ascending and apart"),
        ("microbatches", "0-999999", "at most 65536 microbatches"),
        ("at_once", 0, "greater than or equal to 1"),
    ):
        document = json.loads(plan_to_json(plan))
        document["decisions"]["stages"][0][key] = value
        with pytest.raises(InputError, match=said):
            plan_from_json(json.dumps(document), "plan.json")
    report = api.verify(plan)
    assert report.passed, str(report)
    assert any("microbatches" in line for line in words(parse_graph(plan.graph), plan.decisions))
