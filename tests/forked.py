"""Work in a fork of this process, which has imported torch already: seconds less than a command."""

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable


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
