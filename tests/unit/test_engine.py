"""The event engine: order, waiting, fair links, and playing on from a state."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.engine import Engine, Flow, Instruction, Launch, Outcome, Run
from parloom.errors import VerifyError

CAPACITIES = (720720, 720720, 1441440)


def play(*streams: list[Instruction], capacities: tuple[int, ...] = CAPACITIES) -> Outcome:
    return Engine(streams, capacities).play()


def ends(outcome: Outcome) -> dict[str, int]:
    return {moved.key: moved.end_ps for moved in outcome.moved}


def test_a_stream_runs_in_order() -> None:
    found = play([Run(5), Run(7), Run(0)])
    assert found.starts == [[0, 5, 12]]
    assert found.ends == [12]


def test_a_run_waits_for_what_was_launched_before() -> None:
    found = play([Run(5), Launch("a", "c", 10), Run(3), Run(1, ("a",)), Run(1, ("a",))])
    assert found.starts == [[0, 5, 5, 15, 16]]
    assert found.waited == [[(3, "a", 7)]]
    assert ends(found) == {"a": 15}


def test_a_channel_moves_one_after_the_other_and_channels_do_not_wait() -> None:
    found = play(
        [Launch("a", "c", 10), Launch("b", "c", 5), Launch("x", "d", 5), Run(1, ("b", "x"))]
    )
    assert ends(found) == {"x": 5, "a": 10, "b": 15}
    assert found.waited == [[(3, "b", 15)]]


def test_streams_meet_in_transfers() -> None:
    sender: list[Instruction] = [Run(10), Launch("m", "net", 2), Run(10)]
    receiver: list[Instruction] = [Run(1), Run(5, ("m",))]
    assert play(sender, receiver).ends == [20, 17]
    assert play(receiver, sender).ends == [17, 20]


def test_waiting_for_what_nobody_launches_is_an_error() -> None:
    with pytest.raises(VerifyError, match="stream 0 waits at instruction 1; nobody launches b"):
        play([Run(1), Run(1, ("b",))])


def test_what_is_under_way_is_the_state() -> None:
    flow = Flow(20 * CAPACITIES[0], (0,))
    found = play([Launch("a", "c", 4, (flow,)), Launch("b", "c", 3), Run(9)])
    assert found.state == (
        Launch("a", "c", 0, (Flow(15 * CAPACITIES[0], (0,)),)),
        Launch("b", "c", 3),
    )
    assert ends(found) == {"a": 9}  # as far as it got; b has not begun
    early = play([Launch("a", "c", 4, (flow,)), Run(1)])
    assert early.state == (Launch("a", "c", 3, (flow,)),)


# Links as bytes per second: sizes are bytes times picoseconds in a second. All of it is scaled, so
# that shares are whole numbers.
SECOND = 10**12
SCALE = 720720


def shared(links: dict[int, int], flows: list[tuple[int, tuple[int, ...]]]) -> list[float]:
    """Seconds until each flow ends, all of them started at once; sizes in bytes."""
    launches: list[Instruction] = [
        Launch(str(i), str(i), 0, (Flow(size * SECOND * SCALE, path),))
        for i, (size, path) in enumerate(flows)
    ]
    waits = tuple(str(i) for i in range(len(flows)))
    found = ends(
        play([*launches, Run(0, waits)], capacities=tuple(c * SCALE for c in links.values()))
    )
    return [found[key] / SECOND for key in waits]


@pytest.mark.parametrize(
    ("links", "flows", "expected"),
    [
        # Alone: as fast as the slowest link of the path.
        ({0: 100, 1: 50}, [(100, (0, 1))], [2]),
        # Two share; the one that is left gets all of it.
        ({0: 100}, [(100, (0,)), (200, (0,))], [2, 3]),
        # Three on a link of 12, one of them held to 3 elsewhere: 4.5, 4.5 and 3.
        ({0: 12, 1: 3}, [(9, (0,)), (9, (0,)), (6, (0, 1))], [2, 2, 2]),
        # A path over two links takes a share of each: 5 and 5, then 10; 5 and 15, then 20.
        ({0: 10, 1: 20}, [(10, (0,)), (10, (0, 1)), (30, (1,))], [2, 2, 2]),
        # Opposite directions are different links.
        ({0: 10, 1: 10}, [(10, (0,)), (10, (1,))], [1, 1]),
    ],
)
def test_links_are_shared_fairly(
    links: dict[int, int], flows: list[tuple[int, tuple[int, ...]]], expected: list[float]
) -> None:
    assert shared(links, flows) == pytest.approx(expected, rel=1e-12)


def fair_rates(links: dict[int, int], paths: dict[int, tuple[int, ...]]) -> dict[int, Fraction]:
    """Max-min fair rates by raising all rates together until a link of a flow is full."""
    rates = dict.fromkeys(paths, Fraction(0))
    rising = set(paths)
    while rising:
        steps = []
        for link, capacity in links.items():
            users = [f for f, path in paths.items() if link in path]
            up = [f for f in users if f in rising]
            if up:
                steps.append((capacity - sum(rates[f] for f in users)) / Fraction(len(up)))
        for flow in rising:
            rates[flow] += min(steps)
        for link, capacity in links.items():
            users = [f for f, path in paths.items() if link in path]
            if sum(rates[f] for f in users) == capacity:
                rising -= set(users)
    return rates


def fluid(links: dict[int, int], flows: list[tuple[int, tuple[int, ...]]]) -> list[float]:
    """Ends of flows in exact arithmetic, one end after the other."""
    left = {i: Fraction(size) for i, (size, _) in enumerate(flows)}
    now, found = Fraction(0), [0.0] * len(flows)
    while left:
        rates = fair_rates(links, {i: flows[i][1] for i in left})
        step = min(size / rates[i] for i, size in left.items())
        now += step
        left = {i: size - rates[i] * step for i, size in left.items()}
        for i in [i for i, size in left.items() if not size]:
            found[i] = float(now)
            del left[i]
    return found


cases = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 10**6), min_size=n, max_size=n),
        st.lists(
            st.tuples(
                st.integers(1, 10**7),
                st.sets(st.integers(0, n - 1), min_size=1).map(lambda s: tuple(sorted(s))),
            ),
            min_size=1,
            max_size=6,
        ),
    )
)


@given(cases)
def test_fairness_is_that_of_an_exact_fluid(
    case: tuple[list[int], list[tuple[int, tuple[int, ...]]]],
) -> None:
    links = dict(enumerate(case[0]))
    assert shared(links, case[1]) == pytest.approx(fluid(links, case[1]), rel=1e-4)


@st.composite
def programs(draw: st.DrawFn) -> list[Instruction]:
    """A list whose runs wait for transfers launched before."""
    listed: list[Instruction] = []
    known: list[str] = []
    for index in range(draw(st.integers(1, 24))):
        if draw(st.booleans()):
            flows = tuple(
                Flow(draw(st.integers(0, 10**6)) * 720720, (link,))
                for link in sorted(draw(st.sets(st.integers(0, 2))))
            )
            channel = draw(st.sampled_from("abc"))
            listed.append(Launch(f"t{index}", channel, draw(st.integers(0, 10**6)), flows))
            known.append(f"t{index}")
        else:
            waits = draw(st.lists(st.sampled_from(known), max_size=2)) if known else []
            listed.append(Run(draw(st.integers(0, 10**6)), tuple(waits)))
    return [*listed, Run(0)]


@given(programs(), st.data())
def test_played_on_from_a_state_is_as_played_in_one_go(
    listed: list[Instruction], data: st.DataObject
) -> None:
    whole = play(listed)
    cut = data.draw(st.integers(0, len(listed)))
    first = play(listed[:cut])
    launched = {i.key for i in listed[:cut] if isinstance(i, Launch)}
    over = launched - {t.key for t in first.state}
    second = Engine([listed[cut:]], CAPACITIES, first.state, over).play()
    middle = first.end_ps
    assert middle + second.end_ps == whole.end_ps
    assert first.starts[0] + [middle + s for s in second.starts[0]] == whole.starts[0]
    assert second.state == whole.state
    later = {key: end + middle for key, end in ends(second).items()}
    assert ends(first) | later == ends(whole)


@given(programs())
def test_no_stream_channel_or_link_is_faster_than_alone(listed: list[Instruction]) -> None:
    keys = tuple(i.key for i in listed if isinstance(i, Launch))
    found = play([*listed, Run(0, keys)])
    assert sum(i.ps for i in listed if isinstance(i, Run)) <= found.end_ps
    for channel in "abc":
        alone = 0
        for launch in (i for i in listed if isinstance(i, Launch) and i.channel == channel):
            flows = (ceil(f.size / CAPACITIES[f.links[0]]) for f in launch.flows)
            alone += launch.ps + max(flows, default=0)
        assert alone <= found.end_ps
    for link, capacity in enumerate(CAPACITIES):
        using = [f for i in listed if isinstance(i, Launch) for f in i.flows if link in f.links]
        assert sum(f.size for f in using) // capacity <= found.end_ps


def test_a_run_takes_longer_beside_a_transfer_that_slows_it() -> None:
    """Beside a transfer of 600 ps, 480 ps of work are done at 1.25 times."""
    moved = Launch("a", "x", 100, (Flow(500 * SCALE, (0,)),), slows=250)
    found = play([moved, Run(1000)])
    assert found.end_ps == 600 + 520
    assert found.slowed == [[(1, 120)]]
    alone = play([replace(moved, slows=0), Run(1000)])
    assert alone.end_ps == 1000
    assert alone.slowed == [[]]


def test_a_run_is_slowed_by_transfers_that_begin_while_it_runs() -> None:
    """The second transfer of a channel slows, the first does not."""
    first = Launch("a", "x", 400)
    second = Launch("b", "x", 120, slows=200)
    found = play([first, second, Run(1000)])
    assert found.slowed == [[(2, 20)]]
    assert found.end_ps == 1020


def test_slowed_runs_are_the_same_when_played_on_from_a_state() -> None:
    moved = Launch("a", "x", 100, (Flow(900 * SCALE, (0,)),), slows=189)
    whole = play([moved, Run(300), Run(300), Run(900)])
    first = play([moved, Run(300)])
    second = Engine([[Run(300), Run(900)]], CAPACITIES, first.state).play()
    assert first.end_ps + second.end_ps == whole.end_ps
    assert whole.slowed[0] == [
        *first.slowed[0],
        *((index + 2, ps) for index, ps in second.slowed[0]),
    ]
