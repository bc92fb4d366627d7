"""Minimum of a sum of tables over one or two variables each, written out as an integer program."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parloom.search.eliminate import Factor, Minimum
from parloom.search.linear import LinearProgram, picked

MS = 1e9  # programs in milliseconds (of ps) are well scaled
GAP = 1e-9
Pair = tuple[int, int]
Table = NDArray[np.float64]


def least(
    sizes: Sequence[int], factors: Iterable[Factor], max_nodes: int | None = None
) -> Minimum | None:
    """Minimise the sum of `factors` (costs in ps) over variables that take `sizes[i]` values each.

    Per variable a 0-1 column for each value, of which one is taken; per pair of variables with a
    table a column for each two values, which is as much as both of them are (Zheng et al., OSDI
    2022, section 4.2, where the sums are at most as much). Values that mean the same to a table
    share its columns. None where nothing is allowed, or where nothing was found in `max_nodes`
    branches.
    """
    gathered = _Gathered([np.zeros(size) for size in sizes])
    for factor in factors:
        gathered.add(factor)
    program = LinearProgram()
    columns = []
    for costs in gathered.single:
        allowed = np.isfinite(costs)
        some = [
            program.column(float(c) / MS if ok else 0.0, 0.0, float(ok), integer=True)
            for c, ok in zip(costs, allowed, strict=True)
        ]
        program.row(dict.fromkeys(some, 1.0), 1.0, 1.0)
        columns.append(some)
    for (first, second), table in gathered.pairs.items():
        _link(program, columns[first], columns[second], table)
    answer = program.solve(GAP, max_nodes)
    if answer is None:
        return None
    taken = picked(answer.values)
    values = tuple(max(range(len(c)), key=lambda i: taken[c[i]]) for c in columns)
    return Minimum(answer.cost * MS + gathered.constant, values)


@dataclass
class _Gathered:
    """All tables of one variable, or of one pair of them, as their sum."""

    single: list[Table]
    pairs: dict[Pair, Table] = field(default_factory=dict)
    constant: float = 0.0

    def add(self, factor: Factor) -> None:
        scope, costs = factor.scope, factor.costs
        if len(scope) > 1 and scope[0] > scope[1]:
            scope, costs = (scope[1], scope[0]), costs.T
        if not scope:
            self.constant += float(costs)
        elif len(scope) == 1:
            self.single[scope[0]] = self.single[scope[0]] + costs
        else:
            first, second = scope
            self.pairs[first, second] = self.pairs.get((first, second), 0.0) + costs


def _link(
    program: LinearProgram, first: Sequence[int], second: Sequence[int], table: Table
) -> None:
    """Columns for the cells of `table`, tied to the values of the variables at its sides."""
    rows, row_of = np.unique(table, axis=0, return_inverse=True)
    cells, column_of = np.unique(rows, axis=1, return_inverse=True)
    tied: list[dict[int, float]] = [{} for _ in range(sum(cells.shape))]
    for (i, j), cost in np.ndenumerate(cells):
        if np.isfinite(cost):
            both = program.column(float(cost) / MS)
            tied[i][both] = tied[cells.shape[0] + j][both] = 1.0
    for i, value in zip(row_of.reshape(-1), first, strict=True):
        tied[i][value] = -1.0
    for j, value in zip(column_of.reshape(-1), second, strict=True):
        tied[cells.shape[0] + j][value] = -1.0
    for terms in tied:
        program.row(terms, 0.0, 0.0)
