"""Pipelines beside the plans of one stage.

A context is a size of the groups of devices and a number of microbatches: the whole model is laid
out on one group by the column search, where it may hold as much as all groups together. Its items
are priced as stages of their own and split over the groups. Splits are ranked by a closed form, the
first ones are simulated, and boundaries of the best are moved.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, islice
from math import inf

import numpy as np

from parloom.cost.links import is_grid
from parloom.errors import InputError
from parloom.ir.expected import Status
from parloom.ir.mesh import part_sizes
from parloom.ir.plan import GLOBAL, Decisions
from parloom.ir.stages import stage_items
from parloom.rewrite.rewrites import takes_of
from parloom.search.anywhere import anywhere
from parloom.search.blocks import search_with_blocks
from parloom.search.conflicts import broken
from parloom.search.contexts import Contexts, SimulatedPlan
from parloom.search.least_compute import least_on_one_device, least_way_ps, least_work_ps
from parloom.search.optimize import search
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.cuts import MOST_DEVICES, MOST_SPLITS
from parloom.search.pipelines.every import EverySplit, Layouts
from parloom.search.pipelines.judge import Judge, JudgedSplit, Tried
from parloom.search.pipelines.promising import FORMS, PromisingSplits, closed_ps
from parloom.search.pipelines.split import Split
from parloom.search.placing import as_placed, best_placed
from parloom.search.prices import Known, Prices
from parloom.search.request import Request, Say, Wanted
from parloom.search.rewritten import RewrittenRequest, forms_for
from parloom.search.searched import Searched, rank
from parloom.search.work import OutOfWorkError, Work

# Splits that are simulated, of each placement, and moves of boundaries around the best of them.
JUDGED, EACH, MOVED = 12, 2, 40
# Those that are simulated as long as none fits.
UNFIT = 36
# How many splits with larger microbatches in some stage.
MERGED = 8
# Splits that are simulated where all of them may be. Where a plan is known, the most promising ones
# are looked at, so many times as many, and of many so many simulated in a row that are no better.
EVERY, MANY, PATIENCE = 300, 2, 50
# How far above the best plan closed forms of the first form of the graph may be, less what a device
# saves in another form, for pipelines of that one to be looked for.
OTHERS = 0.3
# More bytes than any device has.
UNLIMITED = 1 << 60
# The share by which a pipeline may be better for it to be looked for.
WORTH = 0.005
APART = "pipelines are not searched for microbatches that are computed by themselves"


def search_with_pipelines(request: Request, base: Decisions, say: Say) -> Searched:
    """Plans of one stage, with modules as blocks, too, and pipelines; bounds are of all. On a torus
    plans are searched as if each collective were where it is fastest, and then placed.
    """
    if not is_grid(request.cluster):
        return _search(request, base, say, lambda best: best)
    logical = replace(request, machine=anywhere(request.machine))
    found = _search(logical, base, say, partial(as_placed, request))
    return best_placed(request, found, partial(_faster, base, say), say)


def _search(
    request: Request, base: Decisions, say: Say, lies: Callable[[SimulatedPlan], SimulatedPlan]
) -> Searched:
    """Plans of all kinds; pipelines are faster than the best plan of one stage as it `lies`."""
    if not request.pinned.allows_stages(1):
        return pipelines_alone(request, base, say)
    answers: list[Searched] = []

    def pipelines(best: SimulatedPlan | None, budget: int | None) -> Searched | None:
        laid = best and lies(best)
        found = search_pipelines(replace(request, budget=budget), base, laid, say)
        answers.extend(filter(None, [found]))
        return found

    plain = search_with_blocks(request, base, say, pipelines)
    if plain.status is Status.OUT_OF_BUDGET and not answers:
        pipelines(None, 0)
    return reduce(Searched.beside, answers, plain)


def _faster(base: Decisions, say: Say, request: Request, best: SimulatedPlan) -> Searched:
    """Plans that are faster than `best`, of the kinds that pins allow."""
    if not request.pinned.allows_stages(1):
        return search_pipelines(request, base, best, say) or Searched((), inf, inf)
    plain = search(request, base, say, best)
    if plain.status is not Status.COMPLETE:
        return plain
    left = replace(request, budget=plain.work_left)
    more = search_pipelines(left, base, min((best, *plain.proposals), key=rank), say)
    if more is None:
        return plain
    return replace(plain.beside(more), status=more.status, work_left=more.work_left)


def pipelines_alone(request: Request, base: Decisions, say: Say) -> Searched:
    """The answer where pins want several stages; raises `InputError` where none holds them."""
    found = search_pipelines(request, base, None, say) or Searched((), inf, inf)
    if found.proposals or found.smallest or found.status is not Status.COMPLETE:
        return found
    say("no pipeline fits that holds the pins: searching with all the memory there could be")
    roomy = search_pipelines(replace(request, limit_bytes=UNLIMITED), base, None, say) or found
    plans = (*roomy.proposals, *filter(None, [roomy.smallest]))
    smallest = min(plans, key=lambda plan: plan.peak_bytes, default=None)
    if smallest is None:
        asked = ", ".join(pin.text for pin in request.pinned.pins)
        more = f": {found.left_out}" if found.left_out else ""
        raise InputError(f"{asked}: no pipeline that holds this was found{more}")
    return replace(found, smallest=smallest)


def search_pipelines(
    request: Request, base: Decisions, best: SimulatedPlan | None, say: Say
) -> Searched | None:
    """Pipelines that are faster than `best`, and what none takes less than; None where there are
    none such. What they send is not quantized. They have the form of `best`, or the one with which
    one device computes least; where that changes main, the model's own comes first, in which
    branches that a rewrite joins may be on different devices, and says what promises most.
    """
    if request.cluster.num_devices == 1 or request.wanted is Wanted.PRICE:
        return None
    request = replace(request, quantizes=False)
    if request.batch_semantics != GLOBAL:  # some methods make pipelines of them
        least_ps = least_pipeline_ps(Contexts(request, base, forms_for(request)))
        return Searched((), least_ps, inf, left_out=APART, work_left=request.budget)
    if not any(map(request.pinned.allows_stages, range(2, len(stage_items(request.graph)) + 1))):
        return None
    try:
        contexts = Contexts(request, base, forms_for(request))
        forms, bound_ps = _forms_of(best, contexts), least_pipeline_ps(contexts)
    except OutOfWorkError:
        return Searched((), 0.0, inf, Status.OUT_OF_BUDGET)
    except KeyboardInterrupt:
        return Searched((), 0.0, inf, Status.INTERRUPTED)
    best_ps, work = best.step_ps if best else inf, Work(request.budget)
    every = [
        FormPipelines(request, base, own, best_ps, work, contexts.shared, say) for own in forms
    ]
    status = Status.COMPLETE
    try:
        for one in every:
            one.look(every[0])
        nearby_ps = min(one.fastest_ps for one in every) * (1 + FORMS)
        for one in sorted(every, key=lambda one: one.fastest_ps):
            if one.fastest_ps <= nearby_ps:
                one.finish(min(other.best_ps for other in every))
    except OutOfWorkError:
        status = Status.OUT_OF_BUDGET
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    try:
        answers = [one.answer() for one in every]
    except KeyboardInterrupt:  # it takes a moment: what was found is kept
        status, answers = Status.INTERRUPTED, [one.answer() for one in every]
    bound_ps = 0.0 if status is Status.INTERRUPTED else bound_ps
    found = reduce(Searched.beside, answers)
    return replace(found, bound_ps=bound_ps, status=status, work_left=work.left)


class FormPipelines:
    """Pipelines of one form of the graph that are faster than `best_ps`. What was found of another
    form is not known to them: what is near a split need not be as fast at first.
    """

    def __init__(
        self,
        asked: Request,
        base: Decisions,
        rewrites: Sequence[str],
        best_ps: float,
        work: Work,
        shared: Known,
        say: Say,
    ) -> None:
        self.form, self.base = RewrittenRequest(asked, rewrites), base
        self.best_ps, self.work, self.shared, self.say = best_ps, work, shared, say
        self.searches: list[PipelineSearch] = []

    def look(self, first: "FormPipelines") -> None:
        """Simulate what promises most on all devices; nothing where that of `first` is far from the
        best plan even with what a device takes less in this form.
        """
        request = self.form.request
        whole = self._add(Contexts(request, self.base, work=self.work, shared=self.shared))
        if first is self or first.promises(whole.splits.share_ps, self.best_ps):
            whole.look()
        self.best_ps = whole.best_ps

    def promises(self, share_ps: float, best_ps: float) -> bool:
        """Whether pipelines may be near `best_ps` that take as many times their equal share of the
        least work as those of this form do.
        """
        whole = self.searches[0]
        return whole.promised_ps * share_ps <= best_ps * (1 + OTHERS) * whole.splits.share_ps

    @property
    def fastest_ps(self) -> float:
        """The step of the fastest pipeline that was simulated and fits."""
        found = chain.from_iterable(search.tried.fitting()[:1] for search in self.searches)
        return min((float(one.step_ps) for one in found), default=inf)

    def finish(self, best_ps: float) -> None:
        """Look for what is faster than `best_ps` among all splits, where they are few; and on parts
        of several devices, where some may be left idle and all are few.
        """
        whole = self.searches[0]
        whole.best_ps = best_ps
        whole.look_at_every()
        self.best_ps, request = whole.best_ps, self.form.request
        if request.cluster.num_devices <= MOST_DEVICES:
            for own in request.parts():
                if own.cluster.num_devices > 1:
                    part = self._add(whole.contexts.on_part(own))
                    part.look()
                    part.look_at_every()
                    self.best_ps = part.best_ps

    def answer(self) -> Searched:
        """What was found; it has no bound of its own."""
        smallest: SimulatedPlan | None = None
        for own in self.searches:
            smallest = own.smallest(smallest)
        plans = chain.from_iterable(own.plans() for own in self.searches)
        return Searched(
            tuple(sorted(plans, key=lambda plan: plan.step_ps)),
            # Parts of the cluster have fewer devices for the same work.
            0.0,
            inf,
            left_out=self.searches[0].contexts.refusals.words() if self.searches else "",
            smallest=smallest,
        ).of(self.form)

    def _add(self, contexts: Contexts) -> "PipelineSearch":
        self.searches.append(PipelineSearch(contexts, self.best_ps, self.say))
        return self.searches[-1]


def _forms_of(best: SimulatedPlan | None, contexts: Contexts) -> Collection[tuple[str, ...]]:
    """The forms that pipelines have: that of the best plan, but for one with modules as blocks,
    which stages have not; that with which one device computes least; and the model's own where
    these change main, in which branches that a rewrite joins may be on different devices.
    """
    found = [tuple(least_on_one_device(contexts)[1].rewrites)]
    if best is not None and len(takes_of(best.decisions.rewrites)) == len(best.decisions.rewrites):
        found.append(best.decisions.rewrites)
    main = contexts.request.graph.main.name
    if any(take.function == main for own in found for take in takes_of(own)):
        found.insert(0, ())
    return dict.fromkeys(found)


def holds_pins(request: Request, decisions: Decisions) -> bool:
    """Whether a plan holds all that is pinned, but for rewrites: those of its form are made before,
    and are not in these decisions.
    """
    return broken(request.pinned.without_rewrites(), request.graph, decisions) is None


def least_pipeline_ps(contexts: Contexts) -> float:
    """No pipeline takes less: an equal share of what one device computes that does all the work,
    and what the forward pass of the smallest microbatch computes on its longest way.

    More microbatches compute no less in all, and no more each; the parts of an operator take no
    less together than all of it; a stage has as many choices on a part of the devices as on a
    divisor of it.
    """
    request, devices = contexts.request, contexts.request.cluster.num_devices
    share_ps = least_work_ps(contexts) / devices
    # With pins a part has choices that they leave no divisor of it; a batch that follows another
    # waits for no way.
    if request.pinned.pins or request.passes_follow:
        return share_ps
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


class PipelineSearch:
    """Searches pipelines that are faster than `best_ps`; none takes less than `least_ps`."""

    def __init__(self, contexts: Contexts, best_ps: float, say: Say) -> None:
        self.contexts, self.request = contexts, contexts.request
        self.best_ps, self.least_ps = best_ps, least_pipeline_ps(contexts)
        share_ps = least_work_ps(contexts) / self.request.cluster.num_devices
        self.splits = PromisingSplits(contexts, share_ps, best_ps, say)
        # The least closed form; 0 where there was none.
        self.promised_ps = 0.0
        judge = Judge(self.request, contexts.whole.factored, contexts.refusals)
        self.tried = Tried(judge, contexts.work.spend)

    def look(self) -> None:
        """Simulate what promises most, and what is near the best of that."""
        if self.least_ps > self.best_ps * (1 - WORTH):
            return
        self.splits.look()
        self.promised_ps = min(map(closed_ps, self.splits.found), default=0.0)
        self._judge_best()
        self._climb()

    def look_at_every(self) -> None:
        """Simulate all splits of the layouts that were looked at, where they are few."""
        layouts, before = self._promising_layouts(), self.best_ps
        if layouts:
            self.judge_every(EverySplit(self.tried.judge, layouts, self.tried.spend))
        if self.best_ps < before:
            self._climb()

    def plans(self) -> Iterator[SimulatedPlan]:
        """The plans that fit, as they are predicted; where none fits, none."""
        holding = (one for one in self.tried.fitting() if holds_pins(self.request, one.decisions))
        for one in islice(holding, 2):
            yield one.predicted(self.request)

    def smallest(self, known: SimulatedPlan | None) -> SimulatedPlan | None:
        """The smallest of all plans that were simulated, `known` among them."""
        judged = sorted(self.tried.judged, key=lambda one: one.timeline.peak_bytes)
        holding = (one for one in judged if holds_pins(self.request, one.decisions))
        found = next(holding, None)
        if found is None or (known and known.peak_bytes <= found.timeline.peak_bytes):
            return known
        return found.predicted(self.request)

    def _judge_best(self) -> None:
        """Simulate the splits with the least closed forms; layouts of those that do not fit are
        made for less memory.
        """
        self._judge_splits()
        if not self.tried.fitting():
            self.splits.make_smaller(one.split for one in self.tried.judged)
            self._judge_splits()

    def _judge_splits(self) -> None:
        """Simulate the best of each placement and number of microbatches: closed forms of one
        placement differ less from each other than from what the simulator says. Where none fits,
        more are looked at, as long as they promise to be faster than plans of one stage.
        """
        known: Counter[tuple[int, tuple[int, ...]]] = Counter()
        seen: set[tuple[object, ...]] = set()
        for split in sorted(self.splits.found, key=closed_ps):
            judged, fitting = sum(known.values()), self.tried.fitting()
            most, enough_ps = JUDGED, self.splits.enough_ps(self.best_ps)
            if not fitting:  # what promises more than these need not fit either
                most, enough_ps = UNFIT, self.best_ps * (1 + FORMS)
            if judged >= most or split.step_ps > enough_ps:
                return
            kind = split.num_microbatches, split.groups
            form = (*kind, split.step_ps, split.stored_bytes(), split.ends, split.costs[0].items)
            # Layouts on several meshes may be alike in all but names.
            if known[kind] < EACH and form not in seen:
                known[kind] += self._judge(split) is not None
            seen.add(form)

    def _judge(self, split: Split) -> JudgedSplit | None:
        found = self.tried.play(split)
        if found is not None and found.fits:
            self.best_ps = min(self.best_ps, float(found.step_ps))
        return found

    def _promising_layouts(self) -> Layouts:
        """The layouts of each number of microbatches with which all groups together, each item in
        the layout that is the best for it, take no longer than the best plan.
        """
        found: dict[int, dict[int, list[ItemCosts]]] = {}
        for (size, count), layouts in self.splits.layouts.known.items():
            if layouts:
                found.setdefault(count, {})[size] = [one.costs for one in layouts]
        for count, by_size in list(found.items()):
            times = [size * own.loads_ps for size, each in by_size.items() for own in each]
            if np.min(times, axis=0).sum() >= self.best_ps * self.request.cluster.num_devices:
                del found[count]
        return found

    def _climb(self) -> None:
        """Change the best split: its boundaries, and then the microbatches of its stages."""
        for best in self.tried.fitting()[:1]:
            self.tried.move(best, MOVED)
            self.tried.merge(self.contexts.counts, MERGED)
        self.best_ps = min([self.best_ps, *(one.step_ps for one in self.tried.fitting()[:1])])

    def judge_every(self, every: EverySplit, most: int = EVERY) -> None:
        """Simulate all splits that may be faster than the best, the most promising first, and as
        long as they become faster where they are many.
        """
        every.enough_ps = self.best_ps
        many = MANY * most if self.best_ps < inf else MOST_SPLITS
        cuts = every.promising(many)
        are_few = sum(len(own.chains) for own in cuts) < many
        better = 0
        for index, (_, split) in enumerate(every.splits(cuts)):
            if index >= most or (index > better + PATIENCE and not are_few):
                return
            self._judge(split)
            if self.best_ps < every.enough_ps:
                every.enough_ps, better = self.best_ps, index
