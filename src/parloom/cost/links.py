"""The physical links of a cluster, and what transfers that run at once put on each of them.

A ring or a line has a link from every device to each neighbor, with half of the level's bandwidth,
which counts both; tori go dimension by dimension, the innermost first, the shorter way around. Half
of the ring away, devices at even places go up and those at odd ones down, so that neither direction
has all of it. A switch has a lane up and a lane down for each device, and where it is
oversubscribed an uplink for each child; what leaves a child passes the switches below it, too. In a
full mesh every ordered pair of children has links of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from parloom.ir.mesh import Cluster, Level

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
GRID = frozenset({"ring", "line"})
"""Fabrics that join neighbors only."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What each link of one kind at one level carries, in bytes; all have the same rate.

    `kind`: `up` or `down` (a neighbor's link, a device's lane, a child's uplink), or `pair`.
    """

    level: int
    kind: str
    rate_bytes_per_s: float
    amounts: Floats

    @property
    def most(self) -> float:
        """Bytes on the busiest link."""
        return float(self.amounts.max(initial=0.0))

    @property
    def seconds(self) -> float:
        """How long the busiest link is busy."""
        return self.most / self.rate_bytes_per_s


def is_grid(cluster: Cluster) -> bool:
    """Whether all devices are joined to neighbors only: a torus, or a part of one."""
    levels = [level for level in cluster.levels if level.size > 1]
    return not cluster.parts and bool(levels) and all(level.fabric in GRID for level in levels)


@lru_cache(maxsize=64)
def places(cluster: Cluster) -> Ints:
    """[level, device]: which child of each level a device is below."""
    devices = np.arange(cluster.num_devices)
    below, rows = 1, []
    for level in cluster.levels:
        rows.append(devices // below % level.size)
        below *= level.size
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)


def loads(cluster: Cluster, source: Ints, target: Ints, amount: Floats) -> Iterator[Load]:
    """What transfers from `source` to `target` devices, all at once, put on the links."""
    where = places(cluster)
    start, end = where[:, source], where[:, target]
    switched = [level.fabric not in GRID for level in cluster.levels]
    below = 1
    for index, level in enumerate(cluster.levels):
        above = np.zeros(len(source), dtype=bool)
        for other in range(index + 1, len(cluster.levels)):
            if switched[other]:
                above |= start[other] != end[other]
        moves = start[index] != end[index]
        if level.fabric in GRID:
            # A transfer that a switch above carries does not go along the dimensions below it.
            yield from _neighbors(cluster, index, (start, end), np.where(above, 0.0, amount))
        elif level.fabric == "full_mesh":
            yield _pairs(cluster, index, (start, end), np.where(moves & ~above, amount, 0.0))
        else:
            crossing = np.where(moves | above, amount, 0.0)
            yield from _lanes(cluster, index, (source, target), crossing, below)
        below *= level.size


def hops(cluster: Cluster, source: Ints, target: Ints) -> Ints:
    """How many links each transfer passes: to the other end of a switch it is one."""
    where = places(cluster)
    start, end = where[:, source], where[:, target]
    found = np.zeros(len(source), dtype=np.int64)
    for index, level in enumerate(cluster.levels):
        steps = np.abs(end[index] - start[index])
        if level.fabric == "ring":
            steps = np.minimum(steps, level.size - steps)
        found += steps if level.fabric in GRID else np.minimum(steps, 1)
    return found


def _neighbors(
    cluster: Cluster, index: int, ends: tuple[Ints, Ints], amount: Floats
) -> Iterator[Load]:
    """One dimension of a torus: those below have been gone along, those above not yet."""
    level, (start, end) = cluster.levels[index], ends
    size = level.size
    row = np.zeros(len(amount), dtype=np.int64)
    for other in reversed(range(len(cluster.levels))):
        if other != index:
            at = end[other] if other < index else start[other]
            row = row * cluster.levels[other].size + at
    rows = cluster.num_devices // size
    first, last = start[index], end[index]
    forward = (last - first) % size if level.fabric == "ring" else last - first
    if level.fabric == "ring":
        up = (2 * forward < size) | ((2 * forward == size) & (first % 2 == 0))
        steps = np.where(up, forward, size - forward)
    else:
        up, steps = forward > 0, np.abs(forward)
    rate = level.link.payload_bytes_per_s / 2
    for kind, goes in (("up", up), ("down", ~up)):
        # Links are numbered by their lower end; from there on each transfer passes `steps` of them.
        low = first if kind == "up" else (first - steps) % size
        carried = np.zeros((rows, 2 * size + 1))
        some = goes & (steps > 0) & (amount > 0)
        np.add.at(carried, (row[some], low[some]), amount[some])
        np.add.at(carried, (row[some], low[some] + steps[some]), -amount[some])
        along = carried.cumsum(axis=1)
        yield Load(index, kind, rate, along[:, :size] + along[:, size : 2 * size])


def _pairs(cluster: Cluster, index: int, ends: tuple[Ints, Ints], amount: Floats) -> Load:
    """A full mesh: the devices below two children share the links of these."""
    level, (start, end) = cluster.levels[index], ends
    above = np.zeros(len(amount), dtype=np.int64)
    for other in reversed(range(index + 1, len(cluster.levels))):
        above = above * cluster.levels[other].size + start[other]
    shape = cluster.num_devices // _below(cluster, index + 1), level.size, level.size
    carried = np.zeros(shape)
    np.add.at(carried, (above, start[index], end[index]), amount)
    rate = level.link.payload_bytes_per_s * _below(cluster, index) / max(1, level.size - 1)
    return Load(index, "pair", rate, carried)


def _lanes(
    cluster: Cluster, index: int, ends: tuple[Ints, Ints], amount: Floats, below: int
) -> Iterator[Load]:
    level = cluster.levels[index]
    for kind, devices in zip(("up", "down"), ends, strict=True):
        carried = np.zeros(cluster.num_devices)
        np.add.at(carried, devices, amount)
        yield Load(index, kind, _rate(level, kind), carried)
        if level.oversubscription > 1:
            rate = _rate(level, kind) * below / level.oversubscription
            yield Load(index, kind, rate, carried.reshape(-1, below).sum(axis=1))


def _rate(level: Level, kind: str) -> float:
    link = level.link
    own = link.down_bytes_per_s if kind == "down" else 0.0
    return (own or link.bandwidth_bytes_per_s) * link.efficiency


def _below(cluster: Cluster, index: int) -> int:
    return prod(level.size for level in cluster.levels[:index])
