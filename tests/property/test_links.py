"""Loads on physical links, against transfers that are walked link by link."""

from itertools import permutations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.collectives import collective, group_of
from parloom.cost.embedding import Embedding, embedded, embedding_of, groups_of
from parloom.cost.links import hops, loads
from parloom.cost.walk import Walker
from parloom.errors import InputError, LayoutError
from parloom.ir.mesh import Cluster, Level, Link, Mesh, MeshAxis, PrimeAxis

CHIP = load_cluster("8xTPU-v5e").device
LINK = Link(100e9, 1e-6)
Step = tuple[int, tuple[int, ...], tuple[int, ...]]


def cluster_of(*levels: tuple[int, str]) -> Cluster:
    named = (Level(f"l{i}", size, LINK, fabric=fabric) for i, (size, fabric) in enumerate(levels))
    return Cluster("c", CHIP, tuple(named), "other")


SLICE = cluster_of((2, "line"), (4, "line"))


def at(cluster: Cluster, device: int) -> list[int]:
    found = []
    for level in cluster.levels:
        found.append(device % level.size)
        device //= level.size
    return found


def way(cluster: Cluster, source: int, target: int) -> list[Step]:
    """The links of a torus that a transfer passes, one step after the other."""
    here, there, found = at(cluster, source), at(cluster, target), []
    for dim, level in enumerate(cluster.levels):
        ahead = (there[dim] - here[dim]) % level.size
        up = there[dim] > here[dim]
        if level.fabric == "ring":
            up = 2 * ahead < level.size or (2 * ahead == level.size and here[dim] % 2 == 0)
        while here[dim] != there[dim]:
            before = tuple(here)
            here[dim] = (here[dim] + (1 if up else -1)) % level.size
            found.append((dim, before, tuple(here)))
    return found


def walked(cluster: Cluster, transfers: list[tuple[int, int, float]]) -> dict[int, float]:
    """What the busiest link of each dimension carries."""
    carried: dict[Step, float] = {}
    for source, target, amount in transfers:
        for step in way(cluster, source, target):
            carried[step] = carried.get(step, 0.0) + amount
    most = dict.fromkeys(range(len(cluster.levels)), 0.0)
    for step, amount in carried.items():
        most[step[0]] = max(most[step[0]], amount)
    return most


def lying(mesh: Mesh, axes: tuple[str, ...]) -> Embedding:
    found = embedded(mesh, axes, SLICE)
    assert found is not None
    return found


def ring(groups: list[tuple[int, ...]]) -> list[tuple[int, int, float]]:
    edges = [(g[i], g[(i + 1) % len(g)]) for g in groups for i in range(len(g))]
    return [(a, b, 0.5) for a, b in edges] + [(b, a, 0.5) for a, b in edges]


@st.composite
def tori(draw: st.DrawFn) -> Cluster:
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    return cluster_of(*((n, draw(st.sampled_from(("ring", "line")))) for n in sizes))


@given(tori(), st.randoms(use_true_random=False))
def test_loads_are_those_of_transfers_walked_link_by_link(cluster: Cluster, random: Random) -> None:
    n = cluster.num_devices
    transfers = [
        (random.randrange(n), random.randrange(n), random.choice((0.5, 1.0, 3.0)))
        for _ in range(12)
    ]
    source, target, amount = (np.array(column) for column in zip(*transfers, strict=True))
    found = [own.max() for own in loads(cluster, source, target, amount)]
    assert dict(enumerate(found)) == pytest.approx(walked(cluster, transfers))
    assert hops(cluster, source, target).tolist() == [
        len(way(cluster, a, b)) for a, b, _ in transfers
    ]


