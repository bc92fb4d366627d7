"""The search in one context: a mesh and a number of microbatches.

Columns under shadow prices give layouts, an integer program composes them into candidates, and the
simulator says how much each holds beyond what the model counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.cost.walk import Walker
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Prediction
from parloom.search.choices import Menu
from parloom.search.compose import Candidate, Composer
from parloom.search.decide import decisions_of
from parloom.search.layout_model import LayoutModel
from parloom.search.prices import Known
from parloom.search.program import Program
from parloom.search.question import Question
from parloom.search.solve.columns import Column, ColumnGeneration
from parloom.search.step_rows import ShadowPrices, row_prices
from parloom.search.storage import Level, stored_of
from parloom.search.work import Work

# Layouts that are composed, and of these simulated, the best first.
COMPOSED, SIMULATED = 4, 2
# How often the limit is corrected by a simulated peak, and the share of the memory that is near.
CORRECTIONS, CLOSE = 5, 0.01
# The least share of its estimate that a step is taken to need at first, or less where that was
# seen; and how much less than was seen, after so many simulations.
RATIO, SPREAD, ENOUGH = 0.985, 0.002, 4
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Judged:
    """A candidate as a plan with its simulated step."""

    candidate: Candidate
    decisions: Decisions
    prediction: Prediction

    @property
    def step_ps(self) -> float:
        return self.prediction.step_s * 1e12

    @property
    def estimate_ps(self) -> float:
        return self.candidate.sums.step_ps

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak_bytes

    @property
    def beyond_bytes(self) -> float:
        """What the step holds beyond what the model counts."""
        return self.prediction.peak_bytes - self.candidate.sums.held_bytes


class Seen:
    """What simulations of one question showed of estimates."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.beyond: dict[int, float] = {}

    def add(self, num_microbatches: int, found: Judged) -> None:
        """Take down how far a simulated step is from its estimate."""
        self.ratios.append(found.step_ps / found.estimate_ps)
        known = self.beyond.get(num_microbatches, inf)
        self.beyond[num_microbatches] = min(known, found.beyond_bytes)

    @property
    def ratio(self) -> float:
        """The least share of its estimate that a step is taken to need."""
        least = min(self.ratios, default=1.0)
        return least - SPREAD if len(self.ratios) >= ENOUGH else min(RATIO, least)

    def promises(self, estimate_ps: float, best_ps: float) -> bool:
        """Whether a plan with this estimate may be faster than the best."""
        return estimate_ps * self.ratio < best_ps

    def beyond_bytes(self, num_microbatches: int) -> float:
        """What plans hold at least beyond what the model counts; for a count that was not looked at
        as if all of it were of one microbatch.
        """
        if num_microbatches in self.beyond:
            return max(0.0, self.beyond[num_microbatches])
        others = (size * n / num_microbatches for n, size in self.beyond.items()
                  if n < num_microbatches)  # fmt: skip
        return max(0.0, min(others, default=0.0))


class ContextSearch:
    """Searches `program`, that of one microbatch, on `mesh`."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        num_microbatches: int,
        question: Question,
        base: Decisions,
        shared: Known,
        work: Work,
        menus: Sequence[Menu] = (),
    ) -> None:
        self.mesh, self.num_microbatches, self.question = mesh, num_microbatches, question
        self.base, self.work = base, work
        walker = Walker({}, mesh, question.cluster, question.kernels)
        self.layouts = LayoutModel(program, walker, base, question.optimizer, shared, menus)
        self.columns = ColumnGeneration(self.layouts, num_microbatches, work)
        self.composer = Composer(self.layouts, num_microbatches, work)
        self.duals = ShadowPrices()
        self.judged: dict[Decisions, Judged] = {}
        # Bytes that the model may count, such that simulated peaks are within the limit.
        self.limit = float(question.limit_bytes)

    def run(self, duals: ShadowPrices) -> None:
        """Columns under the present limit."""
        self.duals = self.columns.run(self.limit, duals)

    def candidates(self) -> Iterator[Candidate]:
        """Composed layouts, the best estimate first."""
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        ranked = sorted(self.columns.columns.values(), key=self._lagrangian)
        for column in ranked:
            key = self.composer.layout_of(column.values)
            groups.setdefault(key, []).append(column.values)
        found = []
        for solutions in list(groups.values())[:COMPOSED]:
            candidate = self.composer.compose(solutions, self.duals, self.limit)
            if candidate is not None:
                found.append(candidate)
        yield from sorted(found, key=lambda c: c.sums.step_ps)

    def _lagrangian(self, column: Column) -> float:
        return float(column.rows @ row_prices(self.duals, self.num_microbatches))

    def judge(self, candidate: Candidate) -> Judged:
        """The candidate simulated."""
        prices = row_prices(self.duals, self.num_microbatches)
        plan = decisions_of(self.layouts, candidate, self.num_microbatches, self.base, prices)
        if plan not in self.judged:
            self.work.spend()
            whole = self.question.graph
            pcg = lower(whole, plan, factored=self.layouts.program.factored)
            self.judged[plan] = Judged(candidate, plan, self.question.predict(pcg, plan))
        return self.judged[plan]

    def improve(self, best_ps: float, seen: "Seen") -> float:
        """Simulate what promises to be better than `best_ps`, and correct the limit by the peaks:
        the fastest step that fits.
        """
        limit, count = self.question.limit_bytes, self.num_microbatches
        low, high = 0.0, inf  # limits under which the best candidate fits, and does not
        for _ in range(CORRECTIONS):
            candidates = list(self.candidates())
            if not candidates or not seen.promises(candidates[0].sums.step_ps, best_ps):
                break
            found = self.judge(candidates[0])
            seen.add(count, found)
            fits = found.prediction.peak_bytes <= limit
            low, high = (max(low, self.limit), high) if fits else (low, min(high, self.limit))
            for other in candidates[1:SIMULATED] if fits else ():
                if seen.promises(other.sums.step_ps, best_ps):
                    seen.add(count, self.judge(other))
            best_ps = min([best_ps, *(j.step_ps for j in self.fitting())])
            if fits and not self.duals.byte_ps:
                break
            corrected = limit - found.beyond_bytes
            if not low < corrected < high:
                corrected = (low + high) / 2 if low and high < inf else corrected
            if abs(corrected - self.limit) < CLOSE * limit or corrected <= 0:
                break
            self.limit = corrected
            self.run(self.duals)
        return best_ps

    def stored(self, weight: int, values: Sequence[int]) -> tuple[tuple[Level, ...], Ints]:
        """The ways to store a weight where `values` put it, and their prices [level, part]."""
        program = self.layouts.program
        home = self.layouts.home(weight, values)
        return self.layouts.storage.options(stored_of(program, program.weights[weight], *home))

    def fitting(self) -> Iterator[Judged]:
        limit = self.question.limit_bytes
        return (found for found in self.judged.values() if found.peak_bytes <= limit)
