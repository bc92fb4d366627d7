"""How the groups of some mesh axes lie on a torus: what their rings and exchanges, all at once, put
on its links.

Every rank of an SPMD program takes part in a group of its own at the same time, so a link carries
what all groups send over it. A ring goes through a group in the order of the axes' coordinates,
with half of the bytes in each direction. Where every group is a product of places along the
dimensions, collectives may also go dimension by dimension.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from parloom.cost.links import Floats, Ints, hops, is_grid, loads, places
from parloom.errors import InputError
from parloom.ir.mesh import Cluster, Mesh

# Loads are sums of halves and of shares of a group: equal ones are equal to so many digits.
DIGITS = 9


WAYS = MappingProxyType({"shift": "shift", "halo_exchange": "row", "all_to_all": "pairs"})
"""The pattern of an embedding by kind of collective; the others go around rings."""


def goes_along(kinds: Collection[str]) -> bool:
    """Whether some of these kinds of collectives may go dimension by dimension."""
    return any(WAYS.get(kind, "ring") in ("ring", "pairs") for kind in kinds)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Transfers of one kind in all groups at once.

    By level: bytes on the busiest link, and what a device sends on average, for each byte that a
    member sends; `hops`: links that are passed one after the other.
    """

    loads: tuple[float, ...]
    means: tuple[float, ...]
    hops: float


@dataclass(frozen=True, slots=True)
class Along:
    """Collectives along one dimension: members there, and by how much their links are loaded in
    rings, between partners of recursive doubling, and among all; with the links that a message
    passes on average.
    """

    level: int
    size: int
    ring: tuple[float, float]
    pair: tuple[float, float]
    every: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the groups of some axes put on links.

    They have `size` members. `ring`: per byte on an edge, half of it each way; `shift`: per byte to
    the next one; `row`: per byte to each of both neighbors, without the edge from the last to the
    first; `pairs`: per byte that a member sends, an equal part to each other. `along` is empty
    where groups are no products.
    """

    size: int
    ring: Pattern
    shift: Pattern
    row: Pattern
    pairs: Pattern
    along: tuple[Along, ...]

    def amounts(self, kinds: Collection[str]) -> tuple[float, ...]:
        """All numbers that prices of these kinds of collectives grow with, in an order that is the
        same for equal `kind`.
        """
        found: list[float] = []
        for name in ("ring", "shift", "row", "pairs"):
            if any(WAYS.get(kind, "ring") == name for kind in kinds):
                pattern: Pattern = getattr(self, name)
                found += (*pattern.loads, pattern.hops)
        for one in self.along if goes_along(kinds) else ():
            found += (*one.ring, *one.pair, *one.every)
        return tuple(found)

    @property
    def kind(self) -> tuple[tuple[int, int], ...]:
        """Which dimensions the groups are products of: only among equals are amounts compared."""
        return tuple((one.level, one.size) for one in self.along)


def on_torus(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether groups of the axes of `mesh` have embeddings: it is of all devices of a torus.

    Raises `InputError` for an order of devices elsewhere.
    """
    if is_grid(cluster) and mesh.num_ranks == cluster.num_devices:
        return True
    if mesh.order:
        raise InputError(f"an order of devices is for a torus, and {cluster.name} is none")
    return False


@lru_cache(maxsize=4096)
def embedded(mesh: Mesh, axes: tuple[str, ...], cluster: Cluster) -> Embedding | None:
    """The groups of `axes` of a mesh `on_torus`; None for groups of one rank."""
    if mesh.size(axes) < 2:
        return None
    return embedding_of(groups_of(mesh, axes), cluster)


