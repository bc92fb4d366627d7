"""Gradients and weights in int8 against what they are: loss after training, and measured steps.

    python benchmarks/quantized.py loss [--seeds 3] [--steps 200] [--json FILE]
    python benchmarks/quantized.py steps --testbed FOLDER [--rates 50mbit,100mbit] [--json FILE]

`loss` trains the model of `make demo` on four forked ranks, from several seeds of weights and data,
under plans whose collectives are exact and under the same plans with int8 in blocks; a row is a
plan and a seed with its held-out loss. The spread is that of the exact runs; a quantized plan has
to end within it. `steps` trains models on the cluster in a box in turns, with and without, and
says how many bytes a device sends in a step.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cluster_in_a_box import HERE, Bed, train
from common import report
from transformers import GPT2Config, GPT2LMHeadModel

from parloom import api
from parloom.cost.clusters import load_cluster
from parloom.cost.step import priced
from parloom.cost.works import summed
from parloom.execute.machine import machine_for
from parloom.execute.program import training_program
from parloom.execute.quantized import QuantizedReference
from parloom.execute.ranks import fork_ranks
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.quantization import INT8, QUANTIZED
from parloom.rewrite.rewrites import rewritten
from parloom.runtime import DistributedComm, Pipeline, Trainer
from parloom.search.quantized import in_int8

sys.path.insert(0, str(HERE.parent / "examples"))
from train_bytes import FOLDER, Corpus, draw, held_out_batches

BATCH, SEQ, RANKS, WARMUP, EVERY = 8, 128, 4, 20, 20
METHODS = ("data_parallel", "fsdp")
EXACT = "exact"
Row = dict[str, Any]


def quantized(plan: Plan) -> Plan:
    """The same plan with its gradients and gathered weights in int8."""
    graph = rewritten(parse_graph(plan.graph), plan.decisions.rewrites)
    return replace(plan, decisions=in_int8(plan.decisions, graph))


def lowered(plan: Plan) -> PCG:
    """The parallel program of a plan of one stage."""
    graph = rewritten(parse_graph(plan.graph), plan.decisions.rewrites)
    return lower(graph, plan.decisions)


def predicted_s(plan: Plan, cluster: str) -> float:
    """The step that is expected of a plan, by data sheets."""
    if len(plan.decisions.stages) > 1:
        assert plan.prediction is not None
        return plan.prediction.step_s
    machine = machine_for(cluster, None)
    return machine.predict(lowered(plan), plan.decisions, plan.optimizer).step_s


def sent_bytes(plan: Plan, cluster: Cluster) -> int:
    """Bytes that a device sends for gradients and weights in a step, as the cost model counts."""
    step = priced(lowered(plan), cluster, plan.decisions, plan.optimizer)
    own = step.parameters
    # The last unit stays gathered for the backward pass.
    again = [gather for gather in own.gathers if gather.unit != own.gathers[-1].unit]
    transfers = [*own.gathers, *again, *step.reductions, *own.publications]
    total = summed(transfer.total() for transfer in transfers)
    return round(sum(size for _, size, _ in total.price.comm))


# Loss


def trained(pipeline: Pipeline, tensors: dict[str, torch.Tensor], seed: int, steps: int) -> Row:
    """One rank's training: the loss every so many steps, and the held-out loss at the end."""
    torch.set_num_threads(1)
    corpus = Corpus.of_the_standard_library()
    trainer = Trainer(
        pipeline,
        tensors,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
        ),
        clip_norm=1.0,
        comm=DistributedComm(pipeline.mesh),
    )
    curve = []
    for step in range(steps):
        batch = draw(corpus.train, BATCH, SEQ, seed=100_000 * seed + step + 1)
        found = trainer.step(batch).loss.item()
        if (step + 1) % EVERY == 0:
            curve.append(round(found, 4))
    return {"curve": curve, "weights": trainer.state_dict()}


