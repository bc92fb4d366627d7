"""HiGHS on a program that may be interrupted: what it found, and the bound that it proved."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import highspy
import numpy as np

from parloom.search.linear import LinearProgram

LOOK_S = 0.05
# HiGHS 1.13 calls some solutions optimal that are not, where its cuts go wrong. Of 1,899 programs
# of drawn workflows (tests/workflows.py, seeds 0 to 899), solved with each pair of tolerance and
# presolve: 7 with (1e-9, off), 6 with (1e-8, on), the same 6 with (1e-7, on), none with (1e-9, on),
# (1e-8, off), (1e-7, off), (1e-6, on) and (1e-6, off). 1.14, which is not allowed, fails with more
# (its issues 3043, 3073, 3094).
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

    Ctrl-C ends the solver, not this function: `interrupted` says so.
    """
    solver = program.solver(gap)
    for option, value in OPTIONS.items():
        solver.setOptionValue(option, value)
    if seconds is not None:
        solver.setOptionValue("time_limit", max(seconds, 0.1))
    if start is not None:
        values = np.zeros(len(program.costs))
        for column, value in start.items():
            values[column] = value
        begin = highspy.HighsSolution()
        begin.col_value = values.tolist()
        solver.setSolution(begin)
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
    solution = solver.getSolution()
    found = Found(tuple(solution.col_value), cost, min(bound, cost), interrupted=interrupted)
    return (
        found if any(program.integers) else replace(found, reduced_costs=tuple(solution.col_dual))
    )


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
