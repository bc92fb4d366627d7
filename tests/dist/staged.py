"""Random pipelines of small captured models, on threads of one process."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.comparators.baselines import random_assignment, random_storage
from parloom.execute.optimizers import make
from parloom.execute.program import CompiledStages, compile_stages
from parloom.execute.verify import (
    EPS,
    LEARNING_RATE,
    SEED,
    STEPS,
    Pieces,
    RankTrace,
    Trace,
    VerifyReport,
    assemble,
    compare,
    gradients_of,
    pieces_of,
    reference_trace,
)
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Graph
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh, grid
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    Optimizer,
    Stage,
)
from parloom.ir.stages import cut, item_key, operands, results, stage_items
from parloom.ir.verify import verify_decisions, verify_pcg
from tests.dist import lowered
from tests.dist.lowered import Model

PLANNED = Optimizer("adamw")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "eager_1f1b", "2f2b", "zb_v")
CHUNKS = {"interleaved_1f1b": 2, "zb_v": 2}
MOST_STAGES = 4
MESHES = {
    1: Mesh(()), 2: grid({"x": 2}), 3: grid({"x": 3}), 4: grid({"x": 2, "y": 2}),
    8: grid({"x": 4, "y": 2}),
}  # fmt: skip


def even(graph: Graph, count: int) -> list[tuple[str, ...]]:
    """Equally many items for each of `count` stages, in execution order."""
    items = stage_items(graph)
    ends = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def randomly_cut(graph: Graph, count: int, rng: random.Random) -> list[tuple[str, ...]]:
    """Stages of any items, no value to an earlier one: neighbors need not be together."""
    owned = set(stage_items(graph))
    made: dict[str, int] = {}
    found: list[list[str]] = [[] for _ in range(count)]
    items = [item for item in graph.main.body if item_key(item) in owned]
    for left, item in zip(range(len(items), 0, -1), items, strict=True):
        least = max((made[n] for n in operands(item) if n in made), default=0)
        empty = [s for s in range(count) if not found[s]]
        # The last items fill up what would stay empty.
        stage = empty[0] if empty and left <= len(empty) else rng.randint(least, count - 1)
        stage = max(stage, least)
        made.update((name, stage) for name in results(item))
        found[stage].append(item_key(item))
    return [tuple(keys) for keys in found if keys]


def drawn(
    graph: Graph,
    stages: Sequence[tuple[str, ...]],
    sizes: Sequence[int],
    *,
    schedule: str = "1f1b",
    num_microbatches: int = 1,
    chunks: int = 1,
    seed: int = 0,
) -> Decisions:
    """A pipeline with random layouts and storage; stage s is on group s % (stages / chunks), or on
    that of a V.
    """
    rng = random.Random(seed)
    groups = len(stages) // chunks
    begins = [sum(sizes[:g]) for g in range(groups + 1)]
    placed_on = [
        min(s, 2 * groups - 1 - s) if schedule == "zb_v" else s % groups for s in range(len(stages))
    ]
    placed = tuple(
        Stage(items, (range(begins[group], begins[group + 1]),), MESHES[sizes[group]])
        for group, items in zip(placed_on, stages, strict=True)
    )
    nodes: list[NodeDecision] = []
    for own, stage in zip(cut(graph, stages).graphs, placed, strict=True):
        factored = factorize(own)
        nodes += random_assignment(own, factored, stage.mesh, rng, num_microbatches)
    unique = {node.key: node for node in nodes}
    plan = Decisions(
        placed, tuple(unique.values()), num_microbatches=num_microbatches, schedule=schedule
    )
    lowered = lower_stages(graph, plan)
    parameters = {}
    for index, pcg in enumerate(lowered.pcgs):
        for decision in random_storage(pcg, rng):
            if lowered.cut.shared.get(decision.name, (index,))[0] == index:
                parameters[decision.name] = decision
    return replace(plan, parameters=tuple(parameters.values()))


def pipeline_of(model: Model, schedule: str, ranks: int, seed: int) -> Decisions:
    """A pipeline of random items on so many ranks, in meshes of random sizes; in half of the draws
    random values of all blocks are made again.
    """
    rng = random.Random(f"{schedule} {ranks} {seed}")
    chunks = CHUNKS.get(schedule, 1)
    groups = 2 if ranks == 2 else rng.randint(2, min(MOST_STAGES, ranks))
    sizes = [1] * groups
    while sum(sizes) < ranks:
        grown = [i for i in range(groups) if sum(sizes) + sizes[i] <= ranks]
        sizes[rng.choice(grown)] *= 2
    stages: list[tuple[str, ...]] = []
    while len(stages) != groups * chunks:  # a draw may leave some empty
        stages = randomly_cut(model.graph, groups * chunks, rng)
    counts = [c for c in legal_microbatches(model.factored).counts if c <= 4]
    found = drawn(
        model.graph, stages, sizes, schedule=schedule, num_microbatches=rng.choice(counts),
        chunks=chunks, seed=seed,
    )  # fmt: skip
    if rng.random() < 0.5:
        return found
    activations = []
    for call in (item for item in model.graph.main.body if isinstance(item, Call)):
        keys = [item_key(item) for item in model.graph.by_name[call.function].body]
        values = tuple(rng.sample(keys, len(keys) // 2))
        activations.append(ActivationDecision(call.prefix, "recompute", values))
    return replace(found, activations=tuple(activations))


def compiled(model: Model, decisions: Decisions) -> CompiledStages:
    """The programs of all stages, checked."""
    verify_decisions(model.graph, decisions, model.factored)
    lowered = lower_stages(model.graph, decisions)
    for pcg in lowered.pcgs:
        verify_pcg(pcg)
    return compile_stages(lowered, decisions, "test")


def train(
    pipeline: rt.Pipeline,
    model: Model,
    begin: Callable[[int, rt.Trainer], None] = lambda rank, trainer: None,
    **chosen: object,
) -> list[RankTrace]:
    """Three steps on every rank; `begin` is called before each, with the rank."""

    def rank(comm: rt.Comm) -> RankTrace:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: make(PLANNED, named, lr=LEARNING_RATE, eps=EPS),
            comm=comm,
            seed=SEED,
            exact_random=True,
            **chosen,  # type: ignore[arg-type]
        )
        losses: list[Tensor] = []
        gradients: Pieces = {}
        for step in range(STEPS):
            begin(comm.rank, trainer)
            losses.append(trainer.step(model.batch).loss)
            if step == 0:
                gradients = pieces_of(gradients_of(trainer))
        shards = (s for s in trainer.shards() if not s.name.startswith("optimizer/"))
        return losses, gradients, pieces_of(shards)

    torch.set_num_threads(1)
    return rt.run_threads(pipeline.mesh, rank)


@cache
def reference(name: str) -> Trace:
    """Three steps of a model of `lowered` on one device."""
    model = lowered.model(name)
    return reference_trace(model.graph, PLANNED, model.tensors, model.batch)


def report(model: Model, decisions: Decisions, expected: Trace) -> VerifyReport:
    """A pipeline against one device."""
    pipeline = compiled(model, decisions).pipeline
    return compare(expected, assemble(train(pipeline, model)), pipeline.num_ranks)
