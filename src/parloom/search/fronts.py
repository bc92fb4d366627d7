"""The choices that matter where a cost is the largest of several sums (min-max shortest paths:
Warburton, Operations Research 35, 1987, with costs in steps of a grid).

Backwards through one elimination per sum, partial choices are followed with what they cost above
the least in each sum. One is left out where it costs too much in some sum, or where another is no
dearer in any, whatever is chosen after both.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parloom.search.eliminate import Indices, Regret, Table

# Sets of at most so many rows are compared at once, those of one size together.
FEW = 32


@dataclass(frozen=True)
class Sum:
    """A sum of tables: its least value and the regrets of its elimination."""

    least: float
    regrets: Sequence[Regret]


@dataclass(frozen=True)
class Joint:
    """What several variables together cost beyond the tables, [row, sum], for rows of values of all
    variables of which only those in `scope` count; never below zero.
    """

    scope: frozenset[int]
    costs: Callable[[Indices], Table]


@dataclass(frozen=True)
class Fronts:
    """Values [row, variable] with what they cost at least, the cheapest first. Values that were
    left out cost no less than one of these, or more than the limit.
    """

    values: Indices
    bounds: Table


@dataclass
class Patience:
    """How many numbers may still be compared until following is given up."""

    left: int


def fronts(
    sums: Sequence[Sum],
    joints: Iterable[Joint],
    limit: float,
    grid: float,
    at_most: int,
    patience: Patience,
) -> Fronts | None:
    """The values that cost at most `limit`; None where more than `at_most` are followed at once, or
    where `patience` ends.

    They cost the largest of `sums`, which are all eliminated in one order. `grid`: costs are
    rounded down to multiples of it after every variable; where it is 0 they are not, and no values
    are left out for others.
    """
    return _Following(sums, joints, limit, grid, at_most, patience).run()


class _Following:
    def __init__(
        self,
        sums: Sequence[Sum],
        joints: Iterable[Joint],
        limit: float,
        grid: float,
        at_most: int,
        patience: Patience,
    ) -> None:
        self.sums, self.limit, self.grid, self.at_most = sums, limit, grid, at_most
        self.least = np.array([s.least for s in self.sums])
        self.waiting = list(joints)
        self.order = [regret.variable for regret in self.sums[0].regrets]
        self.found: Indices = np.zeros((1, len(self.order)), dtype=np.intp)
        self.above: Table = np.zeros((1, len(self.sums)))
        self.patience = patience

    def run(self) -> Fronts | None:
        chosen: set[int] = set()
        for step, regret in enumerate(self.sums[0].regrets):
            self._choose(step)
            if not len(self.found):
                break
            chosen.add(regret.variable)
            self._join(chosen)
            if self.grid:
                later = {v for r in self.sums[0].regrets[step + 1 :] for v in r.rest}
                later.update(v for joint in self.waiting for v in joint.scope)
                self._thin(sorted(later & chosen))
            if len(self.found) > self.at_most or self.patience.left < 0:
                return None
        assert not self.waiting or not len(self.found), "all variables of a joint are chosen"
        bounds = self._bounds(self.above)
        order = np.lexsort((*self.found.T[::-1], bounds))
        return Fronts(self.found[order], bounds[order])

    def _bounds(self, above: Table) -> Table:
        """What rows cost: the largest of the sums."""
        costs: Table = (above + self.least).max(axis=1)
        return costs

    def _choose(self, step: int) -> None:
        """Each row with each value of the next variable; sum by sum only those that are left over
        by the sums before.
        """
        regret = self.sums[0].regrets[step]
        size = len(regret.costs)
        value = np.repeat(np.arange(size), len(self.found))
        which = np.tile(np.arange(len(self.found)), size)
        costs: list[NDArray[np.float64]] = []
        for index, found in enumerate(self.sums):
            at: tuple[Any, ...] = value, *(self.found[which, v] for v in regret.rest)
            mine = self.above[which, index] + found.regrets[step].costs[at]
            (left,) = np.nonzero(mine + found.least <= self.limit)
            value, which = value[left], which[left]
            costs = [c[left] for c in (*costs, mine)]
        self.found = self.found[which]
        self.found[:, regret.variable] = value
        self.above = np.stack(costs, axis=1)

    def _join(self, chosen: set[int]) -> None:
        """Add what is known as soon as all its variables are."""
        for joint in [j for j in self.waiting if j.scope <= chosen and len(self.found)]:
            self.waiting.remove(joint)
            self.above = self.above + joint.costs(self.found)
            (left,) = np.nonzero(self._bounds(self.above) <= self.limit)
            self.found, self.above = self.found[left], self.above[left]

    def _thin(self, live: Sequence[int]) -> None:
        """Of rows that are alike in what matters later, those that no other undercuts."""
        # Multiples are rounded, too, and never above what they stand for.
        self.above = np.minimum(self.above, np.floor(self.above / self.grid) * self.grid)
        if len(self.found) < 2:
            return
        self.patience.left -= self.found.shape[0] * (len(live) + self.above.shape[1])
        if self.patience.left < 0:
            return
        kinds = np.zeros(len(self.found), dtype=np.intp)
        if live:
            kinds = np.unique(self.found[:, live], axis=0, return_inverse=True)[1].reshape(-1)
        order = np.lexsort((*self.above.T[::-1], self.above.sum(axis=1), kinds))
        ends = np.flatnonzero(np.diff(kinds[order], prepend=-1, append=-1))
        starts, counts = ends[:-1], np.diff(ends)
        kept = []
        for count in np.unique(counts):
            some = starts[counts == count]
            if count <= FEW:
                rows = order[some[:, None] + np.arange(count)]
                kept.append(rows[self._fronts(self.above[rows])])
            else:
                every = (order[start : start + count] for start in some)
                kept += [rows[self._front(self.above[rows])] for rows in every]
        left = np.sort(np.concatenate(kept))
        self.found, self.above = self.found[left], self.above[left]

    def _fronts(self, costs: Table) -> NDArray[np.bool_]:
        """As `_front`, of many sets of as many rows: [set, row, sum]."""
        count = costs.shape[1]
        kept = np.ones(costs.shape[:2], dtype=bool)
        for row in range(1, count):
            no_dearer = (costs[:, :row] <= costs[:, row : row + 1]).all(axis=2)
            kept[:, row] = ~np.logical_or.reduce(no_dearer, axis=1)
        self.patience.left -= costs.size * (1 + count // 2)
        return kept

    def _front(self, costs: Table) -> Indices:
        """The rows that no other is at most as large as everywhere; of equal ones the first, and
        all where patience ends. The rows come with rising totals.
        """
        left = np.arange(len(costs))
        kept = []
        while len(left):
            self.patience.left -= left.size * costs.shape[1]
            if self.patience.left < 0:
                return np.arange(len(costs))
            first, others = left[0], left[1:]
            kept.append(first)
            left = others[(costs[others] < costs[first]).any(axis=1)]
        return np.array(kept, dtype=np.intp)