def held_out_loss(weights: dict[str, torch.Tensor]) -> float:
    """The loss of trained weights on one device, exactly as they are."""
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(FOLDER))
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    corpus = Corpus.of_the_standard_library()
    with torch.no_grad():
        losses = [
            model(**batch).loss.item() for batch in held_out_batches(corpus, BATCH, SEQ, count=16)
        ]
    return statistics.fmean(losses)


def losses(args: argparse.Namespace) -> list[Row]:
    """Held-out losses of all plans and seeds: of weights as they are stored, and as steps read
    them.
    """
    rows: list[Row] = []
    base = {
        method: api.plan(
            str(FOLDER / "config.json"), BATCH, "adamw", f"{RANKS}xcpu", seq=SEQ, dtype="fp32",
            method=method, devices=RANKS,
        )
        for method in METHODS
    }  # fmt: skip
    sides = {EXACT: base["fsdp"]} | {f"{m}-{INT8}": quantized(p) for m, p in base.items()}
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        tensors = GPT2LMHeadModel(GPT2Config.from_pretrained(FOLDER)).state_dict()
        for side in args.plans.split(",") if args.plans else sides:
            plan = sides[side]
            pipeline = training_program(plan).pipeline
            every = fork_ranks(
                RANKS, trained, pipeline, tensors, seed, args.steps, timeout_s=7200.0
            )
            weights = every[0]["weights"]
            read = QuantizedReference(pipeline.programs[0], []).read(weights)
            row = {"plan": side, "seed": seed, "loss": held_out_loss(weights)}
            row |= {"loss_as_read": held_out_loss(read), "curve": every[0]["curve"]}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def judged(rows: list[Row]) -> bool:
    """Print losses by plan; whether means of quantized plans are within the spread of seeds."""
    print("| plan | held-out loss by seed | mean | mean, weights as steps read them |")
    print("|" + "---|" * 4)
    means: dict[str, float] = {}
    for plan in dict.fromkeys(row["plan"] for row in rows):
        found = [row for row in rows if row["plan"] == plan]
        stored, read = ([row[key] for row in found] for key in ("loss", "loss_as_read"))
        means[plan] = statistics.fmean(read)
        each = ", ".join(f"{loss:.4f}" for loss in stored)
        print(f"| {plan} | {each} | {statistics.fmean(stored):.4f} | {means[plan]:.4f} |")
    exact = [row["loss"] for row in rows if row["plan"] == EXACT]
    if not exact:
        return True
    spread = max(exact) - min(exact)
    print(f"spread of seeds: {spread:.4f}")
    return all(abs(mean - means[EXACT]) <= spread for mean in means.values())


# Steps


def prepared(
    folder: Path, programs: dict[str, Any], cluster: str, wanted: list[str]
) -> dict[tuple[str, str], Row]:
    """Write the plans of all models; what each sends and is expected to take."""
    found: dict[tuple[str, str], Row] = {}
    there = load_cluster(cluster)
    for model, program in programs.items():
        plans: dict[str, Plan] = {}
        for side, asked in ASKED.items():
            if side in wanted:
                plan = api.search(program, cluster=cluster, devices=RANKS, **asked)
                plans |= {side: plan, f"{side}-{INT8}": quantized(plan)}
        if "auto" in wanted:
            for side, allow in (("auto", []), (f"auto-{INT8}", [QUANTIZED])):
                plans[side] = api.search(program, cluster=cluster, devices=RANKS, allow=allow)
        for side, plan in plans.items():
            api.save(plan, folder / model / side)
            one = len(plan.decisions.stages) == 1
            found[model, side] = {
                "sent_bytes": sent_bytes(plan, there) if one else None,
                "predicted_s": predicted_s(plan, cluster),
                "dtypes": plan.decisions.sent_dtypes,
            }
            print(model, side, found[model, side], file=sys.stderr, flush=True)
    return found


