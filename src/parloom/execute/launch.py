"""Start a training script on every rank of a plan, and say in one message why it died.

The processes are torchrun's, so everything that works under torchrun works here, and a script that
somebody else's torchrun started works as well.
"""

import contextlib
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from parloom.cost.clusters import load_cluster, short_name
from parloom.errors import InputError, LaunchError, visible
from parloom.execute import rank as rank_module
from parloom.execute.silent import TIMED_OUT, Wait, silent_ranks
from parloom.execute.startup import check_ranks, check_runs_here
from parloom.execute.watch import CHECKPOINT, DEFAULT_TIMEOUT_S, OBSERVED, TIMEOUT_S, Seen, seen
from parloom.ir.lower_stages import stage_ranks
from parloom.ir.plan import Plan
from parloom.runtime.program import rank_name

POLL_S, GRACE_S = 0.2, 3.0  # to see that a rank has failed; for the others to end by themselves
BETWEEN = "between steps"  # how a rank's record begins when it is in none
TRACEBACK = "rank-{}-traceback.txt"
# What gloo and NCCL say when a peer is no longer there.
PEER_IS_GONE = re.compile(r"gloo|NCCL|onnection (closed|reset|refused)|Broken pipe")
FRAME = re.compile(r' *File "(.*)", line (\d+)')
# The signals that torchelastic handles (torch 2.13's TORCHELASTIC_SIGNALS_TO_HANDLE).
HANDLED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)  # Windows has two of them
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Death:
    """Why a rank ended: `exit_code` as a shell shows it, `notes` say what it was doing.

    `gone` says that it ended because another rank was no longer there.
    """

    rank: int
    exit_code: int
    cause: str
    notes: tuple[str, ...] = ()
    traceback: str = ""
    gone: bool = False


def run(
    plan: Plan,
    argv: Sequence[str],
    *,
    plan_path: Path | None = None,
    say: Say = lambda text: print(visible(text), file=sys.stderr, flush=True),
    verbose: bool = False,
    timeout_s: float | None = None,
    checkpoint: Path | None = None,
    observed: Path | None = None,
) -> int:
    """Run `argv` (a script or `-m module`, and its arguments) on every rank; the exit code.

    The script finds the plan's path in `PARLOOM_PLAN`; its trainer begins at `checkpoint`. A rank
    that others wait for longer than `timeout_s` ends the run. Raises `LaunchError` where this
    machine or the surrounding torchrun has not the plan's ranks, `InputError` where there is no
    such script, the timeout is none, or the plan is for devices that parloom does not run on.
    `observed` gets a log of the run, one step of it observed.
    """
    check_runs_here(plan)
    _check_script(argv)
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InputError(f"timeout: must be a number of seconds above 0, got {timeout_s!r}")
    ranks = plan.decisions.num_ranks
    backend = load_cluster(plan.cluster).backend
    given = {} if plan_path is None else {"PARLOOM_PLAN": str(plan_path.resolve())}
    given |= {} if checkpoint is None else {CHECKPOINT: str(checkpoint)}
    given |= {} if observed is None else {OBSERVED: str(observed)}
    given |= {} if timeout_s is None else {TIMEOUT_S: f"{timeout_s:g}"}
    if inside_a_job():
        check_ranks(plan)
        with _environment(given):
            rank_module.run_script(argv)
        return 0
    if backend == "nccl":
        _check_devices(plan, ranks)
    log_dir = Path(tempfile.mkdtemp(prefix="parloom-run-"))
    command = launch_command(ranks, argv, log_dir)
    settings = given | _defaults(backend, ranks)
    said = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    say(f"{said} {shlex.join(command)}".strip())
    try:
        with _environment(settings), _quiet(verbose), _handlers_kept(), _ending(log_dir):
            code = _launch(command, plan, log_dir, say, verbose)
    finally:
        if not any(log_dir.glob(TRACEBACK.format("*"))):  # what the message points to
            shutil.rmtree(log_dir, ignore_errors=True)
    return code


def inside_a_job() -> bool:
    """Whether this process is a rank already, of somebody else's torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_command(ranks: int, argv: Sequence[str], log_dir: Path) -> list[str]:
    """The torchrun command for this machine, with the interpreter that runs parloom."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--log-dir={log_dir}",
        "-m",
        "parloom.execute.rank",
        *argv,
    ]


