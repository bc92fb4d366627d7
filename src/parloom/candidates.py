"""Candidates for a plan: rules of thumb, what the search over layouts proposes, and what methods of
other systems do.

With the method `auto` the rules of thumb are always among the candidates, so that a searched plan
never loses to them in prediction.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType

from parloom.comparators.alpa import alpa_intra
from parloom.comparators.alpa_inter import alpa_inter
from parloom.comparators.alpa_stages import alpa
from parloom.comparators.baselines import RULES
from parloom.comparators.drawn import drawn
from parloom.comparators.fixed_form import Algebra, FixedForm
from parloom.comparators.flexflow import flexflow
from parloom.comparators.graphpipe import graphpipe
from parloom.comparators.grid import MOST, Grid
from parloom.comparators.pet import pet
from parloom.comparators.pipelines import gpipe, pipedream, whale
from parloom.comparators.plans import on_one_device
from parloom.comparators.sequential import sequential
from parloom.comparators.taso import taso
from parloom.comparators.tensat import tensat
from parloom.comparators.tofu import tofu
from parloom.comparators.unity import unity
from parloom.cost.units import format_seconds
from parloom.errors import (
    BudgetError,
    InputError,
    LayoutError,
    ParloomError,
    StoppedError,
    one_line,
)
from parloom.ir.expected import Status
from parloom.ir.plan import ActivationDecision, Decisions
from parloom.ir.regular_parts import RegularPart, moved_by
from parloom.search.blocks import smallest_with_blocks
from parloom.search.conflicts import broken
from parloom.search.contexts import Contexts, SimulatedPlan
from parloom.search.least import conflict
from parloom.search.least_compute import least_work_ps
from parloom.search.optimize import SAME
from parloom.search.pipelines.auto import search_with_pipelines
from parloom.search.pipelines.mixed import across_parts
from parloom.search.quantized import faster_in_int8
from parloom.search.request import AUTO, Request, Say, ScoredPlan, base_of
from parloom.search.rewritten import as_pinned, forms_for, with_takes
from parloom.search.searched import Searched
from parloom.search.stripes import with_stripes

RANDOM = "random"
SPENT = f"{AUTO}: the budget (--budget) is used up; the best until then"
# Plans of each rule of thumb that are simulated beside a search.
BESIDE = 8
# How many of the search's proposals stand in a plan.
PROPOSED = 4
# On one mesh there are dozens of plans that differ in a weight or two: who chooses among proposals
# wants another mesh, or a step or a peak that differ by more than these shares.
STEP_APART, PEAK_APART = 0.01, 0.05
Comparator = Callable[[Request, Decisions, Say], Iterator[Decisions]]
"""Plans for a request with the dtypes and recomputation of the decisions given."""
COMPARATORS: Mapping[str, Comparator] = MappingProxyType(
    {
        "alpa": alpa,
        "alpa_inter": alpa_inter,
        "alpa_intra": alpa_intra,
        "flexflow": flexflow,
        "gpipe": gpipe,
        "graphpipe": graphpipe,
        "pipedream": pipedream,
        "tofu": tofu,
        "unity": unity,
        "whale": whale,
    }
)
ALGEBRA: Mapping[str, Algebra] = MappingProxyType(
    {"sequential": sequential, "taso": taso, "tensat": tensat, "pet": pet}
)
"""Methods that choose a form of the model, whose layouts `auto` chooses."""
# Those that have something to choose on one device.
ALONE = ("unity",)
# Those that are of devices of several types.
ACROSS = ("whale",)
# What plans are called where that is not the method's name.
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "alpa_inter": "alpa, inter-operator part",
        "alpa_intra": "alpa, intra-operator part",
    }
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """All scored plans of a method; why others are none; what the search proved, how it ended, and
    how much of its budget is left. `aim_bound`: in dollars or bytes, under such an objective.
    """

    found: tuple[ScoredPlan, ...]
    refused: tuple[str, ...] = ()
    bound_s: float | None = None
    solver_gap: float | None = None
    status: Status = Status.COMPLETE
    work_left: int | None = None
    aim_bound: float | None = None


@dataclass(slots=True)
class _Proposed:
    """Scored plans as they are found, and why others are none, by their names."""

    found: list[ScoredPlan] = field(default_factory=list)
    refused: dict[str, ParloomError] = field(default_factory=dict)
    stopped: bool = False


def candidates(request: Request, say: Say) -> Candidates:
    """What the method of `request` proposes: a name in `RULES`, `COMPARATORS` or `ALGEBRA`, random,
    or auto.

    On a mixed cluster methods are asked for each of its parts; `auto` and those of `ACROSS` for all
    of them, too. Ctrl-C ends it with what it has. Raises `InputError` where it proposes nothing.
    """
    if request.method in ALGEBRA:
        return _of_one_form(request, say)
    request = with_takes(request) if request.method == AUTO else request
    return _of_parts(request, say) if request.cluster.parts else _of_one_part(request, say)


def _of_one_form(request: Request, say: Say) -> Candidates:
    """What `auto` proposes for the form that the method chooses; its bound holds for no other."""
    method = request.method
    form = FixedForm(request, ALGEBRA[method](request, say))
    say(f"{method}: {'; '.join(form.rewrites) or 'no rewrites'}")
    asked = form.request
    there = _of_parts(asked, say) if asked.cluster.parts else _of_one_part(asked, say)
    found = [
        replace(
            plan,
            decisions=form.with_rewrites(plan.decisions),
            method=method,
            name=plan.name.replace(AUTO, method, 1)
            if plan.method == AUTO
            else f"{method}, {plan.name}",
        )
        for plan in there.found
    ]
    held, against = _holding(request, found)
    if not held:
        raise _nothing(method, there.status, against, {})
    return replace(there, found=tuple(held), bound_s=None, solver_gap=None)


def _of_parts(request: Request, say: Say) -> Candidates:
    """What the method proposes on each part of a mixed cluster, and on several of them."""
    found: list[ScoredPlan] = []
    refused: list[str] = []
    statuses, left = [Status.COMPLETE], request.budget
    alone = () if request.all_devices or request.method in ACROSS else request.regular()
    shares = {part: _least_work_ps(own) for part, own in alone}
    for part, own in sorted(alone, key=lambda each: shares[each[0]] / len(each[0].devices)):
        device, least_s = part.cluster.device.name, shares[part] / len(part.devices) / 1e12
        fitting = [p.prediction.step_s for p in found if request.fits(p.prediction)]
        where = f"on {part.cluster.name} ({len(part.devices)} x {device}) alone"
        if least_s > min(fitting, default=inf):
            say(f"{where} no plan takes less than {format_seconds(least_s)}")
            continue
        say(where)
        try:
            there = _of_one_part(replace(own, budget=left), say)
        except (KeyboardInterrupt, StoppedError):
            if not found:
                raise
            statuses.append(Status.INTERRUPTED)
            break
        except (InputError, LayoutError) as error:
            refused.append(f"{request.method} on {part.cluster.name}: {one_line(error)}")
            continue
        left = there.work_left
        found += (on_part(part, plan) for plan in there.found)
        refused += (f"on {part.cluster.name}: {line}" for line in there.refused)
        statuses.append(there.status)
        if there.status is Status.INTERRUPTED:
            break
    bound = None
    if request.method in (AUTO, *ACROSS) and statuses[-1] is not Status.INTERRUPTED:
        fitting = [p.prediction.step_s for p in found if request.fits(p.prediction)]
        there = together(replace(request, budget=left), min(fitting, default=inf), say)
        found += there.found
        refused += (line for line in there.refused if line not in refused)
        statuses.append(there.status)
        bound = there.bound_s
    worst = next((s for s in (Status.INTERRUPTED, Status.OUT_OF_BUDGET) if s in statuses), None)
    if not found and worst is not None:
        raise _nothing(request.method, worst, (), {})
    if not found:
        which = "all devices of " if request.all_devices else ""
        why = f": {refused[0]}" if refused else ""
        raise InputError(f"{request.method} has no plan on {which}{request.cluster.name}{why}")
    bound = None if worst is Status.INTERRUPTED else bound
    return Candidates(tuple(found), tuple(refused), bound, None, worst or Status.COMPLETE)


def _least_work_ps(request: Request) -> float:
    """What one device computes at least that does all the work, in any form."""
    return least_work_ps(Contexts(request, base_of(request), forms_for(request)))


def together(request: Request, best_s: float, say: Say) -> Candidates:
    """What the method proposes on several parts of a mixed cluster."""
    base = base_of(request)
    if request.method == AUTO:
        pinned = as_pinned(request)
        across = across_parts(pinned.request, base, best_s * 1e12, say)
        found = [
            ScoredPlan(p.decisions, p.prediction, AUTO, _name(AUTO, p.decisions))
            for p in map(pinned.as_asked, across.found)
        ]
        words = (f"{AUTO}: {across.left_out}",) if across.left_out else ()
        if across.status is Status.OUT_OF_BUDGET:
            words = (*words, SPENT)
        return Candidates(tuple(found), words, across.bound_ps / 1e12, None, across.status)
    proposed = _Proposed()
    _propose(request, (request.method,), MOST, proposed, say)
    refused = [f"{n}: not possible: {one_line(error)}" for n, error in proposed.refused.items()]
    status = Status.INTERRUPTED if proposed.stopped else Status.COMPLETE
    return Candidates(tuple(proposed.found), tuple(refused), status=status)


def on_part(part: RegularPart, plan: ScoredPlan) -> ScoredPlan:
    """A plan for a part of a mixed cluster as one for the whole."""
    peaks = ((part.cluster.device.name, plan.prediction.peak_bytes),)
    return replace(
        plan,
        decisions=moved_by(plan.decisions, part.first),
        prediction=replace(plan.prediction, peaks=peaks),
        name=f"{plan.name}, on {part.cluster.name}",
    )


def _of_one_part(request: Request, say: Say) -> Candidates:
    """What the method proposes on a cluster of equal parts."""
    method = request.method
    names, most = (tuple(RULES), BESIDE) if method == AUTO else ((method,), MOST)
    proposed = _Proposed()
    _propose(request, names, most, proposed, say)
    if method not in (AUTO, RANDOM) and not proposed.stopped:
        try:
            _propose_on_parts(request, proposed, say)
        except KeyboardInterrupt:
            if not proposed.found:
                raise
            proposed.stopped = True
    refused = [f"{n}: not possible: {one_line(error)}" for n, error in proposed.refused.items()]
    found, against = _holding(request, proposed.found)
    for reason in dict.fromkeys(reason for _, reason in against):
        same = "; ".join(name for name, other in against if other == reason)
        refused.append(f"{same}: not as asked: {reason}")
    searched: Searched | None = None
    if method == AUTO and not proposed.stopped:
        pinned = as_pinned(request)
        searched = search_with_pipelines(pinned.request, base_of(request), say).of(pinned)
    found += of_search(request, searched) if searched else ()
    found += faster_in_int8(request, found) if request.quantizes else ()
    if searched is not None and searched.left_out:
        refused.append(f"{AUTO}: {searched.left_out}")
    if searched is not None and searched.bound_words:
        refused.append(f"{AUTO}: {searched.bound_words}")
    status = searched.status if searched else Status.COMPLETE
    if proposed.stopped:
        status = Status.INTERRUPTED
    if status is Status.OUT_OF_BUDGET:
        refused.append(SPENT)
    # Where the search finds nothing that fits, there may be a plan that does not.
    if not found and (searched is None or status is not Status.COMPLETE):
        raise _nothing(method, status, against, proposed.refused)
    bound = searched.bound_ps / 1e12 if searched and searched.bound_ps else None
    gap = searched.solver_gap if searched else None
    left = searched.work_left if searched else request.budget
    return Candidates(tuple(found), tuple(refused), bound, gap, status, left)


def of_search(request: Request, searched: Searched) -> Iterator[ScoredPlan]:
    """What it proposes, the fastest on every part of the cluster included; where nothing fits, the
    smallest that was simulated.
    """
    proposals = distinct(searched.proposals)
    sizes = [proposal.decisions.num_ranks for proposal in proposals]
    fastest = map(sizes.index, set(sizes))
    proposals = [proposals[i] for i in sorted({*range(len(sizes))[:PROPOSED], *fastest})]
    if not proposals and searched.smallest:
        proposals = [searched.smallest]
    for proposal in proposals:
        own = proposal.decisions
        nested = all(stage.mesh.is_nested for stage in own.stages)
        placed = "" if nested else ", placed"
        name = on_devices(request, _name(AUTO, own) + placed, own)
        found = ScoredPlan(proposal.decisions, proposal.prediction, AUTO, name)
        yield found
        if len(own.stages) == 1:
            yield from _with_stripes(request, found)


def _with_stripes(request: Request, plan: ScoredPlan) -> Iterator[ScoredPlan]:
    """The plan with stripes of the positions, where it is faster for it."""
    try:
        decisions = with_stripes(request.graph, plan.decisions)
        if decisions is None:
            return
        prediction = request.on(decisions.num_ranks).predict(decisions)
    except LayoutError:
        return  # as where a window reads positions beside each other
    if prediction.step_s < plan.prediction.step_s:
        yield replace(
            plan, decisions=decisions, prediction=prediction, name=f"{plan.name}, striped positions"
        )


def distinct(proposals: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """Of those that are nearly alike the first, which is the fastest."""
    kept: list[SimulatedPlan] = []
    for one in proposals:
        if not any(_alike(one, other) for other in kept):
            kept.append(one)
    return kept


def _alike(one: SimulatedPlan, other: SimulatedPlan) -> bool:
    mine, its = one.prediction, other.prediction
    step = abs(mine.step_s - its.step_s) <= STEP_APART * its.step_s
    peak = abs(mine.peak_bytes - its.peak_bytes) <= PEAK_APART * its.peak_bytes
    return one.decisions.stages == other.decisions.stages and step and peak


def _propose(
    request: Request, names: Sequence[str], most: int, proposed: _Proposed, say: Say
) -> None:
    """Add the plans of rules of thumb, of which `most` are simulated, or of a comparator.

    Ctrl-C ends it; `KeyboardInterrupt` goes on where there is no plan at all.
    """
    for name in names:
        try:
            for plan in _plans(request, name, most, proposed, say):
                proposed.found.append(plan)
        except KeyboardInterrupt:
            if not proposed.found:
                raise
            proposed.stopped = True
            return
        except (InputError, LayoutError) as error:
            proposed.refused[name] = error


def _propose_on_parts(request: Request, proposed: _Proposed, say: Say) -> None:
    """Add the plans of a method on parts of the cluster, as long as computing alone takes no longer
    there than the fastest step that fits.
    """
    contexts = Contexts(request, base_of(request))
    for part in request.parts():
        known = [plan.prediction for plan in proposed.found]
        fitting = [p.step_s for p in known if p.peak_bytes <= request.limit_bytes]
        if known and not fitting:
            return  # each of fewer devices holds no less
        least_ps = least_work_ps(contexts.on_part(part)) / part.cluster.num_devices
        if least_ps / 1e12 > min(fitting, default=inf) * (1 + SAME):
            return
        there = _Proposed()
        _propose(part, (request.method,), MOST, there, say)
        proposed.stopped = there.stopped
        for plan in there.found:
            name = on_devices(request, plan.name, plan.decisions)
            proposed.found.append(replace(plan, name=name))
        if proposed.stopped:
            return


def _nothing(
    method: str,
    status: Status,
    against: Sequence[tuple[str, str]],
    refused: Mapping[str, ParloomError],
) -> ParloomError:
    """Why a method proposes nothing."""
    if status is Status.INTERRUPTED:
        return StoppedError()
    spent = BudgetError(f"{method} finds no plan within its budget; give it more (--budget)")
    if status is Status.OUT_OF_BUDGET:
        return spent
    if against:
        what = f"{method} has no plan as asked: {against[0][1]}"
        return InputError(what if method == AUTO else f"{what}; --method auto searches for one")
    if not refused:
        return spent
    return next(iter(refused.values()))


def _holding(
    request: Request, found: list[ScoredPlan]
) -> tuple[list[ScoredPlan], list[tuple[str, str]]]:
    """The candidates that hold all pins, and why others do not."""
    held: list[ScoredPlan] = []
    against: list[tuple[str, str]] = []
    for candidate in found:
        reason = broken(request.pinned, request.graph, candidate.decisions)
        if reason is None:
            held.append(candidate)
        else:
            against.append((candidate.name, reason))
    return held, against


def smallest(request: Request) -> tuple[ScoredPlan, int]:
    """The smallest plan that is found, whatever the limit, and what no plan holds less than.

    Raises `InputError` where there is none because pins contradict each other.
    """
    base = base_of(request)
    found = smallest_with_blocks(request, base)
    if found is None:
        raise conflict(request, base)
    plan = found.plan
    name = _name(f"{AUTO}, least memory", plan.decisions)
    return ScoredPlan(plan.decisions, plan.prediction, AUTO, name), found.bound_bytes


def _plans(
    request: Request, name: str, most: int, proposed: _Proposed, say: Say
) -> Iterator[ScoredPlan]:
    """The plans of a rule of thumb, of a comparator, or random ones; those of a comparator that
    cannot be lowered are refused.
    """
    base = base_of(request)
    if name in RULES:
        for point in Grid(request, RULES[name], base, most).run():
            words = ", ".join((_name(name, point.decisions), *point.chosen.words))
            yield ScoredPlan(point.decisions, point.prediction, name, words)
    elif name == RANDOM:
        for plan in drawn(request, base):
            yield replace(plan, method=name, name=_name(name, plan.decisions))
    else:
        asked = tuple(ActivationDecision(p, "recompute") for p in request.graph.recomputed_calls)
        count = request.num_microbatches or 1
        base = replace(base, activations=asked, num_microbatches=count)
        alone = request.cluster.num_devices == 1 and name not in ALONE
        predict = request.placed if request.cluster.parts else request.predict
        for decisions in (on_one_device(base),) if alone else COMPARATORS[name](request, base, say):
            words = _name(name, decisions)
            try:
                yield ScoredPlan(decisions, predict(decisions), name, words)
            except LayoutError as error:  # as where microbatches do not divide over its mesh
                proposed.refused[words] = error


def _name(method: str, decisions: Decisions) -> str:
    title = TITLES.get(method, method)
    if len(decisions.stages) > 1:
        stages, count = len(decisions.stages), decisions.num_microbatches
        groups = {stage.devices: stage.mesh.num_ranks for stage in decisions.stages}.values()
        even = len(set(groups)) == 1
        sizes = f"{len(groups)} x {max(groups)}" if even else "+".join(map(str, groups))
        parts = f"{count} microbatch{'es' * (count > 1)}"
        replicas = len(decisions.replicas)
        if replicas == stages:
            return f"{title} ({replicas} replicas on {sizes} devices, {parts})"
        return f"{title} ({stages} stages on {sizes} devices, {parts})"
    sent = "".join(f", {dtype}" for dtype in decisions.sent_dtypes)
    return f"{title} ({' x '.join(f'{a.name}={a.size}' for a in decisions.mesh.axes)}){sent}"


def on_devices(request: Request, name: str, decisions: Decisions) -> str:
    """A name that says where a plan is on a part of the cluster."""
    ranks = decisions.num_ranks
    devices = f"{ranks} devices" if ranks > 1 else "one device"
    return f"{name}, {devices}" if ranks < request.cluster.num_devices else name
