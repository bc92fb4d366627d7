"""Pipelines over the parts of a mixed cluster: a stage lies within one part.

The whole model is laid out on groups of each part (`layouts.py`), its items are priced
there, and one dynamic program splits them over groups of all parts (`parts.splits_over_parts`).
Splits are ranked by their closed form and simulated, as on equal devices.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf

import numpy as np

from parloom.cost.units import format_seconds
from parloom.ir.expected import Status
from parloom.ir.mesh import part_of, part_sizes
from parloom.ir.plan import GLOBAL, Decisions
from parloom.ir.stages import stage_items
from parloom.search.contexts import Contexts, SimulatedPlan
from parloom.search.least_compute import least_form, least_on_one_device, least_times_ps
from parloom.search.meshes import logical_meshes
from parloom.search.pipelines.auto import (
    APART,
    EACH,
    JUDGED,
    MERGED,
    MOVED,
    holds_pins,
)
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.pipelines.judge import Judge, JudgedSplit, Tried
from parloom.search.pipelines.layouts import MARGINS, GroupLayouts
from parloom.search.pipelines.parts import PartCosts, few_sizes, in_turns, splits_over_parts
from parloom.search.pipelines.promising import FORMS, NEARBY
from parloom.search.pipelines.replicas import Shares, replicated, shares
from parloom.search.pipelines.split import Floats, Split
from parloom.search.prices import Prices
from parloom.search.request import Request, Say
from parloom.search.rewritten import RewrittenRequest, forms_for
from parloom.search.work import OutOfWorkError

# Numbers of microbatches that are looked at, around the best.
COUNTS = 5
# Numbers of microbatches, the best first, whose splits are simulated.
BEST_COUNTS = 3
# Microbatches in flight whose activations splits count, as long as none fits.
IN_FLIGHT = (0, 2, 4)
# Splits whose groups take several stages in turns, and how many of these are simulated.
BASES, TURNS = 3, 12
# How often the multipliers of a bound are changed.
ROUNDS = 100


@dataclass(frozen=True)
class AcrossParts:
    """Pipelines over several parts that were simulated and fit, the fastest first; what no plan on
    the cluster takes less than; how the search ended, and what was left out.
    """

    found: tuple[SimulatedPlan, ...]
    bound_ps: float
    status: Status = Status.COMPLETE
    left_out: str = ""


def across_parts(request: Request, base: Decisions, best_ps: float, say: Say) -> AcrossParts:
    """Pipelines over the parts of a mixed cluster; `best_ps` is the fastest plan on one of them."""
    bound_ps, search, status = 0.0, None, Status.COMPLETE
    request = replace(request, quantizes=False)  # as in pipelines
    form = RewrittenRequest(request, ())
    try:
        forms = [Contexts(own, base, forms_for(own)) for _, own in request.regular()]
        bound_ps = least_shared_ps(forms)
        if request.batch_semantics != GLOBAL:
            return AcrossParts((), bound_ps, left_out=APART)
        form = RewrittenRequest(request, least_on_one_device(forms[0])[1].rewrites)
        contexts = [Contexts(own, base) for _, own in form.request.regular()]
        search = MixedSearch(form.request, contexts, best_ps, say)
        search.replicate()
        search.run()
    except OutOfWorkError:
        status = Status.OUT_OF_BUDGET
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    if search is None:
        return AcrossParts((), bound_ps, status)
    found = map(form.as_asked, search.plans())
    holding = tuple(plan for plan in found if holds_pins(request, plan.decisions))
    return AcrossParts(holding, bound_ps, status, search.tried.judge.refusals.words())


def least_shared_ps(contexts: Sequence[Contexts]) -> float:
    """No plan takes less: all operators, each shared among the parts of the cluster in any way, on
    their devices in equal shares.

    Each operator takes the least time w that it can on one device of a part. With x the share of an
    operator on a part of n devices, this is a linear program: the least t that is for each part no
    less than the sum over operators of x w / n. Any multipliers of these rows that add up to one
    give a bound; the best of some are taken.
    """
    times, every = [], contexts[0].whole
    for each in contexts:
        cluster, count = each.request.cluster, each.counts[0]
        program, (mesh,) = each.program(count), logical_meshes(part_of(cluster, 1))
        assert program is not None, "the whole batch is always one microbatch"
        prices = Prices(program, each.walker(mesh), each.shared)
        own = np.fromiter(least_times_ps(program, prices), dtype=np.float64)
        times.append(count * own / cluster.num_devices)
    return shared_bound_ps(np.array(times), lambda costs: least_form(every, costs.tolist())[0])


def shared_bound_ps(times: Floats, least: Callable[[Floats], float] = np.sum) -> float:
    """A bound for operators that take `times` [part, operator] and may be shared in any way;
    `least` is the least sum of what each costs, as some may be left out.

    Multipliers follow the loads of parts to which each operator goes where it is cheapest.
    """
    weights = 1 / np.maximum(times.sum(axis=1), 1e-30)
    best, best_costs = -1.0, times[0]
    for step in range(ROUNDS):
        weights = weights / weights.sum()
        costs = weights[:, None] * times
        cheapest = costs.argmin(axis=0)
        if costs.min(axis=0).sum() > best:
            best_costs = costs.min(axis=0)
            best = best_costs.sum()
        loads = np.bincount(
            cheapest, weights=times[cheapest, np.arange(times.shape[1])], minlength=len(times)
        )
        weights = weights * np.exp(loads / max(loads.sum(), 1e-30) / (1 + step))
    return float(least(best_costs))


class MixedSearch:
    """Searches pipelines over several parts; the first is simulated even where `best_ps`, the
    fastest plan on one part, promises to be faster: an answer says what leaving devices out saves.
    """

    def __init__(
        self, request: Request, contexts: Sequence[Contexts], best_ps: float, say: Say
    ) -> None:
        self.request, self.say, self.best_ps = request, say, best_ps
        items, factored = stage_items(request.graph), contexts[0].whole.factored
        self.parts = [part for part, _ in request.regular()]
        self.num_items = len(items)
        for own in contexts:
            own.work, own.refusals = contexts[0].work, contexts[0].refusals  # they count together
        self.limits = [own.request.limit_bytes for own in contexts]
        self.layouts = [
            GroupLayouts(own, Pricer(own.request, factored, items, request.machine), devices)
            for own, devices in zip(contexts, self._devices_like_all(), strict=True)
        ]
        self.counts = contexts[0].counts
        self.tried = Tried(Judge(request, factored, contexts[0].refusals), contexts[0].work.spend)
        self.replicas: list[SimulatedPlan] = []

    def replicate(self) -> None:
        """The whole model on each device, for more microbatches as long as that promises more."""
        found: list[Shares] = []
        weights = (entry.value.spec.num_bytes for entry in self.request.graph.of_kind("parameter"))
        if 2 * sum(weights) > min(self.limits):  # with their gradients
            return
        alone = [GroupLayouts(own.contexts, own.pricer, 1) for own in self.layouts]
        for count in self.counts:
            costs = [_fastest(layouts, 1, count) for layouts in alone]
            there = [own for own in costs if own is not None]
            if len(there) < len(costs):
                continue
            of_count = shares(self.request, self.parts, there)
            used = sum(map(bool, of_count.counts.values()))
            if used == self.request.cluster.num_devices or (self._may_idle and used > 1):
                found.append(of_count)
                if of_count.step_ps > (1 + NEARBY) * min(one.step_ps for one in found):
                    break
        self.replicas += replicated(self.tried.judge, found)

    def run(self) -> None:
        """Numbers of microbatches on groups that are whole parts, then around the best with all
        sizes of groups; with less memory where no split fits; moves of boundaries.
        """
        if self.num_items < 2:
            return
        whole = [[part.cluster.num_devices] for part in self.parts]
        sizes = [sorted({*part_sizes(p.cluster), p.cluster.num_devices}) for p in self.parts]
        finer = few_sizes(sizes, [part.cluster.num_devices for part in self.parts])
        for margin in MARGINS:
            if margin != self.layouts[0].margin:
                self.layouts = [
                    GroupLayouts(own.contexts, own.pricer, own.devices, margin)
                    for own in self.layouts
                ]
            for in_flight in IN_FLIGHT:
                splits = self._around(2 * len(self.parts), whole, in_flight)
                if finer != whole:
                    best = min(splits, key=lambda split: split.step_ps, default=None)
                    count = best.num_microbatches if best else 2 * len(self.parts)
                    splits += self._around(count, finer, in_flight)
                self._judge_best(splits)
                self._take_turns()
                self._recount()
                fitting = self.tried.fitting()
                for one in fitting[:BASES]:
                    self.tried.move(one, MOVED)
                self.tried.merge(self.counts, MERGED)
                if fitting:
                    return

    def plans(self) -> Iterator[SimulatedPlan]:
        """The fastest that fit, and the fastest on each number of devices."""
        seen: set[int] = set()
        fitting = (one.predicted(self.request) for one in self._fitting())
        for one in sorted((*self.replicas, *fitting), key=lambda one: one.step_ps):
            if one.decisions.num_ranks not in seen:
                seen.add(one.decisions.num_ranks)
                yield one

    def _fitting(self) -> Iterator[JudgedSplit]:
        """The fastest split that fits on each number of devices."""
        seen: set[int] = set()
        for one in self.tried.fitting():
            if one.decisions.num_ranks not in seen:
                seen.add(one.decisions.num_ranks)
                yield one

    def _devices_like_all(self) -> list[int]:
        """For each part: how many such devices would be as fast, or hold as much, as all devices;
        whole parts.
        """
        rates = [max(rate for _, rate in p.cluster.device.flops_per_s) for p in self.parts]
        counts = [part.cluster.num_devices for part in self.parts]
        found = []
        for own, rate, room in zip(counts, rates, self.limits, strict=True):
            like = max(
                sum(n * other for n, other in zip(counts, each, strict=True)) / mine
                for each, mine in ((rates, rate), (self.limits, room))
            )
            found.append(ceil(like / own) * own)
        return found

    def _around(self, wanted: int, sizes: Sequence[Sequence[int]], in_flight: int) -> list[Split]:
        """Splits of numbers of microbatches from the one nearest to `wanted` on, up and down as
        long as the least closed form becomes less.
        """
        counts = self.counts
        start = min(range(len(counts)), key=lambda i: abs(counts[i] - wanted))
        found: list[Split] = []
        first = inf
        for steps in (counts[start : start + COUNTS], counts[:start][::-1][: COUNTS - 1]):
            before = first
            for count in steps:
                splits = self._splits(count, sizes, in_flight)
                found += splits
                least = min((split.step_ps for split in splits), default=inf)
                if least < inf:
                    seconds = format_seconds(least / 1e12)
                    self.say(f"pipelines over parts, {count} microbatches: about {seconds}")
                if least > before * (1 + NEARBY):
                    break
                before = min(before, least)
                first = first if first < inf else least
        return found

    def _splits(self, count: int, sizes: Sequence[Sequence[int]], in_flight: int) -> list[Split]:
        parts = []
        for part, layouts, limit, own in zip(
            self.parts, self.layouts, self.limits, sizes, strict=True
        ):
            costs = {size: _fastest(layouts, size, count) for size in own}
            there = {size: found for size, found in costs.items() if found is not None}
            parts.append(PartCosts(part, limit, there))
        found = splits_over_parts(parts, min(in_flight, count))
        return [s for s in found if len(s.ends) > 1 and (self._uses_all(s) or self._may_idle)]

    @property
    def _may_idle(self) -> bool:
        return not self.request.all_devices

    def _uses_all(self, split: Split) -> bool:
        used = sum(costs.num_devices for costs in split.costs)
        return used == self.request.cluster.num_devices

    def _judge_best(self, splits: Sequence[Split]) -> None:
        """Simulate those with the least closed forms, of the best numbers of microbatches each and
        of all placements: closed forms of one differ less from each other than from what the
        simulator says. The first that uses all devices is simulated, whatever it promises.
        """
        by_count: dict[int, list[Split]] = {}
        for split in sorted(splits, key=lambda split: split.step_ps):
            by_count.setdefault(split.num_microbatches, []).append(split)
        least = min((split.step_ps for split in splits), default=inf)
        enough = min(self.best_ps, least) * (1 + FORMS)
        for some in list(by_count.values())[:BEST_COUNTS]:
            known: Counter[tuple[object, ...]] = Counter()
            for split in some:
                if sum(known.values()) >= JUDGED or split.step_ps > enough:
                    break
                kind = split.begins, tuple(costs.num_devices for costs in split.costs)
                if known[kind] < EACH:
                    known[kind] += self.tried.play(split) is not None
        whole = filter(self._uses_all, sorted(splits, key=lambda split: split.step_ps))
        for split in islice(whole, JUDGED):
            if any(self._uses_all(one.split) for one in self.tried.fitting()):
                return
            self.tried.play(split)

    def _take_turns(self) -> None:
        """Simulate several stages on each group of the best splits, where that promises more."""
        found = [s for one in self.tried.fitting()[:BASES] for s in in_turns(one.split)]
        for split in sorted(found, key=lambda split: split.step_ps)[:TURNS]:
            self.tried.play(split)

    def _recount(self) -> None:
        """Simulate the best splits with other numbers of microbatches, as long as one is faster.
        Where groups have several stages, fewer are the best than where each has one.
        """
        for one in self.tried.fitting()[:BASES]:
            best = one
            for direction in (-1, 1):
                at = self.counts.index(best.split.num_microbatches) + direction
                while 0 <= at < len(self.counts):
                    split = self._with_count(best.split, self.counts[at])
                    found = self.tried.play(split) if split else None
                    if found is None or not found.fits or found.step_ps >= best.step_ps:
                        break
                    best, at = found, at + direction

    def _with_count(self, split: Split, count: int) -> Split | None:
        """The same stages on the same groups; None where a group has no layout for it."""
        found: list[ItemCosts] = []
        for group, begin in zip(split.costs, split.begins, strict=True):
            at = next(i for i, part in enumerate(self.parts) if begin in part.devices)
            costs = _fastest(self.layouts[at], group.num_devices, count)
            if costs is None:
                return None
            found.append(costs)
        return replace(split, costs=tuple(found))


def _fastest(layouts: GroupLayouts, size: int, count: int) -> ItemCosts | None:
    is_new = (size, count) not in layouts.known
    found = layouts.of(size, count)
    for layout in tuple(found) if is_new else ():
        layouts.exposed(layout)
    each = (layout.costs for layout in found)
    return min(each, key=lambda costs: int(costs.loads_ps.sum()), default=None)
