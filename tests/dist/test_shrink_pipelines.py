"""Small copies of pipelines: what they keep of a plan, and that they are proved."""

import random
from dataclasses import replace
from functools import cache

import pytest

from parloom.capture import Loaded, capture, load_model
from parloom.errors import InputError
from parloom.execute.shrink import shrink
from parloom.execute.shrink_stages import MAX_RANKS, SmallStages
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import group_lists
from parloom.ir.mesh import grid
from parloom.ir.plan import Action, Decisions, ModelSource, Plan, Stage
from parloom.ir.schedules import STEP
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_decisions
from tests.dist.staged import CHUNKS, drawn, even, randomly_cut
from tests.dist.test_shrink import planned, proved


@cache
def built(spec: str, batch: int, seq: int | None = 16) -> tuple[Loaded, Graph]:
    loaded = load_model(spec, batch=batch, seq=seq)
    return loaded, capture(loaded.model, loaded.batch, loss=loaded.loss)


def plan_of(spec: str, batch: int, decisions: Decisions) -> Plan:
    loaded, graph = built(spec, batch)
    plan = planned(spec, loaded, decisions, graph=graph)
    return replace(plan, source=ModelSource(spec, batch, 16))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spec", "schedule"),
    [("zoo:gpt", "interleaved_1f1b"), ("zoo:gpt", "zb_v"), ("zoo:llama", "zb_h1")],
)
def test_pipelines_are_proved_small(spec: str, schedule: str) -> None:
    """Groups of eight and four devices, 16 microbatches; what is left runs in the plan's order."""
    loaded, graph = built(spec, 64)
    chunks = CHUNKS.get(schedule, 1)
    decisions = drawn(
        graph, even(graph, 2 * chunks), [8, 4],
        schedule=schedule, num_microbatches=16, chunks=chunks, seed=5,
    )  # fmt: skip
    copy = shrink(plan_of(spec, 64, decisions), loaded)
    small = copy.plan.decisions
    assert "mesh x=4 x y=2 -> 2 x 2" in copy.text
    assert "microbatches 16 -> 4" in copy.text
    assert small.num_ranks < decisions.num_ranks
    # Each group runs its passes of the first microbatches in the order in which the plan does.
    for (stages, mine), (_, whole) in zip(group_lists(small), group_lists(decisions), strict=True):
        left = [a for a in whole if a.microbatch is None or a.microbatch < 4]
        assert [(a.kind, a.microbatch) for a in mine] == [(a.kind, a.microbatch) for a in left]
        assert {a.stage for a in mine if a.microbatch is not None} == set(stages)
    report = proved(copy)
    assert report.passed, str(report)


@pytest.mark.slow
def test_replicas_and_larger_microbatches_are_kept() -> None:
    """One replica has three microbatches of four; and one stage runs four at once."""
    loaded, graph = built("zoo:gpt", 32)
    items = stage_items(graph)
    shares = (tuple(range(6)), (6, 7))
    stages = tuple(
        Stage(items, (range(first, first + 2),), grid({"x": 2}), own)
        for first, own in zip((0, 2), shares, strict=True)
    )
    lists = tuple(
        (*(Action(k, m, stage) for m in own for k in "FB"), *STEP)
        for stage, own in enumerate(shares)
    )
    decisions = Decisions(stages, num_microbatches=8, schedule="listed", actions=lists)
    copy = shrink(plan_of("zoo:gpt", 32, decisions), loaded)
    kept = [stage.microbatches for stage in copy.plan.decisions.stages]
    assert kept == [(0, 1), (2, 3)]
    assert proved(copy).passed
    one, other = even(graph, 2)
    stages = (
        Stage(one, (range(2),), grid({"x": 2})),
        Stage(other, (range(2, 4),), grid({"x": 2}), at_once=4),
    )
    lists = tuple(
        (*(Action(k, m, stage) for k in "FB" for m in range(count)), *STEP)
        for stage, count in ((0, 16), (1, 4))
    )
    decisions = Decisions(stages, num_microbatches=16, schedule="listed", actions=lists)
    copy = shrink(plan_of("zoo:gpt", 32, decisions), loaded)
    assert copy.plan.decisions.num_microbatches == 4
    assert [stage.at_once for stage in copy.plan.decisions.stages] == [1, 4]
    assert proved(copy).passed


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(12))
def test_copies_of_random_cuts_are_plans(seed: int) -> None:
    """Any items in any stage: the copy has stages that are a cut of it, and lists that run."""
    rng = random.Random(seed)
    loaded, graph = built("zoo:llama", 32)
    cuts: list[tuple[str, ...]] = []
    while len(cuts) < 2:
        cuts = randomly_cut(graph, rng.choice([2, 3, 4]), rng)
    sizes = [rng.choice([1, 2, 4]) for _ in cuts]
    decisions = drawn(graph, cuts, sizes, num_microbatches=8, seed=seed)
    plan = plan_of("zoo:llama", 32, decisions)
    small = shrink(plan, loaded).plan
    verify_decisions(parse_graph(small.graph), small.decisions)
    assert small.decisions.num_ranks <= MAX_RANKS
    assert len(small.decisions.stages) <= len(decisions.stages)


def test_groups_that_no_copy_leaves_out() -> None:
    """A model without blocks keeps all its items, on more ranks than are proved here."""
    _, graph = built("zoo:mlp", 32, None)
    nodes = {flat.key: flat for flat in graph.flat()}
    stages = even(graph, min(6, len(stage_items(graph))))
    decisions = drawn(graph, stages, [8] * len(stages), num_microbatches=2)
    kept = SmallStages(decisions, nodes)
    with pytest.raises(InputError, match=r"groups of devices have parts .* at most 16 are proved"):
        kept.of_copy(graph, {item: item for item in stage_items(graph)})
