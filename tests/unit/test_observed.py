"""An observed step beside the simulated one."""

import json

from rich.console import Console

from parloom.cost.engine import Launch
from parloom.cost.pipeline import Send, Shared, StageActions, chain, simulate_pipeline
from parloom.cost.tasks import COMPUTE
from parloom.cost.timeline import Memory, Played, Timeline
from parloom.ir.schedules import schedule
from parloom.report.observed import (
    by_kind,
    observed_document,
    observed_screen,
    observed_timeline,
)
from parloom.report.trace import chrome_trace
from parloom.runtime.spans import ActionSpan, waiting_share

NAMES = ["stage 0 on 0", "stage 1 on 1"]
PS = 10**12
# Stage 1 waits for the forward pass of stage 0, which waits for its gradient; both update together.
FIRST = (
    ActionSpan("F0", 0.0, 2.0),
    ActionSpan("B0", 2.0, 12.0, 6.0),
    ActionSpan("STEP", 12.0, 13.0),
)
SECOND = (
    ActionSpan("1F0", 0.0, 4.0, 2.0),
    ActionSpan("1B0", 4.0, 8.0),
    ActionSpan("STEP", 8.0, 13.0, 4.0),
)


def profile(seconds: int, *left: Launch) -> Played:
    return Played(seconds * PS, left, ((COMPUTE, seconds * PS),), (), Memory())


def simulated(*shared: Shared) -> Timeline:
    """The same pipeline, with passes of 2 s and 4 s."""
    actions = {"F": profile(2), "B": profile(4), "STEP": profile(1)}
    stages = [StageActions(name, actions) for name in NAMES]
    return simulate_pipeline(schedule("1f1b", 2, 1), stages, chain(2), shared=shared)


def test_an_observed_step_becomes_the_simulated_one() -> None:
    found, known = observed_timeline([FIRST, SECOND]), simulated()
    assert found.step_ps == known.step_ps == 13 * 10**12
    for own, predicted in zip(found.processes, known.processes, strict=True):
        times = [(span.start_ps, span.played.ps) for span in own.spans]
        passes = [(s.start_ps, s.played.ps) for s in predicted.spans if s.name[0] != "R"]
        assert times == [one for one in passes if one[1]]
    for index in range(2):
        assert known.exposed(index) == {k: ps for k, ps in found.exposed(index).items() if ps}
        assert nonzero(found, index) == nonzero(known, index)


def nonzero(timeline: Timeline, process: int) -> dict[str, int]:
    return {kind: ps for kind, ps in by_kind(timeline, process).items() if ps}


def test_waits_for_shared_weights_are_no_update() -> None:
    """Replicas that are faster wait for the gradients of slower ones."""
    known = simulated(Shared((0, 1), Send(PS)))
    first = (*FIRST[:2], ActionSpan("REDUCE", 12.0, 13.0, 1.0), ActionSpan("STEP", 13.0, 14.0))
    second = (*SECOND[:2], ActionSpan("REDUCE", 8.0, 13.0, 5.0), ActionSpan("STEP", 13.0, 14.0))
    found = observed_timeline([first, second])
    assert nonzero(found, 1) == {
        "forward": 2 * PS,
        "backward": 4 * PS,
        "update": PS,
        "waits for messages": 2 * PS,
        "waits for shared weights": 5 * PS,
    }
    assert [nonzero(found, i) for i in (0, 1)] == [nonzero(known, i) for i in (0, 1)]
    # Rank 1 waits 2 s for a message and 5 s for gradients, as predicted.
    assert waiting_share(second) == 7 / 14 == known.prediction().waits_s[1] / known.step_s


def test_what_only_some_steps_wait_for_is_not_in_the_share() -> None:
    """Stage 1 waits 4 s in STEP where gradients are clipped, and not at all elsewhere."""
    assert waiting_share(SECOND) == 2 / 13 == simulated().prediction().waits_s[1] / 13


