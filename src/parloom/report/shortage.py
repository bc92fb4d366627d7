"""Why nothing fits: what fills memory at its peak in the smallest plan, and what would fit."""

from dataclasses import dataclass
from typing import Any

from parloom.cost.holdings import Holding
from parloom.cost.units import bytes_up, format_bytes, format_seconds

MOST = 5


@dataclass(frozen=True, slots=True)
class Change:
    """Another question to which a plan fits: the `flags` that ask it, what is different in words,
    and the plan's step and peak. `samples` are those of a step.
    """

    flags: str
    words: str
    step_s: float
    peak_bytes: int
    device_s: float
    """Seconds of one device for one sample: what changes are ordered by."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Plan `name` is the smallest that was found, and takes more than `limit_bytes` on a device.

    `memory` is (component, bytes) at the peak instant, largest first, `at` what runs then, and
    `holdings` the largest tensors of these components. No plan that is searched holds less than
    `least_bytes`, where that is known. `changes` are priced, the cheapest first; `not_enough` are
    flags with which no plan fits either, `untried` ways that were not priced. `assumed` is what
    nobody asked for.
    """

    limit_bytes: int
    name: str
    peak_bytes: int
    memory: tuple[tuple[str, int], ...]
    at: str = ""
    holdings: tuple[Holding, ...] = ()
    least_bytes: int | None = None
    changes: tuple[Change, ...] = ()
    not_enough: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def shortage_text(shortage: Shortage) -> str:
    """The error message, some lines."""
    total = max(shortage.peak_bytes, 1)
    line = f"no plan fits in {format_bytes(shortage.limit_bytes)} per device"
    if shortage.least_bytes is not None:
        line += f"; each one that is searched holds {format_bytes(shortage.least_bytes)} or more"
    at = f", while {shortage.at} runs" if shortage.at else ""
    size = bytes_up(total)  # with so much a plan fits
    assumed = [f"assumed: {', '.join(shortage.assumed)}"] if shortage.assumed else []
    lines = [line, *assumed, f"the smallest found, {shortage.name}, needs {size} at its peak{at}:"]
    lines += [f"  {name:14} {_share(size, total)}" for name, size in shortage.memory if size]
    if shortage.holdings:
        lines.append("the largest tensors of it:")
        lines += [
            f"  {_holding_words(h):44} {_share(h.num_bytes, total)}" for h in shortage.holdings
        ]
    if shortage.changes:
        lines.append(
            "what would fit, the cheapest first (a search of its own may find faster plans):"
        )
        lines += [f"  {_change_words(change)}" for change in shortage.changes]
    elif shortage.not_enough or shortage.untried:
        lines.append("of what was tried, nothing fits")
    if shortage.not_enough:
        lines.append(f"not enough by itself: {', '.join(shortage.not_enough)}")
    if shortage.untried:
        lines.append(f"not tried: {', '.join(shortage.untried)}")
    return "\n".join(lines)


def shortage_document(shortage: Shortage) -> dict[str, Any]:
    """What `plan --json` prints as `infeasible`."""
    return {
        "limit_bytes": shortage.limit_bytes,
        "least_bytes": shortage.least_bytes,
        "assumed": list(shortage.assumed),
        "smallest": {
            "name": shortage.name,
            "peak_bytes": shortage.peak_bytes,
            "at": shortage.at,
            "memory": dict(shortage.memory),
            "tensors": [
                {"component": h.component, "name": h.name, "count": h.count, "bytes": h.num_bytes}
                for h in shortage.holdings
            ],
        },
        "changes": [
            {"flags": c.flags, "words": c.words, "step_s": c.step_s, "peak_bytes": c.peak_bytes,
             "device_s_per_sample": c.device_s}
            for c in shortage.changes
        ],
        "not_enough": list(shortage.not_enough),
        "untried": list(shortage.untried),
    }  # fmt: skip


def _share(size: int, total: int) -> str:
    return f"{format_bytes(size)} ({size / total:.0%})"


def _holding_words(held: Holding) -> str:
    many = f" x {held.count}" if held.count > 1 else ""
    return f"{held.component} of {held.name}{many}"


def _change_words(change: Change) -> str:
    price = f"{format_seconds(change.step_s)} a step, {bytes_up(change.peak_bytes)}"
    each = f"{format_seconds(change.device_s)} of a device for each sample"
    return f"{change.flags} ({change.words}): {price}; {each}"
