"""How fast steps are simulated, and whether delta simulation is full simulation to the last bit.

    python benchmarks/simulator.py [--edits 10000] [--json FILE]

Delta: random edits of the steps of several models and plans; every result of the delta simulation
(times, busy and exposed per stream, memory, each operator's start and end) is compared to that of a
full one. Both are timed in turns, by CPU time; the ratio is the median over edits, with quartiles.

Pipeline: a step like GPT-3 175B's on 1,024 A100 (8 tensor x 8 data x 16 stages of 6 blocks, 512
microbatches of one sequence of 2,048), from priced programs to the time line, on one core.
"""

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch
from common import report

from parloom.capture import capture
from parloom.capture.load import load_model
from parloom.comparators.baselines import METHODS
from parloom.cost.actions import StageWriter
from parloom.cost.clusters import load_cluster
from parloom.cost.edits import drawn
from parloom.cost.pipeline import (
    StageActions,
    chain,
    play_stage,
    send,
    simulate_pipeline,
)
from parloom.cost.simulate import Simulator, step_tasks
from parloom.cost.step import Priced, priced
from parloom.cost.tasks import StepTasks
from parloom.cost.timeline import Timeline, slices
from parloom.cost.works import Called
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.ir.regular_parts import Join
from parloom.ir.schedules import schedule
from parloom.rewrite.rewrites import rewritten

CLUSTER = "4x8xA100"
# Model, its batch and sizes, plan.
CASES: tuple[tuple[str, int, dict[str, object], str], ...] = (
    ("gpt", 64, {"depth": 24, "width": 1024, "heads": 16}, "data_parallel"),
    ("gpt", 64, {"depth": 24, "width": 1024, "heads": 16}, "fsdp"),
    ("gpt", 64, {"depth": 24, "width": 1024, "heads": 16}, "megatron"),
    ("llama", 64, {}, "fsdp"),
    ("resnext50", 64, {}, "data_parallel"),
    ("inception_v3", 64, {}, "data_parallel"),
    ("gnmt", 64, {}, "data_parallel"),
    ("dlrm", 64, {}, "data_parallel"),
)
STAGES, BLOCKS, MICROBATCHES, DATA = 16, 6, 512, 8
HIDDEN_BYTES = 2048 * 12288 * 2


@dataclass(frozen=True)
class Delta:
    """Edits of one model under one plan."""

    model: str
    plan: str
    instructions: int
    edits: int
    differ: int
    full_ms: float
    delta_ms: float
    speed_up: float
    low: float
    high: float


def step_of(model: str, batch: int, sizes: dict[str, object], method: str) -> StepTasks:
    """The step of the first plan of a method that the model has on `CLUSTER`."""
    loaded = load_model(f"zoo:{model}", batch=batch, device="meta", sizes=sizes)
    graph = capture(loaded.model, loaded.batch)
    cluster = load_cluster(CLUSTER)
    decisions = next(METHODS[method](graph, cluster, 1, 0))
    pcg = lower(rewritten(graph, decisions.rewrites), decisions)
    return step_tasks(pcg, cluster, decisions)


def everything(timeline: Timeline) -> object:
    """All that a timeline says, down to each operator."""
    (process,) = timeline.processes
    parts = [part for span in process.spans for part in slices(span)]
    facts = timeline.step_ps, timeline.bound_ps, timeline.busy(), timeline.exposed()
    return facts, process.memory, parts


def delta(model: str, plan: str, tasks: StepTasks, edits: int) -> Delta:
    """Random edits, one after the other, from the plan on again after every twenty."""
    rng = random.Random(0)
    known = Simulator()
    known.play(tasks)
    current, differ = tasks, 0
    full_s: list[float] = []
    delta_s: list[float] = []
    for number in range(edits):
        current = drawn(tasks if number % 20 == 0 else current, rng)
        start = time.process_time()
        one = known.play(current)
        middle = time.process_time()
        other = Simulator().play(current)
        full_s.append(time.process_time() - middle)
        delta_s.append(middle - start)
        differ += everything(one) != everything(other)
        if number % 500 == 499:  # what was edited long ago is not asked for again
            known = Simulator()
            known.play(tasks)
    ratios = [full / one for full, one in zip(full_s, delta_s, strict=True)]
    low, middle_, high = statistics.quantiles(ratios, n=4)
    count = sum(len(p.segment.notes) for a in dict.fromkeys(tasks.actions) for p in a.parts)
    full_ms, delta_ms = (statistics.median(times) * 1e3 for times in (full_s, delta_s))
    return Delta(model, plan, count, edits, differ, full_ms, delta_ms, middle_, low, high)


