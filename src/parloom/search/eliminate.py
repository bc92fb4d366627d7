"""Minimum of a sum of tables over few variables each, by elimination of one variable after another
(nonserial dynamic programming: Bertele and Brioschi, 1972). Exact; what it costs depends on how the
tables hang together, for which the graphs of neural networks are kind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True)
class Factor:
    """A cost for every combination of values of the variables in `scope`."""

    scope: tuple[int, ...]
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
    scopes: dict[int, Factor] = dict(enumerate(factors))
    touching: list[set[int]] = [set() for _ in sizes]
    for key, factor in scopes.items():
        for variable in factor.scope:
            touching[variable].add(key)
    steps: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    cost, fresh = sum(float(f.costs) for f in scopes.values() if not f.scope), len(scopes)
    for variable in order([f.scope for f in scopes.values()], sizes):
        mine = [scopes.pop(key) for key in sorted(touching[variable])]
        rest = tuple(sorted({v for f in mine for v in f.scope} - {variable}))
        total = _joint((variable, *rest), mine, sizes)
        best = total.argmin(axis=0)
        costs = np.take_along_axis(total, best[None], axis=0)[0]
        steps.append((variable, rest, best))
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
    values = [0] * len(sizes)
    for variable, rest, best in reversed(steps):
        values[variable] = int(best[tuple(values[v] for v in rest)])
    return Minimum(cost, tuple(values))


def order(scopes: Iterable[Sequence[int]], sizes: Sequence[int]) -> tuple[int, ...]:
    """An order of elimination: always the variable whose table is the smallest."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)
    left = set(range(len(sizes)))
    cells = {v: sizes[v] * prod(sizes[u] for u in near[v]) for v in left}
    found = []
    while left:
        variable = min(left, key=lambda v: (cells[v], v))
        left.remove(variable)
        found.append(variable)
        others = near[variable]
        for other in others:
            near[other] |= others
            near[other] -= {other, variable}
        for other in others:
            cells[other] = sizes[other] * prod(sizes[u] for u in near[other])
    return tuple(found)


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
