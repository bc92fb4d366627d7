"""Collectives: the lecture's table and its corrections, laws that hold for all, measured times."""

from dataclasses import replace
from math import log2, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost import model
from parloom.cost.algorithms import ALGORITHMS
from parloom.cost.clusters import load_cluster
from parloom.cost.collectives import (
    BACKENDS,
    NOTHING,
    Group,
    bound_s,
    candidates,
    collective,
    group_of,
    spans,
)
from parloom.cost.tasks import SHARES, Links
from parloom.cost.works import Exchange
from parloom.errors import InputError
from parloom.ir.mesh import Cluster, Device, Level, Link, MeshAxis, PrimeAxis

GB = 10**9
ALPHA, RATE = 1e-3, 1e6
KINDS = sorted(ALGORITHMS)
MOVED = [kind for kind in KINDS if kind != "halo_exchange"]


def flat(ranks: int, backend: str = "other") -> Cluster:
    """One switch: alpha 1 ms, 1 MB/s in each direction."""
    device = Device("toy", (("float32", 1e12),), 2**30, 1e11)
    return Cluster("flat", device, (Level("bus", ranks, Link(RATE, ALPHA)),), backend)


def two_levels(inside: int, nodes: int, backend: str = "other", shared: float = 1.0) -> Cluster:
    levels = (
        Level("fast", inside, Link(10 * RATE, ALPHA)),
        Level("slow", nodes, Link(RATE, 2 * ALPHA), shared),
    )
    return replace(flat(inside), levels=levels, backend=backend)


def on(
    ranks: int, algorithm: str, size: float = RATE, kind: str = "all_reduce"
) -> tuple[float, ...]:
    """Seconds, total bytes over `size`, and messages of one algorithm on a flat network."""
    found = collective(kind, size, ((0, ranks),), flat(ranks), algorithm)
    ((_, mean, messages),) = found.traffic
    return found.seconds, mean * ranks / size, messages


# --- the lecture's table: N ranks, M bytes ----------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_all_reduce_as_in_the_corrected_table(ranks: int) -> None:
    n, log, m = ranks, log2(ranks), 1.0  # M / B is one second
    expected = {
        "parameter_server": (2 * ALPHA + 2 * n * m, 2 * n, 2),
        "naive": (ALPHA + (n - 1) * m, n * (n - 1), 1),
        "ring": (2 * (n - 1) * ALPHA + 2 * (n - 1) / n * m, 2 * (n - 1), 2 * (n - 1)),
        "tree": (2 * log * (ALPHA + m), 2 * (n - 1), 2 * log),
        "butterfly": (log * (ALPHA + m), n * log, log),
        "halving_doubling": (2 * log * ALPHA + 2 * (n - 1) / n * m, 2 * (n - 1), 2 * log),
    }
    for algorithm, values in expected.items():
        assert on(ranks, algorithm) == pytest.approx(values), algorithm


def test_what_the_slides_say_and_what_is_right() -> None:
    """N = 4, M = 1: totals on the slide are 8, 16 in the table, 8, 8, 8."""
    totals = {name: on(4, name)[1] for name in ("ring", "naive", "tree", "butterfly")}
    assert totals == pytest.approx({"ring": 6, "naive": 12, "tree": 6, "butterfly": 8})
    assert on(4, "parameter_server")[1] == 8
    assert totals["ring"] / 4 == 1.5  # per worker; the slide has 2
    # The slide sets the ring's 2M/B, both phases, against one direction of the server's NM/B.
    assert on(4, "parameter_server", 1e9)[0] / on(4, "ring", 1e9)[0] == pytest.approx(8 / 1.5, 1e-3)
    # "Ring: best latency": it has the worst.
    assert on(64, "ring", 1)[0] > 10 * on(64, "butterfly", 1)[0]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_half_of_an_all_reduce(kind: str) -> None:
    assert on(4, "ring", kind=kind) == pytest.approx((3 * ALPHA + 0.75, 3, 3))
    assert on(4, "halving_doubling", kind=kind) == pytest.approx((2 * ALPHA + 0.75, 3, 2))
    assert on(4, "naive", kind=kind) == pytest.approx((ALPHA + 0.75, 3, 1))


