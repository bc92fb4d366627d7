"""List scheduling: every list runs, keeps to memory, and takes as long as a replay of it."""

import random
from dataclasses import replace

import pytest

from parloom.errors import InputError
from parloom.ir.action_lists import check_lists
from parloom.ir.list_schedule import Link, Listed, list_schedule
from parloom.ir.plan import Action
from parloom.ir.schedules import Lists
from parloom.ir.zero_bubble import PassTimes


def _case(seed: int) -> tuple[list[PassTimes], list[Link], list[int], int]:
    """Stages of any graph on ranks that have one or several of them."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    stages = [
        PassTimes(
            rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9),
            forward_bytes=rng.randint(2, 9), backward_bytes=rng.choice([0, 1, 2, 9, 15]),
        )
        for _ in range(count)
    ]  # fmt: skip
    links = [
        Link(a, b, rng.randint(0, 4), rng.choice([None, 0, 3]))
        for b in range(1, count)
        for a in rng.sample(range(b), rng.randint(1, min(2, b)))
    ]
    ranks: list[int] = []
    for _ in stages:
        ranks.append(rng.randint(0, max(ranks, default=-1) + 1))
    return stages, links, ranks, rng.randint(1, 6)


def _groups(ranks: list[int]) -> list[list[int]]:
    return [[s for s, own in enumerate(ranks) if own == rank] for rank in range(max(ranks) + 1)]


def _replay(
    lists: Lists, stages: list[PassTimes], links: list[Link], ranks: list[int]
) -> tuple[int, list[int]]:
    """When the last pass ends, and the most that each rank holds: passes begin as soon as they can
    in the order of their list, messages of one kind between two ranks in the order of the sender's.
    """
    ends: dict[Action, int] = {}
    comes: dict[tuple[Action, int], int] = {}
    free, at = [0] * len(lists), [0] * len(lists)
    held, most = [0] * len(lists), [0] * len(lists)
    sent: dict[tuple[int, int, str], int] = {}
    passes = [[a for a in listed if a.microbatch is not None] for listed in lists]
    while any(at[r] < len(own) for r, own in enumerate(passes)):
        before = list(at)
        for rank, own in enumerate(passes):
            while at[rank] < len(own):
                action = own[at[rank]]
                stage, microbatch = action.stage, action.microbatch
                needs = [(Action("F", microbatch, stage), stage)] if action.kind == "B" else []
                needs += [(Action("B", microbatch, stage), stage)] if action.kind == "W" else []
                for e in links:
                    if action.kind == "F" and e.target == stage:
                        needs.append((Action("F", microbatch, e.source), stage))
                    if action.kind == "B" and e.source == stage and e.backward is not None:
                        needs.append((Action("B", microbatch, e.target), stage))
                if any(need not in comes for need in needs):
                    break
                own_times = stages[stage]
                took = {"F": own_times.forward, "B": own_times.backward, "W": own_times.weights}
                begin = max([free[rank], *(comes[need] for need in needs)])
                free[rank] = ends[action] = begin + took[action.kind]
                comes[action, stage] = ends[action]
                split = any(a.kind == "W" for a in own)
                kept = own_times.backward_bytes if split else 0
                change = {"F": own_times.forward_bytes, "W": -kept}
                change["B"] = kept - own_times.forward_bytes
                held[rank] += change[action.kind]
                most[rank] = max(most[rank], held[rank])
                for e in links:
                    ahead = action.kind == "F" and e.source == stage
                    if ahead or (
                        action.kind == "B" and e.target == stage and e.backward is not None
                    ):
                        other, delay = (e.target, e.forward) if ahead else (e.source, e.backward)
                        assert delay is not None
                        when, peer = ends[action], ranks[other]
                        if peer != rank:
                            key = rank, peer, action.kind
                            when = sent[key] = max(when, sent.get(key, 0)) + delay
                        comes[action, other] = when
                at[rank] += 1
        assert at != before, "the lists wait for each other"
    return max(free), most


@pytest.mark.parametrize("seed", range(60))
def test_lists_run_as_long_as_they_say(seed: int) -> None:
    stages, links, ranks, count = _case(seed)
    edges = [(e.source, e.target, e.backward is not None) for e in links]
    for split in (False, True):
        found = list_schedule(stages, links, ranks, count, split=split)
        assert found is not None
        check_lists(_groups(ranks), found.lists, edges, [range(count)] * len(ranks))
        makespan, _ = _replay(found.lists, stages, links, ranks)
        assert makespan == found.makespan
        work = [s.forward + s.backward + (s.weights if split else 0) for s in stages]
        busiest = max(sum(work[s] for s in own) for own in _groups(ranks))
        assert makespan >= count * busiest


@pytest.mark.parametrize("seed", range(60))
def test_memory_is_kept_and_nothing_waits_forever(seed: int) -> None:
    """With room for one microbatch in all stages of a rank, and a little more, these lists end,
    also where a backward pass leaves more than it takes, until gradients of weights are made.
    """
    stages, links, ranks, count = _case(seed)
    least = [sum(stages[s].forward_bytes for s in own) for own in _groups(ranks)]
    rng = random.Random(seed)
    for split in (False, True):
        more = [(s.backward_bytes - s.forward_bytes) * split for s in stages]
        grown = [
            size + max([0, *(more[s] for s in own)])
            for size, own in zip(least, _groups(ranks), strict=True)
        ]
        limits = [size + rng.randint(0, 9) for size in grown]
        found = list_schedule(stages, links, ranks, count, split=split, limits_bytes=limits)
        assert found is not None
        _, most = _replay(found.lists, stages, links, ranks)
        assert all(a <= b for a, b in zip(most, limits, strict=True))
        least_less = [size - 1 for size in least]
        assert list_schedule(stages, links, ranks, count, limits_bytes=least_less) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_equal_chains_are_as_short_as_1f1b(ranks: int, count: int) -> None:
    """(n + p - 1)(f + b), and less where W is apart."""
    stages = [PassTimes(10, 20, 0) for _ in range(ranks)]
    chain = [Link(i, i + 1) for i in range(ranks - 1)]
    found = list_schedule(stages, chain, range(ranks), count)
    assert found is not None
    assert found.makespan == (count + ranks - 1) * 30
    apart = [PassTimes(10, 10, 10) for _ in range(ranks)]
    split = list_schedule(apart, chain, range(ranks), count, split=True)
    assert split is not None
    assert split.makespan <= found.makespan
    if ranks > 1 and count >= ranks:
        assert split.makespan < found.makespan


def test_several_stages_on_a_rank_make_a_smaller_bubble() -> None:
    """Of four ranks with four stages each, less than half of what waits with one stage each."""
    ranks, chunks, count = 4, 4, 8
    whole = list_schedule(
        [PassTimes(40, 80, 0)] * ranks,
        [Link(i, i + 1) for i in range(ranks - 1)],
        range(ranks),
        count,
    )
    cut = list_schedule(
        [PassTimes(10, 20, 0)] * (ranks * chunks),
        [Link(i, i + 1) for i in range(ranks * chunks - 1)],
        [i % ranks for i in range(ranks * chunks)],
        count,
    )
    assert whole is not None
    assert cut is not None
    least = count * 120
    assert cut.makespan - least < (whole.makespan - least) / 2


def test_a_list_that_lacks_a_pass_is_refused() -> None:
    """The oracle of the tests above can fail."""
    stages, links, ranks, count = _case(3)
    found = list_schedule(stages, links, ranks, count)
    assert found is not None
    edges = [(e.source, e.target, e.backward is not None) for e in links]
    broken = replace(found, lists=(found.lists[0][1:], *found.lists[1:]))
    assert isinstance(broken, Listed)
    with pytest.raises(InputError, match="lacks"):
        check_lists(_groups(ranks), broken.lists, edges, [range(count)] * len(ranks))


def test_bad_input() -> None:
    with pytest.raises(InputError, match="at least 1"):
        list_schedule([PassTimes(1, 1, 0)], [], [0], 0)
    with pytest.raises(InputError, match="later stages"):
        list_schedule([PassTimes(1, 1, 0)] * 2, [Link(1, 0)], [0, 1], 1)
