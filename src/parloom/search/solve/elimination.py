"""Minimum of a sum of tables by elimination of one variable after another (nonserial dynamic
programming: Bertele and Brioschi, 1972).

The order, and the maps between the views that tables have of one variable, depend on the structure
of a model alone: they are found once (`Elimination`), and each price vector costs a pass of array
operations.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from parloom.search.model import Floats, Indices, Model, Row, Term, View

# What is left of a model counts in one row, that of its prices.
COST = (Row("cost", "ps"),)


@dataclass(frozen=True, eq=False, slots=True)
class _Input:
    """A table that is joined: its number, the axes it has in the joint table, and per axis the
    index into it (None: as it is).
    """

    table: int
    axes: tuple[int, ...]
    takes: tuple[Indices | None, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """Elimination of `variable`, the first axis of the joint table; `rest` are views of others."""

    variable: int
    shape: tuple[int, ...]
    inputs: tuple[_Input, ...]
    rest: tuple[View, ...]
    made: int


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
        self.model, self.largest = model, largest
        self.steps: list[_Step] = []
        self.constants: list[int] = []
        # What a term says alike of all options of a variable does not bind it to others.
        self.views = [tuple(v for v in term.views if v.size > 1) for term in model.terms]
        self._products: dict[tuple[int, ...], tuple[Sequence[View], View]] = {}
        self._plan()

    @property
    def cells(self) -> int:
        """The sizes of all joint tables together."""
        return sum(prod(step.shape) for step in self.steps)

    def _plan(self) -> None:
        tables: dict[int, tuple[View, ...]] = {
            number: _merged(views) for number, views in enumerate(self.views)
        }
        self.merges = {
            number: _merge(views)
            for number, views in enumerate(self.views)
            if len({v.variable for v in views}) < len(views)
        }
        count = len(tables)
        touching: list[set[int]] = [set() for _ in self.model.variables]
        for number, views in tables.items():
            for view in views:
                touching[view.variable].add(number)
        left = set(range(len(self.model.variables)))
        cells = {v: self._cells(v, tables, touching) for v in left}
        while left:
            variable = min(left, key=lambda v: (cells[v], v))
            if cells[variable] > self.largest:
                break
            left.remove(variable)
            mine = sorted(touching[variable])
            rest = self._joint(variable, (tables[n] for n in mine))
            size = len(self.model.variables[variable])
            inputs = tuple(self._input(n, tables[n], variable, rest) for n in mine)
            shape = (size, *(view.size for view in rest))
            self.steps.append(_Step(variable, shape, inputs, rest, count))
            for number in mine:
                for view in tables.pop(number):
                    touching[view.variable].discard(number)
            if rest:
                tables[count] = rest
                for view in rest:
                    touching[view.variable].add(count)
                    cells[view.variable] = self._cells(view.variable, tables, touching)
            else:
                self.constants.append(count)
            count += 1
        self.left = tuple(sorted(left))
        self.constants += [n for n, views in tables.items() if not views]
        self.kept = {n: views for n, views in tables.items() if views}

    def _cells(
        self, variable: int, tables: dict[int, tuple[View, ...]], touching: list[set[int]]
    ) -> int:
        rest = self._joint(variable, (tables[n] for n in sorted(touching[variable])))
        return len(self.model.variables[variable]) * prod(view.size for view in rest)

    def _joint(self, variable: int, tables: Iterable[tuple[View, ...]]) -> tuple[View, ...]:
        """One view of each other variable that `tables` have, as fine as all of theirs."""
        found: dict[int, list[View]] = {}
        for views in tables:
            for view in views:
                some = found.setdefault(view.variable, [])
                if view.variable != variable and not any(view is other for other in some):
                    some.append(view)
        return tuple(
            some[0] if len(some) == 1 else self._product(some)
            for other, some in sorted(found.items())
            if other != variable
        )

    def _product(self, views: Sequence[View]) -> View:
        """`_product` of views, which are asked for again and again while variables are counted."""
        key = tuple(map(id, views))
        if key not in self._products:
            self._products[key] = views, _product(views)
        return self._products[key][1]

    def _input(
        self, number: int, views: tuple[View, ...], variable: int, rest: tuple[View, ...]
    ) -> _Input:
        position = {view.variable: axis for axis, view in enumerate(rest, 1)}
        axes: list[int] = []
        takes: list[Indices | None] = []
        for view in views:
            if view.variable == variable:
                axes.append(0)
                takes.append(view.index)
            else:
                axis = position[view.variable]
                axes.append(axis)
                joint = rest[axis - 1]
                takes.append(None if joint is view else _map(joint, view))
        return _Input(number, tuple(axes), tuple(takes))

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
        for step in self.steps:
            total = np.zeros(step.shape)
            for some in step.inputs:
                total += _expanded(tables.pop(some.table), some, len(step.shape))
            option = forced.get(step.variable) if forced else None
            if option is not None:
                total[:option] = total[option + 1 :] = inf
            arg: Indices = np.argmin(total, axis=0)
            best.append(arg)
            tables[step.made] = np.take_along_axis(total, arg[None], axis=0)[0]
        constant = float(sum(float(tables[n]) for n in self.constants))
        return Eliminated(constant, tuple(tables[n] for n in self.kept), tuple(best))

    def rest(self, found: Eliminated) -> Model:
        """The model of the variables that are left, in one row."""
        number = {variable: i for i, variable in enumerate(self.left)}
        terms = []
        for views, table in zip(self.kept.values(), found.tables, strict=True):
            renamed = tuple(View(number[v.variable], v.index, v.size) for v in views)
            terms.append(Term(renamed, ((table[None, ..., None], None),), slice(0, 1)))
        variables = tuple(self.model.variables[v] for v in self.left)
        return Model(COST, variables, tuple(terms))

    def expanded(self, found: Eliminated, left: Sequence[int]) -> tuple[int, ...]:
        """The best values of all variables where those that are left have these."""
        values = [0] * len(self.model.variables)
        for variable, value in zip(self.left, left, strict=True):
            values[variable] = value
        for step, arg in zip(reversed(self.steps), reversed(found.best), strict=True):
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


def _expanded(table: Floats, some: _Input, rank: int) -> Floats:
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


def _merged(views: Sequence[View]) -> tuple[View, ...]:
    """Views of each variable once: several of one variable become a joint one."""
    found: dict[int, list[View]] = {}
    for view in views:
        found.setdefault(view.variable, []).append(view)
    return tuple(some[0] if len(some) == 1 else _product(some) for some in found.values())


def _merge(views: Sequence[View]) -> tuple[Indices, ...]:
    """The index that makes of a table over `views` one over `_merged(views)`."""
    merged = _merged(views)
    position = {view.variable: axis for axis, view in enumerate(merged)}
    found = []
    for view in views:
        joint = merged[position[view.variable]]
        index = np.arange(view.size) if joint is view else _map(joint, view)
        shape = [1] * len(merged)
        shape[position[view.variable]] = len(index)
        found.append(index.reshape(shape))
    return tuple(found)


def _product(views: Sequence[View]) -> View:
    """The coarsest view that is as fine as each of `views`; one of them where that is as fine."""
    codes = np.zeros(len(views[0].index), dtype=np.int64)
    for view in views:
        codes = codes * view.size + view.index
    _, index = np.unique(codes, return_inverse=True)
    size = int(index.max()) + 1
    for view in views:
        if len(np.unique(view.index)) == size:
            return view
    return View(views[0].variable, index.reshape(-1).astype(np.intp), size)


def _map(fine: View, coarse: View) -> Indices:
    """The value of `coarse` for each value of `fine`."""
    found = np.zeros(fine.size, dtype=np.intp)
    found[fine.index] = coarse.index
    return found
