"""Globals that modules of other files read and write."""

WARMUP = 0
STEPS = {"done": 0}


def advance() -> int:
    """Counts in this file."""
    global WARMUP  # noqa: PLW0603
    WARMUP += 1
    return WARMUP
