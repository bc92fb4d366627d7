"""Single substitutions on functions: they compute the same, one after the other, too, and follow
from their rules when they are said at once.
"""

from random import Random

import pytest

from parloom.ir.graph import Function, Graph, Node
from parloom.ir.verify import verify_graph
from parloom.rewrite.follows import follows
from parloom.rewrite.rewrites import derived, rewritten
from parloom.rewrite.substitutions import (
    applied,
    directions,
    structure,
    substitutions,
    takes_between,
    with_function,
)
from parloom.rewrite.take import with_takes
from tests.property.test_bodies import computed, random_graph

SEEDS = range(8)
STEPS, ENOUGH = 4, 5


def ops(function: Function) -> list[str]:
    return sorted(item.op for item in function.body if isinstance(item, Node))


def walk(graph: Graph, rng: Random) -> tuple[Function, tuple[str, ...]]:
    """A function after some substitutions drawn alike, and their rules."""
    function, rules = graph.main, list[str]()
    of = directions(function)
    for _ in range(STEPS):
        found = list(substitutions(graph, function, of))
        if not found:
            break
        drawn = rng.choice(found)
        body = applied(graph, function, drawn)
        if body is not None:
            function, rules = body, [*rules, *drawn.rules]
    return function, tuple(dict.fromkeys(rules))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_computes_the_same(seed: int) -> None:
    graph = random_graph(Random(seed))
    expected = computed(graph.main)["loss"]
    found = list(substitutions(graph, graph.main, directions(graph.main)))
    for one in found:
        texts = tuple(map(str, one.takes))
        body = applied(graph, graph.main, one)
        if body is None:
            continue
        assert (computed(body)["loss"] == expected).all()
        # Plans name no rule for what equals a value without any, as a sum of a value and itself.
        if not any(follows(graph.main, take, ()) for take in one.takes):
            assert derived(graph, texts) == with_function(graph, body)


def test_several_are_said_at_once() -> None:
    """Where they follow in few rounds, which they nearly always do."""
    made = 0
    for seed in SEEDS:
        graph = random_graph(Random(seed))
        after, rules = walk(graph, Random(seed))
        verify_graph(with_function(graph, after))
        assert (computed(after)["loss"] == computed(graph.main)["loss"]).all()
        takes = takes_between(graph.main, after, rules)
        if takes is None:
            continue
        made += bool(takes)
        again, known = derived(graph, tuple(map(str, takes))), dict[object, int]()
        assert structure(again.main, known) == structure(after, known)
        assert (computed(again.main)["loss"] == computed(graph.main)["loss"]).all()
        assert {name for take in takes for name in take.rules} <= set(rules)
    assert made >= ENOUGH


@pytest.mark.parametrize("seed", SEEDS)
def test_structure_is_without_names_and_order(seed: int) -> None:
    graph = random_graph(Random(seed))
    known: dict[object, int] = {}
    own = structure(graph.main, known)
    for one in substitutions(graph, graph.main, directions(graph.main)):
        body = applied(graph, graph.main, one)
        if body is None:
            continue
        commutes = one.takes[0].call.op in ("add", "mul") and "_" not in one.rules[0][4:-7]
        assert (structure(body, known) == own) <= (ops(body) == ops(graph.main) and commutes)
    assert structure(rewritten(graph, ()).main, known) == own
    assert structure(with_takes(graph, ()).main, known) == own
