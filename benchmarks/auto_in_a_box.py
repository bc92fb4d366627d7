"""The planner's own choice against what torch offers, on the cluster in a box.

    python benchmarks/auto_in_a_box.py --testbed FOLDER [--beds 2:100mbit,..] [--json FILE]
    python benchmarks/auto_in_a_box.py --testbed FOLDER --draw SEED --keep FOLDER --json FILE

A bed has equal hosts, or a last one of half the speed and memory (`4:100mbit:slow`). `--draw` takes
24 of all pairs of a bed and a model. Rows that the file has of this revision are kept.
Per bed, `parloom calibrate` measures it once, with all models, and `parloom plan` makes a plan of
every model with that file. In each of several launches the plan, torch's DDP, FSDP2, DTensor
tensor parallelism and 1F1B (equally many layers; equal FLOPs), and one device alone then train
every model in turns, step by step: same weights, batch and optimizer. A row is the median over
launches of each side's median step, by its slowest rank. The losses after the steps must agree;
`learnt` is how far they moved.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster_in_a_box import HERE, LOSS_TOLERANCE, Bed, train
from common import median_and_interval, report, reported, verdict

from parloom import api

LIMIT = 1.05
AUTO = "auto"
PIPELINES = ("1F1B", "1F1B by FLOPs")
TO_BEAT = ("DDP", "FSDP2", "DTensor", *PIPELINES, "one device")
SIDES = (AUTO, *TO_BEAT)
MODELS = ("mlp_unify", "candle_uno", "dlrm", "small_gpt", "small_cnn", "heavy_head", "mmt")
BEDS = ("2:100mbit", "2:250mbit", "4:100mbit", "4:250mbit")
DRAWN, DRAWN_BEDS = (
    24,
    [
        f"{hosts}:{rate}mbit{slow}"
        for hosts in (2, 4)
        for rate in (50, 100, 250)
        for slow in ("", ":slow")
    ],
)
# The last host has half of what the others have. Rates are measured: these are not used.
MIXED = """
name: box
backend: gloo
join: {{name: network, bandwidth: {rate}, latency: 200us, efficiency: 0.96}}
parts:
  - count: {others}
    device: {{name: core, memory: 3GiB, memory_bandwidth: 5GB/s, rates: {{fp32: 12GFLOP/s}}}}
    levels: [{{name: host, size: 1, bandwidth: 1Gbit/s}}]
  - device: {{name: half, memory: 1500MiB, memory_bandwidth: 3GB/s, rates: {{fp32: 6GFLOP/s}}}}
    levels: [{{name: host, size: 1, bandwidth: 1Gbit/s}}]
"""
Row = dict[str, Any]


def prepare(bed: Bed, folder: Path, models: list[str], cluster: str) -> dict[str, Row]:
    """Calibrate the bed, unless it was, and write every model's plan; which, and its step time."""
    calibration = folder / "calibration.json"
    specs = {model: f"{HERE / 'cluster_models.py'}:{model}" for model in models}
    if not calibration.exists():
        said = bed.run(
            sys.executable, "-m", "parloom", "calibrate", "--cluster", cluster,
            "--out", str(calibration), *(word for s in specs.values() for word in ("--model", s)),
        )  # fmt: skip
        print(said.strip(), file=sys.stderr, flush=True)
    predicted = {}
    for model in models:
        plan = api.plan(specs[model], cluster=cluster, optimizer="sgd", calibration=calibration)
        api.save(plan, folder / model / AUTO)
        assert plan.prediction is not None
        predicted[model] = {"plan": plan.method, "predicted_s": plan.prediction.step_s}
        print(f"{model}: {predicted[model]}", file=sys.stderr, flush=True)
    return predicted


def cells(args: argparse.Namespace) -> dict[str, list[str]]:
    """The models of each bed: those asked for, or those that the seed draws."""
    models, beds = args.models.split(","), args.beds.split(",") if args.beds else []
    if args.draw is None:
        return dict.fromkeys(beds or BEDS, models)
    every = [(bed, model) for bed in DRAWN_BEDS for model in models]
    drawn = sorted(random.Random(args.draw).sample(every, DRAWN), key=every.index)
    return {bed: [m for b, m in drawn if b == bed] for bed in beds or dict(drawn)}