def first_death(error: ChildFailedError) -> Death:
    """The root cause among all ranks that failed before torchrun stopped the rest.

    Ranks whose peer is gone raise, or abort in NCCL's watchdog, and torchrun ends the rest with
    SIGTERM. So blame goes to a rank that another signal killed, then to one that left by itself,
    then to the one that raised first.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        failure = item[1]
        if failure.exitcode >= 0:
            recorded = isinstance(failure.error_file_data.get("message"), dict)
            blame = 2 if recorded else 1
        else:
            late = {signal.SIGABRT: 3, signal.SIGTERM: 4}
            blame = late.get(signal.Signals(-failure.exitcode), 0)
        return blame, float(_extra(failure).get("time_s", failure.timestamp))

    rank, failure = min(error.failures.items(), key=order)
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    extra = _extra(failure)
    cause = _cause(failure)
    gone = failure.exitcode == -signal.SIGABRT or PEER_IS_GONE.search(cause) is not None
    trace = user_traceback(extra.get("py_callstack", ""))
    return Death(rank, code, cause, tuple(extra.get("notes", ())), trace, gone)


def user_traceback(text: str) -> str:
    """`text` without the frames that lead from the launched process to the user's script."""
    kept: list[str] = []
    skipping = False
    for line in text.splitlines(keepends=True):
        frame = FRAME.match(line)
        if frame is not None:
            skipping = frame[1] == rank_module.__file__ or frame[1].startswith("<frozen runpy")
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)


def user_line(text: str) -> str:
    """`train.py:8`, the innermost line of a traceback that is the user's; empty where none is."""
    frames = [frame for line in text.splitlines() if (frame := FRAME.match(line))]
    theirs = [f for f in frames if not f[1].startswith(("<", *_not_theirs()))]
    if not theirs:
        return ""
    path = os.path.relpath(theirs[-1][1])
    return f"{theirs[-1][1] if path.startswith('..') else path}:{theirs[-1][2]}"


def _not_theirs() -> tuple[str, ...]:
    """Folders of files that the user did not write: parloom, the standard library, packages."""
    packages = Path(torch.__file__).parents[1]
    folders = (Path(rank_module.__file__).parents[1], Path(os.__file__).parent, packages)
    return tuple(f"{folder}{os.sep}" for folder in folders)


