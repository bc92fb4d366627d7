"""All splits of a small model, the most promising first, until no other can be faster.

A stage is what one downward-closed set of items has beyond a smaller one, so that values go to
later stages only, whatever the graph. Each such stage is lowered and played once in each layout.
No step takes less than what its busiest group computes and updates, after the forward passes that
come before and followed by the backward passes that come after: splits are simulated in the order
of that bound (best-first search: Hart, Nilsson and Raphael, IEEE Trans. SSC 4, 1968). Where a plan
is known, those are left out whose items alone take longer in their busiest group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, combinations, pairwise, product
from math import comb, factorial, inf

import numpy as np
from numpy.typing import NDArray

from parloom.cost.pipeline import Edge, Send
from parloom.errors import InputError, LayoutError
from parloom.search.pipelines.bounds import Bound, Free, StageBounds, least_ps, members
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.judge import Judge
from parloom.search.pipelines.split import Split

Floats = NDArray[np.float64]
Layouts = Mapping[int, Mapping[int, Sequence[ItemCosts]]]
"""Those that splits have, by microbatches and by the devices of a group."""
# Stages of a model and microbatches on them, with their groups, that are all looked at.
MOST_SPLITS = 150_000
MOST_DEVICES = 8
# Splits whose bounds know what is sent, which is where the time goes.
MOST_PRICED = 2_000
# Sets of items between which stages are cut.
MOST_SETS = 40
# By how much stages may take less than their items do, each as a stage of its own.
LESS = 0.1


def item_sets(count: int, edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The sets of items, as bits, that have all that their items read, the smallest first; those of
    execution order alone where there are more than `MOST_SETS`.
    """
    reads = [0] * count
    for source, target in edges:
        reads[target] |= 1 << source
    found, new = {0}, [0]
    while new and len(found) <= MOST_SETS:
        some = new.pop()
        for item in range(count):
            larger = some | 1 << item
            if larger not in found and reads[item] & ~some == 0:
                found.add(larger)
                new.append(larger)
    if new:
        found = {(1 << n) - 1 for n in range(count + 1)}
    return tuple(sorted(found, key=lambda some: (some.bit_count(), some)))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Splits that differ in their cuts only: microbatches, the group of each stage, the devices of
    each group.
    """

    count: int
    groups: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Splits of one kind: the sets between their stages, [split, stage + 1], by their places."""

    kind: _Kind
    chains: NDArray[np.int64]


