"""From the candidates of a method to one plan: the fastest, as simulated, of those that fit, or the
best by another objective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from parloom import arguments
from parloom.candidates import Candidates
from parloom.cost.links import is_grid
from parloom.cost.units import format_bytes, format_dollars, format_seconds
from parloom.errors import InfeasibleError, InputError, LayoutError, StoppedError, VerifyError
from parloom.execute.files import read_plan
from parloom.ir.expected import Aim, Alternative, Constraint, Objective, Prediction, Status
from parloom.ir.mesh import Cluster
from parloom.ir.plan import MICROBATCH, Decisions, Plan
from parloom.ir.verify import verify_decisions
from parloom.objectives import proposed, rank, value_of
from parloom.quantization import INT8
from parloom.report.mixed import left_out_words
from parloom.report.words import (
    INTERRUPTED,
    idle_words,
    part_words,
    splits,
    tight_words,
    uneven_words,
)
from parloom.rewrite.rewrites import changes_tensors, derived
from parloom.search.conflicts import broken
from parloom.search.optimize import SAME
from parloom.search.request import Request, Say, ScoredPlan

UNBOUND = (
    "the model is padded, or ranks have stripes of its positions, which the search does not look"
    " at: what it proved is not of this plan"
)

PLACED = (
    "the axes of its mesh lie otherwise than those of the meshes that are searched: what the search"
    " proved is not of this plan"
)
ORDERED = (
    "ranks are on devices in an order of the plan's own; parloom export PLAN --to ranks (or"
    " rankfile, jax) says where"
)


class NothingFitsError(InfeasibleError):
    """None of the candidates fits."""

    def __init__(self, limit: int, proposed: Candidates) -> None:
        super().__init__(f"no plan fits in {format_bytes(limit)} per device")
        self.proposed = proposed


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest plan that fits, of all that were scored, or the best by another `aim`;
    `constraints` are what each thing that was asked for costs.
    """

    best: ScoredPlan
    scored: tuple[ScoredPlan, ...]
    fits: Callable[[Prediction], bool]
    notes: tuple[str, ...] = ()
    bound_s: float | None = None
    solver_gap: float | None = None
    status: Status = Status.COMPLETE
    constraints: tuple[Constraint, ...] = ()
    aim: Aim | None = None

    def recorded(self, plan: Plan) -> Plan:
        """`plan` with what was chosen; what it noted before comes last."""
        return replace(
            plan,
            method=self.best.method,
            decisions=self.best.decisions,
            prediction=self.best.prediction,
            alternatives=tuple(
                Alternative(
                    other.name,
                    other.prediction.step_s,
                    other.prediction.peak_bytes,
                    self.fits(other.prediction),
                )
                for other in self._best_before_equals()
            ),
            bound_s=self.bound_s,
            solver_gap=self.solver_gap,
            status=self.status,
            notes=(*self.notes, *plan.notes),
            constraints=self.constraints,
            aim=self.aim,
        )

    def _best_before_equals(self) -> list[ScoredPlan]:
        """All that were scored; of those with the step and the peak of the best it comes first, by
        which a plan knows itself among its alternatives.
        """
        own = self.best.prediction.step_s, self.best.prediction.peak_bytes
        others = [plan for plan in self.scored if plan is not self.best]
        if len(others) == len(self.scored):
            return others
        equals = (
            index
            for index, plan in enumerate(others)
            if (plan.prediction.step_s, plan.prediction.peak_bytes) == own
        )
        place = next(i for i, plan in enumerate(self.scored) if plan is self.best)
        place = min(place, next(equals, place))
        return [*others[:place], self.best, *others[place:]]


def choose(request: Request, say: Say) -> Choice:
    """The best candidate of the method of `request`.

    Raises `InfeasibleError` where none fits.
    """
    proposed = _candidates(request, say)
    for line in proposed.refused:
        say(line)
    return best_of(request, proposed, say)


def _candidates(request: Request, say: Say) -> Candidates:
    """What the method asked for proposes; it may be a plan file, whose decisions are taken."""
    method = request.method
    if method in arguments.METHODS:
        return proposed(request, say)
    decisions = read_plan(Path(method)).decisions
    if request.batch_semantics == MICROBATCH:
        decisions = replace(decisions, num_microbatches=request.apart, batch_semantics=MICROBATCH)
    elif decisions.accumulates:
        raise InputError(
            f"{method} computes each of {decisions.num_microbatches} microbatches by itself; add"
            f" --batch-semantics {MICROBATCH} --microbatches {decisions.num_microbatches}"
        )
    elif request.num_microbatches is not None:
        decisions = replace(decisions, num_microbatches=request.num_microbatches)
    reason = broken(request.pinned, request.graph, decisions)
    if reason is not None:
        raise InputError(f"{method} is not as asked: {reason}; --method auto searches for a plan")
    try:
        verify_decisions(derived(request.graph, decisions.rewrites), decisions)
        found = request.placed(decisions)
    except (InputError, LayoutError, VerifyError) as error:
        raise InputError(f"{method}: {error}") from None
    return Candidates((ScoredPlan(decisions, found, method, method),))


