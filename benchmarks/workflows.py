"""Workflows from edge to cloud: dollars an hour of each method, simulated against planned figures.

Run as `python benchmarks/workflows.py [--out F]`. Each shipped example is planned by every method;
vqa, whose file has no latency bound, once with one. Random instances of up to eight operators are
compared with enumeration; large ones are drawn as in the tests, and are to end within 1 % of the
bound in 60 s. Exit code 1 where one of the former is not equal, or one of the latter does not.
"""

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.workflows import drawn, large, least_dollars

from parloom.errors import InfeasibleError
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.exact import in_time
from parloom.workflow.examples import names, path_of
from parloom.workflow.model import Workflow
from parloom.workflow.read import load
from parloom.workflow.simulate import expected, play

REQUESTS = 400_000
VQA_BOUND_S = 0.2
LARGE_GAP, LARGE_S, SAME = 0.01, 60.0, 1e-6
LARGE: dict[str, dict[str, int]] = {
    "20 types x 10, two tiers": {},
    "20 types x 10, three tiers": {"tiers": 3},
    "200 types, two tiers": {"kinds": 200, "count": 1},
}


def instances() -> list[tuple[str, Workflow]]:
    found = [(name, load(path_of(f"example:{name}"))) for name in names()]
    vqa = load(path_of("example:vqa"))
    found.append(("vqa, two-way", replace(vqa, two_way=True)))
    found.append((f"vqa in {1e3 * VQA_BOUND_S:.0f} ms", replace(vqa, latency_s=VQA_BOUND_S)))
    return found


def dollars_of(workflow: Workflow) -> dict[str, Any]:
    """By method: dollars an hour, or null, and whether the plan keeps the latency bound."""
    row: dict[str, Any] = {}
    for method in Method:
        try:
            plan = plan_workflow(workflow, method)
        except InfeasibleError:
            row[method.value] = None
            continue
        row[method.value] = {"usd_per_h": plan.usd_per_h, "in_time": in_time(plan)}
    return row


def played(workflow: Workflow) -> dict[str, Any]:
    """Of the exact plan: planned and simulated rate and latencies, and their ratios."""
    plan = plan_workflow(workflow)
    found, wanted = play(plan, REQUESTS), expected(plan)
    rate = min(workflow.rates[sink] for sink in workflow.sinks)
    return {
        "rate": found.rate_per_s / rate,
        "bound_s": plan.latency_s,
        "planned_s": wanted.latency_s,
        "simulated_s": found.latency_s,
        "planned_end_to_end_s": wanted.end_to_end_s,
        "simulated_end_to_end_s": found.end_to_end_s,
    }


def scale(kind: str, seed: int) -> dict[str, Any]:
    began, cpu = time.monotonic(), time.process_time()
    plan = plan_workflow(large(seed, **LARGE[kind]), gap=LARGE_GAP, seconds=LARGE_S)
    seconds = {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
    return {"kind": kind, "seed": seed, "usd_per_h": plan.usd_per_h, "gap": plan.gap, **seconds}


def misses(row: dict[str, Any]) -> bool:
    """Whether a large instance ended above the gap, or late."""
    return bool(row["gap"] > LARGE_GAP * (1 + SAME) or row["seconds"] > LARGE_S)


def unequal(count: int) -> list[int]:
    """Seeds of random instances for which enumeration finds another cost, or one alone a plan."""
    found = []
    for seed in range(count):
        workflow = drawn(seed)
        least = least_dollars(workflow)
        try:
            cost: float | None = plan_workflow(workflow).usd_per_h
        except InfeasibleError:
            cost = None
        if (cost is None) != (least is None) or abs((cost or 0) - (least or 0)) > SAME * (
            cost or 1
        ):
            found.append(seed)
    return found


def cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    return f"{entry['usd_per_h']:.3f}{'' if entry['in_time'] else ' late'}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compared", type=int, default=200, help="random instances")
    parser.add_argument("--seeds", type=int, default=3, help="large instances")
    asked = parser.parse_args()
    document: dict[str, Any] = {"machine": platform.processor(), "dollars": {}, "played": {}}
    print("$ per hour".ljust(20), *(method.value.rjust(14) for method in Method))
    for name, workflow in instances():
        row = document["dollars"][name] = dollars_of(workflow)
        print(name.ljust(20), *(cell(row[method.value]).rjust(14) for method in Method))
    print()
    print("exact plan, simulated / planned".ljust(34), "rate   latency  end to end")
    for name, workflow in instances():
        row = document["played"][name] = played(workflow)
        if row["planned_s"] == float("inf"):
            print(name.ljust(34), f"{row['rate']:.3f}  unbounded: a worker is busy all the time")
            continue
        latency = row["simulated_s"] / row["planned_s"]
        whole = row["simulated_end_to_end_s"] / row["planned_end_to_end_s"]
        print(name.ljust(34), f"{row['rate']:.3f}  {latency:.3f}    {whole:.3f}")
    wrong = document["unequal"] = unequal(asked.compared)
    print()
    print(
        f"{asked.compared - len(wrong)} of {asked.compared} random instances equal enumeration",
        wrong,
    )
    print()
    print("30 operators, 200 workers")
    document["large"] = []
    for kind in LARGE:
        for seed in range(1, asked.seeds + 1):
            row = scale(kind, seed)
            document["large"].append(row)
            print(f"  {kind}, seed {seed}: gap {row['gap']:.2%} in {row['seconds']:.1f} s", end="")
            print(f" ({row['cpu_s']:.1f} CPU s), {row['usd_per_h']:.3f} $/h", flush=True)
    missed = [f"{row['kind']}, seed {row['seed']}" for row in document["large"] if misses(row)]
    within = len(document["large"]) - len(missed)
    print(f"{within} of {len(document['large'])} within {LARGE_GAP:.0%} in {LARGE_S:.0f} s", missed)
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong or missed))


if __name__ == "__main__":
    raise SystemExit(main())
