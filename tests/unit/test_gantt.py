"""Pipelines over time in the terminal."""

from rich.console import Console

from parloom.cost.pipeline import Send, Shared, StageActions, chain, simulate_pipeline
from parloom.cost.tasks import COMPUTE
from parloom.cost.timeline import MESSAGES, NORM, SHARED, Memory, Played
from parloom.ir.schedules import schedule
from parloom.report.gantt import gantt, pass_of, row


def profile(ps: int) -> Played:
    return Played(ps, (), ((COMPUTE, ps),), (), Memory())


def test_a_row_shows_what_takes_most_of_each_column() -> None:
    actions = {"F": profile(10), "B": profile(20), "STEP": profile(10)}
    stages = [StageActions(str(i), actions) for i in range(2)]
    found = simulate_pipeline(schedule("1f1b", 2, 2), stages, chain(2))
    assert found.step_ps == 100
    # 0 sends two microbatches ahead of the first gradient; 1 takes them in turns.
    first, second = (row(process, found.step_ps, 10).plain for process in found.processes)
    assert first == "FF··BB·BBU"
    assert second == "·FBBFBB··U"


def test_a_prologue_is_no_update() -> None:
    actions = {"PROLOGUE": profile(10), "F": profile(10), "B": profile(20), "STEP": profile(10)}
    stage = StageActions("a", actions, num_microbatches=2)
    found = simulate_pipeline(schedule("1f1b", 1, 2), [stage], ())
    assert row(found.processes[0], found.step_ps, 9).plain == "PPFBBFBBU"


def test_a_column_of_several_kinds_shows_the_longest() -> None:
    actions = {"F": profile(3), "B": profile(6), "STEP": profile(1)}
    found = simulate_pipeline(schedule("1f1b", 1, 2), [StageActions("a", actions)], ())
    assert found.step_ps == 19
    assert row(found.processes[0], 19, 19).plain == "FFFBBBBBBFFFBBBBBBU"
    assert row(found.processes[0], 19, 2).plain == "BB"


def test_all_waits_for_other_stages_are_waits_for_others() -> None:
    """For messages, for shared weights, and until all gradients are known."""
    actions = {"F": profile(10), "B": profile(20), "STEP": profile(10)}
    stages = [StageActions(str(i), actions) for i in range(3)]
    shared = Shared((1, 2), Send(5))
    found = simulate_pipeline(schedule("1f1b", 3, 1), stages, chain(3), shared=[shared])
    assert all(kind in found.exposed(2) for kind in (MESSAGES, SHARED, NORM))
    console = Console(width=200, record=True, file=None)
    with console.capture() as capture:
        console.print(gantt(found, ["a", "b", "c"]))
    last = capture.get().splitlines()[-1].split()
    assert last == ["c", "40.0%", "60.0%", "0.0%", "0.0%", "60.0%"]


def test_names_of_actions_and_their_kinds() -> None:
    kinds = {"F0": "F", "2B10": "B", "W3": "W", "REDUCE": "U", "STEP": "U", "GATHER": "U"}
    kinds |= {"F": "F", "B last": "B", "B first": "B", "FOO": "U", "": "U"}
    kinds |= {"P0": "P", "2P3": "P", "P": "P", "PROLOGUE": "P", "PLAN": "U"}
    assert {name: pass_of(name) for name in kinds} == kinds
