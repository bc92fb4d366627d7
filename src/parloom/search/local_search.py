"""Local search on the simulator: what its estimate does not see shows when a plan is played.

Around a plan lie all weights stored alike, one kind of weight stored otherwise, and the best plans
of its form with one more option that is forced. A neighbor is expected to take as long as the plan
beside it was simulated to take, and the difference of their estimates; those that are expected to
be the best are simulated first, whichever context they are of.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice, product

import numpy as np

from parloom.search.compose import Candidate, Stored
from parloom.search.contexts import ContextSearch, EstimateErrors, SimulatedCandidate
from parloom.search.decide import form_of
from parloom.search.model import Floats
from parloom.search.prices import PARTS
from parloom.search.solve.minimum import Part
from parloom.search.step_rows import (
    COMPUTE_AND_SENT,
    StepSums,
    all_step_sums,
    row_prices,
    step_sums,
)
from parloom.search.storage import AFTER, GATHERED, Level

# Operators of plans that are simulated in all, and the fewest and the most plans.
OPERATORS, FEWEST, MOST = 60_000, 8, 320
# So many plans of one kind in a context, one after the other, that are no better end it; of small
# graphs this part of all.
PATIENCE, PART = 40, 3
# The share by which a plan must be better to be counted as such.
BETTER = 3e-4
# Rows of times.
TIMES = [*COMPUTE_AND_SENT, *range(PARTS + GATHERED, PARTS + AFTER + 1)]
# Options that are forced around a plan, and how much they may cost above the bound.
FORCED, BEYOND = 48, 0.1
# How near to the bound the minimum is, beside which options cost more.
NEAR = 1e-4
# Neighbors that are expected to be this share worse than the best are not simulated, unless plans
# were seen to need so much less than their estimates.
WORSE = 0.05
# ZeRO levels that all weights have alike.
ALIKE = (3, 2, 1, 0)
Forced = tuple[tuple[int, int], ...]
"""Variables and the options that they must have."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Which plan is the best: by what is estimated of a candidate, and by what was simulated."""

    estimated: Callable[[StepSums], float]
    simulated: Callable[[SimulatedCandidate], tuple[float, float]]


FASTEST = Aim(lambda sums: sums.step_ps, lambda found: (found.step_ps, found.peak_bytes))
SMALLEST = Aim(lambda sums: sums.held_bytes, lambda found: (found.peak_bytes, found.step_ps))


def improved(
    contexts: Sequence[ContextSearch],
    seen: EstimateErrors,
    aim: Aim = FASTEST,
    patience: int = PATIENCE,
    operators: int = OPERATORS,
) -> None:
    """Simulate what is around the best plan of each context and around what is better, until
    nothing there is, or plans with so many operators in all were simulated.
    """
    if contexts:
        _LocalSearch(contexts, seen, aim, patience, operators).run()


@dataclass(frozen=True, slots=True, order=True)
class _Neighbor:
    """A plan that is `expected` to be so good; `number` orders equals. Without a candidate it is
    the best one with the options `forced`, beside `parent`.
    """

    expected: float
    number: int
    context: ContextSearch = field(compare=False)
    parent: SimulatedCandidate = field(compare=False)
    forced: Forced = field(compare=False)
    candidate: Candidate | None = field(compare=False)


@dataclass
class _Queue:
    """Neighbors of one kind in one context, and how many more that are no better it may have."""

    patience: int
    neighbors: list[_Neighbor] = field(default_factory=list)


class _Parts:
    """The parts of all solutions that forms are, and in which plans are."""

    def __init__(self) -> None:
        self.of_forms: dict[tuple[int, tuple[str, ...]], Part] = {}
        self.of_plans: dict[tuple[int, tuple[int, ...]], Part] = {}

    def of(self, context: ContextSearch, candidate: Candidate) -> Part | None:
        """The solutions of the form of a candidate; None where there is no other form."""
        parts, plan = context.layouts.parts, (id(context), candidate.values)
        if parts is not None and plan not in self.of_plans:
            form = id(context), form_of(context.layouts, candidate.values).rewrites
            if form not in self.of_forms:
                self.of_forms[form] = context.columns.part(parts.of_form(candidate.values))
            self.of_plans[plan] = self.of_forms[form]
        return self.of_plans.get(plan)


