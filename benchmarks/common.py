"""What every benchmark writes beside its table: JSON with machine, versions and rows."""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from parloom import __version__

ROOT = Path(__file__).resolve().parents[1]


@cache
def revision() -> str:
    """The commit that is measured, as it is when this is first asked; "" where there is none.

    It ends in `-dirty` where files differ from it.
    """
    command = ["git", "describe", "--always", "--exclude=*", "--dirty"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def report(name: str, rows: Sequence[dict[str, object]], path: str | None) -> None:
    """Write the rows with the revision, machine and versions they were measured on."""
    if path is None:
        return
    document = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "parloom": __version__,
        "revision": revision(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "system": platform.system(),
        },
        "rows": list(rows),
    }
    unfinished = Path(f"{path}.part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def reported(path: str | None) -> list[dict[str, Any]]:
    """The rows that a file has of this very revision; none where files differ from a commit."""
    if path is None or not Path(path).exists() or not revision() or revision().endswith("-dirty"):
        return []
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    return document["rows"] if document.get("revision") == revision() else []


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with its distribution-free interval of at least 95 %, from order statistics.

    For n = 7 that is the smallest to the largest value (98.4 %); fewer values cannot give 95 %.
    """
    ordered = sorted(values)
    n = len(ordered)
    outside, skip = 0.0, 0  # the chance that the median lies beyond the interval, on both sides
    while skip < (n - 1) // 2:
        outside += 2 * math.comb(n, skip) / 2**n
        if outside + 2 * math.comb(n, skip + 1) / 2**n > 0.05:
            break
        skip += 1
    return statistics.median(ordered), ordered[skip], ordered[n - 1 - skip]


def verdict(low: float, high: float, limit: float) -> str:
    """What an interval says about a ratio that should not exceed `limit`."""
    if high <= limit:
        return "yes"
    return "no" if low > limit else "inconclusive"
