"""Pipelines against one device: models x schedules x ranks, with layouts, cuts and storage drawn.

    PYTHONPATH=. python benchmarks/pipelines_proved.py [--models T5ForConditionalGeneration,...]
        [--ranks 2,4,8] [--seeds 2] [--json FILE]

Each cell is a cut into stages of random items on meshes of random sizes, unequal from four ranks
on, with random layouts and storage; in half of the cells random values of all blocks are made
again. Three steps with AdamW in float64 on threads of one process must leave the losses,
gradients, weights and buffers of one device to 1e-9 (DESIGN section 3). Cells that the file has of
the same revision are not run again. Exit code 1 where one differs or fails.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from breadth_models import tiny
from common import report, reported
from gate import told
from tests.dist import lowered, staged

from parloom.execute.verify import assemble, compare, reference_trace

MODELS = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration",
    "MixtralForCausalLM", "zoo:candle_uno", "zoo:inception_v3",
)  # fmt: skip
Row = dict[str, Any]


def cells(models: list[str], ranks: list[int], seeds: int) -> Iterator[tuple[str, str, int, int]]:
    """(model, schedule, ranks, seed) of all cells, a model's after each other."""
    for model in models:
        for schedule in staged.SCHEDULES:
            for count in ranks:
                for seed in range(seeds):
                    yield model, schedule, count, seed


def judged(model: lowered.Model, reference: Any, cell: tuple[str, str, int, int]) -> Row:
    """What comes of a cell."""
    name, schedule, ranks, seed = cell
    row: Row = {"model": name, "schedule": schedule, "ranks": ranks, "seed": seed}
    started = time.perf_counter()
    try:
        plan = staged.pipeline_of(model, schedule, ranks, seed)
        row["stages"] = [stage.mesh.num_ranks for stage in plan.stages]
        row["microbatches"], row["remade"] = plan.num_microbatches, bool(plan.activations)
        pipeline = staged.compiled(model, plan).pipeline
        found = compare(reference, assemble(staged.train(pipeline, model)), pipeline.num_ranks)
        row["error"], row["tensor"] = found.worst_error, found.worst_tensor
        row["wrong"] = "" if found.passed else str(found.first_difference)
    except Exception as err:
        row["wrong"] = told(err)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", default=",".join(MODELS))
    arguments.add_argument("--ranks", default="2,4,8")
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--json")
    asked = arguments.parse_args()
    rows: list[Row] = reported(asked.json)
    done = {(r["model"], r["schedule"], r["ranks"], r["seed"]) for r in rows}
    ranks = [int(count) for count in asked.ranks.split(",")]
    known: dict[str, tuple[lowered.Model, Any]] = {}
    for cell in cells(asked.models.split(","), ranks, asked.seeds):
        if cell in done:
            continue
        if cell[0] not in known:
            model = lowered.of(*tiny(cell[0]))
            traced = reference_trace(model.graph, staged.PLANNED, model.tensors, model.batch)
            known = {cell[0]: (model, traced)}
        rows.append(judged(*known[cell[0]], cell))
        print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        report("pipelines_proved", rows, asked.json)
    wrong = [row for row in rows if row["wrong"]]
    worst = max((row["error"] for row in rows if "error" in row), default=0.0)
    print(f"{len(rows) - len(wrong)} of {len(rows)} equal, largest error {worst:.1e}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
