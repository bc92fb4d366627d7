"""Predicted against real steps on the cluster in a box, after `parloom calibrate` in the bed.

    python benchmarks/reality.py --testbed FOLDER [--beds 4:100mbit,4:250mbit,2:100mbit] [--json F]

A case is a model, a plan and a network. Per bed and model: the plans are made, `parloom calibrate
--plan ..` runs on every device, and every plan is trained for some steps in each of several
launches, and predicted; a step counts by its slowest rank, a case by the median. Plans of a group
are tied where their times are closer to each other than those of launches of one plan. Memory is
what the generated program allocates on forked ranks (`memory.py`).
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cluster_in_a_box import Bed
from common import report
from memory import Allocated, on_rank
from reality_models import MODELS

from parloom import api
from parloom.capture import parameters_of
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.execute.program import training_program
from parloom.execute.ranks import fork_ranks
from parloom.ir.graph import Call
from parloom.ir.plan import ActivationDecision, Decisions, Plan, Storage
from parloom.ir.text import parse_graph

HERE = Path(__file__).resolve().parent
# Plans: method, which of its plans, microbatches, storage (None: the method's), recomputation.
KINDS: dict[str, tuple[str, int, int, str | None, bool]] = {
    "data_parallel": ("data_parallel", -1, 1, None, False),
    "zero1": ("data_parallel", -1, 1, "optimizer", False),
    "data_parallel_2_microbatches": ("data_parallel", -1, 2, None, False),
    "fsdp": ("fsdp", -1, 1, None, False),
    "fsdp_recompute": ("fsdp", -1, 1, None, True),
    "megatron": ("megatron", -1, 1, None, False),
    "megatron_in_pairs": ("megatron", 0, 1, None, False),
}
LEFT_OUT = {"cnn": ("data_parallel_2_microbatches",)}  # batch norm takes one microbatch


def decisions_of(plan: Plan, kind: str, ranks: int) -> Decisions | None:
    """The decisions of a kind of plan; None where there is none such."""
    method, which, microbatches, storage, recompute = KINDS[kind]
    graph, cluster = parse_graph(plan.graph), load_cluster(f"{ranks}x1xcpu")
    found = list(METHODS[method](graph, cluster, microbatches, 0))
    if which == 0 and len(found) < 2:
        return None
    decisions = found[which]
    if storage == "optimizer":
        sharded = next(METHODS["fsdp"](graph, cluster, microbatches, 0)).parameters
        whole = Storage()
        decisions = replace(
            decisions,
            parameters=tuple(replace(p, weight=whole, gradient=whole) for p in sharded),
        )
    if recompute:
        calls = [item.prefix for item in graph.main.body if isinstance(item, Call)]
        if not calls:
            return None
        policies = tuple(ActivationDecision(prefix, "recompute") for prefix in calls)
        decisions = replace(decisions, activations=policies)
    return decisions


def make_plans(folder: Path, model: str, ranks: int) -> list[Path]:
    """Write all plans of a model; their folders."""
    spec = f"{HERE / 'reality_models.py'}:{model}"
    base = api.plan(spec, cluster=f"{ranks}x1xcpu", optimizer="sgd", method="data_parallel")
    made = []
    for kind in KINDS:
        if kind in LEFT_OUT.get(model, ()):
            continue
        decisions = decisions_of(base, kind, ranks)
        if decisions is not None:
            plan = replace(base, method=kind, decisions=decisions, prediction=None, alternatives=())
            api.save(plan, folder / model / kind)
            made.append(folder / model / kind)
    return made


def allocated(plans: list[Path], ranks: int) -> dict[Path, int]:
    """The most bytes that a rank holds in a step."""
    found = {}
    for path in plans:
        plan = api.load(path)
        model, batch = MODELS[path.parent.name]()
        tensors = parameters_of(model.train(), parse_graph(plan.graph))
        program = training_program(plan).only.program
        given = [program], tensors, batch, plan.optimizer.name
        on_ranks = fork_ranks(ranks, on_rank, *given, timeout_s=300.0)
        ran = [a for (a,) in on_ranks if isinstance(a, Allocated)]
        found[path] = max(a.peak for a in ran)
    return found


def measure(
    args: argparse.Namespace, plans: list[Path], hosts: int, rate: str, calibration: Path
) -> dict[Path, list[float]]:
    """Calibrate, then train every plan; median step times of each launch."""
    given = [word for path in plans for word in ("--plan", str(path))]
    medians: dict[Path, list[float]] = {path: [] for path in plans}
    with Bed(args.testbed, args.name, rate, hosts) as bed:
        said = bed.run(
            sys.executable, "-m", "parloom", "calibrate", "--cluster", f"{hosts}x1xcpu",
            "--out", str(calibration), *given,
        )  # fmt: skip
        print(said.strip(), file=sys.stderr, flush=True)
        for index in range(args.launches):
            turned = plans[index % len(plans) :] + plans[: index % len(plans)]
            printed = bed.run(
                sys.executable, str(HERE / "reality_rank.py"), "--steps", str(args.steps),
                "--plans", *map(str, turned),
            )  # fmt: skip
            for line in printed.splitlines():
                if line.startswith("RESULT "):
                    row = json.loads(line[7:])
                    path = plans[0].parent.parent / row["model"] / row["plan"]
                    medians[path].append(statistics.median(row["seconds"]))
            print(f"launch {index} of {hosts} x {rate} done", file=sys.stderr, flush=True)
    return medians


def rows_of(
    args: argparse.Namespace, folder: Path, hosts: int, rate: str, model: str
) -> Iterator[dict[str, Any]]:
    """All plans of a model on a bed; the calibration is of this model's operators."""
    plans = make_plans(folder / str(hosts), model, hosts)
    calibration = folder / f"{hosts}-{rate}-{model}.json"
    measured = measure(args, plans, hosts, rate, calibration)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / calibration.name).write_bytes(calibration.read_bytes())
    memory = allocated(plans, hosts)
    for path in plans:
        plan = api.load(path)
        played = api.simulate(plan, calibration)
        measured_s = statistics.median(measured[path])
        yield {
            "hosts": hosts,
            "rate": rate,
            "model": model,
            "plan": path.name,
            "predicted_s": played.step_s,
            "measured_s": measured_s,
            "launches_s": measured[path],
            "error": math.log(played.step_s / measured_s),
            "spec_s": api.simulate(plan).step_s,
            "source": api.source_of(plan, calibration).name,
            "predicted_bytes": played.peak_bytes,
            "measured_bytes": memory[path],
            "memory_error": played.peak_bytes / memory[path] - 1,
        }


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    return statistics.correlation(*(ranks(values) for values in zip(*pairs, strict=True)))


