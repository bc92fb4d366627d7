"""The integer program that extracts functions against an independent search through all choices of
small e-graphs.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class, classes_in
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


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_is_a_choice(seed: int) -> None:
    """The search above sees choices alone: each call of an e-graph whose operands are there."""
    choices, _ = choices_of(random_graph(Random(seed)), Random(seed))
    graph = choices.body.graph
    every = {(getattr(own.item, "op", ""), own.reads, one) for own in choices.every
             for one in own.makes}  # fmt: skip
    for (op, args, _), owner in graph.nodes():
        reads = tuple(classes_in(graph.renewed(args)))
        if choices.name.keys() >= set(reads):
            assert (op, reads, owner) in every


@pytest.mark.parametrize("sums_first", [True, False])
@pytest.mark.parametrize("dear", [{"v2", "v3"}, {"v0", "v1"}])
def test_of_equal_items_either_is_left(sums_first: bool, dear: set[str]) -> None:
    """Found by a critic: an item that equals one before it by a rule alone was no choice."""
    shape = "float32[4, 6]"
    sums = [f"v0: {shape} = add(x, y)", f"v1: {shape} = linear(v0, w)"]
    products = [f"v2: {shape} = linear(x, w)", f"v3: {shape} = linear(y, w)",
                f"v4: {shape} = add(v2, v3)"]  # fmt: skip
    body = (*sums, *products) if sums_first else (*products, *sums)
    lines = [f"    {line}  # m\n" for line in (*body, f"v5: {shape} = mul(v1, v4)")]
    graph = parse_graph(
        'graph "Equal" training=True\n\n'
        f'input x: {shape} = batch("x")\ninput y: {shape} = batch("y")\n'
        f'input w: float32[6, 6] = parameter("w", trainable=True)\n\nmain main:\n{"".join(lines)}'
        "    loss: float32[] = sum(v5)\n    return loss\n\nloss loss\n"
    )
    found = Body(graph.main, CALLS)
    found.saturate(LED[:1], 3)
    choices = Choices(found, ends_of(graph, graph.main))
    names = (own.item.results[0].name for own in choices.every)
    times = [10**11 if name in dear else 10**9 for name in names]
    used = choices.used(Extraction(choices, times).solve())
    assert dear.isdisjoint(choices.every[at].item.results[0].name for at in used)


@pytest.mark.parametrize(("rounds", "left"), [(extraction.ROUNDS, 0), (0, 1)])
def test_programs_are_told_where_classes_need_themselves(
    rounds: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows of support, which are enough here; without any by places in time, which leave
    functions of the same cost.
    """
    before = list(map(cost_of, SEEDS))
    asked = {"_add_support": 0, "_add_times": 0}
    for name in asked:
        add = getattr(extraction.Extraction, name)

        def counted(self: Extraction, *args: object, name: str = name, add: Any = add) -> None:
            asked[name] += 1
            if name == "_add_times" or rounds:
                add(self, *args)

        monkeypatch.setattr(extraction.Extraction, name, counted)
    monkeypatch.setattr(extraction, "ROUNDS", rounds)
    assert list(map(cost_of, SEEDS)) == pytest.approx(before, rel=SAME)
    assert asked["_add_support"]
    assert bool(asked["_add_times"]) == bool(left)


def cost_of(seed: int) -> int:
    rng = Random(seed)
    choices, times = choices_of(random_graph(rng), rng)
    return sum(times[at] for at in choices.used(Extraction(choices, times).solve()))
