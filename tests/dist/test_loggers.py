"""Numbers of steps in the tools that teams keep their runs in; a tool that fails ends no
training.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import parloom
from parloom.errors import InputError
from parloom.execute.loggers import LOGGERS, Guarded, begun, check_names
from parloom.execute.train import Trainer
from parloom.ir.plan import Plan
from parloom.zoo import mlp
from tests.forked import forked

Calls = list[tuple[str, Any]]
SMALL = {"batch": 8, "features": 4, "hidden": 8, "depth": 2, "classes": 3}


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, batch = mlp.build(**SMALL)
    return parloom.plan(model, batch, torch.optim.SGD, "1xcpu", method="data_parallel")


def trained(plan: Plan, *loggers: str, steps: int = 2) -> Trainer:
    torch.manual_seed(0)
    model, batch = mlp.build(**SMALL)
    trainer = parloom.parallelize(
        model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), loggers=loggers
    )
    for _ in range(steps):
        trainer.step(batch)
    trainer.log.close()
    return trainer


def stand_in(name: str, calls: Calls, fails: str = "") -> ModuleType:
    """A module that notes what is called, with the names of the real one (checked by hand)."""
    module = ModuleType(name)

    def noting(function: str) -> Callable[..., None]:
        def call(*given: Any, **named: Any) -> None:
            if function == fails:
                raise ConnectionError("no network")
            calls.append((function, (given, named)))

        return call

    for function in ("init", "log", "finish", "set_experiment", "start_run", "log_params",
                     "log_metrics", "end_run"):  # fmt: skip
        setattr(module, function, noting(function))
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_projects_get_every_step(plan: Plan, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, name, stand_in(name, calls))
    trained(plan, f"{name}:mine")
    (first, (_, begun_with)), *steps, (last, _) = calls
    assert (first, last) == ("init", "finish")
    assert begun_with["project"] == "mine"
    assert begun_with["config"]["plan"] == parloom_hash(plan)
    assert [named["step"] for _, (_, named) in steps] == [1, 2]
    values = steps[0][1][0][0]
    assert {"train/loss", "train/lr", "time/step_s", "time/predicted_s"} <= set(values)
    assert values["train/lr"] == 0.1


def test_mlflow_gets_every_step(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "mlflow", stand_in("mlflow", calls))
    trained(plan, "mlflow")
    names = [name for name, _ in calls]
    assert names == ["set_experiment", "start_run", "log_params", *["log_metrics"] * 2, "end_run"]


def test_tensorboard_reads_what_was_written(plan: Plan, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(plan, f"tensorboard:{tmp_path}", steps=3)
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    losses = found.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3]
    assert losses[0].value > losses[2].value


def test_several_at_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    both: dict[str, Calls] = {"wandb": [], "trackio": []}
    for name, calls in both.items():
        monkeypatch.setitem(sys.modules, name, stand_in(name, calls))
    trained(plan, *both)
    assert [len(calls) for calls in both.values()] == [4, 4]


def test_a_tool_that_fails_is_told_once_and_training_goes_on(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in("wandb", calls, fails="log"))
    assert trained(plan, "wandb", steps=3).steps_done == 3
    said = capsys.readouterr().err
    assert said.count("logger wandb failed and gets no more: ConnectionError: no network") == 1
    assert [name for name, _ in calls] == ["init"]


def test_what_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no logger 'wandbb'; did you mean 'wandb'"):
        trained(plan, "wandbb")
    with pytest.raises(InputError, match=r"must be a list of names, as \['wandb'\]"):
        check_names("wandb")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match="try: pip install mlflow"):
        trained(plan, "mlflow")
    monkeypatch.setitem(sys.modules, "wandb", stand_in("wandb", [], fails="init"))
    with pytest.raises(InputError, match="logger wandb: ConnectionError: no network"):
        trained(plan, "wandb")


def test_nothing_is_imported_that_nobody_asked_for(plan: Plan) -> None:
    def work() -> int:
        packages = {package for package, _ in LOGGERS.values()}
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]  # what other tests imported
        trained(plan)
        return len(packages & set(sys.modules))

    code, said = forked(work, 60)
    assert code == 0, said


def test_closed_once() -> None:
    calls: Calls = []

    class Tool:
        def log(self, step: int, values: Any) -> None:
            calls.append(("log", step))

        def close(self) -> None:
            calls.append(("close", None))

    guarded = Guarded("tool", Tool())
    guarded.log(1, {})
    guarded.close()
    guarded.close()
    guarded.log(2, {})
    assert calls == [("log", 1), ("close", None)]
    assert begun((), {}) == []


def parloom_hash(plan: Plan) -> str:
    from parloom.ir.plan_json import plan_hash

    return plan_hash(plan)
