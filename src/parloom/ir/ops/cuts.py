"""Cuts: where the dims of values may be split, and how cuts travel through rules.

A cut is a stride. Cuts of one factor must form a divisibility chain; a cut that does not fit is
dropped (only granularity is lost, never correctness).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from parloom.ir.graph import Node
from parloom.ir.ops.rule import HALO, WHOLE, Dims, Rule

Cuts = frozenset[int]  # strides at which a dim may be cut
DimKey = tuple[str, str, int]  # function, value, dim
NONE: Cuts = frozenset()


class KnownCuts:
    """The cuts of dims as they are found; `changes` counts how often some were new."""

    def __init__(self) -> None:
        self._of: dict[DimKey, Cuts] = {}
        self._changed: dict[DimKey, int] = {}
        self.changes = 0

    def of(self, key: DimKey) -> Cuts:
        """Those of a dim."""
        return self._of.get(key, NONE)

    def changed(self, key: DimKey) -> int:
        """The number of the latest change of a dim; 0 where none was."""
        return self._changed.get(key, 0)

    def add(self, key: DimKey, added: Cuts, size: int) -> None:
        """Cuts of a dim of `size`, of which those are kept that fit."""
        old = self.of(key)
        new = extend(old, added, size)
        if new != old:
            self.changes += 1
            self._of[key], self._changed[key] = new, self.changes

    def settle(self, carriers: Sequence[Callable[["KnownCuts"], None]]) -> None:
        """Let all of them carry cuts, in turns, until none is new."""
        before = -1
        while self.changes > before:
            before = self.changes
            for carry in carriers:
                carry(self)


@dataclass(frozen=True, slots=True)
class Place:
    """A dim of a node's operand or result: its size, and its factors with the strides of their unit
    and of all of them, outermost first.
    """

    key: DimKey
    size: int
    factors: tuple[tuple[str, int, int], ...]


class NodeCuts:
    """Carries cuts through a node of `function` by its rule."""

    def __init__(self, function: str, node: Node, rule: Rule) -> None:
        self.rule = rule
        tensors: list[tuple[str, Dims]] = [
            *zip(node.refs, rule.operands, strict=True),
            *zip((v.name for v in node.results), rule.results, strict=True),
        ]
        self.places = [
            Place((function, name, dim), prod(map(rule.size, factors)), _strides(rule, factors))
            for name, dims in tensors
            for dim, factors in enumerate(dims)
        ]
        # How many changes the node has seen: with no later one of its dims it carries nothing.
        self._seen = -1

    def carry(self, known: KnownCuts) -> None:
        """Carry the cuts of each of the node's values to the others."""
        if all(known.changed(place.key) <= self._seen for place in self.places):
            return
        self._seen = known.changes
        inner = self._inner(known)
        for place in self.places:
            cuts = {unit for _, unit, _ in place.factors}
            cuts |= {unit * c for factor, unit, _ in place.factors for c in inner.get(factor, NONE)}
            known.add(place.key, frozenset(cuts), place.size)

    def refined(self, known: KnownCuts) -> Rule:
        """The rule with its factors cut into the finest parts."""
        return self.rule.split(
            {
                factor: parts(cuts, self.rule.size(factor))
                for factor, cuts in self._inner(known).items()
                if self.rule.kind(factor) not in (HALO, WHOLE)
            }
        )

    def _inner(self, known: KnownCuts) -> dict[str, Cuts]:
        """Cuts inside of factors, in units of the factor."""
        inner: dict[str, set[int]] = {}
        for place in self.places:
            cuts = known.of(place.key)
            for factor, unit, top in place.factors if cuts else ():
                for cut in cuts:
                    if unit < cut < top and cut % unit == 0 and top % cut == 0:
                        inner.setdefault(factor, set()).add(cut // unit)
        return {f: extend(NONE, frozenset(c), self.rule.size(f)) for f, c in inner.items()}


def units(rule: Rule, factors: tuple[str, ...]) -> list[tuple[str, int]]:
    """(factor, stride of its unit in the dim), outermost first."""
    return [(factor, unit) for factor, unit, _ in _strides(rule, factors)]


def _strides(rule: Rule, factors: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    found, unit = [], 1
    for factor in reversed(factors):
        top = unit * rule.size(factor)
        found.append((factor, unit, top))
        unit = top
    return tuple(reversed(found))


def extend(old: Cuts, added: Cuts, size: int) -> Cuts:
    """`old` with every cut of `added` that keeps it a divisibility chain of divisors of `size`."""
    kept = set(old)
    for cut in sorted(added - old):
        divides = 1 < cut < size and size % cut == 0
        if divides and all(cut % k == 0 or k % cut == 0 for k in kept):
            kept.add(cut)
    return frozenset(kept)


def parts(cuts: Cuts, size: int) -> tuple[int, ...]:
    """Sizes of the parts of a factor between its cuts, outermost first."""
    bounds = [*sorted(cuts), size]
    sizes, low = [], 1
    for high in bounds:
        sizes.append(high // low)
        low = high
    return tuple(reversed(sizes))
