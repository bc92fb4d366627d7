"""Pipeline schedules: complete, ordered, free of deadlock, and as lean as their papers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.errors import InputError
from parloom.ir.plan import Action
from parloom.ir.schedules import AUTOMATIC, Lists, round_of, schedule
from parloom.ir.zero_bubble import PassTimes, zero_bubble

PLAIN = ("gpipe", "1f1b", "eager_1f1b", "2f2b", "3f3b", "zb_h1", "zb_h2")
STEP = (Action("REDUCE"), Action("STEP"), Action("GATHER"))


def splits_backward(name: str) -> bool:
    """Whether a schedule runs the gradients of inputs and of weights apart."""
    return name in ("zb_h1", "zb_h2", "zb_v", "zb_1p", "zb_2p")


def rank_of(name: str, stage: int, ranks: int) -> int:
    """Where a stage is."""
    return min(stage, 2 * ranks - 1 - stage) if name == "zb_v" else stage % ranks


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


PASSES = st.builds(
    PassTimes, *[st.integers(1, 50)] * 3, *[st.integers(0, 30)] * 2, st.just(10), st.integers(0, 10)
)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int, int, int, Lists]:
    """(name, ranks, microbatches, chunks, lists)."""
    name = draw(st.sampled_from((*PLAIN, "interleaved_1f1b", "zb_v", *AUTOMATIC)))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    if name == "interleaved_1f1b":
        chunks = draw(st.integers(2, 4))
        lists = schedule(name, ranks * chunks, microbatches, chunks)
        return name, ranks, microbatches, chunks, lists
    if name == "zb_v":
        return name, ranks, microbatches, 2, schedule(name, 2 * ranks, microbatches, 2)
    if name in AUTOMATIC:
        times = draw(st.lists(PASSES, min_size=ranks, max_size=ranks))
        return name, ranks, microbatches, 1, zero_bubble(times, microbatches, AUTOMATIC[name])
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
        stages = [s for s in range(ranks * chunks) if rank_of(name, s, ranks) == rank]
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
            "eager_1f1b": 2 * (ranks - rank) - 1,
            "2f2b": 2 * (ranks - rank),
            "3f3b": 3 * (ranks - rank),
            "interleaved_1f1b": 2 * (ranks - rank - 1)
            + (chunks - 1) * round_of(ranks, microbatches)
            + 1,
            "zb_h1": ranks,
            "zb_h2": 2 * ranks - 1,
        }.get(name)
        if most is not None:  # the others hold as much as their limit lets them
            assert peak_in_flight(listed) == min(most, total)


@given(st.lists(PASSES, min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 3))
def test_automatic_schedules_stay_within_their_memory(
    stages: list[PassTimes], microbatches: int, times: int
) -> None:
    for listed, own in zip(zero_bubble(stages, microbatches, times), stages, strict=True):
        kept = own.backward_bytes
        changes = {"F": own.forward_bytes, "B": kept - own.forward_bytes, "W": -kept}
        held = 0
        for action in passes(listed):
            held += changes[action.kind]
            assert held <= times * len(stages) * own.forward_bytes
        assert held == 0


def test_more_memory_is_used_where_it_helps() -> None:
    stages = [PassTimes(1, 1, 1)] * 4
    peaks = [peak_in_flight(zero_bubble(stages, 8, times)[0]) for times in (1, 2)]
    assert peaks == [4, 8]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "each"), [(4, 8, 4), (4, 6, 6), (4, 9, 5), (4, 3, 3), (8, 20, 10)]
)
def test_rounds_of_microbatches_that_do_not_divide(
    ranks: int, microbatches: int, each: int
) -> None:
    assert round_of(ranks, microbatches) == each


def test_one_stage_is_what_a_plan_runs() -> None:
    (listed,) = schedule("one_stage", 1, 3)
    assert " ".join(map(str, listed)) == "F0 B0 F1 B1 F2 B2 REDUCE STEP GATHER"
    assert schedule("1f1b", 1, 3) == (listed,)


def test_1f1b_of_two_ranks_reads_as_in_the_paper() -> None:
    first, last = schedule("1f1b", 2, 3)
    assert " ".join(map(str, first)) == "F0 F1 B0 F2 B1 B2 REDUCE STEP GATHER"
    assert " ".join(map(str, last)) == "1F0 1B0 1F1 1B1 1F2 1B2 REDUCE STEP GATHER"


def test_groups_of_two_microbatches() -> None:
    """The last group has those that are left."""
    first, last = schedule("2f2b", 2, 5)
    assert " ".join(map(str, first)).startswith("F0 F1 F2 F3 B0 B1 F4 B2 B3 B4 REDUCE")
    assert " ".join(map(str, last)).startswith("1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1F4 1B4 REDUCE")


@pytest.mark.parametrize("ranks", range(1, 7))
def test_a_v_has_no_bubble_and_holds_what_1f1b_does(ranks: int) -> None:
    """Where all passes take as long, after the pipeline is full (Qi et al., NeurIPS'24): each rank
    is idle only until its first pass, and holds two halves of 1F1B's stages on the first rank.
    """
    microbatches = 2 * ranks + 3
    lists = schedule("zb_v", 2 * ranks, microbatches, 2)
    ends: dict[Action, int] = {}
    waiting = [list(passes(listed)) for listed in lists]
    free, busy = [0] * ranks, 6 * microbatches
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue and ends.keys() >= set(needs(queue[0], 2 * ranks)):
                begin = max([free[rank], *(ends[a] for a in needs(queue[0], 2 * ranks))])
                free[rank] = ends[queue.pop(0)] = begin + 1
    assert max(end - busy for end in free) <= ranks
    assert max(map(peak_in_flight, map(passes, lists))) <= 2 * ranks


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
        ("zb_v", 4, 8, 1, "takes two chunks a rank, not 1"),
        ("0f0b", 2, 4, 1, "no schedule '0f0b'"),
        ("zb_1p", 4, 8, 1, "times of stages"),
        ("zb_3p", 4, 8, 1, "did you mean 'zb_"),
        ("one_stage", 2, 6, 1, "one_stage is for one stage"),
    ],
)
def test_numbers_that_a_schedule_cannot_take(
    name: str, stages: int, microbatches: int, chunks: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        schedule(name, stages, microbatches, chunks)


def test_automatic_schedules_need_stages_and_microbatches() -> None:
    with pytest.raises(InputError, match="all must be at least 1"):
        zero_bubble([PassTimes(1, 1, 1)], 0, 1)
    with pytest.raises(InputError, match="0 stages"):
        zero_bubble([], 4, 1)
