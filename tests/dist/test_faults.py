"""Ranks that die or hang, and runs that go on from a checkpoint on fewer devices."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parloom import api, cli, resume
from parloom import runtime as rt
from parloom.errors import InputError, LaunchError, SilentRankError
from parloom.execute import checkpoint, launch
from parloom.execute.rank import ERROR_FILE
from parloom.execute.ranks import RankError, fork_ranks
from parloom.execute.silent import TIMED_OUT, Wait, silent_ranks
from parloom.execute.watch import CHECKPOINT, TIMEOUT_S, Seen, seen, timeout, watcher
from parloom.ir.plan import Plan
from parloom.ir.schedules import schedule
from parloom.runtime.step import Step
from parloom.runtime.work import Waiting
from tests.dist import lowered, staged
from tests.dist.test_parallelize import build, factory, planned  # noqa: F401 - a fixture

LIMIT_S = 3.0
# Rank 0 has stage 0, ranks 1 and 2 stage 1, rank 3 stage 2.
SIZES = [1, 2, 1]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(60)


def train(
    pipeline: rt.Pipeline,
    tensors: dict[str, Tensor],
    batch: dict[str, Tensor],
    folder: Path,
    hurt: Callable[[], None] | None,
    where: tuple[int, str, int],
) -> float:
    """Two steps, the second one observed; `where` is a rank, and the n-th action or wait in which
    it is hurt.
    """
    victim, what, number = where
    path = folder / "run" / "attempt_0" / str(dist.get_rank()) / "error.json"
    path.parent.mkdir(parents=True)
    os.environ[ERROR_FILE] = str(path)
    watch, count = watcher(), 0
    owner: Any = Waiting if what == "wait" else Step
    name = {"action": "_run", "wait": "wait", "together": "_together"}[what]
    run = getattr(owner, name)

    def hurting(self: Any, *given: Any) -> None:
        nonlocal count
        count += 1
        if hurt is not None and count == number and dist.get_rank() == victim:
            if what == "wait":
                watch.waiting(given[1])
            hurt()
        run(self, *given)

    setattr(owner, name, hurting)
    trainer = rt.Trainer(
        pipeline,
        tensors,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        comm=rt.DistributedComm(
            pipeline.mesh, timeout=timedelta(seconds=LIMIT_S), tell=watch.waiting
        ),
        watch=watch,
    )
    return [float(trainer.step(batch, observed=step == 1).loss) for step in range(2)][-1]


@pytest.fixture(scope="module")
def pipeline() -> tuple[rt.Pipeline, dict[str, Tensor], dict[str, Tensor]]:
    model = lowered.model("gpt")
    plan = staged.drawn(
        model.graph, staged.even(model.graph, 3), SIZES, schedule="zb_h1", num_microbatches=4
    )
    return staged.compiled(model, plan).pipeline, model.tensors, model.batch


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("hurt", "where"),
    [
        (stop, (0, "action", 3)),
        (stop, (1, "action", 16)),
        # At the end of the first step, and where all begin the second one.
        (stop, (1, "action", 15)),
        (stop, (1, "together", 1)),
        (stop, (2, "wait", 7)),
        (stop, (3, "wait", 6)),
        (sleep, (2, "action", 5)),
    ],
)
def test_a_rank_that_hangs_is_named(
    hurt: Callable[[], None],
    where: tuple[int, str, int],
    pipeline: tuple[rt.Pipeline, dict[str, Tensor], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    """Some rank says in time whom it waited for, and what all left leads to the one that hangs."""
    began = time.monotonic()
    with pytest.raises(RankError) as failed:
        fork_ranks(4, train, *pipeline, tmp_path, hurt, where)
    assert time.monotonic() - began < LIMIT_S + 10
    said = re.search(
        r"SilentRankError: (rank \d \(stage \d\)( or )?)+ did not answer within 3 s:"
        r" rank (\d) \(stage \d\) waited for it in \d?([FBW]\d|REDUCE|STEP|GATHER)",
        str(failed.value),
    )
    assert said is not None, str(failed.value)
    left = [seen(tmp_path, rank) for rank in range(4)]
    first = failed.value.rank
    assert int(said[3]) == first != where[0]
    waits = {first: Wait(left[first].waits_for, LIMIT_S, time.time())}
    assert silent_ranks(waits, left)[0] == (where[0],)


def test_ranks_that_answer_train_on(
    pipeline: tuple[rt.Pipeline, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path
) -> None:
    losses = fork_ranks(4, train, *pipeline, tmp_path, None, (0, "action", 1))
    assert len(set(losses)) == 1
    assert all(own.waits_for == () for own in (seen(tmp_path, rank) for rank in range(4)))


def _waits_of(
    name: str, stages: int, microbatches: int, hung: int, done: int
) -> tuple[list[tuple[int, ...]], bool]:
    """Whom each rank of a pipeline waits for in the end, where rank `hung` hangs after so many
    actions, and whether it hangs in a wait. After their lists all ranks wait for all others.
    """
    lists = schedule(name, stages, microbatches, 1)
    own = [[(a.kind, a.microbatch) for a in actions if a.kind in "FB"] for actions in lists]
    finished: set[tuple[str, int, int | None]] = set()
    at = [0] * stages

    def needed(rank: int) -> tuple[int, ...]:
        if at[rank] == len(own[rank]):
            return tuple(r for r in range(stages) if r != rank)
        kind, microbatch = own[rank][at[rank]]
        other = rank - 1 if kind == "F" else rank + 1
        there = not 0 <= other < stages or (kind, other, microbatch) in finished
        return () if there else (other,)

    at_hang: tuple[int, ...] | None = None
    moved = True
    while moved:
        moved = False
        for rank in range(stages):
            if rank == hung and at[rank] == done:
                # As it was when it came there: what it waits for may have come since.
                at_hang = needed(rank) if at_hang is None else at_hang
            elif at[rank] < len(own[rank]) and not needed(rank):
                kind, microbatch = own[rank][at[rank]]
                finished.add((kind, rank, microbatch))
                at[rank], moved = at[rank] + 1, True
    waits = [needed(rank) for rank in range(stages)]
    waits[hung] = at_hang or ()
    return waits, bool(at_hang)


def hangs() -> Iterator[tuple[int, list[tuple[int, ...]], bool]]:
    """All moments in which a rank of small pipelines may hang."""
    for name in ("gpipe", "1f1b", "zb_h1"):
        for hung in range(4):
            for done in range(8):
                yield hung, *_waits_of(name, 4, 4, hung, done)


def blamed(hung: int, waits: list[tuple[int, ...]], age_s: float) -> set[tuple[int, ...]]:
    """Who is named, whichever of the other ranks gives up first."""
    left = [Seen("F0", own, 100.0 - age_s * (rank == hung)) for rank, own in enumerate(waits)]
    first = [rank for rank in range(4) if rank != hung]
    return {silent_ranks({r: Wait(waits[r], 4.0, 100.0)}, left)[0] for r in first}


def test_the_rank_that_hangs_is_found_at_every_moment() -> None:
    """One that computes for ever runs; one that was stopped, also while it waited, does not."""
    for hung, waits, waiting in hangs():
        assert blamed(hung, waits, 10.0) == {(hung,)}
        if not waiting:
            assert blamed(hung, waits, 0.0) == {(hung,)}


def test_without_signs_of_life_a_wait_that_is_over_misleads() -> None:
    """Why ranks touch their files: a rank that is stopped while it waits still names another."""
    wrong = [blamed(hung, waits, 0.0) != {(hung,)} for hung, waits, waiting in hangs() if waiting]
    assert any(wrong)


def test_where_nobody_said_whom_it_waits_for_all_others_may_be_it() -> None:
    """In a checkpoint's own group; unless one has stopped."""
    left = [Seen("saving, after step 3", (), alive_s) for alive_s in (100.0, 99.9, 99.8)]
    waits = {1: Wait((), 4.0, 100.0)}
    assert silent_ranks(waits, left) == ((0, 2), 1)
    assert silent_ranks(waits, [*left[:2], replace(left[2], alive_s=90.0)]) == ((2,), 1)


