"""Requests and rewrites: all forms that a graph may have, and a request of one of them."""

from collections.abc import Sequence
from dataclasses import replace

from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.rewrite.forms import Forms
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import rewritten
from parloom.rewrite.take import Take
from parloom.search.contexts import SimulatedPlan
from parloom.search.pinned import resolve
from parloom.search.pins import Kind
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


def takes_for(request: Request) -> list[Take]:
    """The other ways to compute values of its graph that pins leave: a pin on an operator leaves
    all of its block kind as it is.
    """
    pinned = request.pinned
    named = {function for function, _ in pinned.operators}
    return [
        take
        for take in merges(request.graph)
        if take.function not in named and pinned.allows_rewrite(take.rules)
    ]


def forms_for(request: Request) -> Forms | None:
    """All forms of its graph; None where there is one."""
    takes = takes_for(request)
    return Forms(request.graph, takes) if takes else None


def as_pinned(request: Request) -> RewrittenRequest:
    """The request of the graph with the rewrites that pins ask for, wherever they apply; raises
    `InputError` where one does nowhere.
    """
    wanted = [pin for pin in request.pinned.pins if pin.kind is Kind.REWRITE and not pin.forbidden]
    takes = [take for take in takes_for(request) if any(p.is_about(take.rules) for p in wanted)]
    for pin in wanted:
        if not any(pin.is_about(take.rules) for take in takes):
            raise InputError(f"{pin.text}: it applies nowhere in this model that pins leave free")
    return RewrittenRequest(request, tuple(map(str, takes)))
