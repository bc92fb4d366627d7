"""Orders of items: each comes after those that it reads."""

from random import Random

import pytest

from parloom.search.pipelines.orders import orders


@pytest.mark.parametrize("seed", range(20))
def test_items_come_after_those_that_they_read(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(1, 30)
    edges = [
        (source, target)
        for target in range(count)
        for source in rng.sample(range(target), rng.randint(0, min(2, target)))
    ]
    for order in orders(count, edges):
        at = {item: place for place, item in enumerate(order)}
        assert sorted(order) == list(range(count))
        assert all(at[source] < at[target] for source, target in edges)


def test_branches_side_by_side_and_one_after_the_other() -> None:
    """Of two branches that a model runs in turns, a chain has one order."""
    in_turns = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6)]
    execution, depth_first = orders(7, in_turns)
    assert execution == tuple(range(7))
    assert depth_first == (0, 2, 4, 1, 3, 5, 6)
    one_by_one = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]
    assert orders(7, one_by_one)[1] == (0, 3, 1, 4, 2, 5, 6)
    assert orders(3, [(0, 1), (1, 2)]) == ((0, 1, 2),)
