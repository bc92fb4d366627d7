"""HiGHS on a program that may be interrupted: what it found, and the bound that it proved."""

from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

from parloom.search.linear import LinearProgram

LOOK_S = 0.05
FEASIBILITY = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """Values of the columns (None: no solution yet), the lower bound, and how the solver ended."""

    values: tuple[float, ...] | None
    cost: float
    bound: float
    infeasible: bool = False
    interrupted: bool = False


def solve(
    program: LinearProgram,
    gap: float = 1e-7,
    seconds: float | None = None,
    start: Mapping[int, float] | None = None,
) -> Found:
    """The least cost, within `gap` or as far as `seconds` or Ctrl-C let it come.

    Ctrl-C ends the solver, not this function: `interrupted` says so.
    """
    solver = program.solver(gap)
    # With presolve, HiGHS 1.13 finds the same and takes as long. 1.14, not allowed, cuts off
    # the best solutions of some programs with continuous and integer columns in one row (its issues
    # 3043, 3073, 3094), and calls the rest optimal.
    solver.setOptionValue("presolve", "off")
    solver.setOptionValue("mip_allow_restart", False)
    solver.setOptionValue("primal_feasibility_tolerance", FEASIBILITY)
    solver.setOptionValue("dual_feasibility_tolerance", FEASIBILITY)
    if seconds is not None:
        solver.setOptionValue("time_limit", max(seconds, 0.1))
    if start is not None:
        values = np.zeros(len(program.costs))
        for column, value in start.items():
            values[column] = value
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        solver.setSolution(solution)
    interrupted = _run(solver)
    kinds = highspy.HighsModelStatus
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Found(None, float("inf"), float("inf"), infeasible=True, interrupted=interrupted)
    feasible = int(info.primal_solution_status) == int(
        highspy.SolutionStatus.kSolutionStatusFeasible
    )
    cost = float(info.objective_function_value)
    whole = status == kinds.kOptimal
    bound = float(info.mip_dual_bound) if any(program.integers) else cost if whole else -np.inf
    if not feasible:
        return Found(None, float("inf"), bound, interrupted=interrupted)
    values_found = tuple(solver.getSolution().col_value)
    return Found(values_found, cost, min(bound, cost), interrupted=interrupted)


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