# All but `auto`: the same plan with int8 beside it.
ASKED: dict[str, Any] = {
    "data_parallel": {"method": "data_parallel"},
    "fsdp": {"method": "fsdp"},
    "zero3": {"method": "fsdp", "pin": ["*=weights:sharded"]},
}
CLUSTER_FILE = """
name: box
device: {{name: core, memory: 3GiB, memory_bandwidth: 5GB/s, rates: {{fp32: 12GFLOP/s}}}}
backend: gloo
levels: [{{name: network, size: 4, bandwidth: {rate}, latency: 200us, efficiency: 0.96}}]
"""


def steps(args: argparse.Namespace) -> list[Row]:
    """Measured steps of all plans at all rates."""
    rows: list[Row] = []
    models = args.models.split(",")
    wanted = args.plans.split(",") if args.plans else [*ASKED, "auto"]
    programs = {
        model: api.capture(f"{HERE / 'cluster_models.py'}:{model}", optimizer="sgd")
        for model in models
    }
    for rate in args.rates.split(","):
        with tempfile.TemporaryDirectory(prefix="parloom-bench-") as name:
            folder = Path(name)
            file = folder / "cluster.yaml"
            file.write_text(CLUSTER_FILE.format(rate=rate.replace("mbit", "Mbit/s")))
            plans = prepared(folder, programs, str(file), wanted)
            names = list(dict.fromkeys(side for _, side in plans))
            seconds: dict[tuple[str, str], list[float]] = {}
            ended: dict[tuple[str, str], float] = {}
            with Bed(args.testbed, args.name, rate, RANKS) as bed:
                for index in range(args.launches):
                    asked = [f"{model}:{','.join(names)}" for model in models]
                    for row in train(bed, folder, asked, args.steps, index):
                        for side, times in row["seconds"].items():
                            key = row["model"], side
                            seconds.setdefault(key, []).append(statistics.median(times))
                            ended[key] = row["losses"][side]
                            print(rate, key, times, file=sys.stderr, flush=True)
            for key, own in plans.items():
                rows.append(
                    {"rate": rate, "model": key[0], "plan": key[1], **own, "loss": ended[key],
                     "step_s": statistics.median(seconds[key]), "launches": seconds[key]}
                )  # fmt: skip
    return rows


def table(rows: list[Row]) -> None:
    """Each plan beside the same with int8."""
    print(
        "| link | model | plan | sends | int8 | expected | int8 | step | int8 | faster | launches |"
    )
    print("|" + "---|" * 11)
    found = {(row["rate"], row["model"], row["plan"]): row for row in rows}
    for (rate, model, side), row in found.items():
        other = found.get((rate, model, f"{side}-{INT8}"))
        if other is None:
            continue
        sizes = [one["sent_bytes"] for one in (row, other)]
        shown = [f"{size / 1e6:.2f} MB" if size is not None else "" for size in sizes]
        times = [one["step_s"] for one in (row, other)]
        expected = [f"{one['predicted_s']:.3f} s" for one in (row, other)]
        spread = ", ".join(f"{a / b:.2f}" for a, b in zip(
            row["launches"], other["launches"], strict=True))  # fmt: skip
        print(
            f"| {rate} | {model} | {side} | {shown[0]} | {shown[1]} | {expected[0]} |"
            f" {expected[1]} | {times[0]:.3f} s |"
            f" {times[1]:.3f} s | {times[0] / times[1]:.2f} | {spread} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("loss", "steps"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--plans", help=f"of loss: {EXACT}, METHOD-{INT8}; of steps: {', '.join(ASKED)}, auto"
    )
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--testbed", type=Path, help="folder of testbed.py")
    parser.add_argument("--rates", default="50mbit,100mbit")
    parser.add_argument("--models", default="mlp,gpt")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--name", default="pquant", help="of the bed")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    within = True
    if args.part == "loss":
        args.steps = args.steps or 200
        rows = losses(args)
        within = judged(rows)
    else:
        args.steps = args.steps or 4
        rows = steps(args)
        table(rows)
    report(f"quantized_{args.part}", rows, args.json)
    return int(not within)


if __name__ == "__main__":
    raise SystemExit(main())