def gpt_3() -> tuple[PCG, Decisions]:
    """Six blocks of GPT-3 with embedding and head, on the 64 devices of a stage."""
    sizes = {"depth": BLOCKS, "width": 12288, "heads": 96, "vocab": 51200}
    batch = DATA * MICROBATCHES
    loaded = load_model("zoo:gpt", batch=batch, seq=2048, dtype="bf16", device="meta", sizes=sizes)
    graph = capture(loaded.model, loaded.batch)
    cluster = load_cluster("8x8xA100")
    plans = METHODS["megatron"](graph, cluster, MICROBATCHES, 0)
    found = next(d for d in plans if d.mesh["tensor"].size == 8)
    decisions = replace(found, master_dtype="float32", reduce_dtype="float32")
    return lower(rewritten(graph, decisions.rewrites), decisions), decisions


def inner(found: Priced) -> Priced:
    """A stage in the middle: nothing but its blocks."""
    walker, main = found.walker, found.main
    forward = walker.track((w for w in main.forward.works if isinstance(w, Called)), False)
    backward = walker.track((w for w in main.backward.works if isinstance(w, Called)), True)
    buckets = found.parameters.buckets(backward)
    return replace(found, main=replace(main, forward=forward, backward=backward), buckets=buckets)


def pipeline(name: str, ends: Priced, middle: Priced, pcg: PCG) -> tuple[float, Timeline]:
    """CPU seconds from priced stages to the time line, and that."""
    cluster = load_cluster("8x8xA100")
    start = time.process_time()
    player = Simulator()
    # Each tensor rank sends its part.
    sent = send(HIDDEN_BYTES / 8, HIDDEN_BYTES / 8, Join(cluster, 1))

    def played(title: str, found: Priced) -> StageActions:
        return play_stage(
            title, StageWriter(pcg, cluster, found), player, split=name.startswith("zb")
        )

    end, between = played("end", ends), played("middle", middle)
    stages = [end, *[between] * (STAGES - 2), end]
    lists = schedule(name, STAGES, MICROBATCHES)
    timeline = simulate_pipeline(lists, stages, chain(STAGES, sent, sent))
    return time.process_time() - start, timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=10_000)
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    print("| model | plan | instructions | edits | differ | full | delta | speed-up (quartiles) |")
    print("|---|---|---|---|---|---|---|---|")
    for model, batch, sizes, method in CASES:
        tasks = step_of(model, batch, dict(sizes), method)
        row = delta(model, method, tasks, -(-asked.edits // len(CASES)))
        print(
            f"| {row.model} | {row.plan} | {row.instructions} | {row.edits} | {row.differ} |"
            f" {row.full_ms:.2f} ms | {row.delta_ms:.2f} ms |"
            f" {row.speed_up:.1f} ({row.low:.1f} .. {row.high:.1f}) |",
            flush=True,
        )
        rows.append({"kind": "delta"} | asdict(row))
    print("\n| schedule | actions | CPU | step | peak |\n|---|---|---|---|---|")
    pcg, decisions = gpt_3()
    ends = priced(pcg, load_cluster("8x8xA100"), decisions)
    middle = inner(ends)
    for name in ("gpipe", "1f1b", "zb_h1"):
        runs = [pipeline(name, ends, middle, pcg) for _ in range(5)]
        seconds, timeline = statistics.median(s for s, _ in runs), runs[0][1]
        actions = sum(len(process.spans) for process in timeline.processes)
        print(
            f"| {name} | {actions} | {seconds:.2f} s | {timeline.step_s:.2f} s |"
            f" {timeline.peak_bytes / 2**30:.1f} GiB |",
            flush=True,
        )
        rows.append(
            {
                "kind": "pipeline",
                "schedule": name,
                "actions": actions,
                "cpu_s": seconds,
                "step_s": timeline.step_s,
                "peak_bytes": timeline.peak_bytes,
            }
        )
    report("simulator", rows, asked.json)


if __name__ == "__main__":
    main()
