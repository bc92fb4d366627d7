"""Pipelines that `auto` proposes: equal to one device, within bounds, limits and budgets."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api, zoo
from parloom.api import Captured
from parloom.capture import capture
from parloom.choose import choose
from parloom.cost.stages import simulate_stages
from parloom.errors import InfeasibleError, InputError
from parloom.execute.machine import machine_for
from parloom.execute.program import lowered
from parloom.ir.expected import Status
from parloom.ir.factors import factorize
from parloom.ir.lower_stages import lower_stages, staged
from parloom.ir.plan import Optimizer, Plan
from parloom.search.blocks import search_with_blocks
from parloom.search.conflicts import broken
from parloom.search.contexts import Contexts, SimulatedPlan
from parloom.search.least_compute import least_passes_ps, least_work_ps, longest_item_ps
from parloom.search.pinned import resolve
from parloom.search.pins import Pin, parse_pin
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.pipelines.auto import PipelineSearch, search_pipelines, search_with_pipelines
from parloom.search.pipelines.judge import JudgedSplit
from parloom.search.prices import Prices
from parloom.search.request import Request, ScoredPlan, Wanted, base_of

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


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half of it, for what does not depend on how large it is: searches take half as long."""
    path: Path = tmp_path_factory.mktemp("cluster") / "two.yaml"
    path.write_text(CLUSTER.replace("size: 4", "size: 2"))
    return str(path)


@cache
def captured() -> Captured:
    return api.capture("zoo:gpt", batch=16, seq=32, optimizer="sgd")


def two_blocks() -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.build("gpt", batch=16, seq=32, depth=2)


@cache
def captured_small() -> Captured:
    return api.capture(f"{__name__}:two_blocks", optimizer="sgd")


@pytest.fixture(scope="module")
def found(slow: str) -> Plan:
    """With all splits played: nothing is left out."""
    said: list[str] = []
    plan = api.search(captured(), cluster=slow, progress=said.append)
    assert [line for line in said if "cannot be lowered" in line] == []
    return plan


@pytest.fixture(scope="module")
def found_small(two: str) -> Plan:
    return api.search(captured_small(), cluster=two)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_limits_are_kept(found_small: Plan, two: str) -> None:
    assert found_small.prediction is not None
    limit = int(found_small.prediction.peak_bytes * 0.8)
    tight = best_with(captured_small(), two, limit_bytes=limit)
    assert tight.prediction.peak_bytes <= limit
    assert tight.prediction.step_s >= found_small.prediction.step_s


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(found_small: Plan, two: str) -> None:
    again = api.search(captured_small(), cluster=two)
    assert len(again.decisions.stages) > 1
    assert again.decisions == found_small.decisions


def test_a_budget_ends_it(slow: str) -> None:
    whole = api.search(captured(), cluster=slow, budget=40)
    assert whole.status is Status.OUT_OF_BUDGET
    assert whole.bound_s is not None
    assert whole.prediction is not None
    assert whole.bound_s <= whole.prediction.step_s


