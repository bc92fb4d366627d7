"""The minimum of a model under one price vector after another.

Variables whose joint tables are small are eliminated; messages bound what is left, and options that
no better solution has are left out of its elimination.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf

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


class Minimizer:
    """Minima of `model`; solutions and messages of one price vector are where the next begins."""

    def __init__(self, model: Model) -> None:
        self.model, self.elimination = model, Elimination(model, LARGEST)
        self.pruning: Pruning | None = None
        self.like: Values = ()
        self._last: tuple[bytes, list[Floats], Eliminated, Priced] | None = None

    def minimum(self, prices: Floats, tolerance: float) -> tuple[float, Values]:
        """A bound on all solutions under `prices`, and one that is within `tolerance` of it, or
        the best that was found; none where none is legal.
        """
        _, found, priced = self._priced(prices)
        if found.constant == inf:
            return inf, ()
        if not self.elimination.left:
            return found.constant, self.elimination.expanded(found, ())
        bound, values = self._bounded(found, priced, tolerance)
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

    def _bounded(self, found: Eliminated, priced: Priced, tolerance: float) -> tuple[float, Values]:
        """A bound and a solution of what is left."""
        pruning, before = self._pruning(found), -inf
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
        if best is None:
            return bound, values
        self.like = best[1] or values
        return max(bound, best[0]), self.like

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
