"""Plans for a cluster of V100 and P100 against stages that take all devices for equal ones.

    PYTHONPATH=. python benchmarks/pipelines_mixed.py [--cases bert,gnmt] [--json FILE]

For each case the predicted step of: `auto`; `whale`, its rule by the peaks of the devices; the
fastest plan on the V100 alone; and an equal split, which is the best plan of the same rule where
all devices are taken for V100, priced on those that are there (Whale, ATC'22, reports 1.2 to 1.4
times its throughput). Exit code 1 where `auto` is slower than another, or below its bound.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from common import report

from parloom import api
from parloom.candidates import candidates
from parloom.cost.hardware import DataSheets
from parloom.cost.units import format_seconds
from parloom.execute.machine import machine_for
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Plan
from parloom.ir.regular_parts import memory_of
from parloom.search.request import Request
from parloom.zoo.resnet import build_wide_resnet

Row = dict[str, Any]
HERE = Path(__file__).parent
MIXED = str(HERE / "8xV100-8xP100.yaml")
TITLES = "case", "method", "step", "against equal", "devices", "stages", "microbatches", "search"


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo."""

    model: str
    flags: Mapping[str, Any]


CASES: Mapping[str, Case] = {
    "bert": Case("zoo:bert_large", {"batch": 256, "seq": 128, "optimizer": "adamw"}),
    "gnmt": Case("zoo:gnmt", {"batch": 512, "optimizer": "adamw"}),
    "resnet": Case(f"{Path(__file__)}:resnet50", {"optimizer": "sgd"}),
}


def resnet50() -> tuple[Any, dict[str, Any]]:
    """ResNet-50 for 512 images."""
    return build_wide_resnet(batch=512, widening=1)


def equal_s(captured: api.Captured, cluster: Cluster) -> float:
    """The step of the best plan of Whale's rule for equal devices, on those of `cluster`."""
    device = cluster.parts[0].cluster.device
    parts = tuple(replace(p, cluster=replace(p.cluster, device=device)) for p in cluster.parts)
    alike = DataSheets(replace(cluster, parts=parts))
    graph, optimizer = captured.graph, captured.optimizer
    supposed = Request(graph, alike, optimizer, device.memory_bytes, method="whale")
    there = replace(supposed, machine=DataSheets(cluster), limit_bytes=memory_of(cluster))
    found = candidates(supposed, lambda text: None).found
    best = min(found, key=lambda plan: plan.prediction.step_s)
    step = there.placed(best.decisions)
    fitting = inf if not there.fits(step) else step.step_s
    for plan in sorted(found, key=lambda plan: plan.prediction.step_s):
        if fitting < inf:
            break
        step = there.placed(plan.decisions)
        fitting = step.step_s if there.fits(step) else inf
    return fitting


def row(name: str, method: str, plan: Plan, equal: float, seconds: float) -> Row:
    """One line of the table."""
    assert plan.prediction is not None
    step_s = plan.prediction.step_s
    return {
        "case": name,
        "method": method,
        "step_s": step_s,
        "bound_s": plan.bound_s,
        "against_equal": equal / step_s,
        "devices": plan.decisions.num_ranks,
        "stages": [len(stage.items) for stage in plan.decisions.stages],
        "microbatches": plan.decisions.num_microbatches,
        "peaks": dict(plan.prediction.peaks),
        "notes": [line for line in plan.notes if "devices are used" in line or "idle" in line],
        "search_s": seconds,
    }


def rows_of(name: str) -> list[Row]:
    """All methods on one case."""
    case = CASES[name]
    captured = api.capture(case.model, **case.flags)
    cluster = machine_for(MIXED).cluster
    equal = equal_s(captured, cluster)
    found = [{"case": name, "method": "equal", "step_s": equal, "against_equal": 1.0}]
    for method in ("whale", "auto"):
        started = time.process_time()
        plan = api.search(captured, cluster=MIXED, method=method)
        found.append(row(name, method, plan, equal, time.process_time() - started))
        if method == "auto":
            alone = [a.step_s for a in plan.alternatives if a.fits and "on 8xV100" in a.name]
            least = min(alone, default=inf)
            found.append(
                {
                    "case": name,
                    "method": "V100 alone",
                    "step_s": least,
                    "against_equal": equal / least,
                }
            )
    return found


def line(found: Row) -> str:
    """A row of the table as text."""
    return "  ".join(
        f"{text:>13}"
        for text in (
            found["case"],
            found["method"],
            format_seconds(found["step_s"]),
            f"{found['against_equal']:.2f}x",
            str(found.get("devices", "")),
            "+".join(map(str, found.get("stages", ()))),
            str(found.get("microbatches", "")),
            f"{found['search_s']:.0f} s" if "search_s" in found else "",
        )
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json")
    args = parser.parse_args()
    print("  ".join(f"{title:>13}" for title in TITLES))
    rows: list[Row] = []
    for name in args.cases.split(","):
        found = rows_of(name)
        rows += found
        for each in found:
            print(line(each), flush=True)
            for note in each.get("notes", ()):
                print(f"{'':>15}{note}", flush=True)
        report("pipelines_mixed", rows, args.json)
    steps = {(r["case"], r["method"]): r["step_s"] for r in rows}
    autos = [r for r in rows if r["method"] == "auto"]
    slower = [
        r for r in autos if any(s < r["step_s"] for (c, _), s in steps.items() if c == r["case"])
    ]
    below = [r for r in autos if r["bound_s"] and r["step_s"] < r["bound_s"]]
    return 1 if slower or below else 0


if __name__ == "__main__":
    raise SystemExit(main())