def test_broadcast_and_all_to_all() -> None:
    assert on(8, "tree", kind="broadcast") == pytest.approx((3 * (ALPHA + 1), 7, 3))
    assert on(8, "naive", kind="broadcast") == pytest.approx((ALPHA + 7, 7, 1))
    assert on(8, "chain", kind="broadcast") == pytest.approx((7 * ALPHA + 1, 8, 7))
    # Eight sends are under way at once, one with gloo.
    assert on(8, "direct", kind="all_to_all") == pytest.approx((ALPHA + 7 / 8, 7, 1))
    assert on(16, "direct", kind="all_to_all") == pytest.approx((2 * ALPHA + 15 / 16, 15, 2))
    ((_, mean, messages),) = model.traffic("all_to_all", 8.0, ((0, 8),), flat(8, "gloo"))
    assert (mean, messages) == (7, 7)


def test_one_linear_layer_on_two_devices() -> None:
    """Sends of a GPU, as in the lecture: B samples, Cin x Cout weights."""
    samples, c_in, c_out = 32.0, 8.0, 24.0

    def sent(kind: str, size: float) -> float:
        ((_, mean, _),) = model.traffic(kind, size, ((0, 2),), flat(2, "nccl"))
        return mean

    assert sent("all_reduce", c_in * c_out) == c_in * c_out  # data parallel
    assert sent("all_gather", samples * c_out) == samples * c_out / 2  # split outputs, forward
    assert sent("all_reduce", samples * c_in) == samples * c_in  # and backward
    assert sent("all_reduce", samples * c_out) == samples * c_out  # split inputs, forward
    assert sent("all_gather", samples * c_in) == samples * c_in / 2  # and backward


def test_ranks_beyond_a_power_of_two_cost_two_more_messages() -> None:
    assert on(6, "butterfly") == pytest.approx((4 * (ALPHA + 1), 24, 4))
    assert on(6, "halving_doubling")[0] > on(8, "halving_doubling")[0]


# --- topology ---------------------------------------------------------------------------------


def test_a_ring_leaves_each_node_once() -> None:
    found = collective("all_reduce", 16.0, ((0, 4), (1, 2)), two_levels(4, 2), "ring")
    assert found.order == (0, 1)
    # 2 x 7/8 of the tensor on every edge; four devices share the one that leaves their node.
    assert found.traffic == ((0, 28.0, 2 * 5), (1, 7.0, 2 * 2))


def test_order_of_devices_decides_what_crosses() -> None:
    cluster = two_levels(4, 2)
    orders = {c.order: c for c in candidates("all_reduce", 16.0, ((0, 4), (1, 2)), cluster, "ring")}
    assert orders[1, 0].traffic[1][1] == 4 * orders[0, 1].traffic[1][1]
    orders = {
        c.order: c
        for c in candidates("all_reduce", 16.0, ((0, 4), (1, 2)), cluster, "halving_doubling")
    }
    assert orders[0, 1].traffic == ((0, 24.0, 4), (1, 4.0, 2))
    assert orders[1, 0].traffic == ((0, 12.0, 4), (1, 16.0, 2))
    best = collective("all_reduce", 1e9, ((0, 4), (1, 2)), cluster)
    assert best.order == (0, 1)
    assert "over levels 1, 0" in orders[1, 0].name


def test_groups_share_an_uplink() -> None:
    # Four devices with one port: four groups of two, one device of each node in every group.
    cluster = two_levels(4, 2, shared=4.0)
    alone = collective("all_gather", 2e9, ((1, 2),), cluster, "ring", alone=True)
    together = collective("all_gather", 2e9, ((1, 2),), cluster, "ring")
    assert together.seconds / alone.seconds == pytest.approx(4, 1e-3)
    # Ports of their own do not: rails.
    rails = two_levels(4, 2)
    assert collective("all_gather", 2e9, ((1, 2),), rails, "ring", alone=True) == collective(
        "all_gather", 2e9, ((1, 2),), rails, "ring"
    )
    # One group over all devices uses the port once, whoever counts.
    whole = ((0, 4), (1, 2))
    assert collective("all_gather", 2e9, whole, cluster, "ring") == collective(
        "all_gather", 2e9, whole, cluster, "ring", alone=True
    )


def test_gloo_has_one_ring_and_nccl_one_on_every_link() -> None:
    whole = ((0, 4), (1, 2))
    gloo = collective("all_gather", 1e9, whole, two_levels(4, 2, "gloo"))
    best = collective("all_gather", 1e9, whole, two_levels(4, 2), "ring")
    always, in_pairs = BACKENDS["gloo"].turns["all_gather"]
    turns = always + in_pairs / 7
    assert gloo.seconds == pytest.approx(4 * turns * best.seconds, 1e-2)
    assert gloo.traffic == best.traffic


