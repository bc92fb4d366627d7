"""Delta simulation is full simulation: random edits, compared to the last bit."""

import random

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.edits import changed, drawn, find
from parloom.cost.engine import Run, State
from parloom.cost.simulate import Simulator, step_tasks
from parloom.cost.tasks import Segment, StepTasks
from parloom.cost.timeline import Slice, Timeline, slices
from parloom.ir.lower import lower
from parloom.ir.plan import Decisions
from tests.unit.test_simulate import chunked, model

CLUSTER = load_cluster("2x4xH100")
EDITS = 150  # benchmarks/simulator.py makes 10,000


def everything(timeline: Timeline) -> tuple[object, list[Slice]]:
    """All that a timeline says, down to each operator."""
    (process,) = timeline.processes
    facts = timeline.step_ps, timeline.bound_ps, timeline.busy(), timeline.exposed()
    run = [part for span in process.spans for part in slices(span)]
    return (*facts, process.memory), run


def step(level: int, microbatches: int) -> StepTasks:
    decisions = chunked(CLUSTER, level=level, num_microbatches=microbatches)
    return step_tasks(lower(model(), decisions), CLUSTER, decisions)


@pytest.mark.parametrize(("level", "microbatches"), [(0, 1), (0, 4), (2, 2), (3, 1), (3, 4)])
def test_delta_is_full_to_the_last_bit(level: int, microbatches: int) -> None:
    rng = random.Random(level * 10 + microbatches)
    first = step(level, microbatches)
    known = Simulator()
    known.play(first)
    current, times = first, set()
    for number in range(EDITS // 5):
        current = first if number % 10 == 0 else current
        current = drawn(current, rng)
        found = known.play(current)
        assert everything(found) == everything(Simulator().play(current))
        assert found.bound_ps <= found.step_ps
        times.add(found.step_ps)
    assert len(times) > EDITS // 15


def test_one_operator_is_found_by_its_name_and_priced_anew() -> None:
    tasks = step(0, 1)
    places = find(tasks, "2.down:linear#0")
    assert [place.action.name for place in places] == ["F", "B last"]
    run, note = places[0].entry
    assert isinstance(run, Run)
    slower = changed(tasks, places[0], [(Run(run.ps + 12345), note)])
    player = Simulator()
    before, after = player.play(tasks), player.play(slower)
    assert after.step_ps == before.step_ps + 12345
    assert after.busy()["compute"] == before.busy()["compute"] + 12345
    assert find(tasks, "2.sideways") == ()


def test_a_known_step_is_not_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from parloom.cost import simulate

    tasks, player = step(3, 2), Simulator()
    played: list[Segment] = []
    real = simulate._play

    def counted(segment: Segment, state: State, capacities: tuple[int, ...]) -> object:
        played.append(segment)
        return real(segment, state, capacities)

    monkeypatch.setattr(simulate, "_play", counted)
    player.play(tasks)
    full = len(played)
    player.play(tasks)
    assert len(played) == full
    player.play(drawn(tasks, random.Random(0)))
    # The edited segment, and those after it until what is under way is the same again.
    assert full < len(played) <= full + 2 + full // 2


def test_equal_blocks_are_played_once() -> None:
    cluster, decisions = load_cluster("1xH100"), Decisions()
    counts = []
    for depth in (4, 24):
        player = Simulator()
        player.play(step_tasks(lower(model(depth), decisions), cluster, decisions))
        counts.append(len(player._segments))
    assert counts[0] == counts[1]
