"""The search: contexts (meshes and numbers of microbatches), their models, and the simulator.

Contexts are looked at in the order of their number of microbatches. One whose bound, proved at the
shadow prices of the best context so far, is no better than the best plan is done; of the others
columns are generated, composed and simulated. Finer meshes are made of the best.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import inf

from parloom.cost.units import format_seconds
from parloom.ir.expected import Status
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, one_stage
from parloom.search.choices import Menu
from parloom.search.climb import climbed, cost
from parloom.search.contexts import (
    Contexts,
    ContextSearch,
    EstimateErrors,
    SimulatedCandidate,
    SimulatedPlan,
)
from parloom.search.decide import form_of
from parloom.search.finer import FinerMenus, LeastCosts
from parloom.search.folding import program_of
from parloom.search.least import batch_bytes, least_share
from parloom.search.least_compute import least_compute_ps, least_work_ps
from parloom.search.local_search import PATIENCE, improved
from parloom.search.meshes import MAX_AXES, joined, on_all
from parloom.search.microbatch import microbatch_of
from parloom.search.near_forms import NEAR_BOUNDS, NEAR_FORMS, ROUGH, NearForms, Rewrites
from parloom.search.program import Program
from parloom.search.request import Request, Say, Wanted
from parloom.search.rewritten import RewrittenRequest, forms_for
from parloom.search.searched import Searched, rank
from parloom.search.step_rows import ShadowPrices
from parloom.search.stream_bound import StepBounds
from parloom.search.work import OutOfWorkError, Work

# Meshes (of one axis, and cut between levels) on which all numbers of microbatches come first.
FIRST = 2
# Contexts from which local search starts, and how far from the best their plans are at most.
LOCAL, NEARBY = 3, 0.03
# Plans that are no better, one after the other, before finer meshes are made.
SHORT = 12
# Operators of plans that are simulated where estimates leave no room.
FEW_OPERATORS = 6_000
# The share by which a plan may be better for local search to look for it.
WORTH = 0.005
# Contexts of which finer meshes are made.
PARENTS = 2
# How near to the best plan a bound is near enough.
NEAR = 0.004
# How far behind a pipeline plans of one stage are at most around which others are looked for where
# bounds leave no room: these were up to a fifth faster (zoo:cnn over slow links).
BEHIND = 0.2
# Plans of a part whose work the other devices repeat that are simulated on all of them.
REPEATED = 4
# The share by which a step may be longer where fewer devices count as as fast.
SAME = 0.01
# How near to the best estimate bounds are brought.
CLOSED = 0.0075
# The share by which a finer mesh must be better for its own refinements to be looked at.
BETTER = 0.002
# More bytes than any device has.
UNLIMITED = 2.0**80


Space = Callable[[SimulatedPlan | None, int | None], Searched | None]
"""The same question in another space: only faster plans than the best so far, with what is left of
the budget; None where there is no such space.
"""


def search(
    request: Request,
    base: Decisions,
    say: Say,
    incumbent: SimulatedPlan | None = None,
    wider: Space | None = None,
    pipelines: Space | None = None,
) -> Searched:
    """Plans that answer `request`, with the dtypes of `base`: those faster than `incumbent`, than
    those of `pipelines`, and, where memory limits plans, than those of `wider`, in which plans hold
    less. What other spaces answer is not among them.

    Ctrl-C ends the search with what it has, and so does a budget (see `Work`).
    """
    devices = request.cluster.num_devices
    if least_share(request.graph, base, request.optimizer, devices) > request.limit_bytes:
        say("nothing fits: weights and their states alone take more than all devices may hold")
        return Searched((), 0.0, inf)
    driver: Driver | None = None
    status = Status.COMPLETE
    try:
        driver = Driver(request, base, say, incumbent, wider, pipelines)
        try:
            driver.run()
        except OutOfWorkError:
            status = Status.OUT_OF_BUDGET
            # A part of equal devices computes no less: all of the cluster may do the same work.
            others = (p for p in request.parts() if p.cluster.device != request.cluster.device)
            spaces = (driver.contexts, *map(driver.contexts.on_part, others))
            driver.bound_ps = min(map(least_compute_ps, spaces))
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    if driver is None:
        return Searched((), 0.0, inf, Status.INTERRUPTED)
    found = chain(driver.climbed, driver.judged())
    played = list({plan.decisions: plan for plan in found}.values())
    if request.all_devices:
        played = _on_all(request, played)
    fitting = [found for found in played if found.peak_bytes <= request.limit_bytes]
    return Searched(
        tuple(sorted(fitting, key=rank)),
        driver.bound_ps,
        driver.estimate_bound_ps,
        status,
        driver.finer.left_out,
        min(played, key=lambda found: (found.peak_bytes, found.step_ps), default=None),
        driver.contexts.work.left,
    )


def _on_all(request: Request, plans: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """These plans on all devices: of a part, those that are faster and fit, where the others repeat
    its work. Ctrl-C leaves out the rest of these.
    """
    devices, limit = request.cluster.num_devices, request.limit_bytes
    whole = [plan for plan in plans if plan.decisions.num_ranks == devices]
    least_ps = min((plan.step_ps for plan in whole if plan.peak_bytes <= limit), default=inf)
    some = [p for p in plans if p.decisions.num_ranks < devices and p.peak_bytes <= limit]
    faster = sorted((plan for plan in some if plan.step_ps < least_ps), key=rank)
    with suppress(KeyboardInterrupt):
        for plan in faster[:REPEATED]:
            mesh = on_all(plan.decisions.mesh, request.cluster)
            if mesh is not None:
                decisions = replace(plan.decisions, stages=one_stage(mesh))
                whole.append(SimulatedPlan(decisions, request.predict(decisions)))
    return whole


class Driver:
    """Searches all contexts of a question, for plans that are faster than `incumbent`."""

    def __init__(
        self,
        request: Request,
        base: Decisions,
        say: Say,
        incumbent: SimulatedPlan | None = None,
        wider: Space | None = None,
        pipelines: Space | None = None,
    ) -> None:
        self.request, self.say, self.incumbent = request, say, incumbent
        self.wider, self.pipelines = wider, pipelines
        self.contexts = Contexts(request, base, forms_for(request))
        # Of the whole cluster and of parts of it, by the number of devices.
        self.on = {request.cluster.num_devices: self.contexts}
        self.seen, self.duals = EstimateErrors(batch_bytes(request.graph)), ShadowPrices()
        self.best_ps = incumbent.step_ps if incumbent else inf
        self.looked, self.steps = list[ContextSearch](), StepBounds()
        # Bounds of contexts as if memory had no limit.
        self.unlimited: dict[tuple[Mesh, int], float] = {}
        self.estimate_bound_ps = self.bound_ps = 0.0
        # The takes with which solutions of all forms began last.
        self.part: frozenset[int] | None = None
        self.finer, self.climbed = FinerMenus(), list[SimulatedPlan]()
        self.forms = NearForms(self.contexts)

    def run(self) -> None:
        """All contexts of the cluster, then those of parts as long as these may be as fast."""
        self._look_on(self.contexts.meshes)
        if self.request.wanted is Wanted.PRICE:
            return
        self._improve(SHORT)
        self._refine()
        for request in chain(self.request.parts(), self.request.repeated()):
            contexts = self.contexts.on_part(request)
            devices = request.cluster.num_devices
            if not least_work_ps(contexts) / devices <= self._enough_ps(devices) < inf:
                break
            self.on[devices] = contexts
            self._look_on(contexts.meshes)
        self._refine()
        self._improve()
        self._climb()
        self._close()
        if self.request.wanted is Wanted.PROOF and self.best_ps < inf:
            self.bound_ps = self.steps.least_of(self.every())

    def _look_on(self, meshes: Sequence[Mesh]) -> None:
        """The contexts on the first meshes, pipelines, and the rest, which has plans to beat."""
        for some in (meshes[:FIRST], meshes[FIRST:]):
            for count in self.contexts.counts:
                for mesh in some:
                    program = self.contexts.on(mesh, count)
                    if program is not None and not self._is_beaten(mesh, count):
                        self._look(program, mesh, count, self._menus(program, mesh, count))
                if self.request.wanted is not Wanted.PRICE:
                    self._widen()
            if self.pipelines is not None:
                self._ask(self.pipelines)
                self.pipelines = None
        if self.best_ps == inf:
            self._widen()

    def _widen(self) -> None:
        """Search the wider space, once and where memory limits plans."""
        if self.wider is not None and _is_limited(self.looked, self.seen, self.best_ps):
            self._ask(self.wider)
            self.wider = None

    def _ask(self, space: Space) -> None:
        """Search another space: all that this one still looks at has its plans to beat."""
        found = _searched(space, self._best(), self.contexts.work)
        if found is not None:
            self.incumbent = min([found, *filter(None, [self.incumbent])], key=_step_ps)
            self.best_ps = min(self.best_ps, found.step_ps)

    def _best(self) -> SimulatedPlan | None:
        """The fastest plan that fits."""
        fitting = (f for f in self.judged() if f.peak_bytes <= self.request.limit_bytes)
        known = chain(filter(None, [self.incumbent]), fitting, self.climbed)
        return min(known, key=_step_ps, default=None)

    def _enough_ps(self, devices: int) -> float:
        """The step that plans on so many must be below; where fewer may do, one that is as fast."""
        fewer = devices < self.request.cluster.num_devices and not self.request.all_devices
        return self.best_ps * (1 + SAME if fewer else 1 - NEAR)

    def _is_beaten(self, mesh: Mesh, count: int) -> bool:
        """Whether a part of so many microbatches is no better than the best plan even if memory had
        no limit: more microbatches compute and send no less.
        """
        return any(
            count % fewer == 0 and bound >= self._enough_ps(mesh.num_ranks)
            for (other, fewer), bound in self.unlimited.items()
            if other == mesh
        )

    def _menus(self, program: Program, mesh: Mesh, count: int) -> Sequence[Menu]:
        """The choices on a mesh: all, but for one of three axes and more, which pins ask for."""
        if len(mesh.axes) <= MAX_AXES:
            return ()
        costs = LeastCosts()
        free = program_of(program.graph, program.factored, forms=program.forms)
        cut = microbatch_of(free, count) or free
        for coarse in joined(mesh):
            context = self.on[mesh.num_ranks].search(cut, coarse, count)
            context.run(self.duals)
            costs.add(context)
        return self.finer.of(program, mesh, costs)

    def _look(
        self,
        program: Program,
        mesh: Mesh,
        count: int,
        menus: Sequence[Menu] = (),
        parent: ContextSearch | None = None,
    ) -> None:
        """Bounds of a context, and plans where these promise some: on a mesh that is finer than
        that of `parent`, where plans that are as far above the bound as there would be better.
        """
        context = self.on[mesh.num_ranks].search(program, mesh, count, menus)
        self.looked.append(context)
        context.columns.minimizer.part = self.part or None  # none was better: elsewhere one may be
        free = self.duals.with_byte(0.0)
        for duals in dict.fromkeys((free, self.duals)):
            context.columns.prove(duals, ROUGH, climbs=False)
        self.unlimited[mesh, count] = context.columns.bounds[free]
        context.limit = max(1.0, self.request.limit_bytes - self.seen.beyond_bytes(count))
        expected_ps = _expected_ps(context, parent, self.every()) if parent else 0.0
        if self._promises(context) and expected_ps < self.best_ps * (1 - BETTER):
            context.run(self.duals, self._enough_ps(mesh.num_ranks) / min(1.0, self.seen.ratio))
            if self._promises(context):
                before, enough = self.best_ps, self._enough_ps(mesh.num_ranks)
                self.best_ps = min(before, context.improve(max(before, enough), self.seen))
                if self.best_ps < before:
                    self.duals = context.duals
            self.part = context.columns.minimizer.part
        self.say(_progress(context, self.request.limit_bytes, self.best_ps))

    def _promises(self, context: ContextSearch) -> bool:
        """Whether a context may have better plans, if they hold as much beyond what is counted as
        those did that were simulated.
        """
        bound = context.columns.bound_ps(context.limit)
        enough = self._enough_ps(context.mesh.num_ranks)
        return bound < enough and self.seen.promises(bound, max(enough, self.best_ps))

    def _refine(self) -> None:
        """Meshes with an axis of the best ones cut in two, and on from what is better."""
        while self.best_ps < inf:
            before = self.best_ps
            fastest = {context: _fastest_there(context, self.every()) for context in self.looked}
            nearest = sorted(self.looked, key=fastest.__getitem__)
            for parent in nearest[: PARENTS if self._has_room() else 1]:
                if fastest[parent] <= _nearby_ps(self.every(), before, self._has_room()):
                    self._refine_one(parent)
            if self.best_ps > before * (1 - BETTER):
                return

    def _has_room(self) -> bool:
        """Whether bounds on estimates allow a plan that is better by more than a little."""
        least = min((c.columns.bound_ps(self._counted(c)) for c in self.every()), default=inf)
        return self.best_ps > least * self.seen.ratio * (1 + WORTH)

    def _refine_one(self, parent: ContextSearch) -> None:
        count = parent.num_microbatches
        program = self.contexts.program(count)
        assert program is not None, "it was searched"
        known = {mesh for mesh, other in self.unlimited if other == count}
        for mesh, menus in self.finer.refinements(program, parent, tuple(self.looked), known):
            self._look(program, mesh, count, menus, parent)

    def _improve(self, patience: int = PATIENCE) -> None:
        """Local search on the simulator from the fastest plans of some contexts; a short one where
        estimates leave no room for better ones, as all of them may be wrong.
        """
        self.forms.look(sorted(self.looked, key=_promise), self._best(), self.seen)
        enough = _nearby_ps(self.every(), self.best_ps, self._has_room()) / (1 + NEARBY)
        close = list(_nearest_of_forms(self.forms.instead(self.looked), enough))
        some = self.steps.below(self.best_ps * (1 + SAME), close)
        if self._has_room():
            improved(some, self.seen, patience=patience)
        else:
            improved(some, self.seen, patience=SHORT, operators=FEW_OPERATORS)
        self.best_ps = min([self.best_ps, *map(_fastest, self.every())])

    def _climb(self) -> None:
        """Change the best plans, whatever a model says (see `_starts`)."""
        limit = self.request.limit_bytes
        for start, context in _starts(self.every(), limit).items():
            near = cost(start, limit) <= _nearby_ps(self.every(), self.best_ps, self._has_room())
            if near and self.steps.any_below(self.best_ps * (1 + SAME), self.every()):
                self.climbed += _climbed(context, start)
                self.best_ps = min([self.best_ps, *(found.step_ps for found in self.climbed)])

    def _close(self) -> None:
        """Bring bounds near the best estimate of what fits; pipelines have none."""
        limit, fastest = self.request.limit_bytes, self._best()
        if fastest is not None and len(fastest.decisions.stages) > 1:
            return
        fitting = (f for f in self.judged() if f.peak_bytes <= limit)
        known = chain(filter(None, [self.incumbent]), fitting)
        best = min((found.estimate_ps for found in known), default=inf)
        bounds = []
        for context in self.every():
            counted = self._counted(context)
            if context.columns.bound_ps(counted) < best * (1 - CLOSED) < inf:
                context.columns.run(counted, context.duals, CLOSED / 4)
            bounds.append(context.columns.bound_ps(counted))
        self.estimate_bound_ps = min(bounds, default=0.0)

    def _counted(self, context: ContextSearch) -> float:
        """The limit on what the model counts that plans which fit obey, as far as was seen."""
        beyond = self.seen.beyond_bytes(context.num_microbatches)
        held = (found.candidate.sums.held_bytes for found in context.fitting())
        return max([self.request.limit_bytes - beyond, *held])

    def judged(self) -> Iterator[SimulatedCandidate]:
        """All candidates that were simulated."""
        return chain.from_iterable(context.judged.values() for context in self.every())

    def every(self) -> Sequence[ContextSearch]:
        """All contexts, also those of one form, which may have layouts that all together lack."""
        return [*self.looked, *self.forms.looked]


def _searched(space: Space, best: SimulatedPlan | None, work: Work) -> SimulatedPlan | None:
    """The fastest plan of another space that was asked for faster ones than `best`; it ends as
    this search does.
    """
    found = space(best, work.left)
    if found is None:
        return None
    if found.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    if work.left is not None and found.work_left is not None:
        work.spend(work.left - found.work_left)
    if found.status is Status.OUT_OF_BUDGET:
        raise OutOfWorkError
    return next(iter(found.proposals), None)


def _nearby_ps(looked: Sequence[ContextSearch], best_ps: float, has_room: bool) -> float:
    """How long plans take at most around which others are looked for: little longer than the best
    of one stage, which may be behind a pipeline where bounds leave room for better ones.
    """
    own = min(map(_fastest, looked), default=inf)
    return (own if has_room or own <= best_ps * (1 + BEHIND) else best_ps) * (1 + NEARBY)


def _is_limited(looked: Sequence[ContextSearch], seen: EstimateErrors, best_ps: float) -> bool:
    """Whether memory makes the bound of a context higher that promises a better plan."""
    if best_ps == inf:
        return bool(looked)
    for context in looked:
        free = context.columns.bound_ps(UNLIMITED)
        limited = context.columns.bound_ps(context.limit) > free * (1 + WORTH)
        if limited and free * seen.ratio < best_ps * (1 - WORTH):
            return True
    return False


def _progress(context: ContextSearch, limit_bytes: int, best_ps: float) -> str:
    """A context that was looked at, and the best plan so far, in words."""
    sizes = " x ".join(f"{axis.name}={axis.size}" for axis in context.mesh.axes)
    count = context.num_microbatches
    cut = f", {count} microbatches" if count > 1 else ""
    bound = context.columns.bound_ps(limit_bytes)
    best = f"best so far {_seconds(best_ps)}" if best_ps < inf else "nothing fits yet"
    return f"mesh {sizes}{cut}: no estimate below {_seconds(bound)}; {best}"


def _climbed(context: ContextSearch, start: SimulatedCandidate) -> Iterator[SimulatedPlan]:
    """Plans of the same form that climbing finds from one."""
    form = form_of(context.layouts, start.candidate.values)
    own = RewrittenRequest(context.request, form.rewrites)
    program = program_of(own.request.graph, form.factored, own.request.pinned)
    plain = SimulatedPlan(replace(start.decisions, rewrites=()), start.prediction)
    yield from map(own.as_asked, climbed(own.request, program, plain, context.work))


def _nearest_of_forms(contexts: Sequence[ContextSearch], best_ps: float) -> Iterator[ContextSearch]:
    """The contexts with the fastest plans of each form that is near the best one. Of contexts with
    equal ones (a finer mesh may have the best plan of a coarser one) it is that with the lowest
    bound, and of those the finest, whose plan has the most neighbors. Forms are near whose plans
    are, and whose bounds are little above that of the form with the fastest plan.
    """
    forms: dict[Rewrites, dict[float, ContextSearch]] = {}
    for context in sorted(contexts, key=_room):
        for found in sorted(context.fitting(), key=_step_ps)[:1]:
            forms.setdefault(found.decisions.rewrites, {})[found.step_ps] = context
    every = sorted(forms.values(), key=min)
    bounds = [min(c.columns.bound_ps(c.limit) for c in own.values()) for own in every]
    for own, bound_ps in zip(every, bounds, strict=True):
        above_ps = (min(every[0]) - bounds[0]) * NEAR_BOUNDS
        if min(own) <= best_ps * (1 + NEAR_FORMS) and bound_ps <= bounds[0] + above_ps:
            nearby = sorted(own.items())[:LOCAL]
            yield from (c for ps, c in nearby if ps <= min(own) * (1 + NEARBY))


def _room(context: ContextSearch) -> tuple[int, int]:
    """Sorts contexts of equal plans: last that with the lowest bound, or with the most axes."""
    return -round(context.columns.bound_ps(context.limit)), len(context.mesh.axes)


def _starts(
    looked: Sequence[ContextSearch], limit_bytes: int
) -> dict[SimulatedCandidate, ContextSearch]:
    """Where climbing begins: the best of all plans that were simulated, which would be better if it
    held a little less or fits, and the best of each form that fits; with their contexts.
    """
    every = {found: context for context in looked for found in context.judged.values()}
    ranked = sorted(every, key=lambda found: cost(found, limit_bytes))
    fitting = [found for found in ranked if found.peak_bytes <= limit_bytes]
    forms = {found.decisions.rewrites: found for found in reversed(fitting)}
    starts = dict.fromkeys((*ranked[:1], *sorted(forms.values(), key=_step_ps)))
    return {start: every[start] for start in starts}


def _expected_ps(
    context: ContextSearch, parent: ContextSearch, every: Sequence[ContextSearch]
) -> float:
    """The step of plans that are as far above the bound as the best one of `parent`."""
    above = _fastest_there(parent, every) / max(parent.columns.bound_ps(parent.limit), 1.0)
    return context.columns.bound_ps(context.limit) * above


def _fastest_there(context: ContextSearch, every: Sequence[ContextSearch]) -> float:
    """The fastest step on the mesh of a context, with as many microbatches, of any form."""
    mesh, count = context.mesh, context.num_microbatches
    return min(_fastest(c) for c in every if (c.mesh, c.num_microbatches) == (mesh, count))


def _fastest(context: ContextSearch) -> float:
    return min((found.step_ps for found in context.fitting()), default=inf)


def _promise(context: ContextSearch) -> tuple[float, float]:
    """The fastest plan, or else what plans take at least."""
    return _fastest(context), context.columns.bound_ps(context.limit)


def _step_ps(found: SimulatedPlan) -> float:
    return found.step_ps


def _seconds(ps: float) -> str:
    return format_seconds(ps / 1e12)
