"""Stages that form a graph against stages in a row, on models with branches.

    PYTHONPATH=. python benchmarks/pipelines_branches.py [--models mmt,candle_uno,dlrm]
        [--devices 4,8,16,32] [--json FILE]

The models of GraphPipe's evaluation (Jeon et al., ASPLOS'25, appendix A.2) on nodes of four V100,
by `--method graphpipe` and `--method pipedream`: the predicted step of the best plan that fits, its
stages and the most microbatches that one has in flight, CPU seconds of the whole search, and of the
split into stages alone. Both have the same prices of items. Sizes of batches are ours: the paper
has them in a figure. Rows that the file has of the same revision are not measured again.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import report, reported, revision
from torch import Tensor, cat, nn, randint, randn
from torch.nn import functional as F

from parloom import zoo
from parloom.candidates import COMPARATORS
from parloom.capture import capture
from parloom.comparators.pipelines import item_costs, split
from parloom.comparators.tree_split import tree_split
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.units import format_bytes
from parloom.ir.expected import Prediction
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import group_lists
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.series_parallel import decompose
from parloom.ir.stages import item_edges, stage_items
from parloom.search.request import Request
from parloom.zoo.candle_uno import dense

Row = dict[str, Any]
METHODS = ("graphpipe", "pipedream")
HIDDEN, DEPTH = 4096, 4
# Inputs of CANDLE-Uno's branches: two doses, RNA, and two kinds of features of both drugs.
UNO = (1, 1, 942, 5270, 2048, 5270, 2048)
TABLES, ROWS, WIDTH, BAG = 7, 1_000_000, 64, 100
SAMPLES = {"mmt": 16, "candle_uno": 1024, "dlrm": 64}  # of each device


class Uno(nn.Module):
    """Seven branches of four layers, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(dense(width, HIDDEN, DEPTH, bias=True) for width in UNO)
        self.head = nn.Linear(len(UNO) * HIDDEN, 1)

    def forward(
        self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor,
        labels: Tensor,
    ) -> Tensor:  # fmt: skip
        inputs = (a, b, c, d, e, f, g)
        ends = [own(x) for own, x in zip(self.branches, inputs, strict=True)]
        return F.mse_loss(self.head(cat(ends, dim=1)), labels)


class DLRM(nn.Module):
    """Seven branches of dense features and seven bags of embeddings, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(dense(HIDDEN, HIDDEN, DEPTH, bias=True) for _ in UNO)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(TABLES))
        width = len(UNO) * HIDDEN + TABLES * BAG * WIDTH
        self.top = dense(width, HIDDEN, DEPTH, bias=True)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, features: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
        ends = [own(features[:, i]) for i, own in enumerate(self.branches)]
        ends += [table(sparse[:, i]).flatten(1) for i, table in enumerate(self.tables)]
        return F.mse_loss(self.head(self.top(cat(ends, dim=1))), labels)


def built(name: str, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model without storage, and a batch."""
    with torch.device("meta"):
        if name == "mmt":
            return zoo.build("mmt", batch=batch)
        model: nn.Module = Uno() if name == "candle_uno" else DLRM()
    if name == "candle_uno":
        inputs = {key: randn(batch, width) for key, width in zip("abcdefg", UNO, strict=True)}
    else:
        sparse = randint(0, ROWS, (batch, TABLES, BAG))
        inputs = {"features": randn(batch, len(UNO), HIDDEN), "sparse": sparse}
    return model, inputs | {"labels": randn(batch, 1)}


def best(request: Request, plans: Sequence[Decisions]) -> tuple[Decisions, Prediction] | None:
    """The plan with the shortest predicted step that fits."""
    found = [(plan, request.predict(plan)) for plan in plans]
    fitting = [pair for pair in found if pair[1].peak_bytes <= request.limit_bytes]
    return min(fitting, key=lambda pair: pair[1].step_s, default=None)


def in_flight(plan: Decisions) -> int:
    """The most microbatches that a stage runs forward before the first backward pass."""
    if len(plan.stages) == 1:
        return 1
    return max([action.kind for action in own].index("B") for _, own in group_lists(plan))


def split_s(request: Request, method: str) -> float:
    """CPU seconds of the splits for all numbers of microbatches, with priced items."""
    graph = request.graph
    costs = list(item_costs(request, Decisions()))
    begun = time.process_time()
    tree = decompose(len(stage_items(graph)), item_edges(graph))
    for own in costs:
        if method == "pipedream":
            split(own, request.cluster)
        else:
            tree_split(tree, own, request.cluster, request.limit_bytes)
    return time.process_time() - begun


def measured(graph: Graph, name: str, devices: int, method: str) -> Row:
    cluster = load_cluster(f"{devices // 4}x4xV100-SXM2-16GB")
    request = Request(graph, DataSheets(cluster), Optimizer("sgd", 0), cluster.device.memory_bytes)
    row: Row = {"model": name, "devices": devices, "method": method}
    begun = time.process_time()
    plans = list(COMPARATORS[method](request, Decisions(), lambda text: None))
    row["search_cpu_s"] = time.process_time() - begun
    row["split_cpu_s"] = split_s(request, method)
    found = best(request, plans)
    if found is None:
        return row
    plan, prediction = found
    return row | {
        "step_s": prediction.step_s,
        "peak_bytes": prediction.peak_bytes,
        "stages": [stage.mesh.num_ranks for stage in plan.stages],
        "microbatches": plan.num_microbatches,
        "in_flight": in_flight(plan),
    }


def line(row: Row) -> str:
    """A row of the table."""
    cells = [row["model"], str(row["devices"]), row["method"]]
    if "step_s" in row:
        sizes = row["stages"]
        stages = f"{len(sizes)} of {min(sizes)} to {max(sizes)}"
        cells += [f"{row['step_s']:.4g} s", format_bytes(row["peak_bytes"]), stages]
        cells += [str(row["microbatches"]), str(row["in_flight"])]
    else:
        cells += ["nothing fits", *[""] * 4]
    return f"| {' | '.join(cells)} | {row['search_cpu_s']:.1f} s | {row['split_cpu_s']:.2f} s |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SAMPLES))
    parser.add_argument("--devices", default="4,8,16,32")
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows: list[Row] = reported(asked.json)
    done = {(row["model"], row["devices"], row["method"]) for row in rows}
    print(f"revision {revision() or 'unknown'}\n")
    print("| model | V100 | method | step | memory | stages of devices | microbatches | in flight |"
          " search | split alone |\n" + "|---" * 10 + "|", flush=True)  # fmt: skip
    for devices in map(int, asked.devices.split(",")):
        for name in asked.models.split(","):
            left = [method for method in METHODS if (name, devices, method) not in done]
            if not left:
                continue
            graph = capture(*built(name, SAMPLES[name] * devices))
            for method in left:
                rows.append(measured(graph, name, devices, method))
                report("pipelines_branches", rows, asked.json)
                print(line(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
