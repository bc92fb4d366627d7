"""`auto` with pipelines against every method that makes pipelines, in one cost model.

    PYTHONPATH=. python benchmarks/pipelines_compared.py [--cases gpt,candle_uno] [--json FILE]

For each case and method: the predicted step of the best plan that fits, its stages, and CPU seconds
of the search; each method uses as many devices and microbatches as it likes. Exit code 1 where a
method is faster than `auto`, or where a plan is below the bound of `auto`.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import report, revision
from torch import nn

from parloom import api
from parloom.cost.units import format_seconds
from parloom.errors import ParloomError
from parloom.ir.plan import Plan
from parloom.zoo import gpt

Row = dict[str, Any]
HERE = Path(__file__).parent
METHODS = (
    "auto", "megatron", "gpipe", "pipedream", "graphpipe", "alpa", "alpa_inter", "whale",
    "data_parallel", "fsdp",
)  # fmt: skip
SLOW = str(HERE / "4xcore-100mbit.yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo or of this file, on a cluster."""

    model: str
    cluster: str
    flags: Mapping[str, Any]


def heavy_head() -> tuple[nn.Module, dict[str, Any]]:
    """A small GPT whose head takes as long as two and a half of its six blocks."""
    return gpt.build(batch=16, seq=64, vocab=8000, width=256, depth=6, heads=4)


CASES: Mapping[str, Case] = {
    "gpt": Case(f"{Path(__file__)}:heavy_head", SLOW, {"optimizer": "sgd"}),
    "candle_uno": Case("zoo:candle_uno", "1x4xV100", {"batch": 1024, "optimizer": "sgd"}),
    "dlrm": Case("zoo:dlrm", "1x4xV100", {"batch": 256, "optimizer": "sgd"}),
    "mmt": Case("zoo:mmt", "1x4xV100", {"batch": 64, "optimizer": "sgd"}),
}


def row(name: str, cluster: str, method: str, found: Plan, cpu_s: float) -> Row:
    """One line of the table."""
    assert found.prediction is not None
    return {
        "case": name,
        "cluster": Path(cluster).stem,
        "method": method,
        "step_s": found.prediction.step_s,
        "bound_s": found.bound_s,
        "peak_bytes": found.prediction.peak_bytes,
        "stages": len(found.decisions.stages),
        "devices": found.decisions.num_ranks,
        "num_microbatches": found.decisions.num_microbatches,
        "schedule": found.decisions.schedule,
        "cpu_s": cpu_s,
        "revision": revision(),
    }


def measured(name: str) -> list[Row]:
    """All methods on one case."""
    case, found = CASES[name], []
    captured = api.capture(case.model, **case.flags)
    for method in METHODS:
        begun = time.process_time()
        try:
            plan = api.search(captured, cluster=case.cluster, method=method)
        except ParloomError as error:
            print(f"{name}, {method}: {str(error).splitlines()[0]}")
            continue
        found.append(row(name, case.cluster, method, plan, time.process_time() - begun))
        one = found[-1]
        print(
            f"{name:<12} {method:<14} {format_seconds(one['step_s']):>9}"
            f"  {one['stages']} stages on {one['devices']} devices, {one['num_microbatches']}"
            f" microbatches, {one['schedule']}, {one['cpu_s']:.0f} CPU s",
            flush=True,
        )
    return found


def faults(rows: list[Row]) -> list[str]:
    """Plans that are faster than that of `auto`, or than its bound allows."""
    best = {r["case"]: r for r in rows if r["method"] == "auto"}
    found = []
    for one in rows:
        auto = best[one["case"]]
        if one["step_s"] < auto["step_s"] * (1 - 1e-9):
            found.append(f"{one['case']}: {one['method']} is faster than auto")
        if auto["bound_s"] and one["step_s"] < auto["bound_s"]:
            found.append(f"{one['case']}: {one['method']} is below the bound")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows = [row for name in asked.cases.split(",") for row in measured(name)]
    report("pipelines_compared", rows, asked.json)
    wrong = faults(rows)
    print("\n".join(wrong) or "auto is never slower")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