def tied(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether two plans took times that are closer than those of launches of one of them."""
    ordered = sorted(rows, key=lambda row: float(row["measured_s"]))
    apart = [math.log(max(row["launches_s"]) / min(row["launches_s"])) for row in ordered]
    return any(
        math.log(b["measured_s"] / a["measured_s"]) < max(near, far)
        for (a, near), (b, far) in itertools.pairwise(zip(ordered, apart, strict=True))
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors over all rows, and the order of plans within each (model, network)."""
    errors = sorted(abs(row["error"]) for row in rows)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['hosts']} x {row['rate']} {row['model']}", []).append(row)
    orders = {
        name: rank_correlation([(row["predicted_s"], row["measured_s"]) for row in own])
        for name, own in groups.items()
        if len(own) >= 5
    }
    return {
        "rows": len(rows),
        "median_abs_log_error": statistics.median(errors),
        "p90_abs_log_error": errors[math.ceil(0.9 * len(errors)) - 1],
        "largest_memory_error": max(abs(row["memory_error"]) for row in rows),
        "rank_correlation": orders,
        "groups_with_ties": [name for name in orders if tied(groups[name])],
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['hosts']} | {row['rate']} | {row['model']} | {row['plan']} |"
        f" {row['predicted_s']:.3f} s | {row['measured_s']:.3f} s | {row['error']:+.1%} |"
        f" {row['source']} | {row['predicted_bytes'] / 2**20:.2f} |"
        f" {row['measured_bytes'] / 2**20:.2f} | {row['memory_error']:+.1%} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, required=True, help="folder of testbed.py")
    parser.add_argument("--beds", default="4:100mbit,4:250mbit,2:100mbit", help="hosts:rate,..")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--name", default="reality", help="of the bed")
    parser.add_argument("--keep", type=Path, help="folder for the calibrations")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    print("| hosts | link | model | plan | predicted | measured | log error | source |"
          " memory, predicted MiB | allocated | error |")  # fmt: skip
    print("|" + "---|" * 11)
    with tempfile.TemporaryDirectory(prefix="parloom-reality-") as folder:
        for bed, model in itertools.product(args.beds.split(","), args.models.split(",")):
            hosts, rate = bed.split(":")
            for row in rows_of(args, Path(folder), int(hosts), rate, model):
                table.append(row)
                print(_line(row), flush=True)
    found = summary(table)
    print(json.dumps(found, indent=1))
    report("reality", [*table, found], args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
