"""What no step on a mesh undercuts, however well it overlaps: the busiest stream of the plan whose
busiest stream is the least busy.

Streams are the compute stream and the links of the innermost and of the outermost level. For any
shares that add up to one, no step is shorter than the shares of what its streams are busy, and
elimination finds the least of that over all layouts and storage; a linear program over what was
found so far says which shares bound best.
"""

from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.search.domains import narrow_minimum
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.linear import LinearProgram
from parloom.search.prices import BACKWARD, FORWARD, LINKS, PARTS
from parloom.search.storage import MEASURES, WEIGHT_PARTS

MS = 1e9
ROUNDS, TOLERANCE, SOLVED = 12, 0.01, 1e-3
Shares = NDArray[np.float64]
"""Of the compute stream, the innermost and the outermost level."""


def least_compute_ps(problem: LayoutProblem) -> int:
    """What the compute stream does at least, whatever is chosen for each operator."""
    return sum(int((p[:, FORWARD] + p[:, BACKWARD]).min()) for p in problem.operators)


def least_step_ps(problem: LayoutProblem, enough: float = inf) -> int:
    """What no step on the mesh undercuts; more than `enough` is not looked for."""
    bound, shares = float(least_compute_ps(problem)), np.array([1.0, 0.0, 0.0])
    known: list[NDArray[np.int64]] = []
    for _ in range(ROUNDS):
        if bound >= enough:
            break
        multipliers = _multipliers(shares)
        problem.work.spend()
        found = narrow_minimum(
            problem.sizes, problem.factors(multipliers), share=SOLVED, enough=enough
        )
        if not found.values:
            break
        bound = max(bound, found.cost)
        solution = problem.evaluate(found.values, multipliers)
        passes = solution.passes
        known.append(solution.weights[MEASURES].copy())
        known[-1][0] += passes[FORWARD] + passes[BACKWARD]
        known[-1][1:] += passes[LINKS]
        cost, shares = _shares(known)
        if bound >= cost * (1 - TOLERANCE):
            break
    return int(bound)


def _multipliers(shares: Shares) -> Multipliers:
    passes, weights = np.zeros(PARTS), np.zeros(WEIGHT_PARTS)
    passes[[FORWARD, BACKWARD]] = shares[0]
    passes[LINKS] = shares[1:]
    weights[MEASURES] = shares
    return Multipliers(passes, weights)


def _shares(known: list[NDArray[np.int64]]) -> tuple[float, Shares]:
    """How busy the busiest stream of the best mixture is, and the shares that prove it."""
    program = LinearProgram()
    most = program.column(1.0)
    parts = [program.column(0.0) for _ in known]
    program.row(dict.fromkeys(parts, 1.0), 1.0, 1.0)
    for stream in range(len(known[0])):
        busy = {part: -float(k[stream]) / MS for part, k in zip(parts, known, strict=True)}
        program.row({most: 1.0, **busy}, low=0.0)
    answer = program.solve()
    assert answer is not None, "some mixture is always possible"
    shares = np.clip(answer.prices[1:], 0.0, 1.0)
    return answer.cost * MS, shares / shares.sum()
