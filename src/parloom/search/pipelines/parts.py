"""Splits of a model's items into stages on groups of devices of several sizes or types.

A group lies within one regular part of the cluster, and parts may come in any order along the
pipeline, several times, or not at all. One dynamic program over the items that are done and the
devices of each part that are used finds the stages of least sum under a limit on the slowest one,
for several limits, as Alpa does for equal devices (Zheng et al., OSDI'22, section 5.2). A group
begins at a multiple of its size, so that it lies over as few nodes as it can.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, inf, prod

import numpy as np

from parloom.ir.regular_parts import RegularPart
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.split import (
    Cuts,
    Floats,
    Split,
    near_targets,
    placements,
    places_of,
    sent_at,
    total_at,
)

# Places that are looked at as ends of stages, where a model has more items.
PLACES = 97
# Limits on the slowest stage, as multiples of an equal share.
LIMITS = np.geomspace(1.0, 4.0, 25)
# Numbers of devices used of each part that are told apart, at most.
STATES = 1_500
# Groups of several sizes are at most so many.
GROUPS = 64
# Stages of each group, at most.
MOST_CHUNKS = 4
Used = tuple[int, ...]
Group = tuple[int, int]
"""A regular part by its place among all, and a number of devices of it."""


@dataclass(frozen=True, eq=False)
class PartCosts:
    """What items cost on groups of a regular part, by the devices of a group, each of which may
    hold `limit_bytes`.
    """

    part: RegularPart
    limit_bytes: int
    costs: Mapping[int, ItemCosts]

    @property
    def unit(self) -> int:
        """Groups begin at multiples of it."""
        return gcd(*self.costs) if self.costs else self.part.cluster.num_devices

    @property
    def rate(self) -> float:
        """Steps in a picosecond that its devices can compute."""
        devices = self.part.cluster.num_devices
        each = (devices / (size * own.loads_ps.sum()) for size, own in self.costs.items())
        return max(each, default=0.0)

    @property
    def units(self) -> int:
        return self.part.cluster.num_devices // self.unit


def few_sizes(sizes: Sequence[Sequence[int]], devices: Sequence[int]) -> list[list[int]]:
    """The sizes of groups of each part, without the smallest as long as there were too many states
    to tell apart.
    """
    found = [sorted(own) for own in sizes]
    while prod(1 + n // own[0] for n, own in zip(devices, found, strict=True)) > STATES:
        most = max(range(len(found)), key=lambda i: (len(found[i]) > 1, devices[i] // found[i][0]))
        if len(found[most]) == 1:
            break
        del found[most][0]
    return found


def splits_over_parts(parts: Sequence[PartCosts], in_flight: int = 0) -> Iterator[Split]:
    """Splits over groups of one or several parts, some devices of which may stay idle, with the
    activations of `in_flight` microbatches on each device.
    """
    known = {(p, size): own for p, part in enumerate(parts) for size, own in part.costs.items()}
    if not known:
        return
    (some, *_) = known.values()
    places = places_of(some.loads_ps, PLACES)
    loads = {
        (p, size): _loads(own, places, parts[p].limit_bytes, in_flight)
        for (p, size), own in known.items()
    }
    least = 1 / sum(part.rate for part in parts)
    sent = sent_at(some, places) / 2
    sent[-1] = 0
    seen: set[tuple[tuple[int, ...], tuple[Group, ...]]] = set()
    for limit in least * LIMITS:
        table = _Table(loads, [part.units for part in parts], [part.unit for part in parts])
        table.fill(float(limit), np.where(sent <= limit, 0.0, np.inf))
        for cuts, groups in table.splits():
            if (cuts, groups) not in seen:
                seen.add((cuts, groups))
                yield _split(parts, [int(places[cut]) for cut in cuts], groups)


def uneven_splits(part: PartCosts) -> Iterator[Split]:
    """Splits over groups of several sizes that have all devices of a part, where they are few."""
    if len(part.costs) < 2 or part.units > GROUPS:
        return
    for split in splits_over_parts([part]):
        sizes = [costs.num_devices for costs in split.costs]
        if len(set(sizes)) > 1 and sum(sizes) == part.part.cluster.num_devices:
            yield split


def _loads(costs: ItemCosts, places: Cuts, limit_bytes: int, in_flight: int) -> Floats:
    """What a stage takes of a step from each place to each other one; infinite where it holds more
    than a device may.
    """
    total = total_at(costs, places)
    held = costs.stored_bytes + in_flight * costs.kept_bytes
    stored = np.concatenate([[0], np.cumsum(held)])[places]
    found: Floats = total[None, :] - total[:, None] + costs.stage_ps
    within = stored[None, :] - stored[:, None] + costs.buffers_between(places)
    found[within > limit_bytes] = np.inf
    found[np.tril_indices(len(places))] = np.inf
    return found


def _split(parts: Sequence[PartCosts], ends: Sequence[int], groups: Sequence[Group]) -> Split:
    """Groups of a part take its devices in the order of their stages."""
    used = [part.part.first for part in parts]
    begins = []
    for place, size in groups:
        begins.append(used[place])
        used[place] += size
    costs = tuple(parts[place].costs[size] for place, size in groups)
    return Split(tuple(ends), tuple(range(len(ends))), costs, tuple(begins))


def in_turns(split: Split) -> Iterator[Split]:
    """The groups of a split with several stages each, which they take as groups of one size do."""
    count = len(split.costs)
    places = places_of(split.costs[0].loads_ps, PLACES)
    totals = [total_at(own, places) for own in split.costs]
    sent = sent_at(split.costs[0], places)
    for groups in placements(count, len(places) - 1):
        if len(groups) > count and len(groups) <= MOST_CHUNKS * count + 1:
            cuts = near_targets(totals, sent, np.array(groups))
            ends = tuple(int(places[cut]) for cut in cuts[1:])
            yield Split(ends, groups, split.costs, split.begins)


class _Table:
    """The least sums of stages that end at each place and use so many devices of each part."""

    def __init__(
        self, loads: Mapping[Group, Floats], units: Sequence[int], unit: Sequence[int]
    ) -> None:
        self.loads, self.units, self.unit = loads, units, unit
        (some, *_) = loads.values()
        self.width = len(some)
        self.best: dict[Used, Floats] = {}
        self.came: dict[tuple[Used, int], tuple[int, Group]] = {}

    def fill(self, limit: float, ends: Floats) -> None:
        """No stage takes longer than `limit`; `ends` is infinite where none may end."""
        allowed = {group: np.where(own <= limit, own, np.inf) for group, own in self.loads.items()}
        start = np.full(self.width, np.inf)
        start[0] = 0.0
        for used in product(*(range(count + 1) for count in self.units)):
            best = np.full(self.width, np.inf) if any(used) else start
            for group, own in allowed.items():
                before = self._before(used, group)
                if before is None or before not in self.best:
                    continue
                costs = self.best[before][:, None] + own
                first = np.argmin(costs, axis=0)
                sums = costs[first, np.arange(self.width)] + ends
                for last in np.flatnonzero(sums < best):
                    best[last] = sums[last]
                    self.came[used, int(last)] = int(first[last]), group
            if np.isfinite(best).any():
                self.best[used] = best

    def _before(self, used: Used, group: Group) -> Used | None:
        """What was used before a group; None where it would not begin at a multiple of its size."""
        place, size = group
        begin = used[place] - size // self.unit[place]
        if begin < 0 or begin * self.unit[place] % size:
            return None
        return (*used[:place], begin, *used[place + 1 :])

    def splits(self) -> Iterator[tuple[tuple[int, ...], tuple[Group, ...]]]:
        """The ends of the stages and their groups, for every number of devices used."""
        for used, best in self.best.items():
            if any(used) and best[-1] < inf:
                found = list(self._way(used))[::-1]
                yield tuple(last for last, _ in found), tuple(group for _, group in found)

    def _way(self, used: Used) -> Iterator[tuple[int, Group]]:
        last = self.width - 1
        while last:
            first, group = self.came[used, last]
            yield last, group
            before = self._before(used, group)
            assert before is not None, "a group that was placed"
            used, last = before, first
