"""The search with modules of main as blocks, where memory is what limits plans without.

What is in no block is kept for the backward pass. So where memory makes plans slower, or none fits,
the same is asked of the graph in which modules of main are blocks (`rewrite.regions`), for plans
that are faster still. Equal modules are one kind then, with the same layouts.
"""

from dataclasses import replace
from functools import reduce

from parloom.ir.plan import Decisions
from parloom.rewrite.regions import regions
from parloom.search.contexts import SimulatedPlan
from parloom.search.optimize import Space, search
from parloom.search.request import Request, Say
from parloom.search.rewritten import RewrittenRequest, with_takes
from parloom.search.searched import Searched
from parloom.search.smallest import Smallest, smallest_plan


def search_with_blocks(
    request: Request, base: Decisions, say: Say, pipelines: Space | None = None
) -> Searched:
    """`search`, with modules as blocks where that may be faster; bounds are of both spaces."""
    answers: list[Searched] = []

    def with_blocks(best: SimulatedPlan | None, budget: int | None) -> Searched | None:
        blocks = Blocks(replace(request, budget=budget))
        if not blocks.rewrites:
            return None
        say("memory limits plans: searching with modules as blocks, which can recompute")
        answers.append(search(blocks.request, base, say, best).of(blocks))
        return answers[-1]

    plain = search(request, base, say, wider=with_blocks, pipelines=pipelines)
    return reduce(Searched.beside, answers, plain)


def smallest_with_blocks(request: Request, base: Decisions) -> Smallest | None:
    """`smallest_plan`, with modules as blocks where that holds less; bounds are of both spaces."""
    plain, blocks = smallest_plan(request, base), Blocks(request)
    found = smallest_plan(blocks.request, base) if plain and blocks.rewrites else None
    if plain is None or found is None:
        return plain
    bound_bytes = min(plain.bound_bytes, found.bound_bytes)
    if found.plan.peak_bytes < plain.plan.peak_bytes:
        return Smallest(blocks.as_asked(found.plan), bound_bytes)
    return replace(plain, bound_bytes=bound_bytes)


class Blocks(RewrittenRequest):
    """A request of the graph in which modules of main are blocks; none are where rewrites are
    pinned, which are of main as it is.
    """

    def __init__(self, request: Request) -> None:
        modules = () if request.pinned.wanted_rewrites else regions(request.graph)
        super().__init__(request, [f"block {module}" for module in modules])
        if request.takes:
            self.request = with_takes(self.request)
