"""The integer program that extracts functions against an independent search through all choices of
small e-graphs.
"""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from parloom.ir.graph import Graph
from parloom.ir.verify import verify_graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.substitutions import with_function
from parloom.rewrite.take import ends_of
from parloom.search import extraction
from parloom.search.extraction import ANY, Choices, Extraction
from tests.property.test_bodies import LED, computed, random_graph

CALLS, SAME, SEEDS = 24, 1e-3, range(40)


def choices_of(graph: Graph, rng: Random) -> tuple[Choices, Sequence[int]]:
    """Choices of a function with what few rules make of it, and random times."""
    body = Body(graph.main, CALLS)
    body.saturate(LED, 1)
    body.graph.rebuild()
    found = Choices(body, ends_of(graph, graph.main), list(fusions(graph, graph.main)))
    return found, [rng.randrange(1, 1_000) * 1_000_000 for _ in found.every]


def cheaper(choices: Choices, times: Sequence[int], than: float) -> Iterator[float]:
    """The costs of all functions that cost less."""

    def found(makers: dict[Class, int], used: frozenset[int], left: set[Class]) -> Iterator[float]:
        cost = sum(times[at] for at in used)
        if cost >= than:
            return
        left = {own for own in left if own not in choices.given and own not in makers}
        if not left:
            if can_be_computed(choices, makers, used):
                yield cost
            return
        one = min(left, key=lambda own: own.number)
        for at, choice in enumerate(choices.every):
            if one in choice.makes:
                yield from found({**makers, one: at}, used | {at}, {*left, *choice.reads})

    asked = frozenset(at for at, own in enumerate(choices.every) if own.asked)
    read = {one for at in asked for one in choices.every[at].reads}
    yield from found({}, asked, read.union(choices.needed))


def can_be_computed(choices: Choices, makers: dict[Class, int], used: frozenset[int]) -> bool:
    """Whether calls can be made one after the other, those of the function in their order."""
    left, done = set(used), set[int]()
    while left:
        first = min((choices.every[at].place for at in left if choices.every[at].place != ANY),
                    default=ANY)  # fmt: skip
        ready = [
            at
            for at in left
            if choices.every[at].place in {ANY, first}
            and all(one in choices.given or makers[one] in done for one in choices.every[at].reads)
        ]
        if not ready:
            return False
        done.update(ready)
        left -= done
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_cheaper_than_what_is_extracted(seed: int) -> None:
    rng = Random(seed)
    graph = random_graph(rng)
    choices, times = choices_of(graph, rng)
    taken = Extraction(choices, times).solve()
    used = choices.used(taken)
    assert can_be_computed(choices, dict(taken), frozenset(used))
    cost = sum(times[at] for at in used)
    assert not list(cheaper(choices, times, cost * (1 - SAME)))
    assert list(cheaper(choices, times, cost * (1 + SAME)))
    made = with_function(graph, choices.function(taken))
    verify_graph(made)
    assert (computed(made.main)["loss"] == computed(graph.main)["loss"]).all()


@pytest.mark.parametrize(
    ("rounds", "name"), [(extraction.ROUNDS, "_add_support"), (0, "_add_times")]
)
def test_programs_are_told_where_classes_need_themselves(
    rounds: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows of support, and of time where these are not enough: here without any round of them,
    which leaves functions of the same cost.
    """
    asked, costs = list[int](), list[list[int]]()
    add = getattr(extraction.Extraction, name)

    def counted(self: Extraction, *args: object) -> None:
        asked.append(1)
        add(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(extraction.Extraction, name, counted)
        patched.setattr(extraction, "ROUNDS", rounds)
        costs.append(list(map(cost_of, SEEDS)))
    costs.append(list(map(cost_of, SEEDS)))
    assert asked
    assert costs[0] == pytest.approx(costs[1], rel=SAME)


def cost_of(seed: int) -> int:
    rng = Random(seed)
    choices, times = choices_of(random_graph(rng), rng)
    return sum(times[at] for at in choices.used(Extraction(choices, times).solve()))
