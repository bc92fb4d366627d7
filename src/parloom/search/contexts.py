"""The search in one context: a mesh and a number of microbatches.

Columns under shadow prices give layouts, an integer program composes them into candidates, and the
simulator says how much each holds beyond what the model counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.cost.walk import Walker
from parloom.ir.expected import Prediction
from parloom.ir.factors import factorize
from parloom.ir.mesh import Mesh
from parloom.ir.plan import MICROBATCH, Decisions
from parloom.rewrite.forms import Forms
from parloom.search.choices import Menu, assignments
from parloom.search.compose import Candidate, Composer, Stored
from parloom.search.conflicts import meshes_of
from parloom.search.decide import decisions_of, form_of
from parloom.search.folding import program_of
from parloom.search.layout_model import LayoutModel
from parloom.search.microbatch import microbatch_of
from parloom.search.model import Floats
from parloom.search.prices import Known
from parloom.search.program import Program
from parloom.search.refusals import Refusals
from parloom.search.request import Request
from parloom.search.solve.columns import Column, ColumnGeneration
from parloom.search.step_rows import INSTANTS, Passes, ShadowPrices, row_prices
from parloom.search.storage import (
    WEIGHT_PARTS,
    Level,
    StoragePrices,
    StoredWeight,
    stored_of,
)
from parloom.search.work import Work

# Layouts that are composed, and of these simulated, the best first.
COMPOSED, SIMULATED = 4, 2
# How often the limit is corrected by a simulated peak (twice as often while nothing fits), and the
# share of the memory that is near.
CORRECTIONS, CLOSE = 5, 0.01
# The least share of its estimate that a step is taken to need at first, or less where that was
# seen; and how much less than was seen, after simulations in so many contexts.
RATIO, SPREAD, ENOUGH = 0.985, 0.002, 3
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SimulatedPlan:
    """A plan with its simulated step; no model has an estimate of it."""

    decisions: Decisions
    prediction: Prediction

    @property
    def step_ps(self) -> float:
        return self.prediction.step_s * 1e12

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak_bytes

    @property
    def estimate_ps(self) -> float:
        return inf


@dataclass(frozen=True, eq=False)
class SimulatedCandidate(SimulatedPlan):
    """A candidate as a plan with its simulated step."""

    candidate: Candidate

    @property
    def estimate_ps(self) -> float:
        return self.candidate.sums.step_ps

    @property
    def beyond_bytes(self) -> float:
        """What the step holds beyond what the model counts."""
        return self.prediction.peak_bytes - self.candidate.sums.held_bytes


class EstimateErrors:
    """What simulations of one question showed of estimates; every step needs `least_bytes` beyond
    what the model counts.
    """

    def __init__(self, least_bytes: int = 0) -> None:
        self.least_bytes = least_bytes
        self.ratios: dict[tuple[Mesh, int], float] = {}
        self.beyond: dict[int, dict[Mesh, float]] = {}

    def add(self, num_microbatches: int, found: SimulatedCandidate) -> None:
        """Take down how far a simulated step is from its estimate."""
        known, mesh = self.beyond.setdefault(num_microbatches, {}), found.decisions.mesh
        context, ratio = (mesh, num_microbatches), found.step_ps / found.estimate_ps
        self.ratios[context] = min(self.ratios.get(context, inf), ratio)
        known[mesh] = min(known.get(mesh, inf), found.beyond_bytes)

    @property
    def ratio(self) -> float:
        """The least share of its estimate that a step is taken to need."""
        least = min(self.ratios.values(), default=1.0)
        # One that was higher everywhere need not be so in the next context.
        return min(least, 1.0) - SPREAD if len(self.ratios) >= ENOUGH else min(RATIO, least)

    def promises(self, estimate_ps: float, best_ps: float) -> bool:
        """Whether a plan with this estimate may be faster than the best."""
        return estimate_ps * self.ratio < best_ps

    def beyond_bytes(self, num_microbatches: int) -> float:
        """What plans hold at least beyond what the model counts; for a count that was not looked at
        as if all of it were of one microbatch. Plans on one mesh alone say nothing of others.
        """
        known = {n: min(sizes.values()) for n, sizes in self.beyond.items() if len(sizes) > 1}
        if num_microbatches in known:
            return known[num_microbatches]
        others = (size * n / num_microbatches for n, size in known.items() if n < num_microbatches)
        return max(self.least_bytes, min(others, default=0.0))


class ContextSearch:
    """Searches `program`, that of one microbatch, on `mesh`, for steps of `passes`."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        passes: Passes,
        request: Request,
        base: Decisions,
        shared: Known,
        work: Work,
        menus: Sequence[Menu] = (),
    ) -> None:
        self.mesh, self.passes, self.request = mesh, passes, request
        self.base, self.work = base, work
        walker = Walker({}, mesh, request.cluster, request.machine.kernels)
        asked = walker, base, request.optimizer
        storage = StoragePrices(*asked, quantizes=request.quantizes)
        self.layouts = LayoutModel(program, *asked, shared, menus, storage)
        self.columns = ColumnGeneration(self.layouts, passes, work)
        self.composer = Composer(self.layouts, passes, work)
        self.duals = ShadowPrices()
        self.judged: dict[Decisions, SimulatedCandidate] = {}
        # By weight, the variable that says where it lies, and its option.
        self._stored: dict[tuple[int, int, int], Mapping[Level, Ints]] = {}
        # Bytes that the model may count, such that simulated peaks are within the limit.
        self.limit = float(request.limit_bytes)
        # What a byte that is held costs beside the limit.
        self.held_ps = 0.0

    @property
    def num_microbatches(self) -> int:
        return self.passes.num_microbatches

    def run(self, duals: ShadowPrices, enough: float = inf) -> None:
        """Columns under the present limit; a bound of `enough` ends it."""
        self.duals = self.columns.run(self.limit, duals, enough=enough)

    def price_memory(self, byte_ps: float) -> None:
        """Columns and candidates in which a byte costs so much, whatever the limit."""
        self.limit, self.held_ps = inf, byte_ps
        self.duals = ShadowPrices(0.5, 0.5, 0.5, *(byte_ps / len(INSTANTS) for _ in INSTANTS))
        self.columns.prove(self.duals)

    def candidates(self) -> Iterator[Candidate]:
        """Composed layouts, the best estimate first; one whose Lagrangian is above an estimate is
        not composed.
        """
        groups: dict[tuple[int, ...], list[Column]] = {}
        ranked = sorted(self.columns.columns.values(), key=self._lagrangian)
        for column in ranked:
            groups.setdefault(self.composer.layout_of(column.values), []).append(column)
        allowed_ps = self.duals.byte_ps * self.limit if self.duals.byte_ps else 0.0
        found: list[Candidate] = []
        for columns in list(groups.values())[:COMPOSED]:
            least_ps = self._lagrangian(columns[0]) - allowed_ps
            if found and least_ps > min(c.sums.step_ps for c in found):
                break
            candidate = self.compose([column.values for column in columns])
            if candidate is not None:
                found.append(candidate)
        yield from sorted(found, key=lambda c: c.sums.step_ps)

    def compose(self, solutions: Sequence[tuple[int, ...]]) -> Candidate | None:
        """The best candidate with the layouts that `solutions` share; None where none fits."""
        return self.composer.compose(solutions, self.duals, self.limit, self.held_ps)

    def _lagrangian(self, column: Column) -> float:
        return float(column.rows @ row_prices(self.duals, self.passes))

    def judge(self, candidate: Candidate) -> SimulatedCandidate:
        """The candidate simulated."""
        prices = row_prices(self.duals, self.passes)
        plan = decisions_of(self.layouts, candidate, self.num_microbatches, self.base, prices)
        if plan not in self.judged:
            self.work.spend()
            form = form_of(self.layouts, candidate.values)
            found = self.request.predict(plan, form.factored)
            self.judged[plan] = SimulatedCandidate(plan, found, candidate)
        return self.judged[plan]

    def improve(self, best_ps: float, seen: "EstimateErrors") -> float:
        """Simulate what promises to be better than `best_ps`, and correct the limit by the peaks:
        the fastest step that fits.
        """
        limit, count = self.request.limit_bytes, self.num_microbatches
        # Limits under which the best candidate fits or there is none, and under which it does not.
        low, high = 0.0, inf
        for correction in range(2 * CORRECTIONS):
            if correction >= CORRECTIONS and best_ps < inf:
                break
            candidates = list(self.candidates())
            if not candidates and self.limit < min(high, limit) * (1 - CLOSE):
                # What holds as little need not exist; what holds more may still fit.
                low = max(low, self.limit)
                self.limit = (self.limit + min(high, limit)) / 2
                self.run(self.duals)
                continue
            if not candidates or not seen.promises(candidates[0].sums.step_ps, best_ps):
                break
            found = self.judge(candidates[0])
            seen.add(count, found)
            # Candidates that count the same hold different amounts beyond it.
            for other in candidates[1:SIMULATED]:
                if seen.promises(other.sums.step_ps, best_ps):
                    seen.add(count, self.judge(other))
            fits = found.prediction.peak_bytes <= limit
            low, high = (max(low, self.limit), high) if fits else (low, min(high, self.limit))
            best_ps = min([best_ps, *(j.step_ps for j in self.fitting())])
            if fits and not self.duals.byte_ps:
                break
            corrected = _corrected(self, found, low, high)
            if corrected <= 0:
                break
            self.limit = corrected
            self.run(self.duals)
        return best_ps

    def stored(self, weight: int, values: Sequence[int]) -> Mapping[Level, Ints]:
        """The ways to store a weight where `values` put it, and their parts of the rows."""
        key = self._place(weight, values)
        if key not in self._stored:
            levels, parts = self.layouts.storage.options(self._lying(weight, values))
            self._stored[key] = dict(zip(levels, parts, strict=True))
        return self._stored[key]

    def stored_parts(self, weight: int, values: Sequence[int], stored: Stored) -> Floats:
        """What equal weights add to the rows of weights where they are `stored` so."""
        options, found = self.stored(weight, values), np.zeros(WEIGHT_PARTS)
        for level, number in stored:
            part = options.get(level)
            if part is None:  # compositions price messages apart: other levels may be the best
                part = self.layouts.storage.price(self._lying(weight, values), level)
            found += number * part
        return found

    def _place(self, weight: int, values: Sequence[int]) -> tuple[int, int, int]:
        variable = self.layouts.weights.placed_by(weight, values)
        return (weight, -1, 0) if variable is None else (weight, variable, values[variable])

    def _lying(self, weight: int, values: Sequence[int]) -> StoredWeight:
        program, home = self.layouts.program, self.layouts.weights.home(weight, values)
        return stored_of(program, program.weights[weight], *home)

    def fitting(self) -> Iterator[SimulatedCandidate]:
        limit = self.request.limit_bytes
        return (found for found in self.judged.values() if found.peak_bytes <= limit)


