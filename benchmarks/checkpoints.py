"""The checkpoint matrix: saved under one plan, continued under every other.

    python benchmarks/checkpoints.py [--json FILE] [--checksums]

Plans: data_parallel, fsdp, megatron and a random legal one, each on 4 and on 2 gloo ranks. A run
saves after two steps of five; from that checkpoint every plan continues. Losses, weights and
optimizer steps must equal uninterrupted training on one device to 1e-9 in float64 (DESIGN section
3), and to the bit where the plan is the one that saved. Exit code 1 where a pair differs.

`--checksums` times instead what the checksums of a checkpoint of 256 MiB cost, on one rank.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from zlib import crc32

import torch
from common import report
from tests.dist.fake_shards import FakeTrainer, one
from torch import Tensor

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.execute import checkpoint
from parloom.execute.checksums import check_sums
from parloom.execute.manifest import read_manifest
from parloom.execute.optimizers import make, named_optimizer
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.execute.verify import EPS, LEARNING_RATE, reference_step
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, widened
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import Decisions
from parloom.rewrite.rewrites import rewritten
from parloom.runtime import DistributedComm, Program, Trainer

STEPS, SAVED_AFTER = 5, 2
REPETITIONS = 5
TOLERANCE = 1e-9
OPTIMIZER = named_optimizer("adamw")
Tensors = dict[str, Tensor]


def programs(graph: Graph) -> dict[str, Program]:
    """The eight plans by name."""
    found = {}
    for shape in ((2, 2), (1, 2)):
        cluster = load_cluster(f"{shape[0]}x{shape[1]}xcpu" if shape[0] > 1 else "2xcpu")
        ranks = cluster.num_devices
        for method in ("data_parallel", "fsdp", "megatron"):
            decisions = next(iter(METHODS[method](graph, cluster, 1, 0)))
            found[f"{method} on {ranks}"] = _compiled(graph, decisions)
        sizes = {"x": 2, "y": 2} if ranks == 4 else {"x": 2}
        decisions = random_plan(graph, factorize(graph), grid(sizes), seed=5)
        found[f"random on {ranks}"] = _compiled(graph, decisions)
    return found


def _compiled(graph: Graph, decisions: Decisions) -> Program:
    return compile_pcg(lower(rewritten(graph, decisions.rewrites), decisions), "matrix").program


def _train(
    program: Program, tensors: Tensors, batch: Tensors, start: Path | None, steps: int,
    save: Path | None,
) -> tuple[list[Tensor], Tensors]:  # fmt: skip
    """On one rank: continue from `start` (or from `tensors`), take steps, save where asked."""
    trainer = Trainer(
        program,
        tensors,
        optimizer=lambda named: make(OPTIMIZER, named, lr=LEARNING_RATE, eps=EPS),
        comm=DistributedComm(program.mesh, program.groups),
        exact_random=True,
    )
    if start is not None:
        checkpoint.load(trainer, start)
    losses = []
    for _ in range(steps):
        losses.append(trainer.step(batch).loss)
        if save is not None and trainer.steps_done == SAVED_AFTER:
            checkpoint.save(trainer, save).wait()
    return losses, trainer.state_dict()


def reference(graph: Graph, tensors: Tensors, batch: Tensors) -> tuple[list[Tensor], Tensors]:
    """Uninterrupted training of the captured program on one device."""
    trainable = {i.target for i in graph.of_kind("parameter") if i.trainable}
    state = {n: t.clone().requires_grad_(n in trainable) for n, t in tensors.items()}
    leaves = [(n, t) for n, t in state.items() if n in trainable]
    optimizer = make(OPTIMIZER, leaves, lr=LEARNING_RATE, eps=EPS)  # type: ignore[arg-type]
    losses = [reference_step(graph, state, batch, optimizer, step) for step in range(STEPS)]
    return losses, {n: t.detach() for n, t in state.items()}


def worst(expected: tuple[list[Tensor], Tensors], got: tuple[list[Tensor], Tensors]) -> float:
    """Largest relative error of the losses after the checkpoint and of the final state."""
    pairs = list(zip(expected[0][SAVED_AFTER:], got[0][-(STEPS - SAVED_AFTER) :], strict=True))
    pairs += [(expected[1][n], t) for n, t in got[1].items() if n in expected[1]]
    floor = LEARNING_RATE * STEPS
    return max(
        float((a - b).abs().max()) / max(float(a.abs().max()), floor)
        for a, b in pairs
        if a.is_floating_point()
    )


def checksums(json_file: str | None) -> int:
    """Seconds to save and to load, the part of it that is checksums, and that share."""
    shard = one(torch.rand(1 << 26))
    rows: list[dict[str, object]] = []
    for _ in range(REPETITIONS):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint")
            started = time.perf_counter()
            checkpoint.save(FakeTrainer([shard]), path)
            saved = time.perf_counter()
            checkpoint.load(FakeTrainer([shard]), path)
            loaded = time.perf_counter()
            check_sums(path, read_manifest(path))
            checked = time.perf_counter()
            crc32(shard.tensor.numpy().data)
            summed = time.perf_counter()
        rows.append(
            {"save_s": saved - started, "load_s": loaded - saved, "check_s": checked - loaded,
             "crc32_s": summed - checked}
        )  # fmt: skip
    save, load, check, crc = (median(float(str(r[n])) for r in rows) for n in rows[0])
    print(f"save {save:.2f} s, of which checksums {crc:.2f} s ({crc / save:.0%})")
    print(f"load {load:.2f} s, of which checksums {check:.2f} s ({check / load:.0%})")
    report("checksums", rows, json_file)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", default=None)
    parser.add_argument("--checksums", action="store_true")
    args = parser.parse_args()
    if args.checksums:
        return checksums(args.json)
    torch.set_num_threads(1)  # ranks are forked
    torch.manual_seed(0)
    model, batch = zoo.build("gpt", batch=8, seq=8, width=24, heads=4, depth=2, vocab=31)
    model.train()
    graph = widened(capture(model, batch))
    tensors = {
        n: t.detach().double() if t.is_floating_point() else t.detach().clone()
        for n, t in parameters_of(model, graph).items()
    }
    expected = reference(graph, tensors, batch)
    plans = programs(graph)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for saved, program in plans.items():
            path = Path(folder, saved.replace(" ", "-"))
            whole = fork_ranks(
                program.mesh.num_ranks, _train, program, tensors, batch, None, STEPS, path
            )[0]
            for continued, other in plans.items():
                got = fork_ranks(
                    other.mesh.num_ranks, _train, other, tensors, batch, path,
                    STEPS - SAVED_AFTER, None,
                )[0]  # fmt: skip
                same = all(torch.equal(t, whole[1][n]) for n, t in got[1].items())
                error = worst(expected, got)
                passed = error <= TOLERANCE and (same or saved != continued)
                rows.append(
                    {"saved": saved, "continued": continued, "error": error, "bit_equal": same,
                     "passed": passed}
                )  # fmt: skip
            mine = [r for r in rows if r["saved"] == saved]
            bad = [str(r["continued"]) for r in mine if not r["passed"]]
            most = max(float(str(r["error"])) for r in mine)
            bits = "bit-equal under itself" if not bad else f"DIFFERS under {', '.join(bad)}"
            print(
                f"saved {saved:20} worst error of {len(mine)} plans {most:.1e}; {bits}", flush=True
            )
    print(f"{sum(bool(r['passed']) for r in rows)} of {len(rows)} pairs equal")
    report("checkpoints", rows, args.json)
    return int(not all(r["passed"] for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
