"""The price of whole lowered plans, on a graph small enough to add up by hand."""

from dataclasses import replace

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import Kernels
from parloom.cost.software import Software
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.ir.text import parse_graph
from tests.unit.step_price import COMPONENTS, StepPrice, price_plan

TEXT = """\
graph "Mlp" training=True

input x: float32[64, 256] = batch("x")
input target: float32[64, 256] = batch("target")
input up: float32[1024, 256] = parameter("up.weight", trainable=True)
input down: float32[256, 1024] = parameter("down.weight", trainable=True)

def block(
    hidden: float32[64, 256],
    up_weight: float32[1024, 256],
    down_weight: float32[256, 1024],
):
    wide: float32[64, 1024] = linear(hidden, up_weight)  # up
    active: float32[64, 1024] = relu(wide)  # act
    out: float32[64, 256] = linear(active, down_weight)  # down
    return out

main main:
    y: float32[64, 256] = block["net"](x, up, down)
    loss: float32[] = mse_loss(y, target)  #
    return loss

loss loss
"""
WEIGHTS = 2 * 1024 * 256 * 4
ROWS = 64 * 4
NAMES = ("up.weight", "down.weight")
DATA = Storage(("data",))
NODES = ("net.up:linear#0", "net.act:relu#0", "net.down:linear#0", ":mse_loss#0")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return parse_graph(TEXT)


def data_parallel(cluster: Cluster, *storages: Storage) -> Decisions:
    mesh = Mesh((MeshAxis("data", tuple(reversed(cluster.prime_axes()))),))
    nodes = tuple(NodeDecision(key, (("d0", ("data",)),)) for key in NODES)
    parameters = tuple(ParameterDecision(name, *storages) for name in NAMES) if storages else ()
    return Decisions(one_stage(mesh), nodes, parameters)


def tensor_parallel(cluster: Cluster) -> Decisions:
    mesh = Mesh((MeshAxis("tensor", tuple(reversed(cluster.prime_axes()))),))
    factors = (("n", "net.up:linear#0"), ("d1", "net.act:relu#0"), ("k", "net.down:linear#0"))
    nodes = tuple(NodeDecision(key, ((factor, ("tensor",)),)) for factor, key in factors)
    return Decisions(one_stage(mesh), nodes)


def price(
    graph: Graph, decisions: Decisions, cluster: Cluster, kernels: Kernels | None = None
) -> StepPrice:
    optimizer = Optimizer("adamw", 2)
    return price_plan(lower(graph, decisions), cluster, decisions, optimizer, kernels)


def test_one_device(graph: Graph) -> None:
    cluster = load_cluster("1xcpu")
    found = price(graph, Decisions(), cluster)
    memory = dict(found.memory)
    assert tuple(memory) == COMPONENTS
    assert memory["weights"] == memory["gradients"] == WEIGHTS
    assert memory["optimizer"] == 2 * WEIGHTS
    # Most is there in relu's backward: its result, that one's gradient, and its operand's. The loss
    # has given back the prediction by then, and lies in as much; x and the target are the batch.
    assert memory["activations"] == 3 * ROWS * 1024 + ROWS * 256
    assert memory["buffers"] == 2 * ROWS * 256
    assert found.price.comm == ()
    assert found.exposed_s == 0
    flops = 2 * 64 * 1024 * 256
    least = 2 * 3 * flops / (cluster.device.rate("float32") * cluster.device.efficiency.matmul)
    update = Kernels(cluster.device).update_s(WEIGHTS, num_states=2)
    assert least < found.step_s - update < 3 * least


def test_data_parallel_reduces_all_weights_once(graph: Graph) -> None:
    cluster = load_cluster("4xcpu")
    decisions = data_parallel(cluster)
    found = price(graph, decisions, cluster)
    assert dict(found.memory)["weights"] == WEIGHTS
    ((level, sent, _),) = found.price.comm
    # 2 (p - 1) / p of the weights; the loss is summed beside them
    assert level == 0
    assert sent == pytest.approx(1.5 * WEIGHTS)
    assert found.exposed_s > 0
    one = price(graph, Decisions(), load_cluster("1xcpu"))
    assert found.forward.price.compute_s < one.forward.price.compute_s


