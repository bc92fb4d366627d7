"""Options that no good solution has, by moving costs between terms and variables.

Costs of terms are pulled to one variable after the other and shared among the terms that come next,
there and back (min-sum diffusion: Werner, PAMI 29, 2007; the sequential order of TRW-S: Kolmogorov,
PAMI 28, 2006). What each variable costs at least adds up to a lower bound; an option whose cost is
above the bound by more than the best solution is in no better one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.search.model import Floats, Indices, Model, View

# What sums of millions of picoseconds may be off by.
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class Priced:
    """Tables of terms in which `ceiling`, more than any legal solution costs, stands for inf."""

    tables: tuple[Floats, ...]
    ceiling: float


def bounded(tables: Sequence[Floats]) -> Priced:
    """`tables` without inf."""
    most = (t[np.isfinite(t)].max(initial=0.0) for t in tables)
    ceiling = 2 * sum(map(float, most)) + 1.0
    return Priced(tuple(np.minimum(t, ceiling) for t in tables), ceiling)


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """A term as one of its variables sees it: `axis` of its table; `order` and `starts` group the
    options of the variable by their values in the view, unless each has its own (`plain`).

    `others` are its other variables with their axes and the index of their views.
    """

    term: int
    axis: int
    index: Indices
    plain: bool
    order: Indices
    starts: Indices
    values: Indices
    others: tuple[tuple[int, int, Indices], ...]
    rest: tuple[int, ...]
    # How the messages to each of the others lie along the table.
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """A variable in a sweep, with all its terms, those whose other variables all came before, and
    those with some that come later.
    """

    variable: int
    places: tuple[_Place, ...]
    known: tuple[_Place, ...]
    ahead: tuple[_Place, ...]


class Pruning:
    """Messages of the terms of `model`; those of one price vector are where the next one begins."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.places: list[list[_Place]] = [[] for _ in model.variables]
        self.unary: list[list[int]] = [[] for _ in model.variables]
        self.constants: list[int] = []
        # What went from a term to the variable of an axis.
        self.moved: dict[tuple[int, int], Floats] = {}
        # What solutions with each option cost at least, under the last prices.
        self.least: list[Floats] = []
        # Each term with more than one variable: its variables and the index of their views.
        self.joint: list[tuple[int, tuple[tuple[int, list[int]], ...]]] = []
        for number, term in enumerate(model.terms):
            if not term.views:
                self.constants.append(number)
            elif len(term.views) == 1:
                self.unary[term.views[0].variable].append(number)
            else:
                joint = tuple((view.variable, view.index.tolist()) for view in term.views)
                self.joint.append((number, joint))
                for axis, view in enumerate(term.views):
                    self.places[view.variable].append(_place(number, term.views, axis))
                    self.moved[number, axis] = np.zeros(view.size)
        variables = range(len(model.variables))
        self.sweeps = tuple(self._steps(order) for order in (variables, variables[::-1]))

    def _steps(self, order: Sequence[int]) -> tuple[_Step, ...]:
        position = {variable: i for i, variable in enumerate(order)}
        found = []
        for variable in order:
            places, here = self.places[variable], position[variable]
            later = [any(position[o] > here for o, _, _ in place.others) for place in places]
            known = tuple(p for p, more in zip(places, later, strict=True) if not more)
            ahead = tuple(p for p, more in zip(places, later, strict=True) if more)
            found.append(_Step(variable, tuple(places), known, ahead))
        return tuple(found)

    def run(
        self, priced: Priced, like: Sequence[int], sweeps: int
    ) -> tuple[float, float, tuple[int, ...], list[NDArray[np.bool_]]]:
        """A lower bound, the best solution seen with its cost, and the options that better ones
        may have. `like`: a solution to begin with.
        """
        state = _Costs(self, priced)
        if state.bound < 0:  # messages of prices that were too different
            for moved in self.moved.values():
                moved[:] = 0.0
            state = _Costs(self, priced)
        if like:
            state.see(like)
        state.run(sweeps)
        self.least = state.least
        return state.bound, state.limit, state.best, state.alive

    def solution_with(
        self, forced: Mapping[int, int], priced: Priced, sweeps: int
    ) -> tuple[int, ...]:
        """The best solution seen in which variables have these options; messages stay as they
        are.
        """
        before = {key: moved.copy() for key, moved in self.moved.items()}
        state = _Costs(self, priced)
        for variable, option in forced.items():
            state.force(variable, option)
        state.run(sweeps)
        self.moved.update(before)
        return state.best


