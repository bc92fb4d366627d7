"""All splits of a small model, the most promising first, until no other can be faster.

Each stage is lowered and played once in each layout. No step takes less than what its busiest group
computes and updates, after the forward passes that come before and followed by the backward passes
that come after: splits are simulated in the order of that bound (best-first search: Hart, Nilsson
and Raphael, IEEE Trans. SSC 4, 1968). Where a plan is known, those are left out whose items alone
take longer in their busiest group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, combinations, pairwise, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.cost.pipeline import Edge, Send
from parloom.search.pipelines.bounds import Bound, Free, StageBounds, least_ps, members
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.cuts import Cuts, CutSpace, Kind
from parloom.search.pipelines.judge import Judge
from parloom.search.pipelines.split import Split

Floats = NDArray[np.float64]
Layouts = Mapping[int, Mapping[int, Sequence[ItemCosts]]]
"""Those that splits have, by microbatches and by the devices of a group."""
# Splits whose bounds know what is sent, which is where the time goes.
MOST_PRICED = 2_000
# By how much stages may take less than their items do, each as a stage of its own.
LESS = 0.1


class EverySplit:
    """All splits over groups of all devices, of the layouts that are given, but for those that take
    no less than `enough_ps`; it `is_whole` where no other one was left out that can be cut so.
    """

    def __init__(self, judge: Judge, layouts: Layouts, spend: Callable[[], None]) -> None:
        self.judge, self.layouts, self.bounds = judge, layouts, StageBounds(judge, spend)
        self.enough_ps, self.is_whole, self._are_all = inf, False, False
        some = next(costs for by in layouts.values() for own in by.values() for costs in own)
        self.edges = sorted(
            {(v.source, item, v.backward_ps is not None) for v in some.sent for item in v.targets}
        )
        devices = judge.request.cluster.num_devices
        self.space = CutSpace(len(some.items), [edge[:2] for edge in self.edges], devices)
        self.sets = self.space.sets
        self.made = 0

    def promising(self, most: int) -> list[Cuts]:
        """The cuts in which the items of no group take longer than `enough_ps`, those that take the
        least where they are more than `most`; none where there are too many to look at.
        """
        kinds = self.space.kinds({count: tuple(by) for count, by in self.layouts.items()})
        estimates = {
            (count, size): self._estimates(layouts)
            for count, by_size in self.layouts.items()
            for size, layouts in by_size.items()
        }
        chains = {num: self.space.chains(num) for num in {len(kind.groups) for kind in kinds}}
        loads = [self._loads(kind, chains[len(kind.groups)], estimates) for kind in kinds]
        every = np.concatenate(loads) if loads else np.zeros(0)
        limit_ps = self.enough_ps / (1 - LESS)
        if (every < limit_ps).sum() > most:
            limit_ps = min(limit_ps, float(np.partition(every, most)[most]))
        found = []
        for kind, own in zip(kinds, loads, strict=True):
            some = chains[len(kind.groups)][own < limit_ps]
            if len(some):
                found.append(Cuts(kind, some))
        # Estimates prove nothing.
        self._are_all = bool(found) and bool((every < limit_ps).all())
        return found

    def _estimates(self, layouts: Sequence[ItemCosts]) -> Floats:
        """What the items of stages take of a step, [whole or split passes, set before, set with the
        stage].
        """
        has = np.array(
            [[some >> item & 1 for item in range(self.space.num_items)] for some in self.sets]
        )
        each = np.array([has @ costs.loads_ps for costs in layouts], dtype=np.float64)
        least = (each[:, None, :] - each[:, :, None]).min(axis=0)
        return np.broadcast_to(np.where(self.space.beyond, least, inf), (2, *least.shape))

    def splits(self, cuts: Sequence[Cuts]) -> Iterator[tuple[float, Split]]:
        """Splits with these cuts and what they take at least, in ascending order of that; of all
        that are `promising`, it `is_whole` at the end.
        """
        waiting: list[_Waiting] = []
        priced = 0
        for least, some in chain(self._ranked(cuts), ((inf, ()),)):
            while waiting and waiting[0].least_ps <= least:
                first = heappop(waiting)
                if first.least_ps >= self.enough_ps:
                    break
                if first.sends:
                    yield first.least_ps, first.split
                elif priced == MOST_PRICED:
                    return
                else:
                    priced += 1
                    first.least_ps = max(first.least_ps, self._with_sends(first))
                    first.sends = True
                    heappush(waiting, first)
            if least >= self.enough_ps:
                break
            for one in some:
                if one.least_ps < self.enough_ps:
                    heappush(waiting, one)
        self.is_whole = self._are_all and not self.judge.refusals.counts

    def _with_sends(self, one: "_Waiting") -> float:
        """What a split takes at least with what its stages send each other."""
        priced = self.judge.refusals.tried(lambda: self.judge.priced(one.split))
        if priced is None:
            return inf
        _, stages = priced
        return least_ps(one.split, one.bounds, stages.edges, stages.shared)

    def _ranked(self, cuts: Sequence[Cuts]) -> Iterator[tuple[float, Iterator["_Waiting"]]]:
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

    def _tables(self, cuts: Sequence[Cuts]) -> dict[tuple[int, int], Floats]:
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
        self, kind: Kind, chains: NDArray[np.int64], tables: Mapping[tuple[int, int], Floats]
    ) -> Floats:
        """What the busiest group takes, [chain]."""
        loads = np.zeros((2, len(kind.sizes), len(chains)))
        for stage, group in enumerate(kind.groups):
            table = tables[kind.count, kind.sizes[group]]
            loads[:, group] += table[:, chains[:, stage], chains[:, stage + 1]]
        found: Floats = loads.max(axis=1).min(axis=0)
        return found

    def _laid_out(self, kind: Kind, sets: Sequence[int]) -> Iterator["_Waiting"]:
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
