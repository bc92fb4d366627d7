"""All orders of a few devices on a torus, of which those are kept that some plan may be best with.

Loads of all orders are looked up at once in a table of the ways between pairs of devices. An order
is left out where another has no more of anything that prices of collectives grow with, on the same
dimensions.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from parloom.cost.embedding import DIGITS, WAYS, embedding_of, goes_along, groups_of
from parloom.cost.links import Floats, Ints, hops, loads
from parloom.ir.mesh import Cluster, Mesh


def every_order(
    mesh: Mesh, sent: Mapping[tuple[str, ...], Collection[str]], cluster: Cluster
) -> Iterator[tuple[int, ...]]:
    """Devices by rank, such that no other order is as good for all kinds of collectives that are
    `sent` over some axes, and better for one.
    """
    plain = Mesh(mesh.axes)
    orders = _orders(cluster)
    table = _Table(cluster)
    columns: list[Floats] = []
    kinds: list[Ints] = [np.zeros(len(orders), dtype=np.int64)]
    for axes, kinds_sent in sent.items():
        groups = orders[:, groups_of(plain, axes)]  # [order, group, member]
        for name in dict.fromkeys(WAYS.get(kind, "ring") for kind in kinds_sent):
            columns += table.pattern(name, groups)
        if goes_along(kinds_sent):
            numbers, amounts = _along(groups, cluster)
            kinds.append(numbers)
            columns += list(amounts.T)
    values = np.round(np.array(columns).T, DIGITS)
    kind = np.array(kinds).T
    for own in np.unique(kind, axis=0):
        rows = np.flatnonzero((kind == own).all(axis=1))
        for row in rows[_front(values[rows])]:
            yield tuple(orders[row].tolist())


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
        pairs = [np.array(pair) for pair in product(range(self.size), repeat=2)]
        rows, one = [], np.ones(1)
        for first, last in pairs:
            own = list(loads(cluster, np.array([first]), np.array([last]), one))
            rows.append(np.concatenate([load.amounts.ravel() for load in own]))
        self.level = np.concatenate([np.full(load.amounts.size, load.level) for load in own])
        self.links = np.array(rows)
        first, last = np.array(pairs).T
        self.hops = hops(cluster, first, last)

    def pattern(self, name: str, groups: Ints) -> list[Floats]:
        """The amounts of a pattern of `Embedding`, of groups [order, group, member]."""
        count, peers = len(groups), groups.shape[2] - 1
        after = np.roll(groups, -1, axis=2)
        edges, back = groups * self.size + after, after * self.size + groups
        steps = self.hops[edges]
        if name == "ring":
            around = (steps.sum(axis=2) - steps.min(axis=2)).max(axis=1)
            return [*self._most((edges, back), 0.5), around.astype(float)]
        if name == "shift":
            return [*self._most((edges,), 1.0), steps.max(axis=(1, 2)).astype(float)]
        if name == "row":
            inner = edges[:, :, :-1], back[:, :, :-1]
            return [*self._most(inner, 1.0), steps[:, :, :-1].max(axis=(1, 2)).astype(float)]
        pairs = groups[:, :, :, None] * self.size + groups[:, :, None, :]
        between = self.hops[pairs].reshape(count, -1).sum(axis=1)
        return [
            *self._most((pairs,), 1 / peers),
            between / (groups.shape[1] * (peers + 1) * peers),
        ]

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


def _front(values: Floats) -> NDArray[np.intp]:
    """The rows that no other is better than, one of those that are equal."""
    distinct, first = np.unique(values, axis=0, return_index=True)
    kept: list[int] = []
    for index in np.argsort(distinct.sum(axis=1), kind="stable"):
        row = distinct[index]
        if not any((distinct[other] <= row).all() for other in kept):
            kept.append(int(index))
    return first[kept]