def measured(
    described: str, models: list[str], folder: Path, args: argparse.Namespace
) -> list[Row]:
    """The rows of a bed."""
    hosts, rate, *slow = described.split(":")
    cluster = f"{hosts}x1xcpu"
    if slow:
        file = folder / "cluster.yaml"
        file.write_text(MIXED.format(rate=rate.replace("mbit", "Mbit/s"), others=int(hosts) - 1))
        cluster = str(file)
    with Bed(args.testbed, args.name, rate, int(hosts), slow=bool(slow)) as bed:
        predicted = prepare(bed, folder, models, cluster)
        found = [row for i in range(args.launches) for row in launch(bed, folder, models, args, i)]
    if not found:
        return []
    of_bed = {"bed": described, "hosts": hosts, "rate": rate, "slow": bool(slow)}
    each = {model: [r for r in found if r["model"] == model] for model in models}
    return [{**of_bed, **predicted[model], **summary(rows)} for model, rows in each.items()]


def launch(
    bed: Bed, folder: Path, models: list[str], args: argparse.Namespace, index: int
) -> list[Row]:
    rows = [f"{model}:{','.join(SIDES)}" for model in models]
    found = train(bed, folder, rows, args.steps, index)
    for row in found:
        medians = {side: round(statistics.median(t), 3) for side, t in row["seconds"].items()}
        print(f"launch {index}: {row['model']} {medians}", file=sys.stderr, flush=True)
    return found


def summary(launches: list[Row]) -> Row:
    """One row of the table from the same model's rows of all launches."""
    first = launches[0]
    seconds = {
        side: [statistics.median(row["seconds"][side]) for row in launches]
        for side in first["seconds"]
    }
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    best = min((side for side in TO_BEAT if side in medians), key=medians.__getitem__)
    ratios = [a / b for a, b in zip(seconds[AUTO], seconds[best], strict=True)]
    ratio, low, high = median_and_interval(ratios)
    losses = [row["losses"] for row in launches]
    apart = max(
        abs(loss - found[AUTO]) / abs(found[AUTO]) for found in losses for loss in found.values()
    )
    return {
        "model": first["model"],
        "seconds": medians,
        "spread": {side: (min(times), max(times)) for side, times in seconds.items()},
        "errors": first["errors"],
        "fastest": best,
        "ratio": ratio,
        "low": low,
        "high": high,
        "verdict": verdict(low, high, LIMIT),
        "launches": len(launches),
        "loss_difference": apart,
        "losses_agree": apart <= LOSS_TOLERANCE,
        "learnt": min(abs(row["losses"][AUTO] / row["first_losses"][AUTO] - 1) for row in launches),
        "each": seconds,
    }


def _line(row: Row) -> str:
    """Medians in seconds, each with half of its range over launches."""

    def cell(side: str) -> str:
        if side not in row["seconds"]:
            return str(row["errors"][side])
        low, high = row["spread"][side]
        return f"{row['seconds'][side]:.3f} ±{(high - low) / 2 / row['seconds'][side]:.0%}"

    return (
        f"| {row['bed']} | {row['model']} | {' | '.join(map(cell, SIDES))} |"
        f" {row['ratio']:.2f} ({row['low']:.2f} .. {row['high']:.2f}) of {row['fastest']} |"
        f" {row['verdict']} | {row['plan']} | {row['predicted_s']:.3f} |"
        f" {row['loss_difference']:.0e}{'' if row['losses_agree'] else ' DISAGREE'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testbed", type=Path, required=True, help="folder of testbed.py")
    parser.add_argument("--beds", help="hosts:rate[:slow],..; of those drawn only these")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--draw", type=int, metavar="SEED", help=f"{DRAWN} of all beds and models")
    parser.add_argument("--launches", type=int, default=3, help="0: calibrate and plan only")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each side per launch")
    parser.add_argument("--name", default="auto", help="of the bed")
    parser.add_argument(
        "--keep", type=Path, help="folder for calibrations (those there are used) and plans"
    )
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    table: list[Row] = reported(args.json)
    known = {(row["bed"], row["model"]) for row in table}
    heads = ["bed", "model", *SIDES, f"auto / fastest, <= {LIMIT}", "held",
             "plan", "predicted", "losses differ by"]  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in table:
        print(_line(row))
    with tempfile.TemporaryDirectory(prefix="parloom-auto-") as temporary:
        for described, models in cells(args).items():
            left = [model for model in models if (described, model) not in known]
            if not left:
                continue
            folder = (args.keep or Path(temporary)) / described.replace(":", "-")
            folder.mkdir(parents=True, exist_ok=True)
            found = measured(described, left, folder, args)
            table += found
            for row in found:
                print(_line(row), flush=True)
            report("auto_in_a_box", table, args.json)
    return int(not all(row["losses_agree"] for row in table))


if __name__ == "__main__":
    raise SystemExit(main())