def groups_of(mesh: Mesh, axes: Sequence[str]) -> Ints:
    """[group, member]: the devices of all groups of `axes`, in the order of their coordinates."""
    ranks = np.arange(mesh.num_ranks)
    member, group = np.zeros_like(ranks), np.zeros_like(ranks)
    for axis in mesh.axes:
        if axis.steps:
            continue
        for prime in axis.primes:
            digit = ranks // prime.stride % prime.size
            if axis.name in axes:
                member = member * prime.size + digit
            else:
                group = group * prime.size + digit
    size = mesh.size(tuple(axes))
    found = np.empty((len(ranks) // size, size), dtype=np.int64)
    found[group, member] = np.array(mesh.order) if mesh.order else ranks
    return found


def embedding_of(groups: Ints, cluster: Cluster) -> Embedding:
    """What groups [group, member] of devices of a torus put on its links."""
    after = np.roll(groups, -1, axis=1)
    edges = groups.ravel(), after.ravel()
    halves = np.full(2 * groups.size, 0.5)
    both = np.concatenate(edges), np.concatenate(edges[::-1])
    steps = hops(cluster, *edges).reshape(groups.shape)
    around = float((steps.sum(axis=1) - steps.min(axis=1)).max())
    ring = _pattern(cluster, *both, halves, around)
    shift = _pattern(cluster, *edges, np.ones(groups.size), float(steps.max()))
    beside = groups[:, :-1].ravel(), groups[:, 1:].ravel()
    rows = np.concatenate(beside), np.concatenate(beside[::-1])
    row = _pattern(cluster, *rows, np.ones(len(rows[0])), float(steps[:, :-1].max()))
    pairs, along = _pairs(groups, cluster), tuple(_along(groups, cluster))
    return Embedding(groups.shape[1], ring, shift, row, pairs, along)


def _pattern(cluster: Cluster, source: Ints, target: Ints, amount: Floats, links: float) -> Pattern:
    most = [0.0] * len(cluster.levels)
    sent = [0.0] * len(cluster.levels)
    for load in loads(cluster, source, target, amount):
        most[load.level] = max(most[load.level], load.most)
        sent[load.level] += float(load.amounts.sum()) / cluster.num_devices
    return Pattern(_rounded(most), _rounded(sent), round(links, DIGITS))


def _pairs(groups: Ints, cluster: Cluster) -> Pattern:
    """Everybody to everybody."""
    count, size = groups.shape
    source = np.repeat(groups, size, axis=1).ravel()
    target = np.tile(groups, (1, size)).ravel()
    amount = np.full(len(source), 1 / (size - 1))
    between = float(hops(cluster, source, target).sum()) / (count * size * (size - 1))
    return _pattern(cluster, source, target, amount, between)


def _along(groups: Ints, cluster: Cluster) -> Iterator[Along]:
    """Each dimension that groups are products along; none where one is no such product."""
    where = places(cluster)[:, groups]  # [level, group, member]
    count, size = groups.shape
    levels = []
    for index in range(len(cluster.levels)):
        own = np.sort(where[index], axis=1)
        distinct = 1 + (np.diff(own, axis=1) > 0).sum(axis=1)
        levels.append(int(distinct[0]))
        if (distinct != distinct[0]).any():
            return
    product = 1
    for members in levels:
        product *= members
    if product != size:
        return
    for index, members in enumerate(levels):
        if members > 1:
            # By all other places, and then along the dimension: rows of devices.
            others = np.delete(where, index, axis=0)
            keys = (where[index], *others, np.broadcast_to(np.arange(count)[:, None], groups.shape))
            order = np.lexsort([key.ravel() for key in keys])
            yield _one(groups.ravel()[order].reshape(-1, members), index, cluster)


def _one(rows: Ints, index: int, cluster: Cluster) -> Along:
    """Rows of devices along dimension `index`, each in ascending order."""
    size = rows.shape[1]
    ring = _ring_loads(rows, cluster)
    gaps = hops(cluster, rows[:, :-1].ravel(), rows[:, 1:].ravel()).reshape(len(rows), -1)
    links = float(gaps.sum(axis=1).max()) / (size - 1)
    pairs = _pairs(rows, cluster)
    partners = [_partner(rows, 1 << bit, cluster) for bit in range((size - 1).bit_length())]
    pair = _rounded([sum(loads) / len(partners) for loads in zip(*partners, strict=True)])
    return Along(
        index,
        size,
        (ring[index], round(links, DIGITS)),
        (pair[0], pair[1]),
        (pairs.loads[index], pairs.hops),
    )


def _ring_loads(rows: Ints, cluster: Cluster) -> tuple[float, ...]:
    """By level, the load of rings through `rows`, half of the bytes each way."""
    edges = rows.ravel(), np.roll(rows, -1, axis=1).ravel()
    both = np.concatenate(edges), np.concatenate(edges[::-1])
    return _pattern(cluster, *both, np.full(2 * rows.size, 0.5), 0.0).loads


def _partner(rows: Ints, step: int, cluster: Cluster) -> tuple[float, float]:
    """Load and links of one step of recursive doubling (of a shift where sizes are no powers)."""
    size = rows.shape[1]
    index = np.arange(size)
    other = index ^ step if size & (size - 1) == 0 else (index + step) % size
    source, target = rows.ravel(), rows[:, other].ravel()
    found = _pattern(cluster, source, target, np.ones(rows.size), 0.0)
    return max(found.loads), float(hops(cluster, source, target).mean())


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(number, DIGITS) for number in numbers)
