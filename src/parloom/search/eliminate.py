"""Minimum of a sum of tables over few variables each, by elimination of one variable after another
(nonserial dynamic programming: Bertele and Brioschi, 1972). Exact; what it costs depends on how the
tables hang together, for which the graphs of neural networks are kind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Factor:
    """A cost for every combination of values of the variables in `scope`."""

    scope: tuple[int, ...]
    costs: Table


@dataclass(frozen=True, slots=True)
class Regret:
    """What a value of `variable` costs above its best one, over the variable and those in `rest`,
    which are chosen before it.
    """

    variable: int
    rest: tuple[int, ...]
    costs: Table


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least cost and the value of each variable that reaches it."""

    cost: float
    values: tuple[int, ...]


def minimum(sizes: Sequence[int], factors: Iterable[Factor]) -> Minimum:
    """Minimise the sum of `factors` over variables 0, 1, ... that take `sizes[i]` values each.

    Of equal minima, the one with the smallest values in the order of elimination.
    """
    best: list[tuple[int, tuple[int, ...], Indices]] = []

    def keep(variable: int, rest: tuple[int, ...], total: Table) -> None:
        best.append((variable, rest, total.argmin(axis=0)))

    cost, _ = _eliminate(sizes, factors, keep)
    return Minimum(cost, _decided([0] * len(sizes), best))


def _decided(
    values: list[int], best: Sequence[tuple[int, tuple[int, ...], Indices]]
) -> tuple[int, ...]:
    """Values with those of eliminated variables that are best beside the others."""
    for variable, rest, value in reversed(best):
        values[variable] = int(value[tuple(values[v] for v in rest)])
    return tuple(values)


@dataclass(frozen=True)
class Reduced:
    """What is left of tables over `sizes` variables: those of the `variables` left, renumbered, and
    for every other one its best value beside them.
    """

    variables: tuple[int, ...]
    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]
    best: tuple[tuple[int, tuple[int, ...], Indices], ...]

    def whole(self, values: Sequence[int]) -> tuple[int, ...]:
        """The values of all variables, of those left given."""
        found = [0] * (len(self.variables) + len(self.best))
        for variable, value in zip(self.variables, values, strict=True):
            found[variable] = value
        return _decided(found, self.best)


def reduced(sizes: Sequence[int], factors: Iterable[Factor], touched: int, most: int) -> Reduced:
    """Eliminate variables as long as one has tables with at most `touched` others, and together
    `most` cells: the same minimum over fewer variables.
    """
    best: list[tuple[int, tuple[int, ...], Indices]] = []

    def keep(variable: int, rest: tuple[int, ...], total: Table) -> None:
        best.append((variable, rest, total.argmin(axis=0)))

    cost, found = _eliminate(sizes, factors, keep, touched, most)
    gone = {variable for variable, _, _ in best}
    left = tuple(v for v in range(len(sizes)) if v not in gone)
    number = {v: i for i, v in enumerate(left)}
    renumbered = (Factor(tuple(number[v] for v in f.scope), f.costs) for f in found)
    constant = Factor((), np.array(cost))
    return Reduced(left, tuple(sizes[v] for v in left), (constant, *renumbered), tuple(best))


def near(
    sizes: Sequence[int], factors: Iterable[Factor], limit: float, at_most: int
) -> tuple[tuple[int, ...], ...] | None:
    """All values whose cost is at most `limit`, the cheapest first; None where there are more than
    `at_most`.

    Backwards through the elimination a choice costs what it is above the best one, whatever was
    chosen before, so that no partial choice is followed in vain.
    """
    least, tables = regrets(sizes, factors)
    slack = limit - least
    found, above = np.zeros((1, len(sizes)), dtype=np.intp), np.zeros(1)
    for table in tables:
        at: tuple[Any, ...] = slice(None), *(found[:, v] for v in table.rest)
        costs = above + table.costs[at].reshape(-1, len(found) if table.rest else 1)
        value, which = np.nonzero(costs <= slack)
        if len(which) > at_most:
            return None
        if not len(which):  # a limit below the least cost, be it by rounding
            return ()
        found, above = found[which], costs[value, which]
        found[:, table.variable] = value
    ranked = np.lexsort((*found.T[::-1], above))
    return tuple(tuple(int(v) for v in found[row]) for row in ranked)


