"""Files that a user names: read whole, or refused at once.

A path may lead to anything. A pipe or a device would be read for ever, and a file of gigabytes is
no plan, configuration or cluster, so neither is begun.
"""

import errno
import os
import stat
from pathlib import Path

from parloom.errors import InputError

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
MIB = 1 << 20
# Without O_NONBLOCK, opening a pipe waits for its writer. Systems have some of these each.
FLAGS = os.O_RDONLY | sum(getattr(os, n, 0) for n in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def read_input(path: Path, what: str, most_bytes: int, advice: str = "") -> bytes:
    """The content of a regular file of at most `most_bytes` bytes; `what` names it in messages.

    Raises `InputError`, which ends with `advice`.
    """
    hint = f"; {advice}" if advice else ""
    try:
        handle = os.open(path, FLAGS)
        with open(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                kind = next((name for test, name in KINDS if test(mode)), "something else")
                raise InputError(f"cannot read {what} {path}: it is {kind}, and no file{hint}")
            data = file.read(most_bytes + 1)
    except OSError as error:
        # What opening a socket says is of devices.
        socket = error.errno == errno.ENXIO and path.is_socket()
        why = "it is a socket, and no file" if socket else error.strerror or str(error)
        raise InputError(f"cannot read {what} {path}: {why}{hint}") from None
    except ValueError:
        raise InputError(f"cannot read {what} {str(path)!r}: it is no path{hint}") from None
    if len(data) > most_bytes:
        most = f"{most_bytes // MIB} MiB" if most_bytes >= MIB else f"{most_bytes >> 10} KiB"
        raise InputError(f"cannot read {what} {path}: it has more than {most}{hint}")
    return data
