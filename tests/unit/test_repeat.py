"""Graphs with more blocks, and stages of graphs, against captures of the whole."""

import pytest

from parloom.errors import InputError
from parloom.ir.graph import Call, Graph
from parloom.ir.repeat import repeated, run_of, stage
from parloom.ir.text import parse_graph, print_graph
from tests.unit.graphs import stack


def test_repeating_two_blocks_is_writing_down_all_of_them() -> None:
    assert print_graph(repeated(stack(2), 5)) == print_graph(stack(5))
    assert repeated(stack(2), 2) == stack(2)
    assert print_graph(repeated(stack(3), 1)) == print_graph(stack(1))


def test_a_repeated_graph_reads_back() -> None:
    graph = repeated(stack(2), 4)
    assert parse_graph(print_graph(graph)) == graph
    targets = [i.target for i in graph.of_kind("parameter")]
    assert [t for t in targets if t.endswith("up.weight")] == [
        f"blocks.{i}.up.weight" for i in range(4)
    ]


def test_blocks_that_begin_later_in_their_list_are_counted_on() -> None:
    graph = stack(2)
    moved = parse_graph(
        print_graph(graph).replace("blocks.1", "blocks.4").replace("blocks.0", "blocks.3")
    )
    assert run_of(moved).begin == 3
    assert calls(repeated(moved, 4)) == ["blocks.3", "blocks.4", "blocks.5", "blocks.6"]
    assert calls(repeated(graph, 4)) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_no_run_of_blocks() -> None:
    with pytest.raises(InputError, match="at least twice"):
        run_of(stack(1))
    with pytest.raises(InputError, match="at least one"):
        repeated(stack(2), 0)


def calls(graph: Graph) -> list[str]:
    return [item.prefix for item in graph.main.body if isinstance(item, Call)]


def test_stages_have_every_block_once_and_every_parameter_where_it_is_read() -> None:
    graph = stack(6)
    parts = [
        stage(graph, range(i, i + 2), (i == 0, i == 4))  # two blocks each
        for i in (0, 2, 4)
    ]
    assert [prefix for part in parts for prefix in calls(part)] == calls(graph)
    owned = [{i.target for i in part.of_kind("parameter")} for part in parts]
    assert set.union(*owned) == {i.target for i in graph.of_kind("parameter")}
    assert not owned[0] & owned[1]
    assert not owned[1] & owned[2]
    assert [part.loss is None for part in parts] == [True, True, False]
    assert [bool(part.of_kind("batch")) for part in parts] == [True, True, True]
    (arriving,) = parts[1].of_kind("batch")
    assert arriving.trainable
    assert arriving.value.name == parts[0].outputs[0][1]