class _LocalSearch:
    def __init__(
        self,
        contexts: Sequence[ContextSearch],
        seen: EstimateErrors,
        aim: Aim,
        patience: int,
        operators: int,
    ) -> None:
        self.seen, self.aim = seen, aim
        each = max(1, sum(1 for _ in contexts[0].request.graph.flat()))
        self.left = max(FEWEST, min(MOST, operators // each))
        # Of a large graph, simulations cost more than what they would find here.
        self.small = OPERATORS // each >= PATIENCE * PART
        if self.small and patience == PATIENCE:
            patience = max(patience, self.left // PART)
        if self.small:  # plans of a form say little of those of another one
            self.left *= len({context.layouts.program.rewrites for context in contexts})
        self.patience = patience
        # Storage and layouts take turns: their estimates are off in different ways.
        self.stored = {id(context): _Queue(patience) for context in contexts}
        self.laid_out = {id(context): _Queue(patience) for context in contexts}
        self.known: set[tuple[object, ...]] = set()
        self.solved: dict[tuple[int, int, Forced], tuple[int, ...]] = {}
        self.parts = _Parts()
        self.composed: dict[tuple[int, tuple[int, ...]], Candidate | None] = {}
        self.numbers = count()
        starts = [(min(c.fitting(), key=aim.simulated), c) for c in contexts]
        self.own = {id(context): aim.simulated(found) for found, context in starts}
        for found, context in starts:
            self._expand(context, found, ())

    def run(self) -> None:
        queues = [queue for key in self.stored for queue in (self.stored[key], self.laid_out[key])]
        while self.left > 0 and any(q.neighbors and q.patience > 0 for q in queues):
            for queue in queues:
                if queue.neighbors and queue.patience > 0 and self.left > 0:
                    self._look(queue)

    def _look(self, queue: _Queue) -> None:
        """Simulate the next neighbor of a queue."""
        neighbor = heappop(queue.neighbors)
        if not self._promises(neighbor):
            queue.neighbors.clear()
            return
        context, key = neighbor.context, id(neighbor.context)
        if neighbor.candidate is None:
            self._solve(neighbor)
            return
        found = context.judge(neighbor.candidate)
        self.seen.add(context.num_microbatches, found)
        self.left, queue.patience = self.left - 1, queue.patience - 1
        fits = found.peak_bytes <= context.request.limit_bytes
        if fits and self.aim.simulated(found) < self.own[key]:
            if self.aim.simulated(found)[0] < self.own[key][0] * (1 - BETTER):
                self.stored[key].patience = self.laid_out[key].patience = self.patience
            self.own[key] = self.aim.simulated(found)
            self._expand(context, found, neighbor.forced)

    def _promises(self, neighbor: _Neighbor) -> bool:
        """Whether a neighbor is near the best, or its estimate is."""
        best = min(self.own.values())[0]
        if neighbor.expected <= best * (1 + WORSE):
            return True
        known, parent = self.aim.simulated(neighbor.parent)[0], neighbor.parent.candidate
        estimate = neighbor.expected - known + self.aim.estimated(parent.sums)
        return self.aim is FASTEST and self.seen.promises(estimate, best)

    def _expand(self, context: ContextSearch, found: SimulatedCandidate, forced: Forced) -> None:
        """Add what is around a plan to what may be simulated."""
        known = self.aim.simulated(found)[0]
        stored = self.stored[id(context)]
        if not forced:  # estimates of these are the least exact: they come first
            for candidate in _stored_alike(context, found.candidate):
                self._add(stored, context, found, forced, candidate, known)
        otherwise = _stored_otherwise(context, found.candidate, self.aim)
        matter = (c for c in otherwise if self._matters(context, c, found.candidate))
        for candidate in islice(matter, self.left):
            self._add(stored, context, found, forced, candidate)
        laid_out = self.laid_out[id(context)].neighbors
        part = self.parts.of(context, found.candidate)
        for more, option in _options(context, found.candidate, forced, part):
            expected = known + more * self._scale(context)
            number = next(self.numbers)
            heappush(laid_out, _Neighbor(expected, number, context, found, (*forced, option), None))

    def _scale(self, context: ContextSearch) -> float:
        """What a picosecond of the Lagrangian is in the unit of the aim."""
        return 1.0 if self.aim is FASTEST else 1.0 / max(context.duals.byte_ps, 1.0)

    def _solve(self, neighbor: _Neighbor) -> None:
        """Make the candidate of a neighbor, and the same with its parent's storage."""
        context, parent = neighbor.context, neighbor.parent
        composed = self._composed(context, parent.candidate, neighbor.forced)
        if composed is not None:
            queue = self.laid_out[id(context)]
            self._add(queue, context, parent, neighbor.forced, composed)
            if not context.duals.byte_ps:
                stored = _stored_as(context, composed, parent.candidate.levels)
                self._add(queue, context, parent, neighbor.forced, stored)

    def _composed(
        self, context: ContextSearch, parent: Candidate, forced: Forced
    ) -> Candidate | None:
        """The best candidate with some options, which may be the same as with others."""
        prices = row_prices(context.duals, context.passes)
        part = self.parts.of(context, parent)
        key = id(context), id(part), tuple(sorted(forced))
        if key not in self.solved:
            self.solved[key] = context.columns.minimum_with(dict(forced), prices, part)
        values = self.solved[key]
        layout = id(context), values
        if layout not in self.composed:
            self.composed[layout] = context.compose([values]) if values else None
        return self.composed[layout]

    def _add(
        self,
        queue: _Queue,
        context: ContextSearch,
        parent: SimulatedCandidate,
        forced: Forced,
        candidate: Candidate,
        at_most: float | None = None,
    ) -> None:
        key = id(context), candidate.values, candidate.levels, candidate.variants
        if key not in self.known and self._matters(context, candidate, parent.candidate):
            self.known.add(key)
            more = self.aim.estimated(candidate.sums)
            more -= self.aim.estimated(parent.candidate.sums)
            expected = self.aim.simulated(parent)[0] + more
            if at_most is not None:
                expected = min(expected, at_most)
            number = next(self.numbers)
            neighbor = _Neighbor(expected, number, context, parent, forced, candidate)
            heappush(queue.neighbors, neighbor)

    def _matters(self, context: ContextSearch, candidate: Candidate, parent: Candidate) -> bool:
        """Whether a candidate computes and sends other than its parent to speak of; any of a large
        graph.
        """
        if not self.small or self.aim is not FASTEST:
            return True
        changed = np.abs(candidate.rows - parent.rows)[TIMES].sum() * context.num_microbatches
        return float(changed) >= BETTER * parent.sums.step_ps


def _options(
    context: ContextSearch, candidate: Candidate, forced: Forced, part: Part | None
) -> Iterator[tuple[float, tuple[int, int]]]:
    """Options that `candidate` does not have, with what they cost at least beside the minimum (of
    a part, if one is given), the cheapest first.
    """
    composer = context.composer
    bound, least = context.columns.least(context.duals, NEAR, part)
    layout = composer.layout_of(candidate.values)
    fixed = {variable for variable, _ in forced}
    found = [
        (float(cost - bound), (variable, value))
        for variable, costs in enumerate(least)
        for value, cost in enumerate(costs)
        if cost - bound <= BEYOND * bound
        and variable not in fixed
        and composer.choice_of(variable, value) != layout[variable]
    ]
    yield from sorted(found)[:FORCED]


def _stored_alike(context: ContextSearch, candidate: Candidate) -> Iterator[Candidate]:
    """`candidate` with all weights stored alike, over the same axes as far as these replicate
    them, and sent alike.
    """
    weights = context.layouts.program.weights
    options = [list(context.stored(index, candidate.values)) for index in range(len(weights))]
    sets = dict.fromkeys(level.axes for levels in options for level in levels if level.axes)
    sends = any(level.sends for levels in options for level in levels)
    for chunked in ALIKE:
        for axes, sent in product(sets if chunked else [()], (-1, 1) if sends else (-1,)):
            found = []
            for weight, levels in zip(weights, options, strict=True):
                same = (
                    level
                    for level in levels
                    if level.zero == chunked and set(level.axes) <= set(axes)
                )
                level = max(same, key=partial(_likeness, sent), default=levels[0])
                found.append(((level, weight.count),))
            yield _restored(context, candidate, tuple(found))


def _likeness(sent: int, level: Level) -> tuple[int, int]:
    """How many axes it is over, and then how much is sent in another data type, or how little."""
    return len(level.axes), sent * (bool(level.weight_sent) + bool(level.gradient_sent))


def _stored_otherwise(
    context: ContextSearch, candidate: Candidate, aim: Aim
) -> Iterator[Candidate]:
    """`candidate` with the weights of one kind stored otherwise, the best estimate first."""
    changes: list[tuple[int, Stored]] = []
    rows: list[Floats] = []
    for index, weight in enumerate(context.layouts.program.weights):
        own = candidate.levels[index]
        others = candidate.rows[PARTS:] - context.stored_parts(index, candidate.values, own)
        for level, part in context.stored(index, candidate.values).items():
            if own != ((level, weight.count),):
                changes.append((index, ((level, weight.count),)))
                rows.append(others + weight.count * part)
    passes = np.broadcast_to(candidate.rows[:PARTS], (len(rows), PARTS))
    every = np.hstack((passes, np.array(rows).reshape(len(rows), len(candidate.rows) - PARTS)))
    sums = all_step_sums(every, context.passes)
    for number in sorted(range(len(changes)), key=lambda i: aim.estimated(sums[i])):
        index, changed = changes[number]
        stored = (*candidate.levels[:index], changed, *candidate.levels[index + 1 :])
        yield replace(candidate, levels=stored, rows=every[number], sums=sums[number])


def _stored_as(context: ContextSearch, candidate: Candidate, levels: Sequence[Stored]) -> Candidate:
    """`candidate` with weights stored as `levels` say, where its layouts allow that."""
    found = []
    for index, (own, other) in enumerate(zip(candidate.levels, levels, strict=True)):
        options = context.stored(index, candidate.values)
        found.append(other if all(level in options for level, _ in other) else own)
    return _restored(context, candidate, tuple(found))


def _restored(
    context: ContextSearch, candidate: Candidate, stored: tuple[Stored, ...]
) -> Candidate:
    """`candidate` with other storage."""
    each = (context.stored_parts(i, candidate.values, some) for i, some in enumerate(stored))
    parts = np.add.reduce(list(each))
    rows = np.concatenate((candidate.rows[:PARTS], parts))
    sums = step_sums(rows, context.passes)
    return replace(candidate, levels=stored, rows=rows, sums=sums)
