"""Pipelines beside the plans of one stage.

A context is a size of the groups of devices and a number of microbatches: the whole model is laid
out on one group by the column search, where it may hold as much as all groups together. Its items
are priced as stages of their own and split over the groups. Splits are ranked by a closed form, the
first ones are simulated, and boundaries of the best are moved.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from parloom.cost.units import format_seconds
from parloom.errors import InputError, LayoutError
from parloom.ir.mesh import part_sizes
from parloom.ir.plan import GLOBAL, Decisions, Status
from parloom.ir.stages import item_edges, stage_items
from parloom.search.contexts import Contexts, ContextSearch, SimulatedPlan, with_passes
from parloom.search.decide import decisions_of
from parloom.search.least import batch_bytes
from parloom.search.optimize import Searched, least_way_ps, least_work_ps
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.pipelines.every import MOST_DEVICES, EverySplit, Layouts
from parloom.search.pipelines.judge import Judge, JudgedSplit
from parloom.search.pipelines.orders import orders
from parloom.search.pipelines.split import Split, even_splits, uneven_splits
from parloom.search.prices import Prices
from parloom.search.request import Request, Say, Wanted
from parloom.search.step_rows import Passes, ShadowPrices, row_prices
from parloom.search.work import OutOfWorkError

# Meshes of a group that are searched: of one axis, and cut between levels.
MESHES = 2
# The shares by which closed forms may become longer from one number of microbatches to the next,
# and be above the least of all that is simulated.
NEARBY, FORMS = 0.02, 0.15
# Microbatches that a group has in flight for each of its stages, by 1F1B, and more for other lists.
SLACK = 1.25
# Shares of the memory that layouts are made for: what a stage holds beyond what is counted differs.
MARGINS = (0.9, 0.7)
# How near the first bound of a context is to the least Lagrangian.
ROUGH = 0.01
# Groups of several sizes are at most so many times larger and smaller than the best even ones.
AROUND = 2
# Splits that are simulated, of each placement, and moves of boundaries around the best of them.
JUDGED, EACH, MOVED = 12, 2, 40
# Splits that are simulated where all of them may be.
EVERY = 300
# The share by which a pipeline may be better for it to be looked for.
WORTH = 0.005
BESIDE_PINS = "pipelines are not searched beside pins"
APART = "pipelines are not searched for microbatches that are computed by themselves"


def with_pipelines(request: Request, base: Decisions, searched: Searched, say: Say) -> Searched:
    """The answer with pipelines among its proposals, and a bound that holds for them, too."""
    looked = searched.proposals or searched.smallest or searched.bound_ps
    if request.cluster.num_devices == 1 or request.wanted is Wanted.PRICE or not looked:
        return searched
    if request.pinned.pins or request.batch_semantics != GLOBAL:
        reason = BESIDE_PINS if request.pinned.pins else APART
        words = f"{searched.left_out}; {reason}" if searched.left_out else reason
        return replace(searched, left_out=words)
    best = min((p.step_ps for p in searched.proposals), default=inf)
    search, status = None, searched.status
    try:
        contexts = Contexts(replace(request, budget=searched.work_left), base)
        search = PipelineSearch(contexts, best, say)
        if status is Status.COMPLETE:
            search.run()
    except OutOfWorkError:
        status = Status.OUT_OF_BUDGET
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    if search is None:
        return replace(searched, status=status, bound_ps=0.0)
    found = sorted((*searched.proposals, *search.plans()), key=lambda p: p.step_ps)
    bound_ps = 0.0 if status is Status.INTERRUPTED else min(searched.bound_ps, search.least_ps)
    left = search.contexts.work.left
    return replace(
        searched,
        proposals=tuple(found),
        status=status,
        bound_ps=bound_ps,
        work_left=left,
        smallest=search.smallest(searched.smallest),
    )


def least_pipeline_ps(contexts: Contexts) -> float:
    """No pipeline takes less: an equal share of what one device computes that does all the work,
    and what the forward pass of the smallest microbatch computes on its longest way.

    More microbatches compute no less in all, and no more each; the parts of an operator take no
    less together than all of it; a stage has as many choices on a part of the devices as on a
    divisor of it.
    """
    request, devices = contexts.request, contexts.request.cluster.num_devices
    share_ps = least_work_ps(contexts) / devices
    programs = filter(None, map(contexts.program, reversed(contexts.counts)))
    smallest = next(programs, None)
    sizes = part_sizes(request.cluster)
    if smallest is None or not sizes:
        return share_ps
    least_ps = inf
    for size in sizes:
        if any(larger % size == 0 for larger in sizes if larger > size):
            continue
        part = contexts.on_part(request.on(size))
        for mesh in part.meshes:
            prices = Prices(smallest, part.walker(mesh), part.shared)
            least_ps = min(least_ps, least_way_ps(smallest, prices))
            if least_ps <= share_ps:
                return share_ps
    return least_ps


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout of the whole model on one group, in which its items are priced."""

    context: ContextSearch
    margin: float
    costs: ItemCosts


