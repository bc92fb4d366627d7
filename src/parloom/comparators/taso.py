"""TASO: a backtracking search over graphs by substitutions (Jia et al., SOSP'19, section 5).

Graphs wait in a queue by their cost on one device. Of the cheapest one, every substitution at every
place makes a graph, which waits, too, where it costs less than 1.05 times the best and was not seen
before. Functions are searched apart, a block kind once for all of its calls, where the paper cuts a
graph into parts.
"""

from collections.abc import Callable, Sequence

from parloom.comparators.best_first import LARGER, best_first
from parloom.comparators.fixed_form import on_first_part, proved, wanted
from parloom.cost.units import format_seconds
from parloom.ir.graph import Function
from parloom.rewrite.rules import Rule
from parloom.rewrite.substitutions import Substitution, takes_between
from parloom.rewrite.take import Take
from parloom.search.one_device import FunctionCosts, OneDevice
from parloom.search.request import Request, Say
from parloom.search.rewritten import free_functions

# Graphs that are taken from the queue of a function (the released code takes 1,000).
POPPED = 100
Rules = Callable[[Function], Sequence[Rule]]


def no_rules(_: Function) -> Sequence[Rule]:
    """None but those for all methods."""
    return ()


def taso(request: Request, say: Say) -> tuple[str, ...]:
    """The rewrites that the search finds, of those that pins leave.

    Raises `InputError` for a pin on a rewrite that applies nowhere.
    """
    return backtracking("taso", request, say)


def backtracking(
    name: str, request: Request, say: Say, more: Rules = no_rules, larger: int = LARGER
) -> tuple[str, ...]:
    """What the search finds, with `more` rules for a function, of graphs that are not so much
    `larger`.
    """
    start = wanted(request)
    own = on_first_part(start.request)
    device, takes = OneDevice(own), list[Take]()

    def allowed(found: Substitution) -> bool:
        return request.pinned.allows_rewrite(found.rules)

    for function in free_functions(start.request):
        costs = FunctionCosts(device, function.name)
        found = list(
            best_first(own.graph, function, costs.of, allowed, POPPED, more(function), larger)
        )
        first, last = (format_seconds(f.cost_ps / 1e12) for f in (found[0], found[-1]))
        improved = f"improved {len(found) - 1} times, {first} to {last} on one device"
        say(f"{name}: {function.name}: {improved}")
        for best in reversed(found):
            chosen = takes_between(function, best.body, best.rules)
            if chosen is not None and proved(start.request, chosen):
                takes += chosen
                break
    return (*start.rewrites, *map(str, takes))
