"""Reduced-cost fixing: a large integer program is solved on those of its columns that matter.

With the bound b of the linear relaxation and the reduced cost d of a column that is zero there, no
solution that uses one of it costs less than b + d (Dantzig, Fulkerson and Johnson, Operations
Research 2 (1954), section 3). A program of the columns with the lowest reduced costs gives a
solution; those that no better one uses are left out of the program that gives the answer.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import isfinite

import numpy as np

from parloom.linear_program import LinearProgram
from parloom.workflow.solve import Found, solve

FEW = 400
"""So many columns are not worth two more programs."""
FIRST = 0.003
"""Reduced costs in the first program, as a share of the bound."""
FIRST_GAP, FIRST_TIME = 0.01, 0.25
"""The gap at which the first program ends, and the share of the time that it may take."""


def solve_fixed(
    program: LinearProgram,
    counts: Collection[int],
    gap: float,
    seconds: float | None,
    start: Mapping[int, float] | None,
) -> Found:
    """As `solve`; `counts` are columns of whole numbers from zero on, which may be left out."""
    ends = None if seconds is None else time.monotonic() + seconds

    def left(share: float = 1.0) -> float | None:
        return None if ends is None else share * (ends - time.monotonic())

    if len(counts) < FEW:
        return solve(program, gap, seconds, start)
    linear = solve(replace(program, integers=[False] * len(program.integers)), gap, left())
    if linear.interrupted or linear.infeasible:
        return replace(linear, values=None)
    if linear.values is None or not isfinite(linear.bound):  # out of time
        return solve(program, gap, left(), start)
    first = _solved(
        program, linear, counts, FIRST * linear.bound, max(gap, FIRST_GAP), left(FIRST_TIME), start
    )
    if first.values is None:
        return first if first.interrupted else solve(program, gap, left(), start)
    most = (1 - gap) * first.cost - linear.bound
    if first.interrupted or first.bound >= (1 - gap) * first.cost:
        return first
    begin = dict(enumerate(first.values))
    last = _solved(program, linear, counts, most, gap, left(), begin)
    return last if last.values is not None else replace(first, interrupted=last.interrupted)


def _solved(
    program: LinearProgram,
    linear: Found,
    counts: Collection[int],
    most: float,
    gap: float,
    seconds: float | None,
    start: Mapping[int, float] | None,
) -> Found:
    """The program without those of `counts` whose reduced costs are above `most`: what it finds,
    with a bound that holds for the whole.
    """
    reduced = np.array(linear.reduced_costs)
    keeps = np.ones(len(program.costs), dtype=bool)
    listed = np.fromiter(counts, dtype=np.int64)
    keeps[listed] = reduced[listed] <= max(most, 0.0)
    kept = np.flatnonzero(keeps)
    place = {int(column): position for position, column in enumerate(kept)}
    small = LinearProgram(
        [program.costs[c] for c in place],
        [program.bounds[c] for c in place],
        [program.integers[c] for c in place],
        [
            ({place[c]: factor for c, factor in terms.items() if c in place}, low, high)
            for terms, low, high in program.rows
        ],
    )
    begin = None
    if start is not None and all(c in place for c, value in start.items() if value):
        begin = {place[c]: value for c, value in start.items() if value}
    found = solve(small, gap, seconds, begin)
    least_left_out = float(np.min(reduced[~keeps], initial=np.inf))
    bound = max(linear.bound, min(found.bound, linear.bound + least_left_out))
    if found.values is None:
        return replace(found, bound=bound, infeasible=False)
    values = np.zeros(len(program.costs))
    values[kept] = found.values
    return replace(found, values=tuple(values.tolist()), bound=bound)
