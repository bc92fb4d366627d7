"""Column generation (Dantzig and Wolfe, Operations Research 8, 1960): a linear program over the
solutions known so far prices what overlaps and memory, and the model's minimum at these prices is
the next solution, and a bound on all of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from parloom.linear_program import LinearProgram
from parloom.search.model import Bools, Floats, Model
from parloom.search.solve.minimum import Minimizer, Part, Parts
from parloom.search.step_rows import (
    EXPOSED,
    INSTANTS,
    Passes,
    ShadowPrices,
    StepSums,
    row_prices,
    step_sums,
)
from parloom.search.work import Work

ROUNDS, ROUNDING = 25, 1e-6
# Rounds in which mixture and bound come no nearer to each other.
STEADY = 3
MS, GB = 1e9, 1e9  # programs in milliseconds (of ps) and gigabytes are well scaled
# Exceeding the limit by all of it costs so many steps at first, and where no solution fits at this
# price so many times more, up to more than any plan.
PENALTY, GROWTH, MOST_PENALTY = 1.0, 10.0, 100.0
# Limits below this share of what is held cost as if they were that.
FAR_BELOW = 0.01
# Flows that are missed by less than this part of the worst are not made exact at once.
JOINED = 10.0
# How near to its bound the minimum is, above which options cost at least so much.
NEAR = 1e-3


class Problem(Protocol):
    """A model whose terms may be made exact."""

    @property
    def parts(self) -> Parts | None: ...

    def model(self, joint: Collection[int] = ()) -> Model: ...

    def evaluate(self, values: Sequence[int], prices: Floats) -> Floats: ...

    def unshared(self, values: Sequence[int], prices: Floats) -> dict[int, float]: ...


@dataclass(frozen=True, eq=False)
class Column:
    """A solution with the totals of its rows."""

    values: tuple[int, ...]
    rows: Floats
    sums: StepSums


@dataclass(eq=False)
class ColumnGeneration:
    """Solves one problem for the `passes` of a step under limits on memory.

    Some terms bound what they price from below: the problem evaluates solutions, says where terms
    were too low, and gives a model that is exact there.
    """

    problem: Problem
    passes: Passes
    work: Work = field(default_factory=Work)
    columns: dict[tuple[tuple[int, ...], bytes], Column] = field(default_factory=dict)
    bounds: dict[ShadowPrices, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joint: frozenset[int] = frozenset()
        self.minimizer = Minimizer(self.problem.model(), self.problem.parts)
        self.size = len(self.minimizer.model.variables)
        self.least_held = 0.0  # where the highest price of memory was tried
        self.penalty = PENALTY

    def minimum(
        self, prices: Floats, tolerance: float, climbs: bool = True
    ) -> tuple[float, tuple[int, ...]]:
        """A bound on all solutions under `prices`, and one that is near it (see `Minimizer`)."""
        while True:
            self.work.spend()
            bound, values = self.minimizer.minimum(prices, tolerance / 2, climbs)
            if not values:
                return bound, ()
            low = self.problem.unshared(values, prices)
            missed = {n: more for n, more in low.items() if n not in self.joint}
            if sum(missed.values()) <= tolerance * abs(bound):
                return bound, values[: self.size]
            # Those that are missed most, so that few terms become large.
            least = max(missed.values()) / JOINED
            self.joint |= {number for number, more in missed.items() if more >= least}
            model = self.problem.model(self.joint)
            self.minimizer = Minimizer(model, self.problem.parts, self.minimizer.part)

    def part(self, allowed: Sequence[Bools]) -> Part:
        """The minima of solutions that have these options, as exact as the model is now."""
        return Part(self.minimizer.model, allowed)

    def minimum_with(
        self, forced: Mapping[int, int], prices: Floats, part: Part | None = None
    ) -> tuple[int, ...]:
        """A good solution under `prices`, or one of a part, in which variables have these
        values.
        """
        self.work.spend()
        return (part or self.minimizer).minimum_with(forced, prices)[: self.size]

    def least(
        self, duals: ShadowPrices, tolerance: float, part: Part | None = None
    ) -> tuple[float, Sequence[Floats]]:
        """What solutions, or those of a part, cost at least under `duals`, and those with each
        option of each variable.
        """
        prices = row_prices(duals, self.passes)
        bound, _ = (part or self).minimum(prices, tolerance)
        return bound, (part or self.minimizer).least(prices, tolerance / 2)[: self.size]

    def bound_ps(self, limit_bytes: float) -> float:
        """No solution within `limit_bytes` has a lower estimate."""
        return max(0.0, max(self._shifted(limit_bytes).values(), default=0.0))

    def _shifted(self, limit_bytes: float) -> dict[ShadowPrices, float]:
        """What each price vector proved of solutions within `limit_bytes`."""
        return {d: bound - d.byte_ps * limit_bytes for d, bound in self.bounds.items()}

    def least_within(self, limit_bytes: float) -> Sequence[Floats]:
        """The estimates at least of solutions within `limit_bytes` with each option of each
        variable, by the prices of `bound_ps`.
        """
        shifted = self._shifted(limit_bytes)
        duals = max(shifted, key=shifted.__getitem__)
        _, least = self.least(duals, NEAR)
        return [costs - duals.byte_ps * limit_bytes for costs in least]

    def prove(
        self, duals: ShadowPrices, tolerance: float = 1e-3, climbs: bool = True
    ) -> Column | None:
        """Add the solution and the bound of one price vector (see `Minimizer`)."""
        prices = row_prices(duals, self.passes)
        bound, values = self.minimum(prices, tolerance, climbs)
        self.bounds[duals] = max(bound, self.bounds.get(duals, bound))
        if not values:
            return None
        rows = self.problem.evaluate(values, prices)
        key = values, rows.tobytes()  # alternatives differ by prices
        if key not in self.columns:
            self.columns[key] = Column(values, rows, step_sums(rows, self.passes))
        return self.columns[key]

    def run(
        self,
        limit_bytes: float,
        duals: ShadowPrices,
        tolerance: float = 1e-3,
        enough: float = inf,
    ) -> ShadowPrices:
        """Columns and prices in turn until the mixture's cost is within `tolerance` of the bound,
        they come no nearer, or the bound is `enough`: the prices at the end.
        """
        gaps: list[float] = []
        for _ in range(ROUNDS):
            count = len(self.columns)
            if self.prove(duals, tolerance / 4) is None:
                return duals
            self._raise_penalty(limit_bytes, duals)
            # Where nothing fits, prices are those of the least that is held.
            limit = max(limit_bytes, self.least_held)
            self.work.spend()
            cost, after = mixed(self.columns.values(), limit, self._penalty(limit))
            bound = self.bound_ps(limit)
            if cost - bound <= tolerance * cost or (limit == limit_bytes and bound >= enough):
                return after
            if len(self.columns) == count and after == duals:
                return after
            gaps.append(cost - bound)
            if len(gaps) > STEADY and gaps[-1 - STEADY] - gaps[-1] <= tolerance * cost:
                return after
            duals = after
        return duals

    def _raise_penalty(self, limit_bytes: float, duals: ShadowPrices) -> None:
        """Let a byte above the limit cost more where nothing fits at its present cost."""
        held = min(c.sums.held_bytes for c in self.columns.values())
        if held <= limit_bytes or duals.byte_ps < self._penalty(limit_bytes) * (1 - ROUNDING):
            return
        if self.penalty < MOST_PENALTY:
            self.penalty *= GROWTH
        else:
            self.least_held = held

    def _penalty(self, limit_bytes: float) -> float:
        """What a byte above the limit costs, in ps; under a limit far below what anything holds no
        more than the solver of linear programs can take.
        """
        least = min(c.sums.step_ps for c in self.columns.values())
        held = min(c.sums.held_bytes for c in self.columns.values())
        return self.penalty * least / max(limit_bytes, held * FAR_BELOW, 1.0)


def mixed(
    columns: Collection[Column], limit_bytes: float, penalty: float
) -> tuple[float, ShadowPrices]:
    """The best mixture of columns: its cost, and the dual values. A byte above the limit costs
    `penalty` ps.
    """
    program = LinearProgram()
    exposed = [program.column(1.0) for _ in range(3)]
    above = program.column(penalty * GB / MS)
    shares = [program.column(c.sums.plain_ps / MS) for c in columns]
    program.row(dict.fromkeys(shares, 1.0), 1.0, 1.0)
    for column, name in zip(exposed, EXPOSED, strict=True):
        terms = {s: -getattr(c.sums, name) / MS for s, c in zip(shares, columns, strict=True)}
        program.row({column: 1.0, **terms}, low=0.0)
    for name in INSTANTS:
        held = {s: getattr(c.sums, name) / GB for s, c in zip(shares, columns, strict=True)}
        program.row({above: -1.0, **held}, high=limit_bytes / GB)
    answer = program.solve()
    assert answer is not None, "a mixture of columns is always possible"
    forward, between, last = (min(1.0, max(0.0, p)) for p in answer.prices[1:4])
    limits = answer.prices[4 : 4 + len(INSTANTS)]
    bytes_ps = (max(0.0, -price) * MS / GB for price in limits)
    return answer.cost * MS, ShadowPrices(forward, between, last, *bytes_ps)
