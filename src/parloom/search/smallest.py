"""The plan with the smallest simulated peak, whatever memory there is.

What a step needs beyond what the search counts depends on layouts, so that of plans that are
counted as small the simulator says which is. On each mesh the best of several minima is improved,
one operator after another, by what is simulated; and the search itself is asked for less, until it
finds nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

import numpy as np

from parloom.errors import LayoutError
from parloom.ir.lower import lower
from parloom.ir.plan import Decisions, Prediction
from parloom.search.auto import search
from parloom.search.domains import cost_of
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.least import NEAR, SPEED, bound_bytes, bytes_first, problems
from parloom.search.on_mesh import ALIKE, Proposal
from parloom.search.policies import limits
from parloom.search.polish import Candidate, decisions, least_bytes, polish, uniform
from parloom.search.prices import KEPT
from parloom.search.question import Question, Wanted

# Operators of plans that are simulated for each mesh, so that a large model has few plans; the
# fewest plans and the most on a mesh, and the meshes on which single operators are changed.
OPERATORS, FEWEST, MOST, MESHES = 400, 3, 60, 2
# How often the search is asked for less.
ASKED = 3


@dataclass(frozen=True, slots=True)
class Smallest:
    """A plan; no plan on a mesh of one or two axes holds less than `bound_bytes`."""

    plan: Proposal
    bound_bytes: int


@dataclass(frozen=True)
class _Small:
    """A candidate on a mesh, with its plan."""

    problem: LayoutProblem
    candidate: Candidate
    plan: Proposal

    @property
    def peak_bytes(self) -> int:
        return self.plan.prediction.peak_bytes

    @property
    def rank(self) -> tuple[float, float]:
        """The smallest first, of equals the fastest."""
        return self.peak_bytes, self.plan.prediction.step_s


class _Simulated:
    """Candidates as plans, each simulated once."""

    def __init__(self, question: Question, base: Decisions) -> None:
        self.question, self.base = question, base
        self.known: dict[Decisions, Prediction] = {}

    def __call__(self, problem: LayoutProblem, candidate: Candidate) -> _Small | None:
        plan = decisions(problem, candidate, self.base)
        if plan not in self.known:
            program = problem.program
            try:
                pcg = lower(program.graph, plan, factored=program.factored)
            except LayoutError:
                return None
            self.known[plan] = self.question.predict(pcg, plan)
        return _Small(problem, candidate, Proposal(plan, self.known[plan], candidate.sums.step_ps))


def smallest_plan(question: Question, base: Decisions) -> Smallest | None:
    """The smallest plan that is found, by its simulated peak; None where pins leave no plan.

    It does not depend on the limit of `question`.
    """
    simulated = _Simulated(question, base)
    count = max(1, len(list(question.graph.flat())))
    most = min(MOST, max(FEWEST, OPERATORS // count))
    starts: list[_Small] = []
    bounds: list[int] = []
    for problem in problems(question, base):
        start = _start(problem, simulated, most)
        if start is not None:
            starts.append(start)
            bounds.append(bound_bytes(problem))
    if not starts:
        return None
    starts.sort(key=lambda small: small.rank)
    better = [_improved(small, simulated, most) for small in starts[:MESHES]]
    best = min((small.plan for small in better), key=_peak)
    return Smallest(_searched(question, base, best), min(bounds))


def _searched(question: Question, base: Decisions, best: Proposal) -> Proposal:
    """Something smaller than `best` that the search finds where it is asked for less, or `best`."""
    for _ in range(ASKED):
        limit = best.prediction.peak_bytes - 1
        less = replace(question, limit_bytes=limit, wanted=Wanted.PRICE, budget=None)
        found = search(less, base, lambda text: None)
        if found.interrupted:
            raise KeyboardInterrupt
        others = [*found.proposals, *([found.smallest] if found.smallest else [])]
        smaller = min(others, key=_peak, default=best)
        if smaller.prediction.peak_bytes > limit:
            break
        best = smaller
    return best


def _peak(plan: Proposal) -> tuple[int, float]:
    return plan.prediction.peak_bytes, plan.prediction.step_s


def _start(problem: LayoutProblem, simulated: _Simulated, most: int) -> _Small | None:
    """The smallest of the minima under several prices of bytes, stored and recomputed in the ways
    that weights and calls can share; at most so many.
    """
    found: list[_Small] = []
    for candidate in islice(_minima(problem), most):
        small = simulated(problem, candidate)
        found += [small] if small is not None else []
    return min(found, key=lambda small: small.rank, default=None)


def _minima(problem: LayoutProblem) -> Iterator[Candidate]:
    for multipliers in _prices(problem):
        solution = problem.solve(multipliers, NEAR)
        if solution.values:
            yield from _stored_alike(problem, problem.layouts(solution.values))


def _prices(problem: LayoutProblem) -> Iterator[Multipliers]:
    """Bytes alone; what is kept alone; and time, with which fewer bytes lie beside each other."""
    plain = bytes_first(problem, SPEED)
    yield plain
    kept = np.full_like(plain.passes, SPEED)
    kept[KEPT] = 1.0
    yield Multipliers(kept, np.full_like(plain.weights, SPEED) * (plain.weights > 0), plain.counts)
    yield bytes_first(problem, 1.0)


def _stored_alike(problem: LayoutProblem, values: Sequence[int]) -> Iterator[Candidate]:
    """Given layouts with the storage and recomputation that hold least, as counted; with all
    weights stored alike; with as few and as many calls recomputed as may.
    """
    least = polish(problem, values, least_bytes(problem, values) * (1 + 1e-6))
    if least is None:
        return
    blocks = problem.program.blocks
    ends = list(zip(*(limits(problem.program, block) for block in blocks), strict=True))
    for counts in dict.fromkeys([least.recomputed, *reversed(ends)]):
        some = replace(least, recomputed=counts)
        yield some
        yield from (uniform(problem, some, chunked) for chunked in ALIKE[:2])


def _improved(small: _Small, simulated: _Simulated, most: int) -> _Small:
    """One operator after another laid out otherwise, as long as that makes the peak smaller."""
    problem = small.problem
    factors = problem.factors(bytes_first(problem, SPEED))
    policies = [0] * (
        max((v for f in factors for v in f.scope), default=-1) + 1 - len(problem.sizes)
    )
    left, better = most, True
    while better and left > 0:
        better = False
        for variable in _largest_first(problem, small.candidate.values):
            for value in range(problem.sizes[variable]):
                values = list(small.candidate.values)
                if left <= 0 or values[variable] == value:
                    continue
                values[variable] = value
                if cost_of(factors, [*values, *policies]) == inf:
                    continue
                other = _changed(problem, values, small, simulated)
                if other is not None:
                    left -= 1
                    if other.peak_bytes < small.peak_bytes:
                        small, better = other, True
    return small


def _changed(
    problem: LayoutProblem, values: Sequence[int], small: _Small, simulated: _Simulated
) -> _Small | None:
    """Other layouts stored such that they hold least; None where that is too much anyway."""
    least = least_bytes(problem, values)
    if least > small.peak_bytes:
        return None
    candidate = polish(problem, values, least * (1 + 1e-6))
    return None if candidate is None else simulated(problem, candidate)


def _largest_first(problem: LayoutProblem, values: Sequence[int]) -> list[int]:
    """The variables, operators whose operands and results take most on a rank first."""

    def size(variable: int) -> int:
        if variable >= len(problem.menus):
            return 0
        operator = problem.program.operators[variable]
        choice = problem.menus[variable].choices[values[variable]]
        specs = (*operator.operands, *(v.spec for v in operator.node.results))
        states = (*choice.operands, *choice.results)
        return sum(map(problem.prices.held_bytes, specs, states))

    return sorted(range(len(problem.sizes)), key=lambda variable: -size(variable))
