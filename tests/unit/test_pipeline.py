"""Pipelines: closed forms where stages are equal, an independent oracle where they are not."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.engine import Launch
from parloom.cost.pipeline import (
    Edge,
    Send,
    Shared,
    StageActions,
    action_lists,
    chain,
    send,
    simulate_pipeline,
)
from parloom.cost.tasks import ACTIVATIONS, COMPONENTS, COMPUTE
from parloom.cost.timeline import Memory, Played, Timeline
from parloom.errors import InputError, VerifyError
from parloom.ir.action_lists import check_lists
from parloom.ir.list_schedule import Link, list_schedule
from parloom.ir.plan import Action
from parloom.ir.regular_parts import Join
from parloom.ir.schedules import Lists, schedule
from parloom.ir.zero_bubble import PassTimes
from tests.unit.test_schedules import peak_in_flight, splits_backward

KINDS = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_1p", "zb_2p")
Times = tuple[int, int, int]  # F, B, W of a stage


def profile(ps: int, memory: Memory = Memory()) -> Played:  # noqa: B008 - a value
    """An action of which nothing is known but its time and memory."""
    return Played(ps, (), ((COMPUTE, ps),), (), memory, load=((COMPUTE, ps),))


def equal(name: str, ranks: int, microbatches: int, times: Times, chunks: int = 1) -> Timeline:
    """Equal stages; the times are those of a rank's share of the model."""
    kinds = dict(zip("FBW", (profile(t // chunks) for t in times), strict=True))
    stages = [StageActions(str(i), kinds) for i in range(ranks * chunks)]
    lists = action_lists(name, stages, microbatches, chunks)
    return simulate_pipeline(lists, stages, synchronizes=False)


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


def uneven(times: list[Times]) -> list[StageActions]:
    return [
        StageActions(str(i), {k: profile(t) for k, t in zip("FBW", each, strict=True)})
        for i, each in enumerate(times)
    ]


def repeated(lists: Lists, steps: int) -> Lists:
    """Steps one after the other, their microbatches counted on."""
    passes = [[a for a in listed if a.microbatch is not None] for listed in lists]
    count = 1 + max(a.microbatch or 0 for listed in passes for a in listed)
    return tuple(
        tuple(
            replace(a, microbatch=(a.microbatch or 0) + step * count)
            for step in range(steps)
            for a in listed
        )
        for listed in passes
    )


@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(*[st.integers(1, 50)] * 3), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(0, 30),
)
def test_uneven_stages_are_the_longest_path(
    name: str, times: list[Times], microbatches: int, sends: int
) -> None:
    stages, split = uneven(times), splits_backward(name)
    sent = Send(latency_ps=sends)
    edges = chain(len(stages), sent, sent)
    lists = action_lists(name, stages, microbatches, edges=edges)
    found = simulate_pipeline(lists, stages, edges, synchronizes=False)
    assert found.step_ps == longest_path(lists, times, sends)
    assert found.period_ps is not None
    assert found.bound_ps <= found.period_ps <= found.step_ps
    # Steps that follow each other are one long list.
    two, three = (longest_path(repeated(lists, n), times, sends) for n in (2, 3))
    assert found.period_ps >= three - two
    work = [f + b + (w if split else 0) for f, b, w in times]
    assert [found.busy(i)[COMPUTE] for i in range(len(times))] == [
        microbatches * each for each in work
    ]


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=2, max_size=4),
    st.integers(1, 8),
    st.tuples(st.integers(0, 9), st.integers(0, 60)),
)
def test_the_bound_is_what_the_busiest_stream_has_to_do(
    name: str, each: list[tuple[int, int, int, int]], microbatches: int, sent: tuple[int, int]
) -> None:
    """Passes that compute and then wait for a collective of their own, which could be hidden."""

    def waiting(computes: int, moves: int) -> Played:
        amounts = (COMPUTE, computes), ("tensor", moves)
        return Played(computes + moves, (), amounts, (), Memory(), load=amounts)

    stages = [
        StageActions(str(i), {"F": waiting(*times[:2]), "B": waiting(*times[2:])})
        for i, times in enumerate(each)
    ]
    edges = chain(len(stages), Send(*sent), Send(*sent))
    found = simulate_pipeline(schedule(name, len(stages), microbatches), stages, edges)
    streams = [own for f, tf, b, tb in each for own in (f + b, tf + tb)]
    # Between two others a stage sends both ways over one link, without the latency.
    streams += [sum(sent), (2 if len(stages) > 2 else 1) * sent[1]]
    assert found.bound_ps == microbatches * max(streams)
    assert found.bound_ps <= found.step_ps


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
    stages = [StageActions(str(i), kinds) for i in range(ranks)]
    lists = action_lists(name, stages, microbatches)
    found = simulate_pipeline(lists, stages)
    for process, listed in zip(found.processes, lists, strict=True):
        assert process.memory.peak == 3 * peak_in_flight(listed)
        assert process.memory.net == (0,) * len(COMPONENTS)


def test_messages_share_a_link_and_take_their_time() -> None:
    quick = {"F": profile(10), "B": profile(10)}
    # The second message of the first rank waits for the first: one channel for each direction.
    stages = [StageActions(str(i), quick) for i in range(6)]
    found = simulate_pipeline(schedule("gpipe", 2, 2), stages[:2], chain(2, Send(1, 100)))
    sent = [(m.name, m.start_ps, m.end_ps, m.used_ps) for m in found.messages if m.end_ps > 100]
    assert sent[:2] == [
        ("F0 from stage 0 to 1", 10, 111, 111),
        ("F1 from stage 0 to 1", 111, 212, 212),
    ]
    # Between two ranks both directions have links of their own; three in a ring share none.
    lists = schedule("interleaved_1f1b", 6, 3, 2)
    times = [(10, 10, 0)] * 6
    ring = chain(6, Send(0, 100), Send(0, 100))
    assert simulate_pipeline(lists, stages, ring).step_ps >= longest_path(lists, times, 100)


def test_stages_that_form_a_graph() -> None:
    """Two branches between a first and a last stage; a gradient comes back on one of them only."""
    stages = [StageActions(str(i), {"F": profile(10 + i), "B": profile(20 + i)}) for i in range(4)]
    lists = tuple((Action("F", 0, stage), Action("B", 0, stage)) for stage in range(4))
    edges = [
        Edge(0, 1, Send(1), Send(2)),
        Edge(0, 2, Send(3), None),
        Edge(1, 3, Send(5), Send(7)),
        Edge(2, 3, Send(100), Send(9)),
    ]
    found = simulate_pipeline(lists, stages, edges)
    # Forward by stage 2: 10 + (1 + 3, one message after the other) + 12 + 100 + 13; back by stage
    # 1: 23 + 7 + 21 + 2 + 20.
    assert found.step_ps == 139 + 73
    # Without what goes over the slow edge, by stage 1: 10 + 1 + 11 + 5 + 13 and the same back.
    assert simulate_pipeline(lists, stages, edges[:3]).step_ps == 40 + 73
    assert sorted(m.name for m in found.messages) == [
        "B0 from stage 1 to 0", "B0 from stage 3 to 1", "B0 from stage 3 to 2",
        "F0 from stage 0 to 1", "F0 from stage 0 to 2", "F0 from stage 1 to 3",
        "F0 from stage 2 to 3",
    ]  # fmt: skip


def test_stages_lie_where_the_lists_have_them() -> None:
    """A V of four stages on two ranks: nothing is sent in its middle."""
    stages = [StageActions(str(i), {"F": profile(10), "B": profile(10)}) for i in range(4)]
    lists = (
        (Action("F", 0, 0), Action("F", 0, 3), Action("B", 0, 3), Action("B", 0, 0)),
        (Action("F", 0, 1), Action("F", 0, 2), Action("B", 0, 2), Action("B", 0, 1)),
    )
    sent = Send(latency_ps=5)
    assert simulate_pipeline(lists, stages, chain(4, sent, sent)).step_ps == 80 + 4 * 5


def test_a_stage_with_larger_microbatches_waits_for_all_that_they_have() -> None:
    """Two messages for each pass of the second stage, and two back."""
    small, large = ({"F": profile(n), "B": profile(2 * n)} for n in (10, 20))
    stages = [StageActions("0", small), StageActions("1", large)]
    forward = [Action("F", m, 0) for m in range(4)]
    lists = (
        (*forward, *(Action("B", m, 0) for m in range(4))),
        tuple(Action(kind, m, 1) for m in range(2) for kind in "FB"),
    )
    found = simulate_pipeline(lists, stages, chain(2, Send(5), Send(5)))
    assert [(s.name, s.start_ps) for s in found.processes[1].spans] == [
        ("F0", 25), ("B0", 45), ("F1", 85), ("B1", 105),
    ]  # fmt: skip
    # The second gradient of a pass goes over behind the first one.
    assert [s.start_ps for s in found.processes[0].spans] == [0, 10, 20, 30, 90, 110, 150, 170]
    assert found.step_ps == 190
    assert sum(m.name.endswith("0 to 1") for m in found.messages) == 4


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


@pytest.mark.parametrize("synchronizes", [True, False])
def test_gradients_of_shared_weights_are_added_before_the_update(synchronizes: bool) -> None:
    actions = {"F": profile(10), "B": profile(10), "STEP": profile(7)}
    stages = [StageActions(str(i), actions) for i in range(3)]
    lists = schedule("1f1b", 3, 1)

    def step_ps(*shared: Shared) -> int:
        return simulate_pipeline(lists, stages, shared=shared, synchronizes=synchronizes).step_ps

    # The first stage is the last to finish, after 60.
    assert step_ps() == 67
    assert step_ps(Shared((0, 2), Send(5, 100))) == 60 + 105 + 7
    # Both leave rank 0 by the same link.
    assert step_ps(Shared((0, 2), Send(0, 100)), Shared((0, 1), Send(0, 100))) == 60 + 200 + 7
    assert step_ps(Shared((1, 1), Send(5, 100))) == 67  # on one rank


def test_the_last_backward_pass_may_differ() -> None:
    actions = {"F": profile(10), "B": profile(20), "B last": profile(50)}
    found = simulate_pipeline(schedule("1f1b", 1, 3), [StageActions("a", actions)])
    assert found.step_ps == 3 * 10 + 2 * 20 + 50


def test_send_is_the_collective_layer_s() -> None:
    cluster = load_cluster("2x8xH100")
    inside, between = (send(1e8, 1e8, Join(cluster, level)) for level in (0, 1))
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
    with pytest.raises(InputError, match="stage 2 of 3 is on no rank"):
        simulate_pipeline(lists, [*stages, stages[0]])
    twice = (lists[0], (*lists[1], Action("F", 0, 0)))
    with pytest.raises(InputError, match=r"stage 0 of 2 is on ranks \[0, 1\]; a stage is on one"):
        simulate_pipeline(twice, stages)


UNIT: Times = (5, 5, 5)
WHOLE: Times = (5, 10, 0)  # B and W together


@pytest.mark.parametrize(
    ("name", "times", "step", "period"),
    [
        ("1f1b", WHOLE, 33, 33),  # (m + p - 1)(F + B + W)
        ("gpipe", WHOLE, 33, 33),
        ("zb_h1", UNIT, 27, 27),  # m(F + B + W) + (p - 1)(F + B - W)
        ("zb_1p", UNIT, 27, 27),
        ("zb_h2", UNIT, 27, 24),  # no bubble: the last rank starts p - 1 passes late
        ("zb_2p", UNIT, 27, 24),
    ],
)
def test_period_and_makespan_of_four_stages_and_eight_microbatches(
    name: str, times: Times, step: int, period: int
) -> None:
    found = equal(name, 4, 8, times)
    assert (found.step_ps, found.period_ps) == (step * 5, period * 5)
    assert found.period_s == period * 5e-12


@pytest.mark.slow
@given(st.integers(2, 8), st.integers(1, 24), st.tuples(*[st.integers(1, 40)] * 3))
def test_more_memory_never_takes_longer(ranks: int, microbatches: int, times: Times) -> None:
    forward, backward, weights = times
    whole = equal("1f1b", ranks, microbatches, (forward, backward + weights, 0)).period_s
    one, two = (equal(name, ranks, microbatches, times).period_s for name in ("zb_1p", "zb_2p"))
    assert two <= one <= whole
    if forward == backward == weights and microbatches >= 2 * ranks:
        assert two < one < whole


def test_interleaving_lies_between_1f1b_and_zb_2p() -> None:
    """The order in most of the runs of Qi et al. (ICLR'24, table 4), three blocks a stage."""
    names = ("zb_2p", "interleaved_1f1b", "zb_1p", "1f1b")
    shares = {"interleaved_1f1b": (WHOLE, 5), "1f1b": (WHOLE, 1)}
    found = []
    for name in names:
        times, chunks = shares.get(name, (UNIT, 1))
        found.append(equal(name, 8, 24, times, chunks).period_s)
    assert found == sorted(found)
    assert len(set(found)) == len(found)


def test_steps_that_synchronize_do_not_overlap() -> None:
    kinds = {"F": 5, "B": 5, "W": 5, "REDUCE": 0, "STEP": 3, "GATHER": 1}
    stages = [StageActions(str(i), {k: profile(t) for k, t in kinds.items()}) for i in range(4)]
    lists = schedule("zb_h2", 4, 8)
    apart = simulate_pipeline(lists, stages)
    own = simulate_pipeline(lists, stages, synchronizes=False)
    # All ranks wait for the last one's gradients.
    updates = [{s.start_ps for s in p.spans if s.name == "STEP"} for p in apart.processes]
    assert updates == [{27 * 5}] * 4
    assert apart.period_s == apart.step_s == (27 * 5 + 4) / 1e12
    assert (own.step_ps, own.period_ps) == (27 * 5 + 4, 24 * 5 + 4)
    assert own.processes[0].spans[-2].start_ps == 24 * 5
    assert apart.exposed(0)["gradients norm"] == 3 * 5


@pytest.mark.parametrize("seed", range(40))
def test_lists_for_microbatches_of_unequal_sizes(seed: int) -> None:
    """Lists made for them are complete, do not wait for each other, and run as long as they say."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    at_once = [rng.choice((1, 1, 2, 4)) for _ in range(count)]
    times = [PassTimes(rng.randint(1, 9) * k, rng.randint(1, 9) * k, k) for k in at_once]
    pairs = [(a, b) for b in range(1, count) for a in range(b) if b == a + 1 or rng.random() < 0.3]
    ranks = list(range(count)) if rng.random() < 0.7 else [0, *(0 for _ in range(count - 1))]
    for split in (False, True):
        found = list_schedule(
            times, [Link(a, b) for a, b in pairs], ranks, 8, at_once=at_once, split=split
        )
        assert found is not None
        own = [[s for s in range(count) if ranks[s] == r] for r in range(max(ranks) + 1)]
        shares = [range(8 // k) for k in at_once]
        check_lists(own, found.lists, [(a, b, True) for a, b in pairs], shares)
        stages = [
            StageActions(
                str(i),
                {"F": profile(t.forward), "B": profile(t.backward)}
                | ({"W": profile(t.weights)} if split else {}),
            )
            for i, t in enumerate(times)
        ]
        played = simulate_pipeline(found.lists, stages, [Edge(a, b) for a, b in pairs])
        assert played.step_ps == found.makespan


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.integers(1, 10), st.integers(0, 5))
def test_passes_that_read_what_the_last_stage_sent_before(
    times: list[int], microbatches: int, sent: int
) -> None:
    """The busiest stage or link of all microbatches, or the way of one through all stages and back:
    with one microbatch nothing overlaps.
    """
    stages = [StageActions(str(i), {"F": profile(t)}) for i, t in enumerate(times)]
    there = chain(len(times), Send(sent))
    forward = [replace(edge, backward=None) for edge in there]
    token = Edge(len(times) - 1, 0, Send(sent), None, later=True)
    lists = tuple(
        tuple(Action("F", microbatch, stage) for microbatch in range(microbatches))
        for stage in range(len(times))
    )
    found = simulate_pipeline(lists, stages, [*forward, token])
    way = sum(times) + len(times) * sent
    assert found.period_ps == max(way, microbatches * max(*times, sent))
    assert found.step_ps >= way - sent
    alone = simulate_pipeline(lists, stages, forward)
    assert alone.period_ps is None
