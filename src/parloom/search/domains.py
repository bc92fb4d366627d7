"""Minimum of a sum of tables that is too wide for elimination as it is: first, values that are in
no best solution are left out.

Costs are moved between tables without changing any sum (soft arc consistency in the order of
sequential reweighted message passing: Kolmogorov, IEEE TPAMI 37, 2015), so that the least of every
table together bound all solutions from below. When all that can be moved to a variable was, a value
that costs more above its least than is left between bound and limit is in no solution up to that
limit.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from math import inf, prod

import numpy as np

from parloom.search.eliminate import (
    Factor,
    Indices,
    Minimum,
    Table,
    minimum,
    most_cells,
    near,
    reduced,
)
from parloom.search.shares import Pool

# Tables of more cells than this are first made smaller.
MANY = 400_000
# Tables of more cells than this are not kept: some hundreds of them are gigabytes.
TOO_MANY = 1_000_000
# Values of some variables are taken one by one where there are so many combinations at most.
APART = 16
# After so many sweeps at most; that it is enough is looked at after every `LOOK`.
SWEEPS, LOOK = 60, 5
# Nothing more helps where no value was left out since the last look and the bound grew by less.
STILL = 1e-5
# Sweeps before the next variable is given a value where no possible solution was seen.
DIVE = 2
# Shares are balanced in so many sweeps, or until the bound grows by less than this share in one.
BALANCED, GROWS = 10, 5e-4


def narrow_minimum(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    like: Sequence[int] | None = None,
    many: int = MANY,
    too_many: int = TOO_MANY,
    apart: Sequence[int] = (),
    *,
    share: float = 0.0,
    enough: float = inf,
) -> Minimum:
    """As `minimum`, the better the fewer variables a factor has; `like`: values that may be near.

    `apart`: variables of which each value may be taken by itself. The cost is a bound where that is
    `enough`, where values are at most a `share` above it, and where tables of more than `too_many`
    cells are left. The values are the best that were found; none where no possible ones are.
    """
    given = list(factors)
    core = reduced(sizes, given, 2, too_many)
    fixed = [v for v in apart if v in core.variables]
    if most_cells(core.sizes, core.factors) <= many:
        found = minimum(core.sizes, core.factors)
    elif 1 < prod(sizes[v] for v in fixed) <= APART:
        parts = [
            _among(narrow_minimum([*map(len, kept)], some, None, many, too_many,
                                  share=share, enough=enough), kept)
            for kept, some in _each(sizes, given, fixed)
        ]  # fmt: skip
        parts.sort(key=lambda part: part.cost)
        return Minimum(parts[0].cost, next((p.values for p in parts if p.values), ()))
    else:
        passing = _Passing(core.sizes, core.factors, seeks=True)
        if like is not None:
            passing.see([like[v] for v in core.variables])
        found = passing.minimum(many, too_many, share, enough)
    possible = found.cost < inf and len(found.values) == len(core.sizes)
    return Minimum(found.cost, core.whole(found.values) if possible else ())


def _among(found: Minimum, kept: Sequence[Indices]) -> Minimum:
    """A minimum over places among the values kept as one over values."""
    return Minimum(found.cost, tuple(int(k[x]) for k, x in zip(kept, found.values, strict=False)))


def _each(
    sizes: Sequence[int], factors: Sequence[Factor], apart: Sequence[int]
) -> Iterator[tuple[list[Indices], list[Factor]]]:
    """All values of each variable with one of those in `apart`, for every combination of these; and
    the factors of these values.
    """
    for values in product(*(range(sizes[v]) for v in apart)):
        one = dict(zip(apart, values, strict=True))
        kept = [np.array([one[v]]) if v in one else np.arange(n) for v, n in enumerate(sizes)]
        some = restricted(factors, kept)
        yield kept, [_without(factor, one) for factor in some]


def _without(factor: Factor, fixed: Collection[int]) -> Factor:
    """A factor without those of its variables that have one value."""
    places = tuple(i for i, v in enumerate(factor.scope) if v in fixed)
    scope = tuple(v for v in factor.scope if v not in fixed)
    return Factor(scope, factor.costs.squeeze(places)) if places else factor


def balance(sizes: Sequence[int], factors: Sequence[Factor], pools: Iterable[Pool]) -> None:
    """Share what the tables of several readers count together such that the minimum grows."""
    passing, before = _Passing(sizes, factors, pools=pools), -inf
    for _ in range(BALANCED):
        passing.sweep()
        if passing.bound - before <= GROWS * abs(passing.bound):
            break
        before = passing.bound


def narrowed(
    sizes: Sequence[int], factors: Sequence[Factor], limit: float, many: int = MANY
) -> list[Indices]:
    """The values of each variable that solutions of at most `limit` take, and others: fewer and
    fewer, until no table of an elimination has more than `many` cells.
    """
    return _Passing(sizes, factors, limit).run(many)


def narrow_within(
    sizes: Sequence[int], factors: Sequence[Factor], limit: float, apart: Sequence[int] = ()
) -> list[Indices] | None:
    """As `narrowed`, or all values where tables are small as it is; None where all tables of an
    elimination stay too large to be kept. `apart` as in `narrow_minimum`.
    """
    if most_cells(sizes, factors) <= MANY:
        return [np.arange(size) for size in sizes]
    if not 1 < prod(sizes[v] for v in apart) <= APART:
        kept = narrowed(sizes, factors, limit)
        return kept if most_cells([len(k) for k in kept], factors) <= TOO_MANY else None
    every = [np.zeros(0, dtype=np.intp)] * len(sizes)
    for each, some in _each(sizes, factors, apart):
        found = narrow_within(list(map(len, each)), some, limit)
        if found is None:
            return None
        if all(map(len, found)):
            more = [k[x] for k, x in zip(each, found, strict=True)]
            every = [np.union1d(a, b) for a, b in zip(every, more, strict=True)]
    return every


def near_within(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    limit: float,
    at_most: int,
    apart: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...] | None:
    """As `near`; None, too, where tables stay too large. `apart` as in `narrow_minimum`."""
    kept = narrow_within(sizes, factors, limit, apart)
    if kept is None:
        return None
    if not all(len(k) for k in kept):
        return ()
    found = near([len(k) for k in kept], restricted(factors, kept), limit, at_most)
    return found and tuple(
        tuple(int(k[x]) for k, x in zip(kept, values, strict=True)) for values in found
    )


def restricted(factors: Iterable[Factor], kept: Sequence[Indices]) -> list[Factor]:
    """The factors with nothing but the values kept."""
    return [
        Factor(f.scope, f.costs[np.ix_(*(kept[v] for v in f.scope))]) if f.scope else f
        for f in factors
    ]


def cost_of(factors: Iterable[Factor], values: Sequence[int]) -> float:
    """What values cost."""
    return sum(float(f.costs[tuple(values[v] for v in f.scope)]) for f in factors)


def _finite(costs: Table) -> Table:
    return costs[np.isfinite(costs)]


class _Passing:
    """Tables over one and two variables, which change while all sums stay the same; what depends
    on more is bounded by these. Where it `seeks` the minimum, solutions that it comes by lower the
    limit.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        limit: float = inf,
        *,
        seeks: bool = False,
        pools: Iterable[Pool] = (),
    ) -> None:
        self.factors, self.limit, self.seeks, self.bound = factors, limit, seeks, 0.0
        self.best: tuple[int, ...] = ()
        # In place of infinity: with one of these, a solution costs more than any without.
        self.never = 1 + 2 * sum(float(np.abs(_finite(f.costs)).max(initial=0)) for f in factors)
        self.single = [np.zeros(size) for size in sizes]
        self.pairs: dict[tuple[int, int], Table] = {}
        for factor in factors:
            self._add(factor)
        self.alive = [table < max(self.never / 2, 2 * table.min()) for table in self.single]
        self.bound += sum(float(t.min()) for t in (*self.single, *self.pairs.values()))
        self.single = [t - t.min() for t in self.single]
        self.pairs = {key: t - t.min() for key, t in self.pairs.items()}
        self.before: list[list[int]] = [[] for _ in sizes]
        self.after: list[list[int]] = [[] for _ in sizes]
        for u, v in sorted(self.pairs):
            self.after[u].append(v)
            self.before[v].append(u)
        self.pools: list[list[Pool]] = [[] for _ in sizes]
        for pool in pools:
            self.pools[pool.source].append(pool)

    def _add(self, factor: Factor) -> None:
        costs = np.where(np.isinf(factor.costs), self.never, factor.costs)
        if not factor.scope:
            self.bound += float(costs)
        elif len(factor.scope) == 1:
            (v,) = factor.scope
            self.single[v] = self.single[v] + costs
        else:
            self._pair(factor.scope, costs)

    def _pair(self, scope: tuple[int, ...], costs: Table) -> None:
        """A table as one over each pair of its variables, which together are nowhere above it."""
        places = range(len(scope))
        for i, j in combinations(places, 2):
            others = tuple(k for k in places if k not in (i, j))
            least = costs.min(axis=others)
            costs = costs - np.expand_dims(least, others)
            u, v = scope[i], scope[j]
            table, key = (least, (u, v)) if u < v else (least.T, (v, u))
            self.pairs[key] = self.pairs[key] + table if key in self.pairs else table

    @property
    def kept(self) -> list[Indices]:
        return [np.flatnonzero(alive) for alive in self.alive]

    @property
    def ceiling(self) -> float:
        """More than what anything may cost above the bound: infinities cannot be moved."""
        if self.limit == inf:
            return 100 * abs(self.bound) + 1
        return 2 * max(0.0, self.limit - self.bound) + 1

    def minimum(self, many: int, too_many: int, share: float, enough: float) -> Minimum:
        """See `narrow_minimum`."""
        kept = self.run(many, share, enough)
        if not self.is_near(share, enough) and self._cells(kept) > too_many:
            if self.limit == inf:
                self._dive()
            self.see(self._among(self.likely(too_many)).values)
            kept = self.run(many, share, enough)
        if self.limit - self.bound <= self.rounding:
            return Minimum(self.limit, self.best)
        if self.is_near(share, enough) or self._cells(kept) > too_many:
            return Minimum(self.bound - self.rounding, self.best)
        return self._among(kept)

    def _dive(self) -> None:
        """Look for a possible solution: one variable after the other is given what seems best."""
        kept = self.kept
        for v in range(len(kept)):
            part = _Passing([len(k) for k in kept], restricted(self.factors, kept), seeks=True)
            for _ in range(DIVE):
                part.sweep()
            if part.best:
                self.see([int(k[x]) for k, x in zip(kept, part.best, strict=True)])
                break
            kept[v] = kept[v][[part.single[v].argmin()]]

    def _cells(self, kept: Sequence[Indices]) -> int:
        return most_cells([len(k) for k in kept], self.factors)

    def _among(self, kept: Sequence[Indices]) -> Minimum:
        """The minimum over the values kept."""
        return _among(minimum([len(k) for k in kept], restricted(self.factors, kept)), kept)

    def is_near(self, share: float, enough: float) -> bool:
        """Whether the bound is `enough`, or the best solution at most a `share` above it."""
        within = self.limit - self.bound <= share * abs(self.bound) + self.rounding
        return within or self.bound - self.rounding >= enough

    def run(self, many: int, share: float = 0.0, enough: float = inf) -> list[Indices]:
        """The values that are left when tables have `many` cells at most, when the bound is near
        enough, or when nothing more helps.
        """
        seen = -inf, 0
        for sweep in range(1, SWEEPS + 1):
            self.sweep()
            if self.seeks and self.is_near(share, enough):
                break
            if sweep % LOOK == 0:
                now, left = self.bound, sum(map(int, map(np.sum, self.alive)))
                still = left == seen[1] and now - seen[0] <= STILL * abs(now)
                if still or self._cells(self.kept) <= many:
                    break
                seen = now, left
        return self.kept

    def sweep(self) -> None:
        """Move costs there and back."""
        order = range(len(self.single))
        self._move(order, self.before, self.after)
        self._move(order[::-1], self.after, self.before)
        if self.seeks:
            self.see(self._decoded())

    def see(self, values: Sequence[int]) -> None:
        """Take a solution as the limit, if it is below."""
        cost = cost_of(self.factors, values)
        if cost < self.limit:
            self.limit, self.best = cost, tuple(values)

    def likely(self, most: int) -> list[Indices]:
        """Of the values left, those that cost least: as many as tables of `most` cells let."""
        for count in range(max(len(t) for t in self.single), 0, -1):
            found = [
                np.sort(k[np.argsort(table[k], kind="stable")[:count]])
                for k, table in zip(self.kept, self.single, strict=True)
            ]
            if count == 1 or self._cells(found) <= most:
                return found
        raise AssertionError("no variables")

    def _move(
        self, order: Iterable[int], behind: Sequence[list[int]], ahead: Sequence[list[int]]
    ) -> None:
        for v in order:
            for pool in self.pools[v]:
                pool.balance(partial(self._table, v))
            for u in (*behind[v], *ahead[v]):
                self._pull(u, v)
            self._settle(v)
            share = self.single[v] / max(1, len(behind[v]), len(ahead[v]))
            for u in ahead[v]:
                self._table(v, u)[...] += share[:, None]
                self.single[v] = self.single[v] - share

    def _table(self, u: int, v: int) -> Table:
        """The table of two variables, [u, v]."""
        return self.pairs[u, v] if u < v else self.pairs[v, u].T

    def _pull(self, u: int, v: int) -> None:
        table = self._table(u, v)
        np.minimum(table, table.min() + self.ceiling, out=table)
        least = table.min(axis=0)
        table -= least
        self.single[v] = self.single[v] + least

    def _settle(self, v: int) -> None:
        """Now that all that can be is with `v`, leave out what is too much."""
        least = float(self.single[v].min())
        self.bound += least
        self.single[v] = np.minimum(self.single[v] - least, self.ceiling)
        self.alive[v] &= self.single[v] <= self.limit - self.bound + self.rounding

    @property
    def rounding(self) -> float:
        """What sums of millions of picoseconds may be off by."""
        return 1e-9 * abs(self.bound)

    def _decoded(self) -> tuple[int, ...]:
        """One value after the other, the best beside those before it."""
        values: list[int] = []
        for v, table in enumerate(self.single):
            costs = table
            for u in self.before[v]:
                costs = costs + self.pairs[u, v][values[u]]
            values.append(int(costs.argmin()))
        return tuple(values)
