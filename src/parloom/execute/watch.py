"""What each rank is doing, where the launcher can read it after the rank has died.

A killed process cannot say anything, so every rank leaves its current action in a small file beside
torchelastic's error file: one system call an action.
"""

import os
from collections.abc import Callable
from pathlib import Path

from parloom.execute.rank import ERROR_FILE

NAME = "doing.txt"
WIDTH = 64


def watcher() -> Callable[[str], None]:
    """A function that records what this rank does; without a launcher it does nothing."""
    if ERROR_FILE not in os.environ:
        return lambda text: None
    path = Path(os.environ[ERROR_FILE]).with_name(NAME)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def record(text: str) -> None:
        # Always as long, so that a shorter text leaves nothing of a longer one.
        os.pwrite(file, text[:WIDTH].ljust(WIDTH).encode("ascii", "replace"), 0)

    return record


def last_record(log_dir: Path, local_rank: int) -> str:
    """What a rank was doing last, from torchrun's log folder; empty where it said nothing."""
    for path in log_dir.glob(f"*/attempt_0/{local_rank}/{NAME}"):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""
