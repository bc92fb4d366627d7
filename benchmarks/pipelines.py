"""Published pipelines against what their method finds here, in the same prices.

    PYTHONPATH=. python benchmarks/pipelines.py [--cases 1.3B,2.6B,6.7B,15B,39B] [--json FILE]

Alpa (Zheng et al., OSDI 2022) published the stages of its GPTs: layers of eight (or as many as it
clustered), devices of each stage. `--method alpa` is asked for the same model, cluster, batch and
microbatches, with blocks recomputed. Each row has what it finds and the published stages by Alpa's
objective (the sum of stages, and the slowest once for each further microbatch) and as simulated:
`found` where the stages are the same. Layers of published stages are counted in layers that are
clustered here. Rows that the file has of the same revision are not made again.
"""

import argparse
import time
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from common import report, reported
from published_models import Model, Shape, graph_of

from parloom.comparators.alpa_inter import StageSearch, model_layers
from parloom.comparators.alpa_stages import laid_out, num_layers, submeshes
from parloom.comparators.slices import Option, total_ps
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.ir.graph import Call
from parloom.ir.plan import ActivationDecision, Optimizer
from parloom.search.request import Request, base_of

SEQ, VOCABULARY, BATCH = 1024, 51200, 1024
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A GPT, the cluster, microbatches, and the published stages as (share of layers, devices)."""

    width: int
    blocks: int
    heads: int
    cluster: str
    microbatches: int
    stages: tuple[tuple[int, int], ...]


# alpa, benchmark/alpa/suite_auto_gpt.py: p3.16xlarge nodes, batch 1024.
CASES = MappingProxyType(
    {
        "1.3B": Case(2048, 24, 32, "1x4xV100-16GB", 128, ((1, 2), (1, 2))),
        "2.6B": Case(2560, 32, 32, "1x8xV100-16GB", 128, ((1, 2), (1, 2), (2, 4))),
        "6.7B": Case(4096, 32, 32, "2x8xV100-16GB", 64, ((1, 8), (1, 8))),
        "15B": Case(5120, 48, 40, "4x8xV100-16GB", 128, ((1, 8),) * 4),
        "39B": Case(8192, 48, 64, "8x8xV100-16GB", 1024, ((1, 4),) * 16),
    }
)


def asked(case: Case) -> Request:
    """The question of a case."""
    inner = 4 * case.width
    sizes = {"width": case.width, "heads": case.heads, "seq": SEQ, "inner": inner, "drops": 0}
    shape = Shape("gpt", tuple(sorted(sizes.items())), "float16")
    graph = graph_of(Model(shape, VOCABULARY, case.blocks), BATCH, [])
    cluster = load_cluster(case.cluster)
    machine, limit = DataSheets(cluster), cluster.device.memory_bytes
    return Request(graph, machine, Optimizer(), limit, case.microbatches)


def published(search: StageSearch, case: Case, layers: int) -> list[Option]:
    """The published stages, each in the fastest way that fits, or if none does in the fastest; none
    where one has none.
    """
    whole = sum(share for share, _ in case.stages)
    found: list[Option] = []
    first = 0
    for index, (share, size) in enumerate(case.stages):
        last, flying = first + layers * share // whole, len(case.stages) - index
        ways = search.played(first, last, size)
        if not ways:
            return []
        found.append(min(ways, key=lambda way: (way.most < flying, way.latency_ps)))
        first = last
    return found


def told(stages: list[Option]) -> str:
    """Layers and devices of stages."""
    return " + ".join(f"{stage.last - stage.first} on {stage.size}" for stage in stages)


def judged(name: str) -> Row:
    """What comes of a case."""
    case, started = CASES[name], time.process_time()
    request = asked(case)
    calls = [item.prefix for item in request.graph.main.body if isinstance(item, Call)]
    again = tuple(ActivationDecision(prefix, "recompute") for prefix in calls)
    count = case.microbatches
    base = replace(base_of(request), num_microbatches=count, activations=again)
    layers = model_layers(request.graph, num_layers(request.cluster))
    sizes = submeshes(request.cluster)
    captured, began = time.process_time() - started, time.process_time()
    search = StageSearch(request, base, layers, sizes, laid_out(request))
    found = list(search.best() or ())
    searched = time.process_time() - began
    row: Row = {"case": name, "cluster": case.cluster, "microbatches": count, "layers": len(layers)}
    theirs = published(search, case, len(layers))
    for word, stages in (("alpa", found), ("published", theirs)):
        if not stages:
            continue
        prediction = request.predict(search.plan(stages))
        row |= {
            f"{word}": told(stages),
            f"{word}_objective_s": round(total_ps(stages, count) / 1e12, 3),
            f"{word}_step_s": round(prediction.step_s, 3),
            f"{word}_peak_gib": round(prediction.peak_bytes / 2**30, 2),
            f"{word}_fits": prediction.peak_bytes <= request.limit_bytes,
        }
    row["found"] = told(found) == told(theirs)
    row["search_cpu_s"], row["capture_cpu_s"] = round(searched, 1), round(captured, 1)
    return row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cases", default=",".join(CASES))
    arguments.add_argument("--json")
    given = arguments.parse_args()
    rows: list[Row] = reported(given.json)
    done = {row["case"] for row in rows}
    for name in given.cases.split(","):
        if name not in done:
            rows.append(judged(name))
            print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
            report("pipelines", rows, given.json)
    print(f"{sum(row['found'] for row in rows)} of {len(rows)} published solutions are found")


if __name__ == "__main__":
    main()
