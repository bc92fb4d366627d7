"""How values get from where they are made to those that read them: terms, and their true costs.

A value that several operators of one call read is brought to each wanted state once. Pairwise terms
count a share of a movement for each reader, which is never more than the truth; joint terms have a
variable for the state in which some of the readers share one copy.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from parloom.ir.layout import Layout
from parloom.ir.ops import op_of
from parloom.search.choices import Distinct
from parloom.search.fates import NEEDING, SEEN, Fates, Options
from parloom.search.homes import Home
from parloom.search.model import Bools, Floats, Indices, Term, Variable, View
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
from parloom.search.redistribution import Redistribution, Request, redistributions

PASSES = slice(0, PARTS)
WHOLE = State(Layout())
T = TypeVar("T", np.float64, np.bool_)
Costs = tuple[Floats, Bools]
"""Costs [alternative, source, SEEN of the source, target, needed, row] and what is legal."""


@dataclass(frozen=True, eq=False)
class Edge:
    """One reader of a flow (None: what is written back). `source`: the variable that it comes from,
    whose values mean `states`; `saves`: autograd keeps what the reader gets.
    """

    flow: Flow
    number: int
    reader: Reader | None
    source: int | None
    states: Distinct[State]
    saves: bool


class FlowCosts:
    """The edges of all flows of a program on one mesh.

    `variable`: which one chooses the home of a weight that several operators read.
    """

    def __init__(
        self,
        program: Program,
        prices: Prices,
        options: Sequence[Options],
        fates: Fates,
        homes: dict[int, tuple[Home, ...]],
        variable: dict[int, int],
    ) -> None:
        self.program, self.prices, self.options, self.fates = program, prices, options, fates
        self.homes, self.variable = homes, variable
        self.edges = [tuple(self._edges(i, flow)) for i, flow in enumerate(program.flows)]
        asked = [self._request(edge) for edges in self.edges for edge in edges]
        distinct = tuple(dict.fromkeys(asked))
        tables = dict(zip(distinct, redistributions(prices, distinct), strict=True))
        self.requests = [tuple(map(self._request, edges)) for edges in self.edges]
        self.costs = [
            tuple(
                self._alternatives(edge, tables[request])
                for edge, request in zip(edges, requests, strict=True)
            )
            for edges, requests in zip(self.edges, self.requests, strict=True)
        ]
        self._pairwise: dict[int, tuple[Term, ...]] = {}
        self.ends = [tuple(dict.fromkeys(_ends(edges))) for edges in self.edges]
        self._known: tuple[bytes, dict[object, tuple[Floats, tuple[Edge, ...]]]] = (b"", {})

    def _edges(self, number: int, flow: Flow) -> Iterator[Edge]:
        source, states = self._source(flow)
        for reader in flow.readers:
            if reader != flow.like:
                saves = self.fates.saves(flow, reader)
                yield Edge(flow, number, reader, source, states, saves)
        if flow.whole:
            yield Edge(flow, number, None, source, states, False)

    def _source(self, flow: Flow) -> tuple[int | None, Distinct[State]]:
        """The variable that a flow comes from, and the states that its values mean."""
        if flow.operator >= 0:
            return flow.operator, self.options[flow.operator].menu.results[flow.result]
        if flow.weight >= 0:
            homes = self.homes[flow.weight]
            return self.variable[flow.weight], Distinct.of(State(h.layout, h.reduce) for h in homes)
        if flow.like is not None:
            menu = self.options[flow.like.operator].menu
            return flow.like.operator, menu.operands[flow.like.operand]
        return None, Distinct((WHOLE,), np.zeros(1, dtype=np.intp))

    def _request(self, edge: Edge) -> Request:
        flow, sources = edge.flow, edge.states.values
        if edge.reader is None:
            return Request(flow.spec, flow.differentiable, sources, (WHOLE,))
        operator = self.program.operators[edge.reader.operator]
        flows = flow.differentiable and op_of(operator.node).differentiable
        return Request(flow.spec, flows, sources, self._targets(edge.reader).values)

    def _targets(self, reader: Reader) -> Distinct[State]:
        return self.options[reader.operator].menu.operands[reader.operand]

    def _alternatives(self, edge: Edge, table: Redistribution) -> Costs:
        """What one call of the reader costs, whoever pays.

        The second alternative is there where main or another call made the value: the call that
        reads it remakes its redistribution.
        """
        request, spec = table.request, edge.flow.spec
        base = np.moveaxis(table.parts.astype(float), 0, -1)
        moved = np.array([[s.layout != t.layout for t in request.targets] for s in request.sources])
        size = np.array([self.prices.held_bytes(spec, t) for t in request.targets], dtype=float)
        costs = np.zeros((2, len(request.sources), 3, len(request.targets), 2, PARTS))
        costs += base[None, :, None, :, None, :]
        legal = np.zeros(costs.shape[:-1], dtype=bool)
        legal[0, :, :, :, 0] = legal[0, :, 1:, :, 1] = True
        legal[0, :, 0, :, 1] = moved
        costs[0, :, :2, :, 1, KEPT] += (moved * size)[:, None, :]
        again = np.zeros_like(base)
        again[..., [BACKWARD, BACKWARD_SENT]] = base[..., [FORWARD, FORWARD_SENT]]
        costs[0, :, 2, :, 1] += again
        if edge.reader is not None and self.fates.enters(edge.flow, edge.reader):
            legal[1, :, 1, :, 1] = moved
            costs[1, :, 1, :, 1] += again
        legal &= table.legal[None, :, None, :, None]
        return (costs, legal) if legal[1].any() else (costs[:1], legal[:1])

    # Terms

    def pairwise(self, number: int) -> tuple[Term, ...]:
        """A term for each reader of a flow, with its share of what all need."""
        if number not in self._pairwise:
            edges = self.edges[number]
            share = self.program.flows[number].count / max(1, len(edges))
            self._pairwise[number] = tuple(
                _term((self._source_view(edge), self._target_view(edge)), ((costs * share, legal),))
                for edge, (costs, legal) in zip(edges, self.costs[number], strict=True)
            )
        return self._pairwise[number]

    def joint(self, number: int, variable: int) -> tuple[Variable, list[Term]]:
        """The variable, to be number `variable`, of the copy that readers of a flow share, and the
        terms with it: for each state that several readers want, not kept and kept.
        """
        edges, requests, costs = self.edges[number], self.requests[number], self.costs[number]
        wanted: dict[State, list[int]] = {}
        for index, request in enumerate(requests):
            for state in request.targets:
                wanted.setdefault(state, []).append(index)
        shared = {state: some for state, some in wanted.items() if len(some) > 1}
        copies = (None, *((state, kept) for state in shared for kept in (0, 1)))
        count, flow = len(copies), self.program.flows[number]
        own = View(variable, np.arange(count), count)
        most = max(len(c) for c, _ in costs)
        made = np.zeros((most, *costs[0][0].shape[1:3], count, 1, PARTS))
        legal = np.zeros(made.shape[:-1], dtype=bool)
        legal[0, :, :, 0] = True
        for position, copy in enumerate(copies[1:], start=1):
            state, kept = copy  # type: ignore[misc]
            index = shared[state][0]
            at = requests[index].targets.index(state)
            some, possible = costs[index]
            made[: len(some), :, :, position, 0] = some[:, :, :, at, kept]
            legal[: len(some), :, :, position, 0] = possible[:, :, :, at, kept]
        whole = ((made * flow.count, legal),)
        terms = [_term((self._source_view(edges[0]), (own, [0])), whole)]
        # Those that do not take the copy may share others.
        most = max(1, len(edges) - 2)
        may_want = Counter(layout for r in requests for layout in {s.layout for s in r.targets})
        for edge, request, (each, possible) in zip(edges, requests, costs, strict=True):
            others = np.array([min(most, may_want[s.layout]) for s in request.targets])
            terms.append(
                self._beside(edge, request, each * flow.count, possible, own, copies, others)
            )
        return Variable(f"copy of flow {number}", copies), terms

    def _beside(
        self, edge: Edge, request: Request, costs: Floats, legal: Bools, own: View,
        copies: Sequence[tuple[State, int] | None], others: Indices,
    ) -> Term:  # fmt: skip
        """One reader beside a shared copy: it takes that for nothing, or pays alone; where there is
        a copy, a share, as if as many took another as is possible (`others`).
        """
        takes = np.zeros((1, 1, 1, len(copies), len(request.targets), 2), dtype=bool)
        for position, copy in enumerate(copies):
            for target, state in enumerate(request.targets if copy else ()):
                assert copy is not None
                same = state == copy[0]
                if not request.flows:  # a reader without a gradient takes whatever gets there
                    same = state.layout == copy[0].layout
                takes[0, 0, 0, position, target] = same, same and bool(copy[1])
        alone = costs[:, :, :, None], legal[:, :, :, None]
        if others.max() > 1:
            paid = np.where(np.arange(len(copies))[:, None] > 0, 1.0 / others, 1.0)
            alone = alone[0] * paid[:, :, None, None], alone[1]
        free = np.zeros((*[1] * takes.ndim, PARTS))
        ends = self._source_view(edge), self._target_view(edge)
        return _term(ends, (alone, (free, takes)), own)

    def _source_view(self, edge: Edge) -> tuple[View | None, list[int]]:
        """The view of the source: its state, and how readers see its fates."""
        if edge.source is None:
            return None, [1]
        index = edge.states.index
        seen = [1]
        if edge.source < len(self.options):
            options = self.options[edge.source]
            index = index[options.choice]
            each = [SEEN[fate] if edge.flow.operator >= 0 else 1 for fate in options.fates]
            seen = sorted(set(each))
            index = index * len(seen) + options.by_fate([seen.index(some) for some in each])
        return View(edge.source, index, len(edge.states.values) * len(seen)), seen

    def _target_view(self, edge: Edge) -> tuple[View | None, list[int]]:
        """The view of the reader: the state that it wants, and whether it needs it again."""
        if edge.reader is None:
            return None, [0]
        options = self.options[edge.reader.operator]
        each = [int(edge.saves or fate in NEEDING) for fate in options.fates]
        needs = sorted(set(each))
        targets = self._targets(edge.reader)
        index = targets.index[options.choice] * len(needs)
        index = index + options.by_fate([needs.index(some) for some in each])
        return View(edge.reader.operator, index, len(targets.values) * len(needs)), needs

    # Solutions

    def rows(
        self, number: int, values: Sequence[int], prices: Floats
    ) -> tuple[Floats, tuple[Edge, ...]]:
        """The rows of a flow in one call, and the edges whose redistribution the call remakes."""
        if self._known[0] != prices.tobytes():
            self._known = (prices.tobytes(), {})
        key = number, tuple(values[v] for v in self.ends[number])
        if key not in self._known[1]:
            self._known[1][key] = self._rows(number, values, prices)
        return self._known[1][key]

    def _rows(
        self, number: int, values: Sequence[int], prices: Floats
    ) -> tuple[Floats, tuple[Edge, ...]]:
        total = np.zeros(PARTS)
        wanted: dict[tuple[State, bool], list[int]] = {}
        edges, requests = self.edges[number], self.requests[number]
        targets = [self._target_of(edge, values) for edge in edges]
        for index, request in enumerate(requests):
            state = request.targets[targets[index]]
            key = state, request.flows
            if not request.flows:  # a reader without a gradient takes whatever reaches the layout
                key = next((k for k in wanted if k[0].layout == state.layout), key)
            wanted.setdefault(key, []).append(index)
        remade: list[Edge] = []
        for some in wanted.values():
            edge = edges[some[0]]
            costs, legal = self.costs[number][some[0]]
            source, seen = self._source_of(edge, values)
            needed = int(any(self._needs(edges[i], values) for i in some))
            at = slice(None), source, seen, targets[some[0]], needed
            priced = np.where(legal[at], costs[at] @ prices[PASSES], np.inf)
            best = int(priced.argmin())
            total += costs[at][best]
            remade += [edges[i] for i in some] if best else []
        return total, tuple(remade)

    def _target_of(self, edge: Edge, values: Sequence[int]) -> int:
        if edge.reader is None:
            return 0
        choice, _ = self.options[edge.reader.operator].option(values[edge.reader.operator])
        return int(self._targets(edge.reader).index[choice])

    def _needs(self, edge: Edge, values: Sequence[int]) -> bool:
        if edge.reader is None:
            return False
        _, fate = self.options[edge.reader.operator].option(values[edge.reader.operator])
        return edge.saves or fate in NEEDING

    def _source_of(self, edge: Edge, values: Sequence[int]) -> tuple[int, int]:
        """The state of the source of an edge, and how its readers see it."""
        if edge.source is None:
            return 0, 1
        value = values[edge.source]
        if edge.source >= len(self.options):
            return int(edge.states.index[value]), 1
        choice, fate = self.options[edge.source].option(value)
        seen = SEEN[fate] if edge.flow.operator >= 0 else 1
        return int(edge.states.index[choice]), seen


def _ends(edges: Sequence[Edge]) -> Iterator[int]:
    """The variables that edges depend on."""
    for edge in edges:
        if edge.source is not None:
            yield edge.source
        if edge.reader is not None:
            yield edge.reader.operator


Ended = tuple[View | None, list[int]]


def _term(
    ends: tuple[Ended, Ended], alternatives: Sequence[Costs], between: View | None = None
) -> Term:
    """A term over two ends, and over what is `between` them (axis 3), if anything is; fates are
    merged into the states of the ends.
    """
    (source, seen), (target, needs) = ends
    found = tuple(
        (
            _merged(costs, seen, needs, 1, source is None, target is None),
            _merged(legal, seen, needs, 0, source is None, target is None),
        )
        for costs, legal in alternatives
    )
    views = tuple(view for view in (source, between, target) if view is not None)
    return Term(views, found, PASSES, "flow")


def _merged(
    array: NDArray[T], seen: list[int], needs: list[int], rows: int, first: bool, last: bool
) -> NDArray[T]:
    """An array [alternative, source, seen, *between, target, needed, *rows] with states and fates
    merged; the first and the last of these axes go where there is no variable.
    """
    at: int = array.ndim - rows - 1  # the axis of what is needed
    if array.shape[2] > 1:
        array = np.take(array, seen, axis=2)
    if array.shape[at] > 1:
        array = np.take(array, needs, axis=at)
    size: tuple[int, ...] = array.shape
    ends = size[1] * size[2], size[at - 1] * size[at]
    array = array.reshape((size[0], ends[0], *size[3 : at - 1], ends[1], *size[at + 1 :]))
    if last:
        array = array[..., 0, :] if rows else array[..., 0]
    return array[:, 0] if first else array