def regrets(sizes: Sequence[int], factors: Iterable[Factor]) -> tuple[float, tuple[Regret, ...]]:
    """The least cost, and what every choice costs above it, backwards through the elimination."""
    tables: list[Regret] = []

    def keep(variable: int, rest: tuple[int, ...], total: Table) -> None:
        least = total.min(axis=0)
        more = np.where(np.isinf(total), np.inf, total - np.where(np.isinf(least), 0.0, least))
        tables.append(Regret(variable, rest, more))

    least, _ = _eliminate(sizes, factors, keep)
    return least, tuple(reversed(tables))


def marginals(least: float, tables: Sequence[Regret]) -> dict[int, Table]:
    """The least cost with each value of each variable, of what `regrets` found.

    A table costs what it is above the best, and what its other variables cost at least together,
    which the last table before it knows that has them all.
    """
    found: dict[int, Table] = {}
    whole: dict[int, tuple[tuple[int, ...], Table]] = {}
    seen: dict[int, int] = {}
    for position, table in enumerate(tables):
        costs: Table | float = least
        if table.rest:
            wider, known = whole[max(table.rest, key=seen.__getitem__)]
            others = tuple(i for i, v in enumerate(wider) if v not in table.rest)
            left = [v for v in wider if v in table.rest]
            costs = known.min(axis=others).transpose([left.index(v) for v in table.rest])
        total = table.costs + costs
        whole[table.variable] = (table.variable, *table.rest), total
        seen[table.variable] = position
        found[table.variable] = total.min(axis=tuple(range(1, total.ndim)))
    return found


def _eliminate(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    keep: Callable[[int, tuple[int, ...], Table], None],
    touched: int | None = None,
    most: float = inf,
) -> tuple[float, list[Factor]]:
    """The least cost and the tables left, of all variables or as `reduced` says; `keep` is shown
    every variable as it is eliminated, with the variables that its table still has and that table,
    over itself and these.
    """
    scopes: dict[int, Factor] = dict(enumerate(factors))
    touching: list[set[int]] = [set() for _ in sizes]
    for key, factor in scopes.items():
        for variable in factor.scope:
            touching[variable].add(key)
    cost, fresh = sum(float(f.costs) for f in scopes.values() if not f.scope), len(scopes)
    for variable, _ in _ordered([f.scope for f in scopes.values()], sizes, touched, most):
        mine = [scopes.pop(key) for key in sorted(touching[variable])]
        rest = tuple(sorted({v for f in mine for v in f.scope} - {variable}))
        total = _joint((variable, *rest), mine, sizes)
        keep(variable, rest, total)
        costs = total.min(axis=0)
        for factor in mine:
            for other in factor.scope:
                touching[other] = {k for k in touching[other] if k in scopes}
        if rest:
            scopes[fresh] = Factor(rest, costs)
            for other in rest:
                touching[other].add(fresh)
            fresh += 1
        else:
            cost += float(costs)
    return cost, [factor for factor in scopes.values() if factor.scope]


def most_cells(sizes: Sequence[int], factors: Iterable[Factor]) -> int:
    """The cells of the largest table that an elimination makes."""
    return max((cells for _, cells in _ordered([f.scope for f in factors], sizes)), default=0)


def _ordered(
    scopes: Iterable[Sequence[int]],
    sizes: Sequence[int],
    touched: int | None = None,
    most: float = inf,
) -> Iterator[tuple[int, int]]:
    """Variables in the order of their elimination, with the cells of their tables: always the one
    whose table is the smallest.
    """
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)
    left = set(range(len(sizes)))
    cells = [sizes[v] * prod(sizes[u] for u in near[v]) for v in range(len(sizes))]
    waiting = [(count, v) for v, count in enumerate(cells)]
    heapify(waiting)
    while waiting:
        count, variable = heappop(waiting)
        others = near[variable]
        if variable not in left or count != cells[variable]:
            continue
        if count > most or (touched is not None and len(others) > touched):
            continue  # comes again where an elimination changes that
        left.remove(variable)
        yield variable, count
        for other in others:
            near[other] |= others
            near[other] -= {other, variable}
        for other in others:
            cells[other] = sizes[other] * prod(sizes[u] for u in near[other])
            heappush(waiting, (cells[other], other))


def _joint(scope: tuple[int, ...], factors: Sequence[Factor], sizes: Sequence[int]) -> Table:
    """The sum of `factors` as one table over `scope`."""
    total = np.zeros([sizes[v] for v in scope])
    for factor in factors:
        places = [scope.index(v) for v in factor.scope]
        shape = [1] * len(scope)
        for place in places:
            shape[place] = sizes[scope[place]]
        total += factor.costs.transpose(np.argsort(places)).reshape(shape)
    return total
