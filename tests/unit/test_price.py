"""Prices add up; operators and collectives cost what the formulas in their sources say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost import model
from parloom.cost.clusters import load_cluster
from parloom.cost.price import Price, total
from parloom.errors import InputError
from parloom.ir.mesh import MeshAxis, PrimeAxis

GB = 10**9
prices = st.builds(
    Price,
    st.integers(0, 100).map(float),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 99).map(float), st.integers(0, 9)), max_size=4
    ).map(tuple),
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(-9, 9)), max_size=3).map(tuple),
)


@given(prices, prices, prices)
def test_addition_is_associative_with_a_zero(a: Price, b: Price, c: Price) -> None:
    assert (a + b) + c == a + (b + c) == total([a, b, c])
    assert a + Price() == a == total([a])
    assert a.times(2) == a + a


def test_peak_is_the_highest_running_sum() -> None:
    assert Price(memory=(("w", 5), ("a", 7), ("a", -7), ("g", 3))).peak_bytes == 12


def test_roofline_takes_the_slower_of_both() -> None:
    device = load_cluster("8xH100").device
    matmul = model.compute_seconds(989e12, 1, "bfloat16", device)
    assert matmul == pytest.approx(1 / model.MATMUL_EFFICIENCY, rel=1e-3)
    copy = model.compute_seconds(1, 3.35e12, "bfloat16", device)
    assert copy == pytest.approx(1 / model.MEMORY_EFFICIENCY, rel=1e-3)
    assert model.compute_seconds(0, 0, "bfloat16", device) == 0.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", (0, 1.5, 6)),
        ("all_gather", (0, 0.75, 3)),
        ("reduce_scatter", (0, 0.75, 3)),
        ("all_to_all", (0, 0.75, 3)),
    ],
)
def test_ring_bytes(kind: str, expected: tuple[int, float, int]) -> None:
    assert model.traffic(kind, 1.0, ((0, 4),), "nccl") == (expected,)


def test_gloo_reduce_scatter_moves_all_reduce_bytes() -> None:
    group = ((0, 4),)
    (scatter,) = model.traffic("reduce_scatter", 1.0, group, "gloo")
    (reduce,) = model.traffic("all_reduce", 1.0, group, "gloo")
    assert scatter[1] == reduce[1]


def test_two_levels_send_a_share_between_nodes() -> None:
    inside, between = model.traffic("all_reduce", 1.0, ((0, 8), (1, 2)), "nccl")
    assert inside == (0, 2 * 7 / 8, 14)
    assert between == (1, 2 * 1 / 2 / 8, 2)
    inside, between = model.traffic("all_to_all", 1.0, ((0, 8), (1, 2)), "nccl")
    assert inside[1] == pytest.approx(7 / 16)
    assert between[1] == pytest.approx(8 / 16)


def test_one_rank_costs_nothing() -> None:
    assert model.traffic("all_reduce", 1.0, ((0, 1),), "nccl") == ()
    assert model.collective_seconds("all_gather", 1e9, (), load_cluster("8xH100")) == 0.0


# Bus bandwidths in GB/s at 16 GiB: nccl-tests in stas00/ml-engineering@744d01e, network/README.md.
@pytest.mark.parametrize(
    ("spec", "group", "measured"),
    [
        ("8xA100", ((0, 8),), 234.9),
        ("8xH100", ((0, 8),), 370.0),
        ("4x8xB200", ((0, 8), (1, 4)), 381.8),
    ],
)
def test_large_all_reduce_is_near_what_was_measured(
    spec: str, group: model.Group, measured: float
) -> None:
    ranks = 8 if len(group) == 1 else 32
    seconds = model.collective_seconds("all_reduce", 2**34, group, load_cluster(spec))
    bus = 2 * (ranks - 1) / ranks * 2**34 / seconds / GB
    assert bus == pytest.approx(measured, rel=0.12)


def test_gloo_on_one_machine_is_near_what_was_measured() -> None:
    # 4 MiB all_reduce between two processes: 5.04 ms, and 1 KiB: 0.64 ms.
    cluster = load_cluster("2xcpu")
    large = model.collective_seconds("all_reduce", 4 * 2**20, ((0, 2),), cluster)
    small = model.collective_seconds("all_reduce", 1024, ((0, 2),), cluster)
    assert large == pytest.approx(5.04e-3, rel=0.15)
    assert small == pytest.approx(0.64e-3, rel=0.15)


@given(st.sampled_from(model.COLLECTIVES), st.floats(1, 1e10), st.sampled_from([2, 4, 8]))
def test_time_grows_with_bytes_and_never_vanishes(kind: str, size: float, ranks: int) -> None:
    cluster = load_cluster("8xH100")
    less = model.collective_seconds(kind, size, ((0, ranks),), cluster)
    more = model.collective_seconds(kind, size * 2, ((0, ranks),), cluster)
    assert 0 < less < more


def test_group_of_axes_by_level() -> None:
    cluster = load_cluster("2x8xH100")
    tensor = MeshAxis("t", tuple(p for p in cluster.prime_axes() if p.level == 0))
    data = MeshAxis("d", (PrimeAxis(2, 8, 1),))
    assert model.group_of((tensor, data)) == ((0, 8), (1, 2))
    assert model.group_of((data,)) == ((1, 2),)


def test_unknown_collective() -> None:
    with pytest.raises(InputError, match="did you mean 'all_reduce'"):
        model.traffic("allreduce", 1.0, ((0, 2),), "nccl")
