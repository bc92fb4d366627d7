"""The declared model: variables with options, and terms that price combinations of options in rows.

    cost(x) = sum over terms t of min over alternatives a of prices . costs_t[a, views of x]

A term sees of each variable in its scope only a *view*: many options are alike to it (all shardings
of a product that want its operand in one layout). A model knows nothing of tensors; solvers see
nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Bools = NDArray[np.bool_]
T = TypeVar("T", np.float64, np.bool_)


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity that costs are counted in: `unit` is "ps" or "bytes"."""

    name: str
    unit: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A decision: `key` names it, `options` are the labels of its values."""

    key: str
    options: tuple[object, ...]

    def __len__(self) -> int:
        return len(self.options)


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A function of the options of a variable: `index[option]` is one of `size` values."""

    variable: int
    index: Indices
    size: int


Alternatives = tuple[Floats, Bools | None]
"""Costs [alternative, *sizes of views, row], and which of these are legal [alternative, *sizes]; an
axis of size 1 is of a view that makes no difference.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Term:
    """Costs of combinations of options, in `rows`; of all alternatives the cheapest is taken."""

    views: tuple[View, ...]
    alternatives: tuple[Alternatives, ...]
    rows: slice
    name: str = ""

    def priced(self, prices: Floats) -> Floats:
        """Costs under `prices` (one per row of the model), inf where illegal: [*sizes of views]."""
        total: Floats | None = None
        for costs, legal in self.alternatives:
            some = _costs(costs, legal, prices[self.rows])
            least = some[0] if len(some) == 1 else some.min(axis=0)
            total = least if total is None else np.minimum(total, least)
        sizes = tuple(view.size for view in self.views)
        assert total is not None, "a term has alternatives"
        return total if total.shape == sizes else np.broadcast_to(total, sizes).copy()

    def chosen(self, prices: Floats, values: Sequence[int]) -> Floats:
        """The rows of the alternative taken under `prices` where variables have `values`."""
        at = tuple(int(view.index[values[view.variable]]) for view in self.views)
        best, found = inf, np.zeros(self.rows.stop - self.rows.start)
        for costs, legal in self.alternatives:
            rows = _at(costs, at)
            allowed = None if legal is None else _at(legal, at)
            total = _costs(rows, allowed, prices[self.rows])
            index = int(total.argmin())
            if total[index] < best:
                best, found = float(total[index]), rows[min(index, len(rows) - 1)]
        return found


def _at(array: NDArray[T], at: Sequence[int]) -> NDArray[T]:
    """What alternatives have at one place of the views."""
    for place in at:
        array = array[:, place if array.shape[1] > 1 else 0]
    return array


def _costs(costs: Floats, legal: Bools | None, prices: Floats) -> Floats:
    """Costs under `prices`, inf where illegal."""
    total: Floats = costs @ prices
    return total if legal is None else np.where(legal, total, inf)


@dataclass(frozen=True, eq=False)
class Model:
    """Variables, terms over them, and the rows that terms count in."""

    rows: tuple[Row, ...]
    variables: tuple[Variable, ...]
    terms: tuple[Term, ...]

    def priced(self, prices: Floats) -> list[Floats]:
        """The table of each term under `prices`."""
        return [term.priced(prices) for term in self.terms]

    def restricted(
        self, allowed: Sequence[NDArray[np.bool_]]
    ) -> tuple["Model", tuple[Indices, ...]]:
        """The model with only the allowed options, and which option of this one each is."""
        kept = tuple(np.flatnonzero(some) for some in allowed)
        variables = tuple(
            Variable(v.key, tuple(v.options[i] for i in some))
            for v, some in zip(self.variables, kept, strict=True)
        )
        return Model(self.rows, variables, tuple(_among(t, kept) for t in self.terms)), kept


def _among(term: Term, kept: Sequence[Indices]) -> Term:
    """`term` with what is left of its views."""
    alternatives, views = list(term.alternatives), []
    for axis, view in enumerate(term.views, 1):
        left, index = np.unique(view.index[kept[view.variable]], return_inverse=True)
        if len(left) < view.size:
            alternatives = [
                (_take(costs, left, axis), None if legal is None else _take(legal, left, axis))
                for costs, legal in alternatives
            ]
        views.append(View(view.variable, index.reshape(-1).astype(np.intp), len(left)))
    return Term(tuple(views), tuple(alternatives), term.rows, term.name)


def _take(array: NDArray[T], left: Indices, axis: int) -> NDArray[T]:
    """What is left of one axis, if it makes a difference."""
    return array.take(left, axis=axis) if array.shape[axis] > 1 else array