def test_storage_divides_memory(graph: Graph) -> None:
    cluster = load_cluster("4xcpu")
    whole = Storage()
    plain = dict(price(graph, data_parallel(cluster), cluster).memory)
    zero_1 = dict(price(graph, data_parallel(cluster, whole, whole, DATA), cluster).memory)
    zero_2 = dict(price(graph, data_parallel(cluster, whole, DATA, DATA), cluster).memory)
    zero_3 = dict(price(graph, data_parallel(cluster, DATA, DATA, DATA), cluster).memory)
    assert zero_1["optimizer"] < plain["optimizer"]
    assert zero_2["gradients"] == plain["gradients"] // 4
    assert zero_3["weights"] == plain["weights"] // 4
    assert zero_3["optimizer"] == plain["optimizer"] // 4
    # A gathered unit is there twice while it is unpacked.
    assert zero_3["buffers"] >= plain["buffers"] + 2 * WEIGHTS
    host = Storage(("data",), 0, "host")
    offloaded = dict(price(graph, data_parallel(cluster, DATA, DATA, host), cluster).memory)
    assert offloaded["optimizer"] == 0


def test_zero_3_gathers_and_scatters(graph: Graph) -> None:
    cluster = replace(load_cluster("4xcpu"), backend="nccl")
    decisions = data_parallel(cluster, DATA, DATA, DATA)
    found = price(graph, decisions, cluster)
    ((_, sent, _),) = found.price.comm
    # The only unit is the last one, with which the backward pass begins: gathered once.
    assert sent == pytest.approx(2 * 0.75 * WEIGHTS)


def test_tensor_parallel_reduces_activations(graph: Graph) -> None:
    cluster = load_cluster("4xcpu")
    found = price(graph, tensor_parallel(cluster), cluster)
    assert dict(found.memory)["weights"] == WEIGHTS // 4
    # One all_reduce of the block's output forward; its input needs no gradient.
    assert found.forward.price.comm[0][1] == pytest.approx(1.5 * ROWS * 256)
    assert found.backward.price.comm == ()
    assert found.exposed_s == 0


def test_recompute_trades_memory_for_time(graph: Graph) -> None:
    cluster = load_cluster("1xcpu")
    keep = Decisions()
    recompute = replace(keep, activations=(ActivationDecision("net", "recompute"),))
    kept, recomputed = price(graph, keep, cluster), price(graph, recompute, cluster)
    assert recomputed.step_s > kept.step_s
    # A checkpoint stops before the last of two equal products, which saves its operands alone.
    assert recomputed.backward.seconds == pytest.approx(
        kept.backward.seconds + kept.forward.seconds / 2, rel=0.1
    )
    reentrant = Kernels(cluster.device, Software("reentrant", stops_early=False))
    all_again = price(graph, recompute, cluster, kernels=reentrant)
    assert all_again.backward.seconds == pytest.approx(
        kept.backward.seconds + kept.forward.seconds, rel=0.1
    )


def test_microbatches_keep_fewer_activations_and_reduce_once(graph: Graph) -> None:
    cluster = load_cluster("4xcpu")
    one = data_parallel(cluster)
    four = replace(one, num_microbatches=4)
    whole, parts = price(graph, one, cluster), price(graph, four, cluster)
    assert dict(parts.memory)["activations"] * 4 == dict(whole.memory)["activations"]
    assert sum(sent for _, sent, _ in parts.price.comm) == pytest.approx(
        sum(sent for _, sent, _ in whole.price.comm), rel=1e-4
    )


def test_master_weights_count(graph: Graph) -> None:
    cluster = load_cluster("1xcpu")
    plain = Decisions()
    master = replace(plain, master_dtype="float64")
    assert dict(price(graph, master, cluster).memory)["optimizer"] == 3 * 2 * WEIGHTS


def test_prediction_is_what_a_plan_stores(graph: Graph) -> None:
    found = price(graph, Decisions(), load_cluster("1xcpu"))
    prediction = found.prediction()
    assert prediction.peak_bytes == sum(size for _, size in prediction.memory)
    assert (prediction.step_s, prediction.source) == (found.step_s, "spec")
