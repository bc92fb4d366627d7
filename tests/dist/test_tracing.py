"""`parloom run --trace` and the names that profilers show: the plan's."""

import json
from pathlib import Path

import pytest
import torch

import parloom
from parloom import cli
from parloom.errors import InputError
from parloom.execute.watch import OBSERVED
from parloom.ir.plan import Plan
from parloom.tracing import traced
from parloom.zoo import gpt, mlp

SCRIPT = """
import os, sys, torch, parloom
from parloom.zoo.mlp import build
torch.manual_seed(0)
model, batch = build()
trainer = parloom.parallelize(
    model, os.environ["PARLOOM_PLAN"], optimizer=lambda named: torch.optim.AdamW(named, lr=0.1)
)
for _ in range(int(sys.argv[1])):
    trainer.step(batch)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("traced")
    (found / "train.py").write_text(SCRIPT)
    command = ["plan", "zoo:mlp", "--cluster", "2xcpu", "--method", "data_parallel"]
    assert cli.main([*command, "--devices", "2", "--out", str(found)]) == 0
    return found


def test_a_run_is_traced_beside_its_simulation(folder: Path, tmp_path: Path) -> None:
    script, trace = str(folder / "train.py"), tmp_path / "trace.json"
    assert cli.main(["run", str(folder), "--trace", str(trace), "--", script, "3"]) == 0
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert any(name.endswith(", observed") for name in names)
    assert any(not name.endswith(", observed") for name in names)
    observed = {
        e["pid"] for e in events if e.get("args", {}).get("name", "").endswith(", observed")
    }
    seen = [e["name"] for e in events if e.get("ph") == "X" and e["pid"] in observed]
    assert {"F0", "B0", "STEP"} <= set(seen)


def trained(plan: Plan, steps: int) -> None:
    torch.manual_seed(0)
    model, batch = mlp.build(batch=8, features=4, hidden=8, depth=2, classes=3)
    trainer = parloom.parallelize(
        model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    for _ in range(steps):
        trainer.step(batch)
    trainer.log.close()


@pytest.fixture(scope="module")
def single() -> Plan:
    model, batch = mlp.build(batch=8, features=4, hidden=8, depth=2, classes=3)
    return parloom.plan(model, batch, torch.optim.SGD, "1xcpu", method="data_parallel")


def test_a_run_that_ends_early_says_so(
    single: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for steps, words in ((2, "no trace"), (3, "step 3")):
        with traced(single, tmp_path / "t.json", said.append) as log:
            assert log is not None
            monkeypatch.setenv(OBSERVED, str(log))
            trained(single, steps)
        assert words in said[-1]
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]


def test_only_rank_0_traces_and_only_where_it_can_write(
    single: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced(single, None, print) as log:
        assert log is None
    with pytest.raises(InputError, match="--trace"), traced(single, tmp_path, print):
        pass
    monkeypatch.setenv("RANK", "1")
    with traced(single, tmp_path / "t.json", print) as log:
        assert log is None
    assert not (tmp_path / "t.json").exists()


def test_profiles_have_the_names_of_the_plan() -> None:
    torch.manual_seed(0)
    model, batch = gpt.build(batch=2, seq=8, width=16, depth=3, heads=2, vocab=32)
    plan = parloom.plan(model, batch, torch.optim.SGD, "1xcpu", method="data_parallel")
    trainer = parloom.parallelize(
        model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    with torch.profiler.profile() as profile:
        trainer.step(batch)
    names = {event.key for event in profile.key_averages()}
    assert {"blocks.0", "blocks.1", "blocks.2", "F0", "B0"} <= names
