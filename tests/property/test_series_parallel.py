"""Series and parallel parts: the order of random graphs, and what has to be added to it."""

from collections.abc import Iterator
from itertools import combinations, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.ir.series_parallel import DEEPEST, Parallel, Series, Tree, decompose, items_in
from parloom.ir.stages import item_edges, stage_items
from tests.dist import lowered

Pairs = set[tuple[int, int]]

shapes = st.recursive(
    st.just(0),
    lambda inner: st.builds(
        lambda kind, parts: kind(tuple(parts)),
        st.sampled_from([Series, Parallel]),
        st.lists(inner, min_size=2, max_size=4),
    ),
    max_leaves=14,
)


def ordered(tree: Tree) -> Pairs:
    """The pairs that a tree orders."""
    if isinstance(tree, int):
        return set()
    found = {pair for part in tree.parts for pair in ordered(part)}
    if isinstance(tree, Series):
        for one, other in combinations(tree.parts, 2):
            found |= {(a, b) for a in items_in(one) for b in items_in(other)}
    return found


def closure(size: int, edges: Pairs) -> Pairs:
    """All pairs with a path between them."""
    found = set(edges)
    for middle in range(size):
        before = {a for a, b in found if b == middle}
        found |= {(a, b) for a in before for m, b in found if m == middle}
    return found


def numbered(tree: Tree, items: Iterator[int]) -> Tree:
    """A shape with its items numbered as they come."""
    if isinstance(tree, int):
        return next(items)
    return type(tree)(tuple(numbered(part, items) for part in tree.parts))


def check_shape(tree: Tree) -> None:
    """No part is of the kind of what it is a part of; there are at least two parts."""
    if not isinstance(tree, int):
        assert len(tree.parts) >= 2
        for part in tree.parts:
            assert type(part) is not type(tree)
            check_shape(part)


def dropped(size: int, pairs: Pairs, keep: list[bool]) -> Pairs:
    """Some of the pairs that follow from others left out."""
    needed = {
        (a, b)
        for a, b in pairs
        if not any((a, m) in pairs and (m, b) in pairs for m in range(size))
    }
    chosen = {pair for pair, kept in zip(sorted(pairs), keep * len(pairs), strict=False) if kept}
    return needed | chosen


@given(shapes, st.permutations(range(40)), st.lists(st.booleans(), min_size=1, max_size=9))
def test_series_parallel_graphs_come_back(shape: Tree, order: list[int], keep: list[bool]) -> None:
    """Whatever linear order the items have, and whichever edges follow from others."""
    tree = numbered(shape, count())
    size = len(items_in(tree))
    pairs = ordered(tree)
    # Renumber in a random order in which edges still go to later items.
    names: dict[int, int] = {}
    while len(names) < size:
        free = (
            item
            for item in range(size)
            if item not in names and all(a in names for a, b in pairs if b == item)
        )
        item = min(free, key=lambda one: order[one])
        names[item] = len(names)
    pairs = {(names[a], names[b]) for a, b in pairs}
    found = decompose(size, dropped(size, pairs, keep))
    assert ordered(found) == pairs
    assert sorted(items_in(found)) == list(range(size))
    check_shape(found)


graphs = st.integers(1, 12).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.sets(st.sampled_from([(0, 0), *combinations(range(size), 2)])),
    )
)


@given(graphs)
def test_no_dependency_is_lost(graph: tuple[int, Pairs]) -> None:
    size, edges = graph
    edges = {(a, b) for a, b in edges if a < b}
    found = decompose(size, edges)
    assert ordered(found) >= closure(size, edges)
    assert sorted(items_in(found)) == list(range(size))
    check_shape(found)
    place = {item: index for index, item in enumerate(items_in(found))}
    assert all(place[a] < place[b] for a, b in edges)


def test_what_has_to_be_added_is_seen() -> None:
    """An N is no series-parallel order: a pair is added, and no more."""
    edges = {(0, 2), (1, 2), (1, 3)}
    found = decompose(4, edges)
    assert ordered(found) > edges
    assert len(ordered(found)) == 4
    # Beside it, and behind it, nothing is added.
    more = edges | {(4, 5)} | {(item, 6) for item in range(6)}
    assert len(ordered(decompose(7, more)) - closure(7, more)) == 1


def test_graphs_that_no_recursion_takes() -> None:
    """A chain of many items, and sums of sums: what is nested too deep is put into series."""
    many = 2000
    assert decompose(many, {(i, i + 1) for i in range(many - 1)}) == Series(tuple(range(many)))
    long = range(0, 5 * DEEPEST, 2)
    sums = {(i + more, i + 2) for i in long for more in (0, 1)}
    ladder = {(i + side, i + 2 + side) for i in long for side in (0, 1)} | {
        (i, i + 3) for i in long
    }
    for edges in (sums, ladder):
        size = 1 + max(b for _, b in edges)
        place = {item: i for i, item in enumerate(items_in(decompose(size, edges)))}
        assert all(place[a] < place[b] for a, b in edges)


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 3)])
def test_edges_that_go_to_no_later_item(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not go to a later one of 3"):
        decompose(3, [edge])


def test_branches_of_models() -> None:
    """Branches are parallel, and what follows from other edges (the bottom of DLRM is read by the
    products and behind them) is no matter.
    """
    for name, branches in (("mmt", 4), ("candle_uno", 5), ("mlp_unify", 2), ("dlrm", 3)):
        graph = lowered.small_graph(name)
        tree = decompose(len(stage_items(graph)), item_edges(graph))
        assert isinstance(tree, Series)
        (parallel,) = (part for part in tree.parts if isinstance(part, Parallel))
        assert tree.parts[0] is parallel
        assert len(parallel.parts) == branches
        assert all(isinstance(part, Series) for part in parallel.parts)
