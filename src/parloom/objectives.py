"""What is looked at under an objective: fast plans, cheap ones, or small ones.

Plans on one number of equal devices cost what they take, so that the cheapest of all is the fastest
on one of these numbers: the search for fast plans is asked for each. The smallest plan has a search
of its own; what is fast within its memory is asked for after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from parloom.candidates import (
    ACROSS,
    Candidates,
    candidates,
    on_devices,
    on_part,
    smallest,
    together,
)
from parloom.cost.money import HOUR_S, usd_per_step
from parloom.errors import BudgetError, InputError, LayoutError, StoppedError, one_line
from parloom.ir.expected import Objective, Status
from parloom.ir.mesh import part_sizes
from parloom.search.least import least_share
from parloom.search.request import AUTO, Request, Say, ScoredPlan, Wanted, base_of
from parloom.search.rewritten import with_takes

# How often a search within the memory of the smallest plan may find a smaller one.
ROUNDS = 3
Rank = tuple[float, float, int, int]


def value_of(request: Request, plan: ScoredPlan) -> float:
    """What the objective of `request` counts: seconds, dollars of a step, or peak bytes."""
    found = plan.prediction
    if request.objective is Objective.MEMORY:
        return found.peak_bytes
    if request.objective is Objective.TIME:
        return found.step_s
    usd = usd_per_step(request.cluster, plan.decisions, found.step_s)
    return inf if usd is None else usd


def rank(request: Request) -> Callable[[ScoredPlan], Rank]:
    """By the objective, then by time, by devices and by memory: the least is the best."""

    def of(plan: ScoredPlan) -> Rank:
        found = plan.prediction
        return value_of(request, plan), found.step_s, plan.decisions.num_ranks, found.peak_bytes

    return of


def proposed(request: Request, say: Say) -> Candidates:
    """What the method of `request` proposes for its objective."""
    fast = replace(request, objective=Objective.TIME, sizes=())
    if request.objective is Objective.TIME:
        return candidates(fast, say)
    if request.objective is Objective.COST:
        found = _of_all_types(request, say) if request.cluster.parts else _of_sizes(request, say)
    else:
        found = _small(fast, say)
    return replace(found, bound_s=None, solver_gap=None)


@dataclass(slots=True)
class _Gathered:
    """Answers to the same question of several parts of a cluster, as they come.

    `bounds_s` are device-seconds that no plan of a part takes less than, 0 where nothing is known.
    """

    budget: int | None
    say: Say
    found: list[ScoredPlan] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)
    status: Status = Status.COMPLETE
    errors: list[InputError | LayoutError] = field(default_factory=list)

    def ask(self, where: str, answer: Callable[[], Candidates]) -> Candidates | None:
        """One more answer, and why there is none; Ctrl-C ends the search with what there is."""
        try:
            self.say(where)
            there = answer()
        except (KeyboardInterrupt, StoppedError):
            if not self.found:
                raise
            self.status = Status.INTERRUPTED
            return None
        except (InputError, LayoutError) as error:
            self.errors.append(error)
            self.refused.append(f"{where}: {one_line(error)}")
            if isinstance(error, BudgetError):
                self.status = Status.OUT_OF_BUDGET
            return None
        self.budget = there.work_left if self.budget is not None else None
        self.refused += (f"{where}: {line}" for line in there.refused)
        if there.status is not Status.COMPLETE:
            self.status = there.status
        return there

    @property
    def over(self) -> bool:
        return self.status is not Status.COMPLETE

    def answer(self, bound: float | None) -> Candidates:
        """All that was found; raises the first error where that is nothing."""
        if not self.found and self.errors:
            raise self.errors[0]
        bound = bound if self.status is not Status.INTERRUPTED else None
        return Candidates(
            tuple(self.found),
            tuple(self.refused),
            status=self.status,
            work_left=self.budget,
            aim_bound=bound,
        )


def _of_sizes(request: Request, say: Say) -> Candidates:
    """The fastest plans on each number of equal devices, the fewest first, and the dollars that
    none costs less than.
    """
    cluster, price = request.cluster, request.cluster.device.price
    sizes = request.sizes or (*reversed(part_sizes(cluster)), cluster.num_devices)
    gathered, largest = _Gathered(request.budget, say), max(sizes)
    for size in (cluster.num_devices,) if request.all_devices else sorted(sizes):
        own = replace(request.on(size), objective=Objective.TIME, sizes=(), budget=gathered.budget)
        if size < largest and least_share(
            own.graph, base_of(own), own.optimizer, size
        ) > own.limit_of(cluster.device.name):
            continue
        where = f"on {size} of {cluster.num_devices} devices"
        there = gathered.ask(where, partial(candidates, own, say))
        if there is not None:
            gathered.found += (
                replace(plan, name=on_devices(request, plan.name, plan.decisions))
                for plan in there.found
            )
        bound_s = there.bound_s if there else None
        gathered.bounds_s.append((bound_s or 0.0) * size)
        if gathered.over:
            gathered.bounds_s.append(0.0)  # of what was not looked at
            break
    known = price is not None and all(gathered.bounds_s)
    return gathered.answer(min(gathered.bounds_s) * price.usd / HOUR_S if price and known else None)


def _of_all_types(request: Request, say: Say) -> Candidates:
    """Plans on each type of devices of a mixed cluster alone, and on several of them."""
    gathered = _Gathered(request.budget, say)
    for part, own in () if request.all_devices else request.regular():
        asked = replace(own, budget=gathered.budget, sizes=())
        there = gathered.ask(f"on {part.cluster.name}", partial(_of_sizes, asked, say))
        gathered.found += (on_part(part, plan) for plan in (there.found if there else ()))
        if gathered.over:
            return gathered.answer(None)
    fast = replace(request, objective=Objective.TIME, sizes=(), budget=gathered.budget)
    fitting = [plan for plan in gathered.found if request.fits(plan.prediction)]
    cheapest = min((value_of(request, plan) for plan in fitting), default=inf)
    an_hour = request.cluster.price_per_hour
    best_s = cheapest / an_hour * HOUR_S if an_hour else inf
    fast = with_takes(fast) if request.method == AUTO else fast
    if request.method in (AUTO, *ACROSS):
        there = gathered.ask(f"on {request.cluster.name}", partial(together, fast, best_s, say))
        gathered.found += there.found if there else ()
    return gathered.answer(None)


def _small(request: Request, say: Say) -> Candidates:
    """The smallest plan that the search finds, and the fastest in no more memory than it takes.

    Fewer devices hold no less each. Methods other than the search propose what they do.
    """
    if request.method != AUTO or request.cluster.parts or not request.pinned.allows_stages(1):
        return candidates(request, say)
    say("looking for the smallest plan")
    try:
        small, least = smallest(request)
    except KeyboardInterrupt:
        raise StoppedError from None
    found, status = [small], Status.COMPLETE
    tight = replace(request, wanted=Wanted.PLAN)
    for _ in range(ROUNDS):
        peak_bytes = min(plan.prediction.peak_bytes for plan in found)
        if peak_bytes > request.limit_bytes:
            break
        say("looking for faster ones that are as small")
        try:
            there = candidates(replace(tight, limit_bytes=peak_bytes), say)
        except (KeyboardInterrupt, StoppedError):
            status = Status.INTERRUPTED
            break
        except (InputError, LayoutError):
            break
        tight, status = replace(tight, budget=there.work_left), there.status
        found += there.found
        smaller = min(plan.prediction.peak_bytes for plan in found) < peak_bytes
        if not smaller or status is not Status.COMPLETE:
            break
    return Candidates(tuple(found), status=status, aim_bound=least)
