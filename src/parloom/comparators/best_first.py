"""Best-first search over the bodies of a function by substitutions, as MetaFlow, TASO and Unity
have it (Jia et al., SOSP'19, section 5, algorithm 2).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from parloom.ir.graph import Function, Graph
from parloom.rewrite.rules import Rule
from parloom.rewrite.substitutions import (
    Substitution,
    applied,
    directions,
    structure,
    substitutions,
)

# What costs more than this many times the best is left: TASO's and Unity's papers have 1.05.
ALPHA = 1.05
# How many times as many operators as the first one a body has at most.
LARGER = 2
Cost = Callable[[Function], float]
Allowed = Callable[[Substitution], bool]


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A body of a function by its cost (ps), and the rules by which it was made."""

    cost_ps: float
    number: int
    body: Function = field(compare=False)
    rules: tuple[str, ...] = field(compare=False, default=())


def best_first(
    graph: Graph,
    function: Function,
    cost: Cost,
    allowed: Allowed,
    popped: int,
    more: Sequence[Rule] = (),
    larger: int = LARGER,
) -> Iterator[Found]:
    """The function as it is in `graph`, and each body that is the best so far, by all rules for it
    and `more`, where at most so many are taken from the queue, of which none is so much `larger`.
    """
    known: dict[object, int] = {}
    numbers, rules = count(), directions(function, more)
    best = Found(cost(function), next(numbers), function)
    waiting, seen = [best], {structure(function, known)}
    yield best
    for _ in range(popped):
        if not waiting or waiting[0].cost_ps > ALPHA * best.cost_ps:
            return
        current = heapq.heappop(waiting)
        for substitution in filter(allowed, substitutions(graph, current.body, rules)):
            body = applied(graph, current.body, substitution)
            if body is None or len(body.body) > larger * len(function.body):
                continue
            alike = structure(body, known)
            if alike in seen:
                continue
            seen.add(alike)
            fired = tuple(dict.fromkeys((*current.rules, *substitution.rules)))
            found = Found(cost(body), next(numbers), body, fired)
            if found.cost_ps < ALPHA * best.cost_ps:
                heapq.heappush(waiting, found)
            if found.cost_ps < best.cost_ps:
                best = found
                yield best
