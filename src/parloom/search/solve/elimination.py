"""Minimum of a sum of tables by elimination of one variable after another (nonserial dynamic
programming: Bertele and Brioschi, 1972).

The order, and the maps between the views that tables have of one variable, depend on the structure
of a model alone: they are found once (`Elimination`), and each price vector costs a pass of array
operations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from parloom.search.model import Floats, Indices, Model, View


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


class Elimination:
    """The elimination of all variables of `model`."""

    def __init__(self, model: Model) -> None:
        self.model = model
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
        self.constants += [n for n in tables]
        self.count = count

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

    def minimum(self, prices: Floats) -> tuple[float, tuple[int, ...]]:
        """The least cost under `prices`, and a value for each variable where any is legal."""
        tables: dict[int, Floats] = {}
        for number, term in enumerate(self.model.terms):
            costs = term.priced(prices).reshape([view.size for view in self.views[number]])
            merge = self.merges.get(number)
            tables[number] = costs if merge is None else costs[merge]
        best: list[Indices] = []
        for step in self.steps:
            total = np.zeros(step.shape)
            for some in step.inputs:
                total += _expanded(tables.pop(some.table), some, len(step.shape))
            arg: Indices = np.argmin(total, axis=0)
            best.append(arg)
            tables[step.made] = np.take_along_axis(total, arg[None], axis=0)[0]
        cost = float(sum(float(tables[n]) for n in self.constants))
        if cost == inf:
            return inf, ()
        values = [0] * len(self.model.variables)
        for step, arg in zip(reversed(self.steps), reversed(best), strict=True):
            at = tuple(int(view.index[values[view.variable]]) for view in step.rest)
            values[step.variable] = int(arg[at])
        return cost, tuple(values)


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
