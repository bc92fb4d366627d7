"""The search on one mesh: layouts, storage and recomputation together, within the memory limit.

Layouts couple through a few sums only: what is computed, what is sent, what is kept. So the program
is taken apart (Dantzig and Wolfe, 1960): a linear program over the solutions known so far prices
those sums, elimination finds the best layouts at these prices, and what it finds bounds all layouts
from below. For each of them, an integer program chooses how many weights of each kind are stored
in which chunks and how many calls of each block are recomputed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from parloom.ir.graph import Call
from parloom.ir.plan import ActivationDecision, Decisions
from parloom.search.layouts import LayoutProblem, Multipliers, Solution, Totals
from parloom.search.linear import LinearProgram, picked
from parloom.search.prices import BACKWARD, BACKWARD_SENT, FORWARD, FORWARD_SENT, KEPT, PARTS
from parloom.search.storage import (
    AFTER,
    AGAIN,
    CHUNKED,
    GATHERED,
    REDUCED,
    STORED,
    WEIGHT_PARTS,
    Level,
    Stored,
)

MS, GB = 1e9, 1e9  # a linear program in milliseconds (of ps) and gigabytes is well scaled
ROUNDS = 30
# Milliseconds that a gigabyte above the limit costs: more than any plan.
PENALTY = 1e7
Policies = tuple[bool, ...]
"""Per block kind, whether all of its calls recompute."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What the parts of a plan add up to: sums in ps that the objective is made of, and bytes.

    `plain` counts as it is; of `gathered` and `reduced` only what is above zero: what weights send
    beyond what hides it, in the forward and in the backward pass.
    """

    plain: int
    gathered: int
    reduced: int
    held_bytes: int

    @property
    def step_ps(self) -> int:
        return self.plain + max(0, self.gathered) + max(0, self.reduced)


@dataclass(frozen=True, slots=True)
class Prices:
    """What the linear program says a unit of each sum is worth; `bytes` in ps."""

    gathered: float = 0.0
    reduced: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """Layouts with storage and recomputation: levels per weight with how many of it have each, and
    calls per block kind that recompute.
    """

    values: tuple[int, ...]
    levels: tuple[tuple[tuple[Level, int], ...], ...]
    recomputed: Mapping[str, int]
    sums: Sums


@dataclass(frozen=True)
class Found:
    """The candidates of a mesh, best first, and what no plan on it undercuts."""

    candidates: tuple[Candidate, ...]
    bound_ps: float


class MeshSearch:
    """Searches `problem` for plans of at most `limit_bytes` a device."""

    def __init__(self, problem: LayoutProblem, limit_bytes: float) -> None:
        self.problem, self.limit_bytes = problem, limit_bytes
        graph = problem.program.graph
        self.calls: dict[str, list[str]] = {f.name: [] for f in graph.functions}
        for item in graph.main.body:
            if isinstance(item, Call):
                self.calls[item.function].append(item.prefix)
        self.kinds = [name for name, prefixes in self.calls.items() if prefixes]
        self.columns: dict[tuple[Policies, tuple[int, ...], tuple[Level, ...]], tuple[Solution, Sums]] = {}

    def run(self, tolerance: float = 1e-3) -> Found:
        """Columns and prices in turn, until they differ by no more than `tolerance`."""
        bound = 0.0
        prices = Prices(0.5, 0.5, 0.0)
        for _ in range(ROUNDS):
            reached, lower = self._price(prices)
            bound = max(bound, lower)
            cost, prices = self._combine()
            if not reached or cost - bound <= tolerance * cost:
                break
        candidates = [c for values in self._distinct() if (c := self.polish(values)) is not None]
        candidates.sort(key=lambda c: (c.sums.step_ps, c.values))
        return Found(tuple(candidates), bound)

    def _distinct(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(values for _, values, _ in self.columns))

    def _price(self, prices: Prices) -> tuple[bool, float]:
        """Add the best layouts at `prices`: whether they are new, and the bound that they prove."""
        best, new = float("inf"), False
        for policies in self._policies(prices):
            solution = self.problem.solve(self.multipliers(prices, policies))
            best = min(best, solution.bound - prices.bytes * self.limit_bytes)
            key = policies, solution.values, solution.levels
            new |= key not in self.columns
            self.columns[key] = solution, self.sums(solution, policies)
        return new, best

    def _policies(self, prices: Prices) -> Iterator[Policies]:
        if prices.bytes > 0:
            yield from product((False, True), repeat=len(self.kinds))
        else:
            yield (False,) * len(self.kinds)

    def _combine(self) -> tuple[float, Prices]:
        """The best mixture of all columns: its cost, and the prices that it puts on the sums."""
        program = LinearProgram()
        gathered, reduced = program.column(1.0), program.column(1.0)
        above = program.column(PENALTY)
        columns = [s for _, s in self.columns.values()]
        shares = [program.column(s.plain / MS) for s in columns]
        program.row(dict.fromkeys(shares, 1.0), 1.0, 1.0)
        for spare, part in ((gathered, "gathered"), (reduced, "reduced")):
            terms = {i: -getattr(s, part) / MS for i, s in zip(shares, columns, strict=True)}
            program.row(terms | {spare: 1.0}, low=0.0)
        held = {i: s.held_bytes / GB for i, s in zip(shares, columns, strict=True)}
        program.row(held | {above: -1.0}, high=self.limit_bytes / GB)
        answer = program.solve()
        assert answer is not None, "a mixture of columns is always possible"
        _, first, second, memory = answer.prices
        return answer.cost * MS, Prices(
            min(1.0, max(0.0, first)), min(1.0, max(0.0, second)), max(0.0, -memory) * MS / GB
        )

    def multipliers(self, prices: Prices, policies: Policies) -> Multipliers:
        """What each part counts at `prices`."""
        forward, backward = 1.0 - prices.gathered, 1.0 - prices.reduced
        kept = np.array([forward, 1.0, backward, 1.0, prices.bytes])
        again = np.array([forward + backward, 2.0, backward, 1.0, 0.0])
        recomputes = dict(zip(self.kinds, policies, strict=True))
        graph = self.problem.program.graph
        functions = {
            f.name: again if recomputes.get(f.name) else kept for f in (graph.main, *graph.functions)
        }
        weights = np.zeros(WEIGHT_PARTS)
        weights[[GATHERED, AGAIN, CHUNKED, REDUCED, AFTER, STORED]] = (
            prices.gathered, prices.reduced, prices.reduced, prices.reduced, 1.0, prices.bytes
        )  # fmt: skip
        return Multipliers(functions, weights)

    def sums(self, solution: Solution, policies: Policies) -> Sums:
        """What a solution adds up to, where all calls of a kind do the same."""
        shares = dict(zip(self.kinds, policies, strict=True))
        passes = np.zeros(PARTS, dtype=np.int64)
        for name, parts in solution.functions.items():
            passes += recomputed(parts) if shares.get(name) else parts
        return summed(passes, solution.weights)

    # One layout

    def polish(self, values: Sequence[int]) -> Candidate | None:
        """The best storage and recomputation for the layouts of `values`; None where nothing fits."""
        problem = self.problem
        even = self.multipliers(Prices(1.0, 1.0, 0.0), (False,) * len(self.kinds))
        functions = problem.evaluate(values, even).functions
        program = LinearProgram()
        gathered, reduced = program.column(1.0), program.column(1.0)
        options: list[tuple[list[int], tuple[Level, ...], Totals]] = []
        for index, weight in enumerate(problem.program.weights):
            layout, reduce = problem.home(index, values)
            stored = Stored(weight.spec, weight.trainable, weight.block, layout,
                            tuple(reduce) if weight.trainable else ())  # fmt: skip
            levels, parts = problem.storage.options(stored)
            columns = [program.column(p[AFTER] / MS, 0, weight.count, integer=True) for p in parts]
            program.row(dict.fromkeys(columns, 1.0), weight.count, weight.count)
            options.append((columns, levels, parts))
        base = sum(functions.values(), np.zeros(PARTS, dtype=np.int64))
        again: dict[str, tuple[int, Totals]] = {}
        for name in self.kinds:
            count = len(self.calls[name])
            more = (recomputed(functions[name]) - functions[name]) / count
            column = program.column(float(more[: KEPT].sum()) / MS, 0, count, integer=True)
            again[name] = column, more
        self._hinge(program, gathered, base[FORWARD], options, (GATHERED,), {})
        hidden = {column: more[BACKWARD] for column, more in again.values()}
        parts_sent = AGAIN, CHUNKED, REDUCED
        self._hinge(program, reduced, base[BACKWARD], options, parts_sent, hidden)
        held = {c: p[STORED] / GB for columns, _, parts in options for c, p in zip(columns, parts, strict=True)}
        held |= {column: more[KEPT] / GB for column, more in again.values()}
        program.row(held, high=(self.limit_bytes - base[KEPT]) / GB)
        answer = program.solve(gap=1e-4)
        if answer is None:
            return None
        counts = picked(answer.values)
        chosen = tuple(
            tuple((level, counts[c]) for c, level in zip(columns, levels, strict=True) if counts[c])
            for columns, levels, _ in options
        )
        weights = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        for columns, _, parts in options:
            for c, p in zip(columns, parts, strict=True):
                weights += counts[c] * p
        for column, more in again.values():
            base = base + np.round(more * counts[column]).astype(np.int64)
        repeats = {name: counts[column] for name, (column, _) in again.items()}
        return Candidate(tuple(values), chosen, repeats, summed(base, weights))

    @staticmethod
    def _hinge(
        program: LinearProgram,
        spare: int,
        hides: float,
        options: Sequence[tuple[list[int], tuple[Level, ...], Totals]],
        parts: tuple[int, ...],
        hidden: Mapping[int, float],
    ) -> None:
        """`spare` is at least what is sent beyond what is computed."""
        terms = {
            c: -float(p[list(parts)].sum()) / MS
            for columns, _, prices in options
            for c, p in zip(columns, prices, strict=True)
        }
        terms |= {column: more / MS for column, more in hidden.items()}
        program.row(terms | {spare: 1.0}, low=-float(hides) / MS)

    def decisions(self, candidate: Candidate, base: Decisions) -> Decisions:
        """A candidate as a plan says it; of each kind the last calls recompute."""
        program = self.problem.program
        levels: list[Level] = []
        plain = self.problem.decisions(candidate.values, base)
        parameters = []
        for weight, chosen in zip(program.weights, candidate.levels, strict=True):
            levels = [level for level, count in chosen for _ in range(count)]
            parameters += [
                level.decision(target)
                for level, target in zip(levels, weight.targets, strict=True)
                if level.axes
            ]
        activations = tuple(
            ActivationDecision(prefix, "recompute")
            for name, count in candidate.recomputed.items()
            for prefix in self.calls[name][len(self.calls[name]) - count :]
        )
        return replace(plain, parameters=tuple(parameters), activations=activations)


def recomputed(parts: Totals) -> Totals:
    """The parts of a block whose forward pass is run again in its backward pass."""
    found = parts.copy()
    found[BACKWARD] += parts[FORWARD]
    found[BACKWARD_SENT] += parts[FORWARD_SENT]
    found[KEPT] = 0
    return found


def summed(passes: Totals, weights: Totals) -> Sums:
    """The sums of a plan of one microbatch (see `estimate`)."""
    return Sums(
        int(passes[:KEPT].sum() + weights[AFTER]),
        int(weights[GATHERED] - passes[FORWARD]),
        int(weights[AGAIN] + weights[CHUNKED] + weights[REDUCED] - passes[BACKWARD]),
        int(passes[KEPT] + weights[STORED]),
    )