def test_a_send_takes_the_level_that_joins_the_pair() -> None:
    cluster = two_levels(4, 2, shared=4.0)
    assert collective("send", RATE, ((0, 2),), cluster).seconds == pytest.approx(ALPHA + 0.1)
    one = collective("send", RATE, ((1, 2),), cluster, alone=True)
    assert one.seconds == pytest.approx(2 * ALPHA + 1)
    assert collective("send", RATE, ((1, 2),), cluster).seconds == pytest.approx(2 * ALPHA + 4)


def test_a_pair_in_a_full_mesh_has_one_link() -> None:
    cluster = load_cluster("8xMI300X")
    bus = {
        ranks: (ranks - 1) / ranks * 2 * 2**32
        / collective("all_reduce", 2**32, ((0, ranks),), cluster).seconds
        for ranks in (2, 8)
    }  # fmt: skip
    assert bus[8] / bus[2] == pytest.approx(7, 0.01)


def test_a_torus_uses_all_dimensions() -> None:
    cluster = load_cluster("16xTPU-v4")
    assert [level.size for level in cluster.levels] == [2, 2, 4]
    cluster = load_cluster("256xTPU-v5e")
    found = collective("all_reduce", 1e9, ((0, 16), (1, 16)), cluster)
    assert found.algorithm == "torus"
    assert [mean / 1e9 for _, mean, _ in found.traffic] == pytest.approx([255 / 256] * 2)
    one = collective("all_reduce", 1e9, ((0, 16), (1, 16)), cluster, "hierarchical")
    assert one.seconds / found.seconds > 1.9


def test_without_wrap_around_a_dimension_has_half() -> None:
    ring = load_cluster("256xTPU-v5e")
    line = replace(ring, levels=tuple(replace(v, fabric="line") for v in ring.levels))
    for kind, factor in (("all_reduce", 2), ("all_to_all", 2)):
        once = collective(kind, 1e10, ((0, 16),), ring)
        twice = collective(kind, 1e10, ((0, 16),), line, once.algorithm)
        assert twice.seconds / once.seconds == pytest.approx(factor, 0.05)


def test_switches_that_add_up() -> None:
    found = collective("all_reduce", 1e9, ((0, 8),), load_cluster("8xH100"))
    assert (found.algorithm, found.traffic[0][1]) == ("switch", 1.125e9)
    assert collective("all_reduce", 1e9, ((0, 8),), load_cluster("8xA100")).algorithm == "ring"
    assert collective("all_gather", 1e9, ((0, 8),), load_cluster("8xH100")).algorithm == "ring"


def test_group_of_axes() -> None:
    cluster = load_cluster("2x8xH100")
    tensor = MeshAxis("t", tuple(p for p in cluster.prime_axes() if p.level == 0))
    data = MeshAxis("d", (PrimeAxis(2, 8, 1),))
    assert group_of((tensor, data)) == ((0, 8), (1, 2))
    assert group_of((data,)) == ((1, 2),)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(InputError, match="did you mean 'all_reduce'"):
        collective("allreduce", 1.0, ((0, 2),), flat(2))
    with pytest.raises(
        InputError, match="no algorithm 'rings' for all_reduce; did you mean 'ring'"
    ):
        collective("all_reduce", 1.0, ((0, 2),), flat(2), "rings")
    with pytest.raises(InputError, match="a group of 4 at level 0 has more ranks than flat"):
        collective("all_reduce", 1.0, ((0, 4),), flat(2))
    for size in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="bytes"):
            collective("all_reduce", size, ((0, 2),), flat(2))


# --- laws -------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """One to three levels, slower outwards, of any fabric, oversubscription and back end."""
    levels = []
    rate = 1e9
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.integers(2, 8))
        rate /= draw(st.sampled_from([1, 3, 8]))
        link = Link(rate, draw(st.sampled_from([0.0, 1e-6, 1e-4])), draw(st.sampled_from([0.7, 1])))
        fabric = draw(st.sampled_from(["switch", "switch", "full_mesh", "ring", "line"]))
        shared, reduces = (
            draw(st.sampled_from([1.0, 2.0])),
            fabric == "switch" and draw(st.booleans()),
        )
        levels.append(Level(f"l{index}", size, link, shared, fabric, reduces))
    backend = draw(st.sampled_from(sorted(BACKENDS)))
    return replace(flat(2), levels=tuple(levels), backend=backend)


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, float, Group, Cluster, bool]:
    cluster = draw(clusters())
    kind = draw(st.sampled_from(MOVED))
    sizes = [draw(st.integers(1, level.size)) for level in cluster.levels]
    group = tuple(enumerate(sizes))
    if kind == "send":
        group = ((draw(st.integers(0, len(sizes) - 1)), 2),)
    return kind, draw(st.sampled_from([1.0, 1e3, 1e6, 1e9])), group, cluster, draw(st.booleans())


