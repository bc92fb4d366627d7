"""What every launched process runs: the user's script, and one record of how it ended.

`python -m parloom.execute.rank train.py ...` under torchrun. A script that raises leaves its error
in torchelastic's error file and prints nothing: `execute.launch` prints one message for all ranks.
"""

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from parloom.errors import InputError, ParloomError, SilentRankError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> None:
    """Run `train.py ...` or `-m package.module ...` as `__main__`, with its own `sys.argv`."""
    if ERROR_FILE in os.environ:
        sys.excepthook = _record
        _end_with_the_launcher()
    code = 0
    try:
        run_script(argv)
    except SystemExit as stop:
        code = _code_of(stop)
    _leave(code)


def _leave(code: int) -> None:
    """End as the interpreter would, but without taking it apart.

    A thread of gloo that is letting go of a tensor takes the interpreter's lock; once the
    interpreter is being taken apart the lock ends the thread, which aborts the process ("terminate
    called without an active exception") after all its work was done.
    """
    dist = sys.modules.get("torch.distributed")  # a script need not have imported it
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(stop: SystemExit) -> int:
    """The exit status of `sys.exit(...)`: a number, or a message for stderr and 1."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def run_script(argv: Sequence[str]) -> None:
    """Run a script or module in this process as `python` would."""
    if not argv or argv == ["-m"]:
        raise InputError("no training script: write `parloom run PLAN -- train.py ...`")
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


def _record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the error where torchelastic looks for it, and end at once.

    Ending without the interpreter's clean-up matters: waiting for a process group whose other
    members wait for this rank would keep all of them until the timeout.
    """
    code = error.exit_code if isinstance(error, ParloomError) else 1
    if isinstance(error, KeyboardInterrupt):
        code = 130
    waited = None
    if isinstance(error, SilentRankError):
        waited = {"ranks": error.ranks, "timeout_s": error.timeout_s}
    message = {
        "message": f"{kind.__name__}: {error}",
        "errorCode": code,
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(kind, error, trace)),
            "timestamp": str(int(time.time())),
            "time_s": time.time(),
            "notes": list(getattr(error, "__notes__", ())),
            "waited": waited,
        },
    }
    Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": message}), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_the_launcher() -> None:
    """Ask Linux to end this process when the launcher is killed; elsewhere torchrun has to."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
