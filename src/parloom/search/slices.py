"""What a part of a graph costs on some devices: time against memory.

A pipeline has a stage for each part, on a part of the cluster (`ir.mesh.part_of`), and holds the
activations of several microbatches at once. How many, and how much memory is left for them, it
finds out last; so the answer is a front, from the least memory to the fastest step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from parloom.cost.walk import Walker
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.candidates import base_of
from parloom.search.closing import TOLERANCE, close
from parloom.search.estimate import Estimate
from parloom.search.layouts import LayoutProblem
from parloom.search.least import problems, smallest
from parloom.search.master import Found, MeshSearch
from parloom.search.polish import Candidate, decisions
from parloom.search.prices import BACKWARD, BACKWARD_SENT, FORWARD, FORWARD_SENT, KEPT
from parloom.search.question import Question
from parloom.search.storage import (
    AFTER,
    ALONE,
    MOVING,
    REDUCED,
    STORED,
    UPDATED,
    WEIGHT_PARTS,
    Level,
    StoragePrices,
    Stored,
    WeightPrice,
)
from parloom.search.sums import Worth

# Between points that differ by less, in memory or in time, no others are sought.
CLOSE = 0.02
# How many limits on memory are tried.
LIMITS = 10


class PerMicrobatch(StoragePrices):
    """Of what weights cost once a step, each microbatch has a share.

    Reductions may then hide behind the backward passes of all, not of the last alone: what the
    search adds up is at most what a microbatch's share of a step takes.
    """

    def __init__(self, walker: Walker, decisions: Decisions, optimizer: Optimizer) -> None:
        super().__init__(walker, decisions, optimizer)
        self.shares: dict[Stored, tuple[tuple[Level, ...], WeightPrice]] = {}

    def options(self, weight: Stored) -> tuple[tuple[Level, ...], WeightPrice]:
        """All levels that may be and their prices: [level, part]."""
        if weight not in self.shares:
            levels, prices = super().options(weight)
            prices = prices.copy()
            prices[:, [REDUCED, AFTER, UPDATED]] //= self.decisions.num_microbatches
            self.shares[weight] = levels, prices
        return self.shares[weight]


@dataclass(frozen=True)
class Point:
    """A way to run a part on a mesh, with what it counts in ps (as `estimate` does) and bytes.

    No plan that holds at most `held_bytes` has a step below `bound_ps`, on any of the meshes that
    were searched.
    """

    problem: LayoutProblem
    candidate: Candidate
    bound_ps: float = 0.0

    @property
    def mesh(self) -> Mesh:
        """The logical mesh that its layouts are on."""
        return self.problem.mesh

    @cached_property
    def estimate(self) -> Estimate:
        """What its passes and its weights cost, part by part."""
        problem, candidate = self.problem, self.candidate
        passes = problem.passes(candidate.values, candidate.recomputed)
        weights = np.zeros(WEIGHT_PARTS, dtype=np.int64)
        for index, chosen in enumerate(candidate.levels):
            stored = problem.stored(index, candidate.values)
            for level, count in chosen:
                weights += count * problem.storage.price(stored, level)
        return Estimate(passes, weights, problem.storage.decisions.num_microbatches)

    @cached_property
    def step_ps(self) -> int:
        """A step of all microbatches, one after the other."""
        return self.estimate.step_ps

    @property
    def forward_ps(self) -> int:
        """The forward pass of one microbatch, and all that hides behind nothing of what weights
        send in every microbatch.
        """
        passes, (gathered, _, _) = self.estimate.passes, self.estimate.exposed_ps
        alone = self.estimate.weights[ALONE]
        return int(passes[FORWARD] + passes[FORWARD_SENT] + alone) + gathered

    @property
    def backward_ps(self) -> int:
        """The backward pass of one microbatch that is not the last."""
        passes, (_, between, _) = self.estimate.passes, self.estimate.exposed_ps
        return int(passes[BACKWARD] + passes[BACKWARD_SENT]) + between

    @property
    def once_ps(self) -> int:
        """What comes once a step: what of reductions does not hide behind the last backward pass,
        the update, what is gathered after it.
        """
        _, between, last = self.estimate.exposed_ps
        return last - between + int(self.estimate.weights[AFTER])

    @property
    def stored_bytes(self) -> int:
        """Weights, gradients and optimizer states, and what is there of them as they move."""
        return int(self.estimate.weights[[STORED, MOVING]].sum())

    @property
    def kept_bytes(self) -> int:
        """What every microbatch in flight keeps for its backward pass."""
        return int(self.estimate.passes[KEPT]) // self.problem.prices.in_flight

    @property
    def held_bytes(self) -> int:
        """What is stored, and kept of all microbatches in flight."""
        return self.candidate.sums.held_bytes

    def decisions(self, base: Decisions) -> Decisions:
        """As a plan of the whole graph says it, for the operators and weights of the part."""
        return decisions(self.problem, self.candidate, base)


def frontier(
    question: Question,
    part: range | None = None,
    *,
    num_microbatches: int = 1,
    in_flight: int = 1,
) -> tuple[Point, ...]:
    """Plans of some items of main's body (see `program_of`) on the question's cluster within its
    limit on memory: each takes less memory than the next, and more time.

    A step has `num_microbatches`, each as large as the graph's batch, and holds `in_flight` of them
    at once. The limit is on what the search counts.
    """
    base = replace(base_of(question), num_microbatches=num_microbatches)
    meshes = problems(question, base, part=part, in_flight=in_flight, storage=PerMicrobatch)
    return front(tuple(meshes), question.limit_bytes)


def front(meshes: Sequence[LayoutProblem], limit_bytes: float) -> tuple[Point, ...]:
    """As `frontier`, of the same program on several meshes."""
    search = _Search(meshes)
    fastest = search.under(limit_bytes)
    if fastest is None:
        return ()
    least = search.under(search.least_bytes)
    assert least is not None, "what holds least is known"
    pairs = [(least, fastest)]
    for _ in range(LIMITS - 2):
        pairs = [pair for pair in pairs if not _are_close(*pair)]
        if not pairs:
            break
        low, high = max(pairs, key=_area)
        pairs.remove((low, high))
        found = search.under((low.limit + high.point.held_bytes) / 2)
        assert found is not None, "what holds least is known"
        pairs += [(low, found), (found, high)]
    return tuple(search.points())


@dataclass(frozen=True)
class _Found:
    """The best that was found under a limit."""

    limit: float
    point: Point


def _are_close(low: _Found, high: _Found) -> bool:
    if low.point.step_ps <= high.point.step_ps * (1 + CLOSE):
        return True
    return high.point.held_bytes <= low.limit * (1 + CLOSE)


def _area(pair: tuple[_Found, _Found]) -> float:
    """What may still be gained between two points, as shares of memory and of time."""
    low, high = pair
    memory = (high.point.held_bytes - low.limit) / high.point.held_bytes
    return memory * (low.point.step_ps - high.point.step_ps) / low.point.step_ps


class _Search:
    """Searches all meshes under one limit after another."""

    def __init__(self, meshes: Sequence[LayoutProblem]) -> None:
        self.meshes = tuple(meshes)
        # Per mesh the bounds that were proved, with the limits that they hold under.
        self.bounds: list[list[tuple[float, float]]] = [[] for _ in self.meshes]
        self.worths: list[Worth | None] = [None] * len(self.meshes)
        self.limits: list[float] = []
        few = ((problem, smallest(problem)) for problem in self.meshes)
        self.known = [Point(problem, candidate) for problem, candidate in few if candidate]

    @property
    def least_bytes(self) -> int:
        """What the smallest plan holds."""
        return min(point.held_bytes for point in self.known)

    def under(self, limit: float) -> _Found | None:
        """The fastest plan that holds at most `limit`."""
        self.limits.append(limit)
        searches = [
            (index, self._run(index, limit))
            for index in range(len(self.meshes))
            if self._may_be_better(index, limit)
        ]
        for index, search in searches:
            best = self._best(limit)
            if best is not None and self._may_be_better(index, limit):
                best_ps = min(search.best_ps, best.candidate.sums.step_ps)
                self._add(index, limit, close(search, best_ps))
        best = self._best(limit)
        return None if best is None else _Found(limit, best)

    def points(self) -> Iterator[Point]:
        """The best under each limit, where more memory makes it faster."""
        step: float = inf
        for limit in sorted(self.limits):
            found = self._best(limit)
            if found is not None and found.step_ps < step:
                step = found.step_ps
                bounds = (self._bound(i, found.held_bytes) for i in range(len(self.meshes)))
                yield replace(found, bound_ps=min(bounds))

    def _may_be_better(self, index: int, limit: float) -> bool:
        """Whether a mesh may have something that is faster than the best so far."""
        best = self._best(limit)
        return best is None or self._bound(index, limit) < best.step_ps * (1 - TOLERANCE)

    def _run(self, index: int, limit: float) -> MeshSearch:
        search = MeshSearch(self.meshes[index], limit, worth=self.worths[index])
        self._add(index, limit, search.run(TOLERANCE / 2))
        self.worths[index] = search.worth
        return search

    def _add(self, index: int, limit: float, found: Found) -> None:
        problem = self.meshes[index]
        count = problem.storage.decisions.num_microbatches
        self.bounds[index].append((limit, found.bound_ps * count))
        self.known += [Point(problem, candidate) for candidate in found.candidates]

    def _best(self, limit: float) -> Point | None:
        fits = (point for point in self.known if point.held_bytes <= limit)
        return min(fits, key=lambda point: (point.step_ps, point.held_bytes), default=None)

    def _bound(self, index: int, limit: float) -> float:
        """What no plan on a mesh undercuts that holds at most `limit`, or more."""
        return max((bound for most, bound in self.bounds[index] if most >= limit), default=0.0)
