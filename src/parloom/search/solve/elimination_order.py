"""The order in which variables are eliminated: always one whose joint table is the smallest.

The order, and the maps between the views that tables have of one variable, depend on the structure
of a model alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from parloom.search.model import Indices, View

Views = tuple[View, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Input:
    """A table that is joined: its number, the axes it has in the joint table, and per axis the
    index into it (None: as it is).
    """

    table: int
    axes: tuple[int, ...]
    takes: tuple[Indices | None, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """Elimination of `variable`, the first axis of the joint table; `rest` are views of others."""

    variable: int
    shape: tuple[int, ...]
    inputs: tuple[Input, ...]
    rest: tuple[View, ...]
    made: int


@dataclass(frozen=True, eq=False, slots=True)
class Order:
    """The steps of an elimination, the variables that are `left`, the views of the tables that are
    then left, and the tables without any view.
    """

    steps: tuple[Step, ...]
    left: tuple[int, ...]
    kept: Mapping[int, Views]
    constants: tuple[int, ...]


def ordered(sizes: Sequence[int], views: Sequence[Views], largest: float) -> Order:
    """The elimination of variables of these `sizes` whose joint tables have at most `largest`
    cells; `views` are those of the tables that are added up.
    """
    return _Ordering(sizes, views).run(largest)


class _Ordering:
    """Eliminates variables in the structure of a model alone."""

    def __init__(self, sizes: Sequence[int], views: Sequence[Views]) -> None:
        self.sizes = sizes
        self.tables = {number: merged(each) for number, each in enumerate(views)}
        self.touching: list[set[int]] = [set() for _ in sizes]
        for number, each in self.tables.items():
            for view in each:
                self.touching[view.variable].add(number)
        self._products: dict[tuple[int, ...], tuple[Sequence[View], View]] = {}

    def run(self, largest: float) -> Order:
        """One variable after the other."""
        left = set(range(len(self.sizes)))
        cells = {v: self._cells(v) for v in left}
        steps: list[Step] = []
        constants: list[int] = []
        count = len(self.tables)
        while left:
            variable = min(left, key=lambda v: (cells[v], v))
            if cells[variable] > largest:
                break
            left.remove(variable)
            steps.append(step := self._eliminated(variable, count))
            for view in step.rest:
                cells[view.variable] = self._cells(view.variable)
            if not step.rest:
                constants.append(count)
            count += 1
        constants += [n for n, views in self.tables.items() if not views]
        kept = {n: views for n, views in self.tables.items() if views}
        return Order(tuple(steps), tuple(sorted(left)), kept, tuple(constants))

    def _eliminated(self, variable: int, made: int) -> Step:
        """The step of `variable`, whose result is the table `made`."""
        mine = sorted(self.touching[variable])
        rest = self._joint(variable, (self.tables[n] for n in mine))
        inputs = tuple(self._input(n, variable, rest) for n in mine)
        for number in mine:
            for view in self.tables.pop(number):
                self.touching[view.variable].discard(number)
        if rest:
            self.tables[made] = rest
            for view in rest:
                self.touching[view.variable].add(made)
        shape = (self.sizes[variable], *(view.size for view in rest))
        return Step(variable, shape, inputs, rest, made)

    def _cells(self, variable: int) -> int:
        rest = self._joint(variable, (self.tables[n] for n in sorted(self.touching[variable])))
        return self.sizes[variable] * prod(view.size for view in rest)

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
            self._products[key] = views, product(views)
        return self._products[key][1]

    def _input(self, number: int, variable: int, rest: Views) -> Input:
        position = {view.variable: axis for axis, view in enumerate(rest, 1)}
        axes: list[int] = []
        takes: list[Indices | None] = []
        for view in self.tables[number]:
            if view.variable == variable:
                axes.append(0)
                takes.append(view.index)
            else:
                axis = position[view.variable]
                axes.append(axis)
                joint = rest[axis - 1]
                takes.append(None if joint is view else mapped(joint, view))
        return Input(number, tuple(axes), tuple(takes))


def merged(views: Sequence[View]) -> tuple[View, ...]:
    """Views of each variable once: several of one variable become a joint one."""
    found: dict[int, list[View]] = {}
    for view in views:
        found.setdefault(view.variable, []).append(view)
    return tuple(some[0] if len(some) == 1 else product(some) for some in found.values())


def merge(views: Sequence[View]) -> tuple[Indices, ...]:
    """The index that makes of a table over `views` one over `merged(views)`."""
    joined = merged(views)
    position = {view.variable: axis for axis, view in enumerate(joined)}
    found = []
    for view in views:
        joint = joined[position[view.variable]]
        index = np.arange(view.size) if joint is view else mapped(joint, view)
        shape = [1] * len(joined)
        shape[position[view.variable]] = len(index)
        found.append(index.reshape(shape))
    return tuple(found)


def product(views: Sequence[View]) -> View:
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


def mapped(fine: View, coarse: View) -> Indices:
    """The value of `coarse` for each value of `fine`."""
    found = np.zeros(fine.size, dtype=np.intp)
    found[fine.index] = coarse.index
    return found