def _corrected(context: ContextSearch, found: SimulatedCandidate, low: float, high: float) -> float:
    """The limit on what is counted that is tried next, by what `found` holds beyond it; 0 where
    that is near the last one and something fits.
    """
    limit = context.request.limit_bytes
    corrected = limit - found.beyond_bytes
    if high < inf and not low < corrected < high:
        corrected = (low + high) / 2
    if abs(corrected - context.limit) >= CLOSE * limit:
        return corrected
    # Of plans that are too large by little, others may hold less beyond the limit.
    lower = context.limit - CLOSE * limit
    return 0.0 if lower <= low or any(context.fitting()) else lower


def with_passes(context: ContextSearch, passes: Passes) -> ContextSearch:
    """The same layouts, with nothing known of them, in steps of other passes."""
    found = copy(context)
    found.passes, found.duals, found.judged = passes, ShadowPrices(), {}
    found.columns = ColumnGeneration(context.layouts, passes, context.work)
    found.composer = Composer(context.layouts, passes, context.work)
    return found


class Contexts:
    """The contexts of a question: its meshes of one and two axes, or the one that pins name, and
    the numbers of microbatches. They share menus and prices and count their `work` together.
    """

    def __init__(
        self,
        request: Request,
        base: Decisions,
        forms: Forms | None = None,
        work: Work | None = None,
        shared: Known | None = None,
    ) -> None:
        self.request, self.base = request, base
        self.work, self.shared = work or Work(request.budget), shared or Known()
        self.refusals = Refusals()
        factored = factorize(request.graph if forms is None else forms.graph)
        self.whole = program_of(factored.graph, factored, request.pinned, forms=forms)
        self.meshes = tuple(meshes_of(request.cluster, request.pinned, factored))
        self.counts = request.microbatch_counts(factored)
        self._programs: dict[int, Program | None] = {}

    def on_part(self, request: Request) -> "Contexts":
        """Those of `request`, which is this one on a part of the cluster."""
        found = copy(self)
        found.request = request
        if request.cluster.device != self.request.cluster.device:
            found.shared = Known()
        found.meshes = tuple(meshes_of(request.cluster, request.pinned, self.whole.factored))
        return found

    def program(self, count: int) -> Program | None:
        """The program of one of `count` microbatches; None where operators do not divide."""
        if self.base.batch_semantics == MICROBATCH:  # the graph is that of one
            return self.whole
        if count not in self._programs:
            self._programs[count] = microbatch_of(self.whole, count)
        return self._programs[count]

    def on(self, mesh: Mesh, count: int) -> Program | None:
        """The same; None also where pins leave an operator no choice on `mesh`: what a batch can do
        that part of it need not.
        """
        program, pinned = self.program(count), self.request.pinned
        for operator in program.operators if program and pinned.operators else ():
            place = operator.function, operator.node.key
            allowed = pinned.allowed(place, operator.rule, mesh)
            if allowed and not any(map(allowed, assignments(operator.rule, mesh))):
                return None
        return program

    def walker(self, mesh: Mesh) -> Walker:
        """Prices of collectives and operators on a mesh."""
        return Walker({}, mesh, self.request.cluster, self.request.machine.kernels)

    def search(
        self, program: Program, mesh: Mesh, count: int, menus: Sequence[Menu] = ()
    ) -> ContextSearch:
        """A search of its own in one context."""
        passes = Passes(count)
        return ContextSearch(
            program, mesh, passes, self.request, self.base, self.shared, self.work, menus
        )
