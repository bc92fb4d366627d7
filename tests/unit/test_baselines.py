"""Baselines on hand-made graphs."""

import random

import pytest

from parloom.comparators.baselines import (
    data_parallel,
    fsdp,
    megatron,
    random_plan,
    random_plans,
)
from parloom.comparators.configuration import Configuration, mesh_of
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg import Compute, Movement
from parloom.ir.plan import Decisions
from tests.unit.graphs import cluster, fused, graph, node, perceptron, stack

CLUSTER = cluster(2, 2)


def factors(plan: Decisions) -> dict[str, dict[str, tuple[str, ...]]]:
    return {n.key: dict(n.factors) for n in plan.nodes}


def test_the_tensor_axis_takes_the_fastest_links() -> None:
    mesh = mesh_of(Configuration(tensor=4, data=2), cluster(2, 4))
    assert [(a.name, a.size, a.level) for a in mesh.axes] == [("data", 2, 1), ("tensor", 4, 0)]
    assert mesh.coordinates(5) == {"data": 1, "tensor": 1}
    assert mesh_of(Configuration(), cluster(1)).num_ranks == 1


def test_a_degree_must_be_a_product_of_links() -> None:
    with pytest.raises(InputError, match="an axis of 4 is no product of the links of toy"):
        mesh_of(Configuration(tensor=4), cluster(2, 3))


def test_data_parallel_shards_samples_only() -> None:
    (plan,) = data_parallel(perceptron(), CLUSTER)
    assert plan.mesh.names == ("data",)
    assert {tuple(f.items()) for f in factors(plan).values()} == {(("d0", ("data",)),)}
    assert plan.parameters == ()


def test_where_samples_divide_over_no_full_mesh_ranks_do_the_same_work() -> None:
    (plan,) = data_parallel(perceptron(batch=6), CLUSTER)
    assert [(a.name, a.size) for a in plan.mesh.axes] == [("data", 2), ("copy", 2)]
    assert {tuple(f.items()) for f in factors(plan).values()} == {(("d0", ("data",)),)}
    (stored,) = fsdp(perceptron(batch=6), CLUSTER)
    assert {p.weight.axes for p in stored.parameters} == {("data", "copy")}
    (thirds,) = data_parallel(perceptron(batch=6), CLUSTER, 3)
    assert [(a.name, a.size) for a in thirds.mesh.axes] == [("data", 2), ("copy", 2)]
    (alone,) = data_parallel(perceptron(batch=3), CLUSTER)
    assert [(a.name, a.size) for a in alone.mesh.axes] == [("copy", 4)]


def test_positions_take_the_ranks_that_samples_leave() -> None:
    (plan,) = data_parallel(stack(1, batch=2, seq=12), cluster(2, 8))
    assert [(a.name, a.size) for a in plan.mesh.axes] == [("data", 2), ("copy", 2), ("context", 4)]
    lower(stack(1, batch=2, seq=12), plan)


def test_only_tensors_with_the_samples_are_sharded() -> None:
    made = graph(
        {"w": (8, 4)},
        {"x": ((8, 4), "float32"), "table": ((5, 4), "float32"), "scale": ((), "float32")},
        node("mul", "x", "w", to="y", shape=(8, 4)),
        node("sum", "table", to="other", shape=()),
        node("sum", "y", to="loss", shape=(), number=1),
    )
    (plan,) = data_parallel(made, CLUSTER)
    assert factors(plan) == {":mul#0": {"d0": ("data",)}, ":sum#1": {"d0": ("data",)}}


def test_fsdp_stores_all_three_in_chunks() -> None:
    (plan,) = fsdp(perceptron(), CLUSTER)
    assert [p.name for p in plan.parameters] == ["down", "up", "up_bias"]
    for parameter in plan.parameters:
        assert parameter.weight == parameter.gradient == parameter.optimizer
        assert parameter.weight.axes == ("data",)
    (alone,) = fsdp(perceptron(), cluster(1))
    assert alone.parameters == ()


def test_megatron_pairs_column_with_row() -> None:
    two, four = megatron(perceptron(), CLUSTER)
    assert [a.size for a in two.mesh.axes] == [2, 2]
    assert factors(two)["up:linear#0"] == {"d0": ("data",), "n": ("tensor",)}
    assert factors(two)["down:linear#0"] == {"d0": ("data",), "k": ("tensor",)}
    assert four.mesh.names == ("tensor",)
    pcg = lower(perceptron(), two)
    moves = [i.step.row for i in pcg.main.body if isinstance(i, Movement)]
    assert moves.count("reduce") == 1, "one all-reduce forward, on the row product"
    assert "combine" not in moves


def test_megatron_shards_heads_inside_a_fused_projection() -> None:
    two, _ = megatron(fused(), CLUSTER)
    found = factors(two)["qkv:linear#0"]
    (factor,) = (f for f, axes in found.items() if axes == ("tensor",))
    rule = factorize(fused()).rule("main", next(fused().flat()).node)
    assert rule.size(factor) in (4, 2)  # heads or their width, never the three projections
    assert len(lower(fused(), two).parameters) == 2


def test_megatron_has_every_degree_where_the_batch_does_not_divide() -> None:
    plans = list(megatron(perceptron(batch=3), cluster(2, 2)))
    assert [p.mesh.names for p in plans] == [("copy", "tensor"), ("tensor",)]


def test_megatron_ends_where_heads_do_not_divide() -> None:
    tokens, heads = (8, 5, 12), (8, 5, 2, 6)
    nodes = []
    for name in "qkv":
        shape = (8, 2, 5, 6)
        nodes += [
            node("linear", "x", f"w{name}", to=name, shape=tokens, path=name),
            node("view", name, heads, to=f"{name}_heads", shape=heads, path=name),
            node("transpose", f"{name}_heads", 1, 2, to=f"{name}_t", shape=shape, path=name),
        ]
    attention = graph(
        {f"w{name}": (12, 12) for name in "qkv"},
        {"x": (tokens, "float32")},
        *nodes,
        node("scaled_dot_product_attention", "q_t", "k_t", "v_t", to="y", shape=(8, 2, 5, 6)),
        node("sum", "y", to="loss", shape=()),
    )
    assert [p.mesh["tensor"].size for p in megatron(attention, cluster(2, 2, 2))] == [2]


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_are_legal_and_repeat(seed: int) -> None:
    made = fused()
    factored = factorize(made)
    mesh = grid({"x": 2, "y": 3})
    plan = random_plan(made, factored, mesh, seed)
    random.seed(seed + 1)  # the global generator has no say
    assert random_plan(made, factored, mesh, seed) == plan
    pcg = lower(made, plan, factored=factored)
    assert sum(isinstance(i, Compute) for i in pcg.main.body) == 6
    for parameter in pcg.parameters:
        decision = parameter.decision
        stored = (bool(decision.weight.axes), bool(decision.gradient.axes))
        assert stored in ((False, False), (False, True), (True, True))
        assert not set(decision.optimizer.axes) & set(parameter.layout.axes)
        if decision.weight.axes:
            assert decision.weight == decision.gradient == decision.optimizer


def test_random_plans_of_a_cluster_use_all_of_it() -> None:
    for seed in range(6):
        (plan,) = random_plans(perceptron(), cluster(2, 4), seed=seed)
        assert plan.mesh.num_ranks == 8
        assert len(plan.mesh.axes) <= 2
