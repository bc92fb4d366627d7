"""Tensat: equality saturation, then extraction by an integer program (Yang et al., MLSys'21).

An e-graph of each function has everything that the known rules make of it; pairs of products of one
operand are merged in the first rounds only, since these rules of two outputs make it explode
(section 5.2). `extraction` then chooses the function that one device computes in the least time.
"""

from collections.abc import Sequence
from math import inf

from parloom.comparators.fixed_form import on_first_part, proved, wanted
from parloom.cost.units import format_seconds
from parloom.ir.graph import Function, Graph, Node
from parloom.rewrite.bodies import Body
from parloom.rewrite.follows import rules_for
from parloom.rewrite.known import is_proved
from parloom.rewrite.merge import RULES, unite_pairs
from parloom.rewrite.substitutions import Substitution, applied, takes_between
from parloom.rewrite.take import Take, ends_of
from parloom.search.extraction import cheapest
from parloom.search.one_device import FunctionCosts, OneDevice
from parloom.search.pinned import Pinned
from parloom.search.request import Request, Say
from parloom.search.rewritten import free_functions

# Rounds of all rules, and of merges among them (the paper's default), and calls of an e-graph (the
# paper allows 50,000).
ROUNDS, MERGED, CALLS = 15, 1, 1_000


def tensat(request: Request, say: Say) -> tuple[str, ...]:
    """The rewrites of the form that is extracted, of those that pins leave.

    Raises `InputError` for a pin on a rewrite that applies nowhere.
    """
    start = wanted(request)
    own = on_first_part(start.request)
    device, takes = OneDevice(own), list[Take]()
    for function in free_functions(start.request):
        costs = FunctionCosts(device, function.name)
        body = Body(function, CALLS)
        saturate(body, request.pinned)
        best = cheapest(body, ends_of(own.graph, function), costs)
        before_ps, best_ps = costs.of(function), costs.of(best)
        say(
            f"tensat: {function.name}: {body.graph.num_nodes} calls,"
            f" {format_seconds(before_ps / 1e12)} to {format_seconds(best_ps / 1e12)}"
        )
        ops = {item.op for item in function.body if isinstance(item, Node)}
        merges = [name for name in RULES if name.removeprefix("merge_") in ops]
        rules = (*merges, *body.graph.fired)
        chosen = takes_between(function, best, rules) if best_ps < before_ps else ()
        if chosen is None or not proved(start.request, chosen):
            say(f"tensat: {function.name}: what was extracted does not follow in few rounds")
            continue
        takes += _worth(own.graph, function, chosen, costs)
    return (*start.rewrites, *map(str, takes))


def _worth(
    graph: Graph, function: Function, takes: Sequence[Take], costs: FunctionCosts
) -> Sequence[Take]:
    """As few of these takes of a function as cost no more: programs choose freely among equals."""
    for take in takes:
        rest = [own for own in takes if own != take]
        if _cost_ps(graph, function, rest, costs) <= _cost_ps(graph, function, takes, costs):
            takes = rest
    return takes


def _cost_ps(
    graph: Graph, function: Function, takes: Sequence[Take], costs: FunctionCosts
) -> float:
    """What a function costs with these takes, infinity where they need others."""
    body = applied(graph, function, Substitution(tuple(takes)))
    return inf if body is None else costs.of(body)


def saturate(body: Body, pinned: Pinned) -> None:
    """Add what equals values of a function, as far as pins leave it and as there is room."""
    rules = [rule for rule in rules_for(body.function) if pinned.allows_rewrite((rule.id,))]
    merged = [name for name in RULES if pinned.allows_rewrite((name,))]
    for number in range(ROUNDS):
        added = number < MERGED and unite_pairs(body.graph, merged)
        if body.saturate(rules, 1, is_proved) and not added:
            return
        if body.graph.num_nodes > CALLS:
            return