class EverySplit:
    """All splits over groups of all devices, of the layouts that are given; of those that take no
    less than `enough_ps` some may be left out, of others where it then `is_whole` no longer.
    """

    def __init__(self, judge: Judge, layouts: Layouts, spend: Callable[[], None]) -> None:
        self.judge, self.layouts, self.bounds = judge, layouts, StageBounds(judge, spend)
        self.enough_ps, self.is_whole = inf, True
        some = next(costs for by in layouts.values() for own in by.values() for costs in own)
        self.edges = sorted(
            {(v.source, item, v.backward_ps is not None) for v in some.sent for item in v.targets}
        )
        self.num_items = len(some.items)
        self.sets = item_sets(self.num_items, [edge[:2] for edge in self.edges])
        beyond = [[a != b and a & ~b == 0 for b in self.sets] for a in self.sets]
        self.beyond = np.array(beyond)
        self.made = 0

    def kinds(self) -> list[_Kind] | None:
        """All kinds of splits; those of regular placements where there are more than `MOST_SPLITS`,
        None where these are too many.
        """
        devices, items = self.judge.request.cluster.num_devices, self.num_items
        if devices > MOST_DEVICES:
            return None
        sizes = [
            (count, num, own)
            for count, by_size in self.layouts.items()
            for num in range(2, min(devices, items) + 1)
            for own in self._sizes(sorted(by_size), num)
        ]
        for placed_by, number in ((all_placements, stirling), (_regular, _num_regular)):
            if self._are_few(items, [groups for _, groups, _ in sizes], number):
                return [
                    _Kind(count, placed, own)
                    for count, groups, own in sizes
                    for stages in range(groups, items + 1)
                    for placed in placed_by(stages, groups)
                ]
        return None

    def _sizes(self, sizes: Sequence[int], num_groups: int) -> Iterator[tuple[int, ...]]:
        """The devices of groups, each of which begins at a multiple of its own."""
        devices = self.judge.request.cluster.num_devices
        for own in product(sizes, repeat=num_groups):
            begins = [sum(own[:index]) for index in range(num_groups)]
            if any(begin % size for begin, size in zip(begins, own, strict=True)):
                continue
            if sum(own) == devices:
                yield own

    def _are_few(
        self, items: int, groups: Sequence[int], number: Callable[[int, int], int]
    ) -> bool:
        """Whether there are no more than `MOST_SPLITS`, placed on groups in so many ways."""
        beyond, ways, total = self.beyond.astype(float), np.zeros(len(self.sets)), 0.0
        ways[0] = 1
        for stages in range(1, items + 1):
            ways = ways @ beyond  # how many ways there are to cut so many stages
            if stages > 1:
                placed = sum(number(stages, some) for some in groups if some <= stages)
                total += float(ways[-1]) * placed
            if total > MOST_SPLITS:
                return False
        return True

    def _chains(self, num_stages: int) -> NDArray[np.int64]:
        """The sets between stages, [way, stage + 1], by their places in `sets`."""
        found = [[0]]
        for left in reversed(range(num_stages)):
            last = len(self.sets) - 1
            found = [
                [*own, int(after)]
                for own in found
                for after in ([last] if not left else np.flatnonzero(self.beyond[own[-1]]))
                if self.beyond[own[-1], after]
            ]
        return np.array(found, dtype=np.int64).reshape(-1, num_stages + 1)

    def promising(self, kinds: Sequence[_Kind]) -> list[_Cuts]:
        """The cuts of these kinds in which the items of no group take longer than `enough_ps`."""
        estimates = {
            (count, size): self._estimates(layouts)
            for count, by_size in self.layouts.items()
            for size, layouts in by_size.items()
        }
        chains = {num: self._chains(num) for num in {len(kind.groups) for kind in kinds}}
        found = []
        for kind in kinds:
            own = chains[len(kind.groups)]
            some = own[self._loads(kind, own, estimates) * (1 - LESS) < self.enough_ps]
            self.is_whole &= len(some) == len(own)  # estimates prove nothing
            if len(some):
                found.append(_Cuts(kind, some))
        return found

    def _estimates(self, layouts: Sequence[ItemCosts]) -> Floats:
        """What the items of stages take of a step, [whole or split passes, set before, set with the
        stage].
        """
        has = np.array([[some >> item & 1 for item in range(self.num_items)] for some in self.sets])
        each = np.array([has @ costs.loads_ps for costs in layouts], dtype=np.float64)
        least = (each[:, None, :] - each[:, :, None]).min(axis=0)
        return np.broadcast_to(np.where(self.beyond, least, inf), (2, *self.beyond.shape))

    def splits(self, cuts: Sequence[_Cuts]) -> Iterator[tuple[float, Split]]:
        """Splits with these cuts and what they take at least, in ascending order of that."""
        waiting: list[_Waiting] = []
        priced = 0
        for least, some in chain(self._ranked(cuts), ((inf, ()),)):
            while waiting and waiting[0].least_ps <= least:
                first = heappop(waiting)
                if first.sends:
                    yield first.least_ps, first.split
                elif priced == MOST_PRICED:
                    self.is_whole = False
                    return
                else:
                    priced += 1
                    first.least_ps = max(first.least_ps, self._with_sends(first))
                    first.sends = True
                    if first.least_ps < self.enough_ps:
                        heappush(waiting, first)
            for one in some:
                if one.least_ps < self.enough_ps:
                    heappush(waiting, one)

    def _with_sends(self, one: "_Waiting") -> float:
        """What a split takes at least with what its stages send each other."""
        try:
            _, stages = self.judge.priced(one.split)
        except (LayoutError, InputError):
            return inf
        return least_ps(one.split, one.bounds, stages.edges, stages.shared)

    def _ranked(self, cuts: Sequence[_Cuts]) -> Iterator[tuple[float, Iterator["_Waiting"]]]:
        """Cuts by what their busiest group computes, each in its fastest layout, and the splits in
        all layouts.
        """
        if not cuts:
            return
        tables = self._tables(cuts)
        least = [self._loads(own.kind, own.chains, tables) for own in cuts]
        of_kind = np.concatenate([np.full(len(own), i) for i, own in enumerate(least)])
        of_chain = np.concatenate([np.arange(len(own)) for own in least])
        found = np.concatenate(least)
        for place in np.argsort(found, kind="stable"):
            if found[place] == inf:
                return
            own = cuts[of_kind[place]]
            places = own.chains[of_chain[place]]
            yield float(found[place]), self._laid_out(own.kind, [self.sets[at] for at in places])

    def _tables(self, cuts: Sequence[_Cuts]) -> dict[tuple[int, int], Floats]:
        """What the stages of these cuts take of a step at least, by microbatches and devices:
        [whole or split passes, set before, set with the stage].
        """
        shape = 2, len(self.sets), len(self.sets)
        found: dict[tuple[int, int], Floats] = {}
        for kind, chains in ((own.kind, own.chains) for own in cuts):
            for stage, group in enumerate(kind.groups):
                key = kind.count, kind.sizes[group]
                table = found.setdefault(key, np.full(shape, np.nan))
                for before, after in np.unique(chains[:, stage : stage + 2], axis=0):
                    if np.isnan(table[0, before, after]):
                        table[:, before, after] = self._least_of(*key, before, after)
        return found

    def _least_of(self, count: int, size: int, before: int, after: int) -> Floats:
        """What a stage takes of a step at least, [whole or split passes]."""
        ends = self.sets[before], self.sets[after]
        loads = [
            self.bounds.of(costs, *ends, free).load_ps
            for costs in self.layouts[count][size]
            for free in self._free(count, costs)
        ]
        least: Floats = np.min(loads, axis=0)
        return least

    def _free(self, count: int, costs: ItemCosts) -> list[Free]:
        """How operators that no stage owns may be laid out where some group has these layouts."""
        if not self.bounds.free:
            return [Free(costs.whole, (costs.whole.mesh,))]
        every = [own for by_size in self.layouts[count].values() for own in by_size]
        meshes = list(dict.fromkeys(own.whole.mesh for own in every))
        return [
            Free(first.whole, some)
            for first in every
            for size in range(1, len(meshes) + 1)
            for some in combinations(meshes, size)
            if {costs.whole.mesh, first.whole.mesh} <= set(some)
        ]

    def _loads(
        self, kind: _Kind, chains: NDArray[np.int64], tables: Mapping[tuple[int, int], Floats]
    ) -> Floats:
        """What the busiest group takes, [chain]."""
        loads = np.zeros((2, len(kind.sizes), len(chains)))
        for stage, group in enumerate(kind.groups):
            table = tables[kind.count, kind.sizes[group]]
            loads[:, group] += table[:, chains[:, stage], chains[:, stage + 1]]
        found: Floats = loads.max(axis=1).min(axis=0)
        return found

    def _laid_out(self, kind: _Kind, sets: Sequence[int]) -> Iterator["_Waiting"]:
        """The split between these sets in all layouts."""
        cuts = list(pairwise(sets))
        stages = [members(after & ~before) for before, after in cuts]
        ends = tuple(accumulate(map(len, stages)))
        order = [item for stage in stages for item in stage]
        stage_of = {item: stage for stage, own in enumerate(stages) for item in own}
        pairs = {(stage_of[one], stage_of[other], back) for one, other, back in self.edges}
        edges = [Edge(a, b, Send(), Send() if back else None) for a, b, back in pairs if a != b]
        layouts = self.layouts[kind.count]
        ordered = {
            id(costs): costs.ordered(order) for size in set(kind.sizes) for costs in layouts[size]
        }
        meshes = dict.fromkeys(c.whole.mesh for by_size in layouts.values() for c in by_size)
        for chosen in product(*(layouts[size] for size in kind.sizes)):
            own = {costs.whole.mesh for costs in chosen}
            free = Free(chosen[0].whole, tuple(mesh for mesh in meshes if mesh in own))
            bounds = [
                self.bounds.of(chosen[group], *cut, free)
                for group, cut in zip(kind.groups, cuts, strict=True)
            ]
            stored: dict[int, float] = {}
            for group, bound in zip(kind.groups, bounds, strict=True):
                # The first stage of a group updates while gradients of all of them are there.
                stored.setdefault(group, bound.updating_bytes)
                stored[group] += bound.stored_bytes
            if max(stored.values()) <= self.judge.request.limit_bytes:
                split = Split(ends, kind.groups, tuple(ordered[id(own)] for own in chosen))
                self.made += 1
                yield _Waiting(least_ps(split, bounds, edges), self.made, split, bounds)


