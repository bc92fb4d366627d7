"""The search on one mesh: layouts, storage and recomputation together, within the memory limit.

Layouts couple through a few sums only: what is computed, what is sent, what is kept. So the program
is taken apart (Dantzig and Wolfe, Operations Research 8, 1960): a linear program over the solutions
known so far prices those sums, elimination finds the best layouts at these prices, and what it
finds bounds all layouts from below. For each of them, an integer program chooses storage and
recomputation (`polish`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from parloom.search.domains import cost_of
from parloom.search.eliminate import Factor
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.linear import LinearProgram
from parloom.search.policies import Counts
from parloom.search.polish import GB, MS, Candidate, polish
from parloom.search.prices import BACKWARD, FORWARD, KEPT, LINKS, PARTS
from parloom.search.storage import (
    AFTER,
    AGAIN,
    ALONE,
    CHUNKED,
    GATHERED,
    MOVING,
    REDUCED,
    STORED,
    WEIGHT_PARTS,
    Level,
)
from parloom.search.sums import Sums, Worth, summed

ROUNDS = 30
AT_MOST = 32
TRIES = 6
# Of the tolerance of the whole, that of the least cost under one worth.
SOLVED = 0.2
# Milliseconds that a gigabyte above the limit costs: more than any plan.
PENALTY = 1e7
Column = tuple[tuple[int, ...], tuple[Level, ...]]


@dataclass(frozen=True)
class Found:
    """The candidates of a mesh, best first, and what no plan on it undercuts."""

    candidates: tuple[Candidate, ...]
    bound_ps: float


class MeshSearch:
    """Searches `problem` for plans of at most `limit_bytes` a device.

    `at_most`: how many layouts are listed at once. `worth` is what it begins with.
    """

    def __init__(
        self,
        problem: LayoutProblem,
        limit_bytes: float,
        at_most: int = AT_MOST,
        worth: Worth | None = None,
    ) -> None:
        self.problem, self.limit_bytes, self.at_most = problem, limit_bytes, at_most
        self.columns: dict[Column, Sums] = {}
        self.polished: dict[tuple[int, ...], Candidate | None] = {}
        self.bounds: dict[Worth, float] = {}
        self.worth, self.bound = worth or Worth(), 0.0
        # What is left out of the menus, how many calls may recompute; shares of the best mixture.
        self.barred: tuple[Factor, ...] = ()
        self.policies = problem.policies
        self.shares: dict[Column, float] = {}

    def part(self, barred: Factor) -> "MeshSearch":
        """The search among layouts that `barred` does not make infinite, with what is known here;
        both know what either finds.
        """
        found = self._part()
        found.barred = (*self.barred, barred)
        found.columns = {
            key: sums for key, sums in self.columns.items() if cost_of([barred], key[0]) < inf
        }
        return found

    def recomputing(self, position: int, least: int, most: int) -> "MeshSearch":
        """As `part`, of what recomputes `least` to `most` calls of a policy."""
        found = self._part()
        policy = replace(self.policies[position], least=least, most=most)
        found.policies = (*self.policies[:position], policy, *self.policies[position + 1 :])
        return found

    def _part(self) -> "MeshSearch":
        found = MeshSearch(self.problem, self.limit_bytes, self.at_most, self.worth)
        found.barred, found.policies = self.barred, self.policies
        found.bound, found.polished = self.bound, self.polished
        return found

    def counts(self, values: Sequence[int]) -> tuple[int, ...]:
        """How many calls recompute where a column has `values`, for each policy."""
        chosen = values[len(self.problem.sizes) :] or (0,) * len(self.policies)
        pairs = zip(self.policies, chosen, strict=True)
        return tuple(policy.extremes[value][0] for policy, value in pairs)

    def run(self, tolerance: float = 1e-3, enough: float = inf) -> Found:
        """Columns and prices in turn, until cost and bound differ by `tolerance` at most, or the
        bound is `enough`.
        """
        worth, new = self.worth, True
        for _ in range(ROUNDS):
            if self.columns:
                cost, worth = self._combine()
                if not new or cost - self.bound <= tolerance * cost:
                    break
            new, lower = self._add(worth, tolerance * SOLVED, enough)
            if lower > self.bound:
                self.bound, self.worth = lower, worth
            if self.bound >= enough or not self.columns:
                break
        self.polish(values for values, _ in self.columns)
        return Found(self.candidates(), self.bound)

    def prove(self, worth: Worth, enough: float) -> float:
        """What no plan undercuts, as one `worth` proves it, which may be of another mesh; as soon
        as that is `enough`.
        """
        held = worth.held * self.limit_bytes
        bound = self.problem.undercut(self.multipliers(worth), enough + held) - held
        self.bound = max(self.bound, self._proved(worth, bound))
        return self.bound

    def _proved(self, worth: Worth, bound: float) -> float:
        self.bounds[worth] = max(bound, self.bounds.get(worth, bound))
        return bound

    def under(self, limit_bytes: float) -> "MeshSearch":
        """The search of all layouts under another limit, with what is known here: they cost what
        they cost, and bounds of one worth move with the limit.
        """
        found = MeshSearch(self.problem, limit_bytes, self.at_most, self.worth)
        found.columns, found.bounds = dict(self.columns), self._bounds_under(limit_bytes)
        found.worth = max(found.bounds, key=found.bounds.__getitem__, default=self.worth)
        found.bound = max(0.0, found.bounds.get(found.worth, 0.0))
        return found

    def bound_under(self, limit_bytes: float) -> float:
        """What no plan undercuts that counts at most `limit_bytes`."""
        bound = max(self._bounds_under(limit_bytes).values(), default=0.0)
        return max(0.0, bound, self.bound if limit_bytes <= self.limit_bytes else 0.0)

    def _bounds_under(self, limit_bytes: float) -> dict[Worth, float]:
        """Bounds under another limit: less by what memory was worth, for each byte more."""
        more = limit_bytes - self.limit_bytes
        return {worth: bound - worth.held * more for worth, bound in self.bounds.items()}

    def multipliers(self, worth: Worth) -> Multipliers:
        """What counts under `worth`; where memory is worth nothing, recomputing is, too."""
        counts = worth.held > 0 or self.policies != self.problem.policies
        policies = self.policies if counts else ()
        return multipliers(worth, tuple(policy.extremes for policy in policies))

    def nearby(self, found: Found, share: float) -> tuple[Candidate, ...]:
        """Candidates whose layouts cost by a `share` more than the bound at most, as many as are
        few.
        """
        for _ in range(TRIES):
            layouts = self._near(found.bound_ps * (1 + share))
            if layouts is not None:
                self.polish(layouts)
                break
            share /= 4
        return self.candidates()

    def candidates(self) -> tuple[Candidate, ...]:
        """What was found, the best first."""
        known = (candidate for candidate in self.polished.values() if candidate is not None)
        return tuple(sorted(known, key=lambda c: (c.sums.step_ps, c.values)))

    def polish(self, layouts: Iterable[tuple[int, ...]]) -> None:
        """Choose storage and recomputation for each of these."""
        for values in map(self.problem.layouts, layouts):
            if values not in self.polished:
                self.polished[values] = polish(self.problem, values, self.limit_bytes)

    @property
    def best_ps(self) -> float:
        """The best estimate so far."""
        found = (c.sums.step_ps for c in self.polished.values() if c is not None)
        return min(found, default=inf)

    def _near(self, cost: float) -> set[tuple[int, ...]] | None:
        """The layouts that cost at most `cost` under the worth that proves the bound, if few."""
        limit = cost + self.worth.held * self.limit_bytes
        found = self.problem.near(self.multipliers(self.worth), limit, self.at_most)
        return None if found is None else set(map(self.problem.layouts, found))

    def _add(self, worth: Worth, tolerance: float, enough: float) -> tuple[bool, float]:
        """Add the best layouts under `worth`: whether they are new, and the bound they prove."""
        held = worth.held * self.limit_bytes
        solution = self.problem.solve(
            self.multipliers(worth), tolerance, enough + held, self.barred
        )
        bound = self._proved(worth, solution.bound - held)
        if not solution.values:  # pins leave nothing, or nothing that costs less than enough
            return False, bound
        key = solution.values, solution.levels
        new = key not in self.columns
        self.columns[key] = summed(solution.passes, solution.weights)
        return new, bound

    def _combine(self) -> tuple[float, Worth]:
        """The best mixture of all columns: its cost, and the worth that it gives the sums."""
        program = LinearProgram()
        columns = tuple(self.columns.values())
        gathered, reduced = program.column(1.0), program.column(1.0)
        above = program.column(PENALTY)
        shares = [program.column(sums.plain / MS) for sums in columns]
        program.row(dict.fromkeys(shares, 1.0), 1.0, 1.0)
        first = program.row(
            {gathered: 1.0}
            | {i: -sums.gathered / MS for i, sums in zip(shares, columns, strict=True)},
            low=0.0,
        )
        second = program.row(
            {reduced: 1.0}
            | {i: -sums.reduced / MS for i, sums in zip(shares, columns, strict=True)},
            low=0.0,
        )
        memory = program.row(
            {above: -1.0}
            | {i: sums.held_bytes / GB for i, sums in zip(shares, columns, strict=True)},
            high=self.limit_bytes / GB,
        )
        self.problem.work.spend()
        answer = program.solve()
        assert answer is not None, "a mixture of columns is always possible"
        self.shares = {
            column: answer.values[share] for column, share in zip(self.columns, shares, strict=True)
        }
        prices = answer.prices
        return answer.cost * MS, Worth(
            min(1.0, max(0.0, prices[first])),
            min(1.0, max(0.0, prices[second])),
            max(0.0, -prices[memory]) * MS / GB,
        )


def multipliers(worth: Worth, counts: tuple[Counts, ...] = ()) -> Multipliers:
    """What each part of a price counts under `worth`, and how many calls may recompute."""
    passes, weights = np.ones(PARTS), np.zeros(WEIGHT_PARTS)
    passes[FORWARD], passes[BACKWARD] = 1.0 - worth.gathered, 1.0 - worth.reduced
    passes[KEPT], passes[LINKS] = worth.held, 0.0
    weights[[ALONE, AFTER]] = 1.0
    weights[GATHERED] = worth.gathered
    weights[[STORED, MOVING]] = worth.held
    weights[[AGAIN, CHUNKED, REDUCED]] = worth.reduced
    return Multipliers(passes, weights, counts)
