"""Storage and recomputation for given layouts, by integer program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parloom.ir.plan import ActivationDecision, Decisions
from parloom.search.layouts import LayoutProblem, Totals
from parloom.search.linear import LinearProgram, picked
from parloom.search.policies import limits, recomputing
from parloom.search.prices import BACKWARD, FORWARD, KEPT
from parloom.search.storage import (
    AFTER,
    AGAIN,
    ALONE,
    CHUNKED,
    GATHERED,
    MOVING,
    REDUCED,
    STORED,
    WEIGHT_PARTS,
    Level,
)
from parloom.search.sums import Sums, Worth, summed

MS, GB = 1e9, 1e9  # programs in milliseconds (of ps) and gigabytes are well scaled
# How far an answer may be from the best.
GAP = 1e-6
SENT_BACKWARD = (AGAIN, CHUNKED, REDUCED)


@dataclass(frozen=True)
class Candidate:
    """Layouts with storage and recomputation: how many weights of each kind have which level, and
    how many calls of each block recompute (in the order of `Program.blocks`).
    """

    values: tuple[int, ...]
    levels: tuple[tuple[tuple[Level, int], ...], ...]
    recomputed: tuple[int, ...]
    sums: Sums


@dataclass(frozen=True)
class _Choice:
    """Columns that count how often each of some options is taken, and the options' prices."""

    columns: tuple[int, ...]
    prices: Sequence[Totals]


@dataclass(frozen=True)
class _Choices:
    """Storage and recomputation of given layouts as a program; its last rows are those of what is
    gathered, reduced and held. `base` is what the passes cost without recomputation.
    """

    program: LinearProgram
    weights: Sequence[tuple[tuple[Level, ...], _Choice]]
    blocks: Sequence[_Choice]
    base: Totals


def polish(
    problem: LayoutProblem, values: Sequence[int], limit_bytes: float, *, frugal: bool = False
) -> Candidate | None:
    """The fastest storage and recomputation under `limit_bytes`; None where nothing fits.

    With `frugal`, every distinct collective on weights also costs a message: few weights that are
    stored otherwise than the others may cost more than they save, which the estimate does not see.
    """
    choices = _choices(problem, values, limit_bytes, frugal)
    answer = choices.program.solve(GAP, problem.work.left)
    problem.work.spend(1 if answer is None else answer.nodes)
    if answer is None:
        return None
    counts = picked(answer.values)
    stored = [choice for _, choice in choices.weights]
    nothing = np.zeros(WEIGHT_PARTS, dtype=np.int64)
    return Candidate(
        tuple(values),
        tuple(
            tuple(
                (level, counts[c])
                for c, level in zip(choice.columns, levels, strict=True)
                if counts[c]
            )
            for levels, choice in choices.weights
        ),
        tuple(counts[block.columns[0]] for block in choices.blocks),
        summed(_total(choices.blocks, counts, choices.base), _total(stored, counts, nothing)),
    )


def relaxed(
    problem: LayoutProblem,
    values: Sequence[int],
    limit_bytes: float,
    penalty: float,
    counts: Sequence[tuple[int, int]],
) -> tuple[float, Worth]:
    """The least cost of fractions of storage and recomputation, where a byte above the limit costs
    `penalty` ps, and what that says the sums are worth. `counts`: the fewest and the most calls of
    each block that recompute.
    """
    choices = _choices(problem, values, limit_bytes, above=penalty, counts=counts)
    answer = choices.program.solve(relaxed=True)
    problem.work.spend()
    assert answer is not None, "whatever is chosen, more memory makes it possible"
    gathered, reduced, held = answer.prices[-3:]
    worth = Worth(
        min(1.0, max(0.0, gathered)), min(1.0, max(0.0, reduced)), max(0.0, -held) * MS / GB
    )
    return answer.cost * MS + float(choices.base[:KEPT].sum()), worth