@pytest.mark.slow
def test_pins_hold_in_every_stage(found_small: Plan, slow: str) -> None:
    """And the plan that was found without them does not hold them."""
    graph = captured_small().graph
    texts = ("blocks.0.up=n:2", "blocks.1=recompute", "stages=2")
    pins = [parse_pin(text) for text in texts]
    best = best_with(captured_small(), slow, pins)
    stages = best.decisions.stages
    assert len(stages) == 2
    pinned = replace(found_small, cluster=slow, decisions=best.decisions, prediction=None)
    for stage, pcg in zip(stages, lowered(pinned).pcgs, strict=True):
        ups = [flat for flat in pcg.graph.flat() if flat.key.startswith("blocks.0.up:")]
        for flat in ups:
            node = pcg.decisions.node(flat.key)
            assert node is not None
            axes = dict(node.factors)["n"]
            assert stage.mesh.size(axes) == 2
    assert {a.prefix: a.policy for a in pinned.decisions.activations}["blocks.1"] == "recompute"
    assert api.verify(pinned).passed
    resolved = resolve(pins, graph, factorize(graph))
    assert broken(resolved, graph, pinned.decisions) is None
    first = resolved.only(pins[:1])
    assert "blocks.0.up:linear#0" in (broken(first, graph, found_small.decisions) or "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [1, 4])
def test_the_number_of_stages_is_pinned(count: int, found_small: Plan, two: str) -> None:
    best = best_with(captured_small(), two, [parse_pin(f"stages={count}")])
    assert len(best.decisions.stages) == count != len(found_small.decisions.stages)
    assert found_small.prediction is not None
    assert found_small.bound_s is not None
    assert best.prediction.step_s >= found_small.prediction.step_s * (1 - 1e-9)
    assert found_small.bound_s <= best.prediction.step_s


@pytest.mark.slow
def test_pinned_stages_that_do_not_fit_say_so() -> None:
    """The pin is to blame, and memory is what it lacks."""
    with pytest.raises(
        InfeasibleError, match=r"--memory(.|\n)*give up one:\n  --pin stages=2"
    ) as raised:
        api.plan("zoo:mlp", cluster="2xcpu", memory="24MB", pin=["stages=2"], optimizer="adamw")
    assert raised.value.exit_code == 3


def best_with(
    captured: Captured, cluster: str, pins: Sequence[Pin] = (), limit_bytes: int | None = None
) -> ScoredPlan:
    """The best plan that holds them; what they cost is not asked."""
    graph, machine = captured.graph, machine_for(cluster, None)
    request = Request(
        graph,
        machine,
        captured.optimizer,
        limit_bytes or machine.cluster.device.memory_bytes,
        pinned=resolve(pins, graph, factorize(graph)),
        wanted=Wanted.PLAN,
        all_devices=False,
    )
    return choose(request, lambda text: None).best


def test_stages_that_no_plan_has(slow: str) -> None:
    with pytest.raises(
        InputError, match=r"stages=300: no plan has so many; the model has \d+ items"
    ):
        api.search(captured(), cluster=slow, pin=["stages=300"])
    with pytest.raises(InputError, match=r"stages=2 and --pin stages=3"):
        api.search(captured(), cluster=slow, pin=["stages=2", "stages=3"])
    with pytest.raises(InputError, match=r"--pin stages=2: no pipeline that holds this"):
        api.search(captured(), cluster="1xcpu", pin=["stages=2"])


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
    contexts = Contexts(request, base_of(request))
    search = PipelineSearch(contexts, inf, lambda text: None)
    search.splits.look_at(1, 4)  # one context is enough
    several = [split for split in search.splits.found if len(split.groups) > len(split.costs)]
    assert several
    assert all(search.tried.play(split) is not None for split in several)
    assert not contexts.refusals.counts


@pytest.mark.slow
def test_the_bound_holds_for_pipelines_of_microbatches_by_themselves(tmp_path: Path) -> None:
    """`auto` does not search them, but rules of thumb make some."""
    there: dict[str, Any] = {
        "batch": 16,
        "seq": 32,
        "optimizer": "sgd",
        "batch_semantics": "microbatch",
    }
    slower = tmp_path / "slower.yaml"
    slower.write_text(CLUSTER.replace("100Mbit/s", "50Mbit/s"))
    plan = api.plan("zoo:gpt", cluster=str(slower), microbatches=8, **there)
    assert plan.prediction is not None
    assert plan.bound_s is not None
    assert len(plan.decisions.stages) > 1
    assert plan.bound_s <= plan.prediction.step_s


def test_more_microbatches_than_groups_where_memory_needs_them(slow: str) -> None:
    """Fewer hold too much, and are where the search begins."""
    machine = machine_for(slow, None).part(2)
    graph, optimizer = captured().graph, captured().optimizer
    counts: list[set[int]] = []
    for limit_bytes in (2**40, 16_500_000):
        request = Request(graph, machine, optimizer, limit_bytes, all_devices=False)
        search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
        search.splits.look()
        counts.append({split.num_microbatches for split in search.splits.found})
    assert 2 in counts[0]
    assert min(counts[1]) > 2


def test_the_longest_item_bounds_groups(slow: str) -> None:
    """Its group computes it, however small the items of others are."""
    machine = machine_for(slow, None)
    request = Request(captured().graph, machine, captured().optimizer, 2**40, all_devices=False)
    contexts = Contexts(request, base_of(request))
    search = PipelineSearch(contexts, inf, lambda text: None)
    longest_ps = longest_item_ps(contexts)
    for size in (1, 2):
        for microbatches in (1, 4):
            search.splits.look_at(size, microbatches)
    sizes = {split.costs[0].num_devices for split in search.splits.found}
    assert sizes == {1, 2}
    for split in search.splits.found:
        played = search.tried.play(split)
        if played is not None:
            assert longest_ps / split.costs[0].num_devices <= played.step_ps
    assert longest_ps > 0.2 * least_work_ps(contexts)  # so that it says more than that


def test_a_budget_that_ends_before_pipelines_has_a_bound_for_them(found: Plan, slow: str) -> None:
    machine = machine_for(slow, None)
    memory = machine.cluster.device.memory_bytes
    request = Request(captured().graph, machine, captured().optimizer, memory, budget=1)
    early = search_with_pipelines(request, base_of(request), lambda text: None)
    assert early.status is Status.OUT_OF_BUDGET
    assert found.prediction is not None
    assert 0 < early.bound_ps / 1e12 <= found.prediction.step_s


@pytest.mark.slow
def test_pipelines_beat_plans_of_one_stage_early(two: str) -> None:
    """Which are then not looked at: fewer are simulated than without pipelines."""
    machine = machine_for(two, None)
    memory = machine.cluster.device.memory_bytes
    request = Request(captured_small().graph, machine, captured_small().optimizer, memory)
    base = base_of(request)
    alone = search_with_blocks(request, base, lambda text: None)
    both = search_with_pipelines(request, base, lambda text: None)
    of_one = [plan for plan in both.proposals if len(plan.decisions.stages) == 1]
    assert len(of_one) < len(alone.proposals)
    assert both.proposals[0].step_ps < alone.proposals[0].step_ps
    assert both.bound_ps <= both.proposals[0].step_ps


def test_ctrl_c_while_plans_are_predicted_keeps_them(
    two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, predicted, calls = machine_for(two, None), JudgedSplit.predicted, count()
    memory = machine.cluster.device.memory_bytes
    request = Request(captured_small().graph, machine, captured_small().optimizer, memory)

    def interrupted(split: JudgedSplit, asked: Request) -> SimulatedPlan:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return predicted(split, asked)

    monkeypatch.setattr(JudgedSplit, "predicted", interrupted)
    found = search_pipelines(request, base_of(request), None, lambda text: None)
    assert found is not None
    assert found.status is Status.INTERRUPTED
    assert len(found.proposals) == 2
    assert next(calls) > 2


class Heavy(nn.Module):
    """Small layers, and then one that takes as long as all of them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (320, 320, 320, 320, 320, 512, 512, 320)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (((x - y) ** 2).mean(),)


@pytest.mark.slow
def test_pipelines_hide_no_better_plan_of_one_stage(tmp_path: Path) -> None:
    """A pipeline beats the meshes of two axes here, one of three axes beats it."""
    path = tmp_path / "eight.yaml"
    path.write_text(CLUSTER.replace("100Mbit/s", "2Gbit/s").replace("size: 4", "size: 8"))
    machine = machine_for(str(path), None)
    batch = {name: torch.randn(32, 320) for name in ("x", "y")}
    request = Request(capture(Heavy(), batch), machine, Optimizer("sgd", 0), 2**31)
    base = base_of(request)
    alone = search_with_blocks(request, base, lambda text: None)
    both = search_with_pipelines(request, base, lambda text: None)
    assert len(alone.proposals[0].decisions.mesh.axes) == 3
    assert both.proposals[0].step_ps <= alone.proposals[0].step_ps


SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 1, "seq": 64},
    "mmt": {"batch": 1, "seq": 16, "width": 64, "depth": 2, "heads": 4, "inner": 128},
    "dlrm": {"batch": 2, "tables": 4, "rows": 24, "width": 12, "hidden": 24, "dense": 12, "bag": 2},
}


@pytest.mark.sample(1)
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
    for microbatches in contexts.counts:
        search.splits.look_at(1, microbatches)  # every split, not only those that promise most
    for split in search.splits.found:
        found = search.tried.judge.judge(split)
        if found is not None:
            steps.append(found.timeline.step_ps)
    assert len(steps) > 3
    assert search.least_ps > 0
    assert search.least_ps <= min(steps)
    if name == "mmt":
        assert min(steps) < serial_ps