@dataclass(order=True, slots=True)
class _Waiting:
    """A split, the number that it was made as, and what it takes at least: with what is sent
    between its stages, or without.
    """

    least_ps: float
    number: int
    split: Split = field(compare=False)
    bounds: list[Bound] = field(compare=False)
    sends: bool = field(compare=False, default=False)


def all_placements(num_stages: int, num_groups: int) -> Iterator[tuple[int, ...]]:
    """The group of each stage in all ways, groups numbered by their first stage."""

    def visit(groups: tuple[int, ...], used: int) -> Iterator[tuple[int, ...]]:
        left = num_stages - len(groups)
        if not left:
            yield groups
            return
        for group in range(min(used + 1, num_groups)):
            now = max(used, group + 1)
            if num_groups - now <= left - 1:
                yield from visit((*groups, group), now)

    yield from visit((), 0)


def stirling(num_stages: int, num_groups: int) -> int:
    """How many ways there are to share stages among groups (Stirling, second kind)."""
    signs = (
        (-1) ** left * comb(num_groups, left) * (num_groups - left) ** num_stages
        for left in range(num_groups)
    )
    found: int = sum(signs) // factorial(num_groups)
    return found


def _num_regular(num_stages: int, num_groups: int) -> int:
    return sum(1 for _ in _regular(num_stages, num_groups))


def _regular(num_stages: int, num_groups: int) -> Iterator[tuple[int, ...]]:
    """Those that are tried of large models; see `split.py`."""
    if num_stages % num_groups in (0, 1):
        yield tuple(stage % num_groups for stage in range(num_stages))
    if num_stages == 2 * num_groups:
        yield (*range(num_groups), *reversed(range(num_groups)))
