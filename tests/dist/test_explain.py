"""`parloom explain` on saved plans: what it compares with, and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import RenderableType

import parloom
from parloom import api
from parloom.cost.clusters import resolve_cluster
from parloom.errors import FingerprintError, InputError
from parloom.ir.expected import Constraint
from parloom.ir.plan import DEVICES, Plan
from parloom.report.clusters import cluster_screen
from parloom.report.output import rendered
from parloom.report.terminal import plan_screen
from parloom.report.timeline import timeline_screen


@pytest.fixture(scope="module")
def captured() -> api.Captured:
    return api.capture("zoo:mlp")


def test_plans_are_compared_with_methods_and_files(captured: api.Captured, tmp_path: Path) -> None:
    plan = api.search(captured, cluster="4xcpu", devices=4, method="megatron")
    assert plan.prediction is not None
    document = api.explain(plan).document
    assert document["step_s"] == plan.prediction.step_s
    assert document["peak"]["bytes"] == plan.prediction.peak_bytes
    said: list[str] = []
    other = api.explain(plan, versus="fsdp", progress=said.append).document
    assert said[-1].startswith("fsdp (data=4), ZeRO-")
    parloom.save(api.search(captured, cluster="4xcpu", devices=4, method="fsdp"), tmp_path)
    again = api.explain(plan, versus=str(tmp_path)).document
    assert again["causes"] == other["causes"]
    assert again["versus"]["name"] == str(tmp_path)
    with pytest.raises(InputError, match="no method or plan file 'fsd'; did you mean 'fsdp'"):
        api.explain(plan, versus="fsd")
    head = api.explain(plan, name="head").document
    assert head["name"] == "head:linear#0"
    assert api.explain(plan, name="head", versus="fsdp").document["plan"] == head
    with pytest.raises(InputError, match=r"no operator, .* 'haed' in the plan; did you mean"):
        api.explain(plan, name="haed")


def test_times_of_a_calibrated_plan_are_not_those_of_data_sheets(captured: api.Captured) -> None:
    def said_of(plan: Plan, versus: str | None = None) -> list[str]:
        said: list[str] = []
        answer = api.explain(plan, versus=versus, progress=said.append)
        assert versus or answer.document["bound_s"] == (None if said else plan.bound_s)
        return [line for line in said if line.startswith("warning: ")]

    plan = replace(api.search(captured, cluster="4xcpu", devices=4, method="fsdp"), bound_s=1e-3)
    assert said_of(plan) == said_of(plan, "megatron") == []
    assert plan.prediction is not None
    measured = replace(plan.prediction, source="measured", step_s=0.5)
    calibrated = replace(plan, prediction=measured)
    (line,) = said_of(calibrated)
    assert "500 ms (measured), and the times here are those of data sheets" in line
    assert "give --calibration F" in line
    assert said_of(calibrated, "megatron") == [line]


def test_plans_of_another_model_are_not_compared(captured: api.Captured, tmp_path: Path) -> None:
    plan = api.search(captured, cluster="4xcpu", devices=4, method="fsdp")
    small = api.capture("zoo:mlp", batch=32)
    parloom.save(api.search(small, cluster="4xcpu", devices=4, method="fsdp"), tmp_path)
    with pytest.raises(FingerprintError, match="only plans of one model"):
        api.explain(plan, versus=str(tmp_path))


def test_what_does_not_fit_is_compared_too(captured: api.Captured, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(
        "name: small\n"
        "device: {name: tiny, rates: {float32: 1TFLOP/s}, memory: 20MiB,"
        " memory_bandwidth: 10GB/s}\n"
        "levels: [{name: box, size: 4, bandwidth: 1GB/s, latency: 10us}]\n",
        encoding="utf-8",
    )
    plan = api.search(captured, cluster=str(file), method="megatron")
    said: list[str] = []
    document = api.explain(plan, versus="data_parallel", progress=said.append).document
    assert any("no plan fits" in line for line in said)
    assert not document["versus"]["fits"]


def test_a_plan_that_leaves_devices_idle_is_compared_on_all(
    captured: api.Captured, tmp_path: Path
) -> None:
    """A rule of thumb on one device is the same plan; on those that `--devices` says, too."""
    file = tmp_path / "slow.yaml"
    file.write_text(
        "name: slow\n"
        "device: {name: fast, rates: {float32: 1TFLOP/s}, memory: 20GiB,"
        " memory_bandwidth: 100GB/s}\n"
        "levels: [{name: wire, size: 2, bandwidth: 1MB/s, latency: 1ms}]\n",
        encoding="utf-8",
    )
    for devices, is_same in ((None, False), (1, True)):
        plan = api.search(captured, cluster=str(file), devices=devices)
        assert plan.decisions.num_ranks == 1
        asked = (Constraint(f"{DEVICES}{devices}", 1.0, 1),) if devices else ()
        plan = replace(plan, constraints=asked)
        found = api.explain(plan, versus="data_parallel").document
        assert (found["versus"]["step_s"] == found["plan"]["step_s"]) == is_same


FIRST_HEADERS = ("over", "all", "devices", "term", "way", "tensor")
WORD = re.compile(r"[^\s▁▂▃▄▅▆▇█─━]+")


def assert_whole(screen: RenderableType, width: int) -> None:
    """No line is wider, and every word and number of a wide terminal is there, in one piece."""
    narrow, wide = rendered(screen, width), rendered(screen, 400)
    assert max(map(len, narrow.splitlines())) <= width, narrow
    # A table that becomes paragraphs has commas, and no header over its first column.
    found = {word.rstrip(",") for word in (*WORD.findall(narrow), *FIRST_HEADERS)}
    assert not {word.rstrip(",") for word in WORD.findall(wide)} - found, narrow
    assert "…" not in narrow


@pytest.mark.parametrize("width", [80, 100])
def test_screens_are_whole_on_narrow_terminals(captured: api.Captured, width: int) -> None:
    plan = api.search(captured, cluster="2x2xcpu", devices=4, method="megatron")
    cluster = resolve_cluster(plan.cluster)
    names = ("layers.0:linear#0", "layers.0.weight", "relu", "layers.0", "labels")
    screens = [api.explain(plan, name=name).screen for name in names]
    screens += [
        api.explain(plan).screen,
        timeline_screen(api.simulate(plan), "a plan", ["each of 4 devices"], api.source_of(plan)),
        cluster_screen(cluster.cluster, cluster.assumptions),
        plan_screen(plan, cluster.cluster, {"plan": Path("runs/plan.json")}, None),
    ]
    for screen in screens:
        assert_whole(screen, width)