def test_reductions_that_are_waited_for_are_part_of_the_update() -> None:
    reduction = Launch("gradients all_reduce|g", "data", 3 * PS)
    actions = {
        "F": profile(2),
        "B": profile(4, reduction),
        "REDUCE": profile(0),
        "STEP": profile(1),
    }
    known = simulate_pipeline(schedule("1f1b", 1, 1), [StageActions("a", actions)])
    seen = ActionSpan("F0", 0, 2), ActionSpan("B0", 2, 6), ActionSpan("REDUCE", 6, 9)
    found = observed_timeline([(*seen, ActionSpan("STEP", 9, 10))])
    assert nonzero(found, 0) == nonzero(known, 0) == {
        "forward": 2 * PS, "backward": 4 * PS, "update": 4 * PS,
    }  # fmt: skip


def test_both_steps_are_drawn_on_one_scale() -> None:
    slow = [ActionSpan(s.action, 2 * s.begin_s, 2 * s.end_s, 2 * s.waited_s) for s in FIRST]
    console = Console(width=200, record=True, file=None)
    with console.capture() as capture:
        console.print(
            observed_screen(simulated(), observed_timeline([slow, SECOND]), NAMES, step=3)
        )
    text = capture.get()
    assert "step 3 took 26 s (+100.0% of 13 s predicted)" in text
    rows = [line for line in text.splitlines() if "predicted  " in line or "observed  " in line]
    assert [row.count("F") for row in rows] == [6, 11, 5, 5]
    assert [row.count("B") for row in rows] == [11, 22, 11, 11]
    last = next(line for line in text.splitlines() if "4 s (2 s)" in line)
    assert " ".join(last.split()) == (
        "stage 0 on 0 4 s (2 s) 8 s (4 s) 2 s (1 s) 12 s (6 s) 0 ns (0 ns)"
    )


def test_a_trace_has_both_beside_each_other() -> None:
    events = json.loads(chrome_trace(simulated(), NAMES, observed_timeline([FIRST, SECOND])))
    labels = [e for e in events["traceEvents"] if e["ph"] == "M"]
    names = {e["pid"]: e["args"]["name"] for e in labels if e["name"] == "process_name"}
    places = {
        e["pid"]: e["args"]["sort_index"] for e in labels if "sort" in e["name"] and "tid" not in e
    }
    assert [names[pid] for pid in sorted(names, key=places.__getitem__)] == [
        "stage 0 on 0", "stage 0 on 0, observed", "stage 1 on 1", "stage 1 on 1, observed",
    ]  # fmt: skip
    mine = [e for e in events["traceEvents"] if e["ph"] == "X" and e["pid"] == 3]
    assert [(e["name"], e["ts"], e["dur"]) for e in mine] == [
        ("1F0", 2e6, 2e6), ("1B0", 4e6, 4e6), ("STEP", 12e6, 1e6),
    ]  # fmt: skip


def test_a_prologue_is_a_kind_of_its_own() -> None:
    spans = [ActionSpan("P", 0.0, 1.0), ActionSpan("F0", 1.0, 3.0), ActionSpan("STEP", 3.0, 4.0)]
    (device,) = observed_document([spans], NAMES[:1], 3)["devices"]
    assert (device["seconds"]["prologue"], device["seconds"]["update"]) == (1.0, 1.0)


def test_json_has_seconds_by_kind_and_all_actions() -> None:
    found = observed_document([FIRST, SECOND], NAMES, 3)
    assert (found["step"], found["step_s"]) == (3, 13.0)
    first = found["devices"][0]
    assert first["seconds"] == {
        "forward": 2.0, "backward": 4.0, "update": 1.0,
        "waits for messages": 6.0, "waits for shared weights": 0.0, "waits for all gradients": 0.0,
    }  # fmt: skip
    assert first["actions"][1] == {"action": "B0", "begin_s": 2.0, "end_s": 12.0, "waited_s": 6.0}
