"""Where a mesh lies, measured: four hosts in two racks of the cluster in a box, slow uplinks.

    python benchmarks/placement_in_a_box.py --testbed FOLDER [--launches 5] [--json FILE]

Of each model one logical plan, Megatron's of data=2 x tensor=2, is laid where the search for a
placement finds it fastest, and in the reverse order of axes; both are trained in turns, from the
same weights on the same batch. `parloom calibrate` measures the bed first; predictions stand beside
the medians over launches of each order's median step, by its slowest rank. Exit code 1 where losses
disagree.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_in_a_box import HERE, LOSS_TOLERANCE, Bed, train
from common import report

from parloom import api
from parloom.comparators.baselines import METHODS
from parloom.execute.machine import machine_for
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.search.contexts import SimulatedPlan
from parloom.search.placing import place, with_mesh
from parloom.search.request import Request

HOSTS, RATE, UPLINK = 4, "250mbit", "100mbit"
# Rates are measured: those here are not used.
RACKS = """
name: racks
backend: gloo
device: {name: core, memory: 3GiB, memory_bandwidth: 5GB/s, rates: {fp32: 12GFLOP/s}}
levels:
  - {name: rack, size: 2, bandwidth: 250Mbit/s, latency: 200us, efficiency: 0.96}
  - {name: uplink, size: 2, bandwidth: 100Mbit/s, latency: 200us, efficiency: 0.96, oversubscription: 2}
"""  # noqa: E501
OURS, REVERSE = "ours", "reverse"
MODELS = ("mlp", "gpt")
Row = dict[str, Any]


def calibrated(bed: Bed, folder: Path, cluster: Path) -> Path:
    """The file in which `parloom calibrate` says how fast the bed is."""
    found = folder / "calibration.json"
    specs = (word for model in MODELS for word in ("--model", spec_of(model)))
    said = bed.run(
        sys.executable, "-m", "parloom", "calibrate", "--cluster", str(cluster),
        "--out", str(found), *specs,
    )  # fmt: skip
    print(said.strip(), file=sys.stderr, flush=True)
    return found


def spec_of(model: str) -> str:
    return f"{HERE / 'cluster_models.py'}:{model}"


def plans(model: str, cluster: Path, calibration: Path) -> dict[str, Plan]:
    """The logical plan where it is fastest, and with the axes in the reverse order."""
    base = api.plan(
        spec_of(model), cluster=str(cluster), optimizer="sgd", method="data_parallel",
        calibration=calibration,
    )  # fmt: skip
    graph, machine = parse_graph(base.graph), machine_for(str(cluster), calibration)
    request = Request(graph, machine, base.optimizer, 3 << 30)
    every = METHODS["megatron"](graph, machine.cluster, 1, 0)
    decisions = next(d for d in every if [a.size for a in d.mesh.axes] == [2, 2])
    default = SimulatedPlan(decisions, request.predict(decisions))
    ours = place(request, default).plan
    axes = ours.decisions.mesh.axes
    swapped = [replace(a, primes=b.primes) for a, b in zip(axes, reversed(axes), strict=True)]
    other = with_mesh(decisions, Mesh(tuple(swapped)))
    reverse = SimulatedPlan(other, request.predict(other))
    return {
        side: replace(
            base, method="megatron", decisions=found.decisions, prediction=found.prediction,
            alternatives=(),
        )
        for side, found in ((OURS, ours), (REVERSE, reverse))
    }  # fmt: skip


def row_of(model: str, planned: dict[str, Plan], launches: list[Row]) -> Row:
    """Predicted and measured steps of both orders."""
    row: Row = {"model": model, "launches": len(launches)}
    for side, plan in planned.items():
        assert plan.prediction is not None
        medians = [statistics.median(found["seconds"][side]) for found in launches]
        axes = plan.decisions.mesh.axes
        row[side] = {
            "mesh": " ".join(f"{a.name}={a.size} (stride {a.primes[0].stride})" for a in axes),
            "predicted_s": plan.prediction.step_s,
            "measured_s": statistics.median(medians),
            "lowest_s": min(medians),
            "highest_s": max(medians),
        }
    losses = [found["losses"] for found in launches]
    row["loss_difference"] = max(abs(one[OURS] / one[REVERSE] - 1) for one in losses)
    return row


def printed(row: Row) -> str:
    """A row of the table."""
    cells = [
        f"{own['mesh']} | {own['predicted_s']:.3f} | {own['measured_s']:.3f}"
        f" ({own['lowest_s']:.3f} .. {own['highest_s']:.3f})"
        for own in (row[OURS], row[REVERSE])
    ]
    ratios = (row[REVERSE][key] / row[OURS][key] for key in ("predicted_s", "measured_s"))
    ends = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {row['model']} | {' | '.join(cells)} | {ends} | {row['loss_difference']:.0e} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, required=True, help="folder of testbed.py")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each side per launch")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parloom-placement-") as temporary:
        folder = Path(temporary)
        cluster = folder / "racks.yaml"
        cluster.write_text(RACKS)
        with Bed(args.testbed, "racks", RATE, HOSTS, uplink=UPLINK) as bed:
            calibration = calibrated(bed, folder, cluster)
            planned = {model: plans(model, cluster, calibration) for model in MODELS}
            for model, sides in planned.items():
                for side, plan in sides.items():
                    api.save(plan, folder / model / side)
            asked = [f"{model}:{OURS},{REVERSE}" for model in MODELS]
            found = [
                row
                for index in range(args.launches)
                for row in train(bed, folder, asked, args.steps, index % 2)
            ]
    rows = [row_of(m, planned[m], [r for r in found if r["model"] == m]) for m in MODELS]
    print("| model | ours | predicted s | measured s | reverse | predicted s | measured s |"
          " reverse / ours, predicted | measured | losses differ by |")  # fmt: skip
    print("|" + "---|" * 10)
    print("\n".join(map(printed, rows)))
    report("placement_in_a_box", rows, args.json)
    return int(any(row["loss_difference"] > LOSS_TOLERANCE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
