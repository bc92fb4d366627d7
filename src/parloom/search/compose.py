"""From layouts to a candidate: which calls recompute which values, and how each weight is stored.

Under given layouts the model falls apart into activations, of which shadow prices of memory give
variants, and weights. An integer program counts how many calls take each variant and how many equal
weights each storage; weights of a block in chunks over the same axes share messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parloom.linear_program import LinearProgram, picked
from parloom.search.fates import REGATHER, REMAKE
from parloom.search.flow_costs import PASSES
from parloom.search.layout_model import LayoutModel
from parloom.search.model import Bools, Floats
from parloom.search.pins import RECOMPUTE
from parloom.search.prices import (
    BACKWARD,
    BACKWARD_SENT,
    FORWARD,
    FORWARD_SENT,
    KEPT,
    PARTS,
)
from parloom.search.program import Block, Program, Weight
from parloom.search.remaking import Remaking, leaving_bytes, limit_remade, remade_bytes, remaking
from parloom.search.solve.elimination import Elimination
from parloom.search.step_rows import (
    EXPOSED,
    INSTANTS,
    NUM_ROWS,
    Passes,
    ShadowPrices,
    StepSums,
    row_prices,
    step_sums,
)
from parloom.search.storage import AFTER, Level, StoragePrices, stored_of
from parloom.search.work import Work

MS, GB = 1e9, 1e9  # programs in milliseconds (of ps) and gigabytes are well scaled
# How far an answer may be from the best, and branches after which the best found is taken.
GAP, NODES = 1e-4, 1000
# Prices of a byte under which variants are sought, as multiples of the one that is paid, and the
# least that is taken to be paid.
SPREAD, LEAST_BYTE_PS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0), 0.05
Values = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a block call recomputes: what a solution of the model says, or all of it."""

    values: Values
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """So many calls of a block that take a variant; `policy` is what they are asked to do."""

    variant: Variant
    count: int
    policy: str | None


Stored = tuple[tuple[Level, int], ...]
"""How many of equal weights are stored how."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Layouts with storage, per weight of the program, and recomputation, per block."""

    values: Values
    levels: tuple[Stored, ...]
    variants: tuple[tuple[Chosen, ...], ...]
    rows: Floats
    sums: StepSums


def policy_of(program: Program, prefix: str) -> str | None:
    """What a call is asked to do, by a pin or because the user's model checkpoints it."""
    own = RECOMPUTE if prefix in program.graph.recomputed_calls else None
    return program.pinned.policies.get(prefix, own)


