"""Closing the gap between the best answer on a mesh and what no plan on it undercuts.

Mixtures of layouts cost less than any of them, so the bound of the linear program stays below. Here
the layouts themselves are followed (`fronts`) under several worths at once: what a layout costs is
the largest of what it costs under any. Those that seem to undercut the best answer are priced
exactly, one after the other, and what they show is added: the worth that is right for them, what
movements for several readers cost together. What is left over proves the bound.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np

from parloom.search.branching import branch
from parloom.search.eliminate import Indices, Table
from parloom.search.fronts import Fronts, Joint, Patience, Sum, fronts
from parloom.search.layouts import Multipliers
from parloom.search.master import Found, MeshSearch, multipliers
from parloom.search.policies import Counts
from parloom.search.polish import relaxed
from parloom.search.sums import Worth

# Bound and answer are brought together to within this share.
TOLERANCE = 0.0075
ROUNDS = 30
# Layouts that are followed at once, before each is joined with every choice of the next operator;
# that are priced in each round; and that are listed at the end.
FOLLOWED, PRICED, LISTED = 20000, 16, 64
# Numbers that are compared for one mesh: some seconds.
COMPARED = 30_000_000
# Worths to begin with, how near the best bound theirs are, worths that a round adds, and all.
FIRST, NEAR, ADDED, WORTHS = 3, 0.9, 2, 12
# The limit goes this share of the way from the bound to the best answer; twice as far where it
# lets no layout in, and where it lets too many in, a part of that, but no less than this.
STEP, CLOSER, LEAST = 0.25, 4, 0.01
# The share of the limit by which memory may be missed if that costs as much as the whole step.
MISSED = 1e-3


def close(
    search: MeshSearch, best_ps: float, tolerance: float = TOLERANCE, listed: int = LISTED
) -> Found:
    """What `search` found, with a bound that is at most `tolerance` below the better of its best
    and `best_ps` where that can be proved: part by part (`branching`), and then together.
    """
    search.bound = branch(search, best_ps, tolerance)
    found = _Closing(search, min(best_ps, search.best_ps), tolerance, listed).run()
    search.bound = found.bound_ps
    return found


class _Closing:
    def __init__(self, search: MeshSearch, best_ps: float, tolerance: float, listed: int) -> None:
        self.search, self.problem = search, search.problem
        self.best, self.bound, self.listed = best_ps, search.bound, listed
        self.tolerance = tolerance
        ranked = sorted(search.bounds, key=lambda w: -search.bounds[w])
        near = NEAR * search.bounds[ranked[0]] if ranked else 0.0
        self.worths = [w for w in ranked[:FIRST] if search.bounds[w] >= near]
        at = search.worth
        corners = (replace(at, gathered=g, reduced=r) for g, r in product((0.0, 1.0), repeat=2))
        self.worths = list(dict.fromkeys([*self.worths, *corners]))
        self.sums: dict[Worth, Sum] = {}
        self.joined: dict[int, None] = {}
        self.patience = Patience(COMPARED)
        self.counts = self._counts()
        self.kept = self._kept() if self.is_open else None

    def _counts(self) -> tuple[Counts, ...]:
        """How many calls may recompute: all counts, as the best under several worths at once may
        be between the fewest and the most; those near the best answer apart.
        """
        if not any(worth.held > 0 for worth in self.worths):
            return ()
        best, policies = next(iter(self.search.candidates()), None), self.problem.policies
        near = best.recomputed if best else tuple(policy.most for policy in policies)
        return tuple(p.around(count) for p, count in zip(policies, near, strict=True))

    def _kept(self) -> list[Indices] | None:
        """The choices that layouts take which may undercut the best answer."""
        worth = self.worths[0]
        counted = self._multipliers(worth)
        limit = self.best + worth.held * self.search.limit_bytes
        kept = self.problem.narrowed(counted, limit)
        if kept is not None and not all(map(len, kept)):  # nothing is as cheap as the best answer
            self._prove(self.best)
            return None
        return kept

    def _multipliers(self, worth: Worth) -> Multipliers:
        """Those of `worth`; sums under all worths are over the same variables."""
        return multipliers(worth, self.counts)

    @property
    def enough(self) -> float:
        """What the bound has to be."""
        return self.best * (1 - self.tolerance)

    @property
    def is_open(self) -> bool:
        """Whether the bound is not yet near enough to an answer."""
        return 0 < self.bound < self.enough < inf

    def run(self) -> Found:
        share, better = STEP, self.kept is not None
        for _ in range(ROUNDS):
            if not self.is_open or not better or share < LEAST:
                break
            slack = self.best - self.bound
            rest = slack * (1 - share)
            limit = self.best - (rest if rest > self.best - self.enough else 0.0)
            found = self._follow(limit, FOLLOWED)
            if found is None:
                share /= CLOSER
                continue
            self._prove(min(limit, found.bounds.min(initial=inf)))
            low = found.values[found.bounds < min(limit, self.enough)]
            if len(low):
                better = self._refine(low[:PRICED], found.bounds)
            else:
                share = min(1.0, 2 * share)
        if self.is_open and self.kept is not None:
            self._list()
        return Found(self.search.candidates(), self.bound)

    def _prove(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _follow(self, limit: float, at_most: int, whole: bool = False) -> Fronts | None:
        """Layouts that cost at most `limit`; with `whole` all of them."""
        sums = [self._sum(worth) for worth in self.worths]
        joints = [self._joint(index) for index in self.joined]
        grid = 0.0 if whole else self.tolerance / 2 * self.best / len(self.problem.sizes)
        self.problem.work.spend()
        found = fronts(sums, joints, limit, grid, at_most, self.patience)
        return found and replace(found, values=self._whole(found.values))

    def _whole(self, rows: Indices) -> Indices:
        """Rows of places among the choices kept as rows of choices."""
        assert self.kept is not None
        return np.stack([k[rows[:, v]] for v, k in enumerate(self.kept)], axis=1)

    def _sum(self, worth: Worth) -> Sum:
        """The cost under a worth."""
        assert self.kept is not None
        if worth not in self.sums:
            least, regrets = self.problem.regrets(self._multipliers(worth), self.kept)
            self.sums[worth] = Sum(least - worth.held * self.search.limit_bytes, regrets)
        return self.sums[worth]

    def _joint(self, index: int) -> Joint:
        """What a flow costs beyond what each of its readers counts."""
        counted = [self._multipliers(worth) for worth in self.worths]
        scope = self.problem.ends(index, counted[0])

        def costs(places: Indices) -> Table:
            rows = self._whole(places)
            some = rows[:, sorted(scope)]
            _, first, where = np.unique(some, axis=0, return_index=True, return_inverse=True)
            beyond = np.array([self.problem.beyond(index, rows[row], counted) for row in first])
            found: Table = beyond[where.reshape(-1)]
            return found

        return Joint(scope, costs)

    def _refine(self, rows: Indices, bounds: Table) -> bool:
        """Price layouts exactly, and see to it that they are priced better next time; whether
        there was anything to better.
        """
        layouts = [tuple(map(int, row)) for row in rows]
        joined = [self._join(values) for values in layouts]
        new = 0
        # What goes a thousandth beyond the limit costs as much as the whole step.
        penalty = self.best / (MISSED * self.search.limit_bytes)
        for values, bound, known in zip(layouts, bounds[: len(layouts)], joined, strict=True):
            cost, worth = self._relaxed(values, penalty)
            if cost < self.best:
                self._polish([values])
            far = cost - bound > self.tolerance / 2 * self.best
            room = new < ADDED and len(self.worths) < WORTHS
            if far and not known and room and worth not in self.worths:
                self.worths.append(worth)
                new += 1
        return any(joined) or new > 0

    def _relaxed(self, values: tuple[int, ...], penalty: float) -> tuple[float, Worth]:
        """See `relaxed`, for layouts with policies."""
        counts = [
            self.problem.counts(position, values, self._multipliers(self.search.worth))
            for position in range(len(self.problem.policies))
        ]
        layouts, limit = self.problem.layouts(values), self.search.limit_bytes
        cost, worth = relaxed(self.problem, layouts, limit, penalty, counts)
        # Without policies, what calls would recompute is not counted, so that memory is not, too.
        return cost, worth if self.counts else replace(worth, held=0.0)

    def _join(self, values: tuple[int, ...]) -> bool:
        """Take flows into account for which `values` cost more than was counted."""
        new = False
        counted = [self._multipliers(self.search.worth)]
        for index, ways in enumerate(self.problem.ways_of):
            if index in self.joined or not ways:
                continue
            (beyond,) = self.problem.beyond(index, values, counted)
            if beyond > self.tolerance / len(self.problem.sizes) * self.best:
                self.joined[index] = None
                new = True
        return new

    def _list(self) -> None:
        """Where fractions of storage are better than all of it, look at every layout that is left,
        if they are few.
        """
        found = self._follow(self.best, self.listed, whole=True)
        if found is not None:
            self._polish(tuple(map(int, row)) for row in found.values)
            self._prove(self.best)

    def _polish(self, layouts: Iterable[tuple[int, ...]]) -> None:
        self.search.polish(layouts)
        self.best = min(self.best, self.search.best_ps)
