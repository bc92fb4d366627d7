"""What every benchmark writes beside its table: JSON with machine, versions and rows."""

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from parloom import __version__


def report(name: str, rows: Sequence[dict[str, object]], path: str | None) -> None:
    """Write the rows with the machine and versions they were measured on."""
    if path is None:
        return
    document = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "parloom": __version__,
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
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


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