@given(tori(), st.randoms(use_true_random=False))
def test_the_rings_of_all_groups_are_loaded_as_walked(cluster: Cluster, random: Random) -> None:
    n = cluster.num_devices
    size = random.choice([k for k in range(2, n + 1) if n % k == 0])
    devices = random.sample(range(n), n)
    groups = [tuple(devices[i : i + size]) for i in range(0, n, size)]
    found = embedding_of(np.array(groups), cluster)
    assert dict(enumerate(found.ring.loads)) == pytest.approx(walked(cluster, ring(groups)))
    every = [(a, b, 1 / (size - 1)) for g in groups for a, b in permutations(g, 2)]
    assert dict(enumerate(found.pairs.loads)) == pytest.approx(walked(cluster, every), abs=1e-8)
    steps = [(g[i], g[(i + 1) % size], 1.0) for g in groups for i in range(size)]
    assert dict(enumerate(found.shift.loads)) == pytest.approx(walked(cluster, steps))
    rows = [(g[i], g[i + 1], 1.0) for g in groups for i in range(size - 1)]
    rows += [(b, a, w) for a, b, w in rows]
    assert dict(enumerate(found.row.loads)) == pytest.approx(walked(cluster, rows))


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ((2,), (2,)),
        ((8,), (8,)),
        ((4, 4), (4, 1)),
        ((4, 4), (1, 4)),
        ((4, 4), (2, 1)),
        ((16, 16), (16, 16)),
        ((2, 4), (2, 4)),
    ],
)
@pytest.mark.parametrize("fabric", ["line", "ring"])
def test_neighbors_cost_as_by_level(
    sizes: tuple[int, ...], taken: tuple[int, ...], fabric: str
) -> None:
    """What formulas say of groups of neighbors, an embedding of them says, too."""
    cluster = cluster_of(*((n, fabric) for n in sizes))
    inside: list[PrimeAxis] = []
    outside: list[PrimeAxis] = []
    for prime in cluster.prime_axes():
        own = [p for p in inside if p.level == prime.level]
        many = int(np.prod([p.size for p in own])) * prime.size
        (inside if many <= taken[prime.level] else outside).append(prime)
    mesh = Mesh((MeshAxis("y", tuple(outside[::-1])), MeshAxis("x", tuple(inside[::-1]))))
    found = embedded(mesh, ("x",), cluster)
    alone = sum(n > 1 for n in taken) == 1
    for kind in (
        *("all_reduce", "all_gather", "all_to_all"),
        *(("shift", "halo_exchange") if alone else ()),
    ):
        group = group_of((mesh["x"],))
        plain = collective(kind, 1e12, group, cluster)
        there = collective(kind, 1e12, group, cluster, embedding=found)
        assert there.seconds == pytest.approx(plain.seconds, 1e-3)


def test_groups_that_are_no_neighbors_share_links() -> None:
    """The price by levels alone does not see it: every other chip of a row."""
    y, x = SLICE.prime_axes()[1:], SLICE.prime_axes()[:1]
    far = Mesh((MeshAxis("a", (y[1],)), MeshAxis("b", (y[0], *x))))
    near = Mesh((MeshAxis("a", (y[0],)), MeshAxis("b", (y[1], *x))))
    assert lying(far, ("a",)).ring.loads == (0.0, 2.0)
    assert lying(near, ("a",)).ring.loads == (0.0, 1.0)


def test_an_order_of_devices_closes_the_ring() -> None:
    """Row by row the way back loads each link twice; around the slice none is used twice."""
    primes = SLICE.prime_axes()[::-1]
    rows, around = (
        Mesh((MeshAxis("x", primes),)),
        Mesh((MeshAxis("x", primes),), (0, 2, 4, 6, 7, 5, 3, 1)),
    )
    assert max(lying(rows, ("x",)).ring.loads) == 1.0
    found = lying(around, ("x",))
    assert found.ring.loads == (0.5, 0.5)
    assert found.ring.hops == 7
    one, other = (
        collective(
            "all_reduce", 1e9, group_of(mesh.axes), SLICE, embedding=embedded(mesh, ("x",), SLICE)
        )
        for mesh in (rows, around)
    )
    assert one.seconds / other.seconds == pytest.approx(9 / 7, 1e-2)


@given(st.permutations(range(8)))
def test_groups_of_an_order_are_groups_of_ranks(order: list[int]) -> None:
    primes = SLICE.prime_axes()
    mesh = Mesh((MeshAxis("a", (primes[2],)), MeshAxis("b", primes[1::-1])), tuple(order))
    groups = groups_of(mesh, ("b",))
    plain = groups_of(Mesh(mesh.axes), ("b",))
    assert groups.tolist() == [[order[r] for r in group] for group in plain]
    assert sorted(plain.ravel().tolist()) == list(range(8))
    for a, b in product(range(2), range(4)):
        rank = plain[a, b]
        assert (mesh["a"].coordinate(rank), mesh["b"].coordinate(rank)) == (a, b)


def test_an_order_has_each_device_once_and_is_for_a_torus() -> None:
    axis = MeshAxis("x", SLICE.prime_axes()[::-1])
    with pytest.raises(LayoutError, match="once each"):
        Mesh((axis,), (0, 1, 2, 3, 4, 5, 6, 6))
    switch = load_cluster("8xH100")
    ordered = Mesh(
        (MeshAxis("x", (PrimeAxis(2, 4, 0), PrimeAxis(2, 2, 0), PrimeAxis(2, 1, 0))),),
        tuple(range(8)),
    )
    with pytest.raises(InputError, match="is for a torus"):
        Walker({}, ordered, switch)