def recomputed(
    layouts: LayoutModel, block: Block, variant: Variant, prices: Floats
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The operators whose results a call makes again, and those and inputs of which it makes the
    redistributions again; nothing where it recomputes as a whole.
    """
    if variant.whole:
        return (), ()
    values, moves = [], []
    for index, _ in block.operators:
        choice, fate = layouts.options[index].option(variant.values[index])
        if layouts.options[index].menu.choices[choice].absent:
            continue
        key = layouts.program.operators[index].node.key
        if fate == REMAKE:
            values.append(key)
        if fate == REGATHER:
            moves.append(key)
    for number in block.flows:
        for edge in layouts.flows.rows(number, variant.values, prices)[1]:
            assert edge.reader is not None, "what is written back is not made again"
            node = layouts.program.operators[edge.reader.operator].node
            moves.append(node.refs[edge.reader.operand])
    return tuple(values), tuple(dict.fromkeys(moves))


class Composer:
    """Composes candidates of one layout model."""

    def __init__(self, layouts: LayoutModel, passes: Passes, work: Work) -> None:
        self.layouts, self.passes, self.work = layouts, passes, work
        self.program = layouts.program
        storage = layouts.storage
        self.apart = StoragePrices(
            storage.walker, storage.decisions, storage.optimizer, latency=False,
            quantizes=storage.quantizes,
        )  # fmt: skip
        self._fates: dict[Values, tuple[Values, ...]] = {}

    def choice_of(self, variable: int, value: int) -> int:
        """A value without the fate that it has, if it has one."""
        options = self.layouts.options
        return value // len(options[variable].fates) if variable < len(options) else value

    def layout_of(self, values: Sequence[int]) -> Values:
        """A solution without fates."""
        return tuple(self.choice_of(variable, value) for variable, value in enumerate(values))

    def fates(self, values: Values, duals: ShadowPrices) -> tuple[Values, ...]:
        """Solutions of the layouts of `values` under several prices of memory."""
        key = self.layout_of(values)
        if key not in self._fates:
            allowed: list[Bools] = []
            for index, variable in enumerate(self.layouts.variables):
                each = [self.choice_of(index, value) for value in range(len(variable))]
                allowed.append(np.array(each) == key[index])
            small, kept = self.layouts.model().restricted(allowed)
            exact = Elimination(small)
            found: dict[Values, None] = {}
            for factor in SPREAD:
                byte_ps = max(duals.byte_ps, LEAST_BYTE_PS) * factor
                prices = row_prices(duals.with_byte(byte_ps), self.passes)
                _, some = exact.minimum(prices)
                if some:
                    found[tuple(int(k[v]) for k, v in zip(kept, some, strict=True))] = None
            self._fates[key] = tuple(found)
        return self._fates[key]

    def compose(
        self,
        solutions: Sequence[Values],
        duals: ShadowPrices,
        limit_bytes: float,
        byte_ps: float = 0.0,
    ) -> Candidate | None:
        """The fastest candidate with the layouts that `solutions` share, of at most `limit_bytes`
        as the model counts it; None where there is none. Each byte held costs `byte_ps` besides.
        """
        prices = row_prices(duals, self.passes)
        if not duals.byte_ps and not byte_ps:  # nothing is made again that need not be
            found = _Composition(self, solutions, prices).solve(limit_bytes, 0.0)
            if found is not None:
                return found
        every = tuple(dict.fromkeys((*solutions, *self.fates(solutions[0], duals))))
        return _Composition(self, every, prices).solve(limit_bytes, byte_ps)


@dataclass
class _Composition:
    """The integer program of solutions that have the same layouts."""

    composer: Composer
    every: Sequence[Values]
    prices: Floats
    program: LinearProgram = field(default_factory=LinearProgram)
    rows: dict[int, Floats] = field(default_factory=dict)
    remaking: list[list[Remaking]] = field(default_factory=list)

    def solve(self, limit_bytes: float, byte_ps: float) -> Candidate | None:
        exposed = [self.program.column(1.0) for _ in EXPOSED]
        calls, main = self._calls()
        weights = [self._weight(index) for index in range(len(self.composer.program.weights))]
        self._messages(weights)
        passes = self.composer.passes
        sums = {column: step_sums(rows, passes) for column, rows in self.rows.items()}
        for column, name in zip(exposed, EXPOSED, strict=True):
            terms = {i: -getattr(some, name) / MS for i, some in sums.items()}
            self.program.row({column: 1.0, **terms}, low=0.0)
        # Of small models, a byte would be less than what the solver tolerates.
        unit = min(GB, limit_bytes)
        most = self.program.column(byte_ps * unit / MS, high=limit_bytes / unit)
        for name in INSTANTS:
            held = {i: getattr(some, name) / unit for i, some in sums.items()}
            self.program.row({most: -1.0, **held}, high=0.0)
        in_flight = passes.in_flight
        stored = {i: some.pass_bytes - in_flight * self.rows[i][KEPT] for i, some in sums.items()}
        limit_remade(self.program, self.remaking, stored, most, unit)
        work = self.composer.work
        answer = self.program.solve(GAP, work.left, NODES)
        work.spend(1 if answer is None else answer.nodes)
        if answer is None:
            return None
        counts = picked(answer.values)
        total = np.sum([counts[i] * rows for i, rows in self.rows.items()], axis=0)
        found, remade = step_sums(total, passes), remade_bytes(self.remaking, counts)
        return Candidate(
            next(values for column, values in main if counts[column]),
            tuple(tuple((level, counts[c]) for c, level in w if counts[c]) for w in weights),
            tuple(
                tuple(replace(some, count=counts[c]) for c, some in block if counts[c])
                for block in calls
            ),
            total,
            replace(found, remade_bytes=found.pass_bytes - in_flight * total[KEPT] + remade),
        )

    def _column(self, rows: Floats, most: int) -> int:
        """A column that counts how often something with these rows is taken."""
        cost = step_sums(rows, self.composer.passes).plain_ps / MS
        column = self.program.column(cost, 0, most, integer=True)
        self.rows[column] = rows
        return column

    def _all_of(self, columns: Iterable[int], count: int) -> None:
        self.program.row(dict.fromkeys(columns, 1.0), count, count)

    def _calls(self) -> tuple[list[list[tuple[int, Chosen]]], list[tuple[int, Values]]]:
        """Columns of the variants of each block's calls, and of main."""
        layouts, program = self.composer.layouts, self.composer.program
        rest = [layouts.evaluate(values, self.prices)[PASSES] for values in self.every]
        found = []
        for block in program.blocks:
            rows = [layouts.call_rows(block, values, self.prices) for values in self.every]
            rest = [r - len(block.prefixes) * each for r, each in zip(rest, rows, strict=True)]
            found.append(self._block(block, rows))
        main = [
            (self._column(_wide(rows), 1), values)
            for rows, values in _distinct(zip(rest, self.every, strict=True))
        ]
        self._all_of((column for column, _ in main), 1)
        return found, main

    def _block(self, block: Block, rows: Sequence[Floats]) -> list[tuple[int, Chosen]]:
        """Columns of the variants of one block, those that are asked for apart from others."""
        fast = min(rows, key=lambda r: float(r[[BACKWARD, BACKWARD_SENT]].sum()))
        again = fast.copy()
        again[[BACKWARD, BACKWARD_SENT]] += fast[[FORWARD, FORWARD_SENT]]
        again[KEPT] = leaving_bytes(self.composer.layouts, block, self.every[0])
        variants = [(r, Variant(v)) for r, v in _distinct(zip(rows, self.every, strict=True))]
        variants.append((again, Variant(self.every[0], whole=True)))
        asked: dict[str | None, int] = {}
        for prefix in block.prefixes:
            policy = policy_of(self.composer.program, prefix)
            asked[policy] = asked.get(policy, 0) + 1
        found = []
        for policy, count in asked.items():
            columns = [
                (self._column(_wide(r), count), Chosen(variant, 0, policy))
                for r, variant in variants
                if policy is None or self._follows(block, variant, policy)
            ]
            self._all_of((column for column, _ in columns), count)
            found += columns
        kept = {c: self.rows[c] for c, _ in found}
        self.remaking.append(remaking(block, kept, fast, self.composer.passes.in_flight))
        return found

    def _follows(self, block: Block, variant: Variant, policy: str) -> bool:
        """Whether a call with this variant does what it is asked to do."""
        if policy == RECOMPUTE or variant.whole:
            return variant.whole and policy == RECOMPUTE
        return not any(recomputed(self.composer.layouts, block, variant, self.prices))

    def _weight(self, index: int) -> list[tuple[int, Level]]:
        """Columns of the ways to store equal weights."""
        composer = self.composer
        weight = composer.program.weights[index]
        home = composer.layouts.weights.home(index, self.every[0])
        prices = composer.apart if weight.block else composer.layouts.storage
        levels, parts = prices.options(stored_of(composer.program, weight, *home))
        columns = []
        for level, part in zip(levels, parts, strict=True):
            rows = np.zeros(NUM_ROWS)
            rows[PARTS:] = part
            columns.append((self._column(rows, weight.count), level))
        self._all_of((column for column, _ in columns), weight.count)
        return columns

    def _messages(self, weights: Sequence[Sequence[tuple[int, Level]]]) -> None:
        """Weights in chunks over the same axes share messages: those of a block call in as many
        calls as have such weights, those of main that are stored alike once.
        """
        program, apart = self.composer.program, self.composer.apart
        known: dict[_Message, int] = {}
        for weight, columns in zip(program.weights, weights, strict=True):
            over: dict[_Message, list[int]] = {}
            for column, level in columns:
                if level.optimizer:
                    over.setdefault(self._message(weight, level), []).append(column)
            for message, some in over.items():
                if message not in known:
                    rows = np.zeros(NUM_ROWS)
                    if message.unit:
                        rows[PARTS:] = apart.messages.of_call(
                            message.level, program.units, message.reduces
                        )
                    else:
                        rows[PARTS:][AFTER] = apart.messages.least_ps(message.level.optimizer)
                    known[message] = self._column(rows, program.units if message.unit else 1)
                calls = 1.0 if message.unit else float(weight.count)
                self.program.row({**dict.fromkeys(some, 1.0), known[message]: -calls}, high=0.0)

    def _message(self, weight: Weight, level: Level) -> "_Message":
        level = replace(level, dim=0)
        if weight.block and level.weight:
            function = self.composer.program.operators[weight.readers[0].operator].function
            return _Message(level, function, weight.trainable)
        return _Message(level)


@dataclass(frozen=True, slots=True)
class _Message:
    """Weights that travel together: those of one `unit`, trained or frozen, or those of main that
    are stored alike.
    """

    level: Level
    unit: str = ""
    reduces: bool = True


def _distinct(entries: Iterable[tuple[Floats, Values]]) -> list[tuple[Floats, Values]]:
    """Of those with equal rows the first."""
    known: dict[bytes, tuple[Floats, Values]] = {}
    for rows, values in entries:
        known.setdefault(rows.tobytes(), (rows, values))
    return list(known.values())


def _wide(passes: Floats) -> Floats:
    """Rows of passes as rows of the model."""
    rows = np.zeros(NUM_ROWS)
    rows[PASSES] = passes
    return rows
