"""Pipeline schedules: complete, ordered, free of deadlock, and as lean as their papers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.errors import InputError
from parloom.ir.plan import Action
from parloom.ir.schedules import Lists, schedule

PLAIN = ("gpipe", "1f1b", "zb_h1", "zb_h2")
STEP = (Action("REDUCE"), Action("STEP"), Action("GATHER"))


def splits_backward(name: str) -> bool:
    """Whether a schedule runs the gradients of inputs and of weights apart."""
    return name in ("zb_h1", "zb_h2")


def peak_in_flight(listed: tuple[Action, ...]) -> int:
    """The most (stage, microbatch) pairs whose activations a rank holds at once.

    They live from F to W, or to B where there is no W.
    """
    last = "W" if any(action.kind == "W" for action in listed) else "B"
    held = peak = 0
    for action in listed:
        held += (action.kind == "F") - (action.kind == last)
        peak = max(peak, held)
    return peak


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int, int, int, Lists]:
    """(name, ranks, microbatches, chunks, lists)."""
    name = draw(st.sampled_from((*PLAIN, "interleaved_1f1b")))
    ranks = draw(st.integers(1, 6))
    if name == "interleaved_1f1b":
        chunks, rounds = draw(st.integers(2, 4)), draw(st.integers(1, 4))
        return name, ranks, ranks * rounds, chunks, schedule(
            name, ranks * chunks, ranks * rounds, chunks
        )  # fmt: skip
    microbatches = draw(st.integers(1, 20))
    return name, ranks, microbatches, 1, schedule(name, ranks, microbatches)


def passes(listed: tuple[Action, ...]) -> tuple[Action, ...]:
    assert listed[-3:] == STEP
    return listed[:-3]


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What must have run before, on any rank."""
    kind, microbatch, stage = action.kind, action.microbatch, action.stage
    before = {"F": "", "B": "F", "W": "B"}[kind]
    own = (Action(before, microbatch, stage),) if before else ()
    if kind == "F" and stage:
        return (Action("F", microbatch, stage - 1),)
    if kind == "B" and stage < num_stages - 1:
        return (*own, Action("B", microbatch, stage + 1))
    return own


@given(schedules())
def test_every_pass_runs_once_in_order_on_its_rank(
    case: tuple[str, int, int, int, Lists],
) -> None:
    name, ranks, microbatches, chunks, lists = case
    assert len(lists) == ranks
    kinds = "FBW" if splits_backward(name) else "FB"
    for rank, listed in enumerate(lists):
        run = passes(listed)
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        wanted = {Action(k, m, s) for k in kinds for m in range(microbatches) for s in stages}
        assert set(run) == wanted
        assert len(run) == len(wanted)
        for stage in stages:
            for microbatch in range(microbatches):
                places = [run.index(Action(k, microbatch, stage)) for k in kinds]
                assert places == sorted(places)


@given(schedules())
def test_dependencies_never_deadlock(case: tuple[str, int, int, int, Lists]) -> None:
    _, ranks, _, chunks, lists = case
    waiting = [list(passes(listed)) for listed in lists]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for queue in waiting:
            while queue and done.issuperset(needs(queue[0], ranks * chunks)):
                done.add(queue.pop(0))
                moved = True
    assert not any(waiting)


@given(schedules())
def test_in_flight_is_the_closed_form(case: tuple[str, int, int, int, Lists]) -> None:
    name, ranks, microbatches, chunks, lists = case
    total = microbatches * chunks
    for rank, listed in enumerate(lists):
        most = {
            "gpipe": microbatches,
            "1f1b": ranks - rank,
            "interleaved_1f1b": 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1,
            "zb_h1": ranks,
            "zb_h2": 2 * ranks - 1,
        }[name]
        assert peak_in_flight(listed) == min(most, total)


def test_one_stage_is_what_a_plan_runs() -> None:
    (listed,) = schedule("one_stage", 1, 3)
    assert " ".join(map(str, listed)) == "F0 B0 F1 B1 F2 B2 REDUCE STEP GATHER"
    assert schedule("1f1b", 1, 3) == (listed,)


def test_1f1b_of_two_ranks_reads_as_in_the_paper() -> None:
    first, last = schedule("1f1b", 2, 3)
    assert " ".join(map(str, first)) == "F0 F1 B0 F2 B1 B2 REDUCE STEP GATHER"
    assert " ".join(map(str, last)) == "F0 B0 F1 B1 F2 B2 REDUCE STEP GATHER"


def test_interleaved_ranks_visit_their_chunks_in_rounds() -> None:
    first, _ = schedule("interleaved_1f1b", 4, 4, 2)
    forward = [(a.microbatch, a.stage) for a in first if a.kind == "F"]
    assert forward == [(0, 0), (1, 0), (0, 2), (1, 2), (2, 0), (3, 0), (2, 2), (3, 2)]
    backward = [(a.microbatch, a.stage) for a in first if a.kind == "B"]
    assert backward == [(0, 2), (1, 2), (0, 0), (1, 0), (2, 2), (3, 2), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "message"),
    [
        ("1f2b", 2, 4, 1, "did you mean '1f1b'"),
        ("1f1b", 4, 8, 2, "one chunk a rank"),
        ("gpipe", 0, 8, 1, "at least 1"),
        ("gpipe", 2, 0, 1, "at least 1"),
        ("interleaved_1f1b", 4, 8, 1, "at least 2 chunks"),
        ("interleaved_1f1b", 5, 8, 2, "multiple of the chunks"),
        ("interleaved_1f1b", 8, 6, 2, "6 do not divide by 4 ranks"),
        ("one_stage", 2, 6, 1, "one_stage is for one stage"),
    ],
)
def test_numbers_that_a_schedule_cannot_take(
    name: str, stages: int, microbatches: int, chunks: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        schedule(name, stages, microbatches, chunks)
