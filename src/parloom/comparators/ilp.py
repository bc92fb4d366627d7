"""Minimum of a model written out as an integer program (Zheng et al., OSDI 2022, section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parloom.linear_program import LinearProgram, picked
from parloom.search.model import Floats, Model, Term

MS = 1e9  # programs in milliseconds (of ps) are well scaled
GAP = 1e-9


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least cost, a value for each variable, and the branches that it took."""

    cost: float
    values: tuple[int, ...]
    nodes: int


def least(model: Model, prices: Floats, max_nodes: int | None = None) -> Minimum | None:
    """The least cost of `model` under `prices` (ps).

    A variable has a 0-1 column for each option, of which one is taken; options that tie several
    variables have a column for each combination, which is as much as each of its options (at most
    as much in the paper; the relaxation here is tighter). Options that are alike in a table share
    its columns. None where nothing is legal, or where nothing was found in `max_nodes` branches.
    """
    tables: dict[tuple[int, ...], Floats] = {
        (variable,): np.zeros(len(some)) for variable, some in enumerate(model.variables)
    }
    for term in model.terms:
        scope, costs = _over_options(term, prices)
        tables[scope] = tables.get(scope, 0.0) + costs
    constant = float(tables.pop((), np.zeros(())))
    program = LinearProgram()
    columns = []
    for variable in range(len(model.variables)):
        costs = tables.pop((variable,))
        allowed = np.isfinite(costs)
        some = [
            program.column(float(c) / MS if ok else 0.0, 0.0, float(ok), integer=True)
            for c, ok in zip(costs, allowed, strict=True)
        ]
        program.row(dict.fromkeys(some, 1.0), 1.0, 1.0)
        columns.append(some)
    for scope, costs in tables.items():
        _link(program, [columns[variable] for variable in scope], costs)
    answer = program.solve(GAP, max_nodes)
    if answer is None:
        return None
    taken = picked(answer.values)
    values = tuple(max(range(len(c)), key=lambda i: taken[c[i]]) for c in columns)
    return Minimum(answer.cost * MS + constant, values, answer.nodes)


def _over_options(term: Term, prices: Floats) -> tuple[tuple[int, ...], Floats]:
    """The variables of a term in order, each once, and its costs by their options."""
    scope = tuple(sorted({view.variable for view in term.views}))
    at = []
    for view in term.views:
        shape = [1] * len(scope)
        shape[scope.index(view.variable)] = -1
        at.append(view.index.reshape(shape))
    return scope, term.priced(prices)[tuple(at)]


def _link(program: LinearProgram, options: Sequence[Sequence[int]], costs: Floats) -> None:
    """Columns for combinations of options, tied to the columns of these."""
    classes = []
    for axis in range(costs.ndim):
        _, first, of = np.unique(costs, axis=axis, return_index=True, return_inverse=True)
        costs = costs.take(first, axis=axis)
        classes.append(of.reshape(-1))
    tied: list[list[dict[int, float]]] = [[{} for _ in range(size)] for size in costs.shape]
    for cell, cost in np.ndenumerate(costs):
        if np.isfinite(cost):
            combined = program.column(float(cost) / MS)
            for axis, index in enumerate(cell):
                tied[axis][index][combined] = 1.0
    for rows, of, some in zip(tied, classes, options, strict=True):
        for index, option in zip(of, some, strict=True):
            rows[index][option] = -1.0
        for row in rows:
            program.row(row, 0.0, 0.0)
