"""Context parallelism in prices: what the slowest rank computes, and which exchange is hidden."""

from itertools import product

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.collectives import BACKENDS, collective, group_of
from parloom.cost.kernels import Blocks, Kernels, LocalOperator
from parloom.cost.local_operators import local_operator
from parloom.cost.software import Software
from parloom.cost.step import priced
from parloom.cost.works import Work
from parloom.errors import LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Arg, Graph, TensorSpec
from parloom.ir.lower import lower
from parloom.ir.mesh import Device, Efficiency, Mesh, grid
from parloom.ir.ops import OPS, Assignment, Site
from parloom.ir.ops.attention import blocks_met
from parloom.ir.pcg import PCG, Compute
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from tests.unit.graphs import graph, node

BATCH, HEADS, SEQ, WIDTH = 2, 4, 4096, 64
MESH = grid({"c": 4})
DEVICE = Device("test", (("float32", 100e12),), 1 << 30, 1e12, None, Efficiency(0.5, 0.5, 0.5))
BARE = Software("bare", launch_s=0.0)


def attention(*, causal: bool = True, dropout: float = 0.0, seq: int = SEQ) -> Graph:
    shape = (BATCH, HEADS, seq, WIDTH)
    rest: tuple[Arg, ...] = (None, dropout, causal)
    return graph(
        {n: shape for n in "qkv"},
        {"x": ((1,), "float32")},
        node("scaled_dot_product_attention", "q", "k", "v", *rest, to="y", shape=shape),
        node("sum", "y", to="loss", shape=()),
    )


def met(mesh: Mesh, cut: tuple[int, ...], axes: Assignment) -> tuple[int, int, int]:
    """`blocks_met` of a causal attention whose positions are cut into parts of these sizes."""
    (flat,) = (f for f in attention().flat() if f.node.op != "sum")
    site = Site(flat.node, (TensorSpec((BATCH, HEADS, SEQ, WIDTH), "float32"),) * 3)
    rule = OPS[flat.node.op].rule(site).split({"s": cut, "t": cut})
    rule.check(axes, mesh, "")
    return blocks_met(site, rule, axes, mesh)


def counted(order: list[int | str], ranks: int) -> tuple[float, float]:
    """Scores below the diagonal, on the rank that has most and on average, by counting them.

    `order` are digits of the positions, "c" standing for the rank.
    """
    sizes = [ranks if d == "c" else int(d) for d in order]
    seen = [0] * ranks
    for position, place in enumerate(product(*map(range, sizes))):
        seen[place[order.index("c")]] += position + 1
    return max(seen), sum(seen) / ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("around", [False, True])
