"""Requests and rewrites: all forms that a graph may have, and a request of one of them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Function, Graph
from parloom.ir.plan import Decisions
from parloom.rewrite.forms import Forms
from parloom.rewrite.pad import PADS
from parloom.rewrite.rewrites import rewritten
from parloom.rewrite.take import Take
from parloom.search.contexts import Contexts, SimulatedPlan
from parloom.search.folding import program_of
from parloom.search.pinned import Pinned, resolve
from parloom.search.pins import NO_REWRITE, Pin
from parloom.search.request import Request
from parloom.search.worthwhile import worthwhile


class RewrittenRequest:
    """`asked` of the graph that `rewrites` make of its own, with the same pins, in that form."""

    def __init__(self, asked: Request, rewrites: Sequence[str]) -> None:
        self.rewrites, self.request = tuple(rewrites), replace(asked, takes=())
        if self.rewrites:
            graph, pins = rewritten(asked.graph, self.rewrites), asked.pinned.pins
            pinned = resolve(pins, graph, factorize(graph)) if pins else asked.pinned
            self.request = replace(self.request, graph=graph, pinned=pinned)

    def as_asked(self, plan: SimulatedPlan) -> SimulatedPlan:
        """A plan of this graph as one of the graph that was asked about."""
        return replace(plan, decisions=self.with_rewrites(plan.decisions))

    def with_rewrites(self, decisions: Decisions) -> Decisions:
        """Decisions for this graph as those for the graph that was asked about."""
        return replace(decisions, rewrites=(*self.rewrites, *decisions.rewrites))


def in_form(contexts: Contexts, rewrites: Sequence[str]) -> Contexts:
    """The same contexts, of plans of the form that `rewrites` make: other layouts alone."""
    own = RewrittenRequest(contexts.request, rewrites).request
    request = replace(contexts.request, takes=(), pinned=own.pinned)
    found = Contexts(request, contexts.base, work=contexts.work, shared=contexts.shared)
    if rewrites:
        factored = factorize(own.graph)
        whole = program_of(own.graph, factored, own.pinned)
        found.whole = replace(whole, rewrites=tuple(rewrites))
    return found


def free_functions(request: Request) -> list[Function]:
    """The functions that rewrites may change: a pin on an operator leaves its function as it is."""
    named = {function for function, _ in request.pinned.operators}
    graph = request.graph
    return [own for own in (*graph.functions, graph.main) if own.name not in named]


def with_takes(request: Request) -> Request:
    """The request with all other ways to compute values of its graph that are worth a choice, and
    that pins leave: a pin on an operator leaves all of its block kind as it is.
    """
    (_, own), *_ = request.regular()
    return replace(request, takes=tuple(worthwhile(own, free_functions(request))))


def forms_for(request: Request) -> Forms | None:
    """All forms that a request leaves its graph; None where there is one."""
    return Forms(request.graph, request.takes) if request.takes else None


def as_pinned(request: Request) -> RewrittenRequest:
    """The request of the graph with the rewrites that pins ask for, wherever they apply; of several
    ways to compute a value the first. Other rewrites are left to other block kinds: of two ways to
    compute values of one function each is a way of that function as it is, not of what the other
    makes of it. Raises `InputError` where one applies nowhere, or another pin forbids it.
    """
    wanted = request.pinned.wanted_rewrites
    asked = [take for take in request.takes if any(pin.is_about(take.rules) for pin in wanted)]
    takes = made_together(request.graph, asked)
    for pin in wanted:
        if not any(pin.is_about(take.rules) for take in takes):
            raise InputError(_nowhere(pin, request.pinned))
    found = RewrittenRequest(request, tuple(map(str, takes)))
    named = {take.function for take in takes}
    left = tuple(take for take in request.takes if take.function not in named)
    found.request = replace(found.request, takes=left)
    return found


def _nowhere(pin: Pin, pinned: Pinned) -> str:
    """Why no plan has a rewrite that a pin asks for."""
    against = next((own for own in pinned.forbidden_rewrites if own.covers(pin)), None)
    if against is not None:
        flag = " (--no-rewrites)" if against.text.endswith(NO_REWRITE) else ""
        return f"{pin.text} and {against.text}{flag} contradict each other; leave one out"
    if pin.is_about((PADS,)):
        why = "this search pads no vocabulary; --method megatron does, for tensor parallelism"
        return f"{pin.text}: {why}"
    why = "it applies nowhere: no operators of this model have the form that it rewrites"
    why += ", or the ranks and dtypes that it is for"
    if pinned.operators:
        why += ", but for those in blocks that other pins leave as they are"
    return f"{pin.text}: {why}"


def made_together(graph: Graph, takes: Iterable[Take]) -> list[Take]:
    """These takes without those that cannot be made beside the ones before them."""
    found: list[Take] = []
    for take in takes:
        with suppress(InputError):
            rewritten(graph, [str(one) for one in (*found, take)])
            found.append(take)
    return found
