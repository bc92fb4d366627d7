"""Options that no good solution has, by moving costs between terms and variables.

Costs of terms are pulled to one variable after the other and shared among the terms that come next,
there and back (min-sum diffusion: Werner, PAMI 29, 2007; the sequential order of TRW-S: Kolmogorov,
PAMI 28, 2006). What each variable costs at least adds up to a lower bound; an option whose cost is
above the bound by more than the best solution is in no better one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.search.model import Floats, Indices, Model

# What sums of millions of picoseconds may be off by.
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """A term as one of its variables sees it: `axis` of its table; `order` and `starts` group the
    options of the variable by their value in the view.
    """

    term: int
    axis: int
    index: Indices
    others: tuple[int, ...]
    order: Indices
    starts: Indices


class Pruning:
    """Messages of the terms of `model`; those of one price vector are where the next one begins."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.places: list[list[_Place]] = [[] for _ in model.variables]
        self.unary: list[list[int]] = [[] for _ in model.variables]
        self.constants: list[int] = []
        self.moved: dict[tuple[int, int], Floats] = {}
        # What each option cost above the bound at least, under the last prices.
        self.reduced: list[Floats] = []
        self._priced: tuple[bytes, list[Floats]] = b"", []
        for number, term in enumerate(model.terms):
            if not term.views:
                self.constants.append(number)
            elif len(term.views) == 1:
                self.unary[term.views[0].variable].append(number)
            else:
                for axis, view in enumerate(term.views):
                    order = np.argsort(view.index, kind="stable")
                    values = view.index[order]
                    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
                    others = tuple(v.variable for v in term.views if v is not view)
                    self.places[view.variable].append(
                        _Place(number, axis, view.index, others, order, starts)
                    )
                    self.moved[number, axis] = np.zeros(view.size)

    def priced(self, prices: Floats) -> list[Floats]:
        """The table of each term; that of the last prices is known."""
        key = prices.tobytes()
        if self._priced[0] != key:
            self._priced = key, [term.priced(prices) for term in self.model.terms]
        return self._priced[1]

    def run(
        self, prices: Floats, like: Sequence[int], sweeps: int
    ) -> tuple[float, float, tuple[int, ...], list[NDArray[np.bool_]]]:
        """A lower bound, the best solution seen with its cost, and the options that better ones
        may have. `like`: a solution to begin with.
        """
        state = _Costs(self, prices)
        if state.bound < 0:  # messages of prices that were too different
            for moved in self.moved.values():
                moved[:] = 0.0
            state = _Costs(self, prices)
        if like:
            state.see(like)
        state.run(sweeps)
        self.reduced = state.reduced
        return state.bound, state.limit, state.best, state.alive

    def solution_with(
        self, forced: Iterable[tuple[int, int]], prices: Floats, sweeps: int
    ) -> tuple[int, ...]:
        """The best solution seen in which variables have these options; messages stay as they
        are.
        """
        before = {key: moved.copy() for key, moved in self.moved.items()}
        state = _Costs(self, prices)
        for variable, option in forced:
            state.force(variable, option)
        state.run(sweeps)
        self.moved.update(before)
        return state.best