class PipelineSearch:
    """Searches pipelines that are faster than `best_ps`; none takes less than `least_ps`."""

    def __init__(self, contexts: Contexts, best_ps: float, say: Say) -> None:
        self.contexts, self.request, self.say = contexts, contexts.request, say
        self.best_ps, self.least_ps = best_ps, least_pipeline_ps(contexts)
        self.devices = self.request.cluster.num_devices
        items, factored = stage_items(self.request.graph), contexts.whole.factored
        self.items = items
        self.orders = orders(len(items), item_edges(self.request.graph))
        self.pricer = Pricer(self.request, factored, items, self.request.cluster)
        self.judge = Judge(self.request, factored)
        self.layouts: dict[tuple[int, int], list[_Layout]] = {}
        self.margin = MARGINS[0]
        self.splits: list[Split] = []
        self.judged: list[JudgedSplit] = []

    def run(self) -> None:
        """All sizes of groups, the numbers of microbatches that promise most."""
        if self.least_ps > self.best_ps * (1 - WORTH):
            return
        for size in part_sizes(self.request.cluster):
            if 2 <= self.devices // size <= len(self.items):
                self._look_on(size)
        self._add_uneven()
        self._judge_best()
        if not self.judge_every(self._promising_layouts()):
            self._move()

    def plans(self) -> Iterator[SimulatedPlan]:
        """The plans that fit, as they are predicted; where none fits, none."""
        limit = self.request.limit_bytes
        fitting = [one for one in self.judged if one.timeline.peak_bytes <= limit]
        for one in sorted(fitting, key=lambda one: one.timeline.step_ps)[:2]:
            yield one.predicted(self.request)

    def smallest(self, known: SimulatedPlan | None) -> SimulatedPlan | None:
        """The smallest of all plans that were simulated, `known` among them."""
        found = min(self.judged, key=lambda one: one.timeline.peak_bytes, default=None)
        if found is None or (known and known.peak_bytes <= found.timeline.peak_bytes):
            return known
        return found.predicted(self.request)

    def _look_on(self, size: int) -> None:
        """Numbers of microbatches from one for each group, downwards and upwards as long as closed
        forms become less and there is something to win.
        """
        groups = self.devices // size
        counts = self.contexts.counts
        start = min(range(len(counts)), key=lambda i: abs(counts[i] - groups))
        first = before = self._look(size, counts[start])
        for count in reversed(counts[:start]):
            # Groups wait no less for each other's larger microbatches.
            waits_ps = before.step_ps - max(before.loads_ps()) if before else 0.0
            if self.least_ps + waits_ps > self._enough_ps():
                break
            found = self._look(size, count)
            if before and (not found or found.step_ps > before.step_ps * (1 + NEARBY)):
                break
            before = found or before
        before = first
        for count in counts[start + 1 :]:
            # More microbatches compute no less.
            if before is None or max(before.loads_ps()) > self._enough_ps():
                break
            found = self._look(size, count)
            if not found or found.step_ps > before.step_ps * (1 + NEARBY):
                break
            before = found

    def _enough_ps(self) -> float:
        """The closed form beyond which a split is not simulated."""
        least = min((split.step_ps for split in self.splits), default=inf)
        return min(self.best_ps, least) * (1 + FORMS)

    def _look(self, size: int, count: int) -> Split | None:
        """Add the splits of one context: the one with the least closed form."""
        found: list[Split] = []
        for layout in self.layouts_of(size, count):
            found += self._even(layout.costs)
        self.splits += found
        best = min(found, key=_closed_ps, default=None)
        if best is not None:
            seconds = format_seconds(best.step_ps / 1e12)
            self.say(f"pipelines on groups of {size}, {count} microbatches: about {seconds}")
        return best

    def _even(self, costs: ItemCosts) -> Iterator[Split]:
        """Splits over groups with these layouts, items in several orders; over fewer groups where
        devices may be left idle and are few.
        """
        size, most = costs.num_devices, self.devices // costs.num_devices
        fewer = not self.request.all_devices and self.devices <= MOST_DEVICES
        for devices in part_sizes(self.request.cluster) if fewer else ():
            if devices % size == 0 and devices > size:
                yield from self._promising(even_splits(costs, devices // size))
        for order in self.orders:
            yield from self._promising(even_splits(costs.ordered(order), most))

    def _promising(self, splits: Iterator[Split]) -> Iterator[Split]:
        for split in splits:
            if split.stored_bytes() <= self.request.limit_bytes:
                yield split

    def layouts_of(self, size: int, count: int) -> list[_Layout]:
        """Layouts on one group that may be worth it."""
        if (size, count) not in self.layouts:
            part = self.contexts.on_part(self.request.on(size))
            found: list[_Layout] = []
            for mesh in part.meshes[:MESHES]:
                program = part.on(mesh, count)
                if program is None:
                    continue
                context = part.search(program, mesh, count)
                free = ShadowPrices()
                context.columns.prove(free, ROUGH)
                if context.columns.bounds[free] / (self.devices // size) > self._enough_ps():
                    continue
                for hides in (True, False):
                    known = {layout.costs.whole for layout in found}
                    found += self._laid_out(context, hides, self.margin, known)
            self.layouts[size, count] = found
        return self.layouts[size, count]

    def _laid_out(
        self, context: ContextSearch, hides: bool, margin: float, known: Collection[Decisions] = ()
    ) -> Iterator[_Layout]:
        """The layout of a context whose estimate is the least in its share of the memory, unless
        it is known.
        """
        size, count = context.mesh.num_ranks, context.num_microbatches
        groups = self.devices // size
        in_flight = max(1.0, min(count, SLACK * groups))
        pipelined = with_passes(context, Passes(count, in_flight, hides))
        room = self.request.limit_bytes - batch_bytes(self.request.graph)
        pipelined.limit = max(1.0, margin * groups * room)
        pipelined.run(context.duals)
        candidate = next(pipelined.candidates(), None)
        if candidate is None:
            return
        prices = row_prices(pipelined.duals, pipelined.passes)
        base = self.contexts.base
        whole = decisions_of(pipelined.layouts, candidate, count, base, prices)
        self.contexts.work.spend()
        if whole in known:
            return
        try:
            yield _Layout(pipelined, margin, self.pricer.price(whole))
        except (LayoutError, InputError):
            return  # as where a buffer would be written in one stage and read in another

    def _add_uneven(self) -> None:
        """Splits over groups of several sizes around those of the best split, with as many
        microbatches.
        """
        best = min(self.splits, key=_closed_ps, default=None)
        if best is None:
            return
        size, parts = best.costs[0].num_devices, part_sizes(self.request.cluster)
        costs: dict[int, ItemCosts] = {}
        for other in parts:
            if size / AROUND <= other <= size * AROUND:
                layouts = self.layouts_of(other, best.num_microbatches)
                each = (layout.costs for layout in layouts)
                found = min(each, key=lambda c: int(c.loads_ps.sum()), default=None)
                if found is not None:
                    costs[other] = found
        self.splits += self._promising(uneven_splits(costs, self.devices))

    def _judge_best(self) -> None:
        """Simulate the splits with the least closed forms; layouts of those that do not fit are
        made for less memory.
        """
        self._judge_of(self.splits)
        if any(map(self._fits, self.judged)):
            return
        # Again where nothing was small enough to be simulated, or what was simulated was too large.
        large = {id(one.split.costs[0].whole) for one in self.judged}
        small = {id(split.costs[0].whole) for split in self.splits} - large
        self.splits = []
        for layout in chain.from_iterable(tuple(self.layouts.values())):
            if id(layout.costs.whole) not in small:
                context = layout.context
                for other in self._laid_out(context, context.passes.hides, MARGINS[1]):
                    self.splits += self._even(other.costs)
        self._judge_of(self.splits)

    def _judge_of(self, splits: Sequence[Split]) -> None:
        """Simulate the best of each placement and number of microbatches: closed forms of one
        placement differ less from each other than from what the simulator says.
        """
        ranked = sorted(splits, key=_closed_ps)
        known: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for split in ranked:
            if sum(known.values()) >= JUDGED or split.step_ps > self._enough_ps():
                return
            kind = split.num_microbatches, split.groups
            if known[kind] < EACH:
                known[kind] += self._judge(split) is not None

    def _fits(self, one: JudgedSplit) -> bool:
        return one.timeline.peak_bytes <= self.request.limit_bytes

    def _judge(self, split: Split) -> JudgedSplit | None:
        self.contexts.work.spend()
        try:
            found = self.judge.judge(split)
        except (LayoutError, InputError):
            return None
        if found is None:
            return None
        self.judged.append(found)
        if self._fits(found):
            self.best_ps = min(self.best_ps, float(found.timeline.step_ps))
        return found

    def _promising_layouts(self) -> Layouts:
        """Layouts in which the work may be shared so that it takes no longer than the best."""
        found: dict[int, dict[int, list[ItemCosts]]] = {}
        for (size, count), layouts in self.layouts.items():
            most_ps = self.best_ps * (self.devices // size)
            own = [one.costs for one in layouts if one.costs.loads_ps.sum() < most_ps]
            if own:
                found.setdefault(count, {})[size] = own
        return found

    def judge_every(self, layouts: Layouts, most: int = EVERY) -> bool:
        """Simulate all splits of these layouts that may be faster than the best, the most promising
        first; whether they are no more than `most`.
        """
        if not layouts:
            return True
        every = EverySplit(self.judge, layouts)
        kinds = every.kinds()
        if kinds is None:
            return False
        for index, (least_ps, split) in enumerate(every.splits(kinds)):
            if least_ps >= self.best_ps:
                break
            if index >= most:
                return False
            self._judge(split)
        return True

    def _move(self) -> None:
        """Move one boundary of the best split at a time, as long as that helps."""
        fitting = [one for one in self.judged if self._fits(one)]
        best = min(fitting, key=lambda one: one.timeline.step_ps, default=None)
        if best is None:
            return
        tried = {best.split.ends}
        left = MOVED
        improved = True
        while improved and left:
            improved = False
            for split in moves(best.split):
                if split.ends in tried or not left:
                    continue
                tried.add(split.ends)
                left -= 1
                found = self._judge(split)
                if found and self._fits(found) and found.timeline.step_ps < best.timeline.step_ps:
                    best, improved = found, True
                    break


def _closed_ps(split: Split) -> float:
    return split.step_ps


def moves(split: Split) -> Iterator[Split]:
    """Splits with one boundary moved by an item, those first whose busiest group has less."""
    found: list[tuple[float, Split]] = []
    ends = split.ends
    for index in range(len(ends) - 1):
        for change in (-1, 1):
            moved = (*ends[:index], ends[index] + change, *ends[index + 1 :])
            before = moved[index - 1] if index else 0
            if before < moved[index] < moved[index + 1]:
                other = replace(split, ends=moved)
                found.append((other.step_ps, other))
    for _, other in sorted(found, key=lambda entry: entry[0]):
        yield other
