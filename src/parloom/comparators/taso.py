"""TASO: a backtracking search over graphs by substitutions (Jia et al., SOSP'19, section 5).

Graphs wait in a queue by their cost on one device. Of the cheapest one, every substitution at every
place makes a graph, which waits, too, where it costs less than `ALPHA` times the best and was not
seen before. Functions are searched apart, a block kind once for all of its calls, where the paper
cuts a graph into parts.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from parloom.comparators.fixed_form import on_first_part, proved, wanted
from parloom.comparators.one_device import FunctionCosts
from parloom.cost.units import format_seconds
from parloom.ir.graph import Function, Graph
from parloom.rewrite.substitutions import (
    Structure,
    applied,
    directions,
    structure,
    substitutions,
    takes_between,
)
from parloom.rewrite.take import Take
from parloom.search.pinned import Pinned
from parloom.search.request import Request, Say
from parloom.search.rewritten import free_functions

# The paper's; the released code has 1.0 unless it is told.
ALPHA = 1.05
# Graphs that are taken from the queue of a function (the released code takes 1,000), and how many
# times as many operators as the first one a graph has at most.
POPPED, LARGER = 100, 2


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A body of a function by its cost (ps), and the rules by which it was made."""

    cost_ps: float
    number: int
    body: Function = field(compare=False)
    rules: tuple[str, ...] = field(compare=False, default=())


def taso(request: Request, say: Say) -> tuple[str, ...]:
    """The rewrites that the search finds, of those that pins leave.

    Raises `InputError` for a pin on a rewrite that applies nowhere.
    """
    start = wanted(request)
    own = on_first_part(start.request)
    takes: list[Take] = []
    for function in free_functions(start.request):
        costs = FunctionCosts(own, function.name)
        found = list(searched(own.graph, function, costs, request.pinned))
        say(
            f"taso: {function.name}: {len(found) - 1} times better,"
            f" {format_seconds(found[0].cost_ps / 1e12)} to"
            f" {format_seconds(found[-1].cost_ps / 1e12)}"
        )
        for best in reversed(found):
            chosen = takes_between(function, best.body, best.rules)
            if chosen is not None and proved(start.request, chosen):
                takes += chosen
                break
    return (*start.rewrites, *map(str, takes))


def searched(
    graph: Graph,
    function: Function,
    costs: FunctionCosts,
    pinned: Pinned,
    *,
    alpha: float = ALPHA,
    popped: int = POPPED,
) -> Iterator[Found]:
    """The function as it is, and each body that is the best so far."""
    known: dict[object, int] = {}
    numbers, rules = count(), directions(function)
    best = Found(costs.of(function), next(numbers), function)
    waiting, seen = [best], {structure(function, known)}
    yield best
    for _ in range(popped):
        if not waiting:
            return
        current = heapq.heappop(waiting)
        if current.cost_ps > alpha * best.cost_ps:
            return
        for substitution in substitutions(graph, current.body, rules):
            if not pinned.allows_rewrite(substitution.rules):
                continue
            body = applied(graph, current.body, substitution)
            if body is None or len(body.body) > LARGER * len(function.body):
                continue
            own: Structure = structure(body, known)
            if own in seen:
                continue
            seen.add(own)
            cost_ps = costs.of(body)
            if cost_ps >= alpha * best.cost_ps:
                continue
            fired = tuple(dict.fromkeys((*current.rules, *substitution.rules)))
            found = Found(cost_ps, next(numbers), body, fired)
            heapq.heappush(waiting, found)
            if cost_ps < best.cost_ps:
                best = found
                yield best
