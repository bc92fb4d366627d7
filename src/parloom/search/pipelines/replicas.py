"""Replicas of the model on devices of different speed: each device has all of it, and runs as many
microbatches as it has time for; the gradients of all are summed at the end of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heapreplace
from itertools import chain, islice

from parloom.ir.mesh import Mesh
from parloom.ir.plan import Action, Decisions, Stage
from parloom.ir.regular_parts import RegularPart
from parloom.ir.schedules import STEP
from parloom.search.contexts import SimulatedPlan
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.judge import Judge
from parloom.search.request import Request

REPLICAS = "replicas"
"""The schedule of plans whose stages are replicas."""
# Shares of the microbatches that are simulated and fit, of the best by their closed form.
SIMULATED = 3


@dataclass(frozen=True)
class Shares:
    """How many microbatches each device runs, and a closed form of the step."""

    whole: Decisions
    items: tuple[str, ...]
    counts: dict[int, int]
    step_ps: float


def shares(request: Request, parts: Sequence[RegularPart], costs: Sequence[ItemCosts]) -> Shares:
    """One microbatch after the other goes to the device that is through with it first; `costs` are
    those of one device of each part.
    """
    passes = {
        device: int(own.passes_ps.sum())
        for part, own in zip(parts, costs, strict=True)
        for device in part.devices
    }
    queue = [(ps, device) for device, ps in passes.items()]
    heapify(queue)
    counts, last_ps = dict.fromkeys(passes, 0), 0
    for _ in range(costs[0].num_microbatches):
        end_ps, device = queue[0]
        counts[device] += 1
        last_ps = max(last_ps, end_ps)
        heapreplace(queue, (end_ps + passes[device], device))
    # All recompute alike: as the devices do that hold least.
    limits = [request.limit_of(part.cluster.device.name) for part in parts]
    tightest = costs[limits.index(min(limits))]
    once_ps = max(int(own.once_ps.sum()) for own in costs)
    return Shares(tightest.whole, tightest.items, counts, last_ps + once_ps)


def replicated(judge: Judge, found: Sequence[Shares]) -> Iterator[SimulatedPlan]:
    """The most promising as plans that fit."""
    request = judge.request

    def simulated(one: Shares) -> SimulatedPlan:
        decisions = _decisions(one)
        lowered = judge.alike.lower(judge.stager.cut(decisions), decisions)
        return SimulatedPlan(decisions, request.predict_stages(lowered, decisions))

    ranked = sorted(found, key=lambda one: one.step_ps)
    plans = filter(None, (judge.refusals.tried(partial(simulated, one)) for one in ranked))
    return islice((plan for plan in plans if request.fits(plan.prediction)), SIMULATED)


def _decisions(found: Shares) -> Decisions:
    """Each replica runs microbatches that follow each other, one at a time."""
    stages: list[Stage] = []
    lists: list[tuple[Action, ...]] = []
    first = 0
    for device, count in found.counts.items():
        if not count:
            continue
        own = tuple(range(first, first + count))
        passes = ((Action("F", m, len(stages)), Action("B", m, len(stages))) for m in own)
        lists.append((*chain.from_iterable(passes), *STEP))
        stages.append(Stage(found.items, (range(device, device + 1),), Mesh(()), own))
        first += count
    return replace(
        found.whole, stages=tuple(stages), schedule=REPLICAS, actions=tuple(lists), parameters=()
    )
