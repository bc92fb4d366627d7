"""CPU seconds and memory of whole `parloom plan` commands, imports and capture included.

    python benchmarks/plan_speed.py [--cases llama3_8b,t5_3b] [--batches 64,128] [--json FILE]
        [--resume]

For each model of `scale` in `cases.yaml` and each of its batch sizes: one command in a process of
its own, user and system time of it and of those it starts, its peak resident memory, and the plan's
step. Goals: seconds, memory, and that the slowest batch size of a model takes at most twice as long
as the fastest; exit code 1 where one is missed or a command fails.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common import report, reported, revision
from questions import Row, cluster_spec, documented

from parloom.cost.units import format_bytes

# CPU seconds of a command on two cores, and the default.
GOALS = {"llama3_8b": 20.0, "llama31_405b": 80.0}
GOAL_S, MEMORY_BYTES, SPREAD = 40.0, 2_000_000_000, 2.0
FLAGS = ("batch", "seq", "dtype", "optimizer")


def command(case: Row, cluster: str, batch: int, folder: Path) -> list[str]:
    """The command that plans a case with a batch size, its files in `folder`."""
    model = case.get("model")
    if model is None:
        path = folder / "config.json"
        path.write_text(json.dumps(case["config"]), encoding="utf-8")
        model = str(path)
    words = [sys.executable, "-m", "parloom", "plan", model, "--cluster", cluster_spec(cluster)]
    for flag in FLAGS:
        if flag in case:
            words += [f"--{flag}", str(batch if flag == "batch" else case[flag])]
    return [*words, "--out", str(folder / "plan")]


def measured(name: str, case: Row, cluster: str, batch: int) -> Row:
    """One command: what it took and what it answers."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        begun = time.monotonic()
        with (folder / "said").open("w", encoding="utf-8") as said:
            process = subprocess.Popen(
                command(case, cluster, batch, folder), stdout=said, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        row = {
            "model": name,
            "cluster": cluster,
            "batch": batch,
            "exit": process.returncode,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": time.monotonic() - begun,
            "rss_bytes": usage.ru_maxrss * 1024,
        }
        if process.returncode:
            lines = (folder / "said").read_text(encoding="utf-8").splitlines()
            return row | {"said": lines[-1] if lines else ""}
        plan = json.loads((folder / "plan" / "plan.json").read_text(encoding="utf-8"))
        found = {key: plan.get(key) for key in ("bound_s", "solver_gap")}
        return row | found | {key: plan["prediction"][key] for key in ("step_s", "peak_bytes")}


def missed(row: Row) -> str:
    """Which goal a command misses, in words; empty where it misses none."""
    goal = GOALS.get(row["model"], GOAL_S)
    if row["exit"]:
        return f"exit code {row['exit']}: {row['said']}"
    if row["cpu_s"] > goal:
        return f"over {goal:.0f} s"
    return "over 2 GB" if row["rss_bytes"] > MEMORY_BYTES else ""


def uneven(rows: Sequence[Row]) -> list[str]:
    """Models whose slowest batch size takes more than twice as long as the fastest."""
    found = []
    for name in dict.fromkeys(row["model"] for row in rows):
        seconds = [row["cpu_s"] for row in rows if row["model"] == name and not row["exit"]]
        if seconds and max(seconds) > SPREAD * min(seconds):
            found.append(f"{name}: {min(seconds):.1f} to {max(seconds):.1f} CPU s over batch sizes")
    return found


def line(row: Row) -> str:
    """A row of the table."""
    cells = [row["model"], row["cluster"], str(row["batch"]), f"{row['cpu_s']:.1f} s"]
    cells += [f"{row['wall_s']:.1f} s", format_bytes(row["rss_bytes"])]
    if not row["exit"]:
        cells += [f"{row['step_s']:.4g} s", format_bytes(row["peak_bytes"])]
        cells += [
            "" if row[key] is None else f"{row[key]:.4g}" for key in ("bound_s", "solver_gap")
        ]
    return f"| {' | '.join([*cells, *[''] * (10 - len(cells)), missed(row)])} |"


def main() -> int:
    """Print the table; 1 where a goal is missed."""
    cases = documented()["scale"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(cases))
    parser.add_argument("--batches", default=None, help="these alone, of those that a case has")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true", help="go on with the rows of --json")
    options = parser.parse_args()
    known = reported(options.json) if options.resume else []
    asked = None if options.batches is None else set(map(int, options.batches.split(",")))
    print(f"revision {revision() or 'unknown'}\n")
    print("| model | cluster | batch | CPU | wall | peak of the command | step | memory | bound |"
          " solver_gap | goal |\n" + "|---" * 11 + "|", flush=True)  # fmt: skip
    rows: list[Row] = []
    for name in options.cases.split(","):
        case = cases[name]
        for cluster in case["clusters"]:
            for batch in case["batches"]:
                if asked is not None and batch not in asked:
                    continue
                key = {"model": name, "cluster": cluster, "batch": batch}
                row = next((r for r in known if key.items() <= r.items() and not r["exit"]), None)
                rows.append(row or measured(name, case, cluster, batch))
                report("plan_speed", rows, options.json)
                print(line(rows[-1]), flush=True)
    spread = uneven(rows)
    print("\n" + "\n".join(spread or ["no batch size takes twice as long as another of its model"]))
    return 1 if spread or any(map(missed, rows)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
