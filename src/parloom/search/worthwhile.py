"""Which other ways to compute values are worth a choice: those with which one device computes less.

What computes as much may still be what layouts need, but rules make hundreds of forms that no
layout mends.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from parloom.ir.graph import Function
from parloom.ir.plan import Decisions
from parloom.rewrite.alternatives import Replacement, alternatives, fused, with_few_rules
from parloom.rewrite.forms import Forms
from parloom.rewrite.horizontal import is_fusion
from parloom.rewrite.take import Origin, Take, compatible
from parloom.rewrite.terms import calls_in
from parloom.search.contexts import Contexts
from parloom.search.least_compute import times_on_one_device
from parloom.search.request import Request

# Ways of a value, and of a block kind, that are kept.
OF_VALUE, MOST = 2, 6


def worthwhile(
    request: Request, base: Decisions, functions: Sequence[Function], others: Sequence[Take]
) -> Iterator[Take]:
    """Ways by known rules to compute values of these functions, beside the `others`."""
    found = {own.name: list(_ways(request, own, others)) for own in functions}
    takes = [one.take for own in found.values() for one in own]
    if not takes:
        return
    forms = Forms(request.graph, [*others, *takes])
    _, program, times = times_on_one_device(Contexts(request, base, forms))

    def spent(function: str, origins: Iterable[Origin]) -> int:
        """What one device computes in these operators or calls."""
        places = (forms.place_of(function, origin) for origin in origins)
        return sum(times[program.indices[place]] for place in places)

    for function in functions:
        saved: dict[tuple[tuple[str, ...], int], Take] = {}
        for one in found[function.name]:
            more = spent(function.name, set(calls_in(one.take.call)))
            less = spent(function.name, one.gone) - more
            if less > 0:  # of those that save as much the first: operands are in any order
                saved.setdefault((one.take.values, less), one.take)
        counts = Counter[tuple[str, ...]]()
        for (values, _), take in sorted(saved.items(), key=lambda own: -own[0][1]):
            counts[values] += 1
            if counts[values] <= OF_VALUE and counts.total() <= MOST:
                is_one = all(map(is_fusion, take.rules))
                named = take if is_one else with_few_rules(function, take)
                if named is not None:
                    yield named


def _ways(request: Request, function: Function, others: Sequence[Take]) -> Iterator[Replacement]:
    """Other ways to compute values of a function that may be beside the `others`."""
    every = (*fused(request.graph, function), *alternatives(request.graph, function))
    found = {one.take: one for one in every}
    own = [take for take in others if take.function == function.name]
    return (found[take] for take in compatible(function, (*own, *found)) if take in found)
