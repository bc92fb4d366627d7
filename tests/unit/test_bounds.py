"""Bounds of splits against what lists are simulated to take, with weights that stages share."""

from math import inf
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.pipeline import Send, Shared, StageActions, chain, simulate_pipeline
from parloom.cost.timeline import Memory, Played
from parloom.ir.schedules import schedule
from parloom.search.pipelines.bounds import Bound, least_ps

times = st.integers(1, 500)


def played(ps: int) -> Played:
    return Played(ps, (), (), (), Memory())


def stage(index: int, forward: int, backward: int, weights: int, update: int) -> StageActions:
    split = {"F": forward, "B": backward, "W": weights, "REDUCE": 3, "STEP": update, "GATHER": 2}
    return StageActions(f"stage {index}", {kind: played(ps) for kind, ps in split.items()})


def bound(own: StageActions, count: int) -> Bound:
    """What is known of a stage whose passes are split, or are not: the other way takes forever."""
    ps = {kind: found.ps for kind, found in own.actions.items()}
    passes_ps = count * (ps["F"] + ps["B"] + ps.get("W", 0))
    ways: list[tuple[float, float]] = [(passes_ps, inf), (ps["B"], inf)]
    if "W" in ps:
        ways = [(slow, fast) for fast, slow in ways]
    updates_ps = ps["STEP"] + ps["GATHER"]
    return Bound(ways[0], ps["F"], ways[1], ps["REDUCE"], updates_ps, 0.0, 0.0)


@given(
    st.lists(st.tuples(times, times, times, times), min_size=2, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["gpipe", "1f1b", "zb_h1"]),
    st.integers(0, 2_000),
    st.integers(0, 300),
    st.data(),
)
def test_no_list_takes_less(
    each: list[tuple[int, int, int, int]],
    count: int,
    name: str,
    ring_ps: int,
    sent_ps: int,
    data: Any,
) -> None:
    """A ring begins when its members have reduced their own gradients, whatever others still do."""
    ranks = len(each)
    stages = [stage(index, *own) for index, own in enumerate(each)]
    first = data.draw(st.integers(0, ranks - 2))
    ring = Shared((first, data.draw(st.integers(first + 1, ranks - 1))), Send(ring_ps))
    edges = chain(ranks, Send(sent_ps), Send(sent_ps))
    lists = schedule(name, ranks, count)
    if name != "zb_h1":  # one backward pass makes all gradients
        stages = [joined(own) for own in stages]
    found = simulate_pipeline(lists, stages, edges, shared=(ring,))
    split: Any = SimpleNamespace(
        groups=tuple(range(ranks)), costs=(None,) * ranks, num_microbatches=count, repeats=False
    )
    bounds = [bound(own, count) for own in stages]
    assert found.step_ps >= least_ps(split, bounds, edges, (ring,))


def joined(own: StageActions) -> StageActions:
    actions = dict(own.actions)
    actions["B"] = played(actions["B"].ps + actions.pop("W").ps)
    return StageActions(own.name, actions)
