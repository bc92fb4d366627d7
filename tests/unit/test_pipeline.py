"""Pipelines: closed forms where stages are equal, an independent oracle where they are not."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.engine import Launch
from parloom.cost.pipeline import Send, StageActions, send, simulate_pipeline
from parloom.cost.tasks import ACTIVATIONS, COMPONENTS, COMPUTE
from parloom.cost.timeline import Memory, Played, Timeline
from parloom.errors import InputError, VerifyError
from parloom.ir.plan import Action
from parloom.ir.schedules import Lists, schedule
from tests.unit.test_schedules import peak_in_flight, splits_backward

KINDS = ("gpipe", "1f1b", "zb_h1", "zb_h2")
Times = tuple[int, int, int]  # F, B, W of a stage


def profile(ps: int, memory: Memory = Memory()) -> Played:  # noqa: B008 - a value
    """An action of which nothing is known but its time and memory."""
    return Played(ps, (), ((COMPUTE, ps),), (), memory)


def equal(name: str, ranks: int, microbatches: int, times: Times, chunks: int = 1) -> Timeline:
    """Equal stages; the times are those of a rank's share of the model."""
    kinds = dict(zip("FBW", (profile(t // chunks) for t in times), strict=True))
    stages = [StageActions(str(i), kinds) for i in range(ranks * chunks)]
    return simulate_pipeline(schedule(name, ranks * chunks, microbatches, chunks), stages)


sizes = st.tuples(st.integers(1, 6), st.integers(1, 16))


@given(st.sampled_from(["gpipe", "1f1b"]), sizes)
def test_gpipe_and_1f1b_of_equal_stages(name: str, size: tuple[int, int]) -> None:
    ranks, microbatches = size
    found = equal(name, ranks, microbatches, (7, 14, 0))
    assert found.step_ps == (microbatches + ranks - 1) * 21
    assert found.bound_ps == microbatches * 21
    if microbatches > 1 or ranks > 1:
        # The bubble of the first rank: what it waits for between its first and its last pass.
        assert found.exposed(0).get("pipeline", 0) == (ranks - 1) * 21


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_1f1b_of_equal_stages(ranks: int, rounds: int, chunks: int) -> None:
    microbatches, forward, backward = ranks * rounds, 12, 24
    found = equal("interleaved_1f1b", ranks, microbatches, (forward, backward, 0), chunks)
    bubble = (ranks - 1) * (forward + backward) // chunks
    assert found.step_ps == microbatches * (forward + backward) + bubble


@given(st.sampled_from(["zb_h1", "zb_h2"]), sizes)
def test_zero_bubble_of_equal_passes(name: str, size: tuple[int, int]) -> None:
    ranks, microbatches = size
    found = equal(name, ranks, microbatches, (5, 5, 5))
    enough = 2 * ranks - 1 if name == "zb_h2" else ranks
    if microbatches >= enough:
        # (p - 1)(F + B - W) for H1; H2 has no bubble, but the last rank starts p - 1 passes late.
        assert found.step_ps == microbatches * 15 + (ranks - 1) * 5
        waited = sum(found.exposed(rank).get("pipeline", 0) for rank in range(ranks))
        late = 5 * sum(range(ranks))
        bubble = sum(5 * (ranks - 1 - rank) for rank in range(ranks)) if name == "zb_h1" else 0
        assert waited == late + bubble


def longest_path(lists: Lists, times: list[Times], sends: int) -> int:
    """The makespan by relaxing all dependencies until nothing changes (Bellman and Ford).

    A stage sends one message after the other in each direction.
    """
    took: dict[Action, int] = {}
    edges: list[tuple[Action, Action]] = []
    for listed in lists:
        run = [a for a in listed if a.microbatch is not None]
        took |= {a: times[a.stage]["FBW".index(a.kind)] for a in run}
        edges += pairwise(run)
        for kind, way in (("F", 1), ("B", -1)):
            made = [a for a in run if a.kind == kind and 0 <= a.stage + way < len(times)]
            sent = [replace(a, kind=f"send {kind}") for a in made]
            took |= dict.fromkeys(sent, sends)
            read = [replace(a, stage=a.stage + way) for a in made]
            edges += [*zip(made, sent, strict=True), *pairwise(sent), *zip(sent, read, strict=True)]
    end = dict(took)
    moved = True
    while moved:
        moved = False
        for before, after in edges:
            at = end[before] + took[after]
            if at > end[after]:
                end[after], moved = at, True
    return max(end[a] for a in end if "send" not in a.kind)


@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(*[st.integers(1, 50)] * 3), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(0, 30),
)
def test_uneven_stages_are_the_longest_path(
    name: str, times: list[Times], microbatches: int, sends: int
) -> None:
    lists = schedule(name, len(times), microbatches)
    split = splits_backward(name)
    stages = [
        StageActions(
            str(i),
            {"F": profile(f), "B": profile(b), "W": profile(w)},
            Send(latency_ps=sends),
            Send(latency_ps=sends),
        )
        for i, (f, b, w) in enumerate(times)
    ]
    found = simulate_pipeline(lists, stages)
    assert found.step_ps == longest_path(lists, times, sends)
    assert found.bound_ps <= found.step_ps
    work = [f + b + (w if split else 0) for f, b, w in times]
    assert [found.busy(i)[COMPUTE] for i in range(len(times))] == [
        microbatches * each for each in work
    ]


def test_the_usual_formula_is_wrong_for_uneven_1f1b() -> None:
    """Sum of t + (B - 1) max t counts work behind the bottleneck that is hidden."""
    rng = random.Random(0)
    ratios = []
    for _ in range(40):
        times = [(rng.randint(50, 200), rng.randint(50, 200), 0) for _ in range(4)]
        stages = [
            StageActions(str(i), {"F": profile(f), "B": profile(b)})
            for i, (f, b, _) in enumerate(times)
        ]
        lists = schedule("1f1b", 4, 8)
        found = simulate_pipeline(lists, stages).step_ps
        assert found == longest_path(lists, times, 0)
        each = [f + b for f, b, _ in times]
        ratios.append(found / (sum(each) + 7 * max(each)))
    assert max(ratios) <= 1
    assert min(ratios) < 0.95


@given(st.sampled_from(KINDS), sizes)
def test_memory_peaks_are_the_microbatches_in_flight(name: str, size: tuple[int, int]) -> None:
    ranks, microbatches = size
    taken, given_back = [0] * len(COMPONENTS), [0] * len(COMPONENTS)
    taken[ACTIVATIONS], given_back[ACTIVATIONS] = 3, -3
    takes = Memory(tuple(taken), tuple(taken), 3)
    gives = Memory(tuple(given_back))
    last = gives if not splits_backward(name) else Memory()
    kinds = {"F": profile(5, takes), "B": profile(9, last), "W": profile(2, gives)}
    lists = schedule(name, ranks, microbatches)
    found = simulate_pipeline(lists, [StageActions(str(i), kinds) for i in range(ranks)])
    for process, listed in zip(found.processes, lists, strict=True):
        assert process.memory.peak == 3 * peak_in_flight(listed)
        assert process.memory.net == (0,) * len(COMPONENTS)


def test_messages_share_a_link_and_take_their_time() -> None:
    quick = {"F": profile(10), "B": profile(10)}
    # The second message of the first rank waits for the first: one channel for each direction.
    stages = [StageActions(str(i), quick, Send(1, 100), Send(0, 0)) for i in range(2)]
    found = simulate_pipeline(schedule("gpipe", 2, 2), stages)
    sent = [(m.name, m.start_ps, m.end_ps, m.used_ps) for m in found.messages if m.end_ps > 100]
    assert sent[:2] == [
        ("F0 of stage 0", 10, 111, 111),
        ("F1 of stage 0", 111, 212, 212),
    ]
    # Between two ranks both directions have links of their own; three in a ring share none.
    ring = [StageActions(str(i), quick, Send(0, 100), Send(0, 100)) for i in range(6)]
    lists = schedule("interleaved_1f1b", 6, 3, 2)
    times = [(10, 10, 0)] * 6
    assert simulate_pipeline(lists, ring).step_ps >= longest_path(lists, times, 100)


def test_what_is_left_under_way_shares_the_link_and_is_waited_for() -> None:
    """A reduction that the last backward pass leaves to the step program."""
    left = Played(
        10, (Launch("gradients all_reduce|g", "data", 500),), ((COMPUTE, 10),), (), Memory()
    )
    actions = {"F": profile(10), "B": left, "REDUCE": profile(0), "STEP": profile(7)}
    found = simulate_pipeline(schedule("1f1b", 1, 1), [StageActions("a", actions)])
    assert found.step_ps == 10 + 10 + 500 + 7
    assert found.exposed() == {"gradients all_reduce": 500}
    assert found.busy() == {COMPUTE: 27, "data": 500}


def test_the_last_backward_pass_may_differ() -> None:
    actions = {"F": profile(10), "B": profile(20), "B last": profile(50)}
    found = simulate_pipeline(schedule("1f1b", 1, 3), [StageActions("a", actions)])
    assert found.step_ps == 3 * 10 + 2 * 20 + 50


def test_send_is_the_collective_layer_s() -> None:
    cluster = load_cluster("2x8xH100")
    inside, between = send(1e8, 0, cluster), send(1e8, 1, cluster)
    assert 0 < inside.moves_ps < between.moves_ps
    assert 0 < inside.latency_ps < between.latency_ps
    assert (inside.level, between.level) == (0, 1)


def test_lists_that_wait_for_each_other_are_an_error() -> None:
    lists = (
        (Action("B", 0, 0), Action("F", 0, 0)),
        (Action("F", 0, 1), Action("B", 0, 1)),
    )
    stages = [StageActions(str(i), {"F": profile(1), "B": profile(1)}) for i in range(2)]
    with pytest.raises(VerifyError, match="nobody launches pipeline"):
        simulate_pipeline(lists, stages)
    with pytest.raises(InputError, match="3 stages on 2 ranks"):
        simulate_pipeline(lists, [*stages, stages[0]])
