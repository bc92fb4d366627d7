"""The minimum of a model under one price vector after another.

Variables whose joint tables are small are eliminated; messages bound what is left, and options that
no better solution has are left out of its elimination.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Protocol

import numpy as np

from parloom.search.model import Bools, Floats, Model
from parloom.search.solve.elimination import Eliminated, Elimination
from parloom.search.solve.pruning import Priced, Pruning, bounded

# Cells of one joint table that is made before messages: making larger ones takes longer than sweeps
# over the tables that they join (models of 81 to 755 variables, on two axes: 1.5 to 7 times as fast
# as messages alone; 4,000 cells 1 to 2 times).
LARGEST = 1_000_000
# Cells of all joint tables together after them.
CELLS = 4_000_000
# Sweeps of pruning at once.
SWEEPS = 4
# Bounds that rise by less than this share of what is left to the best solution hardly get there.
STALLED = 0.05
# Sweeps for a solution in which one option is forced, from the messages of the free minimum.
FORCED_SWEEPS = 1
# The price of what is left.
ONE = np.ones(1)
Values = tuple[int, ...]


class Parts(Protocol):
    """Easier models by sets of numbers below `number`."""

    @property
    def number(self) -> int: ...

    def allowed(self, part: frozenset[int]) -> Sequence[Bools] | None:
        """Which options the first variables have; None for a set that has none."""


class Minimizer:
    """Minima of `model`; solutions and messages of one price vector are where the next begins.

    `parts` are easier models: which options the first variables have, by a set of numbers. The
    first solution begins at that of `part`, or else of the empty set; where bound and solution do
    not meet, a better set is looked for once, and is the `part` then.
    """

    def __init__(
        self, model: Model, parts: Parts | None = None, part: frozenset[int] | None = None
    ) -> None:
        self.model, self.elimination = model, Elimination(model, LARGEST)
        self.parts, self.part = parts, part
        self.pruning: Pruning | None = None
        self.like: Values = ()
        self._last: tuple[bytes, list[Floats], Eliminated, Priced] | None = None

    def minimum(
        self, prices: Floats, tolerance: float, climbs: bool = True
    ) -> tuple[float, Values]:
        """A bound on all solutions under `prices`, and one that is within `tolerance` of it, or
        the best that was found; none where none is legal. Where it `climbs` not, no parts are
        looked for, without whose solutions fewer options are ruled out: the bound may be lower.
        """
        _, found, priced = self._priced(prices)
        if found.constant == inf:
            return inf, ()
        if not self.elimination.left:
            return found.constant, self.elimination.expanded(found, ())
        bound, values = self._bounded(found, priced, tolerance, climbs)
        return bound, self.elimination.expanded(found, values) if values else ()

    def minimum_with(self, forced: Mapping[int, int], prices: Floats) -> Values:
        """A good solution under `prices` in which variables have these values."""
        tables, *_ = self._priced(prices)
        found = self.elimination.eliminated(tables, forced)
        if found.constant == inf:
            return ()
        left = {v: i for i, v in enumerate(self.elimination.left)}
        values: Values = ()
        if left:
            kept = {left[v]: option for v, option in forced.items() if v in left}
            pruning = self._pruning(found)
            values = pruning.solution_with(kept, bounded(found.tables), FORCED_SWEEPS)
        return self.elimination.expanded(found, values) if values or not left else ()

    def least(self, prices: Floats, tolerance: float) -> Sequence[Floats]:
        """What solutions with each option of each variable cost at least."""
        priced = bounded(self.model.priced(prices))
        _, like = self.minimum(prices, tolerance)
        self._every.run(priced, like, SWEEPS)
        return self._every.least

    @cached_property
    def _every(self) -> Pruning:
        """Messages between all variables."""
        return Pruning(self.model)

    def _pruning(self, found: Eliminated) -> Pruning:
        """Messages between the variables that are left."""
        if self.pruning is None:
            self.pruning = Pruning(self.elimination.rest(found))
        return self.pruning

    def _priced(self, prices: Floats) -> tuple[list[Floats], Eliminated, Priced]:
        """The tables under `prices`, and what is left of them; those of the last ones are known."""
        key = prices.tobytes()
        if self._last is None or self._last[0] != key:
            tables = self.model.priced(prices)
            found = self.elimination.eliminated(tables)
            self._last = key, tables, found, bounded(found.tables)
        return self._last[1:]

    def _bounded(
        self, found: Eliminated, priced: Priced, tolerance: float, climbs: bool
    ) -> tuple[float, Values]:
        """A bound and a solution of what is left."""
        pruning, before = self._pruning(found), -inf
        if self.parts is not None and not self.like:
            parts = dict.fromkeys((self.part or frozenset(), frozenset[int]()))
            every = (self._of_part(part, found, tolerance) for part in parts)
            self.like = next(filter(None, every), ())
        while True:
            bound, cost, values, alive = pruning.run(priced, self.like, SWEEPS)
            if values:
                self.like = values
            bound, cost = bound + found.constant, cost + found.constant
            if cost - bound <= tolerance * abs(bound):
                return bound, values
            left = cost - bound if values else 0.0
            if bound - before <= max(tolerance / 2 * abs(bound), STALLED * left):
                break
            before = bound
        best = self._best_among(alive, found)
        if best is not None:
            self.like = best[1] or values
            return max(bound, best[0]), self.like
        if self.parts is None or self.part is not None or not climbs:
            return bound, values
        self.part = self._climbed(self.parts, found, tolerance)
        return self._bounded(found, priced, tolerance, climbs)

    def _climbed(self, parts: Parts, found: Eliminated, tolerance: float) -> frozenset[int]:
        """Begin at the best solution of parts of more and more numbers: those with which alone
        solutions are the best come first, and stay where they are better beside those before.
        """
        rest, own = self.elimination.rest(found), frozenset[int]()
        alone = {n: self._of_part(frozenset([n]), found, tolerance) for n in range(parts.number)}
        costs = {n: _cost(rest, values) for n, values in alone.items() if values}
        for number in sorted(costs, key=costs.__getitem__):
            values = self._of_part(own | {number}, found, tolerance) if own else alone[number]
            if values and not (self.like and _cost(rest, self.like) <= _cost(rest, values)):
                own, self.like = own | {number}, values
        return own

    def _of_part(self, part: frozenset[int], found: Eliminated, tolerance: float) -> Values:
        """The best solution of what is left that was found of a part; none where there is none."""
        assert self.parts is not None
        masks = self.parts.allowed(part)
        if masks is None:
            return ()
        rest = self.elimination.rest(found)
        allowed = [
            masks[v] if v < len(masks) else np.ones(len(own), dtype=bool)
            for v, own in zip(self.elimination.left, rest.variables, strict=True)
        ]
        small, kept = rest.restricted(allowed)
        _, values = Minimizer(small).minimum(ONE, tolerance)
        return tuple(int(k[v]) for k, v in zip(kept, values, strict=False))

    def _best_among(
        self, allowed: Sequence[Bools], found: Eliminated
    ) -> tuple[float, Values] | None:
        """The least cost of the allowed options, and a solution that reaches it; None where tables
        would be too large.
        """
        small, kept = self.elimination.rest(found).restricted(allowed)
        exact = Elimination(small, CELLS)
        if exact.left or exact.cells > CELLS:
            return None
        cost, values = exact.minimum(ONE)
        some = tuple(int(k[v]) for k, v in zip(kept, values, strict=False))
        return cost + found.constant, some


class Part:
    """Minima of `model` with the options of its first variables that are `allowed`; all that is
    said is in options of the whole.
    """

    def __init__(self, model: Model, allowed: Sequence[Bools]) -> None:
        small, self.kept = model.restricted(_of_all(model, allowed))
        self.minimizer, self.sizes = Minimizer(small), [len(own) for own in model.variables]

    def minimum(self, prices: Floats, tolerance: float) -> tuple[float, Values]:
        """See `Minimizer`."""
        bound, values = self.minimizer.minimum(prices, tolerance)
        return bound, self._expanded(values)

    def minimum_with(self, forced: Mapping[int, int], prices: Floats) -> Values:
        """See `Minimizer`; none where an option is not allowed."""
        places = {v: np.flatnonzero(self.kept[v] == option) for v, option in forced.items()}
        if not all(map(len, places.values())):
            return ()
        own = {variable: int(place[0]) for variable, place in places.items()}
        return self._expanded(self.minimizer.minimum_with(own, prices))

    def least(self, prices: Floats, tolerance: float) -> Sequence[Floats]:
        """See `Minimizer`; infinity for options that are not allowed."""
        found = []
        least = self.minimizer.least(prices, tolerance)
        for size, kept, costs in zip(self.sizes, self.kept, least, strict=True):
            found.append(np.full(size, inf))
            found[-1][kept] = costs
        return found

    def _expanded(self, values: Values) -> Values:
        return tuple(int(kept[v]) for kept, v in zip(self.kept, values, strict=False))


def _of_all(model: Model, allowed: Sequence[Bools]) -> list[Bools]:
    """What is allowed of all variables where something is said of the first ones."""
    rest = model.variables[len(allowed) :]
    return [*allowed, *(np.ones(len(own), dtype=bool) for own in rest)]


def _cost(model: Model, values: Values) -> float:
    """What a solution costs of a model of one row."""
    return float(sum(term.chosen(ONE, values)[0] for term in model.terms))
