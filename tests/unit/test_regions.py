"""Which modules of main become blocks by themselves: small ones of like size, standing together."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.ir.fold import unfold
from parloom.ir.graph import Call, Graph
from parloom.ir.text import parse_graph
from parloom.rewrite.regions import regions
from parloom.rewrite.rewrites import rewritten
from tests.unit.graphs import stack


def chain(paths: Sequence[str], rows: Sequence[int] = ()) -> Graph:
    """One operator of each path after the other; of so many rows, 8 where none are given."""
    body = "".join(
        f"    v{i}: float32[{size}] = tanh(x{size}){path and f'  # {path}'}\n"
        for i, (path, size) in enumerate(zip(paths, rows or [8] * len(paths), strict=True))
    )
    sizes = sorted(set(rows) or {8})
    inputs = "".join(f'input x{n}: float32[{n}] = batch("x{n}")\n' for n in sizes)
    return parse_graph(
        f'graph "Chain" training=True\n\n{inputs}\nmain main:\n{body}'
        "    loss: float32[] = sum(v0)\n    return loss\n\nloss loss\n"
    )


def twice(*paths: str) -> list[str]:
    """Two operators of each module, one of them in a layer below it."""
    return [name for path in paths for name in (f"{path}.layer", path)]


def test_entries_of_a_list_are_blocks_but_for_the_last() -> None:
    """What the last one makes again is there when all others still are."""
    paths = twice(*(f"layers.{i}" for i in range(9)))
    assert regions(chain(paths)) == tuple(paths[1:-1:2])
    assert regions(chain([*paths, "head"])) == tuple(paths[1:-1:2])
    assert regions(chain([*paths, "head", "loss"])) == tuple(paths[1::2])


def test_large_modules_are_cut_and_small_ones_are_not() -> None:
    large, small = twice(*(f"large.{i}" for i in range(8))), twice("small.0", "small.1")
    last = twice("last")
    assert regions(chain(large + small + last)) == (*large[1::2], "small.0", "small.1")
    wide = [8] * len(large) + [2] * len(small + last)
    assert regions(chain(large + small + last, wide)) == (*large[1::2], "small")


def test_a_module_whose_parts_are_single_operators_stays_whole() -> None:
    paths = [f"{name}.{i}" for name in ("a", "b", "last") for i in range(4)]
    assert regions(chain(paths)) == ("a", "b")


def test_a_module_is_cut_only_where_parts_make_most_of_it() -> None:
    single, others = [f"a.{i}" for i in range(4)], twice("b.0", "b.1", "last")
    assert regions(chain([*single, *twice("a.4"), *others]))[0] == "a"
    assert regions(chain([*single[:2], *twice("a.4"), *others]))[0] == "a.4"


def test_a_module_with_other_operators_between_its_own_is_cut() -> None:
    paths = [*twice("a.0", "a.1"), "", *twice("a.2", "last")]
    assert regions(chain(paths)) == ("a.0", "a.1", "a.2")
    assert regions(chain([*paths, "a.0", "a.0"])) == ("a.1", "a.2", "last")
    assert regions(chain([p for p in paths if p])) == ("a.0", "a.1", "a.2")
    assert regions(chain([*twice("a.0", "a.1"), *["last.0"] * 28])) == ("a",)


def test_what_makes_little_is_left() -> None:
    paths = twice("a", "b", "last")
    assert regions(chain(["", *paths], [100, *[1] * 6])) == ()
    assert regions(chain(["", *paths], [10, *[1] * 6])) == ("a", "b")


@pytest.mark.parametrize("depth", [2, 3])
def test_repeated_blocks_are_none_of_them(depth: int) -> None:
    assert regions(stack(depth)) == ()
    flat = unfold(stack(depth))
    assert regions(rewritten(flat, [f"block {path}" for path in regions(flat)])) == ()


@given(st.lists(st.tuples(st.lists(st.sampled_from("abc"), max_size=3), st.integers(1, 9))))
def test_all_that_is_named_can_be_a_block(found: list[tuple[list[str], int]]) -> None:
    found = [(["z"], 1), *found]
    graph = chain([".".join(path) for path, _ in found], [rows for _, rows in found])
    named = regions(graph)
    body = rewritten(graph, [f"block {path}" for path in named]).main.body
    assert tuple(item.prefix for item in body if isinstance(item, Call)) == named