def _choices(
    problem: LayoutProblem,
    values: Sequence[int],
    limit_bytes: float,
    frugal: bool = False,
    above: float | None = None,
    counts: Sequence[tuple[int, int]] = (),
) -> _Choices:
    """`above`: what a byte above the limit costs; None where there must be none."""
    program = LinearProgram()
    spare = program.column(1.0), program.column(1.0)
    weights: list[tuple[tuple[Level, ...], _Choice]] = []
    for index, weight in enumerate(problem.program.weights):
        levels, parts = problem.storage.options(problem.stored(index, values))
        columns = tuple(
            program.column((p[ALONE] + p[AFTER]) / MS, 0, weight.count, integer=True) for p in parts
        )
        program.row(dict.fromkeys(columns, 1.0), weight.count, weight.count)
        weights.append((levels, _Choice(columns, tuple(parts))))
        if frugal:
            _charge(program, problem, levels, columns, weight.count)
    blocks: list[_Choice] = []
    allowed = counts or [limits(problem.program, block) for block in problem.program.blocks]
    for block, (forced, most) in zip(problem.program.blocks, allowed, strict=True):
        more = problem.again_of(block, values)
        cost = float(more[:KEPT].sum()) / MS
        column = program.column(cost, forced, most, integer=True)
        blocks.append(_Choice((column,), (more,)))
    base = problem.passes(values)
    over: dict[int, float] = {} if above is None else {program.column(above * GB / MS): -1.0}
    _limit(program, spare, base, [c for _, c in weights], blocks, limit_bytes, over)
    return _Choices(program, weights, blocks, base)


def uniform(
    problem: LayoutProblem, candidate: Candidate, chunked: tuple[bool, bool, bool]
) -> Candidate:
    """`candidate` with all weights stored alike, over as many ranks as can be: `chunked` says which
    of weight, gradient and optimizer state are in chunks.
    """
    levels, total = [], np.zeros(WEIGHT_PARTS, dtype=np.int64)
    for index, weight in enumerate(problem.program.weights):
        options, parts = problem.storage.options(problem.stored(index, candidate.values))
        alike = [
            i
            for i, level in enumerate(options)
            if (level.weight, level.gradient, level.optimizer) == chunked
        ]
        best = max(alike, key=lambda i: problem.mesh.size(options[i].axes), default=0)
        levels.append(((options[best], weight.count),))
        total += weight.count * parts[best]
    passes = problem.passes(candidate.values, candidate.recomputed)
    return replace(candidate, levels=tuple(levels), sums=summed(passes, total))


def least_bytes(problem: LayoutProblem, values: Sequence[int]) -> int:
    """What storage and recomputation can save at most: bytes that are held in any case."""
    calls = [len(block.prefixes) for block in problem.program.blocks]
    held = int(problem.passes(values, calls)[KEPT])
    for index, weight in enumerate(problem.program.weights):
        _, parts = problem.storage.options(problem.stored(index, values))
        held += weight.count * int((parts[:, STORED] + parts[:, MOVING]).min())
    return held


def _charge(
    program: LinearProgram,
    problem: LayoutProblem,
    levels: Sequence[Level],
    columns: Sequence[int],
    count: int,
) -> None:
    """A message for each set of axes that some of `count` equal weights are stored over."""
    for level, column in zip(levels, columns, strict=True):
        if not level.axes:
            continue
        message = problem.storage.message_ps(level.axes) / MS
        taken = program.shared((level.axes, level.weight, level.gradient), message)
        program.row({column: 1.0, taken: -float(count)}, high=0.0)


def _limit(
    program: LinearProgram,
    spare: tuple[int, int],
    base: Totals,
    weights: Sequence[_Choice],
    blocks: Sequence[_Choice],
    limit_bytes: float,
    over: Mapping[int, float],
) -> None:
    """`spare` is at least what weights send beyond what hides it; and the limit on memory."""
    gathered = _terms(weights, (GATHERED,), -MS)
    program.row(gathered | {spare[0]: 1.0}, low=-base[FORWARD] / MS)
    reduced = _terms(weights, SENT_BACKWARD, -MS) | _terms(blocks, (BACKWARD,), MS)
    program.row(reduced | {spare[1]: 1.0}, low=-base[BACKWARD] / MS)
    held = _terms(weights, (STORED, MOVING), GB) | _terms(blocks, (KEPT,), GB)
    program.row({**held, **over}, high=(limit_bytes - base[KEPT]) / GB)


def _terms(choices: Sequence[_Choice], parts: tuple[int, ...], unit: float) -> dict[int, float]:
    """What one more of each option adds to some parts."""
    return {
        column: float(sum(price[part] for part in parts)) / unit
        for choice in choices
        for column, price in zip(choice.columns, choice.prices, strict=True)
    }


def _total(choices: Sequence[_Choice], counts: Sequence[int], base: Totals) -> Totals:
    for choice in choices:
        for column, price in zip(choice.columns, choice.prices, strict=True):
            base = base + counts[column] * price
    return base


def decisions(problem: LayoutProblem, candidate: Candidate, base: Decisions) -> Decisions:
    """A candidate as a plan says it; of equal calls the last recompute."""
    program = problem.program
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
        for block, count in zip(program.blocks, candidate.recomputed, strict=True)
        for prefix in recomputing(program, block, count)
    )
    plain = problem.decisions(candidate.values, base)
    return replace(plain, parameters=tuple(parameters), activations=activations)
