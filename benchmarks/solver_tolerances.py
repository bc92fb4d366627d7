"""Which plans of workflows HiGHS misses, by its tolerance of integers, with and without presolve.

    python benchmarks/solver_tolerances.py [--count 900]

The programs of drawn workflows (`tests/workflows.py`), whole and with columns of high reduced costs
left out, are solved with each pair; the middle of all answers is taken for the right one. Exit
code 1 where `parloom.workflow.solve` uses a pair that misses one.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf, isclose
from statistics import median_low

import highspy
from tests.workflows import drawn

from parloom.linear_program import LinearProgram
from parloom.workflow.program import Program
from parloom.workflow.solve import OPTIONS, solve

GAP, SAME = 1e-7, 1e-6
PAIRS = tuple(product((1e-9, 1e-8, 1e-7, 1e-6), ("off", "on")))
MOST = (0.3, 1.0, inf)
"""Dollars an hour of reduced costs beyond which columns of counts are held at zero."""


def programs(seed: int) -> Iterator[LinearProgram]:
    program = Program(drawn(seed))
    linear = solve(replace(program.lp, integers=[False] * len(program.lp.integers)))
    for most in MOST if linear.values is not None else ():
        bounds = list(program.lp.bounds)
        for column in program.counts.values():
            if linear.reduced_costs[column] > most:
                bounds[column] = (0.0, 0.0)
        yield replace(program.lp, bounds=bounds)


def cost(program: LinearProgram, tolerance: float, presolve: str) -> float:
    """What HiGHS calls the least cost; infinite where it says that there is no solution."""
    solver = program.solver(GAP)
    asked = {**OPTIONS, "mip_feasibility_tolerance": tolerance, "presolve": presolve}
    for option, value in asked.items():
        solver.setOptionValue(option, value)
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        return float(solver.getInfo().objective_function_value)
    return inf


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=900, help="seeds, from 0 on")
    missed: Counter[tuple[float, str]] = Counter()
    worst: dict[tuple[float, str], float] = dict.fromkeys(PAIRS, 1.0)
    solved = 0
    for seed in range(parser.parse_args().count):
        for program in programs(seed):
            solved += 1
            found = {pair: cost(program, *pair) for pair in PAIRS}
            right = median_low(found.values())
            for pair, own in found.items():
                if not isclose(own, right, rel_tol=SAME, abs_tol=1e-9):
                    missed[pair] += 1
                    worst[pair] = max(worst[pair], own / right)
                    print(f"seed {seed}, {pair}: {own:.6g} for {right:.6g}", flush=True)
    print(f"\n{solved} programs\n\n| tolerance | presolve | missed | most times as dear |")
    print("|---" * 4 + "|")
    for pair in PAIRS:
        print(f"| {pair[0]:g} | {pair[1]} | {missed[pair]} | {worst[pair]:.3f} |")
    return int(missed[float(OPTIONS["mip_feasibility_tolerance"]), str(OPTIONS["presolve"])] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
