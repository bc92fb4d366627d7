"""Work in a fork of this process, which has imported torch already: seconds less than a command."""

import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import IO


def forked(work: Callable[[], int], timeout_s: float) -> tuple[int | None, str]:
    """The exit code of `work`, negative where a signal or the timeout ended it; what it printed."""
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work, writing))
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in a forking process; the fork uses none of the parent's.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        process.start()
    os.close(writing)
    late = threading.Timer(timeout_s, process.kill)
    late.start()
    with open(reading, encoding="utf-8") as file:
        said = file.read()
    process.join()
    late.cancel()
    return process.exitcode, said


def _run(work: Callable[[], int], writing: int) -> None:
    for stream in (1, 2):
        os.dup2(writing, stream)
    with open(1, "w", encoding="utf-8") as sys.stdout, open(2, "w", encoding="utf-8") as sys.stderr:
        code = work()
    sys.exit(code)


def forked_ranks(
    work: Callable[[int], int], ranks: int, timeout_s: float
) -> list[tuple[int | None, str, str]]:
    """Of each of `ranks` forks at once the exit code of `work(rank)`, its stdout and its stderr."""
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(ranks):
        files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        process = context.Process(target=_run_rank, args=(work, rank, *files))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process", DeprecationWarning)
            process.start()
        started.append((process, files))
    late = threading.Timer(timeout_s, lambda: [process.kill() for process, _ in started])
    late.start()
    for process, _ in started:
        process.join()
    late.cancel()
    return [(process.exitcode, *map(_whole, files)) for process, files in started]


def _run_rank(work: Callable[[int], int], rank: int, out: IO[str], err: IO[str]) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    with open(1, "w", encoding="utf-8") as sys.stdout, open(2, "w", encoding="utf-8") as sys.stderr:
        code = work(rank)
    sys.exit(code)


def _whole(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()
