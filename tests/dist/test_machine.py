"""Predictions are of the machine that was planned for, whatever machine reads the plan."""

from pathlib import Path

import pytest

from parloom import api
from parloom.execute import machine
from parloom.execute.machine import machine_for
from parloom.ir.plan_json import plan_from_json, plan_to_json

FACTORY = """
from parloom import zoo
def build():
    return zoo.build("mlp", batch=8, features=8, hidden=16, depth=2, classes=4)
"""


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: count)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(FACTORY, encoding="utf-8")
    return f"{tmp_path / 'model.py'}:build"


def test_a_plan_is_predicted_alike_on_a_machine_with_other_cores(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(monkeypatch, 2)
    plan = api.plan(spec, cluster="4xcpu", devices=4, method="data_parallel")
    planned = plan.prediction
    assert planned is not None
    assert planned.cores == 2
    assert any("share 2 cores" in line for line in plan.assumptions)
    plan = plan_from_json(plan_to_json(plan), "plan.json")
    assert api.source_of(plan).notes == ()
    for other in (1, 3, 8):
        cores(monkeypatch, other)
        assert api.simulate(plan).step_s == planned.step_s
        line = f"predicted for a machine with 2 cores; this one has {other}"
        assert api.source_of(plan).notes == (line,)
        said: list[str] = []
        answer = api.explain(plan, progress=said.append)
        assert line in said
        assert answer.document["step_s"] == planned.step_s
    fresh = api.plan(spec, cluster="4xcpu", devices=4, method="data_parallel")
    assert fresh.prediction is not None
    assert fresh.prediction.step_s < planned.step_s


def test_more_cores_than_processes_make_no_difference(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for count in (4, 16):
        cores(monkeypatch, count)
        plan = api.plan(spec, cluster="4xcpu", devices=4, method="data_parallel")
        assert api.source_of(plan).notes == ()
        texts.append(plan_to_json(plan))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("cluster", ["1x4xH100", "2x2xcpu"])
def test_other_clusters_have_nothing_of_this_machine(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for count in (1, 64):
        cores(monkeypatch, count)
        made = machine_for(cluster)
        assert made.cores is None
        found.append(made)
    assert found[0] == found[1]
