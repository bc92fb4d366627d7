"""The text of an entry of an action list: `F0`, `2B0` (of stage 2), `REDUCE`, `STEP`, `GATHER`."""

import re
from collections.abc import Iterable

ONCE = ("REDUCE", "STEP", "GATHER")
PASSES_AHEAD, AHEAD_BYTES = 4, 128 << 20
"""A rank is ready for the messages of so many passes of each other rank before it needs them, or of
as many as begin within so many bytes: back ends send nothing that nobody is ready for (gloo), and a
link that waits is not made up for.
"""
_PASS = re.compile(r"(\d{0,6})([FBW])(\d{1,6})")


def read_action(text: str) -> tuple[str, int, int | None] | None:
    """The kind, the stage and the microbatch, which the step program has none of; None for text
    that is no action.
    """
    if text in ONCE:
        return text, 0, None
    found = _PASS.fullmatch(text)
    return (found[2], int(found[1] or 0), int(found[3])) if found else None


def stages_text(stages: Iterable[int]) -> str:
    """`stage 1`, or `stages 0, 2`."""
    names = sorted(stages)
    return f"stage{'s' * (len(names) > 1)} {', '.join(map(str, names))}"


def passes_beside(microbatch: int, own: int, other: int) -> range:
    """The microbatches of a stage with `other` of them that have samples of one of a stage with
    `own`; one of both numbers divides the other.
    """
    if own >= other:
        first = microbatch // (own // other)
        return range(first, first + 1)
    each = other // own
    return range(microbatch * each, (microbatch + 1) * each)