def test_chunks_give_the_last_rank_almost_twice_the_mean(ranks: int, around: bool) -> None:
    mesh = grid({"c": ranks})
    axes = {"s": ("c",)} | ({"t": ("c",)} if around else {})
    whole, halves, count = met(mesh, (SEQ,), axes)
    share = (whole + halves / 2) / count
    assert share / 0.5 == pytest.approx((2 * ranks - 1) / ranks)
    most, mean = counted(["c", 64], ranks)
    assert most / mean == pytest.approx((2 * ranks - 1) / ranks, rel=0.02)  # 64 for a chunk


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("around", [False, True])
def test_stripes_are_balanced(ranks: int, around: bool) -> None:
    mesh = grid({"c": ranks})
    axes = {"s1": ("c",)} | ({"t1": ("c",)} if around else {})
    whole, halves, count = met(mesh, (SEQ // ranks, ranks), axes)
    assert (whole, halves, count) == (0, ranks, ranks)
    most, mean = counted([64, "c"], ranks)
    assert most / mean == pytest.approx(1, rel=0.02)


def test_blocks_that_must_be_compared_count_as_whole() -> None:
    """Stripes of pairs, and keys that lie otherwise than queries."""
    assert met(MESH, (SEQ // 8, 4, 2), {"s1": ("c",), "t1": ("c",)}) == (3, 1, 4)
    both = grid({"c": 2, "d": 2})
    assert met(both, (SEQ,), {"s": ("c", "d"), "t": ("d",)}) == (2, 0, 2)
    assert met(both, (SEQ,), {"s": ("c", "d")}) == (3, 1, 4)


def lowered(assignment: Assignment, **how: float) -> PCG:
    made = attention(**how)  # type: ignore[arg-type]
    chosen = NodeDecision(":scaled_dot_product_attention#0", tuple(assignment.items()))
    return lower(made, Decisions(one_stage(MESH), (chosen,)), factored=factorize(made))


def operator(assignment: Assignment, **how: float) -> LocalOperator:
    body = lowered(assignment, **how).main.body
    item = next(i for i in body if isinstance(i, Compute) and "s" in i.rule.size_of)
    return local_operator(item, MESH)


def seconds(operator: LocalOperator) -> float:
    return Kernels(DEVICE, BARE).seconds(operator).forward_s


def test_a_causal_kernel_is_priced_by_its_slowest_rank() -> None:
    plain = seconds(operator({}, causal=False))
    assert seconds(operator({"s": ("c",)}, causal=False)) == pytest.approx(plain / 4)
    chunks = operator({"s": ("c",)})
    assert chunks.blocks == Blocks(3, 1, 4)
    # Three blocks of all keys' four as a whole and one by half, which runs at a lower rate.
    half, whole = 0.5 * (SEQ / 4 + 500) / (SEQ / 4), (SEQ / 4 + 200) / (SEQ / 4)
    work = plain / 4 * SEQ / (SEQ + 200)
    merges = 3 * 3 * 4 * BATCH * HEADS * SEQ / 4 * WIDTH / 0.5e12
    assert seconds(chunks) == pytest.approx(work * (3 * whole + half) / 4 + merges)


def test_dropout_masks_but_leaves_nothing_out() -> None:
    """Probabilities are written out there, and so are those of hidden keys."""
    assert operator({"s": ("c",)}, dropout=0.1).blocks == Blocks()
    assert operator({}, dropout=0.1).blocks == Blocks(0, 1)
    with pytest.raises(LayoutError, match="'t' cannot be sharded"):
        lowered({"s": ("c",), "t": ("c",)}, dropout=0.1)


def works(around: bool, seq: int) -> tuple[Work, Work, float]:
    """Forward and backward work of an attention on four devices of a node, and the seconds of a
    shift of one block of keys and values there.
    """
    cluster = load_cluster("1x4xA100")
    pcg = lowered({"s": ("c",)} | ({"t": ("c",)} if around else {}), seq=seq)
    found = priced(pcg, cluster, pcg.decisions, kernels=Kernels(cluster.device, BARE)).main
    forward, backward = (
        next(w for w in track.works if isinstance(w, Work) and w.kind.startswith("scaled"))
        for track in (found.forward, found.backward)
    )
    block = 2 * BATCH * HEADS * seq // 4 * WIDTH * 4.0
    return forward, backward, collective("shift", block, group_of(MESH.axes), cluster).seconds


def test_a_ring_hides_behind_long_blocks_but_for_its_last_step() -> None:
    forward, backward, shift_s = works(True, 65536)
    plain, *_ = works(False, 65536)
    assert forward.exchange is not None
    assert backward.exchange is not None
    assert plain.compute_s / 4 > shift_s
    slows = BACKENDS["nccl"].slows
    assert forward.compute_s == pytest.approx(plain.compute_s + slows * 3 * shift_s)
    assert forward.exchange.seconds == 0
    assert backward.exchange.seconds == pytest.approx(shift_s)
    # Three blocks are sent, and in the backward pass three again and four blocks of gradients.
    sent = 2 * BATCH * HEADS * 65536 // 4 * WIDTH * 4
    assert [w.exchange.traffic[0][1] for w in (forward, backward) if w.exchange] == [
        pytest.approx(3 * sent), pytest.approx(7 * sent)
    ]  # fmt: skip


def test_a_ring_of_short_blocks_waits_for_them() -> None:
    forward, backward, shift_s = works(True, 64)
    alone, undone, _ = works(False, 64)
    assert forward.exchange is not None
    assert backward.exchange is not None
    exposed = 3 * (shift_s - alone.compute_s / 4)
    assert exposed > 0
    assert forward.exchange.seconds == pytest.approx(exposed)
    exposed = 3 * (2 * shift_s - undone.compute_s / 4) + shift_s
    assert exposed > shift_s
    assert backward.exchange.seconds == pytest.approx(exposed)


def test_gathered_keys_are_no_exchange_of_the_attention() -> None:
    forward, backward, _ = works(False, 512)
    assert forward.exchange is None
    assert backward.exchange is None


def test_a_ring_across_nodes_is_as_fast_as_its_slowest_edge() -> None:
    """Each node has one edge that leaves it, over one device's link."""
    cluster = load_cluster("2x2xA100")
    size = 1e9
    across = collective("shift", size, ((0, 2), (1, 2)), cluster)
    alone = collective("send", size, ((1, 2),), cluster)
    assert across.seconds == pytest.approx(alone.seconds, rel=0.01)
    inside = collective("shift", size, ((0, 2),), cluster)
    assert inside.seconds < across.seconds / 5
