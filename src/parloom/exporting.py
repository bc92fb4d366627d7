"""Answers to `parloom export`: files by which others start a plan, or are set up like it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parloom.errors import InputError, nearest
from parloom.execute.files import read_plan, write_atomic
from parloom.export.launch import TARGETS, job_of, launch_file


def export(path: str | Path, to: str, script: Sequence[str], out: str | Path) -> dict[str, Any]:
    """Write the launch file of `to` for the plan at `path` into the folder `out`; what it starts.

    Raises `InputError` for a launcher that is not known, and for a plan of unequal nodes.
    """
    if to not in TARGETS:
        known = ", ".join(TARGETS)
        raise InputError(f"--to: no launcher {to!r}{nearest(to, TARGETS)}; there are {known}")
    file = Path(path) / "plan.json" if Path(path).is_dir() else Path(path)
    job = job_of(read_plan(file), str(file), script)
    name, text = launch_file(to, job)
    written = write_atomic(Path(out) / name, text)
    return {
        "to": to,
        "file": str(written),
        "plan_hash": job.hash,
        "nodes": job.nodes,
        "processes_a_node": job.per_node,
    }
