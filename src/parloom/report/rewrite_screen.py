"""One rewrite of a plan on the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from parloom.cost.units import format_bytes, format_seconds


def rewrite_screen(rewrite: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What is computed in another way, and what that saves."""
    yield Text("rewrite", "bold")
    yield Text(f"  {rewrite['where']}")
    yield Text(f"  proof: {rewrite['proof']}")
    yield from (Text(f"  - {line}") for line in rewrite["before"])
    yield from (Text(f"  + {line}") for line in rewrite["after"])
    if rewrite["reason"]:
        yield Text(f"  {rewrite['reason']}")
        return
    sent = _saved_bytes(rewrite["saved_sent_bytes"], "sent")
    peak = _saved_bytes(rewrite["saved_peak_bytes"], "at the peak")
    saved = (_saved_time(rewrite["saved_s"], "a step"), *sent, *peak)
    yield Text(f"  against the plan without it: {', '.join(saved)}")
    for own in rewrite["stages"]:
        time = _saved_time(own["saved_computing_s"], "computing")
        saved = (time, *_saved_bytes(own["saved_peak_bytes"], "at its peak"))
        yield Text(f"    {own['name']}: {', '.join(saved)}")
    if rewrite["changed"]:
        yield Text(f"  what else is not as here: {', '.join(rewrite['changed'])}")


def _saved_time(seconds: float, what: str) -> str:
    return f"{format_seconds(abs(seconds))} {'less' if seconds >= 0 else 'more'} {what}"


def _saved_bytes(count: int, what: str) -> Iterator[str]:
    if count:
        yield f"{format_bytes(abs(count))} {'less' if count > 0 else 'more'} {what}"
