"""The physical links of a torus, and what transfers that run at once put on each of them.

A ring or a line has a link from every device to each neighbor, with half of the level's bandwidth,
which counts both. Transfers go dimension by dimension, the innermost first, the shorter way around.
Half of the ring away, devices at even places go up and those at odd ones down, so that neither
direction has all of it.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parloom.ir.mesh import Cluster, Level

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
GRID = frozenset({"ring", "line"})
"""Fabrics that join neighbors only."""


def is_grid(cluster: Cluster) -> bool:
    """Whether all devices are joined to neighbors only: a torus, or a part of one."""
    levels = [level for level in cluster.levels if level.size > 1]
    return not cluster.parts and bool(levels) and all(level.fabric in GRID for level in levels)


def neighbor_bytes_per_s(level: Level) -> float:
    """The rate to one neighbor: in a ring of two both links go to the same one."""
    both = level.fabric == "ring" and level.size == 2
    return level.link.payload_bytes_per_s / (1 if both else 2)


@lru_cache(maxsize=64)
def places(cluster: Cluster) -> Ints:
    """[level, device]: which child of each level a device is below."""
    devices = np.arange(cluster.num_devices)
    below, rows = 1, []
    for level in cluster.levels:
        rows.append(devices // below % level.size)
        below *= level.size
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)


def loads(cluster: Cluster, source: Ints, target: Ints, amount: Floats) -> list[Floats]:
    """By level, the bytes on its links, up and down, [direction, row, place], where transfers go
    from `source` to `target` devices of a torus, all at once.
    """
    where = places(cluster)
    start, end = where[:, source], where[:, target]
    return [_along(cluster, index, (start, end), amount) for index in range(len(cluster.levels))]


def hops(cluster: Cluster, source: Ints, target: Ints) -> Ints:
    """How many links of a torus each transfer passes."""
    where = places(cluster)
    found = np.zeros(source.shape, dtype=np.int64)
    for level, place in zip(cluster.levels, where, strict=True):
        steps = np.abs(place[target] - place[source])
        found += np.minimum(steps, level.size - steps) if level.fabric == "ring" else steps
    return found


def _along(cluster: Cluster, index: int, ends: tuple[Ints, Ints], amount: Floats) -> Floats:
    """One dimension: those below have been gone along, those above not yet."""
    level, (start, end) = cluster.levels[index], ends
    size = level.size
    row = np.zeros(len(amount), dtype=np.int64)
    for other in reversed(range(len(cluster.levels))):
        if other != index:
            at = end[other] if other < index else start[other]
            row = row * cluster.levels[other].size + at
    first, last = start[index], end[index]
    forward = (last - first) % size if level.fabric == "ring" else last - first
    if level.fabric == "ring":
        up = (2 * forward < size) | ((2 * forward == size) & (first % 2 == 0))
        steps = np.where(up, forward, size - forward)
    else:
        up, steps = forward > 0, np.abs(forward)
    found = np.zeros((2, cluster.num_devices // size, size))
    for direction, goes in enumerate((up, ~up)):
        # Links are numbered by their lower end; from there on each transfer passes `steps` of them.
        low = first if direction == 0 else (first - steps) % size
        carried = np.zeros((len(found[0]), 2 * size + 1))
        some = goes & (steps > 0)
        np.add.at(carried, (row[some], low[some]), amount[some])
        np.add.at(carried, (row[some], low[some] + steps[some]), -amount[some])
        passed = carried.cumsum(axis=1)
        found[direction] = passed[:, :size] + passed[:, size : 2 * size]
    return found
