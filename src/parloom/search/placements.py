"""Where the axes of a logical mesh may lie in a cluster: which prime axes each has, and in which
order it goes through its devices.

Of what no price tells apart one is kept: switches and their children are alike, and so are equal
dimensions of a torus. On a torus of up to eight devices all orders are looked at; on larger ones
those in which every group of an axis has the same shape, and the axis one of a few ways through it
(`ways_around`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, permutations, product
from math import prod

import numpy as np

from parloom.cost.embedding import (
    PAIRS,
    PATTERNS,
    along_of,
    amounts_of,
    embedding_of,
    goes_along,
    groups_of,
    kind_of,
    on_torus,
    pattern_of,
)
from parloom.cost.links import Ints
from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis
from parloom.search.every_order import every_order, front
from parloom.search.ways_around import row_by_row, ways_through

# Devices of which all orders are looked at.
FEW = 8
# Ways through the devices of one axis that are combined with those of others.
WAYS_OF_AXIS = 3
Primes = tuple[PrimeAxis, ...]
Sent = tuple[tuple[str, tuple[str, ...]], ...]
"""Patterns of collectives, and the axes that each is over."""


@lru_cache(maxsize=256)
def placements(mesh: Mesh, cluster: Cluster, sent: Sent) -> tuple[Mesh, ...]:
    """`mesh` and other ways to lay its axes that prices of what is `sent` may tell apart: all, but
    on a torus of more than `FEW` devices those with the best `WAYS_OF_AXIS` through each axis.
    """
    if not sent or mesh.num_ranks != cluster.num_devices:
        return (mesh,)
    if not on_torus(mesh, cluster):
        return (mesh, *(m for m in _by_levels(mesh, cluster) if m != mesh))
    if mesh.num_ranks > FEW:
        return tuple(dict.fromkeys((mesh, *_ordered(mesh, cluster, sent))))
    patterns = {axes: [name for name, over in sent if over == axes] for _, axes in sent}
    orders = every_order(mesh, patterns, cluster)
    return tuple(dict.fromkeys((mesh, *(with_devices(mesh, order, cluster) for order in orders))))


def fastest_places(
    mesh: Mesh, cluster: Cluster, kind: str, axes: tuple[str, ...]
) -> tuple[Mesh, ...]:
    """Ways that `mesh` may lie for one collective of a kind over `axes`, among them its fastest:
    what `Kernels.places` asks for.
    """
    if any(axis.steps for axis in mesh.axes):
        mesh = Mesh(tuple(axis for axis in mesh.axes if not axis.steps), mesh.order)
    return _fastest_places(mesh, cluster, pattern_of(kind), axes)


@lru_cache(maxsize=4096)
def _fastest_places(
    mesh: Mesh, cluster: Cluster, pattern: str, axes: tuple[str, ...]
) -> tuple[Mesh, ...]:
    if mesh.size(axes) < 2:  # nothing is sent
        return (mesh,)
    if not on_torus(mesh, cluster):
        return placements(mesh, cluster, ((pattern, axes),))
    ranks = groups_of(Mesh(mesh.axes), axes)
    found = [mesh]
    for devices in _fastest_groups(mesh.size(axes), cluster, pattern):
        order = np.empty(mesh.num_ranks, dtype=np.int64)
        order[ranks] = devices
        found.append(Mesh(mesh.axes, tuple(order.tolist())))
    return tuple(found)


@lru_cache(maxsize=1024)
def _fastest_groups(size: int, cluster: Cluster, pattern: str) -> tuple[Ints, ...]:
    """[group, member]: devices of groups of so many members, such that no others are as good for
    collectives of `pattern`, and better in something that their prices grow with.

    On larger tori these are on any of its prime axes, in the ways of one axis through them: those
    that several axes go jointly were no better (`tests/property/test_placements.py`).
    """
    sides = (cluster.num_devices // size, size)
    if cluster.num_devices <= FEW:
        outer, inner = next(assignments(sides, cluster.prime_axes()))
        plain = Mesh((MeshAxis("outer", outer), MeshAxis("inner", inner)))
        members = groups_of(plain, ("inner",))
        orders = every_order(plain, {("inner",): (pattern,)}, cluster)
        return tuple(np.array(order)[members] for order in orders)
    kinds: dict[object, list[tuple[tuple[float, ...], Ints]]] = {}
    for others, own in assignments(sides, cluster.prime_axes()):
        bases = _sums([[prime.stride * i for i in range(prime.size)] for prime in others])
        every = [bases[:, None] + np.array(way) for way in _offsets(own, cluster)]
        along = along_of(every[0], cluster) if goes_along((pattern,)) else ()
        for devices in every[:1] if pattern == PAIRS else every:  # pairs are in no order
            amounts = amounts_of(pattern, devices, along, cluster)
            kinds.setdefault(kind_of(along), []).append((amounts, devices))
    found: list[Ints] = []
    for alike in kinds.values():
        rows = front(np.array([amounts for amounts, _ in alike]))
        found += (alike[row][1] for row in rows)
    return tuple(found)


def _sums(parts: Sequence[Sequence[int]]) -> Ints:
    """All sums of one number of each part, in the order of a product."""
    return np.array([sum(some) for some in product(*parts)], dtype=np.int64)


def assignments(sizes: Sequence[int], primes: Primes) -> Iterator[tuple[Primes, ...]]:
    """Every way to give each axis prime axes that make its size, as sets: slowest first."""
    if not sizes:
        if not primes:
            yield ()
        return
    for count in range(len(primes) + 1):
        for own in combinations(primes, count):
            if prod(p.size for p in own) == sizes[0]:
                rest = tuple(p for p in primes if p not in own)
                for others in assignments(sizes[1:], rest):
                    yield (tuple(sorted(own, key=lambda p: -p.stride)), *others)


def _by_levels(mesh: Mesh, cluster: Cluster) -> Iterator[Mesh]:
    """One mesh for each way to share out the levels: which prime of one it is does not matter."""
    seen: set[tuple[tuple[tuple[int, int], ...], ...]] = set()
    for chosen in assignments([axis.size for axis in mesh.axes], cluster.prime_axes()):
        levels = tuple(tuple((p.level, p.size) for p in own) for own in chosen)
        if levels not in seen:
            seen.add(levels)
            yield _with_primes(mesh, chosen)


def _ordered(mesh: Mesh, cluster: Cluster, sent: Sent) -> Iterator[Mesh]:
    """Assignments of prime axes, each with the best ways of every axis for what is sent over it."""
    seen: set[object] = set()
    patterns = [
        tuple(
            name
            for name in PATTERNS
            if any(name == own and axis.name in over for own, over in sent)
        )
        for axis in mesh.axes
    ]
    for chosen in assignments([axis.size for axis in mesh.axes], cluster.prime_axes()):
        key = _alike(chosen, cluster)
        if key in seen:
            continue
        seen.add(key)
        offsets = [
            _best_ways(own, chosen, cluster, names)
            for own, names in zip(chosen, patterns, strict=True)
        ]
        yield _with_primes(mesh, chosen)
        for combined in product(*offsets):
            yield _with_order(mesh, cluster, [np.array(own) for own in combined])


def _alike(chosen: Sequence[Primes], cluster: Cluster) -> object:
    """The same for assignments that differ by an exchange of equal dimensions."""
    kinds = [(v.size, v.fabric, v.link, v.oversubscription) for v in cluster.levels]
    images = []
    for order in permutations(range(len(kinds))):
        if all(kinds[i] == kinds[j] for i, j in enumerate(order)):
            strides = [_strides(cluster)[level] for level in range(len(kinds))]
            images.append(
                tuple(
                    tuple(sorted((order[p.level], p.stride // strides[p.level]) for p in own))
                    for own in chosen
                )
            )
    return min(images)


def _strides(cluster: Cluster) -> list[int]:
    return [prod(v.size for v in cluster.levels[:index]) for index in range(len(cluster.levels))]


@lru_cache(maxsize=1024)
def _best_ways(
    own: Primes, chosen: tuple[Primes, ...], cluster: Cluster, patterns: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """The devices of an axis in the orders that no other is better than for these patterns, the
    other axes being anywhere: for each coordinate what it adds to a device's number.
    """
    if not own:
        return ((0,),)
    others = [p for axis in chosen for p in axis if p not in own]
    bases = _sums([[p.stride * digit for digit in range(p.size)] for p in others])
    ways = list(_offsets(own, cluster))
    lying = [embedding_of(bases[:, None] + np.array(way), cluster) for way in ways]
    best = sorted(front(np.array([one.amounts(patterns) for one in lying])))
    best.sort(key=lambda index: lying[index].busiest(patterns))
    return tuple(ways[index] for index in best[:WAYS_OF_AXIS])


def _offsets(own: Primes, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Ways through the devices that some primes reach from device 0."""
    sides = []
    for level in range(len(cluster.levels)):
        steps = [[p.stride * i for i in range(p.size)] for p in own if p.level == level]
        sides.append(sorted(sum(digits) for digits in product(*steps)))
    shape = [len(side) for side in sides]
    rows = [row_by_row(shape, order) for order in permutations(range(len(shape)))]
    for way in dict.fromkeys((*rows, *ways_through(shape))):
        yield tuple(sum(side[at] for side, at in zip(sides, place, strict=True)) for place in way)


