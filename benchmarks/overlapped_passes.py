"""Tokens of a pipeline on CPU ranks whose passes wait instead of computing, as hosts of devices do.

    python benchmarks/overlapped_passes.py [--ranks 2] [--microbatches 1,2,4] [--pass-ms 20]
                                           [--tokens 33] [--repeats 3] [--json F]

So cores that others use do not decide. A pass of a microbatch in a stage is computed once, and then
takes `--pass-ms`; messages, choices of tokens and the order of passes are those of `parloom run`.
Predicted is what the simulator says of such stages; beside it the time from token to token where
passes follow each other at once, and one pass at a time; medians of one run.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cluster_rank import _slowest
from common import report
from inference_latency import BATCH, PROMPT, _say, configs, launched
from torch import Tensor

from parloom import api
from parloom.cost.engine import State
from parloom.cost.pipeline import Edge, Send, StageActions, chain, simulate_pipeline
from parloom.cost.timeline import Memory, Played
from parloom.execute.files import read_plan
from parloom.execute.serve import server_of
from parloom.ir.graph import Graph
from parloom.ir.mesh import Mesh
from parloom.ir.plan import (
    NO_OPTIMIZER,
    Action,
    Decisions,
    Inference,
    Plan,
    Stage,
)
from parloom.ir.stages import stage_items
from parloom.ir.text import print_graph
from parloom.runtime.generation import DECODE, GENERATED, PREFILL, TOKENS
from parloom.runtime.part import Part
from parloom.runtime.passes import forward_pass
from parloom.runtime.program import Action as Run
from parloom.runtime.program import Program, Result
from parloom.runtime.transfers import Transfers

NOTHING: State = ()
BLOCKS = 4  # of the model


def predicted_s(ranks: int, microbatches: int, pass_s: float) -> float:
    """From token to token in stages that take so long each, over links that take no time."""
    played = Played(round(pass_s * 1e12), NOTHING, (), (), Memory())
    stages = [StageActions(str(index), {"F": played}) for index in range(ranks)]
    tokens = Edge(ranks - 1, 0, Send(), None, later=True)
    lists = tuple(
        tuple(Action("F", each, stage) for each in range(microbatches)) for stage in range(ranks)
    )
    return simulate_pipeline(lists, stages, [*chain(ranks), tokens]).period_s


# One rank.


class Waiting:
    """In the place of `forward_pass`: the first pass of a program computes, all others wait."""

    def __init__(self, pass_s: float) -> None:
        self._pass_s = pass_s
        self._known: dict[int, Result] = {}

    def __call__(
        self, part: Part, program: Program, action: Run, given: Mapping[str, Tensor],
        hoisted: tuple[Tensor, ...], transfers: Transfers,
    ) -> tuple[Result, dict[str, Tensor]]:  # fmt: skip
        if id(program) not in self._known:
            found = forward_pass(part, program, action, given, hoisted, transfers)
            self._known[id(program)] = found[0]
            return found
        for crossing in program.arriving:
            transfers.receive(part.stage, crossing.value, action.microbatch)
        transfers.receive_ahead()
        time.sleep(self._pass_s)
        result = self._known[id(program)]
        transfers.send(action, result.leaving)
        return result, {}


def run_rank(path: Path, pass_s: float, tokens: int, repeats: int) -> None:
    """Time a plan; rank 0 prints seconds from token to token."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    server = server_of(read_plan(path), None)
    prompts = torch.randint(0, 4096, (BATCH, PROMPT))
    token = {TOKENS: prompts[:, :1], GENERATED: torch.tensor(1)}
    patch("parloom.runtime.evaluation.forward_pass", Waiting(pass_s)).start()
    server.begin_tokens(prompts, 3).wait()
    whole = _seconds(lambda: server.begin_tokens(prompts, tokens).wait(), repeats)
    first = _seconds(lambda: server.run(PREFILL, {TOKENS: prompts}), repeats)
    alone = _seconds(lambda: server.run(DECODE, token), 4 * repeats)
    if dist.get_rank() == 0:
        found = {"overlapped_s": (whole - first) / (tokens - 1), "alone_s": alone}
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in cluster_rank.py


def _seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(_slowest(times))


# The table.


def stages_of(graph: Graph, ranks: int) -> tuple[Stage, ...]:
    """Equally many blocks on each rank; what is before and after them in the first and last."""
    found: list[list[str]] = [[] for _ in range(ranks)]
    at = 0
    for item in stage_items(graph):
        block = re.search(r"\.h\.(\d+)", item)
        at = max(at, int(block[1]) * ranks // BLOCKS) if block else at
        found[at].append(item)
    return tuple(
        Stage(tuple(items), (range(rank, rank + 1),), Mesh(())) for rank, items in enumerate(found)
    )


def planned(folder: Path, args: argparse.Namespace) -> Plan:
    """A GPT-2 in a stage on each rank."""
    configs()["gpt2"].save_pretrained(folder / "gpt2")
    found = api.capture_inference(
        str(folder / "gpt2"), batch=BATCH, seq=PROMPT, new_tokens=args.tokens, progress=_say
    )
    assert found.prefill is not None, "a model that generates"
    decisions = Decisions(stages_of(found.graph, args.ranks), schedule="1f1b")
    return Plan(
        found.source, f"{args.ranks}xcpu", found.fingerprint, NO_OPTIMIZER, "by hand", decisions,
        print_graph(found.graph), settings=found.settings, ranges=found.ranges,
        inference=Inference(args.tokens, print_graph(found.prefill)),
    )  # fmt: skip


def row_of(plan: Plan, folder: Path, microbatches: int, args: argparse.Namespace) -> dict[str, Any]:
    """The plan with so many microbatches."""
    out = folder / f"plan-{microbatches}"
    decisions = replace(plan.decisions, num_microbatches=microbatches)
    api.save(replace(plan, decisions=decisions), out)
    printed = launched(
        args.ranks, str(Path(__file__).resolve()), "--time", str(out), "--pass-ms",
        str(args.pass_ms), "--tokens", str(args.tokens), "--repeats", str(args.repeats),
    )  # fmt: skip
    line = next(line for line in printed.splitlines() if line.startswith("RESULT "))
    predicted = predicted_s(args.ranks, microbatches, args.pass_ms / 1e3)
    return {"microbatches": microbatches, "predicted_s": predicted, **json.loads(line[7:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", default="1,2,4")
    parser.add_argument("--pass-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--time", type=Path, help="of a rank: the plan to time")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if args.time:
        run_rank(args.time, args.pass_ms / 1e3, args.tokens, args.repeats)
    torch.set_num_threads(1)
    print("| microbatches | predicted | passes that follow each other | one at a time |")
    print("|" + "---|" * 4)
    table = []
    with tempfile.TemporaryDirectory(prefix="parloom-overlapped-") as folder:
        plan = planned(Path(folder), args)
        for count in map(int, args.microbatches.split(",")):
            row = row_of(plan, Path(folder), count, args)
            table.append(row)
            cells = (
                f"{1e3 * row[key]:.1f} ms" for key in ("predicted_s", "overlapped_s", "alone_s")
            )
            print(f"| {count} | {' | '.join(cells)} |", flush=True)
    report("overlapped_passes", table, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
