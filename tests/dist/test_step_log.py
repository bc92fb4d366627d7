"""The trainer that `parallelize` makes: whole when made, one line a step, no wait for a device."""

import inspect
import json
import re
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parloom import api, zoo
from parloom.errors import FingerprintError
from parloom.execute import stopwatch, train
from parloom.execute.program import training_program
from parloom.ir.plan import Plan
from parloom.runtime import SingleComm

SIZES: dict[str, Any] = {"batch": 8, "features": 8, "hidden": 16, "depth": 2, "classes": 4}
FACTORY = """
from parloom import zoo
def build():
    return zoo.build("mlp", batch=8, features=8, hidden=16, depth=2, classes=4)
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FACTORY)
    return api.plan(f"{path}:build", cluster="1xcpu", method="data_parallel", optimizer="sgd")


def build() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return zoo.build("mlp", **SIZES)


sgd = partial(torch.optim.SGD, lr=0.1)


def test_a_trainer_is_whole_when_it_is_made(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is set from outside: the constructor's arguments are enough for every method."""
    model, batch = build()
    program = training_program(plan).only.program
    done: list[str] = []
    run = train.Run(
        plan,
        tuple(model.state_dict()),
        items=8,
        unit="samples",
        device=torch.device("cpu"),
        watch=done.append,
    )
    trainer = train.Trainer(
        program, model.state_dict().__getitem__, run, optimizer=sgd, comm=SingleComm(program.mesh)
    )
    made = set(vars(trainer))
    trainer.step(batch)
    assert capsys.readouterr().out.startswith("step 1 loss ")
    assert done[:2] == ["in action F0, step 1", "in action B0, step 1"]
    assert done[-1] == "between steps, after step 1"
    trainer.save(tmp_path / "checkpoint")
    trainer.load(tmp_path / "checkpoint")
    trainer.load_state_dict(trainer.state_dict())
    trainer.export(tmp_path / "weights")
    assert set(vars(trainer)) == made
    assert set(vars(api.parallelize(model, plan, optimizer=sgd))) == made


def test_on_a_cpu_the_line_is_there_after_each_step(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    model, batch = build()
    capsys.readouterr()
    trainer = api.parallelize(model, plan, optimizer=sgd)
    assert "from data sheets, not calibrated" in capsys.readouterr().err
    for step in (1, 2):
        loss = float(trainer.step(batch).loss)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"step {step} loss {loss:.4g} | ")
        assert "samples/s" in line
        assert "predicted" not in line
        assert "iB" in line


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to bring a number to the host, which waits for the device that computes it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read"
        return func(*args, **(kwargs or {}))


class Owed:
    """A reading of a device: its numbers are there when somebody asks."""

    ready = False

    def __init__(self, asked: list[stopwatch.Numbers]) -> None:
        self.asked = asked
        self.numbers: stopwatch.Numbers = {}

    def stop(self, numbers: stopwatch.Numbers) -> None:
        self.numbers = numbers

    def read(self) -> tuple[dict[str, float], float]:
        self.asked.append(self.numbers)
        with torch.utils._python_dispatch._disable_current_modes():
            return {name: float(number) for name, number in self.numbers.items()}, 0.5


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[stopwatch.Numbers]:
    """The numbers that were read, of steps that a device is said to run."""
    found: list[stopwatch.Numbers] = []
    monkeypatch.setattr(train, "begin", lambda device: Owed(found))
    monkeypatch.setattr(train, "refuse_around_step", lambda call: None)  # the mode of the test
    return found


def test_a_step_reads_no_number_of_the_step_that_it_queues(
    plan: Plan, asked: list[stopwatch.Numbers], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, batch = build()
    trainer = api.parallelize(
        model,
        plan,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        clip_norm=1.0,
        log_path=tmp_path / "log.jsonl",
        seed=7,
    )
    losses, norms = [], []
    for step in range(3):
        with NoReads():  # type: ignore[no-untyped-call]
            result = trainer.step(batch)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert len(asked) == step  # those of the steps before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2"]
    trainer.evaluate(batch)
    assert capsys.readouterr().out.startswith(f"step 3 loss {float(losses[2]):.4g} | 500 ms")
    trainer.step(batch)
    trainer.save(tmp_path / "checkpoint")
    assert capsys.readouterr().out.startswith("step 4 ")
    run, *steps = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (run["seed"], run["ranks"]) == (7, 1)
    assert re.fullmatch("[0-9a-f]{16}", run["plan_hash"])
    assert datetime.fromisoformat(run["time"]).tzinfo is not None
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["lr"] for record in steps] == [0.5, 0.25, 0.125, 0.0625]
    assert [record["grad_norm"] for record in steps[:3]] == norms


def test_every_run_begins_with_its_own_record(plan: Plan, tmp_path: Path) -> None:
    """Runs share a file; without `clip_norm` there is no gradient norm.

    A learning rate may be a tensor, which the scheduler changes in place.
    """
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        model, batch = build()
        trainer = api.parallelize(
            model,
            plan,
            optimizer=lambda named: torch.optim.SGD(named, lr=torch.tensor(0.5)),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            log_path=path,
        )
        trainer.step(batch)
        trainer.log.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["plan_hash" in record for record in records] == [True, False, True, False]
    assert [record.get("step") for record in records] == [None, 1, None, 1]
    assert records[1]["grad_norm"] is None
    assert records[1]["lr"] == 0.5


def test_the_state_dict_is_in_the_models_order(plan: Plan) -> None:
    model, _ = build()
    names = list(model.state_dict())
    trainer = api.parallelize(model, plan, optimizer=sgd)
    trainer.run = replace(trainer.run, state_names=tuple(reversed(trainer.run.state_names)))
    assert list(trainer.state_dict()) == list(reversed(names))


def test_help_says_what_every_argument_is() -> None:
    text = api.parallelize.__doc__ or ""
    arguments = inspect.signature(api.parallelize).parameters
    assert [name for name in arguments if f"`{name}`" not in text] == []


@pytest.mark.usefixtures("asked")
def test_the_last_line_is_not_lost(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = build()
    trainer = api.parallelize(model, plan, optimizer=sgd)
    trainer.step(batch)
    log = trainer.log
    assert capsys.readouterr().out == ""
    train._close(log)  # what happens at the end of the process
    assert capsys.readouterr().out.startswith("step 1 ")


def test_a_cpu_is_read_at_once() -> None:
    reading = stopwatch.begin(torch.device("cpu"))
    loss = torch.tensor(2.5)
    reading.stop({"loss": loss, "lr": 0.1})
    loss.fill_(9.0)
    assert reading.ready
    assert reading.read()[0] == {"loss": 2.5, "lr": 0.1}
    assert 0 < reading.read()[1] < 10


def test_another_optimizer_is_refused_before_anything_is_made(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the class can be told; where it cannot, before the trainer exists."""
    model, _ = build()

    class AdamW(torch.optim.AdamW):
        """A namesake, whose states are its own."""

    namesake = replace(plan, optimizer=replace(plan.optimizer, name="adamw"))
    with pytest.raises(FingerprintError, match="script made a AdamW"):
        api.parallelize(model, namesake, optimizer=lambda named: AdamW(named, lr=0.1))
    with monkeypatch.context() as patch:
        patch.setattr(train, "training_program", lambda *_: pytest.fail("compiled"))
        for maker in (torch.optim.Adam, partial(torch.optim.Adam, lr=0.1)):
            with pytest.raises(FingerprintError, match=r"script made a Adam .*--optimizer adam"):
                api.parallelize(model, plan, optimizer=maker)