class _Costs:
    """The tables of one price vector while costs move."""

    def __init__(self, pruning: Pruning, prices: Floats) -> None:
        self.pruning = pruning
        terms = pruning.model.terms
        self.priced = pruning.priced(prices)
        finite = [t[np.isfinite(t)] for t in self.priced]
        self.ceiling = 2 * sum(float(t.max(initial=0.0)) for t in finite) + 1.0
        self.priced = [np.minimum(t, self.ceiling) for t in self.priced]
        self.bound = sum(float(self.priced[n]) for n in pruning.constants)
        self.constant = self.bound
        self.single = [
            sum((self.priced[n][terms[n].views[0].index] for n in some), np.zeros(len(variable)))
            for some, variable in zip(pruning.unary, pruning.model.variables, strict=True)
        ]
        self.original = [s.copy() for s in self.single]
        self.pairs = {n: t.copy() for n, t in enumerate(self.priced) if t.ndim > 1}
        for (number, axis), moved in pruning.moved.items():
            self._shift(number, axis, -moved)
        for variable, places in enumerate(pruning.places):
            for place in places:
                self.single[variable] += pruning.moved[place.term, place.axis][place.index]
        # Messages of other prices may leave something below zero.
        for table in self.pairs.values():
            least = float(table.min())
            if least < 0:
                table -= least
                self.bound += least
        for single in self.single:
            least = float(single.min())
            single -= least
            self.bound += least
        self.alive = [np.ones(len(v), dtype=bool) for v in pruning.model.variables]
        self.reduced = [np.zeros(len(v)) for v in pruning.model.variables]
        self.limit = inf
        self.best: tuple[int, ...] = ()

    def force(self, variable: int, option: int) -> None:
        """Leave a variable one option."""
        others = np.arange(len(self.single[variable])) != option
        self.single[variable][others] += self.ceiling
        self.original[variable][others] += self.ceiling

    def run(self, sweeps: int) -> None:
        """Sweeps there and back, until the best solution is known to be the best of all."""
        order = list(range(len(self.single)))
        for _ in range(sweeps):
            self.sweep(order)
            self.sweep(order[::-1])
            if self.limit - self.bound <= ROUNDING * abs(self.bound):
                break

    def _shift(self, number: int, axis: int, amount: Floats) -> None:
        shape = [1] * self.pairs[number].ndim
        shape[axis] = -1
        self.pairs[number] += amount.reshape(shape)

    def sweep(self, order: Sequence[int]) -> None:
        """Costs to one variable after the other, and on to the terms with those that come later;
        a solution is decoded on the way.
        """
        position = {v: i for i, v in enumerate(order)}
        values = [0] * len(order)
        moved = self.pruning.moved
        for variable in order:
            places = self.pruning.places[variable]
            single = self.single[variable]
            for place in places:
                table = self.pairs[place.term]
                axes = tuple(i for i in range(table.ndim) if i != place.axis)
                least = table.min(axis=axes)
                self._shift(place.term, place.axis, -least)
                moved[place.term, place.axis] += least
                single += least[place.index]
            least = float(single.min())
            self.bound += least
            single -= least
            self.reduced[variable] = np.maximum(self.reduced[variable], single)
            self.alive[variable] &= single <= self.limit - self.bound + ROUNDING * abs(self.bound)
            costs = single.copy()
            for place in places:
                known = [(o, position[o] < position[variable]) for o in place.others]
                if all(before for _, before in known):
                    at = self._at(place, values, variable)
                    costs += self.pairs[place.term][at][place.index]
            values[variable] = int(costs.argmin())
            ahead = [p for p in places if any(position[o] > position[variable] for o in p.others)]
            if not ahead:
                continue
            share = np.minimum(single, self.ceiling) / max(len(ahead), len(places) - len(ahead))
            for place in ahead:
                given = np.zeros(self.pairs[place.term].shape[place.axis])
                classes = np.minimum.reduceat(share[place.order], place.starts)
                given[place.index[place.order[place.starts]]] = classes
                self._shift(place.term, place.axis, given)
                moved[place.term, place.axis] -= given
                single -= given[place.index]
        self.see(values)

    def _at(self, place: _Place, values: Sequence[int], variable: int) -> tuple[slice | int, ...]:
        views = self.pruning.model.terms[place.term].views
        return tuple(
            slice(None) if axis == place.axis else int(view.index[values[view.variable]])
            for axis, view in enumerate(views)
        )

    def see(self, values: Sequence[int]) -> None:
        """Take a solution as the limit, if it is the best."""
        cost = self.constant + sum(s[v] for s, v in zip(self.original, values, strict=True))
        for number, term in enumerate(self.pruning.model.terms):
            if len(term.views) > 1:
                at = tuple(int(view.index[values[view.variable]]) for view in term.views)
                cost += self.priced[number][at]
        if cost < self.limit and cost < self.ceiling:
            self.limit, self.best = float(cost), tuple(values)
