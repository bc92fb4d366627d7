"""What a model and its loss function can reach is watched while the trainer runs, and ranks may
differ in what no program depends on.
"""

import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parloom import api
from parloom.errors import FingerprintError, ParloomError
from parloom.execute.ranks import RankError, fork_ranks
from parloom.execute.train import Trainer
from parloom.ir.plan import Plan

FACTORY = """
from tests.dist.test_unchanged import build


def factory():
    return build()
"""
Batch = dict[str, Tensor]
SCALE = 2.0
TABLE = {"slope": 0.5}


@dataclass(slots=True)
class Slotted:
    by: float = 3.0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.drop(x) * self.scale
        return h


def bound(power: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function that reads a variable, and one that sets it."""

    def raised(x: Tensor) -> Tensor:
        return x * power

    def put(value: float) -> None:
        nonlocal power
        power = value

    return raised, put


class Model(nn.Module):
    alpha: float = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.blocks = nn.ModuleList([Inner()])
        self.settings = SimpleNamespace(slope=0.1, deep=[{"x": 1.0}], unread=1)
        self.slotted = Slotted()
        self.raised, self.put = bound(2.0)
        self.weights = numpy.ones(4, dtype=numpy.float32)
        self.mask = torch.ones(4)
        self.factors = (1.0, 2.0)
        self.args: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(self.a(x)[:, None])[0][:, 0]
        h = self.blocks[0](h) * SCALE * TABLE["slope"] * self.alpha * self.settings.slope
        h = self.raised(h) * self.settings.deep[0]["x"] * self.slotted.by * self.factors[0]
        result: Tensor = h * torch.from_numpy(self.weights) * self.mask
        return result


class Loss:
    def __init__(self) -> None:
        self.w = 1.0
        self.per_class = [1.0, 2.0]
        self.history: list[float] = []
        self.table = torch.ones(4)

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        found: Tensor = (output * self.table).square().mean() * self.w * self.per_class[0]
        return found


def build() -> tuple[Any, Batch, Loss]:
    torch.manual_seed(0)
    return Model(), {"x": torch.rand(8, 4) + 1}, Loss()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "unchanged_model.py"
    path.write_text(FACTORY)
    return f"{path}:factory"


@pytest.fixture(scope="module")
def plan(spec: str) -> Plan:
    return api.plan(spec, cluster="1xcpu", method="data_parallel", optimizer="sgd")


@pytest.fixture(scope="module")
def plan_2(spec: str) -> Plan:
    return api.plan(spec, cluster="2xcpu", devices=2, method="data_parallel", optimizer="sgd")


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.fixture(scope="module")
def run(plan: Plan) -> tuple[Any, Batch, Loss, Trainer]:
    model, batch, loss = build()
    return model, batch, loss, api.parallelize(model, plan, optimizer=sgd, loss=loss)


@dataclass(frozen=True)
class Change:
    make: Callable[[Any, Loss], object]
    back: Callable[[Any, Loss], object]
    told: str


def setting(of: Callable[[Any, Loss], Any], name: str, new: Any, old: Any, told: str) -> Change:
    return Change(
        lambda m, loss: setattr(of(m, loss), name, new),
        lambda m, loss: setattr(of(m, loss), name, old),
        told,
    )


def putting(of: Callable[[Any, Loss], Any], key: Any, new: Any, old: Any, told: str) -> Change:
    return Change(
        lambda m, loss: of(m, loss).__setitem__(key, new),
        lambda m, loss: of(m, loss).__setitem__(key, old),
        told,
    )


def own_globals(*_: object) -> dict[str, Any]:
    return globals()


CHANGES: dict[str, Change] = {
    "loss": setting(lambda m, loss: loss, "w", 0.5, 1.0, r"loss\.w was 1\.0 and is 0\.5"),
    "list": putting(
        lambda m, loss: loss.per_class, 0, 3.0, 1.0, r"loss\.per_class\[0\] was 1\.0 and is 3\.0"
    ),
    "tensor": Change(
        lambda m, loss: loss.table.mul_(2),
        lambda m, loss: loss.table.div_(2),
        r"values of loss\.table were written to",
    ),
    "another tensor": setting(
        lambda m, loss: loss, "table", torch.full((4,), 3.0), torch.ones(4), r"loss\.table was a "
    ),
    "plain object": setting(
        lambda m, loss: m.settings, "slope", 0.2, 0.1, r"model\.settings\.slope was 0\.1 and is 0"
    ),
    "chain": putting(
        lambda m, loss: m.settings.deep[0], "x", 2.0, 1.0, r"deep\[0\]\['x'\] was 1\.0 and is 2"
    ),
    "slots": setting(
        lambda m, loss: m.slotted, "by", 4.0, 3.0, r"model\.slotted\.by was 3\.0 and is 4\.0"
    ),
    "closure": Change(
        lambda m, loss: m.put(3.0), lambda m, loss: m.put(2.0), r"power.* was 2\.0 and is 3\.0"
    ),
    "class": setting(
        lambda m, loss: Model, "alpha", 2.5, 1.5, r"Model\.alpha was 1\.5 and is 2\.5"
    ),
    "global": putting(own_globals, "SCALE", 4.0, 2.0, r"test_unchanged\.SCALE was 2\.0 and is 4"),
    "dict of a file": putting(
        lambda m, loss: TABLE, "slope", 0.75, 0.5, r"TABLE\['slope'\] was 0\.5 and is 0\.75"
    ),
    "array": Change(
        lambda m, loss: m.weights.__setitem__(1, 2.0),
        lambda m, loss: m.weights.__setitem__(1, 1.0),
        r"values of model\.weights were written to",
    ),
    "code": setting(
        lambda m, loss: Inner,
        "forward",
        lambda self, x: x * self.scale,
        Inner.forward,
        r"Inner\.forward was a ",
    ),
    "around the module": putting(
        lambda m, loss: vars(m.blocks[0]), "scale", 5.0, 2.0, r"model\.blocks\.0\.scale was 2\.0"
    ),
    "replaced module": putting(
        lambda m, loss: m.blocks._modules, "0", nn.Identity(), None, r"model\.blocks\.0 was a Inner"
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_in_the_next_call(
    run: tuple[Any, Batch, Loss, Trainer], name: str
) -> None:
    model, batch, loss, trainer = run
    change, inner = CHANGES[name], model.blocks[0]
    unchanged = trainer._unchanged
    assert unchanged is not None
    change.make(model, loss)
    unchanged.looks = 0  # modules that were handed over are looked at now and then
    try:
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises(FingerprintError, match=rf"{change.told}.* since parallelize"):
                call(batch)
    finally:
        change.back(model, loss)
        model.blocks._modules["0"] = inner
    unchanged.looks = 0
    unchanged.seen.clear()
    trainer.step(batch)


def test_what_no_program_reads_is_said_and_passed(
    run: tuple[Any, Batch, Loss, Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    model, batch, loss, trainer = run
    trainer.step(batch)
    capsys.readouterr()
    for step in range(6):
        model.settings.unread = step + 2
        loss.w = float("1.0")  # another object, the same value
        trainer.step(batch)
    said = [line for line in capsys.readouterr().err.splitlines() if "since parallelize" in line]
    assert len(said) == 3  # the first change, the second and the fourth
    assert all("it is the planned one all the same" in line for line in said)
    assert "model.settings.unread was 1 and is 2" in said[0]
    model.settings.unread = 1
    loss.history.append(1.0)
    trainer.step(batch)


def test_a_late_change_of_a_path_that_changes_all_the_time(plan: Plan) -> None:
    model, batch, loss = build()
    loss.w = 1.0
    trainer = api.parallelize(model, plan, optimizer=sgd, loss=loss)
    model.settings.unread = 2
    trainer.step(batch)
    model.settings.unread, loss.w = 3, 0.25
    with pytest.raises(FingerprintError, match=r"loss\.w was 1\.0 and is 0\.25"):
        trainer.step(batch)
    loss.w = 1.0
    trainer.step(batch)


ARGS: dict[str, Callable[[int], object]] = {
    "local rank": lambda rank: SimpleNamespace(local_rank=rank, lr=0.1),
    "time": lambda rank: {"started": time.time()},
    "addresses": lambda rank: {id(object()): "weight"},
    "process": lambda rank: os.getpid(),
    "set of objects": lambda rank: {object(), object(), object()},
    "set of strings": lambda rank: frozenset({f"{rank}", "a", "b"}),
    "logger": lambda rank: logging.getLogger(f"rank{rank}"),
    "lock": lambda rank: threading.Lock(),
    "file": lambda rank: io.StringIO("x" * rank),
    "device": lambda rank: torch.device("cuda", rank),
    "path": lambda rank: Path("logs") / f"rank{rank}.txt",
    "generator": lambda rank: torch.Generator().manual_seed(rank),
    "tensor": lambda rank: torch.tensor(float(rank)),
    "more": lambda rank: [1] * rank,
}


def _with_args(plan: Plan) -> float:
    model, batch, loss = build()
    model.args = {name: make(dist.get_rank()) for name, make in ARGS.items()}
    trainer = api.parallelize(model, plan, optimizer=sgd, loss=loss, exact_random=True)
    return float(trainer.step(batch).loss)


def test_ranks_may_differ_in_what_no_program_reads(plan_2: Plan) -> None:
    losses = fork_ranks(2, _with_args, plan_2)
    assert losses[0] == losses[1]


ONE_RANK: dict[str, tuple[Callable[[Any, Loss, int], object], str]] = {
    "shape": (lambda m, loss, rank: setattr(m, "a", nn.Linear(4, 4, bias=False)), r"5 .*a\.bias"),
    "capture": (lambda m, loss, rank: setattr(m.settings, "slope", None), "5 .*another model"),
    "loss": (lambda m, loss, rank: setattr(loss, "w", 0.5), r"5 .*another model"),
    "kind": (lambda m, loss, rank: setattr(m.blocks[0], "drop", nn.GELU()), "5 .*another model"),
    "meta": (lambda m, loss, rank: m.a.to("meta"), "2 .*has no values"),
}


def _on_one_rank(plan: Plan, name: str, which: int) -> str:
    model, batch, loss = build()
    rank = dist.get_rank()
    if rank == which:
        ONE_RANK[name][0](model, loss, rank)
    try:
        trainer = api.parallelize(model, plan, optimizer=sgd, loss=loss)
        trainer.step(batch)
    except ParloomError as error:
        return f"{error.exit_code} {error}"
    return ""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "which"), [*((name, 1) for name in ONE_RANK), ("loss", 0), ("meta", 0)]
)
def test_every_rank_raises_where_one_does(plan_2: Plan, name: str, which: int) -> None:
    told = fork_ranks(2, _on_one_rank, plan_2, name, which, timeout_s=60.0)
    assert all(re.match(ONE_RANK[name][1], text) for text in told), told
    assert ("on rank 1: " in told[0] or "rank 1 built another" in told[0]) == (which == 1), told


IN_A_STEP = {
    "loss.w = 0.5": "loss.w was 1.0 and is 0.5",
    "model.settings.slope = 0.5": "model.settings.slope was 0.1 and is 0.5",
    "torch.set_default_dtype(torch.float64)": "torch.set_default_dtype is",
    "kept.data.zero_(); kept.detach().add_(1)": "a.weight of the model was changed",
    "model(**batch)": "trainer.step(batch) trains",
    "loss.per_class = None": "loss.per_class was",
}


def _changed_in_a_step(plan: Plan, change: str) -> None:
    model, batch, loss = build()
    kept = model.a.weight
    trainer = api.parallelize(model, plan, optimizer=sgd, loss=loss)
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            exec(change, globals(), locals() | {"kept": kept})
        trainer.step(batch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", IN_A_STEP)
def test_a_rank_raises_in_a_step(plan_2: Plan, change: str) -> None:
    told = re.escape(IN_A_STEP[change])
    with pytest.raises(RankError, match=rf"rank 1 of 2 failed: .*{told}"):
        fork_ranks(2, _changed_in_a_step, plan_2, change)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
