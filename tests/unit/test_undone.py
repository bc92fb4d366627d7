"""What a rewrite of a plan saves, whatever its stages: the plan beside it is one of the model as it
is, in the same stages, and as good as ways of single operators make it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Group

from parloom.cost.simulate import simulate
from parloom.cost.stages import PricedStages, StagePlayer, simulate_stages
from parloom.cost.timeline import Timeline
from parloom.errors import LayoutError, VerifyError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import LoweredStages, group_lists, lower_stages
from parloom.ir.mesh import grid
from parloom.ir.plan import (
    Decisions,
    NodeDecision,
    ParameterDecision,
    Stage,
    Storage,
)
from parloom.ir.schedules import STEP
from parloom.ir.stages import stage_items
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.report.output import rendered
from parloom.report.rewrite_screen import rewrite_screen
from parloom.report.rewrites import rewrites_explained
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import proof_words, rewritten
from parloom.search.cheaper import Cheaper, Played
from parloom.search.undone import Undoing, Undone
from tests.property.searched import every_assignment
from tests.unit.explained import ADAM
from tests.unit.rewritten_stages import (
    CLUSTER,
    PLANS,
    WHOLE,
    alone,
    block_each,
    blocks_in_replicas,
    early,
    fused,
    gated,
    low_rank,
    on,
    one_stage,
    passes,
    pipeline_case,
    planned,
    towers,
    two_stages,
    viewed,
)

PLENTY = 2**60


def simulated(made: Graph, plan: Decisions) -> Timeline:
    """The step of a plan that is checked and lowered anew."""
    own = rewritten(made, plan.rewrites)
    verify_decisions(own, plan)
    stages = lower_stages(own, plan)
    for pcg in stages.pcgs:
        verify_pcg(pcg)
    return simulate_stages(stages, CLUSTER, plan, ADAM)


def undone(made: Graph, plan: Decisions, index: int = 0, limit: int = PLENTY) -> Undone:
    """The plan without one rewrite, as `parloom.report.rewrites` asks for it."""
    player = StagePlayer(CLUSTER, ADAM)
    lowered = lower_stages(rewritten(made, plan.rewrites), plan)
    walkers = [
        player.priced(pcg, stage).walker
        for pcg, stage in zip(lowered.pcgs, plan.stages, strict=True)
    ]

    def play(stages: LoweredStages) -> Timeline:
        if len(stages.pcgs) == 1:
            return simulate(stages.only, CLUSTER, stages.only.decisions, ADAM)
        lists = tuple(own for _, own in group_lists(plan))
        return PricedStages(stages, plan.stages, player).play(lists)

    def fits(timeline: Timeline) -> bool:
        return timeline.peak_bytes <= limit

    return Undoing(made, plan, lowered, walkers, fits, play).without(index)


def plan_of(found: Undone) -> Played:
    assert isinstance(found.plan, Played), found.plan
    return found.plan


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_beside_is_that_of_the_model_as_it_is(name: str) -> None:
    """With the same stages, layouts and schedule: what a rewrite saves is the difference of two
    simulated plans.
    """
    made = towers()
    plan = planned(made, PLANS[name], *fused(made))
    found = undone(made, plan)
    beside = plan_of(found)
    assert not found.changed
    assert [own.op for own in found.before] == ["linear", "tanh", "linear", "relu", "linear"] * 2
    assert "cat" in {own.op for own in found.after}
    plain = planned(made, PLANS[name])
    assert [s.items for s in beside.decisions.stages] == [s.items for s in plain.stages]
    assert beside.timeline.step_ps == simulated(made, beside.decisions).step_ps
    assert beside.timeline.step_ps == simulated(made, plain).step_ps
    assert beside.timeline.peak_bytes == simulated(made, plain).peak_bytes
    assert beside.timeline.step_ps > simulated(made, plan).step_ps


@pytest.mark.parametrize("name", ["two_each", "one_stage", "replicas"])
def test_no_other_way_of_what_is_back_is_better(name: str) -> None:
    made = towers()
    beside = plan_of(undone(made, planned(made, PLANS[name], *fused(made))))
    plan, mesh, factored = beside.decisions, grid({"x": 2}), factorize(made)
    steps = []
    for flat in list(made.flat())[:5]:
        for way in every_assignment(factored.rule(flat.function, flat.node), mesh):
            kept = tuple(own for own in plan.nodes if own.key != flat.key)
            other = replace(plan, nodes=(*kept, NodeDecision(flat.key, way)))
            try:
                steps.append(simulated(made, other).step_ps)
            except (LayoutError, VerifyError):
                continue
    assert len(steps) > 10
    assert min(steps) == beside.timeline.step_ps < max(steps)


@pytest.mark.parametrize("of", [block_each, blocks_in_replicas])
def test_blocks_in_several_stages(of: Callable[[Graph], Decisions]) -> None:
    made = gated()
    (take,) = map(str, merges(made))
    plan = planned(made, of, take)
    found = undone(made, plan)
    beside = plan_of(found)
    assert [own.op for own in found.before] == ["linear", "linear"]
    plain = planned(made, of)
    assert set(beside.decisions.nodes) == set(plain.nodes)
    assert beside.timeline.step_ps == simulated(made, beside.decisions).step_ps
    assert beside.timeline.step_ps == simulated(made, plain).step_ps
    assert beside.timeline.step_ps != simulated(made, plan).step_ps
    programs = {id(pcg) for pcg in beside.stages.pcgs}
    assert len(programs) < len(plan.stages) or of is blocks_in_replicas


def test_what_cannot_stay_is_named() -> None:
    """What is back reads what a later stage makes, and is read in its own."""
    made = low_rank()
    found = undone(made, planned(made, early, WHOLE))
    assert found.changed == (":relu#0 is in stage 1",)
    beside = plan_of(found)
    assert beside.timeline.step_ps == simulated(made, beside.decisions).step_ps
    plain = planned(made, two_stages)
    assert [s.items for s in beside.decisions.stages] == [s.items for s in plain.stages]
    assert beside.timeline.step_ps <= simulated(made, plain).step_ps


def test_what_cannot_be_undone_alone_says_why() -> None:
    made = low_rank()
    found = undone(made, planned(made, alone, WHOLE))
    assert isinstance(found.plan, str)
    assert found.plan.startswith("stage 0 has no items")
    assert [own.op for own in found.before] == ["matmul"]
    assert [own.op for own in found.after] == ["matmul", "matmul"]
    (document,) = rewrites_explained(pipeline_case(made, planned(made, alone, WHOLE)))
    assert document["reason"] == f"cannot be undone alone: {found.plan}"
    assert document["saved_s"] is document["saved_sent_bytes"] is None
    assert document["saved_peak_bytes"] is None
    assert document["proof"] == proof_words(document["rules"])
    shown = rendered(Group(*rewrite_screen(document)), 120)
    assert "proof: both sides have equal normal forms for all shapes" in shown
    assert "there is no second proof" in shown
    assert "cannot be undone alone: stage 0 has no items" in shown
    assert "against the plan without it" not in shown


@pytest.mark.parametrize(
    ("made", "text", "of"),
    [
        (towers(), fused(towers())[0], PLANS["two_each"]),
        (towers(), fused(towers())[0], PLANS["replicas"]),
        (low_rank(), WHOLE, early),
    ],
    ids=["two_each", "replicas", "early"],
)
def test_what_is_saved_is_the_difference_of_two_plans(
    made: Graph, text: str, of: Callable[[Graph], Decisions]
) -> None:
    case = pipeline_case(made, planned(made, of, text))
    plain = pipeline_case(made, plan_of(undone(made, case.decisions)).decisions)
    assert not plain.decisions.rewrites
    (found,) = rewrites_explained(case)
    assert found["reason"] is None
    assert found["saved_s"] == plain.timeline.step_s - case.timeline.step_s
    assert found["saved_peak_bytes"] == plain.timeline.peak_bytes - case.timeline.peak_bytes
    sent = [sum(own.num_bytes for own in one.ledger.sent) for one in (plain, case)]
    assert found["saved_sent_bytes"] == sent[0] - sent[1]
    assert (sent[0] != sent[1]) is (text == WHOLE)
    # Not what the same rewrite saves in another pipeline.
    other = planned(made, one_stage)
    assert found["saved_s"] != simulated(made, other).step_s - case.timeline.step_s
    shown = rendered(Group(*rewrite_screen(found)), 120)
    assert "against the plan without it" in shown
    assert ("what else is not as here" in shown) is bool(found["changed"])
    assert "cannot be undone" not in shown


def test_replicas_agree_on_what_all_of_them_can_do() -> None:
    """Two devices share two parts, and four do not."""
    made, text = viewed(), "take d in main by whole: relu(a)"

    def of(own: Graph) -> Decisions:
        items = stage_items(own)
        stages = (Stage(items, *on(0, 2), (0, 1)), Stage(items, *on(2, 4), (2, 3)))
        actions = tuple((*passes(at, (2 * at, 2 * at + 1)), *STEP) for at in (0, 1))
        nodes = (NodeDecision("first:linear#0", (("n", ("x",)),)),)
        return Decisions(stages, nodes, (), (), 4, "replicas", actions)

    plan = planned(made, of, text)
    assert simulated(made, plan)
    beside = plan_of(undone(made, plan))
    assert beside.timeline.step_ps == simulated(made, beside.decisions).step_ps
    kept = beside.decisions.node("first:linear#0")
    assert kept is None or not kept.factors


def cheaper_of(made: Graph, plan: Decisions) -> Cheaper:
    """Plans like one, without a limit."""
    lowered = lower_stages(made, plan)
    player = StagePlayer(CLUSTER, ADAM)
    pairs = zip(lowered.pcgs, plan.stages, strict=True)
    walkers = [player.priced(pcg, stage).walker for pcg, stage in pairs]
    lists = tuple(own for _, own in group_lists(plan))

    def play(stages: LoweredStages) -> Timeline:
        return PricedStages(stages, plan.stages, player).play(lists)

    return Cheaper(factorize(made), plan, walkers, lambda _: True, play)


def test_storage_gives_way_in_equal_stages() -> None:
    """Blocks 1 and 2 are one program, in which parameters have the names of one of them."""
    made = gated()
    plan = planned(made, block_each)
    storage = Storage(("x",))
    names = [f"b.{at}.{name}" for at in (1, 2) for name in ("gate", "down")]
    stored = tuple(ParameterDecision(name, storage, storage, storage) for name in names)
    wide = {f"b.{at}.gate:linear#0" for at in (1, 2)}
    nodes = [own for own in plan.nodes if own.key not in wide]
    nodes += [NodeDecision(key, (("n", ("x",)),)) for key in wide]
    asked = replace(plan, nodes=tuple(nodes), parameters=stored)
    found = cheaper_of(made, plan).played(asked)
    assert found.stages.pcgs[1] is found.stages.pcgs[2]
    assert {own.name for own in found.decisions.parameters if own.weight.axes} == {
        names[1],
        names[3],
    }
    assert found.timeline.step_ps == simulated(made, found.decisions).step_ps
    with pytest.raises((LayoutError, VerifyError)):
        simulated(made, asked)


def test_ways_are_changed_where_that_is_faster() -> None:
    made = towers()
    plan = planned(made, PLANS["two_each"])
    unsplit = {"d:linear#0", "d:linear#1"}
    nodes = tuple(own for own in plan.nodes if own.key not in unsplit)
    cheaper = cheaper_of(made, plan)
    begun = cheaper.played(replace(plan, nodes=nodes))
    found = cheaper.improved(begun, unsplit)
    assert found.timeline.step_ps == simulated(made, plan).step_ps < begun.timeline.step_ps
    assert cheaper.improved(begun, set()) is begun
    assert set(found.decisions.nodes) == set(plan.nodes)
    # So is what is back, where it begins as what took its place.
    wide = planned(made, PLANS["two_each"], *fused(made))
    kept = tuple(own for own in wide.nodes if own.key != "d:linear#2")
    beside = plan_of(undone(made, replace(wide, nodes=kept)))
    assert beside.timeline.step_ps == simulated(made, plan).step_ps
