"""Plans of a model on forked gloo ranks against one device: what the equality benchmarks share.

A plan passes where three steps with AdamW in float64 leave the losses, gradients, weights and
buffers of the captured program on one device, to 1e-9 (DESIGN section 3), as `parloom verify` does.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.dist import lowered
from torch import Tensor

from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import ParloomError
from parloom.execute.optimizers import named_optimizer
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.execute.verify import (
    RankTrace,
    Trace,
    assemble,
    compare,
    reference_trace,
    require_finite,
    train_rank,
)
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import MICROBATCH, Decisions
from parloom.rewrite.rewrites import rewritten
from parloom.runtime import Program, one_stage

BASELINES = ("data_parallel", "fsdp", "megatron")
CHUNK = 7  # plans per fork: bounds the memory of results on their way home
TIMEOUT_S = 1200.0  # for a chunk, on a busy machine
OPTIMIZER = named_optimizer("adamw")
Shape = tuple[int, int]


@dataclass(frozen=True)
class Verdict:
    """A plan's largest relative error and the tensor it is in, or why there is none."""

    plan: str
    error: float | None
    tensor: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.plan}: {self.wrong or 'equal'}"


def verdicts(
    subject: lowered.Model, shape: Shape, count: int, microbatches: int = 1
) -> Iterator[Verdict]:
    """The baselines, megatron at each degree, and `count` random plans, on a mesh of two axes.

    The subject's graph may be the program of one of the microbatches.

    Raises `InputError` where the model's own numbers are not finite.
    """
    reference = reference_trace(subject.graph, OPTIMIZER, subject.tensors, subject.batch)
    require_finite(reference)
    ready: list[tuple[str, Program]] = []
    for plan, program in programs(subject, shape, count, microbatches):
        if isinstance(program, str):
            yield Verdict(plan, None, "", program)
            continue
        ready.append((plan, program))
        if len(ready) == CHUNK:
            yield from judged(subject, reference, ready)
            ready = []
    yield from judged(subject, reference, ready)


def programs(
    subject: lowered.Model, shape: Shape, count: int, microbatches: int = 1
) -> Iterator[tuple[str, Program | str]]:
    """Name and program of each plan, or why it has none."""
    cluster = load_cluster(f"{shape[0]}x{shape[1]}xcpu")
    apart = bool(subject.graph.sample_dims)
    divided = 1 if apart else microbatches  # the program of one microbatch is divided no further

    def whole(decisions: Decisions) -> Decisions:
        if not apart:
            return decisions
        return replace(decisions, num_microbatches=microbatches, batch_semantics=MICROBATCH)

    for method in BASELINES:
        try:
            for decisions in METHODS[method](subject.graph, cluster, divided, 0):
                degrees = "x".join(str(axis.size) for axis in decisions.mesh.axes)
                yield f"{method} {degrees}", compiled(subject, whole(decisions))
        except Exception as err:
            yield method, told(err)
    mesh = grid({name: size for name, size in zip("xy", shape, strict=True) if size > 1})
    for seed in range(count):
        try:
            decisions = random_plan(subject.graph, subject.factored, mesh, seed, divided)
            yield f"random {seed}", compiled(subject, whole(decisions))
        except Exception as err:
            yield f"random {seed}", told(err)


def compiled(subject: lowered.Model, decisions: Decisions) -> Program:
    """The program of a plan, its rewrites applied."""
    graph, factored = subject.graph, subject.factored
    if decisions.rewrites:
        graph = rewritten(graph, decisions.rewrites)
        factored = factorize(graph)
    return compile_pcg(lower(graph, decisions, factored=factored), "gate").program


def judged(
    subject: lowered.Model, reference: Trace, ready: list[tuple[str, Program]]
) -> Iterator[Verdict]:
    """Run some plans in one fork, each in one of its own where that fails."""
    if not ready:
        return
    ranks = ready[0][1].mesh.num_ranks
    try:
        homes = fork_ranks(
            ranks, traces, [p for _, p in ready], subject.tensors, subject.batch,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
    except Exception as err:
        if len(ready) == 1:
            yield Verdict(ready[0][0], None, "", told(err))
        else:
            for entry in ready:
                yield from judged(subject, reference, [entry])
        return
    for index, (plan, _) in enumerate(ready):
        found = compare(reference, assemble([home[index] for home in homes]), ranks)
        wrong = "" if found.passed else str(found.first_difference)
        yield Verdict(plan, found.worst_error, found.worst_tensor, wrong)


def traces(
    ready: list[Program], tensors: dict[str, Tensor], batch: dict[str, Tensor]
) -> list[RankTrace]:
    """What one rank has after training with each program."""
    return [train_rank(one_stage(program), OPTIMIZER, tensors, batch) for program in ready]


def told(err: Exception) -> str:
    """An exception in one line, with where it was raised."""
    frame = traceback.extract_tb(err.__traceback__)[-1]
    kind = "" if isinstance(err, ParloomError) else f"{type(err).__name__}: "
    text = str(err).strip().splitlines() or [""]
    return f"{kind}{text[0]} [{Path(frame.filename).name}:{frame.lineno}]"
