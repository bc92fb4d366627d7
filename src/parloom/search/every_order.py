"""All orders of a few devices on a torus, of which those are kept that some plan may be best with.

Loads of all orders are looked up at once in a table of the ways between pairs of devices. An order
is left out where another has no more of anything that prices of collectives grow with, on the same
dimensions.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations, product

import numpy as np

from parloom.cost.embedding import (
    DIGITS,
    embedding_of,
    goes_along,
    groups_of,
    one_after_other,
    transfers,
)
from parloom.cost.links import Floats, Ints, hops, loads
from parloom.ir.mesh import Cluster, Mesh


def every_order(
    mesh: Mesh, sent: Mapping[tuple[str, ...], Collection[str]], cluster: Cluster
) -> Iterator[tuple[int, ...]]:
    """Devices by rank, such that no other order is as good for collectives of all patterns that are
    `sent` over some axes, and better for one.
    """
    plain = Mesh(mesh.axes)
    orders = _orders(cluster)
    table = _table(cluster)
    columns: list[Floats] = []
    kinds: list[Ints] = [np.zeros(len(orders), dtype=np.int64)]
    for axes, patterns in sent.items():
        groups = orders[:, groups_of(plain, axes)]  # [order, group, member]
        for name in patterns:
            columns += table.pattern(name, groups)
        if goes_along(patterns):
            numbers, amounts = _along(groups, cluster)
            kinds.append(numbers)
            columns += list(amounts.T)
    values = np.round(np.array(columns).T, DIGITS)
    kind = np.array(kinds).T
    for own in np.unique(kind, axis=0):
        rows = np.flatnonzero((kind == own).all(axis=1))
        for row in rows[front(values[rows])]:
            yield tuple(orders[row].tolist())


@lru_cache(maxsize=8)
def _orders(cluster: Cluster) -> Ints:
    """All permutations, but for those that are the mirror image of another: rank 0 is on one device
    of each set that mirrors of dimensions exchange.
    """
    size = cluster.num_devices
    kept = [
        device
        for device in range(size)
        if device == min(_mirrored(device, flips, cluster) for flips in _flips(cluster))
    ]
    found = [
        [first, *others]
        for first in kept
        for others in permutations([device for device in range(size) if device != first])
    ]
    return np.array(found, dtype=np.int64)


def _flips(cluster: Cluster) -> Iterator[tuple[bool, ...]]:
    yield from product((False, True), repeat=len(cluster.levels))


def _mirrored(device: int, flips: Sequence[bool], cluster: Cluster) -> int:
    found, below = 0, 1
    for level, flip in zip(cluster.levels, flips, strict=True):
        at = device // below % level.size
        found += (level.size - 1 - at if flip else at) * below
        below *= level.size
    return found


class _Table:
    """What a transfer between two devices puts on each link, by the number of the pair."""

    def __init__(self, cluster: Cluster) -> None:
        self.size, self.num_levels = cluster.num_devices, len(cluster.levels)
        pairs = np.array(list(product(range(self.size), repeat=2)))
        rows = [loads(cluster, pair[:1], pair[1:], np.ones(1)) for pair in pairs]
        self.level = np.concatenate([np.full(own.size, i) for i, own in enumerate(rows[0])])
        self.links = np.array([np.concatenate([own.ravel() for own in row]) for row in rows])
        first, last = pairs.T
        self.hops = hops(cluster, first, last)

    def pattern(self, name: str, groups: Ints) -> list[Floats]:
        """The amounts of a pattern of `Embedding`, of groups [order, group, member]."""
        sent, amount = transfers(name, groups)
        pairs = [source * self.size + target for source, target in sent]
        return [*self._most(pairs, amount), one_after_other(name, self.hops[pairs[0]])]

    def _most(self, pairs: Sequence[Ints], amount: float) -> list[Floats]:
        """By level, what its busiest link has where each pair sends so much."""
        count = len(pairs[0])
        total = np.zeros((count, self.links.shape[1]))
        for some in pairs:
            for column in some.reshape(count, -1).T:
                total += self.links[column]
        return [
            amount * total[:, self.level == level].max(axis=1) for level in range(self.num_levels)
        ]


@lru_cache(maxsize=8)
def _table(cluster: Cluster) -> _Table:
    return _Table(cluster)


def _along(groups: Ints, cluster: Cluster) -> tuple[Ints, Floats]:
    """The dimensions that the groups of each order are products along, as a number, and amounts of
    collectives along these: the same for orders of the same groups.
    """
    size, count = cluster.num_devices, len(groups)
    label = np.zeros((count, size), dtype=np.int64)
    lowest = np.broadcast_to(groups.min(axis=2, keepdims=True), groups.shape)
    label[np.arange(count)[:, None], groups.reshape(count, -1)] = lowest.reshape(count, -1)
    codes = label @ (size ** np.arange(size, dtype=np.int64))
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    known: dict[tuple[tuple[int, int], ...], int] = {}
    numbers, amounts = [], []
    for row in first:
        found = embedding_of(groups[row], cluster)
        numbers.append(known.setdefault(found.kind, len(known)))
        own = [number for one in found.along for number in (*one.ring, *one.pair, *one.every)]
        amounts.append(own + [0.0] * (6 * len(cluster.levels) - len(own)))
    return np.array(numbers)[inverse], np.array(amounts)[inverse]


def front(values: Floats) -> list[int]:
    """The rows that no other is better than, one of those that are equal: the least sum first."""
    distinct, first = np.unique(values, axis=0, return_index=True)
    kept: list[int] = []
    for index in np.argsort(distinct.sum(axis=1), kind="stable"):
        row = distinct[index]
        if not any((distinct[other] <= row).all() for other in kept):
            kept.append(int(index))
    return [int(first[index]) for index in kept]
