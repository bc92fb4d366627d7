"""Local search on the simulator: what its estimate does not see shows when a plan is played.

Around the fastest plan of a context lie all weights stored alike, one kind of weight stored
otherwise, and the best plans with an option that the fastest does not have. Those with the lowest
estimates are simulated, as many as a model of its size bears.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from parloom.search.compose import Candidate, Stored
from parloom.search.contexts import ContextSearch, Judged, Seen
from parloom.search.prices import PARTS
from parloom.search.step_rows import row_prices, step_sums

# Operators of plans that are simulated in all, and the fewest and the most plans.
OPERATORS, FEWEST, MOST = 30_000, 4, 160
# Options that are forced into a plan, and how much they may cost above the bound.
FORCED, BEYOND = 48, 0.1
# Estimates that are this share above the best are not simulated.
WORSE = 0.1
ROUNDS = 4
# Weight, gradient and optimizer state in chunks, of all weights alike: ZeRO 3, 2, 1 and 0.
ALIKE = ((True, True, True), (False, True, True), (False, False, True), (False, False, False))


def improved(context: ContextSearch, seen: Seen) -> None:
    """Simulate what is around the fastest plan of `context` until nothing there is faster."""
    operators = sum(1 for _ in context.question.graph.flat())
    left = max(FEWEST, min(MOST, OPERATORS // max(1, operators)))
    tried: set[tuple[object, ...]] = set()
    for _ in range(ROUNDS):
        best = min(context.fitting(), key=lambda found: found.step_ps)
        around = [c for c in _around(context, best, left) if _key(c) not in tried]
        around.sort(key=lambda candidate: candidate.sums.step_ps)
        limit = best.candidate.sums.step_ps * (1 + WORSE)
        for candidate in around:
            if left <= 0 or candidate.sums.step_ps > limit:
                break
            tried.add(_key(candidate))
            seen.add(context.num_microbatches, context.judge(candidate))
            left -= 1
        if left <= 0 or min(f.step_ps for f in context.fitting()) >= best.step_ps:
            return


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.values, candidate.levels, candidate.variants


def _around(context: ContextSearch, best: Judged, count: int) -> Iterator[Candidate]:
    yield from _stored_otherwise(context, best.candidate)
    yield from islice(_forced(context, best), min(FORCED, count))


def _forced(context: ContextSearch, best: Judged) -> Iterator[Candidate]:
    """The best plans with one option that `best` does not have, the cheapest first."""
    columns, composer = context.columns, context.composer
    prices = row_prices(context.duals, context.num_microbatches)
    columns.minimum(prices, 1e-4)
    bound = columns.bound_ps(context.limit)
    layout = composer.layout_of(best.candidate.values)
    options = [
        (float(cost), variable, value)
        for variable, reduced in enumerate(columns.pruning.reduced[: columns.size])
        for value, cost in enumerate(reduced)
        if cost <= BEYOND * bound and composer.choice_of(variable, value) != layout[variable]
    ]
    for _, variable, value in sorted(options):
        values = columns.minimum_with(variable, value, prices)
        if values:
            candidate = composer.compose([values], context.duals, context.limit)
            if candidate is not None:
                yield candidate


def _stored_otherwise(context: ContextSearch, candidate: Candidate) -> Iterator[Candidate]:
    """`candidate` with all weights stored alike, over as many ranks as can be, and with the weights
    of one kind stored otherwise.
    """
    size = context.mesh.size
    weights = context.layouts.program.weights
    options = [context.stored(index, candidate.values)[0] for index in range(len(weights))]
    for chunked in ALIKE:
        found = []
        for weight, levels in zip(weights, options, strict=True):
            same = (
                level
                for level in levels
                if (level.weight, level.gradient, level.optimizer) == chunked
            )
            level = max(same, key=lambda level: size(level.axes), default=levels[0])
            found.append(((level, weight.count),))
        yield _restored(context, candidate, tuple(found))
    for index, (weight, levels) in enumerate(zip(weights, options, strict=True)):
        for level in levels:
            changed = ((level, weight.count),)
            if changed != candidate.levels[index]:
                others = candidate.levels
                yield _restored(
                    context, candidate, (*others[:index], changed, *others[index + 1 :])
                )


def _restored(
    context: ContextSearch, candidate: Candidate, levels: tuple[Stored, ...]
) -> Candidate:
    """`candidate` with other storage."""
    rows = candidate.rows.copy()
    rows[PARTS:] = 0
    for index, chosen in enumerate(levels):
        options, parts = context.stored(index, candidate.values)
        for level, count in chosen:
            rows[PARTS:] += count * parts[options.index(level)]
    return replace(
        candidate, levels=levels, rows=rows, sums=step_sums(rows, context.num_microbatches)
    )
