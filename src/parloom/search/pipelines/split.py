"""Splits of a model's items into stages on groups of devices.

Groups of one size take stages in turns (as interleaved 1F1B places them), one more than a multiple
of them (the first group then has both ends of the model, which may share a weight), or there and
back (the V of ZB-V: Qi et al., NeurIPS'24). Boundaries are those of a dynamic program that brings
each stage near a target; targets follow what their groups have too much or too little of. Groups of
several sizes: `parts.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from parloom.search.pipelines.costs import ItemCosts, Sent

Floats = NDArray[np.float64]
Cuts = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Places that are looked at as ends of stages, where a model has more items.
PLACES = 257
# Stages of each group, at most.
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
# Cuts that are all looked at, where there are no more.
ENUMERATED = 5_000
# How often targets follow loads, and the share of a difference by which they do.
ROUNDS, SHARE = 8, 0.7
# Sums are of floating-point numbers.
ROUNDING = 1e-9
# What a value that crosses costs beside computing that hides it.
EXPOSED = 0.3


@dataclass(frozen=True)
class Split:
    """Stages as ranges of items, `ends` behind each, with the group of devices that each has;
    `costs` are those of items by group, `begins` the first device of each where they do not follow
    each other. `at_once`: how many microbatches each stage runs in one pass, where not one; closed
    forms do not know it.
    """

    ends: tuple[int, ...]
    groups: tuple[int, ...]
    costs: tuple[ItemCosts, ...]
    begins: tuple[int, ...] = ()
    at_once: tuple[int, ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last item + 1 of each stage."""
        return tuple(pairwise((0, *self.ends)))

    @property
    def num_microbatches(self) -> int:
        return self.costs[0].num_microbatches

    @property
    def repeats(self) -> bool:
        """Whether passes follow each other at once."""
        return self.costs[0].repeats

    def loads_ps(self) -> list[int]:
        """What each group computes and reduces in a step."""
        found = [0] * len(self.costs)
        for (first, last), group in zip(self.ranges, self.groups, strict=True):
            costs = self.costs[group]
            found[group] += int(costs.loads_ps[first:last].sum()) + costs.stage_ps
        return found

    @cached_property
    def step_ps(self) -> float:
        """A closed form of the step: what the busiest group takes, and what a microbatch takes on
        its longest way through the other stages; at least its whole way, and what the busiest links
        take.
        """
        computed = max(self.loads_ps()) + self.waits_ps
        return max(computed, self.way_ps, self._links_ps()) + self._shared_ps()

    @cached_property
    def waits_ps(self) -> float:
        """How long the busiest group waits for others: with several stages on each group, only at
        the ends; not at all where passes follow each other.
        """
        if self.repeats:
            return 0.0
        loads = self.loads_ps()
        busiest = max(range(len(loads)), key=loads.__getitem__)
        return self._way_ps(busiest) * len(self.costs) / len(self.groups)

    @cached_property
    def way_ps(self) -> float:
        """The longest way of a microbatch through all stages."""
        return self._way_ps(None)

    @cached_property
    def _edges(self) -> dict[tuple[int, int], tuple[int, int]]:
        """What a microbatch sends from a stage to another one, and back."""
        costs = self.costs[0]
        stages = np.searchsorted(self.ends, np.arange(self.ends[-1]), side="right")
        sent: dict[tuple[int, int], tuple[int, int]] = {}
        for value in costs.sent:
            source = int(stages[value.source])
            for target in {int(stages[item]) for item in value.targets} - {source}:
                forward, back = sent.get((source, target), (0, 0))
                more = value.backward_ps[-1] if value.backward_ps else 0
                sent[source, target] = forward + value.forward_ps[-1], back + more
        return sent

    def _links_ps(self) -> int:
        """What the links of the busiest group send or receive in a step."""
        found = [[0, 0] for _ in self.costs]
        for (source, target), (forward, back) in self._edges.items():
            one, other = self.groups[source], self.groups[target]
            if one != other:
                for inward, group in enumerate((one, other)):
                    found[group][inward] += forward
                    found[group][1 - inward] += back
        return self.num_microbatches * max(max(both) for both in found)

    def _way_ps(self, without: int | None) -> float:
        """The longest way of a microbatch through stages, those of a group left out."""
        passes = [
            float(self.costs[group].passes_ps[first:last].sum()) if group != without else 0.0
            for (first, last), group in zip(self.ranges, self.groups, strict=True)
        ]
        ways = list(passes)
        for (source, target), both in sorted(self._edges.items()):
            sent = sum(both) if self.groups[source] != self.groups[target] else 0
            ways[target] = max(ways[target], ways[source] + sent + passes[target])
        return max(ways)

    def stored_bytes(self) -> int:
        """What the group that stores most has all along, and while one of its stages updates."""
        found, more = [0] * len(self.costs), [0] * len(self.costs)
        for (first, last), group in zip(self.ranges, self.groups, strict=True):
            costs = self.costs[group]
            found[group] += int(costs.stored_bytes[first:last].sum())
            found[group] += int(costs.buffer_bytes[first:last].max())
            more[group] = max(more[group], int(costs.updating_bytes[first:last].sum()))
        return max(map(sum, zip(found, more, strict=True)))

    def _shared_ps(self) -> int:
        places = dict(zip(self.ranges, self.groups, strict=True))

        def group_of(item: int) -> int:
            return next(g for (first, last), g in places.items() if first <= item < last)

        shared = self.costs[0].shared_ps
        return sum(ps for one, other, ps in shared if group_of(one) != group_of(other))


