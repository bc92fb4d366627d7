"""Work in a fork of this process, which has imported torch already: seconds less than a command."""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path


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
    with tempfile.TemporaryDirectory() as folder:
        files = [
            [Path(folder, f"{rank}.{name}") for name in ("out", "err")] for rank in range(ranks)
        ]
        started = [
            context.Process(target=_run_rank, args=(work, rank, *own))
            for rank, own in enumerate(files)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process", DeprecationWarning)
            for process in started:
                process.start()
        end = time.monotonic() + timeout_s
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
        for process in started:
            process.kill()
            process.join()
        said = [[path.read_text(encoding="utf-8") for path in own] for own in files]
        return [(p.exitcode, out, err) for p, (out, err) in zip(started, said, strict=True)]


def _run_rank(work: Callable[[int], int], rank: int, *paths: Path) -> None:
    for stream, path in enumerate(paths, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream)
    with open(1, "w", encoding="utf-8") as sys.stdout, open(2, "w", encoding="utf-8") as sys.stderr:
        code = work(rank)
    sys.exit(code)