Question = tuple[str, float, Group, Cluster, bool]


@given(questions())
def test_the_fastest_is_chosen_and_none_beats_the_bound(question: Question) -> None:
    kind, size, group, cluster, alone = question
    found = candidates(kind, size, group, cluster, None, alone)
    best = collective(kind, size, group, cluster, None, alone)
    if not spans(group, cluster):
        assert not found
        assert best == NOTHING
        return
    assert best in found
    assert best.seconds == min(c.seconds for c in found)
    bound = bound_s(kind, size, group, cluster, alone)
    assert bound > 0
    named = [candidates(kind, size, group, cluster, name, alone) for name in ALGORITHMS[kind]
             if name not in ("switch", "torus")]  # fmt: skip
    for cost in (*found, *(c for costs in named for c in costs)):
        assert cost.seconds >= bound * (1 - 1e-9)
        assert 0 <= cost.latency_s <= cost.seconds
        for level, mean, messages in cost.traffic:
            link = cluster.levels[level].link
            assert cost.seconds >= mean / link.payload_bytes_per_s * (1 - 1e-9)
            assert messages >= 0


@given(questions())
def test_more_bytes_take_longer(question: Question) -> None:
    kind, size, group, cluster, alone = question
    less = collective(kind, size, group, cluster, None, alone)
    more = collective(kind, 2 * size, group, cluster, None, alone)
    assert less.seconds <= more.seconds <= 2 * less.seconds * (1 + 1e-9)
    assert (less.seconds < more.seconds) == bool(spans(group, cluster))


@given(questions())
def test_company_never_helps(question: Question) -> None:
    kind, size, group, cluster, _ = question
    alone = collective(kind, size, group, cluster, None, True)
    assert alone.seconds <= collective(kind, size, group, cluster).seconds


@given(
    clusters(), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(2, 8)
)
def test_on_one_level_hierarchical_is_the_ring(cluster: Cluster, kind: str, ranks: int) -> None:
    cluster = replace(cluster, levels=cluster.levels[:1])
    group = ((0, min(ranks, cluster.levels[0].size)),)
    ring = collective(kind, 1e6, group, cluster, "ring")
    other = collective(kind, 1e6, group, cluster, "hierarchical")
    assert other.seconds == pytest.approx(ring.seconds)
    assert [m for *_, m in other.traffic] == [m for *_, m in ring.traffic]


@given(clusters(), st.sampled_from(MOVED))
def test_one_rank_costs_nothing(cluster: Cluster, kind: str) -> None:
    for group in ((), ((0, 1),), tuple((i, 1) for i in range(len(cluster.levels)))):
        assert collective(kind, 1e9, group, cluster) == NOTHING


@given(st.sampled_from(["ring", "tree", "butterfly", "halving_doubling", "hierarchical", "naive"]),
       st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3))  # fmt: skip
def test_every_byte_is_counted_on_one_level(algorithm: str, sizes: list[int]) -> None:
    """Equal links on all levels: the total is that of the flat network, ring apart.

    What leaves a node in a ring passes the levels below as well.
    """
    levels = tuple(Level(f"l{i}", n, Link(RATE, ALPHA)) for i, n in enumerate(sizes))
    cluster = replace(flat(2), levels=levels)
    nested = candidates("all_reduce", 1e6, tuple(enumerate(sizes)), cluster, algorithm)[0]
    total = sum(mean for _, mean, _ in nested.traffic)
    plain = on(prod(sizes), algorithm, 1e6)[1] * 1e6 / prod(sizes)
    if algorithm == "ring":
        assert nested.traffic[0][1] == pytest.approx(plain)
    else:
        assert total == pytest.approx(plain)


# --- what back ends do and what was measured --------------------------------------------------


def test_gloo_reduce_scatter_moves_all_reduce_bytes() -> None:
    cluster = flat(4, "gloo")
    scatter = model.traffic("reduce_scatter", 1.0, ((0, 4),), cluster)
    assert scatter == model.traffic("all_reduce", 1.0, ((0, 4),), cluster)
    assert scatter[0][1] == 1.5