def even_splits(costs: ItemCosts, count: int, limit_bytes: float = np.inf) -> Iterator[Split]:
    """Splits over `count` groups with the same layouts; where there are few places, such as store
    no more than `limit_bytes` anywhere, if there are such.
    """
    places = places_of(costs.loads_ps, PLACES)
    for groups in placements(count, len(places) - 1):
        for ends in dict.fromkeys(_ends(costs, places, np.array(groups), limit_bytes)):
            yield Split(ends, groups, (costs,) * count)


def placements(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """The group of each stage."""
    for chunks in CHUNKS:
        for num_stages in (chunks * count, chunks * count + 1):
            if num_stages <= most:
                yield tuple(stage % count for stage in range(num_stages))
        if chunks == 2 and 2 * count <= most:
            yield (*range(count), *reversed(range(count)))


def places_of(loads: Cuts, most: int) -> Cuts:
    """Where stages may end: everywhere, or at about equal shares of the load."""
    total = np.concatenate([[0], np.cumsum(loads)])
    if len(total) <= most:
        return np.arange(len(total))
    found = np.searchsorted(total, np.linspace(0, total[-1], most)).clip(0, len(total) - 1)
    found[-1] = len(total) - 1  # what comes last may take no time
    return np.unique(found)


def total_at(costs: ItemCosts, places: Cuts) -> Floats:
    """What all items up to each place take in a step."""
    found: Floats = np.concatenate([[0], np.cumsum(costs.loads_ps)])[places].astype(float)
    return found


def sent_at(costs: ItemCosts, places: Cuts) -> Floats:
    """What crosses each place in a step."""
    sent = costs.num_microbatches * np.concatenate([[0], costs.sent_ps])[places]
    found: Floats = sent.astype(float)
    return found


def _ends(
    costs: ItemCosts, places: Cuts, owner: Cuts, limit_bytes: float
) -> Iterator[tuple[int, ...]]:
    """Boundaries whose busiest group has the least: of those that targets lead to, and of all where
    there are few.
    """
    total = total_at(costs, places)
    count = int(owner.max()) + 1
    cuts = near_targets([total] * count, sent_at(costs, places), owner)
    for some in (cuts, _leveled(cuts, total, owner)):
        yield tuple(int(places[cut]) for cut in some[1:])
    if comb(len(places) - 2, len(owner) - 1) <= ENUMERATED:
        inner = np.array(list(combinations(places[1:-1], len(owner) - 1)), np.int64)
        last = np.full((len(inner), 1), places[-1])
        every = np.hstack([inner.reshape(len(inner), -1), last])
        stored, updating = (_sums(own, every) for own in (costs.stored_bytes, costs.updating_bytes))
        to = np.searchsorted(places, every)
        buffers = costs.buffers_between(places)[np.hstack([0 * last, to[:, :-1]]), to]
        held = _by_group(stored + buffers, owner, np.sum)
        small = (held + _by_group(updating, owner, np.max)).max(axis=1) <= limit_bytes
        every = every[small] if small.any() else every
        for some in _best_of_all(costs, every, owner):
            yield tuple(map(int, some))


def _by_group(stages: Floats, owner: Cuts, how: Callable[..., Floats]) -> Floats:
    """What groups come to, [cut, group], of what stages do, [cut, stage]."""
    return np.stack([how(stages[:, owner == own], axis=1) for own in np.unique(owner)], axis=1)


def near_targets(totals: Sequence[Floats], sent: Floats, owner: Cuts) -> Cuts:
    """Cuts whose stages are near targets that follow what groups have too much or too little of;
    `totals` are what all items up to each place take, by group.
    """
    between = [total[None, :] - total[:, None] for total in totals]
    for each in between:
        each[np.tril_indices(len(sent))] = np.inf  # each stage has items
    crossing = EXPOSED * sent
    crossing[-1] = 0
    held = np.bincount(owner)
    share = 1 / sum(1 / float(total[-1]) for total in totals)
    stages, targets = [between[group] for group in owner], share / held[owner]
    best, least = None, np.inf
    for _ in range(ROUNDS):
        cuts = _nearest(stages, crossing, targets)
        took = [own[ends] for own, ends in zip(stages, pairwise(cuts), strict=True)]
        loads = np.bincount(owner, weights=took)
        if best is None or loads.max() < least:
            best, least = cuts, loads.max()
        targets = targets - SHARE * ((loads - share) / held)[owner]
    assert best is not None, "a round"
    return best


def _best_of_all(costs: ItemCosts, ends: Cuts, owner: Cuts) -> Iterator[Cuts]:
    """Of all splits those whose busiest group, or boundary, has the least, and those with the least
    closed form; of equal ones those with the least squares.
    """
    loads = _by_group(_sums(costs.loads_ps, ends), owner, np.sum)
    squares, sent = np.square(loads).sum(axis=1), costs.num_microbatches * costs.sent_ps
    crossing = sent[ends[:, :-1] - 1].max(axis=1, initial=0)
    for least in (np.maximum(loads.max(axis=1), crossing), closed_forms(costs, ends, owner)):
        yield ends[np.lexsort((squares, least))[0]]


def _sums(each: Cuts, ends: Cuts) -> Floats:
    """The sums of items in each stage, [split, stage]."""
    begin = np.zeros((len(ends), 1), dtype=np.int64)
    up_to = np.concatenate([[0], np.cumsum(each)])[np.hstack([begin, ends])]
    found: Floats = np.diff(up_to, axis=1).astype(float)
    return found


def closed_forms(costs: ItemCosts, ends: Cuts, owner: Cuts) -> Floats:
    """`Split.step_ps` of splits with boundaries `ends`, [split, stage], and the same layouts in all
    groups.
    """
    count, groups, number = len(owner), int(owner.max()) + 1, len(ends)
    loads = _by_group(_sums(costs.loads_ps, ends), owner, np.sum)
    loads = loads + costs.stage_ps * np.bincount(owner)
    # Arrays of [stage, split] from here: what is done with stages is done with rows.
    passes = np.ascontiguousarray(_sums(costs.passes_ps, ends).T)
    stage_of = np.zeros((len(costs.items), number), dtype=np.int64)
    for end in ends.T:
        stage_of += end <= np.arange(len(costs.items))[:, None]
    sent = _sent_between(costs, stage_of, count)
    others = np.where(owner[:, None] == loads.argmax(axis=1), 0, passes)
    waits = _ways(others, sent, owner) * groups / count * (not costs.repeats)
    moved = np.zeros((groups, 2, number))  # of groups, out or in
    for (source, target), (forward, back, _) in sent.items():
        one, other = owner[source], owner[target]
        if one != other:
            moved[one] += forward, back
            moved[other] += back, forward
    links = costs.num_microbatches * moved.max(axis=(0, 1))
    shared = sum(
        (
            ps * (owner[stage_of[one]] != owner[stage_of[other]])
            for one, other, ps in costs.shared_ps
        ),
        np.zeros(number),
    )
    step = np.maximum(loads.max(axis=1) + waits, _ways(passes, sent, owner))
    found: Floats = np.maximum(step, links) + shared
    return found


Between = Mapping[tuple[int, int], tuple[Floats, Floats, Bools]]
"""By source and target stage: what a microbatch sends there and back, and if it does, [split]."""


def _sent_between(costs: ItemCosts, stage_of: Cuts, num_stages: int) -> Between:
    """What values send where items are in these stages, [item, split]."""
    sends: list[tuple[Sent, Cuts, Cuts]] = []
    there = np.zeros(num_stages**2, dtype=np.bool_)
    for value in costs.sent:
        seen = [stage_of[value.source]]
        for item in value.targets:
            target = stage_of[item]
            splits = np.flatnonzero(np.all([target != other for other in seen], axis=0))
            pairs = seen[0][splits] * num_stages + target[splits]
            there[pairs] = True
            sends.append((value, pairs, splits))
            seen.append(target)
    known, rows = np.flatnonzero(there), np.cumsum(there) - 1
    shape = len(known), stage_of.shape[1]
    forward, back, some = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.bool_)
    for value, pairs, splits in sends:
        at = rows[pairs], splits
        forward[at] += value.forward_ps[-1]
        if value.backward_ps:
            back[at] += value.backward_ps[-1]
        some[at] = True
    return {
        divmod(int(pair), num_stages): (forward[row], back[row], some[row])
        for row, pair in enumerate(known)
    }


