"""The estimate of a plan in which every call of an operator has its own layout, kept up to date as
single operators change: what FlexFlow's delta simulation does for its simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parloom.cost.walk import Walker
from parloom.ir.layout import Layout
from parloom.ir.ops import op_of
from parloom.ir.plan import Decisions, NodeDecision, Optimizer
from parloom.search.choices import Choice, Menus
from parloom.search.comparators.plans import Whole
from parloom.search.estimate import Estimate
from parloom.search.prices import KEPT, PARTS, Prices
from parloom.search.program import Axes, Flow, Program, Reader, State
from parloom.search.storage import MOVING, STORED, WEIGHT_PARTS, stored_of

Assignment = tuple[tuple[str, Axes], ...]
Price = NDArray[np.int64]
Term = tuple[str, int]
"""`operator`, `flow` or `weight`, and its index."""
WHOLE = State(Layout())


@dataclass(frozen=True)
class Change:
    """What another layout of one operator makes of the sums."""

    choices: Mapping[int, Choice]
    terms: Mapping[Term, Price]
    passes: Price
    weights: Price


class Delta:
    """A plan of `program` (whose calls are apart) with weights stored whole, and what it costs.

    Operators of weights alone are not split.
    """

    def __init__(
        self, program: Program, walker: Walker, base: Decisions, optimizer: Optimizer
    ) -> None:
        self.program, self.mesh = program, walker.mesh
        self.prices = Prices(program, walker)
        self.storage = Whole(walker, base, optimizer)
        self.menus = Menus(program, self.prices.single)
        self.choices: dict[int, Choice] = {}
        self.terms: dict[Term, Price] = {}
        self.passes, self.weights = np.zeros(PARTS, np.int64), np.zeros(WEIGHT_PARTS, np.int64)
        self.touched: list[list[Term]] = [[("operator", i)] for i in self._operators()]
        for index, flow in enumerate(program.flows):
            ends = {reader.operator for reader in flow.readers} | {flow.operator}
            if flow.weight >= 0:
                ends |= {reader.operator for reader in program.weights[flow.weight].readers}
            for end in ends - {-1}:
                self.touched[end].append(("flow", index))
        for index, weight in enumerate(program.weights):
            for end in {reader.operator for reader in weight.readers}:
                self.touched[end].append(("weight", index))
        self.read: dict[int, list[Flow]] = {}
        for flow in program.flows:
            for end in {reader.operator for reader in flow.readers}:
                self.read.setdefault(end, []).append(flow)

    def _operators(self) -> range:
        return range(len(self.program.operators))

    def start(self, assignments: Sequence[Assignment]) -> bool:
        """Take a whole plan; whether it is legal."""
        choices: dict[int, Choice] = {}
        for index in reversed(self._operators()):  # readers first
            choices[index] = self._choice(index, assignments[index], choices)
        counts = {"flow": len(self.program.flows), "weight": len(self.program.weights)}
        counts["operator"] = len(choices)
        terms: list[Term] = [(kind, i) for kind, count in counts.items() for i in range(count)]
        return self._take(choices, dict.fromkeys(terms))

    def change(self, index: int, assignment: Assignment) -> Change | None:
        """What follows from another assignment of one operator; None where it is not legal."""
        trial = {index: self._choice(index, assignment, self.choices)}
        pending = [index]
        while pending:  # what weights make passes on what its readers leave partial
            for flow in self.read.get(pending.pop(), ()):
                if flow.operator >= 0 and self.program.operators[flow.operator].derived:
                    seen = {**self.choices, **trial}
                    trial[flow.operator] = self._choice(flow.operator, (), seen)
                    pending.append(flow.operator)
        return self._priced(trial, dict.fromkeys(t for i in trial for t in self.touched[i]))

    def state(self) -> Change:
        """The plan as it is, to come back to by `accept`."""
        return Change(dict(self.choices), dict(self.terms), self.passes, self.weights)

    def accept(self, change: Change) -> None:
        """Make a change."""
        self.choices.update(change.choices)
        self.terms.update(change.terms)
        self.passes, self.weights = change.passes, change.weights

    def _take(self, choices: dict[int, Choice], terms: Mapping[Term, None]) -> bool:
        self.terms.clear()
        self.passes, self.weights = np.zeros_like(self.passes), np.zeros_like(self.weights)
        change = self._priced(choices, terms)
        if change is not None:
            self.accept(change)
        return change is not None

    def _priced(self, trial: Mapping[int, Choice], terms: Mapping[Term, None]) -> Change | None:
        passes, weights, found = self.passes.copy(), self.weights.copy(), {}
        choices = {**self.choices, **trial} if len(trial) < len(self.choices) else trial
        for term in terms:
            price = self._price(term, choices)
            if price is None:
                return None
            total = weights if term[0] == "weight" else passes
            total += price
            if term in self.terms:
                total -= self.terms[term]
            found[term] = price
        return Change(trial, found, passes, weights)

    # Terms

    def _price(self, term: Term, choices: Mapping[int, Choice]) -> Price | None:
        kind, index = term
        if kind == "operator":
            price: Price = np.zeros(PARTS, dtype=np.int64)
            for flags, count in self.program.operators[index].flows:
                price += count * self.prices.operator(index, choices[index], flags)
            return price
        if kind == "flow":
            return self._moved(self.program.flows[index], choices)
        weight = self.program.weights[index]
        home = self._home(index, choices)
        if any(not self._passes(r, home.varying, choices) for r in weight.readers):
            return None
        stored = stored_of(self.program, weight, home.layout, home.varying)
        found: Price = self.storage.options(stored)[1][0] * weight.count
        return found

    def _home(self, index: int, choices: Mapping[int, Choice]) -> State:
        """Where a weight is at home, and over what its gradient is partial (see `ir.lower`)."""
        states = [
            choices[r.operator].operands[r.operand] for r in self.program.weights[index].readers
        ]
        if len(states) < 2:
            return states[0] if states else WHOLE
        layout = max((s.layout for s in states), key=lambda found: self.mesh.size(found.axes))
        partial = {a for s in states for a in (*s.varying, *s.layout.axes)} - set(layout.axes)
        return State(layout, tuple(sorted(partial)))

    def _passes(self, reader: Reader, varying: Axes, choices: Mapping[int, Choice]) -> bool:
        """Whether gradients pass a reader as its choice says (see `docs/space.md`)."""
        exposed = self.program.operators[reader.operator].exposed
        return not exposed or set(varying) <= set(choices[reader.operator].used)

    def _moved(self, flow: Flow, choices: Mapping[int, Choice]) -> Price | None:
        """Bringing a value to all its readers in a call, equal wishes once."""
        source = self._source(flow, choices)
        derived = flow.operator >= 0 and self.program.operators[flow.operator].derived
        keeping = [reader for reader in flow.readers if self.program.keeps(flow, reader)]
        has = self.program.is_there(flow)
        found: Price = np.zeros(PARTS, dtype=np.int64)
        wanted: set[State] = set()
        layouts: set[Layout] = set()
        for reader in flow.readers:
            if derived and not self._passes(reader, source.varying, choices):
                return None
            if reader == flow.like:
                continue
            state = choices[reader.operator].operands[reader.operand]
            operator = self.program.operators[reader.operator]
            flows = flow.differentiable and op_of(operator.node).differentiable
            if reader in keeping and not (has and state.layout == source.layout):
                found[KEPT] += self.prices.held_bytes(flow.spec, state) // len(keeping)
            if (state not in wanted) if flows else (state.layout not in layouts):
                price = self.prices.movement(flow.spec, flows, source, state)
                if price is None:
                    return None
                found[:KEPT] += price[:KEPT]
            if flows:
                wanted.add(state)
            layouts.add(state.layout)
        if flow.whole:
            price = self.prices.movement(flow.spec, flow.differentiable, source, WHOLE)
            if price is None:
                return None
            known = WHOLE in wanted if flow.differentiable else WHOLE.layout in layouts
            found[:KEPT] += price[:KEPT] * (not known)
        return found * flow.count

    def _source(self, flow: Flow, choices: Mapping[int, Choice]) -> State:
        if flow.operator >= 0:
            return choices[flow.operator].results[flow.result]
        if flow.weight >= 0:
            return self._home(flow.weight, choices)
        if flow.like is not None:
            return choices[flow.like.operator].operands[flow.like.operand]
        return WHOLE

    # Choices

    def _choice(self, index: int, assignment: Assignment, choices: Mapping[int, Choice]) -> Choice:
        """The choice with an assignment; of weights alone, not split, it passes what is needed."""
        operator = self.program.operators[index]
        passed: set[str] = set()
        if operator.derived:
            assignment = ()
            passed = {
                axis
                for flow in self.program.flows
                if flow.operator == index
                for reader in flow.readers
                for state in (choices[reader.operator].operands[reader.operand],)
                for axis in (*state.varying, *state.layout.axes)
            }
        choices_there = self.menus.of(index, [dict(assignment)]).choices
        return next(c for c in choices_there if set(c.passed) == passed)

    # Answers

    def step_ps(self, change: Change | None = None) -> int:
        """The estimate, after a change."""
        of = change or self
        return Estimate(of.passes, of.weights).step_ps

    def held_bytes(self, change: Change | None = None) -> int:
        """What is kept for the backward pass and stored, after a change."""
        of = change or self
        return int(of.passes[KEPT] + of.weights[STORED] + of.weights[MOVING])

    def assignments(self) -> tuple[Assignment, ...]:
        """What every operator does."""
        return tuple(self.choices[i].assignment for i in self._operators())

    def nodes(self, assignments: Sequence[Assignment]) -> tuple[NodeDecision, ...]:
        """A plan as it is written."""
        index = self.program.index
        return tuple(NodeDecision(key, assignments[at]) for key, at in index.items())
