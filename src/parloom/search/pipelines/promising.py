"""Splits that promise to be fast by their closed forms, before any is simulated.

A context is a size of the groups of devices and a number of microbatches: the whole model is laid
out on one group (`layouts.py`), and its items are split over all groups (`split.py`, `parts.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf

from parloom.cost.units import format_seconds
from parloom.ir.mesh import part_sizes
from parloom.ir.regular_parts import regular_parts
from parloom.ir.stages import item_edges, stage_items
from parloom.search.contexts import Contexts
from parloom.search.least_compute import longest_item_ps
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.pipelines.layouts import GroupLayouts
from parloom.search.pipelines.orders import orders
from parloom.search.pipelines.parts import PartCosts, uneven_splits
from parloom.search.pipelines.split import Split, even_splits
from parloom.search.request import Say

# The shares by which closed forms may become longer from one number of microbatches to the next,
# and be above the least of all that is simulated.
NEARBY, FORMS = 0.02, 0.15
# Groups of several sizes are at most so many times larger and smaller than the best even ones.
AROUND = 2


class PromisingSplits:
    """Splits that may be faster than `best_ps`; `share_ps` is an equal share of the least work."""

    def __init__(self, contexts: Contexts, share_ps: float, best_ps: float, say: Say) -> None:
        self.contexts, self.request, self.say = contexts, contexts.request, say
        self.share_ps, self.best_ps = share_ps, best_ps
        self.devices = self.request.cluster.num_devices
        self.items = stage_items(self.request.graph)
        self.orders = orders(len(self.items), item_edges(self.request.graph))
        pricer = Pricer(self.request, contexts.whole.factored, self.items, self.request.machine)
        self.layouts = GroupLayouts(contexts, pricer, self.devices)
        self.found: list[Split] = []

    def look(self) -> None:
        """The sizes of groups and numbers of microbatches that promise most."""
        longest_ps, per_group = longest_item_ps(self.contexts), 1.0
        for size in part_sizes(self.request.cluster):
            groups = self.devices // size
            if 2 <= groups <= len(self.items) and longest_ps / size < self.best_ps:
                per_group = self._look_on(size, per_group * groups) / groups or per_group
        self.add_exposed()
        self._add_uneven()

    def make_smaller(self, judged: Iterable[Split]) -> None:
        """Splits of layouts for less memory in the place of all: where none of a layout that is
        fast enough was small enough to be simulated, or some were, and were too large.
        """
        small = set(map(layout_of, self.found)) - set(map(layout_of, judged))
        enough_ps, self.found = self.best_ps * (1 + FORMS), []
        for layout in list(chain.from_iterable(self.layouts.known.values())):
            share_ps = layout.costs.loads_ps.sum() * layout.costs.num_devices / self.devices
            if id(layout.costs.whole) not in small and share_ps <= enough_ps:
                for other in self.layouts.smaller(layout):
                    self.found += self._even(other.costs)

    def _look_on(self, size: int, wanted: float) -> int:
        """Numbers of microbatches from the one nearest to `wanted`, or the first more that fit,
        downwards and upwards as long as closed forms become less and there is something to win: the
        best, 0 where there is none.
        """
        counts = self.contexts.counts
        start = at = min(range(len(counts)), key=lambda i: abs(counts[i] - wanted))
        first = self.look_at(size, counts[at])
        while first is None and self._may_be_fast(size, counts[at]) and at + 1 < len(counts):
            at += 1
            first = self.look_at(size, counts[at])
        found = list(filter(None, [first]))
        if at == start:
            found += self._with_fewer(size, first, counts[:at])
        if first is not None:
            found += self._with_more(size, first, counts[at + 1 :])
        best = min(found, key=closed_ps, default=None)
        return best.num_microbatches if best else 0

    def _with_fewer(
        self, size: int, before: Split | None, counts: Sequence[int]
    ) -> Iterator[Split]:
        """The best split of each of these numbers of microbatches, downwards."""
        for count in reversed(counts):
            if before is not None and _least_with(before, count, self.share_ps) > self.enough_ps():
                return
            found = self.look_at(size, count)
            if found is None and (before or self._may_be_fast(size, count)):
                return
            if found is not None:
                yield found
                if before is not None and found.step_ps > before.step_ps * (1 + NEARBY):
                    return
            before = found or before

    def _with_more(self, size: int, before: Split, counts: Sequence[int]) -> Iterator[Split]:
        """The best split of each of these numbers of microbatches, upwards."""
        for count in counts:
            # More microbatches compute no less, if they may hold as much.
            if self.layouts.least_ps[size, before.num_microbatches] > self.best_ps:
                return
            found = self.look_at(size, count)
            if found is None:
                return
            yield found
            if found.step_ps > before.step_ps * (1 + NEARBY):
                return
            before = found

    def _may_be_fast(self, size: int, count: int) -> bool:
        """Whether a layout may be fast enough, whatever it holds."""
        return self.layouts.least_ps[size, count] <= self.enough_ps()

    def enough_ps(self, best_ps: float = inf) -> float:
        """The closed form beyond which a split is not simulated where the best plan takes so long,
        or as long as the first one.
        """
        least = min((split.step_ps for split in self.found), default=inf)
        return min(self.best_ps, best_ps, least) * (1 + FORMS)

    def look_at(self, size: int, count: int) -> Split | None:
        """Add the splits of one context: the one with the least closed form."""
        found: list[Split] = []
        for layout in self.layouts.of(size, count, self.enough_ps()):
            found += self._even(layout.costs)
        self.found += found
        best = min(found, key=closed_ps, default=None)
        if best is not None:
            seconds = format_seconds(best.step_ps / 1e12)
            self.say(f"pipelines on groups of {size}, {count} microbatches: about {seconds}")
        return best

    def _even(self, costs: ItemCosts) -> Iterator[Split]:
        """Splits over groups with these layouts, items in several orders."""
        for order in self.orders:
            count, limit_bytes = self.devices // costs.num_devices, self.request.limit_bytes
            found = even_splits(costs.ordered(order), count, limit_bytes)
            yield from self._promising(found)

    def _promising(self, splits: Iterator[Split]) -> Iterator[Split]:
        for split in splits:
            allowed = self.request.pinned.allows_stages(len(split.groups))
            if allowed and split.stored_bytes() <= self.request.limit_bytes:
                yield split

    def add_exposed(self) -> None:
        """Splits of layouts in which nothing hides, where those in which all does promise most."""
        enough_ps = self.enough_ps()
        promising = {layout_of(split) for split in self.found if split.step_ps <= enough_ps}
        for layout in list(chain.from_iterable(self.layouts.known.values())):
            if id(layout.costs.whole) in promising:
                for other in self.layouts.exposed(layout):
                    self.found += self._even(other.costs)

    def _add_uneven(self) -> None:
        """Splits over groups of several sizes around those of the best split, with as many
        microbatches.
        """
        best = min(self.found, key=closed_ps, default=None)
        if best is None:
            return
        size, parts = best.costs[0].num_devices, part_sizes(self.request.cluster)
        costs: dict[int, ItemCosts] = {}
        for other in parts:
            if size / AROUND <= other <= size * AROUND:
                layouts = self.layouts.of(other, best.num_microbatches, self.enough_ps())
                each = (layout.costs for layout in layouts)
                found = min(each, key=lambda c: int(c.loads_ps.sum()), default=None)
                if found is not None:
                    costs[other] = found
        (part,) = regular_parts(self.request.cluster)
        uneven = uneven_splits(PartCosts(part, self.request.limit_bytes, costs))
        self.found += self._promising(uneven)


def _least_with(before: Split, count: int, share_ps: float) -> float:
    """An estimate of the least closed form with fewer microbatches than in `before`. A larger
    microbatch takes longer on its way; all of them together may take less than now, down to an
    equal share of the least work.
    """
    larger = before.num_microbatches / count * min(1.0, share_ps / max(before.loads_ps()))
    return max(share_ps + before.waits_ps * max(1.0, larger), before.way_ps * larger)


def closed_ps(split: Split) -> float:
    """The closed form of a split, to sort by."""
    return split.step_ps


def layout_of(split: Split) -> int:
    """Which layout the first group of a split has."""
    return id(split.costs[0].whole)