# 4 MiB between hosts, ms: gloo of torch 2.13 over veth pairs shaped to these rates.
@pytest.mark.parametrize(
    ("hosts", "mbit", "kind", "measured_ms"),
    [
        (2, 1000, "all_reduce", 36.8),
        (2, 1000, "all_gather", 28.1),
        (2, 1000, "reduce_scatter", 39.8),
        (2, 1000, "all_to_all", 37.1),
        (4, 1000, "all_reduce", 55.4),
        (4, 1000, "all_gather", 32.2),
        (4, 1000, "reduce_scatter", 57.7),
        (4, 1000, "all_to_all", 44.1),
        (2, 100, "all_reduce", 355.7),
        (2, 100, "all_to_all", 349.9),
        (4, 100, "all_reduce", 529.0),
        (4, 100, "all_gather", 268.0),
        (4, 100, "all_to_all", 413.0),
    ],
)
def test_gloo_over_shaped_links(hosts: int, mbit: int, kind: str, measured_ms: float) -> None:
    link = Link(mbit * 1e6 / 8, 200e-6, 0.96)
    cluster = replace(flat(hosts, "gloo"), levels=(Level("net", hosts, link),))
    found = collective(kind, 4 * 2**20, ((0, hosts),), cluster)
    assert found.seconds * 1e3 == pytest.approx(measured_ms, rel=0.2)


def test_gloo_on_one_machine_is_near_what_was_measured() -> None:
    # 4 MiB all_reduce between two processes: 5.04 ms, and 1 KiB: 0.64 ms.
    cluster = load_cluster("2xcpu")
    large = model.collective_seconds("all_reduce", 4 * 2**20, ((0, 2),), cluster)
    small = model.collective_seconds("all_reduce", 1024, ((0, 2),), cluster)
    assert large == pytest.approx(5.04e-3, rel=0.15)
    assert small == pytest.approx(0.64e-3, rel=0.15)


# nccl-tests in stas00/ml-engineering@744d01e, network/README.md: bytes, and GB/s of bus bandwidth.
@pytest.mark.parametrize(
    ("spec", "group", "size", "bus"),
    [
        ("8xA100", ((0, 8),), 2**34, 234.9),
        ("8xA100", ((0, 8),), 2**26, 171.5),
        ("8xH200", ((0, 8),), 2**34, 482.3),
        ("8xH200", ((0, 8),), 2**24, 219.9),
        ("8xH200", ((0, 8),), 2**20, 39.9),
        ("8xB200", ((0, 8),), 2**34, 845.7),
        ("8xB200", ((0, 6),), 2**33, 778.2),
        ("4x8xB200", ((0, 8), (1, 4)), 2**34, 381.8),
        ("4x8xB200", ((0, 8), (1, 4)), 2**22, 18.9),
        ("4x8xH200", ((0, 8), (1, 4)), 2**32, 364.9),
        ("8xMI300X", ((0, 8),), 2**32, 312.9),
        ("8xMI300X", ((0, 2),), 2**32, 47.7),
    ],
)
def test_nccl_is_near_what_was_measured(spec: str, group: Group, size: int, bus: float) -> None:
    seconds = collective("all_reduce", float(size), group, load_cluster(spec)).seconds
    ranks = prod(n for _, n in group)
    assert 2 * (ranks - 1) / ranks * size / seconds / GB == pytest.approx(bus, rel=0.12)


def test_protocols_follow_the_size() -> None:
    cluster = load_cluster("8xA100")
    names = [collective("all_reduce", float(2**k), ((0, 8),), cluster).name for k in (15, 25, 34)]
    assert names == ["ring LL", "ring LL128", "ring Simple"]


@pytest.mark.parametrize("oversubscription", [1.0, 4.0, 8.0])
def test_levels_are_busy_at_the_rates_that_they_give(oversubscription: float) -> None:
    """A ring through nodes whose uplinks are shared: the slow level has work all the time, the fast
    one as long as its bytes take there.
    """
    cluster = load_cluster("2x8xH100")
    inner, outer = cluster.levels
    cluster = replace(cluster, levels=(inner, replace(outer, oversubscription=oversubscription)))
    found = collective("all_reduce", 1e9, ((0, 8), (1, 2)), cluster)
    busy = dict(found.busy)
    moves_s = found.seconds - found.latency_s
    inside = 2 * 15 / 16 * 1e9 / inner.link.payload_bytes_per_s
    assert 0.9 * inside < busy[0] <= inside * (1 + 1e-9)  # trees send a little less
    links = Links(cluster)
    exchange = Exchange("all_reduce", ("x",), found.traffic, found.seconds, 0.0, busy=found.busy)
    sizes = {
        flow.links: flow.size / SHARES / 1e12 for flow in links.exchange("k|n", exchange).flows
    }
    slowest = max(busy, key=busy.__getitem__)
    assert sizes[slowest,] == pytest.approx(found.seconds)
    assert sizes[0,] / sizes[1,] == pytest.approx(busy[0] / busy[1])
    assert slowest == 1 or oversubscription == 1.0
    assert moves_s >= max(busy.values())