def _with_primes(mesh: Mesh, chosen: Sequence[Primes]) -> Mesh:
    axes = (replace(axis, primes=own) for axis, own in zip(mesh.axes, chosen, strict=True))
    return Mesh(tuple(axes))


def _with_order(mesh: Mesh, cluster: Cluster, offsets: Sequence[Ints]) -> Mesh:
    """`mesh` with the device of every rank, which is the sum of what its coordinates stand for."""
    devices = np.zeros(mesh.num_ranks, dtype=np.int64)
    for axis, own in zip(mesh.axes, offsets, strict=True):
        devices += own[_coordinates(axis, mesh.num_ranks)]
    return with_devices(mesh, tuple(devices.tolist()), cluster)


def with_devices(mesh: Mesh, order: tuple[int, ...], cluster: Cluster) -> Mesh:
    """The mesh whose rank r is on device `order[r]`: with other prime axes where some number the
    devices so, and else with that order.
    """
    ranks = np.arange(mesh.num_ranks)
    places = np.array([_coordinates(axis, mesh.num_ranks) for axis in mesh.axes])
    chosen: list[Primes] = []
    for index in range(len(mesh.axes)):
        alone = ranks[(np.delete(places, index, axis=0) == 0).all(axis=0)]
        alone = alone[np.argsort(places[index, alone])]
        chosen.append(_sequence([order[rank] for rank in alone], cluster.prime_axes()))
    sizes = [prod(p.size for p in own) for own in chosen]
    if sizes == [axis.size for axis in mesh.axes]:
        found = _with_primes(mesh, chosen)
        if _devices(mesh, found) == order:
            return found
    return Mesh(mesh.axes, order)


def _sequence(devices: Sequence[int], primes: Primes) -> Primes:
    """The primes, most significant first, that may go through `devices` in this order."""
    found: list[PrimeAxis] = []
    unit = 1
    while unit < len(devices):
        prime = next((p for p in primes if p.stride == devices[unit] and p not in found), None)
        if prime is None:
            return ()
        found.append(prime)
        unit *= prime.size
    return tuple(reversed(found))


def _devices(mesh: Mesh, other: Mesh) -> tuple[int, ...]:
    """The device on which `other` has each rank of `mesh`, by its coordinates."""
    place = {tuple(other.coordinates(d).values()): d for d in range(other.num_ranks)}
    return tuple(place[tuple(mesh.coordinates(r).values())] for r in range(mesh.num_ranks))


def _coordinates(axis: MeshAxis, size: int) -> Ints:
    ranks = np.arange(size)
    index = np.zeros_like(ranks)
    for prime in axis.primes:
        index = index * prime.size + ranks // prime.stride % prime.size
    return index
