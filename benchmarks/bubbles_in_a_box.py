"""Measured bubbles of schedules beside simulated ones, on the cluster in a box.

    python benchmarks/bubbles_in_a_box.py --testbed FOLDER --calibration FILE [--json FILE]

One split of `heavy_head` over 4 hosts at 100 Mbit/s, that of `--method pipedream`, runs under 1F1B
and ZB-H1, and beside it what `auto` chose: stages, a searched list. For each rank, the share of a
step in which it waits for other stages; `FILE` is what `auto_in_a_box.py --keep` left
of the same bed.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_in_a_box import HERE, Bed, train
from common import report

from parloom import api
from parloom.execute.machine import machine_of
from parloom.execute.program import lowered
from parloom.ir.lower_stages import group_lists, stage_ranks
from parloom.ir.plan import Plan

MODEL, HOSTS, RATE = "heavy_head", 4, "100mbit"
NAMED = ("1f1b", "zb_h1")
Row = dict[str, Any]


def plans(calibration: Path) -> dict[str, Plan]:
    """A plan for each schedule, with its prediction."""
    asked: dict[str, Any] = {"optimizer": "sgd", "calibration": calibration}
    spec, cluster = f"{HERE / 'cluster_models.py'}:{MODEL}", f"{HOSTS}x1xcpu"
    base = api.plan(spec, cluster=cluster, method="pipedream", devices=HOSTS, **asked)
    found = {"searched": api.plan(spec, cluster=cluster, **asked)}
    for name in NAMED:
        plan = replace(base, decisions=replace(base.decisions, schedule=name, actions=()))
        machine = machine_of(plan, calibration)
        prediction = machine.predict_stages(lowered(plan), plan.decisions, plan.optimizer)
        found[name] = replace(plan, prediction=prediction)
    return found


def predicted(plan: Plan) -> list[float]:
    """The share of a step that each rank is predicted to wait."""
    assert plan.prediction is not None
    ranks, found = stage_ranks(plan.decisions), [0.0] * plan.decisions.num_ranks
    groups = group_lists(plan.decisions)
    for (stages, _), waits_s in zip(groups, plan.prediction.waits_s, strict=True):
        for rank in ranks[stages[0]]:
            found[rank] = waits_s / plan.prediction.step_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, required=True, help="folder of testbed.py")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    found = plans(args.calibration)
    with tempfile.TemporaryDirectory(prefix="parloom-bubbles-") as folder:
        for name, plan in found.items():
            api.save(plan, Path(folder) / MODEL / name)
        with Bed(args.testbed, "bubbles", RATE, HOSTS) as bed:
            rows = [f"{MODEL}:{','.join(found)}"]
            launches = [
                train(bed, Path(folder), rows, args.steps, index)[0]
                for index in range(args.launches)
            ]
    table: list[Row] = []
    print("| schedule | step | predicted | waits of each rank | predicted |\n|---|---|---|---|---|")
    for name, plan in found.items():
        assert plan.prediction is not None
        step_s = statistics.median(statistics.median(row["seconds"][name]) for row in launches)
        waits = [
            statistics.median(shares)
            for shares in zip(*(row["waits"][name] for row in launches), strict=True)
        ]
        table.append(
            {
                "schedule": name,
                "step_s": step_s,
                "predicted_s": plan.prediction.step_s,
                "waits": waits,
                "predicted_waits": predicted(plan),
            }
        )
        measured, beside = (
            ", ".join(f"{share:.0%}" for share in shares) for shares in (waits, predicted(plan))
        )
        print(f"| {name} | {step_s:.3f} | {plan.prediction.step_s:.3f} | {measured} | {beside} |")
    report("bubbles_in_a_box", table, args.json)


if __name__ == "__main__":
    main()
