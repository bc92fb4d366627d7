"""The estimate of a plan in which every call of an operator has its own layout, kept up to date as
single operators change: what FlexFlow's delta simulation does for its simulator.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parloom.comparators.call_costs import Assignment, CallCosts, Rows, Term
from parloom.ir.ops import op_of
from parloom.ir.plan import NodeDecision
from parloom.search.choices import Choice
from parloom.search.step_rows import NUM_ROWS, Passes, StepSums, step_sums


@dataclass(frozen=True)
class Change:
    """What another layout of one operator makes of the totals."""

    choices: Mapping[int, Choice]
    terms: Mapping[Term, Rows]
    rows: Rows


class Delta:
    """A plan and what it costs, for steps of `num_microbatches`."""

    def __init__(self, costs: CallCosts, num_microbatches: int) -> None:
        self.costs, self.passes = costs, Passes(num_microbatches)
        self.program, self.choices = costs.program, costs.choices
        self.terms: dict[Term, Rows] = {}
        self.rows = np.zeros(NUM_ROWS, np.int64)
        program = costs.program
        self.read: list[list[int]] = [[] for _ in program.operators]
        for number, flow in enumerate(program.flows):
            for end in {reader.operator for reader in flow.readers}:
                self.read[end].append(number)
        # Storage, and flows from the home, of weights: by the operators that read these.
        self.weighed: dict[int, list[Term]] = {}
        for index, weight in enumerate(program.weights):
            homes = (n for n, flow in enumerate(program.flows) if flow.weight == index)
            terms: list[Term] = [("weight", index)]
            if len(weight.readers) > 1:
                terms += [("flow", number) for number in homes]
            for end in {reader.operator for reader in weight.readers}:
                self.weighed.setdefault(end, []).extend(terms)
        self.touched = [tuple(dict.fromkeys(self._touched(i))) for i in self._operators()]

    def _operators(self) -> range:
        return range(len(self.program.operators))

    def _touched(self, index: int) -> Iterator[Term]:
        """The terms that depend on the layout of an operator."""
        yield "operator", index
        yield from (("flow", number) for number in self.costs.made[index])
        yield from self._above(index)
        yield from self.weighed.get(index, ())

    def _above(self, index: int) -> Iterator[Term]:
        """What an operator reads, and through views what these read."""
        for number in self.read[index]:
            yield "flow", number
            source = self.program.flows[number].operator
            if source >= 0:
                yield "operator", source
                if op_of(self.program.operators[source].node).view:
                    yield from self._above(source)

    def start(self, assignments: Sequence[Assignment]) -> bool:
        """Take a whole plan; whether it is legal."""
        self.terms, self.rows = {}, np.zeros_like(self.rows)
        for index in reversed(self._operators()):  # readers first
            self.choices[index] = self.costs.choice(index, assignments[index])
        found = self._priced(self.costs.all_terms())
        if found is not None:
            self.terms, self.rows = found
        return found is not None

    def change(self, index: int, assignment: Assignment) -> Change | None:
        """What follows from another assignment of one operator; None where it is not legal."""
        before = {index: self.choices[index]}
        self.choices[index] = self.costs.choice(index, assignment)
        pending = [index]
        while pending:  # what weights make passes on what its readers leave partial
            for number in self.read[pending.pop()]:
                source = self.program.flows[number].operator
                if source >= 0 and self.program.operators[source].derived:
                    before.setdefault(source, self.choices[source])
                    self.choices[source] = self.costs.choice(source, ())
                    pending.append(source)
        trial = {changed: self.choices[changed] for changed in before}
        found = self._priced(dict.fromkeys(t for i in trial for t in self.touched[i]))
        self.choices.update(before)
        return None if found is None else Change(trial, *found)

    def state(self) -> Change:
        """The plan as it is, to come back to by `accept`."""
        return Change(dict(self.choices), dict(self.terms), self.rows)

    def accept(self, change: Change) -> None:
        """Make a change."""
        self.choices.update(change.choices)
        self.terms.update(change.terms)
        self.rows = change.rows

    def _priced(self, terms: Iterable[Term]) -> tuple[dict[Term, Rows], Rows] | None:
        """Terms under the present choices, and the totals that they lead to; None if illegal."""
        rows, found = self.rows.copy(), {}
        for term in terms:
            price = self.costs.of(term)
            if price is None:
                return None
            rows += price
            if term in self.terms:
                rows -= self.terms[term]
            found[term] = price
        return found, rows

    def sums(self, change: Change | None = None) -> StepSums:
        """Time of the step and bytes, after a change."""
        return step_sums((change or self).rows.astype(float), self.passes)

    def assignments(self) -> tuple[Assignment, ...]:
        """What every operator does."""
        return tuple(self.choices[i].assignment for i in self._operators())

    def nodes(self, assignments: Sequence[Assignment]) -> tuple[NodeDecision, ...]:
        """A plan as it is written."""
        index = self.program.index
        return tuple(NodeDecision(key, assignments[at]) for key, at in index.items())
