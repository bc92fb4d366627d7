"""What every benchmark writes beside its table: JSON with machine, versions and rows."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from parloom import __version__


def report(name: str, rows: Sequence[dict[str, object]], path: str | None) -> None:
    """Write the rows with the machine and versions they were measured on."""
    if path is None:
        return
    document = {
        "benchmark": name,
        "parloom": __version__,
        "torch": torch.__version__,
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
    """Median with the distribution-free interval of the order statistics next to it.

    For n = 7 the interval from the 1st to the 7th value covers the median with 98.4 %.
    """
    ordered = sorted(values)
    return statistics.median(ordered), ordered[0], ordered[-1]
