"""The `parloom` command, also as `python -m parloom`: Ctrl-C is one line at any moment.

Imports take seconds, and an exception in the middle of one reaches no handler whole: extension
modules turn it into errors of their own. The process ends then, as nothing that is worth keeping
exists; but a search has plans, so it gets the exception when the import has ended.
"""

import gc
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
AGAIN_S = 0.02
# Imports, traces and searches make many values and few cycles: looks for cycles are rare.
COLLECT = 10_000, 20, 50


def main() -> int:
    """Run the command; its exit code."""
    gc.set_threshold(*COLLECT)
    # A parent that ignores the signal, as `nohup` does, has its way.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from parloom import cli  # noqa: PLC0415 - after the signal

        return cli.main()
    except KeyboardInterrupt:
        return _end()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter ends


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; where a module is being imported, end, or try again soon."""
    importing = False
    while frame is not None:
        importing |= frame.f_code.co_filename.startswith("<frozen importlib")
        if importing and _searches(frame) and hasattr(signal, "setitimer"):  # not on Windows
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    if importing:
        os._exit(_end())
    raise KeyboardInterrupt


def _searches(frame: FrameType) -> bool:
    """Whether a frame is of a function that keeps the best plan so far."""
    name = frame.f_globals.get("__name__", "")
    keeps = name in ("parloom.choose", "parloom.answer") or name.startswith(
        ("parloom.search.", "parloom.workflow.")
    )
    return keeps and frame.f_code.co_name != "<module>"


def _end() -> int:
    os.write(2, b"interrupted\n")
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
