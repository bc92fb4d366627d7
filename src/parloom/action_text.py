"""The text of an entry of an action list: `F0`, `2B0` (of stage 2), `REDUCE`, `STEP`, `GATHER`."""

import re

ONCE = ("REDUCE", "STEP", "GATHER")
_PASS = re.compile(r"(\d{0,6})([FBW])(\d{1,6})")


def read_action(text: str) -> tuple[str, int, int | None] | None:
    """The kind, the stage and the microbatch, which the step program has none of; None for text
    that is no action.
    """
    if text in ONCE:
        return text, 0, None
    found = _PASS.fullmatch(text)
    return (found[2], int(found[1] or 0), int(found[3])) if found else None
