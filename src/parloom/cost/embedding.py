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
PATTERNS = RING, SHIFT, ROW, PAIRS = "ring", "shift", "row", "pairs"
"""How collectives go through their groups; see `Embedding`."""
_OTHERS = MappingProxyType({"shift": SHIFT, "halo_exchange": ROW, "all_to_all": PAIRS})


def pattern_of(kind: str) -> str:
    """The pattern of a kind of collectives."""
    return _OTHERS.get(kind, RING)


def goes_along(patterns: Collection[str]) -> bool:
    """Whether collectives of some of these patterns may go dimension by dimension."""
    return RING in patterns or PAIRS in patterns


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

    def amounts(self, patterns: Collection[str]) -> tuple[float, ...]:
        """All numbers that prices of collectives of these patterns grow with, in an order that is
        the same for equal `kind`.
        """
        along = self.along if goes_along(patterns) else ()
        some: list[Pattern] = [getattr(self, name) for name in PATTERNS if name in patterns]
        return _amounts(some, along)

    def busiest(self, patterns: Collection[str]) -> float:
        """What the busiest links carry, added up over these patterns."""
        return float(sum(max(getattr(self, name).loads) for name in patterns))

    @property
    def kind(self) -> tuple[tuple[int, int], ...]:
        """Which dimensions the groups are products of: only among equals are amounts compared."""
        return kind_of(self.along)


def kind_of(along: Sequence[Along]) -> tuple[tuple[int, int], ...]:
    """See `Embedding.kind`."""
    return tuple((one.level, one.size) for one in along)


def _amounts(patterns: Sequence[Pattern], along: Sequence[Along]) -> tuple[float, ...]:
    found: list[float] = []
    for pattern in patterns:
        found += (*pattern.loads, pattern.hops)
    for one in along:
        found += (*one.ring, *one.pair, *one.every)
    return tuple(found)


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


def transfers(pattern: str, groups: Ints) -> tuple[list[tuple[Ints, Ints]], float]:
    """Which devices of groups [..., group, member] send to which, and so many bytes each for each
    byte that `pattern` counts: there, and back where neighbors send both ways.
    """
    if pattern == PAIRS:
        source, target = np.broadcast_arrays(groups[..., :, None], groups[..., None, :])
        return [(source, target)], 1 / (groups.shape[-1] - 1)
    after = np.roll(groups, -1, axis=-1)
    if pattern == SHIFT:
        return [(groups, after)], 1.0
    if pattern == ROW:
        groups, after = groups[..., :-1], after[..., :-1]
    return [(groups, after), (after, groups)], 0.5 if pattern == RING else 1.0


def one_after_other(pattern: str, steps: Ints) -> Floats:
    """How many links `pattern` passes one after the other, of those that each of its first
    `transfers` passes.
    """
    if pattern == PAIRS:
        count, size, _ = steps.shape[-3:]
        found = steps.sum(axis=(-1, -2, -3)) / (count * size * (size - 1))
    elif pattern == RING:
        found = (steps.sum(axis=-1) - steps.min(axis=-1)).max(axis=-1)
    else:
        found = steps.max(axis=(-1, -2))
    return np.asarray(found, dtype=np.float64)


def embedding_of(groups: Ints, cluster: Cluster) -> Embedding:
    """What groups [group, member] of devices of a torus put on its links."""
    ring, shift, row, pairs = (_pattern(name, groups, cluster) for name in PATTERNS)
    return Embedding(groups.shape[1], ring, shift, row, pairs, along_of(groups, cluster))


def amounts_of(
    pattern: str, groups: Ints, along: tuple[Along, ...], cluster: Cluster
) -> tuple[float, ...]:
    """`Embedding.amounts` of one pattern, of groups that go `along` dimensions."""
    return _amounts([_pattern(pattern, groups, cluster)], along)


def along_of(groups: Ints, cluster: Cluster) -> tuple[Along, ...]:
    """`Embedding.along`, which does not depend on the order of members."""
    return tuple(_along(groups, cluster))


def _pattern(name: str, groups: Ints, cluster: Cluster) -> Pattern:
    sent, amount = transfers(name, groups)
    source, target = (np.concatenate([ends[side].ravel() for ends in sent]) for side in (0, 1))
    carried = loads(cluster, source, target, np.full(len(source), amount))
    most = [float(on_links.max()) for on_links in carried]
    means = [float(on_links.sum()) / cluster.num_devices for on_links in carried]
    passed = float(one_after_other(name, hops(cluster, *sent[0])))
    return Pattern(_rounded(most), _rounded(means), round(passed, DIGITS))


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
    ring, pairs = _pattern(RING, rows, cluster), _pattern(PAIRS, rows, cluster)
    gaps = hops(cluster, rows[:, :-1], rows[:, 1:])
    links = float(gaps.sum(axis=1).max()) / (size - 1)
    partners = [_partner(rows, 1 << bit, cluster) for bit in range((size - 1).bit_length())]
    pair = _rounded([sum(loads) / len(partners) for loads in zip(*partners, strict=True)])
    return Along(
        index,
        size,
        (ring.loads[index], round(links, DIGITS)),
        (pair[0], pair[1]),
        (pairs.loads[index], pairs.hops),
    )


def _partner(rows: Ints, step: int, cluster: Cluster) -> tuple[float, float]:
    """Load and links of one step of recursive doubling (of a shift where sizes are no powers)."""
    size = rows.shape[1]
    index = np.arange(size)
    other = index ^ step if size & (size - 1) == 0 else (index + step) % size
    source, target = rows.ravel(), rows[:, other].ravel()
    carried = loads(cluster, source, target, np.ones(rows.size))
    most = max(float(on_links.max()) for on_links in carried)
    return most, float(hops(cluster, source, target).mean())


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(number, DIGITS) for number in numbers)