def _ways(passes: Floats, sent: Between, owner: Cuts) -> Floats:
    """The longest way of a microbatch through stages that take `passes`, [stage, split]."""
    ways = passes.copy()
    for (source, target), (forward, back, there) in sent.items():
        reached = ways[source] + passes[target]
        if owner[source] != owner[target]:
            reached += forward + back
        np.maximum(ways[target], reached, out=ways[target], where=there)
    found: Floats = ways.max(axis=0)
    return found


def _leveled(cuts: Cuts, total: Floats, owner: Cuts) -> Cuts:
    """Cuts in which the busiest group gives a place to another one, and the stages between them
    pass one on, as long as the squares of loads become less.
    """
    loads = np.bincount(owner, weights=np.diff(total[cuts]))
    while True:
        best: tuple[float, Cuts] | None = None
        for giver in np.flatnonzero(owner == np.argmax(loads)):
            for taker in np.flatnonzero(owner != owner[giver]):
                moved = cuts.copy()
                if taker > giver:
                    moved[giver + 1 : taker + 1] -= 1
                else:
                    moved[taker + 1 : giver + 1] += 1
                if (np.diff(moved) < 1).any():
                    continue
                squares = float(np.square(np.bincount(owner, np.diff(total[moved]))).sum())
                if best is None or squares < best[0]:
                    best = squares, moved
        if best is None or best[0] >= float(np.square(loads).sum()) * (1 - ROUNDING):
            return cuts
        cuts = best[1]
        loads = np.bincount(owner, weights=np.diff(total[cuts]))