def test_the_error_names_stages_and_action() -> None:
    named = {2: "rank 2 (stage 1)", 3: "rank 3 (stage 2)"}
    error = SilentRankError((2,), 3, 60.0, "2F4", named.__getitem__)
    assert str(error) == (
        "rank 2 (stage 1) did not answer within 60 s: rank 3 (stage 2) waited for it in 2F4"
    )
    assert error.exit_code == LaunchError.exit_code == 8


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "inf"])
def test_timeouts_are_numbers_of_seconds(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_S, given)
    with pytest.raises(LaunchError, match="it is a number of seconds above 0"):
        timeout()
    monkeypatch.setenv(TIMEOUT_S, "2.5")
    assert timeout() == timedelta(seconds=2.5)
    monkeypatch.delenv(TIMEOUT_S)
    assert timeout() is None


# Going on.

STEPS, SAVED = 4, 2


def sgd(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def stopped_in_a_save(plan: Plan, folder: Path) -> None:
    """Rank 2 stops when torch's own part of the save begins."""
    os.environ[TIMEOUT_S] = f"{LIMIT_S:g}"
    trainer = api.parallelize(build()[0], plan, optimizer=sgd)
    if dist.get_rank() == 2:
        checkpoint.dcp_save = lambda *given, **named: stop()  # type: ignore[attr-defined]
    trainer.save(folder / "saved")


def test_a_save_waits_no_longer_than_a_step(four: Plan, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as failed:
        fork_ranks(4, stopped_in_a_save, four, tmp_path)
    # The first rank that waited long enough ends, and with it the others' connections.
    cause = str(failed.value).partition("failed: ")[2]
    assert TIMED_OUT.search(cause) or launch.PEER_IS_GONE.search(cause), cause
    assert time.monotonic() - began < LIMIT_S + 20
    assert not (tmp_path / "saved").exists()


def losses(plan: Plan, folder: Path | None, last: Path | None) -> list[float]:
    """Train on other samples in each step; save after two steps, or begin where it was saved."""
    if last is not None:
        os.environ[CHECKPOINT] = str(last)
    model, batch = build()
    trainer = api.parallelize(model, plan, optimizer=sgd)
    found = []
    for step in range(trainer.steps_done, STEPS):
        if folder is not None and step == SAVED:
            trainer.save(folder / "saved")
        found.append(float(trainer.step({**batch, "x": batch["x"] * (1 + step)}).loss))
    return found


@pytest.fixture(scope="module")
def four(factory: str) -> Plan:  # noqa: F811
    plan = planned(factory, "4xcpu", "gpipe")
    assert len(plan.decisions.stages) == 4
    return replace(plan, optimizer=replace(plan.optimizer, name="sgd", num_states=0))


def test_fewer_devices_go_on_with_the_losses_of_all(four: Plan, tmp_path: Path) -> None:
    said: list[str] = []
    three = resume.replanned(four, resume.Devices("3xcpu", 3), said.append)
    assert (three.decisions.num_ranks, three.method, three.cluster) == (3, "gpipe", "3xcpu")
    same = ("source", "fingerprint", "optimizer", "graph", "evaluation_graph", "seed", "settings")
    assert all(getattr(three, name) == getattr(four, name) for name in same)
    expected = fork_ranks(4, losses, four, tmp_path, None)[0]
    for found in fork_ranks(3, losses, three, None, tmp_path / "saved"):
        assert found == pytest.approx(expected[SAVED:], rel=1e-12)
    fresh = fork_ranks(3, losses, three, None, None)[0]
    assert fresh == pytest.approx(expected, rel=1e-12)
    assert fresh[:SAVED] != pytest.approx(expected[SAVED:], rel=1e-3)


@pytest.mark.slow
def test_another_method_where_the_plans_own_has_none(four: Plan) -> None:
    said: list[str] = []
    found = resume.replanned(replace(four, method="gpipe"), resume.Devices("8xcpu", 8), said.append)
    assert found.method == "auto"
    assert any(line.startswith("gpipe has no plan for 8xcpu: gpipe: 6 items") for line in said)


def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be run."""
    given: dict[str, Any] = {}

    def run(plan: Plan, argv: list[str], **others: Any) -> int:
        given.update(others, plan=plan, argv=argv)
        return 0

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.delenv("RANK", raising=False)
    return given


def test_the_command_goes_on_under_a_new_plan(
    four: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.save(four, tmp_path)
    run = ["run", str(tmp_path), "--resume"]
    assert cli.main([*run, "--", "train.py"]) == 2
    assert f"no checkpoint in {tmp_path}" in capsys.readouterr().err
    fork_ranks(4, losses, four, tmp_path, None)
    given = started(monkeypatch)
    assert cli.main([*run, "--timeout", "30", "--", "train.py", "-v"]) == 0
    assert (given["plan"], given["checkpoint"]) == (four, tmp_path / "saved")
    assert (given["timeout_s"], given["argv"]) == (30.0, ["train.py", "-v"])
    asked = ["--cluster", "3xcpu", "--devices", "3", "--checkpoint", str(tmp_path / "saved")]
    assert cli.main([*run, *asked, "--", "train.py"]) == 0
    assert given["plan"].decisions.num_ranks == 3
    assert given["checkpoint"] == tmp_path / "saved"
    assert api.load(given["plan_path"]) == given["plan"]
    assert "after step 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([*run, *asked, "--", "train.py"]) == 8
    assert "is a rank already" in capsys.readouterr().err


def test_flags_of_resume_go_with_it(
    four: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.save(four, tmp_path)
    assert cli.main(["run", str(tmp_path), "--devices", "3", "--", "train.py"]) == 2
    assert "go with --resume" in capsys.readouterr().err


def test_gpus_that_are_left(four: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    plan = replace(four, cluster="4xH100")
    assert resume.devices_there(plan, None, None) == resume.Devices("4xH100-SXM5-80GB", 2)
    assert resume.devices_there(plan, "3xH100", None) == resume.Devices("3xH100-SXM5-80GB", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert resume.devices_there(plan, None, None) is None
    assert resume.devices_there(four, None, None) is None
    with pytest.raises(InputError, match="no checkpoint"):
        resume.last_checkpoint(Path("/nowhere"))
