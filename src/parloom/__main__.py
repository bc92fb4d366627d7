"""The `parloom` command, also as `python -m parloom`: Ctrl-C is one line at any moment.

Imports take seconds, and an exception in the middle of one reaches no handler whole: extension
modules turn it into errors of their own. Nothing that is worth keeping exists then.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """Run the command; its exit code."""
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
    """Raise `KeyboardInterrupt`; end at once where a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(_end())
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> int:
    os.write(2, b"interrupted\n")
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