def _nearest(between: Sequence[Floats], crossing: Floats, targets: Floats) -> Cuts:
    """The cuts (the first and the last place included) whose stages are nearest to their targets,
    by squares; `between` says what each stage takes from a place to another one.
    """
    size = len(crossing)
    best = np.full(size, np.inf)
    best[0] = 0.0
    came = np.zeros((len(targets), size), dtype=np.int64)
    for stage, (own, target) in enumerate(zip(between, targets, strict=True)):
        with np.errstate(invalid="ignore"):
            costs = best[:, None] + np.square(own - target)
        came[stage] = np.argmin(costs, axis=0)
        best = costs[came[stage], np.arange(size)] + np.square(crossing)
    assert np.isfinite(best[-1]), "there are no more stages than items"
    cuts = [size - 1]
    for stage in reversed(range(len(targets))):
        cuts.append(int(came[stage][cuts[-1]]))
    return np.array(cuts[::-1])


def merges(split: Split, counts: Collection[int]) -> Iterator[Split]:
    """Splits in which a stage of the busiest group has larger microbatches, those first that grow
    least, so that `counts` has how many there are.
    """
    loads, count = split.loads_ps(), split.num_microbatches
    busiest = loads.index(max(loads))
    each = split.at_once or (1,) * len(split.groups)
    stages = [stage for stage, group in enumerate(split.groups) if group == busiest]
    for left in sorted(counts, reverse=True):
        for stage in stages:
            larger, odd = divmod(count, left)
            merged = (*each[:stage], larger, *each[stage + 1 :])
            if not odd and larger > each[stage] and _divide_each_other(merged):
                yield replace(split, at_once=merged)


def _divide_each_other(numbers: Collection[int]) -> bool:
    return all(b % a == 0 for a, b in pairwise(sorted({*numbers})))


def moves(split: Split) -> Iterator[Split]:
    """Splits with one boundary moved by an item, those first whose closed form is the least."""
    found: list[Split] = []
    ends = split.ends
    for index in range(len(ends) - 1):
        for change in (-1, 1):
            moved = (*ends[:index], ends[index] + change, *ends[index + 1 :])
            before = moved[index - 1] if index else 0
            if before < moved[index] < moved[index + 1]:
                found.append(replace(split, ends=moved))
    yield from sorted(found, key=lambda other: other.step_ps)
