"""Reads by position become views, and only where every element is read in order."""

import pytest

from parloom.ir.graph import Arg, Graph, Node
from parloom.ir.positions import with_views_for_ranges
from tests.unit.graphs import graph, node

ROWS, COLUMNS = 4, 6


def read(rows: Node, columns: Node, shape: tuple[int, ...], *indices: str) -> Graph:
    """mask[rows, columns], with one line to a range."""
    refs: Arg = indices or ("i", "j")
    return graph(
        {},
        {"mask": ((ROWS, COLUMNS), "int64")},
        node("arange", ROWS, to="a", shape=(ROWS,), dtype="int64"),
        node("arange", 0, COLUMNS, 1, to="b", shape=(COLUMNS,), dtype="int64", number=1),
        rows,
        columns,
        node("index", "mask", refs, to="loss", shape=shape, dtype="int64"),
    )


def unsqueezed(source: str, to: str, *shape: int, op: str = "unsqueeze", arg: Arg = 1) -> Node:
    return node(op, source, arg, to=to, shape=shape, dtype="int64", path=to)


IN_ORDER = read(
    unsqueezed("a", "i", ROWS, 1, 1), unsqueezed("b", "j", 1, COLUMNS), (ROWS, 1, COLUMNS)
)
OTHERS = {
    "transposed": read(
        unsqueezed("a", "i", ROWS), unsqueezed("b", "j", COLUMNS, 1), (COLUMNS, ROWS)
    ),
    "a dim of one in front": read(
        unsqueezed("a", "i", 1, ROWS, arg=0), unsqueezed("b", "j", ROWS, op="slice", arg=0),
        (1, ROWS),
    ),
    "both shifted": read(
        unsqueezed("a", "i", ROWS, 1, op="add"), unsqueezed("b", "j", COLUMNS, op="add"),
        (ROWS, COLUMNS),
    ),
}  # fmt: skip
# What stays an index, and the dim that is read in order with the number of index dims after it.
BY_SAMPLE = {
    "shifted": (
        read(
            unsqueezed("a", "i", ROWS, 1, op="add"), unsqueezed("b", "j", COLUMNS), (ROWS, COLUMNS)
        ),
        "i", ((1, 0),),
    ),
    "two dims": (
        read(
            unsqueezed("a", "i", ROWS, 1, 1),
            unsqueezed("b", "j", 2, 3, op="view", arg=(2, 3)),
            (ROWS, 2, 3),
        ),
        "j", ((0, 2),),
    ),
    "one range twice": (
        read(unsqueezed("a", "i", ROWS, 1), unsqueezed("a", "j", ROWS), (ROWS, ROWS)),
        "j", ((0, 1),),
    ),
    "pairs": (read(unsqueezed("a", "i", ROWS), unsqueezed("a", "j", ROWS), (ROWS,)),
              "j", ((0, 0),)),
}  # fmt: skip


def last(made: Graph) -> Node:
    found = made.main.body[-1]
    assert isinstance(found, Node)
    return found


def test_a_read_in_order_is_a_view() -> None:
    made = last(with_views_for_ranges(IN_ORDER))
    assert (made.op, made.refs, made.args[1]) == ("view", ("mask",), (ROWS, 1, COLUMNS))


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_read_stays(name: str) -> None:
    assert last(with_views_for_ranges(OTHERS[name])).op == "index"


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_a_read_in_order_of_some_dims_is_by_sample(name: str) -> None:
    given, index, each = BY_SAMPLE[name]
    made = last(with_views_for_ranges(given))
    assert (made.op, made.refs, made.args[2]) == ("parloom.index_each", ("mask", index), each)
