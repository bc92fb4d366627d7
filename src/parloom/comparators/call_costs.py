"""What the terms of a plan cost in which every call of an operator has its own layout: operators,
the flows between them, and weights.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from parloom.comparators.plans import Whole
from parloom.cost.walk import Walker
from parloom.ir.layout import Layout
from parloom.ir.ops import op_of
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.choices import Choice
from parloom.search.fates import Fates
from parloom.search.prices import (
    BACKWARD,
    BACKWARD_SENT,
    FORWARD,
    FORWARD_SENT,
    KEPT,
    PARTS,
    Prices,
)
from parloom.search.program import Axes, Flow, Program, Reader, State
from parloom.search.step_rows import NUM_ROWS
from parloom.search.storage import stored_of

Assignment = tuple[tuple[str, Axes], ...]
Rows = NDArray[np.int64]
Term = tuple[str, int]
"""`operator`, `flow` or `weight`, and its index."""
WHOLE = State(Layout())


class CallCosts:
    """Terms of `program` (whose calls are apart) under `choices`, one for each operator.

    Weights are whole. Activations are kept, but in calls that the user's model checkpoints.
    Operators of weights alone are not split.
    """

    def __init__(
        self, program: Program, walker: Walker, base: Decisions, optimizer: Optimizer
    ) -> None:
        self.program, self.mesh = program, walker.mesh
        self.prices = Prices(program, walker)
        self.storage = Whole(walker, base, optimizer)
        self.menus = self.prices.menus
        self.fates = Fates(program)
        self.choices: dict[int, Choice] = {}
        self.made: list[list[int]] = [[] for _ in program.operators]
        for number, flow in enumerate(program.flows):
            if flow.operator >= 0:
                self.made[flow.operator].append(number)
        self.again = frozenset(
            index
            for block in program.blocks
            if not set(program.graph.recomputed_calls).isdisjoint(block.prefixes)
            for index, _ in block.operators
        )

    def all_terms(self) -> Iterator[Term]:
        """Every term of the program."""
        yield from (("operator", index) for index in range(len(self.program.operators)))
        yield from (("flow", number) for number in range(len(self.program.flows)))
        yield from (("weight", index) for index in range(len(self.program.weights)))

    def of(self, term: Term) -> Rows | None:
        """The rows of a term; None where choices contradict each other."""
        kind, index = term
        if kind == "operator":
            return self._computed(index)
        return self._moved(index) if kind == "flow" else self._stored(index)

    def _computed(self, index: int) -> Rows:
        """An operator, and those of its results that are kept as it makes them."""
        operator, choice = self.program.operators[index], self.choices[index]
        found = np.zeros(NUM_ROWS, dtype=np.int64)
        found[:PARTS] = sum(n * self.prices.operator(index, choice, f) for f, n in operator.flows)
        if index in self.again:
            return _run_again(found)
        own, read = self.fates.results(index)
        flows = any(any(flags) for flags, _ in operator.flows)
        keeps = bool(own) or (self._is_held(index) and not op_of(operator.node).view)
        for result, value in enumerate(operator.node.results if flows else ()):
            size = self.prices.held_bytes(value.spec, choice.results[result])
            found[KEPT] += size * (keeps and result in own | read) - size * (result in own)
        found[KEPT] += self.fates.gradient_bytes(index, choice, self.prices)
        return found

    def _is_held(self, index: int) -> bool:
        """Whether a reader keeps what an operator makes as it lies."""
        return any(
            self._needs(flow, reader) and self._wanted(reader).layout == self._source(flow).layout
            for flow in map(self.program.flows.__getitem__, self.made[index])
            for reader in flow.readers
        )

    def _needs(self, flow: Flow, reader: Reader) -> bool:
        """Whether a reader keeps what it gets of a flow, itself or through a view of it."""
        if reader.operator in self.again:
            return False
        if self.fates.saves(flow, reader):
            return True
        view = op_of(self.program.operators[reader.operator].node).view
        return view and self._is_held(reader.operator)

    def _stored(self, index: int) -> Rows | None:
        """Equal weights."""
        weight = self.program.weights[index]
        home = self._home(index)
        if any(not self._passes(reader, home.varying) for reader in weight.readers):
            return None
        stored = stored_of(self.program, weight, home.layout, home.varying)
        found = np.zeros(NUM_ROWS, dtype=np.int64)
        found[PARTS:] = self.storage.options(stored)[1][0] * weight.count
        return found

    def _home(self, index: int) -> State:
        """Where a weight is at home, and over what its gradient is partial (see `ir.lower`)."""
        states = [self._wanted(reader) for reader in self.program.weights[index].readers]
        if len(states) < 2:
            return states[0] if states else WHOLE
        layout = max((s.layout for s in states), key=lambda found: self.mesh.size(found.axes))
        partial = {a for s in states for a in (*s.varying, *s.layout.axes)} - set(layout.axes)
        return State(layout, tuple(sorted(partial)))

    def _passes(self, reader: Reader, varying: Axes) -> bool:
        """Whether gradients pass a reader as its choice says (see `docs/explanation/search.md`)."""
        exposed = self.program.operators[reader.operator].exposed
        return not exposed or set(varying) <= set(self.choices[reader.operator].used)

    def _moved(self, number: int) -> Rows | None:
        """Bringing a value to all its readers in a call, equal wishes once."""
        flow = self.program.flows[number]
        source = self._source(flow)
        derived = flow.operator >= 0 and self.program.operators[flow.operator].derived
        found = np.zeros(NUM_ROWS, dtype=np.int64)
        wanted: dict[tuple[State, bool], bool] = {}
        if flow.whole:
            wanted[WHOLE, flow.differentiable] = False
        for reader in flow.readers:
            if derived and not self._passes(reader, source.varying):
                return None
            if reader == flow.like:
                continue
            operator = self.program.operators[reader.operator]
            flows = flow.differentiable and op_of(operator.node).differentiable
            key = self._wanted(reader), flows
            if not flows:  # a reader without a gradient takes whatever reaches the layout
                key = next((k for k in wanted if k[0].layout == key[0].layout), key)
            wanted[key] = wanted.get(key, False) or self._needs(flow, reader)
        for (state, flows), needed in wanted.items():
            price = self.prices.movement(flow.spec, flows, source, state)
            if price is None:
                return None
            found[:KEPT] += price[:KEPT]
            if needed and state.layout != source.layout:
                found[KEPT] += self.prices.held_bytes(flow.spec, state)
        again = any(reader.operator in self.again for reader in flow.readers)
        return flow.count * (_run_again(found) if again else found)

    def _source(self, flow: Flow) -> State:
        if flow.operator >= 0:
            return self.choices[flow.operator].results[flow.result]
        if flow.weight >= 0:
            return self._home(flow.weight)
        return WHOLE if flow.like is None else self._wanted(flow.like)

    def _wanted(self, reader: Reader) -> State:
        return self.choices[reader.operator].operands[reader.operand]

    def choice(self, index: int, assignment: Assignment) -> Choice:
        """The choice with an assignment; of weights alone, not split, it passes what is needed."""
        operator = self.program.operators[index]
        passed: set[str] = set()
        if operator.derived:
            assignment = ()
            passed = {
                axis
                for number in self.made[index]
                for reader in self.program.flows[number].readers
                for axis in (*self._wanted(reader).varying, *self._wanted(reader).layout.axes)
            }
        choices = self.menus.of(index, [dict(assignment)]).choices
        return next(c for c in choices if set(c.passed) == passed)


def _run_again(rows: Rows) -> Rows:
    """Rows of what a backward pass runs once more, and of which nothing is kept."""
    found = rows.copy()
    found[[BACKWARD, BACKWARD_SENT]] += rows[[FORWARD, FORWARD_SENT]]
    found[KEPT] = 0
    return found
