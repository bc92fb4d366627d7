"""Spreading layouts of a few tensors over a whole graph."""

from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import grid
from parloom.search.spread import Unfolded, decisions, spread, unfold
from tests.unit.graphs import graph, node, perceptron

MESH = grid({"data": 2, "tensor": 2})
SAMPLES = {"x": Layout((Shard("data", 0, 4),))}


def view(made: Graph) -> Unfolded:
    return unfold(made, factorize(made), MESH)


def chosen(made: Graph, seeds: dict[str, Layout]) -> dict[str, dict[str, tuple[str, ...]]]:
    program = view(made)
    return {n.key: dict(n.factors) for n in decisions(program, spread(program, seeds))}


def test_samples_spread_through_the_graph() -> None:
    assert chosen(perceptron(), SAMPLES) == {
        "up:linear#0": {"d0": ("data",)},
        "act:gelu#0": {"d0": ("data",)},
        "down:linear#0": {"d0": ("data",)},
        ":mul#0": {"d0": ("data",)},
        ":mean#0": {"d0": ("data",)},
    }


def test_nothing_spreads_from_nothing() -> None:
    assert chosen(perceptron(), {}) == {}


def test_a_weight_carries_its_axis_to_where_it_is_contracted() -> None:
    found = chosen(perceptron(), {"up": Layout((Shard("tensor", 0, 6),))})
    assert found["up:linear#0"] == {"n": ("tensor",)}
    assert found["act:gelu#0"] == {"d1": ("tensor",)}
    assert found["down:linear#0"] == {"k": ("tensor",)}
    assert ":mul#0" not in found  # the partial sum is reduced before


def test_a_choice_replaces_what_following_gave() -> None:
    program = view(perceptron())
    kept = spread(program, SAMPLES, lambda index, followed, layouts: {} if index == 1 else followed)
    assert kept[0] == {"d0": ("data",)}
    assert kept[1:] == [{}] * 4


def test_what_depends_on_no_input_is_made_as_it_is_read() -> None:
    made = graph(
        {"w": (8, 6)},
        {"x": ((8, 6), "float32")},
        node("arange", 8, to="rows", shape=(8,), dtype="int64"),
        node("unsqueeze", "rows", 1, to="column", shape=(8, 1), dtype="int64"),
        node("mul", "x", "column", to="scaled", shape=(8, 6)),
        node("mul", "scaled", "w", to="y", shape=(8, 6), number=1),
        node("sum", "y", to="loss", shape=()),
    )
    found = chosen(made, SAMPLES)
    assert found[":arange#0"] == {"d0": ("data",)}
    assert found[":unsqueeze#0"] == {"d0": ("data",)}


def test_values_that_carry_gradients_are_not_sharded_backwards() -> None:
    made = graph(
        {"w": (8, 1)},
        {"x": ((8, 6), "float32")},
        node("exp", "w", to="e", shape=(8, 1)),
        node("mul", "x", "e", to="y", shape=(8, 6)),
        node("sum", "y", to="loss", shape=()),
    )
    assert ":exp#0" not in chosen(made, SAMPLES)
    assert "e" in view(made).differentiable


def test_rows_that_are_looked_up_stay_with_their_index() -> None:
    made = graph(
        {"w": (8, 6)},
        {"x": ((8, 6), "float32"), "order": ((8,), "int64")},
        node("mul", "x", "w", to="rows", shape=(8, 6)),
        node("index", "rows", ("order",), to="found", shape=(8, 6)),
        node("sum", "found", to="loss", shape=()),
    )
    both = SAMPLES | {"order": Layout((Shard("data", 0, 4),))}
    assert chosen(made, both)[":index#0"] == {"i0": ("data",)}
    assert chosen(made, SAMPLES)[":index#0"] == {"w0": ("data",)}
