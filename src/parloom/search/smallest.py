"""The plan with the smallest simulated peak, whatever memory there is.

In every context a byte is priced so high that time hardly counts; what a step needs beyond what the
model counts depends on layouts, so that the simulator says which plan is the smallest, and a local
search on it ends the best contexts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from sys import maxsize

from parloom.ir.plan import Decisions
from parloom.search.contexts import Contexts, ContextSearch, EstimateErrors, SimulatedPlan
from parloom.search.least import stored_bytes
from parloom.search.local_search import SMALLEST, improved
from parloom.search.request import Request
from parloom.search.rewritten import forms_for

# Prices of a byte in ps: the first outweighs any step, under the others time counts, too.
PRICES = (1e8, 1e6, 1e4)
# Candidates of a context that are simulated under each price.
SIMULATED = 2
# Contexts in which local search starts.
LOCAL = 2


@dataclass(frozen=True, slots=True)
class Smallest:
    """A plan; no plan on a mesh of one or two axes holds less than `bound_bytes`."""

    plan: SimulatedPlan
    bound_bytes: int


def smallest_plan(request: Request, base: Decisions) -> Smallest | None:
    """The smallest plan that is found, by its simulated peak; None where pins leave no plan.

    It does not depend on the limit of `request`.
    """
    unlimited = replace(request, limit_bytes=maxsize, budget=None)
    contexts = Contexts(unlimited, base, forms_for(request))
    looked: list[ContextSearch] = []
    bounds: list[int] = []
    least = maxsize
    for context in _fewest_and_most(contexts):
        bounds.append(stored_bytes(context))
        for byte_ps in PRICES:
            context.price_memory(byte_ps)
            # What the model counts is held, and more.
            if context.columns.bounds[context.duals] >= PRICES[0] * least:
                break
            for candidate in list(context.candidates())[:SIMULATED]:
                least = min(least, context.judge(candidate).peak_bytes)
        if context.judged:
            looked.append(context)
    if not looked:
        return None
    nearest = sorted(looked, key=_least_peak)[:LOCAL]
    for context in nearest:
        context.price_memory(PRICES[0])
    improved(nearest, EstimateErrors(), SMALLEST)
    best = min((j for c in looked for j in c.fitting()), key=SMALLEST.simulated)
    return Smallest(best, min(bounds))


def _fewest_and_most(contexts: Contexts) -> Iterator[ContextSearch]:
    """Every mesh with the most microbatches that divide there and, as fewer may split samples over
    more ranks, with the fewest.
    """
    for mesh in contexts.meshes:
        for count in dict.fromkeys((contexts.counts[-1], contexts.counts[0])):
            program = contexts.on(mesh, count)
            if program is not None:
                yield contexts.search(program, mesh, count)


def _least_peak(context: ContextSearch) -> tuple[float, float]:
    return min(map(SMALLEST.simulated, context.fitting()))
