"""HiGHS on a program that may be interrupted: what it found, and the bound that it proved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import highspy
import numpy as np

from parloom.linear_program import LinearProgram

LOOK_S = 0.05
# HiGHS 1.13 calls some solutions optimal that are not, or says that there are none, with other
# pairs of tolerance and presolve: `benchmarks/solver_tolerances.py`. 1.14, which is not allowed,
# does so more often (its issues 3043, 3073, 3094).
OPTIONS: Mapping[str, float | str | bool] = {
    "presolve": "off",
    "mip_feasibility_tolerance": 1e-7,
    "mip_allow_restart": False,
    "primal_feasibility_tolerance": 1e-9,
    "dual_feasibility_tolerance": 1e-9,
}


@dataclass(frozen=True, slots=True)
class Found:
    """Values of the columns (None: no solution yet), the lower bound, and how the solver ended.

    `reduced_costs` are those of the columns of a linear program.
    """

    values: tuple[float, ...] | None
    cost: float
    bound: float
    infeasible: bool = False
    interrupted: bool = False
    reduced_costs: tuple[float, ...] = ()


def solve(
    program: LinearProgram,
    gap: float = 1e-7,
    seconds: float | None = None,
    start: Mapping[int, float] | None = None,
) -> Found:
    """The least cost, within `gap` or as far as `seconds` or Ctrl-C let it come.

    Ctrl-C ends the solver, not this function: `interrupted` says so. Costs are given to it in units
    of the largest one, as its tolerances are absolute.
    """
    unit = 2.0 ** math.frexp(max(map(abs, program.costs), default=0.0))[1]
    solver = replace(program, costs=[cost / unit for cost in program.costs]).solver(gap)
    for option, value in OPTIONS.items():
        solver.setOptionValue(option, value)
    if seconds is not None:
        solver.setOptionValue("time_limit", max(seconds, 0.1))
    if start is not None:
        begin = highspy.HighsSolution()
        begin.col_value = [start.get(column, 0.0) for column in range(len(program.costs))]
        solver.setSolution(begin)
    interrupted = _run(solver)
    kinds = highspy.HighsModelStatus
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Found(None, float("inf"), float("inf"), infeasible=True, interrupted=interrupted)
    feasible = int(info.primal_solution_status) == int(
        highspy.SolutionStatus.kSolutionStatusFeasible
    )
    cost = unit * float(info.objective_function_value)
    whole = status == kinds.kOptimal
    dual = unit * float(info.mip_dual_bound)
    bound = dual if any(program.integers) else cost if whole else -np.inf
    if not feasible:
        return Found(None, float("inf"), bound, interrupted=interrupted)
    solution = solver.getSolution()
    reduced = () if any(program.integers) else tuple(unit * own for own in solution.col_dual)
    values, bound = tuple(solution.col_value), min(bound, cost)
    return Found(values, cost, bound, interrupted=interrupted, reduced_costs=reduced)


def _run(solver: highspy.Highs) -> bool:
    """Run in a thread, so that Ctrl-C reaches this one; whether it came."""
    solver.HandleUserInterrupt = True
    solver.startSolve()
    interrupted = ended = False
    while not ended:
        try:
            ended = solver.wait(LOOK_S)[0]
        except KeyboardInterrupt:
            interrupted = True
            solver.cancelSolve()
    return interrupted