class _Costs:
    """The tables of one price vector while costs move."""

    def __init__(self, pruning: Pruning, priced: Priced) -> None:
        self.pruning = pruning
        terms = pruning.model.terms
        self.priced, self.ceiling = priced.tables, priced.ceiling
        self.bound = sum(float(self.priced[n]) for n in pruning.constants)
        self.constant = self.bound
        self.single = [
            sum((self.priced[n][terms[n].views[0].index] for n in some), np.zeros(len(variable)))
            for some, variable in zip(pruning.unary, pruning.model.variables, strict=True)
        ]
        self.original = [s.copy() for s in self.single]
        self.tables = {n: t for n, t in enumerate(self.priced) if t.ndim > 1}
        self.work = {n: np.empty_like(t) for n, t in self.tables.items()}
        for variable, places in enumerate(pruning.places):
            for place in places:
                self.single[variable] += pruning.moved[place.term, place.axis][place.index]
        # Messages of other prices may leave something below zero.
        for number, table in self.tables.items():
            left = np.subtract(table, _along(pruning.moved[number, 0], 0, table.ndim))
            for axis in range(1, table.ndim):
                left -= _along(pruning.moved[number, axis], axis, table.ndim)
            least = float(left.min())
            if least < 0:
                self.tables[number] = table - least
                self.bound += least
        for single in self.single:
            least = float(single.min())
            single -= least
            self.bound += least
        self.alive = [np.ones(len(v), dtype=bool) for v in pruning.model.variables]
        self.least = [np.zeros(len(v)) for v in pruning.model.variables]
        self.limit = inf
        self.best: tuple[int, ...] = ()

    def force(self, variable: int, option: int) -> None:
        """Leave a variable one option."""
        others = np.arange(len(self.single[variable])) != option
        self.single[variable][others] += self.ceiling
        self.original[variable][others] += self.ceiling

    def run(self, sweeps: int) -> None:
        """Sweeps there and back, until the best solution is known to be the best of all."""
        for _ in range(sweeps):
            for steps in self.pruning.sweeps:
                self.sweep(steps)
            if self.limit - self.bound <= ROUNDING * abs(self.bound):
                break

    def sweep(self, steps: Sequence[_Step]) -> None:
        """Costs to one variable after the other, and on to the terms with those that come later;
        a solution is decoded on the way.
        """
        values = [0] * len(steps)
        moved = self.pruning.moved
        for step in steps:
            variable = step.variable
            single = self.single[variable]
            for place in step.places:
                own = moved[place.term, place.axis]
                least = np.minimum.reduce(self._rest(place), axis=place.rest)
                single += (least - own)[place.index]
                own[:] = least
            least_cost = float(single.min())
            self.bound += least_cost
            single -= least_cost
            least_costs = self.least[variable]
            np.maximum(least_costs, single + self.bound, out=least_costs)
            self.alive[variable] &= single <= self.limit - self.bound + ROUNDING * abs(self.bound)
            costs = single.copy()
            for place in step.known:
                costs += self._known(place, values)[place.index]
            values[variable] = int(costs.argmin())
            if not step.ahead:
                continue
            behind = len(step.places) - len(step.ahead)
            share = np.minimum(single, self.ceiling) / max(len(step.ahead), behind)
            for place in step.ahead:
                given = share
                if not place.plain:
                    least = np.minimum.reduceat(share[place.order], place.starts)
                    given = np.zeros(len(moved[place.term, place.axis]))
                    given[place.values] = least
                moved[place.term, place.axis] -= given
                single -= given[place.index]
        self.see(values)

    def _rest(self, place: _Place) -> Floats:
        """A term without the costs that went to its other variables; good until the next call."""
        table, out = self.tables[place.term], self.work[place.term]
        for (_, axis, _), shape in zip(place.others, place.shapes, strict=True):
            table = np.subtract(table, self.pruning.moved[place.term, axis].reshape(shape), out)
        return table

    def _known(self, place: _Place, values: Sequence[int]) -> Floats:
        """What is left in a term for each value of a view, where the other variables are known."""
        at: list[slice | int] = [slice(None)] * (len(place.others) + 1)
        moved, gone = self.pruning.moved, 0.0
        for other, axis, index in place.others:
            at[axis] = value = int(index[values[other]])
            gone += moved[place.term, axis][value]
        left: Floats = self.tables[place.term][tuple(at)] - moved[place.term, place.axis]
        return left - gone

    def see(self, values: Sequence[int]) -> None:
        """Take a solution as the limit, if it is the best."""
        cost = self.constant + sum(s[v] for s, v in zip(self.original, values, strict=True))
        for number, joint in self.pruning.joint:
            cost += self.priced[number][tuple([index[values[v]] for v, index in joint])]
        if cost < self.limit and cost < self.ceiling:
            self.limit, self.best = float(cost), tuple(values)


def _place(number: int, views: Sequence[View], axis: int) -> _Place:
    view, ndim = views[axis], len(views)
    order = np.argsort(view.index, kind="stable")
    values = view.index[order]
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    plain = np.array_equal(view.index, np.arange(view.size))
    rest = tuple(i for i in range(ndim) if i != axis)
    others = tuple((views[i].variable, i, views[i].index) for i in rest)
    shapes = tuple((1,) * i + (-1,) + (1,) * (ndim - i - 1) for i in rest)
    return _Place(
        number, axis, view.index, plain, order, starts, values[starts], others, rest, shapes
    )


def _along(moved: Floats, axis: int, ndim: int) -> Floats:
    """A message as it lies along an axis of a table."""
    return moved.reshape((1,) * axis + (-1,) + (1,) * (ndim - axis - 1))
