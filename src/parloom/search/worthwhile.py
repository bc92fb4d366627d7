"""Which other ways to compute values are worth a choice: merges of products of one operand, other
ways with which one device computes less, and those that pins ask for; but for those that much
better ones exclude, and those with which more weights have gradients.

What computes as much may still be what layouts need, but rules make hundreds of forms that no
layout mends.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parloom.ir.graph import Function
from parloom.ir.plan import Decisions
from parloom.rewrite.alternatives import (
    Replacement,
    alternatives,
    fused,
    replaced,
    with_few_rules,
)
from parloom.rewrite.forms import Forms
from parloom.rewrite.merge import RULES, merges
from parloom.rewrite.take import Origin, Take, compatible
from parloom.rewrite.terms import calls_in
from parloom.rewrite.trained import Trained
from parloom.search.contexts import Contexts
from parloom.search.least_compute import times_on_one_device
from parloom.search.request import Request

# Ways of a value, and of a block kind, that are kept beside merges.
OF_VALUE, MOST = 2, 6
# How many times as much saves another way, beside which one that excludes it is not kept.
DOMINATED = 1.5
# The least share of what one device computes that a way saves: each makes planning longer.
LEAST = 1e-3


@dataclass(frozen=True)
class _Way:
    """What one device saves, in picoseconds, by another way to compute values."""

    saved_ps: int
    one: Replacement

    @property
    def take(self) -> Take:
        return self.one.take

    @property
    def is_merge(self) -> bool:
        return set(self.take.rules) <= RULES.keys()

    def excludes(self, other: "_Way") -> bool:
        """Whether some of the same operators are gone by both."""
        return not set(map(id, self.one.gone)).isdisjoint(map(id, other.one.gone))


def worthwhile(request: Request, base: Decisions, functions: Sequence[Function]) -> Iterator[Take]:
    """Ways to compute values of these functions."""
    found = {own.name: list(_ways(request, own)) for own in functions}
    takes = [one.take for own in found.values() for one in own]
    if not takes:
        return
    forms = Forms(request.graph, takes)
    _, program, times = times_on_one_device(Contexts(request, base, forms))

    def spent(function: str, origins: Iterable[Origin]) -> int:
        places = (forms.place_of(function, origin) for origin in origins)
        return sum(times[program.indices[place]] for place in places)

    for own in functions:
        ways = []
        for one in found[own.name]:
            new = spent(own.name, set(calls_in(one.take.call)))
            ways.append(_Way(spent(own.name, one.gone) - new, one))
        yield from _kept(request, own, ways, LEAST * sum(times))


def _kept(
    request: Request, function: Function, ways: Sequence[_Way], least_ps: float
) -> Iterator[Take]:
    """Those that are worth a choice, of those that save as much the first: operands are in any
    order.
    """
    known, kept, trained = set[object](), list[_Way](), Trained(request.graph)
    for way in sorted(ways, key=lambda own: -own.saved_ps):
        take, is_wanted = way.take, request.pinned.wants_rewrite(way.take.rules)
        is_kept = not any(
            way.saved_ps * DOMINATED < own.saved_ps and own.excludes(way) for own in kept
        )
        if not way.is_merge:
            key = take.values, way.saved_ps
            others = [own for own in kept if not own.is_merge]
            alike = [own for own in others if own.take.values == take.values]
            is_kept &= way.saved_ps > least_ps and key not in known
            is_kept &= len(alike) < OF_VALUE and len(others) < MOST
            is_kept &= not trained.grows(function, way.one.new)
            known.add(key)
        if is_kept or is_wanted:
            named = with_few_rules(function, take)
            if named and (is_kept or request.pinned.wants_rewrite(named.rules)):
                kept.append(way)
                yield named


def _ways(request: Request, function: Function) -> Iterator[Replacement]:
    """Other ways to compute values of a function that may be beside each other."""
    graph = request.graph
    joined = (replaced(graph, function, m) for m in merges(graph) if m.function == function.name)
    every = (*joined, *fused(graph, function), *alternatives(graph, function))
    found = {one.take: one for one in every if one is not None}
    return (found[take] for take in compatible(function, found))
