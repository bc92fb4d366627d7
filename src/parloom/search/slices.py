"""What a part of a graph costs on some devices: time against memory.

A pipeline has a stage for each part, on a part of the cluster (`ir.mesh.part_of`), and holds the
activations of several microbatches at once. How many, and how much memory is left for them, it
finds out last; so the answer is a front, from the least memory to the fastest step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.search.candidates import base_of
from parloom.search.closing import TOLERANCE, close
from parloom.search.estimate import Estimate
from parloom.search.layouts import LayoutProblem, Totals
from parloom.search.least import problems, smallest
from parloom.search.master import MeshSearch
from parloom.search.policies import recomputed
from parloom.search.polish import Candidate, decisions
from parloom.search.prices import BACKWARD, BACKWARD_SENT, FORWARD, FORWARD_SENT, KEPT
from parloom.search.question import Question
from parloom.search.storage import AFTER, ALONE, MOVING, STORED, WEIGHT_PARTS
from parloom.search.sums import Worth

# Between points that differ by less, in memory or in time, no others are sought.
CLOSE = 0.02
# How many limits on memory are tried.
LIMITS = 10


@dataclass(frozen=True)
class Point:
    """A way to run a part on a mesh, with what it counts in ps (as `estimate` does) and bytes.

    No plan that holds at most `held_bytes` has a step of one microbatch below `bound_ps`, on any
    of the meshes that were searched.
    """

    problem: LayoutProblem
    candidate: Candidate
    bound_ps: float

    @property
    def mesh(self) -> Mesh:
        """The logical mesh that its layouts are on."""
        return self.problem.mesh

    @cached_property
    def totals(self) -> tuple[Totals, Totals]:
        """What its passes cost by the parts of `prices`, and its weights by those of `storage`."""
        program, candidate = self.problem.program, self.candidate
        passes = self.problem.passes(candidate.values)
        for block, count in zip(program.blocks, candidate.recomputed, strict=True):
            once = self.problem.passes_of(block, candidate.values)
            passes += count * (recomputed(once) - once)
        weights = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        for index, chosen in enumerate(candidate.levels):
            stored = self.problem.stored(index, candidate.values)
            levels, prices = self.problem.storage.options(stored)
            for level, count in chosen:
                weights += count * prices[levels.index(level)]
        return passes, weights

    def step_ps(self, num_microbatches: int = 1) -> int:
        """A step of so many microbatches, one after the other."""
        return Estimate(*self.totals, num_microbatches).step_ps

    @property
    def forward_ps(self) -> int:
        """The forward pass of one microbatch, and all that hides behind nothing of what weights
        send in every microbatch.
        """
        passes, weights = self.totals
        gathered, _, _ = Estimate(passes, weights).exposed_ps
        return int(passes[FORWARD] + passes[FORWARD_SENT] + weights[ALONE]) + gathered

    @property
    def backward_ps(self) -> int:
        """The backward pass of one microbatch that is not the last."""
        passes, weights = self.totals
        _, between, _ = Estimate(passes, weights).exposed_ps
        return int(passes[BACKWARD] + passes[BACKWARD_SENT]) + between

    @property
    def once_ps(self) -> int:
        """What comes once a step: what of reductions does not hide behind the last backward pass,
        the update, what is gathered after it.
        """
        _, between, last = Estimate(*self.totals).exposed_ps
        return last - between + int(self.totals[1][AFTER])

    @property
    def stored_bytes(self) -> int:
        """Weights, gradients and optimizer states, and what is there of them as they move."""
        return int(self.totals[1][[STORED, MOVING]].sum())

    @property
    def kept_bytes(self) -> int:
        """What every microbatch in flight keeps for its backward pass."""
        return int(self.totals[0][KEPT]) // self.problem.prices.in_flight

    @property
    def held_bytes(self) -> int:
        """What is stored, and kept of all microbatches in flight."""
        return self.candidate.sums.held_bytes

    def decisions(self, base: Decisions) -> Decisions:
        """As a plan of the whole graph says it, for the operators and weights of the part."""
        return decisions(self.problem, self.candidate, base)


def frontier(
    question: Question, part: range | None = None, *, in_flight: int = 1
) -> tuple[Point, ...]:
    """Plans of some items of main's body (see `program_of`) on the question's cluster within its
    limit on memory: each takes less memory than the next, and more time.

    The limit is on what the search counts, and so are `in_flight` microbatches. One step of one
    microbatch is what is made short.
    """
    return front(
        tuple(problems(question, base_of(question), part, in_flight)), question.limit_bytes
    )


def front(meshes: Sequence[LayoutProblem], limit_bytes: float) -> tuple[Point, ...]:
    """As `frontier`, of the same program on several meshes."""
    search = _Search(meshes)
    fastest = search.under(limit_bytes)
    if fastest is None:
        return ()
    least = search.under(search.least_bytes)
    assert least is not None, "what holds least is known"
    open_ = [(least, fastest)]
    for _ in range(LIMITS - 2):
        open_ = [pair for pair in open_ if not _close(*pair)]
        if not open_:
            break
        low, high = max(open_, key=_area)
        open_.remove((low, high))
        found = search.under((low.limit + high.held) / 2)
        assert found is not None, "what holds least is known"
        open_ += [(low, found), (found, high)]
    return tuple(search.points())


@dataclass(frozen=True)
class _Found:
    """The best that was found under a limit."""

    limit: float
    problem: LayoutProblem
    candidate: Candidate

    @property
    def held(self) -> int:
        return self.candidate.sums.held_bytes

    @property
    def step(self) -> int:
        return self.candidate.sums.step_ps


def _close(low: _Found, high: _Found) -> bool:
    return low.step <= high.step * (1 + CLOSE) or high.held <= low.limit * (1 + CLOSE)


def _area(pair: tuple[_Found, _Found]) -> float:
    """What may still be gained between two points, in memory and in time."""
    low, high = pair
    return (high.held - low.limit) / high.held * (low.step - high.step) / low.step


class _Search:
    """Searches all meshes under one limit after another."""

    def __init__(self, meshes: Sequence[LayoutProblem]) -> None:
        self.meshes = tuple(meshes)
        # Per mesh the bounds that were proved, with the limits that they hold under.
        self.bounds: list[list[tuple[float, float]]] = [[] for _ in self.meshes]
        self.worths: list[Worth | None] = [None] * len(self.meshes)
        self.limits: list[float] = []
        smallest_of = ((problem, smallest(problem)) for problem in self.meshes)
        self.known = [(p, candidate) for p, candidate in smallest_of if candidate is not None]

    @property
    def least_bytes(self) -> int:
        """What the smallest plan holds."""
        return min(candidate.sums.held_bytes for _, candidate in self.known)

    def under(self, limit: float) -> _Found | None:
        """The fastest plan that holds at most `limit`."""
        self.limits.append(limit)
        for index, problem in enumerate(self.meshes):
            best = self._best(limit)
            best_ps = inf if best is None else best.step
            if self._bound(index, limit) >= best_ps * (1 - TOLERANCE):
                continue
            search = MeshSearch(problem, limit, worth=self.worths[index])
            found = search.run()
            best_ps = min(best_ps, search.best_ps)
            if found.bound_ps < best_ps * (1 - TOLERANCE) and best_ps < inf:
                found = close(search, best_ps)
            self.worths[index] = search.worth
            self.bounds[index].append((limit, found.bound_ps))
            self.known += [(problem, candidate) for candidate in found.candidates]
        return self._best(limit)

    def points(self) -> Iterator[Point]:
        """The best under each limit, where more memory makes it faster."""
        step: float = inf
        for limit in sorted(self.limits):
            found = self._best(limit)
            if found is not None and found.step < step:
                step = found.step
                bound = min(self._bound(i, found.held) for i in range(len(self.meshes)))
                yield Point(found.problem, found.candidate, bound)

    def _best(self, limit: float) -> _Found | None:
        fits = [(p, c) for p, c in self.known if c.sums.held_bytes <= limit]
        if not fits:
            return None
        problem, candidate = min(fits, key=lambda f: (f[1].sums.step_ps, f[1].sums.held_bytes))
        return _Found(limit, problem, candidate)

    def _bound(self, index: int, limit: float) -> float:
        """What no plan on a mesh undercuts that holds at most `limit`, or more."""
        return max((bound for most, bound in self.bounds[index] if most >= limit), default=0.0)
