"""The search with modules of main as blocks, where memory is what limits plans without.

What is in no block is kept for the backward pass. So where memory makes plans slower, or none fits,
the same is asked of the graph in which modules of main are blocks (`rewrite.regions`), for plans
that are faster still. Equal modules are one kind then, with the same layouts.
"""

from dataclasses import replace
from functools import reduce

from parloom.ir.factors import factorize
from parloom.ir.plan import Decisions
from parloom.rewrite.regions import regions
from parloom.rewrite.rewrites import rewritten
from parloom.search.contexts import SimulatedPlan
from parloom.search.optimize import Searched, Space, search
from parloom.search.pinned import resolve
from parloom.search.request import Request, Say
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
        answers.append(blocks.asked(search(blocks.request, base, say, best)))
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


class Blocks:
    """A request of the graph in which modules of main are blocks, by the `rewrites`."""

    def __init__(self, request: Request) -> None:
        self.rewrites = tuple(f"block {module}" for module in regions(request.graph))
        graph, pins = rewritten(request.graph, self.rewrites), request.pinned.pins
        pinned = resolve(pins, graph, factorize(graph)) if pins else request.pinned
        self.request = replace(request, graph=graph, pinned=pinned)

    def as_asked(self, plan: SimulatedPlan) -> SimulatedPlan:
        """A plan of this graph as one of the graph that was asked about."""
        return replace(plan, decisions=replace(plan.decisions, rewrites=self.rewrites))

    def asked(self, found: Searched) -> Searched:
        """The same for all plans of an answer."""
        return replace(
            found,
            proposals=tuple(map(self.as_asked, found.proposals)),
            smallest=found.smallest and self.as_asked(found.smallest),
        )
