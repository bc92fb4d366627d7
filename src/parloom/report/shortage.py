"""Why nothing fits: what fills memory in the smallest candidate, and what would help."""

from dataclasses import dataclass
from typing import Any

from parloom.cost.units import format_bytes
from parloom.ir.plan import Prediction

WAYS = (
    "a smaller --batch or --seq",
    "more --microbatches",
    "more devices",
    "--optimizer sgd",
    "--dtype bf16",
)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Candidate `name` needs least, yet more than `limit_bytes` on a device.

    `memory` is (component, bytes), largest first; `changes` would help, in words.
    """

    limit_bytes: int
    name: str
    peak_bytes: int
    memory: tuple[tuple[str, int], ...]
    changes: tuple[str, ...]


def shortage_of(name: str, smallest: Prediction, limit: int) -> Shortage:
    """What fills memory in the smallest candidate, and what would help."""
    parts = tuple(sorted(smallest.memory, key=lambda part: -part[1]))
    return Shortage(limit, name, smallest.peak_bytes, parts, WAYS)


def shortage_line(shortage: Shortage) -> str:
    """The error message."""
    total = max(shortage.peak_bytes, 1)
    shares = ", ".join(
        f"{name} {format_bytes(size)} ({size / total:.0%})" for name, size in shortage.memory
    )
    return (
        f"no plan fits in {format_bytes(shortage.limit_bytes)} per device; the smallest,"
        f" {shortage.name}, needs {format_bytes(total)}: {shares}. What would help:"
        f" {', '.join(shortage.changes)}"
    )


def shortage_document(shortage: Shortage) -> dict[str, Any]:
    """What `plan --json` prints as `infeasible`."""
    return {
        "limit_bytes": shortage.limit_bytes,
        "smallest": {
            "name": shortage.name,
            "peak_bytes": shortage.peak_bytes,
            "memory": dict(shortage.memory),
        },
        "changes": list(shortage.changes),
    }
