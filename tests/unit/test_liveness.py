"""Activation memory over the passes: it balances, and the peak is where it belongs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.comparators.baselines import random_plan
from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import Kernels
from parloom.cost.liveness import section_ends
from parloom.cost.software import ELEMENTWISE, Software
from parloom.cost.step import priced
from parloom.cost.works import Called, Walked, Work
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg import PCG
from parloom.ir.plan import ActivationDecision, Decisions, one_stage
from parloom.ir.text import parse_graph
from tests.unit.graphs import fused, graph, node, perceptron

BLOCKS = """\
graph "Blocks" training=True

input x: float32[8, 16] = batch("x")
input scale: float32[] = constant("scale", data=2.0)
input up_0: float32[64, 16] = parameter("0.up", trainable=True)
input down_0: float32[16, 64] = parameter("0.down", trainable=True)
input up_1: float32[64, 16] = parameter("1.up", trainable=True)
input down_1: float32[16, 64] = parameter("1.down", trainable=True)

def block(
    hidden: float32[8, 16],
    up: float32[64, 16],
    down: float32[16, 64],
):
    wide: float32[8, 64] = linear(hidden, up)  # up
    active: float32[8, 64] = gelu(wide)  # act
    out: float32[8, 16] = linear(active, down)  # down
    sum: float32[8, 16] = add(hidden, out)
    shown: float32[8, 16] = relu(sum)  # relu
    return sum, shown

main main:
    a: float32[8, 16], b: float32[8, 16] = block["0"](x, up_0, down_0)
    c: float32[8, 16] = mul(a, b)
    d: float32[8, 16], e: float32[8, 16] = block["1"](c, up_1, down_1)
    f: float32[8, 16] = add(d, a)
    g: float32[8, 16] = sub(f, scale)
    loss: float32[] = sum(g)
    return loss

loss loss
"""
CLUSTER = load_cluster("4xcpu")
ROW = 16 * 4  # a sample of the hidden width


def walked(graph: Graph, decisions: Decisions) -> tuple[PCG, Walked]:
    pcg = lower(graph, decisions)
    return pcg, priced(pcg, CLUSTER, decisions).main


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("both", [False, True])
def test_backward_gives_back_what_forward_took(policy: str, both: bool) -> None:
    names = ("0", "1") if both else ("0",)
    activations = tuple(ActivationDecision(name, policy) for name in names)
    _, main = walked(parse_graph(BLOCKS), Decisions(activations=activations))
    assert main.forward.net_bytes + main.backward.net_bytes == 0
    kept = walked(parse_graph(BLOCKS), Decisions())[1]
    least = 8 * ROW * (2 * 4 + 1)  # both widths and the shown result of a block
    assert kept.forward.net_bytes > 2 * least
    if policy != "keep":
        assert main.forward.net_bytes < kept.forward.net_bytes - least + 8 * ROW * 2


@given(st.integers(0, 10**6), st.sampled_from(["blocks", "perceptron", "fused"]))
def test_random_layouts_lose_no_memory(seed: int, name: str) -> None:
    made = {"blocks": parse_graph(BLOCKS), "perceptron": perceptron(), "fused": fused()}
    mesh = grid({"x": 2, "y": 2})
    plan = random_plan(made[name], factorize(made[name]), mesh, seed)
    _, main = walked(made[name], plan)
    assert main.forward.net_bytes + main.backward.net_bytes == 0
    assert main.forward.net_bytes <= main.forward.peak_bytes
    assert main.backward.peak_bytes >= 0


def test_peak_is_where_the_widest_operator_runs_backward() -> None:
    """x [8, 6] -> up 12 -> gelu 12 -> down 4 -> mul 4 -> mean: float32."""
    _, main = walked(perceptron(), Decisions())
    # Kept: h (gelu), a (down), y (mul), and the mean, which is the loss. The product is gone.
    assert main.forward.net_bytes == 8 * (12 + 12 + 4) * 4 + 4
    # Backward of down: h, a, the gradients of y and of a; then a is gone.
    assert main.forward.net_bytes + main.backward.peak_bytes == 8 * (12 + 12 + 4 + 12) * 4 + 4


GATED = graph(
    {"gate": (12, 6), "up": (12, 6), "down": (4, 12)},
    {"x": ((8, 6), "float32")},
    node("linear", "x", "gate", to="a", shape=(8, 12), path="gate"),
    node("linear", "x", "up", to="b", shape=(8, 12), path="up"),
    node("add", "a", "b", to="both", shape=(8, 12)),
    node("gelu", "both", to="c", shape=(8, 12)),
    node("mul", "c", "b", to="d", shape=(8, 12), number=1),
    node("linear", "d", "down", to="y", shape=(8, 4), path="down"),
    node("sum", "y", to="loss", shape=()),
)


@pytest.mark.parametrize(("merges", "kept"), [("", 4), (ELEMENTWISE, 3)])
def test_what_stays_in_a_merged_kernel_is_made_again_of_what_is_kept(
    merges: str, kept: int
) -> None:
    """Apart, a + b, gelu's result and b are kept, and the product; merged a, b and the product."""
    decisions = Decisions(one_stage(grid({"data": 1})))
    kernels = Kernels(CLUSTER.device, Software("merges", merges=merges))
    main = priced(lower(GATED, decisions), CLUSTER, decisions, kernels=kernels).main
    assert main.inside_bytes == kept * 8 * 12 * 4
    assert main.forward.net_bytes + main.backward.net_bytes == 0
    assert main.forward.net_bytes >= main.inside_bytes


def test_values_die_at_the_end_of_their_section() -> None:
    pcg, main = walked(perceptron(), Decisions())
    assert section_ends(pcg.main.body) == [0, 1, 2, 4, 4]
    given_back = [work.gives for work in main.forward.works]
    # The square is read by the mean, in the same section, which the loss ends.
    assert given_back == [0, 0, 0, 0, 8 * 4 * 4]


def test_gradients_of_parameters_arrive_last_used_first() -> None:
    graph = parse_graph(BLOCKS)
    decisions = Decisions()
    pcg = lower(graph, decisions)
    found = priced(pcg, CLUSTER, decisions)
    names = [value.name for value in pcg.main.inputs]
    arrived = [names[i] for i in found.walker.arrival(found.main.backward)]
    assert arrived == ["down_1", "up_1", "down_0", "up_0"]
    calls = [work for work in found.main.backward.works if isinstance(work, Called)]
    assert [call.prefix for call in calls] == ["1", "0"]
    shares = [
        [work.weights_s / (work.compute_s or 1) for work in works if isinstance(work, Work)]
        for works in (found.walker.call(call.function).backward.works for call in calls)
    ]
    # Nobody wants the gradient of x: all of the first block's backward is for its weights.
    assert shares == [[0, 0, 0.5, 0, 0.5], [0, 0, 1, 1, 1]]
