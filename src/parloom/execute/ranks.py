"""Ranks forked from one warm process: gloo between them in half a second instead of ten.

The parent has imported torch already, so a rank costs a fork. A fork copies the calling thread
only, so what the parent ran before must have kept to one thread (`OMP_NUM_THREADS=1`). Not for
CUDA, which cannot be forked once it is in use.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parloom.errors import LaunchError

T = TypeVar("T")

GRACE_S = 0.5
EVERY_S = 10.0  # between lines of progress
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankError(LaunchError):
    """A rank raised or died: which one, and the text of its traceback where it left one.

    `killed` says that the system ended it, as it does where memory runs out.
    """

    def __init__(
        self, rank: int, num_ranks: int, cause: str, traceback_text: str, killed: bool = False
    ) -> None:
        super().__init__(f"rank {rank} of {num_ranks} failed: {cause}")
        self.rank = rank
        self.traceback_text = traceback_text
        self.killed = killed


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank sends home instead of a result; `time_s` orders failures on one machine."""

    cause: str
    traceback_text: str
    time_s: float
    killed: bool = False


def fork_ranks(
    num_ranks: int,
    function: Callable[..., T],
    *args: Any,
    timeout_s: float = 120.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[T]:
    """`function(*args)` on each of `num_ranks` forked gloo ranks; results in rank order.

    The first failure, or the timeout, ends all ranks. Results travel by pickle, between a process
    and its own forks only. `say` gets a line now and then while they run.

    Raises:
        RankError: a rank raised, or ended without a result.
        LaunchError: the timeout passed.
    """
    fork = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    ends: dict[Connection, tuple[int, BaseProcess]] = {}
    with tempfile.TemporaryDirectory(prefix="parloom-ranks-") as folder:
        rendezvous = str(Path(folder, "store"))
        try:
            for rank in range(num_ranks):
                receive, send = fork.Pipe(duplex=False)
                call = (rank, num_ranks, rendezvous, timeout_s, send, function, args)
                processes.append(fork.Process(target=_run, args=call, daemon=True))
                _start(processes[-1])
                send.close()
                ends[receive] = rank, processes[-1]
            results = _results(ends, timeout_s, say)
            for process in processes:
                process.join(GRACE_S)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in a forking process; a rank uses none of the parent's.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        process.start()


def _results(
    ends: dict[Connection, tuple[int, BaseProcess]], timeout_s: float, say: Callable[[str], None]
) -> list[Any]:
    """One result per rank; raises for the rank that failed first."""
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    waiting, num_ranks = dict(ends), len(ends)
    started = time.monotonic()
    deadline = started + timeout_s
    while waiting and time.monotonic() < deadline:
        ready = wait(list(waiting), max(min(EVERY_S, deadline - time.monotonic()), 0))
        if not ready:
            done = num_ranks - len(waiting)
            say(f"{time.monotonic() - started:.0f} s, {done} of {num_ranks} ranks are done")
        for end in ready:
            assert isinstance(end, Connection)
            rank, process = waiting.pop(end)
            received = _receive(end, process)
            if isinstance(received, _Failure):
                # Others fail because this one is gone, or this one because another is: look on
                # for a moment, and blame the earliest.
                deadline = min(deadline, time.monotonic() + GRACE_S)
                failures[rank] = received
            else:
                results[rank] = received
    if failures:
        rank, first = min(failures.items(), key=lambda entry: entry[1].time_s)
        raise RankError(rank, num_ranks, first.cause, first.traceback_text, first.killed)
    if waiting:
        late = sorted(rank for rank, _ in waiting.values())
        raise LaunchError(f"ranks {late} of {num_ranks} gave no result within {timeout_s:g} s")
    return [results[rank] for rank in range(num_ranks)]


def _receive(end: Connection, process: BaseProcess) -> Any:
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        # Dead without a word; it died before anyone could notice it.
        process.join(GRACE_S)
        code = process.exitcode
        by = f"exit code {code}"
        if code is not None and code < 0:
            by = f"signal {signal.Signals(-code).name}"
        killed = code == -signal.SIGKILL
        return _Failure(f"it ended without a result ({by})", "", 0.0, killed)


def _run(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    timeout_s: float,
    send: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of a rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    message: Any
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        message = function(*args)
    except BaseException as error:  # sent home as text: nothing is swallowed
        cause = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        message = _Failure(cause, traceback.format_exc(), time.monotonic())
    send.send_bytes(pickle.dumps(message))
    if not isinstance(message, _Failure):
        with suppress(RuntimeError):  # a peer that is gone already
            dist.destroy_process_group()