def _launch(command: list[str], plan: Plan, log_dir: Path, say: Say, verbose: bool) -> int:
    ranks = plan.decisions.num_ranks
    try:
        # torch.distributed.run has no annotations.
        torchrun.run(torchrun.parse_args(command[3:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        left = [seen(log_dir, rank) for rank in range(ranks)]
        waits = _waits(error)
        if waits:
            say(_silent(plan, waits, left))
            return LaunchError.exit_code
        death = first_death(error)
        ended = [rank for rank in range(ranks) if _ended(rank, error, left[rank])]
        if death.gone and ended:
            text = _left_early(ended[0], death.rank, left[ended[0]].doing)
        else:
            doing = left[death.rank].doing
            notes = (f"last seen {doing}", *death.notes) if doing else death.notes
            text = _death(replace(death, notes=notes), plan)
        say(text + _trace(death, log_dir, verbose))
        return death.exit_code
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        say(f"{stop.sigval.name} stopped the run; every rank was ended")
        return 128 + int(stop.sigval)
    return 0


def _waits(error: ChildFailedError) -> dict[int, Wait]:
    """The ranks that gave up to wait for another one."""
    found: dict[int, Wait] = {}
    for rank, failure in error.failures.items():
        extra = _extra(failure)
        waited, time_s = extra.get("waited"), float(extra.get("time_s", failure.timestamp))
        if waited is not None:
            found[rank] = Wait(tuple(waited["ranks"]), waited["timeout_s"], time_s)
        elif TIMED_OUT.search(_cause(failure)):
            found[rank] = Wait((), float(os.environ.get(TIMEOUT_S, DEFAULT_TIMEOUT_S)), time_s)
    return found


def _silent(plan: Plan, waits: Mapping[int, Wait], left: Sequence[Seen]) -> str:
    """The message where ranks waited in vain."""
    blamed, by = silent_ranks(waits, left)
    timeout_s = min(wait.timeout_s for wait in waits.values())
    during = f" in {_doing(left[by])}" if left[by].doing else ""
    last = left[blamed[0]].doing or "before it began to train"
    seen_last = f"it was last seen {last}; " if len(blamed) == 1 else ""
    names = " or ".join(_named(plan, rank) for rank in blamed)
    return (
        f"error: {names} did not answer within {timeout_s:g} s:"
        f" {_named(plan, by)} waited for it{during}; {seen_last}"
        "the other ranks were stopped (a longer wait: --timeout)"
    )


def _doing(own: Seen) -> str:
    """`2F4, step 7`."""
    return own.doing.removeprefix("in action ")


def _named(plan: Plan, rank: int) -> str:
    """A rank, and its stages where the plan has several."""
    places = stage_ranks(plan.decisions) if len(plan.decisions.stages) > 1 else ()
    return rank_name(rank, [stage for stage, ranks in enumerate(places) if rank in ranks])


def _ended(rank: int, error: ChildFailedError, left: Seen) -> bool:
    """Whether a rank came to its end, or was stopped after its last step while it left."""
    failure = error.failures.get(rank)
    if failure is None:
        return True
    stopped = failure.exitcode == -signal.SIGTERM
    return stopped and left.doing.startswith(BETWEEN)


def _left_early(ended: int, waiting: int, doing: str) -> str:
    """The message where `waiting` missed a rank that had simply come to its end."""
    return (
        f"error: rank {ended} ended normally {doing.removeprefix(f'{BETWEEN}, ') or 'early'}"
        f" while rank {waiting} went on; do all ranks have the same number of batches, and do all"
        " make the same calls of the trainer (step, evaluate, save, state_dict)?"
    )


def _death(death: Death, plan: Plan) -> str:
    ranks = plan.decisions.num_ranks
    line = user_line(death.traceback)
    where = f" at {line}" if line else ""
    doing = f" ({'; '.join(death.notes)})" if death.notes else ""
    others = "; the other ranks were stopped" if ranks > 1 else ""
    name, _, stage = _named(plan, death.rank).partition(" (")
    whole = f"{name} of {ranks}" + (f" ({stage}" if stage else "")
    return f"error: {whole} died{where}{doing}: {death.cause}{others}"


def _trace(death: Death, log_dir: Path, verbose: bool) -> str:
    """What the message says of the traceback: all of it, or the file that has it."""
    if not death.traceback:
        return ""
    if verbose:
        return f"\n{death.traceback}"
    file = log_dir / TRACEBACK.format(death.rank)
    file.write_text(death.traceback, encoding="utf-8")
    return f"\ntraceback: {file}"


def _cause(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    if failure.exitcode < 0:
        hint = ""
        if failure.exitcode == -signal.SIGKILL:
            hint = " (often the kernel, when host memory runs out; try `parloom plan --memory`)"
        return f"killed by {failure.signal_name()}{hint}"
    if isinstance(message, dict):
        return str(message.get("message", "unknown")).strip()
    return f"the script ended with exit code {failure.exitcode}"


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}


def _check_script(argv: Sequence[str]) -> None:
    if not argv or list(argv) == ["-m"]:
        raise InputError("no training script: write `parloom run PLAN -- train.py ...`")
    if argv[0] == "-m":
        package = argv[1].partition(".")[0]
        if package not in sys.modules and not PathFinder.find_spec(
            package, [str(Path.cwd()), *sys.path]
        ):
            raise InputError(f"no module {argv[1]!r} in {Path.cwd()} or on sys.path")
    elif not Path(argv[0]).is_file():
        raise InputError(f"no training script {argv[0]!r} in {Path.cwd()}")


def _check_devices(plan: Plan, ranks: int) -> None:
    devices = torch.cuda.device_count()
    if devices < ranks:
        name = short_name(plan.cluster)
        raise LaunchError(
            f"the plan needs {ranks} GPUs ({name}) and this machine has {devices}; on a "
            f"cluster start its ranks with torchrun on every node, and without GPUs prove the plan "
            f"with `parloom verify --shrink`"
        )


def _defaults(backend: str, ranks: int) -> dict[str, str]:
    """Settings that the user did not make."""
    if backend == "nccl":
        # Fragmentation is what most often separates the planned peak from the real one.
        wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    else:
        # More threads than cores make gloo ranks stop each other.
        wanted = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """`settings` in the environment that the processes inherit."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Give back the handlers that torchelastic replaces: with its own, SIGTERM does not end what
    this process forks later.
    """
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # one that was not set from Python
                    signal.signal(number, handler)


@contextlib.contextmanager
def _ending(log_dir: Path) -> Iterator[None]:
    """End ranks that outlive one that failed: torchrun leaves 30 s to those that do not react."""
    over = threading.Event()

    def watch() -> None:
        while not any(log_dir.glob("*/attempt_0/*/error.json")):
            if over.wait(POLL_S):
                return
        if over.wait(GRACE_S):
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if rank_module.__name__ in child.cmdline():
                    child.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Silence torchrun's own log: what matters of it is in our one message."""
    before = logging.root.manager.disable
    if not verbose:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
