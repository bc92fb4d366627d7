"""A rank killed, or stopped, at random moments of a pipeline: how the job ends, and goes on.

    PYTHONPATH=. python benchmarks/faults.py [--kills 20] [--stops 5] [--seed 0] [--json FILE]

A small GPT in float64 trains on four gloo ranks, by turns under GPipe in four stages and under
ZB-H1 in stages of one, two and one device. At a moment drawn between two steps' ends a rank gets
SIGKILL or SIGSTOP. The job must end within its timeout (a stopped rank: the timeout and a grace
for the others) with one message that names the rank and its stage and with the exit code of the
contract, without tracebacks and without a process left. Then `parloom run --resume` goes on from
the last checkpoint on three devices under a plan of its own, and every loss of both runs must be
that of a run without faults. Cells that the file has of the same revision are not run again.
Exit code 1 where one is wrong.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, report, reported
from tests.dist.staged import drawn, even

from parloom import api
from parloom.execute.checkpoint import latest
from parloom.execute.manifest import read_manifest
from parloom.ir.lower_stages import stage_ranks
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph

SCRIPT = ROOT / "benchmarks" / "faults_train.py"
STEPS, SAVE_EVERY, RANKS = 24, 4, 4
TIMEOUT_S = {signal.SIGKILL: 30.0, signal.SIGSTOP: 8.0}
GRACE_S = 8.0  # for the other ranks and the launcher to end, on two cores
TOLERANCE = 1e-9
CODES = {signal.SIGKILL: 128 + signal.SIGKILL, signal.SIGSTOP: 8}
Row = dict[str, Any]


def plans() -> list[Plan]:
    """Four equal stages, and stages of one, two and one device."""
    spec = f"{SCRIPT}:small"
    even_stages = api.plan(
        spec, cluster="4xcpu", method="gpipe", devices=4, microbatches=4, optimizer="sgd"
    )
    graph = parse_graph(even_stages.graph)
    uneven = drawn(graph, even(graph, 3), [1, 2, 1], schedule="zb_h1", num_microbatches=4)
    return [even_stages, replace(even_stages, decisions=uneven, prediction=None)]


def start(folder: Path, plan: Path, *flags: str) -> subprocess.Popen[str]:
    """Begin a run of the script."""
    command = [sys.executable, "-m", "parloom", "run", str(plan), *flags, "--", str(SCRIPT)]
    return subprocess.Popen(
        [*command, str(folder), str(STEPS), str(SAVE_EVERY)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until_end(process: subprocess.Popen[str]) -> str:
    """The stderr of a run; one that does not end is stopped."""
    try:
        _, said = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()
        _, said = process.communicate()
    return said


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all steps that were logged, of every run; a line may be half written."""
    log = folder / "log.jsonl"
    found = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "step" in record:
            found.append((record["step"], record["loss"]))
    return found


def hurt(folder: Path, after: int, wait_s: float, rank: int, sign: signal.Signals) -> int:
    """Send a signal to a rank, some time after so many steps; its process id."""
    deadline = time.monotonic() + 300
    saved = folder / "checkpoints" / "step-0" / "checkpoint.json"
    while not saved.exists() or len(losses(folder)) < after:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder}: no step {after} within 300 s")
        time.sleep(0.002)
    time.sleep(wait_s)
    pid = int((folder / f"rank-{rank}.pid").read_text(encoding="ascii"))
    os.kill(pid, sign)
    return pid


def judged(plan: Plan, index: int, reference: dict[int, float], step_s: float, cell: Row) -> Row:
    """What comes of a fault."""
    rng = random.Random(f"{cell['seed']} {cell['number']} {cell['signal']}")
    sign = signal.Signals[cell["signal"]]
    after, rank = rng.randrange(STEPS - 2), rng.randrange(RANKS)
    stages = [s for s, own in enumerate(stage_ranks(plan.decisions)) if rank in own]
    row = cell | {"plan": index, "rank": rank, "stage": stages[0], "after_step": after}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="parloom-faults-") as name:
        folder = Path(name)
        file = api.save(plan, folder)["plan"]
        process = start(folder, file, "--timeout", f"{TIMEOUT_S[sign]:g}")
        pid = hurt(folder, after, rng.random() * step_s, rank, sign)
        began = time.monotonic()
        said = until_end(process)
        row["ended_s"] = round(time.monotonic() - began, 1)
        messages = [line for line in said.splitlines() if line.startswith("error: ")]
        row["message"] = messages[0] if messages else ""
        named = re.match(rf"error: rank {rank} (of 4 )?\(stage {stages[0]}\)", row["message"])
        grace_s = GRACE_S if sign is signal.SIGSTOP else 0.0
        checks = {
            "message": len(messages) == 1 and named is not None,
            "exit code": process.returncode == CODES[sign],
            "traceback": "Traceback" not in said,
            "time": row["ended_s"] <= TIMEOUT_S[sign] + grace_s,
            "process left": not psutil.pid_exists(pid),
        }
        wrong += [what for what, right in checks.items() if not right]
        last = latest(folder / "checkpoints")
        assert last is not None
        row["resumed_after"] = read_manifest(last).step
        wrong += resumed(folder, file, reference, row)
    return row | {"wrong": "; ".join(wrong)}


def resumed(folder: Path, plan: Path, reference: dict[int, float], row: Row) -> list[str]:
    """Go on with three devices; what is wrong with it."""
    flags = ("--resume", "--checkpoint", str(folder / "checkpoints"))
    process = start(folder, plan, *flags, "--cluster", "3xcpu", "--devices", "3")
    said = until_end(process)
    found = losses(folder)
    row["error"] = max(abs(loss / reference[step] - 1) for step, loss in found)
    (new,) = folder.glob("replanned-*/plan.json")
    row["resumed_ranks"] = api.load(new).decisions.num_ranks
    wrong = [] if process.returncode == 0 else [f"resumed with {process.returncode}: {said[-300:]}"]
    if {step for step, _ in found} != set(reference):
        wrong.append("steps are missing")
    first, _ = found[row["resumed_after"] - STEPS]
    if first != row["resumed_after"] + 1:
        wrong.append("not from the checkpoint")
    return wrong + (["losses"] if row["error"] > TOLERANCE else [])


def undisturbed(plan: Plan) -> tuple[dict[int, float], float]:
    """The losses of a run without faults, and the time of a step."""
    with tempfile.TemporaryDirectory(prefix="parloom-faults-") as name:
        folder = Path(name)
        process = start(folder, api.save(plan, folder)["plan"])
        said = until_end(process)
        if process.returncode:
            raise RuntimeError(said)
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        times = sorted(json.loads(line)["step_s"] for line in lines[1:])
        return dict(losses(folder)), times[len(times) // 2]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--stops", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json")
    asked = arguments.parse_args()
    rows: list[Row] = reported(asked.json)
    done = {(r["seed"], r["number"], r["signal"]) for r in rows}
    chosen = plans()
    known = [undisturbed(plan) for plan in chosen]
    reference = known[0][0]
    worst = max(abs(known[1][0][step] / loss - 1) for step, loss in reference.items())
    print(f"losses of the two plans without faults differ by {worst:.1e}", flush=True)
    for sign, count in ("SIGKILL", asked.kills), ("SIGSTOP", asked.stops):
        for number in range(count):
            if (asked.seed, number, sign) in done:
                continue
            index = number % len(chosen)
            cell: Row = {"seed": asked.seed, "number": number, "signal": sign}
            rows.append(judged(chosen[index], index, reference, known[index][1], cell))
            print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
            report("faults", rows, asked.json)
    wrong = [row for row in rows if row["wrong"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be", flush=True)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
