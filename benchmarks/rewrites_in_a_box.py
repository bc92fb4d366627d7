"""Plans with and without rewrites, measured on the cluster in a box: four hosts, 100 Mbit/s.

    python benchmarks/rewrites_in_a_box.py --testbed FOLDER [--launches 5] [--json FILE]

`parloom calibrate` measures the bed once, with all models. Of each model `parloom plan` makes two
plans, `auto` and `auto --no-rewrites`; both are trained in turns, from the same weights on the same
batch. A row has the rewrites that were chosen, and beside each prediction the median over launches
of the median step, by its slowest rank. A model for which no rewrite is chosen is said and not run.
Exit code 1 where losses disagree.
"""

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_in_a_box import HERE, LOSS_TOLERANCE, Bed, train
from common import median_and_interval, report

from parloom import api
from parloom.ir.plan import Plan
from parloom.rewrite.rewrites import takes_of
from parloom.search.pins import NO_REWRITE

CLUSTER, HOSTS, RATE = "4x1xcpu", 4, "100mbit"
WITH, WITHOUT = "auto", "no rewrites"
OTHERS = "merges of products that share an input"
MODELS = ("linear_attention", "siamese", "candle_uno", "factorized_embeddings", "llama", "mmt")


@dataclass(frozen=True)
class Side:
    """A plan's step time, predicted and measured over launches."""

    method: str
    predicted_s: float
    measured_s: float
    lowest_s: float
    highest_s: float


@dataclass(frozen=True)
class Row:
    """A model under both plans; `ratio` is that of the time without rewrites to the time with them
    in each launch, with its interval.
    """

    model: str
    rewrites: dict[str, int]
    rewritten: Side
    plain: Side
    predicted_ratio: float
    ratio: float
    low: float
    high: float
    launches: int
    loss_difference: float

    def __str__(self) -> str:
        sides = (
            f"{side.method} | {side.predicted_s:.3f} | {side.measured_s:.3f}"
            f" ({side.lowest_s:.3f} .. {side.highest_s:.3f})"
            for side in (self.plain, self.rewritten)
        )
        chosen = ", ".join(f"{count} x {name}" for name, count in self.rewrites.items())
        return (
            f"| {self.model} | {chosen} | {' | '.join(sides)} | {self.predicted_ratio:.2f}"
            f" | {self.ratio:.2f} ({self.low:.2f} .. {self.high:.2f}) |"
            f" {self.loss_difference:.0e} |"
        )


def calibrated(bed: Bed, folder: Path, models: list[str]) -> Path:
    """The file in which `parloom calibrate` says how fast the bed is."""
    found = folder / "calibration.json"
    said = bed.run(
        sys.executable, "-m", "parloom", "calibrate", "--cluster", CLUSTER, "--out", str(found),
        *(word for model in models for word in ("--model", spec_of(model))),
    )  # fmt: skip
    print(said.strip(), file=sys.stderr, flush=True)
    return found


def spec_of(model: str) -> str:
    return f"{HERE / 'cluster_models.py'}:{model}"


def plans(model: str, calibration: Path) -> dict[str, Plan]:
    """The plans with and without rewrites."""
    made = {
        side: api.plan(
            spec_of(model), cluster=CLUSTER, optimizer="sgd", calibration=calibration,
            forbid=() if side == WITH else (NO_REWRITE,),
        )
        for side in (WITH, WITHOUT)
    }  # fmt: skip
    said = {side: f"{plan.method}, {step_s(plan):.3f} s" for side, plan in made.items()}
    print(f"{model}: {said}, {dict(chosen(made[WITH]))}", file=sys.stderr, flush=True)
    return made


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def chosen(plan: Plan) -> Counter[str]:
    """How many rewrites of each rule a plan has, and how many of none (merges of equal weights)."""
    takes = takes_of(plan.decisions.rewrites)
    others = len(plan.decisions.rewrites) - len(takes)
    found = Counter(rule for take in takes for rule in take.rules)
    return found + Counter({OTHERS: others})


def row_of(model: str, planned: dict[str, Plan], launches: list[dict[str, Any]]) -> Row:
    """Predicted and measured steps of both plans."""
    errors = [found["errors"] for found in launches if found["errors"]]
    if errors:
        raise SystemExit(f"{model}: {errors}")
    medians = {
        side: [statistics.median(found["seconds"][side]) for found in launches] for side in planned
    }
    ratios = [b / a for a, b in zip(medians[WITH], medians[WITHOUT], strict=True)]
    losses = [found["losses"] for found in launches]
    rewritten, plain = (
        Side(
            planned[side].method, step_s(planned[side]), statistics.median(medians[side]),
            min(medians[side]), max(medians[side]),
        )
        for side in (WITH, WITHOUT)
    )  # fmt: skip
    ratio, low, high = median_and_interval(ratios)
    return Row(
        model, dict(chosen(planned[WITH])), rewritten, plain,
        plain.predicted_s / rewritten.predicted_s, ratio, low, high, len(launches),
        max(abs(one[WITH] / one[WITHOUT] - 1) for one in losses),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, required=True, help="folder of testbed.py")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each plan per launch")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    models = args.models.split(",")
    with tempfile.TemporaryDirectory(prefix="parloom-rewrites-") as temporary:
        folder = Path(temporary)
        with Bed(args.testbed, "rewrites", RATE, HOSTS) as bed:
            calibration = calibrated(bed, folder, models)
            every = {model: plans(model, calibration) for model in models}
            planned = {model: sides for model, sides in every.items() if chosen(sides[WITH])}
            for model, sides in planned.items():
                for side, plan in sides.items():
                    api.save(plan, folder / model / side)
            asked = [f"{model}:{WITH},{WITHOUT}" for model in planned]
            found = [
                row
                for index in range(args.launches)
                for row in train(bed, folder, asked, args.steps, index % 2)
            ]
    rows = [row_of(m, planned[m], [r for r in found if r["model"] == m]) for m in planned]
    print("| model | rewrites | without: plan | predicted s | measured s | with: plan |"
          " predicted s | measured s | without / with, predicted | measured | losses differ by |")  # fmt: skip  # noqa: E501
    print("|" + "---|" * 11)
    print("\n".join(map(str, rows)))
    for model in every.keys() - planned:
        print(f"{model}: no rewrite chosen")
    report("rewrites_in_a_box", [asdict(row) for row in rows], args.json)
    return int(any(row.loss_difference > LOSS_TOLERANCE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
