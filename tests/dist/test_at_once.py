"""Stages whose microbatches are larger than those of others, against one device."""

import random
from dataclasses import replace

import pytest

from parloom.errors import CutError, VerifyError
from parloom.ir.graph import Graph
from parloom.ir.plan import Action, Decisions
from parloom.ir.schedules import STEP
from parloom.ir.verify import verify_decisions
from parloom.runtime.transfers import Transfers
from tests.dist import lowered, staged
from tests.dist.staged import drawn, randomly_cut

MICROBATCHES = 4


def merged(graph: Graph, sizes: list[int], at_once: list[int], seed: int) -> Decisions:
    """Random stages, all forward passes first; in half of the draws with weights apart."""
    rng = random.Random(seed)
    while True:
        items = randomly_cut(graph, len(sizes), rng)
        if len(items) != len(sizes):
            continue
        plan = drawn(graph, items, sizes, num_microbatches=MICROBATCHES, seed=seed)
        stages = tuple(
            replace(stage, at_once=own) for stage, own in zip(plan.stages, at_once, strict=True)
        )
        apart = rng.random() < 0.5
        lists = []
        for stage, own in enumerate(at_once):
            counted = range(MICROBATCHES // own)
            passes = [Action("F", m, stage) for m in counted]
            passes += [Action(k, m, stage) for m in counted for k in ("BW" if apart else "B")]
            lists.append((*passes, *STEP))
        return replace(plan, stages=stages, schedule="listed", actions=tuple(lists))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("sizes", "at_once"),
    [([1, 1], [1, 2]), ([1, 1], [4, 1]), ([2, 1], [1, 4]), ([1, 2, 1], [2, 1, 4])],
)
@pytest.mark.parametrize("name", ["mlp", "gpt", "hf_gpt2", "hf_llama", "dlrm"])
def test_larger_microbatches_equal_one_device(
    name: str, sizes: list[int], at_once: list[int]
) -> None:
    model = lowered.model(name)
    tried = 0
    for seed in range(8):
        try:
            plan = merged(model.graph, sizes, at_once, seed)
            report = staged.report(model, plan, staged.reference(name))
        except CutError as error:
            assert "has no dim of samples" in str(error)  # noqa: PT017
            continue
        assert report.passed, str(report)
        tried += 1
        if tried == 2:
            return
    assert tried, "no draw that can be cut so"


def test_a_message_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two messages for one pass the second one repeats the first one's box."""
    model = lowered.model("mlp")
    plan = merged(model.graph, [1, 1], [1, 2], 0)
    original = Transfers._split
    monkeypatch.setattr(Transfers, "_split", lambda self, wire, _: original(self, wire, 0))
    assert not staged.report(model, plan, staged.reference("mlp")).passed


def test_what_stages_cannot_run_at_once() -> None:
    graph = lowered.model("mlp").graph
    plan = merged(graph, [1, 1], [1, 2], 0)
    for at_once, said in (
        ((1, 3), "stage 1 runs 3 microbatches at once, which does not divide the 4"),
        ((1, 4), "lacks|which is not its to run"),
    ):
        stages = tuple(replace(s, at_once=n) for s, n in zip(plan.stages, at_once, strict=True))
        with pytest.raises(VerifyError, match=said):
            verify_decisions(graph, replace(plan, stages=stages))
    with pytest.raises(VerifyError, match="1f1b runs the same microbatches in every stage"):
        verify_decisions(graph, replace(plan, schedule="1f1b", actions=()))
    early = (plan.actions[0], (plan.actions[1][1], plan.actions[1][0], *plan.actions[1][2:]))
    verify_decisions(graph, replace(plan, actions=early))
    stuck = tuple((*reversed(own[:4]), *own[4:]) for own in plan.actions)
    with pytest.raises(VerifyError, match="wait for each other"):
        verify_decisions(graph, replace(plan, actions=stuck))
