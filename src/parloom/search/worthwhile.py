"""Which other ways to compute values are worth a choice: those with which one device computes less,
and those that pins ask for.

What computes as much may still be what layouts need, but rules make hundreds of forms that no
layout mends.
"""

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
# How many times as much saves another way, beside which one that excludes it is not kept.
DOMINATED = 4


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
        saved: dict[tuple[tuple[str, ...], int], Replacement] = {}
        for one in found[function.name]:
            more = spent(function.name, set(calls_in(one.take.call)))
            less = spent(function.name, one.gone) - more
            if less > 0 or request.pinned.wants_rewrite(one.take.rules):
                # Of those that save as much the first: operands are in any order.
                saved.setdefault((one.take.values, less), one)
        kept = list[tuple[int, Replacement]]()
        for (values, less), one in sorted(saved.items(), key=lambda own: -own[0][1]):
            alike = [own for _, own in kept if own.take.values == values]
            is_kept = (
                len(alike) < OF_VALUE and len(kept) < MOST and not _is_dominated(one, less, kept)
            )
            if is_kept or request.pinned.wants_rewrite(one.take.rules):
                is_one = all(map(is_fusion, one.take.rules))
                named = one.take if is_one else with_few_rules(function, one.take)
                if named and (is_kept or request.pinned.wants_rewrite(named.rules)):
                    kept.append((less, one))
                    yield named


def _is_dominated(one: Replacement, less: int, kept: Sequence[tuple[int, Replacement]]) -> bool:
    """Whether ways that are left in its place save much more: those by which some of the same
    operators are gone.
    """
    gone = set(map(id, one.gone))
    return any(
        less * DOMINATED < more and gone.intersection(map(id, own.gone)) for more, own in kept
    )


def _ways(request: Request, function: Function, others: Sequence[Take]) -> Iterator[Replacement]:
    """Other ways to compute values of a function that may be beside the `others`."""
    every = (*fused(request.graph, function), *alternatives(request.graph, function))
    found = {one.take: one for one in every}
    own = [take for take in others if take.function == function.name]
    return (found[take] for take in compatible(function, (*own, *found)) if take in found)
