"""A step for which a GPU's memory does not do: what is said, and the command that comes next."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import parloom
from parloom import cli
from parloom.errors import LaunchError
from parloom.execute import train
from parloom.execute.out_of_memory import Seen, out_of_memory, replanned, seen_on
from parloom.ir.expected import Constraint
from parloom.ir.plan import MEMORY, Plan
from parloom.runtime import Trainer as RuntimeTrainer
from parloom.zoo import mlp

GIB = 2**30
ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
)
SMALL = {"batch": 8, "features": 4, "hidden": 8, "depth": 2, "classes": 3}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return parloom.plan("zoo:mlp", cluster="1xH100", method="data_parallel")


def seen(plan: Plan, more: float = 1.25, free: int = 0) -> Seen:
    """An allocator that holds `more` of the predicted peak, with `free` bytes in its segments."""
    assert plan.prediction is not None
    held = int(plan.prediction.peak_bytes * more)
    return Seen(80 * GIB, held, held - 2**20, held + free, 2**20)


def test_it_says_where_how_much_and_what_next(plan: Plan) -> None:
    text = str(out_of_memory(plan, 0, 12, seen(plan), Path("segments.pickle")))
    assert "rank 0 ran out of GPU memory in step 12" in text
    assert "(+25% in the run)" in text
    assert "segments.pickle, open it in https://pytorch.org/memory_viz" in text
    assert "expandable_segments" not in text
    assert "expandable_segments" in str(out_of_memory(plan, 0, 1, seen(plan, free=8 * GIB), None))


def test_the_stage_of_a_rank_is_named() -> None:
    found = parloom.plan("zoo:mlp", cluster="2xH100", method="gpipe", microbatches=2)
    assert len(found.decisions.stages) == 2
    for rank in (0, 1):
        text = str(out_of_memory(found, rank, 1, seen(found), None))
        assert f"rank {rank} (stage {rank}) ran out" in text


@pytest.mark.parametrize(("peak", "more", "most"), [(72, 1.25, 74.5 / 1.25), (60, 1.02, 60)])
def test_the_next_plan_leaves_as_much_room_as_was_missing(
    plan: Plan, tmp_path: Path, peak: int, more: float, most: float
) -> None:
    """And less than this plan takes, where something else had the rest of the device."""
    assert plan.prediction is not None
    full = replace(plan.prediction, peak_bytes=peak * GIB)
    asked = (Constraint(f"{MEMORY}73GiB", 1.0, 1),)
    given = replace(plan, constraints=asked, prediction=full)
    words = shlex.split(replanned(given, seen(given, more)))
    assert words[0] == "parloom"
    assert words.count("--memory") == 1
    limit = words[words.index("--memory") + 1]
    assert limit.endswith("MiB")
    # An H100 has 74.5 GiB, as its preset says.
    assert 0.97 * most < int(limit.removesuffix("MiB")) / 1024 < most
    assert cli.main([*words[1:], "--out", str(tmp_path / "again")]) == 0


def test_what_was_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 79 * GIB)
    device = torch.device("cuda", 0)
    assert seen_on(device, ERROR).needed_bytes == 81 * GIB
    assert seen_on(device, torch.OutOfMemoryError("other words")).asked_bytes == 0


def test_a_step_ends_with_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = mlp.build(**SMALL)
    own = parloom.plan(model, batch, torch.optim.SGD, "1xcpu", method="data_parallel")
    trainer = parloom.parallelize(
        model, own, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    trainer.step(batch)

    def fails(*_: Any, **__: Any) -> None:
        raise ERROR

    monkeypatch.setattr(RuntimeTrainer, "step", fails)
    monkeypatch.setattr(train, "seen_on", lambda *_: seen(own))
    with pytest.raises(LaunchError, match="rank 0 ran out of GPU memory in step 2") as raised:
        trainer.step(batch)
    assert raised.value.__cause__ is ERROR
    assert "parloom.plan(..., memory=" in str(raised.value)
