"""Factors across a graph: cuts travel along values, through rules and calls."""

from random import Random

import pytest

from parloom.ir.factors import cut_to, factorize, follow
from parloom.ir.graph import Call, Function, Graph, Input, Node, TensorSpec, Value
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import grid
from parloom.ir.ops import Rule
from parloom.ir.ops.cuts import KnownCuts, NodeCuts
from tests.property.searched import random_graph
from tests.unit.graphs import fused, graph, node, perceptron

MESH = grid({"x": 2, "y": 3})


def rules(made: Graph) -> dict[str, Rule]:
    factored = factorize(made)
    return {f.node.key: factored.rule(f.function, f.node) for f in made.flat()}


def sizes(rule: Rule, prefix: str) -> list[int]:
    return [n for f, n in rule.sizes if f.startswith(prefix)]


def test_a_view_lets_its_neighbors_cut_inner_factors() -> None:
    found = rules(fused())
    assert sizes(found["qkv:linear#0"], "n") == [3, 4, 2]
    assert sizes(found["out:linear#0"], "k") == [3, 4, 2]


def test_without_a_view_factors_stay_whole() -> None:
    assert sizes(rules(perceptron())["up:linear#0"], "n") == [12]


def test_cuts_that_do_not_chain_are_dropped() -> None:
    """(2, 6) and (4, 3) cut 12 at 6 and at 3; (3, 4) cuts it at 4, which is no divisor of 6."""
    made = graph(
        {"w": (12,)}, {},
        node("view", "w", (2, 6), to="a", shape=(2, 6)),
        node("view", "w", (4, 3), to="b", shape=(4, 3), number=1),
        node("view", "w", (3, 4), to="c", shape=(3, 4), number=2),
        node("exp", "w", to="e", shape=(12,)),
        node("sum", "e", to="loss", shape=()),
    )  # fmt: skip
    parts = sizes(rules(made)[":exp#0"], "d")
    assert parts in ([2, 2, 3], [3, 2, 2], [3, 4])
    assert parts != [12]


def test_cuts_go_through_calls_both_ways() -> None:
    spec = TensorSpec((12,), "float32")
    inner = Function("block", (Value("i", spec),), (node("exp", "i", to="o", shape=(12,)),), ("o",))
    body = (
        Call("block", "layers.0", ("w",), (Value("h", spec),)),
        node("view", "h", (3, 4), to="v", shape=(3, 4)),
        node("sum", "v", to="loss", shape=()),
    )
    main = Function("main", (Value("w", spec),), body, ("loss",))
    whole = Graph("G", (inner,), main, (Input(Value("w", spec), "parameter", "w", True),), "loss")
    assert sizes(rules(whole)[":exp#0"], "d") == [3, 4]


LINEAR = rules(perceptron())["up:linear#0"]


def test_follow_takes_operands_as_they_lie() -> None:
    rows = Layout((Shard("x", 0, 4),))
    assert follow(LINEAR, (rows, Layout(), Layout()), MESH) == {"d0": ("x",)}
    columns = Layout((Shard("y", 0, 4),))
    assert follow(LINEAR, (rows, columns, Layout()), MESH) == {"d0": ("x",), "n": ("y",)}


def test_the_first_operand_that_shards_an_axis_decides() -> None:
    lying = (Layout((Shard("x", 1, 3),)), Layout((Shard("x", 0, 6),)), Layout())
    assert follow(LINEAR, lying, MESH) == {"k": ("x",)}


def test_follow_keeps_the_order_of_joint_axes() -> None:
    joint = Layout((Shard("y", 0, 4), Shard("x", 0, 2)))
    assert follow(LINEAR, (Layout(), joint, Layout()), MESH) == {"n": ("y", "x")}


def test_axes_that_no_factor_takes_are_left_out() -> None:
    made = graph({"w": (6, 4)}, {}, node("cummax", "w", 0, to="loss", shape=(6, 4)))
    (flat,) = made.flat()
    assert isinstance(flat.node, Node)
    found = factorize(made).rule("main", flat.node)
    assert found.shardable == ("d1",)
    assert follow(found, (Layout((Shard("x", 0, 3), Shard("y", 0, 1))),), MESH) == {}


def test_cut_to_makes_following_exact() -> None:
    inner = Layout((Shard("x", 0, 2),))  # [4, 2/x, 2] of the output features
    cut = cut_to(LINEAR, (Layout(), inner, Layout()), grid({"x": 3}))
    mesh = grid({"x": 3})
    assignment = follow(cut, (Layout(), inner, Layout()), mesh)
    assert cut.operand_layout(1, assignment, mesh) == inner
    assert sizes(cut, "n") == [2, 6]


def test_nodes_without_new_cuts_carry_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out, which changes no rule; negative control: after the first time all are."""
    chain = graph(
        {"w": (12,)}, {},
        node("exp", "w", to="a", shape=(12,)),
        node("exp", "a", to="b", shape=(12,), number=1),
        node("view", "b", (3, 4), to="c", shape=(3, 4)),
        node("sum", "c", to="loss", shape=()),
    )  # fmt: skip
    made = [chain, fused(), *(random_graph(Random(seed), 12) for seed in range(30))]
    known, carry = [rules(own) for own in made], NodeCuts.carry

    def always(self: NodeCuts, cuts: KnownCuts) -> None:
        self._seen = -1
        carry(self, cuts)

    def once(self: NodeCuts, cuts: KnownCuts) -> None:
        if self._seen < 0:
            carry(self, cuts)

    for how, same in ((always, True), (once, False)):
        monkeypatch.setattr(NodeCuts, "carry", how)
        assert ([rules(own) for own in made] == known) is same
