"""Edges: how one reader gets a value from where it is made, and what that costs in one call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parloom.ir.layout import Layout
from parloom.ir.ops import op_of
from parloom.search.choices import Distinct
from parloom.search.fates import NEEDING, SEEN, Fates, Options
from parloom.search.homes import Home
from parloom.search.model import Bools, Floats, View
from parloom.search.prices import (
    BACKWARD,
    BACKWARD_SENT,
    FORWARD,
    FORWARD_SENT,
    KEPT,
    PARTS,
    Prices,
)
from parloom.search.program import Flow, Program, Reader, State
from parloom.search.redistribution import Redistribution, Transitions

WHOLE = State(Layout())
Costs = tuple[Floats, Bools]
"""Costs [alternative, source, SEEN of the source, target, needed, row] and what is legal."""
End = tuple[View | None, list[int]]
"""One end of an edge: the view of its variable, and the fates that the view tells apart."""


@dataclass(frozen=True, eq=False)
class Edge:
    """One reader of a flow (None: what is written back).

    `source` is the variable that the value comes from, whose values mean `states`; `makes` and
    `reads` are the options of the operators at both ends, where there are such; `saves`: autograd
    keeps what the reader gets.
    """

    flow: Flow
    reader: Reader | None
    source: int | None
    states: Distinct[State]
    makes: Options | None
    reads: Options | None
    saves: bool
    flows: bool
    """Whether the reader sends a gradient back."""

    @property
    def stays(self) -> bool:
        """Whether the reader takes the value as it is made."""
        return self.reader in self.flow.as_made

    @cached_property
    def targets(self) -> Distinct[State]:
        """The states that the reader may want."""
        if self.reader is None or self.reads is None:
            return Distinct((WHOLE,), np.zeros(1, dtype=np.intp))
        return self.reads.menu.operands[self.reader.operand]

    @cached_property
    def transitions(self) -> Transitions:
        """From every state that there may be to every state that may be wanted."""
        return Transitions(self.flow.spec, self.flows, self.states.values, self.targets.values)

    @property
    def variables(self) -> Iterator[int]:
        """The variables that it depends on."""
        if self.source is not None:
            yield self.source
        if self.reader is not None:
            yield self.reader.operator

    @cached_property
    def seen(self) -> tuple[int, ...]:
        """How readers see each fate of the source."""
        if self.makes is None:
            return (1,)
        return tuple(SEEN[fate] if self.flow.operator >= 0 else 1 for fate in self.makes.fates)

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """For each fate of the reader whether it needs the value again in the backward pass."""
        if self.reads is None:
            return (0,)
        return tuple(int(self.saves or fate in NEEDING) for fate in self.reads.fates)

    @cached_property
    def source_end(self) -> End:
        """The source: its state, and how readers see its fates."""
        if self.source is None:
            return None, [1]
        index, seen = self.states.index, sorted(set(self.seen))
        if self.makes is not None:
            each = self.makes.by_fate([seen.index(some) for some in self.seen])
            index = index[self.makes.choice] * len(seen) + each
        return View(self.source, index, len(self.states.values) * len(seen)), seen

    @cached_property
    def target_end(self) -> End:
        """The reader: the state that it wants, and whether it needs it again."""
        if self.reader is None or self.reads is None:
            return None, [0]
        needs = sorted(set(self.needs))
        each = self.reads.by_fate([needs.index(some) for some in self.needs])
        index = self.targets.index[self.reads.choice] * len(needs) + each
        return View(self.reader.operator, index, len(self.targets.values) * len(needs)), needs

    def source_at(self, values: Sequence[int]) -> tuple[int, int]:
        """The state of the source in a solution, and how its readers see it."""
        if self.source is None:
            return 0, 1
        value = values[self.source]
        choice, fate = divmod(value, len(self.makes.fates)) if self.makes else (value, 0)
        return int(self.states.index[choice]), self.seen[fate]

    def target_at(self, values: Sequence[int]) -> tuple[int, int]:
        """The state that the reader wants in a solution, and whether it needs it again."""
        if self.reader is None or self.reads is None:
            return 0, 0
        choice, fate = divmod(values[self.reader.operator], len(self.reads.fates))
        return int(self.targets.index[choice]), self.needs[fate]


def edges_of(
    program: Program,
    options: Sequence[Options],
    fates: Fates,
    homes: Mapping[int, tuple[Home, ...]],
    variable: Mapping[int, int],
) -> Iterator[tuple[Edge, ...]]:
    """The edges of each flow; `variable` chooses the home of a weight that several operators
    read.
    """
    for flow in program.flows:
        if flow.weight >= 0:
            source: int | None = variable[flow.weight]
            states = Distinct.of(State(h.layout, h.reduce) for h in homes[flow.weight])
        elif flow.operator >= 0:
            source, states = flow.operator, options[flow.operator].menu.results[flow.result]
        elif flow.like is not None:
            source = flow.like.operator
            states = options[source].menu.operands[flow.like.operand]
        else:
            source, states = None, Distinct((WHOLE,), np.zeros(1, dtype=np.intp))
        makes = None if source is None or flow.weight >= 0 else options[source]
        found = []
        for reader in flow.readers:
            if reader != flow.like:
                reads, saves = options[reader.operator], fates.saves(flow, reader)
                op = op_of(program.operators[reader.operator].node)
                flows = flow.differentiable and op.differentiable
                found.append(Edge(flow, reader, source, states, makes, reads, saves, flows))
        if flow.whole:
            found.append(Edge(flow, None, source, states, makes, None, False, flow.differentiable))
        yield tuple(found)


def costs_of(edge: Edge, table: Redistribution, prices: Prices, *, enters: bool) -> Costs:
    """What one call of the reader costs, whoever pays.

    The second alternative is there where main or another call made the value (the edge `enters` a
    block call): the call that reads it remakes its redistribution.
    """
    some, spec = table.transitions, edge.flow.spec
    base = np.moveaxis(table.parts, 0, -1)
    moved = np.array([[s.layout != t.layout for t in some.targets] for s in some.sources])
    size = np.array([prices.held_bytes(spec, t) for t in some.targets], dtype=float)
    enters = enters and bool((moved & table.legal).any())
    costs = np.empty((1 + enters, len(some.sources), 3, len(some.targets), 2, PARTS))
    costs[:] = base[None, :, None, :, None, :]
    legal = np.zeros(costs.shape[:-1], dtype=bool)
    legal[0, :, :, :, 0] = legal[0, :, 1:, :, 1] = True
    legal[0, :, 0, :, 1] = moved
    costs[0, :, :2, :, 1, KEPT] += (moved * size)[:, None, :]
    for backward, forward in ((BACKWARD, FORWARD), (BACKWARD_SENT, FORWARD_SENT)):
        costs[0, :, 2, :, 1, backward] += base[..., forward]
        if enters:
            costs[1, :, 1, :, 1, backward] += base[..., forward]
    if enters:
        legal[1, :, 1, :, 1] = moved
    legal &= table.legal[None, :, None, :, None]
    if edge.stays:
        legal &= ~moved[None, :, None, :, None]
    _leave_out(some, costs, legal)
    return costs, legal


def _leave_out(some: Transitions, costs: Floats, legal: Bools) -> None:
    """Nothing is moved where nothing is wanted; what there is not nobody can want."""
    nowhere = np.array([s.absent for s in some.sources])
    unwanted = np.array([t.absent for t in some.targets])
    legal[:, nowhere] = False
    legal[1:, :, :, unwanted] = False
    legal[0][:, :, unwanted] = True
    costs[0][:, :, unwanted] = 0.0
