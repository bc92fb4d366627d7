"""Every picosecond of a step has one cause, and the peak is where the memory says it is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.comparators.baselines import fsdp, megatron, random_plans
from parloom.cost.clusters import load_cluster
from parloom.cost.engine import Run
from parloom.cost.ledger import (
    ADDING,
    AGAIN,
    COMPUTING,
    MAIN,
    STEP,
    WAITING,
    Cause,
    Ledger,
    ledger,
)
from parloom.cost.simulate import simulate
from parloom.cost.tasks import COMPONENTS, COMPUTE
from parloom.cost.timeline import Timeline
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.plan import ActivationDecision, Decisions, Optimizer
from tests.examples import examples
from tests.unit.graphs import stack
from tests.unit.test_simulate import DEPTH, chunked, model


def read(graph: Graph, cluster: Cluster, plan: Decisions) -> tuple[Ledger, Timeline]:
    pcg = lower(graph, plan)
    timeline = simulate(pcg, cluster, plan, Optimizer("adamw", 2))
    return ledger(timeline, pcg, cluster), timeline


def check(found: Ledger, timeline: Timeline) -> None:
    """The sums are exact: of time, of waiting by transfer, and of memory."""
    assert sum(found.time.values()) == found.step_ps == timeline.step_ps
    waited: dict[str, int] = {}
    for cause, ps in found.by_cause().items():
        if cause.what == WAITING:
            waited[cause.transfer] = waited.get(cause.transfer, 0) + ps
    assert waited == timeline.exposed()
    assert found.peak.held == timeline.processes[0].memory.at_peak
    assert sum(sent.waited_ps for sent in found.sent) == sum(waited.values())
    assert found.busy.get(COMPUTING, 0) == timeline.busy()[COMPUTE]
    assert found.peak.num_bytes == timeline.peak_bytes


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_stored_weights(level: int, count: int) -> None:
    cluster = load_cluster("2x4xH100")
    plan = chunked(cluster, level=level, num_microbatches=count)
    found, timeline = read(model(), cluster, plan)
    check(found, timeline)
    assert (Cause(ADDING) in found.by_cause()) == (count > 1)
    assert found.by_place().keys() <= {"block", MAIN, STEP}
    kinds = {sent.group.transfer for sent in found.sent}
    assert ("weights all_gather" in kinds) == (level > 0)
    reduced = [s for s in found.sent if s.group.transfer.startswith("gradients")]
    assert {s.group.level for s in reduced} <= {level.name for level in cluster.levels}
    assert all(s.num_bytes > 0 and s.count > 0 and s.ps > 0 for s in reduced)


def test_what_is_computed_again_is_its_own_cause() -> None:
    cluster = load_cluster("2x4xH100")
    kept = chunked(cluster)
    again = tuple(ActivationDecision(str(i), "recompute") for i in range(0, DEPTH, 2))
    before, _ = read(model(), cluster, kept)
    found, timeline = read(model(), cluster, replace(kept, activations=again))
    check(found, timeline)
    assert Cause(AGAIN) not in before.by_cause()
    assert found.time["block", Cause(AGAIN)] > 0
    assert found.by_cause()[Cause(COMPUTING)] == before.by_cause()[Cause(COMPUTING)]
    # The last product of a block saves its operands alone, and is not run again.
    half = sum(
        i.ps
        for span in timeline.processes[0].spans
        if span.name == "F"
        for piece in span.played.pieces
        if piece.placed.prefix
        for i, note in zip(
            piece.placed.segment.instructions, piece.placed.segment.notes, strict=True
        )
        if isinstance(i, Run) and not note.name.startswith("down")
    )
    assert 2 * found.time["block", Cause(AGAIN)] == half


def test_rules_of_thumb_on_a_language_model() -> None:
    cluster = load_cluster("2x4xcpu")
    for plan in (*megatron(stack(3), cluster), *fsdp(stack(3), cluster)):
        found, timeline = read(stack(3), cluster, plan)
        check(found, timeline)
        assert {sent.group.level for sent in found.sent} <= {lv.name for lv in cluster.levels}


@examples(20)
@given(st.integers(0, 10_000))
def test_any_plan_adds_up(seed: int) -> None:
    cluster = load_cluster("2x2xcpu")
    plan = next(random_plans(stack(2), cluster, seed=seed))
    check(*read(stack(2), cluster, plan))


def test_the_peak_is_the_most_at_once() -> None:
    cluster = load_cluster("2x4xH100")
    found, timeline = read(model(), cluster, chunked(cluster))
    (process,) = timeline.processes
    assert len(found.peak.held) == len(COMPONENTS)
    assert all(h <= p for h, p in zip(found.peak.held, process.memory.peaks, strict=True))
    assert found.peak.action.startswith(("F", "B"))
    assert found.peak.prefix in {str(i) for i in range(DEPTH)} | {""}
