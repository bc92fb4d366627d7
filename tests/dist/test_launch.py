"""Launching: real torchrun processes whose scripts need no torch, so that each test is short."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parloom.errors import FingerprintError, InputError, LaunchError
from parloom.execute import launch
from parloom.ir.mesh import Mesh, grid
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan, Stage, one_stage
from parloom.ir.plan_json import plan_to_json

PLAN = Plan(
    source=ModelSource("zoo:mlp"),
    cluster="3xcpu",
    fingerprint="f",
    optimizer=Optimizer(),
    method="data_parallel",
    decisions=Decisions(one_stage(grid({"x": 3}))),
    graph="",
)


class Said(list[str]):
    """Collects what the launcher says."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture(autouse=True)
def no_surrounding_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text("import os, sys, time, json, signal\nRANK = int(os.environ['RANK'])\n" + text)
    return str(path)


def folders_of_runs(folder: Path) -> list[Path]:
    """What runs left behind: a folder where a message points to it."""
    return list(folder.glob("parloom-run-*"))


def run(path: str, said: Said, *arguments: str, verbose: bool = False) -> int:
    return launch.run(PLAN, [path, *arguments], say=said, verbose=verbose)


def test_every_rank_runs_the_script_with_its_arguments(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = (
        "names = 'WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS', 'PARLOOM_PLAN'\n"
        "seen = {n: os.environ.get(n) for n in names} | {'argv': sys.argv[1:]}\n"
        "open(sys.argv[1] + str(RANK), 'w').write(json.dumps(seen))\n"
    )
    prefix = str(tmp_path / "out")
    arguments = [script(tmp_path, text), prefix, "--lr=1", "-v"]
    assert launch.run(PLAN, arguments, plan_path=tmp_path / "plan.json", say=said) == 0
    seen = [json.loads(Path(prefix + str(rank)).read_text()) for rank in range(3)]
    assert [s["LOCAL_RANK"] for s in seen] == ["0", "1", "2"]
    assert all(s["WORLD_SIZE"] == "3" and s["argv"] == arguments[1:] for s in seen)
    assert all(s["OMP_NUM_THREADS"] == "1" for s in seen)
    assert seen[0]["PARLOOM_PLAN"] == str(tmp_path / "plan.json")
    assert "--standalone --nproc-per-node=3" in said[0]
    assert sys.executable in said[0]
    assert "OMP_NUM_THREADS" not in os.environ
    assert folders_of_runs(tmp_path) == []


def test_signals_end_what_this_process_forks_later(tmp_path: Path, said: Said) -> None:
    """torchelastic has handlers of its own, which children that are forked afterwards would have,
    too.
    """
    before = [signal.getsignal(number) for number in launch.HANDLED]
    with pytest.MonkeyPatch.context() as patched:
        kept: list[object] = []
        torchelastic = launch._launch

        def watched(*given: Any) -> int:
            code = torchelastic(*given)
            kept.extend(signal.getsignal(number) for number in launch.HANDLED)
            return code

        patched.setattr(launch, "_launch", watched)
        assert run(script(tmp_path, ""), said) == 0
    assert kept != before
    assert [signal.getsignal(number) for number in launch.HANDLED] == before


def test_a_script_ends_as_it_would_alone(tmp_path: Path, said: Said) -> None:
    """Threads are waited for, exit handlers run, what was printed is written, the code is kept."""
    text = (
        "import atexit, os, threading\n"
        "def late(what):\n"
        "    time.sleep(0.2)\n"
        "    open(sys.argv[1] + what + str(RANK), 'w').write(what)\n"
        "atexit.register(late, 'handler')\n"
        "threading.Thread(target=late, args=('thread',)).start()\n"
        # The first rank that fails ends the others: it waits for what rank 0 writes at its end.
        "there = ('handler0', 'thread0')\n"
        "while RANK and not all(os.path.exists(sys.argv[1] + w) for w in there):\n"
        "    time.sleep(0.05)\n"
        "sys.exit(RANK and 3)\n"
    )
    prefix = str(tmp_path / "out-")
    assert run(script(tmp_path, text), said, prefix) == 3
    assert "the script ended with exit code 3" in said[1]
    written = {path.name for path in tmp_path.glob("out-*")}
    assert written >= {"out-handler0", "out-thread0"}


def test_a_rank_that_raises_is_one_message_and_the_others_end(
    tmp_path: Path, said: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (
        "if RANK != 1:\n    time.sleep(100)\n"
        "from parloom.execute.watch import watcher\nwatch = watcher()\n"
        "watch('a much longer text before')\nwatch('in action B0, step 12')\n"
        "def load():\n    raise ValueError('shard of 7 rows')\n"
        "json.loads('7', object_hook=None, parse_int=lambda text: load())\n"
    )
    started = time.monotonic()
    assert run(script(tmp_path, text), said) == 1
    assert time.monotonic() - started < 40
    message = said[1].splitlines()
    assert message[0] == (
        f"error: rank 1 of 3 died at {tmp_path}/train.py:10 (last seen in action B0, step 12):"
        " ValueError: shard of 7 rows; the other ranks were stopped"
    )
    file = Path(message[1].removeprefix("traceback: "))
    first, at, *_ = trace = file.read_text().splitlines()
    assert first == "Traceback (most recent call last):"
    assert at == f'  File "{tmp_path}/train.py", line 11, in <module>'
    assert trace[-1] == "ValueError: shard of 7 rows"
    shutil.rmtree(file.parent)
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_rank_names_the_signal(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = (
        "from parloom.execute.watch import watcher\nwatcher()('in action F1, step 7')\n"
        "if RANK == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(100)\n"
    )
    assert run(script(tmp_path, text), said) == 128 + signal.SIGKILL
    assert said[1].startswith(
        "error: rank 2 of 3 died (last seen in action F1, step 7): killed by SIGKILL"
    )
    assert folders_of_runs(tmp_path) == []


STAGES = tuple(
    Stage((name,), (range(begin, begin + 1),), Mesh(())) for begin, name in enumerate("abc")
)
PIPELINE = replace(PLAN, decisions=Decisions(STAGES, schedule="1f1b"))


def test_a_killed_rank_of_a_pipeline_names_its_stage(tmp_path: Path, said: Said) -> None:
    text = (
        "from parloom.execute.watch import watcher\nwatcher()('in action 1F4, step 7')\n"
        "if RANK == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(100)\n"
    )
    assert launch.run(PIPELINE, [script(tmp_path, text)], say=said) == 128 + signal.SIGKILL
    assert len(said) == 2
    assert said[1].startswith(
        "error: rank 1 of 3 (stage 1) died (last seen in action 1F4, step 7): killed by SIGKILL"
    )


@pytest.mark.slow
def test_a_rank_that_hangs_is_one_message_and_ends(
    tmp_path: Path, said: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is stopped while it waits for rank 0, which is the first to give up."""
    text = (
        "from parloom.errors import SilentRankError\n"
        "from parloom.execute.watch import watcher\nwatch = watcher()\n"
        "action = {0: 'B0', 1: '1F4', 2: '2F4'}[RANK]\n"
        "watch(f'in action {action}, step 7')\nwatch.waiting([(RANK + 1) % 2])\n"
        "open(sys.argv[1] + str(RANK), 'w').write(str(os.getpid()))\n"
        "while not all(os.path.exists(sys.argv[1] + r) for r in '012'):\n    time.sleep(0.05)\n"
        "if RANK == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(3.5 + RANK)\n"
        "raise SilentRankError([1], RANK, float(os.environ['PARLOOM_TIMEOUT_S']), action)\n"
    )
    prefix = str(tmp_path / "pid-")
    began = time.monotonic()
    argv = [script(tmp_path, text), prefix]
    assert launch.run(PIPELINE, argv, say=said, timeout_s=4) == LaunchError.exit_code == 8
    assert time.monotonic() - began < 30, "torchrun alone would wait 30 s for it"
    assert said[1:] == [
        "error: rank 1 (stage 1) did not answer within 4 s: rank 0 (stage 0) waited for it in B0,"
        " step 7; it was last seen in action 1F4, step 7; the other ranks were stopped (a longer"
        " wait: --timeout)"
    ]
    assert not any(_alive(int(Path(prefix + str(rank)).read_text())) for rank in range(3))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_no_timeout(timeout_s: float, tmp_path: Path, said: Said) -> None:
    with pytest.raises(InputError, match="timeout: must be a number of seconds above 0"):
        launch.run(PLAN, [script(tmp_path, "")], say=said, timeout_s=timeout_s)


def test_a_users_own_timeout_is_an_error_like_others(tmp_path: Path, said: Said) -> None:
    text = "if RANK == 1:\n    raise RuntimeError('Read timed out.')\ntime.sleep(100)\n"
    assert run(script(tmp_path, text), said) == 1
    assert "rank 1 of 3 died" in said[1]
    assert "Read timed out" in said[1]


def test_a_rank_that_ends_early_is_named_and_not_the_one_that_misses_it(
    tmp_path: Path, said: Said
) -> None:
    """Real gloo ranks: rank 1 has a batch less."""
    text = (
        "import torch, torch.distributed as dist\n"
        "from parloom.execute.watch import watcher\nwatch = watcher()\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(1, 3 if RANK == 1 else 4):\n"
        "    watch(f'in action F0, step {step}')\n    dist.all_reduce(torch.ones(2))\n"
        "    watch(f'between steps, after step {step}')\n"
    )
    assert run(script(tmp_path, text), said) == 1
    assert re.match(
        r"error: rank 1 ended normally after step 2 while rank [02] went on; do all ranks have the"
        r" same number of batches",
        said[1],
    )
    trace = Path(said[1].splitlines()[1].removeprefix("traceback: "))
    assert "all_reduce" in trace.read_text()
    shutil.rmtree(trace.parent)


def test_an_error_of_its_own_is_a_ranks_own(tmp_path: Path, said: Said) -> None:
    """Also where another rank had come to its end."""
    text = "if RANK == 1:\n    sys.exit(0)\ntime.sleep(1)\nraise ValueError('bad sample')\n"
    assert run(script(tmp_path, text), said, verbose=True) == 1
    assert re.match(r"error: rank [02] of 3 died at .*train\.py:6: ValueError: bad sample", said[1])
    assert "Traceback" in said[1]


def test_lines_of_the_user() -> None:
    """The innermost one, whatever libraries do inside; a syntax error has one too."""
    trace = (
        "Traceback (most recent call last):\n"
        f'  File "{Path.cwd()}/data/read.py", line 3, in read\n    torch.ones(a)\n'
        f'  File "{torch.__file__}", line 7, in ones\n    pass\nTypeError: a\n'
    )
    assert launch.user_line(trace) == "data/read.py:3"
    assert (
        launch.user_line('  File "/x/train.py", line 2\n    a b\nSyntaxError: x') == "/x/train.py:2"
    )
    assert launch.user_line("KeyError: 'a'") == ""


def test_a_killed_rank_is_blamed_before_those_who_miss_it(tmp_path: Path, said: Said) -> None:
    text = (
        "if RANK == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "raise RuntimeError('Connection closed by peer')\n"
    )
    assert run(script(tmp_path, text), said) in (1, 137)
    assert said[1].startswith("error: rank ")


def test_the_exit_code_of_an_error_is_passed_on(tmp_path: Path, said: Said) -> None:
    text = (
        "from parloom.errors import FingerprintError\n"
        "if RANK == 1:\n    raise FingerprintError('other model')\ntime.sleep(100)\n"
    )
    assert run(script(tmp_path, text), said) == FingerprintError.exit_code == 5
    assert "rank 1 of 3" in said[1]
    assert "FingerprintError: other model" in said[1]


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    path = script(
        tmp_path, f"open({str(pids)!r} + str(RANK), 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    code = (
        "import sys; from tests.dist.test_launch import PLAN; from parloom.execute import launch; "
        f"launch.run(PLAN, [{path!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    files = [Path(f"{pids}{rank}") for rank in range(3)]
    while not all(f.exists() and f.read_text() for f in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    for file in files:
        while _alive(int(file.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_another_world_size_is_refused(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LaunchError, match=r"plan is for 3 ranks \(3xcpu\) and this job has 4"):
        run(script(tmp_path, ""), said)
    assert LaunchError.exit_code == 8


def test_under_another_torchrun_the_script_runs_here(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "import pathlib; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
    out = tmp_path / "out"
    assert run(script(tmp_path, text), said, str(out)) == 0
    assert out.read_text() == str(os.getpid())
    assert said == []


def test_missing_gpus_are_refused(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    plan = replace(PLAN, cluster="3xH100")
    with pytest.raises(LaunchError, match=r"needs 3 GPUs \(3xH100\) and this machine has 1"):
        launch.run(plan, [script(tmp_path, "")], say=said)


@pytest.mark.parametrize("argv", [[], ["-m"], ["none.py"], ["-m", "none"], ["-m", "none.train"]])
def test_no_script(argv: list[str], said: Said) -> None:
    with pytest.raises(InputError, match=r"no (training script|module 'none)"):
        launch.run(PLAN, argv, say=said)


def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(plan_to_json(PLAN), encoding="utf-8")
    started = tmp_path / "started"
    path = script(tmp_path, f"open({str(started)!r} + str(RANK), 'w')\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "parloom", "run", str(plan), "--", path]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not all(Path(f"{started}{rank}").exists() for rank in range(3)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
