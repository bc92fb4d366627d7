"""Minimum of a sum of tables by elimination of one variable after another (nonserial dynamic
programming: Bertele and Brioschi, 1972).

The order, and the maps between the views that tables have of one variable, depend on the structure
of a model alone: they are found once (`Elimination`), and each price vector costs a pass of array
operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from parloom.search.model import Floats, Indices, Model, Row, Term, View
from parloom.search.solve.elimination_order import Input, merge, ordered

# What is left of a model counts in one row, that of its prices.
COST = (Row("cost", "ps"),)


@dataclass(frozen=True, eq=False, slots=True)
class Eliminated:
    """What is left of priced tables: what all solutions cost, the tables of the terms that are
    left, and the best option of each variable that is gone, for all values of its neighbors.
    """

    constant: float
    tables: tuple[Floats, ...]
    best: tuple[Indices, ...]


class Elimination:
    """The elimination of the variables of `model`; of those only whose joint tables have at most
    `largest` cells, the others are `left`.
    """

    def __init__(self, model: Model, largest: float = inf) -> None:
        self.model = model
        # What a term says alike of all options of a variable does not bind it to others.
        self.views = [tuple(v for v in term.views if v.size > 1) for term in model.terms]
        self.merges = {
            number: merge(views)
            for number, views in enumerate(self.views)
            if len({v.variable for v in views}) < len(views)
        }
        sizes = [len(variable) for variable in model.variables]
        self.order = ordered(sizes, self.views, largest)

    @property
    def left(self) -> tuple[int, ...]:
        """The variables that are not eliminated."""
        return self.order.left

    @property
    def cells(self) -> int:
        """The sizes of all joint tables together."""
        return sum(prod(step.shape) for step in self.order.steps)

    def eliminated(
        self, priced: Sequence[Floats], forced: Mapping[int, int] | None = None
    ) -> Eliminated:
        """What is left of the tables of all terms where variables must have the options that are
        `forced`; those that are left may have any.
        """
        tables: dict[int, Floats] = {}
        for number, costs in enumerate(priced):
            costs = costs.reshape([view.size for view in self.views[number]])
            merge = self.merges.get(number)
            tables[number] = costs if merge is None else costs[merge]
        best: list[Indices] = []
        for step in self.order.steps:
            total = np.zeros(step.shape)
            for some in step.inputs:
                total += _expanded(tables.pop(some.table), some, len(step.shape))
            option = forced.get(step.variable) if forced else None
            if option is not None:
                total[:option] = total[option + 1 :] = inf
            arg: Indices = np.argmin(total, axis=0)
            best.append(arg)
            tables[step.made] = np.take_along_axis(total, arg[None], axis=0)[0]
        constant = float(sum(float(tables[n]) for n in self.order.constants))
        return Eliminated(constant, tuple(tables[n] for n in self.order.kept), tuple(best))

    def rest(self, found: Eliminated) -> Model:
        """The model of the variables that are left, in one row."""
        number = {variable: i for i, variable in enumerate(self.left)}
        terms = []
        for views, table in zip(self.order.kept.values(), found.tables, strict=True):
            renamed = tuple(View(number[v.variable], v.index, v.size) for v in views)
            terms.append(Term(renamed, ((table[None, ..., None], None),), slice(0, 1)))
        variables = tuple(self.model.variables[v] for v in self.left)
        return Model(COST, variables, tuple(terms))

    def expanded(self, found: Eliminated, left: Sequence[int]) -> tuple[int, ...]:
        """The best values of all variables where those that are left have these."""
        values = [0] * len(self.model.variables)
        for variable, value in zip(self.left, left, strict=True):
            values[variable] = value
        for step, arg in zip(reversed(self.order.steps), reversed(found.best), strict=True):
            at = tuple(int(view.index[values[view.variable]]) for view in step.rest)
            values[step.variable] = int(arg[at])
        return tuple(values)

    def minimum(self, prices: Floats) -> tuple[float, tuple[int, ...]]:
        """The least cost under `prices`, and a value for each variable where any is legal, if none
        is left.
        """
        found = self.eliminated(self.model.priced(prices))
        if found.constant == inf:
            return inf, ()
        return found.constant, self.expanded(found, ())


def _expanded(table: Floats, some: Input, rank: int) -> Floats:
    """A table with its axes where the joint table has them."""
    for axis, take in enumerate(some.takes):
        if take is not None:
            table = table.take(take, axis=axis)
    order = np.argsort(some.axes)
    table = table.transpose(order)
    shape = [1] * rank
    for size, axis in zip(table.shape, sorted(some.axes), strict=True):
        shape[axis] = size
    return table.reshape(shape)
