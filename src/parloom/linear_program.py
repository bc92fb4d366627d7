"""Linear and integer programs, by HiGHS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

INFINITY = float("inf")
# How far integers, rows and cuts may be off; the solver's own is 1e-6.
TOLERANCE = 1e-9
MOST_NODES = 2**31 - 1  # the solver's own
Row = tuple[Mapping[int, float], float, float]
"""Coefficients by column, lower and upper side."""


@dataclass(frozen=True)
class Answer:
    """Values of the columns, prices of the rows (of a linear program), and the bound that was
    proved: the cost itself where the program was solved to the end. `nodes` is how many linear
    programs that took.
    """

    cost: float
    values: tuple[float, ...]
    prices: tuple[float, ...]
    bound: float
    nodes: int = 1


@dataclass
class LinearProgram:
    """min costs . x subject to rows and bounds, built column by column and row by row."""

    costs: list[float] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def column(
        self, cost: float, low: float = 0.0, high: float = INFINITY, *, integer: bool = False
    ) -> int:
        """Add a column; its index."""
        self.costs.append(cost)
        self.bounds.append((low, high))
        self.integers.append(integer)
        return len(self.costs) - 1

    def row(
        self, terms: Mapping[int, float], low: float = -INFINITY, high: float = INFINITY
    ) -> int:
        """Add a row; its index."""
        self.rows.append((dict(terms), low, high))
        return len(self.rows) - 1

    def solve(
        self, gap: float = 1e-6, max_nodes: int | None = None, enough_nodes: int | None = None
    ) -> Answer | None:
        """The least cost, on one thread: the same every time. None where nothing is allowed.

        With `enough_nodes`, the best of what so many branches find, if they find something; with
        `max_nodes`, None where so many find nothing. Raises `RuntimeError` where the solver fails.
        """
        solver = self.solver(gap)
        kinds = highspy.HighsModelStatus
        feasible = int(highspy.SolutionStatus.kSolutionStatusFeasible)
        most = MOST_NODES if max_nodes is None else max_nodes
        for nodes in sorted({most if enough_nodes is None else min(enough_nodes, most), most}):
            solver.setOptionValue("mip_max_nodes", nodes)
            solver.run()
            status, info = solver.getModelStatus(), solver.getInfo()
            found_some = int(info.primal_solution_status) == feasible
            if status != kinds.kSolutionLimit or found_some:
                break
        if status == kinds.kInfeasible or (status == kinds.kSolutionLimit and not found_some):
            return None
        if status not in (kinds.kOptimal, kinds.kSolutionLimit):
            size = f"{len(self.costs)} columns and {len(self.rows)} rows"
            ended = solver.modelStatusToString(status)
            raise RuntimeError(f"HiGHS: {ended} on a program of {size}")
        found = solver.getSolution()
        cost = float(info.objective_function_value)
        bound = float(info.mip_dual_bound) if any(self.integers) else cost
        nodes = max(1, int(info.mip_node_count))
        return Answer(cost, tuple(found.col_value), tuple(found.row_dual), bound, nodes)

    def solver(self, gap: float) -> highspy.Highs:
        """HiGHS with this program in it, one thread, and nothing printed."""
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", gap)
        # Costs may be far below one: what is cut off and what is near must be no larger part.
        solver.setOptionValue("mip_abs_gap", 0.0)
        solver.setOptionValue("mip_feasibility_tolerance", TOLERANCE)
        solver.passModel(self._model())
        return solver

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.rows)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_ = np.array([low for low, _ in self.bounds])
        model.col_upper_ = np.array([high for _, high in self.bounds])
        model.row_lower_ = np.array([low for _, low, _ in self.rows])
        model.row_upper_ = np.array([high for _, _, high in self.rows])
        starts = [0]
        indices: list[int] = []
        values: list[float] = []
        for terms, _, _ in self.rows:
            indices += terms.keys()
            values += terms.values()
            starts.append(len(indices))
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(starts)
        model.a_matrix_.index_ = np.array(indices, dtype=np.int32)
        model.a_matrix_.value_ = np.array(values, dtype=float)
        if any(self.integers):
            kinds = highspy.HighsVarType
            model.integrality_ = [kinds.kInteger if i else kinds.kContinuous for i in self.integers]
        return model


def picked(values: Sequence[float]) -> tuple[int, ...]:
    """Values of integer columns as integers."""
    return tuple(round(v) for v in values)