def best_of(request: Request, found: Candidates, say: Say) -> Choice:
    """The best candidate of those that fit: the one whose simulated step is the fastest, unless
    another objective is asked for.
    """
    limit, stopped = request.limit_bytes, found.status is Status.INTERRUPTED
    for plan in found.found:
        step, peak = plan.prediction.step_s, plan.prediction.peak_bytes
        say(f"{plan.name}: {format_seconds(step)}, {format_bytes(peak)}")
    fitting = [plan for plan in found.found if request.fits(plan.prediction)]
    if stopped and not fitting:
        raise StoppedError
    if not fitting and found.status is Status.OUT_OF_BUDGET:
        none = f"no plan that was found within --budget {request.budget}"
        raise InfeasibleError(f"{none} fits in {format_bytes(limit)} per device; give it more")
    if not fitting:
        raise NothingFitsError(limit, found)
    best = min(fitting, key=rank(request))
    cluster = request.cluster
    even = cluster.parts or not splits(best.decisions)
    uneven = () if even else uneven_words(request.samples, cluster.num_devices)
    notes = (
        *([f"{best.method}: {INTERRUPTED}"] if stopped else []),
        *(() if stopped else _other_devices(request, best, fitting)),
        *uneven,
        *tight_words(cluster, best.prediction.peak_bytes),
        *idle_words(best.decisions, _why_idle(request, found.found)),
        *(_not_quantized(best, fitting) if request.quantizes else ()),
        *([ORDERED] if any(stage.mesh.order for stage in best.decisions.stages) else []),
        *found.refused,
    )
    choice = Choice(
        best,
        found.found,
        request.fits,
        notes,
        found.bound_s,
        found.solver_gap,
        found.status,
        aim=aim_of(request, best, found.aim_bound),
    )
    why = why_unbound(best.decisions, cluster)
    if why and (choice.bound_s or found.aim_bound):
        notes, aim = (f"{best.name}: {why}", *notes), aim_of(request, best, None)
        return replace(choice, bound_s=None, solver_gap=None, notes=notes, aim=aim)
    return choice


def why_unbound(decisions: Decisions, cluster: Cluster) -> str | None:
    """Why what a search proved is not of such a plan, if it is not; on a torus it is of all
    placements.
    """
    if changes_tensors(decisions.rewrites):
        return UNBOUND
    nested = all(stage.mesh.is_nested for stage in decisions.stages)
    return None if nested or is_grid(cluster) else PLACED


def aim_of(request: Request, plan: ScoredPlan, bound: float | None) -> Aim | None:
    """What a plan has of the objective that was asked for, where that is not time; a bound that it
    is below is none of such plans.
    """
    if request.objective is Objective.TIME:
        return None
    value = value_of(request, plan)
    return Aim(request.objective, value, bound if bound and bound <= value < inf else None)


def _other_devices(
    request: Request, best: ScoredPlan, fitting: Sequence[ScoredPlan]
) -> tuple[str, ...]:
    """What other devices are worth, or fewer; under another objective, what is the fastest."""
    cluster, step_s = request.cluster, best.prediction.step_s
    if request.objective is not Objective.TIME:
        fastest = min(fitting, key=lambda plan: plan.prediction.step_s)
        return () if fastest is best else (fastest_words(request, fastest),)
    if cluster.parts:
        return left_out_words(cluster, [(p.decisions, p.prediction.step_s) for p in fitting])
    same = [plan for plan in fitting if plan.prediction.step_s <= step_s * (1 + SAME)]
    fewest = min((p.decisions.num_ranks, p.prediction.step_s) for p in same)
    return part_words(cluster, best.decisions, step_s, *fewest)


def _not_quantized(best: ScoredPlan, fitting: Sequence[ScoredPlan]) -> tuple[str, ...]:
    """That the best plan sends nothing in int8, which was allowed, and the best one that does."""
    if best.decisions.sent_dtypes:
        return ()
    others = [plan for plan in fitting if plan.decisions.sent_dtypes]
    if not others:
        return (f"{INT8} was allowed, and no plan that was found is faster for it",)
    least = min(others, key=lambda plan: plan.prediction.step_s)
    return (f"with {INT8} the fastest is {least.name}: {format_seconds(least.prediction.step_s)}",)


def fastest_words(request: Request, fastest: ScoredPlan) -> str:
    """The fastest plan beside one that was chosen by another objective."""
    found, value = fastest.prediction, value_of(request, fastest)
    what = f" and {format_dollars(value)} a step" if request.objective is Objective.COST else ""
    size = f"{format_seconds(found.step_s)}, {format_bytes(found.peak_bytes)} per device{what}"
    return f"the fastest plan that was found with it, {fastest.name}: {size}"


def _why_idle(request: Request, found: Sequence[ScoredPlan]) -> str:
    """Why the best plan splits nothing: it is the best, or there is no other."""
    others = [plan for plan in found if splits(plan.decisions)]
    if others:
        least = min(others, key=lambda p: (p.prediction.step_s, p.prediction.peak_bytes, p.name))
        step_s, peak = least.prediction.step_s, least.prediction.peak_bytes
        fits = "" if request.fits(least.prediction) else ", which does not fit"
        size = f"{format_seconds(step_s)} and {format_bytes(peak)} per device{fits}"
        return f"the fastest plan that splits something, {least.name}, needs {size}"
    count, ranks = request.samples, request.cluster.num_devices
    if count % ranks == 0:
        return f"{request.method} finds nothing in this model that can be split"
    near = max(1, round(count / ranks)) * ranks
    return f"{count} samples do not divide over them: ask for a batch of {near}"
