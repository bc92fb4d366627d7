"""What each rank is doing, where the launcher can read it after the rank has died.

A killed process cannot say anything, so every rank leaves its current action, and the ranks that it
waits for, in a small file beside torchelastic's error file: one system call each. A thread touches
the file while the process runs: that of a process that was stopped grows old.
"""

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from parloom.errors import LaunchError
from parloom.execute.rank import ERROR_FILE

NAME = "doing.txt"
WIDTH, RANKS_WIDTH = 64, 448
BEAT_S = 0.5
CHECKPOINT = "PARLOOM_CHECKPOINT"  # set by `parloom run --resume`
# A file that gets the log of the run, with one observed step: that of `parloom run --trace`.
OBSERVED = "PARLOOM_OBSERVED"
TIMEOUT_S = "PARLOOM_TIMEOUT_S"  # set by `parloom run --timeout`
DEFAULT_TIMEOUT_S = 600.0


class Watch:
    """Records what this rank does; without a file it does nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: int | None = None
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            threading.Thread(target=self._beat, args=(self._file,), daemon=True).start()

    def __call__(self, text: str) -> None:
        """Record what comes next."""
        self._write(text, WIDTH, 0)

    def waiting(self, ranks: Sequence[int]) -> None:
        """Record the ranks that this one cannot go on without; none when it goes on."""
        text = ",".join(map(str, ranks))
        cut = text[:RANKS_WIDTH].rpartition(",")[0] if len(text) > RANKS_WIDTH else text
        self._write(cut, RANKS_WIDTH, WIDTH)

    def _write(self, text: str, width: int, offset: int) -> None:
        if self._file is not None:
            # Always as long, so that a shorter text leaves nothing of a longer one.
            os.pwrite(self._file, text[:width].ljust(width).encode("ascii", "replace"), offset)

    @staticmethod
    def _beat(file: int) -> None:
        while True:
            os.utime(file)
            time.sleep(BEAT_S)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank left: its action, whom it waited for, and when it last ran (0: it left none)."""

    doing: str = ""
    waits_for: tuple[int, ...] = ()
    alive_s: float = 0.0


def watcher() -> Watch:
    """What records this rank's doings; without a launcher it does nothing."""
    given = os.environ.get(ERROR_FILE)
    return Watch(None if given is None else Path(given).with_name(NAME))


def seen(log_dir: Path, local_rank: int) -> Seen:
    """What a rank was doing last, from torchrun's log folder."""
    for path in log_dir.glob(f"*/attempt_0/{local_rank}/{NAME}"):
        text = path.read_text(encoding="ascii", errors="replace")
        ranks = (word for word in text[WIDTH:].strip("\0 ").split(",") if word)
        return Seen(text[:WIDTH].strip("\0 "), tuple(map(int, ranks)), path.stat().st_mtime)
    return Seen()


def timeout() -> timedelta | None:
    """How long a rank waits for another one, where `parloom run --timeout` or the user says so."""
    given = os.environ.get(TIMEOUT_S)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"{TIMEOUT_S} is {given!r}; it is a number of seconds above 0")
    return timedelta(seconds=seconds)
