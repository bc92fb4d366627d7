"""Pipelines that `auto` finds against all of them, on random graphs.

    PYTHONPATH=. python benchmarks/pipelines_exact.py [--operators 5] [--seeds 0,1,2] [--json FILE]

For each graph, at most three layouts for each size of groups, on two devices (odd seeds; 1, 2 and 4
microbatches) or four (2 microbatches): the fastest step of the search, which ends at its bound or
where it has simulated as much as `auto` does, and of every cut, placement, layout and schedule,
priced by the simulator alone. Exit code 1 where they differ.
"""

import argparse
import time
from math import inf
from typing import Any

from common import report, revision
from tests.property.every_pipeline import least_of_all
from tests.property.test_every_split import best_of, drawn, every_of

from parloom.ir.stages import item_edges, stage_items
from parloom.search.contexts import Contexts
from parloom.search.pipelines.auto import PipelineSearch
from parloom.search.request import base_of

Row = dict[str, Any]


def compared(seed: int, num_operators: int) -> Row:
    """One graph."""
    request, layouts = drawn(seed, num_operators)
    began = time.process_time()
    search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
    every = every_of(search, layouts)
    search.judge_every(every)
    found_s = time.process_time() - began
    least = least_of_all(search.tried.judge, layouts, request.cluster.num_devices)
    items, edges = len(stage_items(request.graph)), item_edges(request.graph)
    best = best_of(request, search)
    return {
        "seed": seed,
        "items": items,
        "chain": all(target == source + 1 for source, target in edges),
        "devices": request.cluster.num_devices,
        "microbatches": list(layouts),
        "enumerated": least.number,
        "simulated": len(search.tried.judged),
        "ended_by_bound": every.is_whole,
        "search_cpu_s": round(found_s, 2),
        "enumeration_cpu_s": round(time.process_time() - began - found_s, 1),
        "step_ms": round(best / 1e9, 4),
        "least_ms": round(least.step_ps / 1e9, 4),
        "equal": best == least.step_ps,
        "revision": revision(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=5)
    parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows: list[Row] = []
    for seed in map(int, given.seeds.split(",")):
        rows.append(compared(seed, given.operators))
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        report("pipelines_exact", rows, given.json)
    equal = sum(row["equal"] for row in rows)
    print(f"{equal} of {len(rows)} are the least of all")
    return int(equal < len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
