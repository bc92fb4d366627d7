"""A request of a graph that rewrites make, and its plans as plans of the graph as it was."""

from collections.abc import Sequence
from dataclasses import replace

from parloom.ir.factors import factorize
from parloom.rewrite.rewrites import rewritten
from parloom.search.contexts import SimulatedPlan
from parloom.search.pinned import resolve
from parloom.search.request import Request


class RewrittenRequest:
    """`asked` of the graph that `rewrites` make of its own, with the same pins."""

    def __init__(self, asked: Request, rewrites: Sequence[str]) -> None:
        self.rewrites, self.request = tuple(rewrites), asked
        if self.rewrites:
            graph, pins = rewritten(asked.graph, self.rewrites), asked.pinned.pins
            pinned = resolve(pins, graph, factorize(graph)) if pins else asked.pinned
            self.request = replace(asked, graph=graph, pinned=pinned)

    def as_asked(self, plan: SimulatedPlan) -> SimulatedPlan:
        """A plan of this graph as one of the graph that was asked about."""
        rewrites = (*self.rewrites, *plan.decisions.rewrites)
        return replace(plan, decisions=replace(plan.decisions, rewrites=rewrites))
