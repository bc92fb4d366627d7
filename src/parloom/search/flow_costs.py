"""How values get from where they are made to those that read them: terms, and their true costs.

A value that several operators of one call read is brought to each wanted state once. Pairwise terms
count a share of a movement for each reader, which is never more than the truth; joint terms have a
variable for the state in which some of the readers share one copy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from parloom.search.fates import Fates, Options
from parloom.search.flow_edges import Costs, Edge, End, costs_of, edges_of
from parloom.search.homes import Home
from parloom.search.model import Floats, Indices, Term, Variable, View
from parloom.search.prices import PARTS, Prices
from parloom.search.program import Program, State
from parloom.search.redistribution import redistributions

PASSES = slice(0, PARTS)
T = TypeVar("T", np.float64, np.bool_)


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
        homes: Mapping[int, tuple[Home, ...]],
        variable: Mapping[int, int],
    ) -> None:
        self.program = program
        self.edges = tuple(edges_of(program, options, fates, homes, variable))
        self.costs = _costs_of_all(self.edges, prices, fates)
        # What terms with equal costs and ends have, by the table of costs.
        self._merged: dict[tuple[object, ...], Costs] = {}
        self._pairwise: dict[int, tuple[Term, ...]] = {}
        self._variables = [
            tuple(dict.fromkeys(variable for edge in edges for variable in edge.variables))
            for edges in self.edges
        ]
        self._known: tuple[bytes, dict[object, tuple[Floats, tuple[Edge, ...]]]] = (b"", {})

    def pairwise(self, number: int) -> tuple[Term, ...]:
        """A term for each reader of a flow, with its share of what all need."""
        if number not in self._pairwise:
            edges, count = self.edges[number], self.program.flows[number].count
            self._pairwise[number] = tuple(
                self._one(edge, costs, count / len(self._beside(edge, edges)))
                for edge, costs in zip(edges, self.costs[number], strict=True)
            )
        return self._pairwise[number]

    def _beside(self, edge: Edge, edges: Iterable[Edge]) -> list[Edge]:
        """Those of `edges` whose readers may be there with that of one."""
        return [other for other in edges if self.program.meet(edge.reader, other.reader)]

    def _one(self, edge: Edge, costs: Costs, share: float) -> Term:
        """The term of one reader, which pays `share` of `costs`."""
        (source, seen), (target, needs) = edge.source_end, edge.target_end
        key = id(costs[0]), share, tuple(seen), tuple(needs), source is None, target is None
        if key not in self._merged:
            merged, legal = _fated(costs, (edge.source_end, edge.target_end))
            self._merged[key] = merged * share, legal
        views = tuple(view for view in (source, target) if view is not None)
        return Term(views, (self._merged[key],), PASSES, "flow")

    def joint(self, number: int, variable: int) -> tuple[Variable, list[Term]]:
        """The variable, to be number `variable`, of the copy that readers of a flow share, and the
        terms with it: for each state that several readers want, not kept and kept.
        """
        edges, costs = self.edges[number], self.costs[number]
        wanted: dict[State, list[int]] = {}
        for index, edge in enumerate(edges):
            for state in edge.targets.values:
                if not state.absent:
                    wanted.setdefault(state, []).append(index)
        shared = {
            state: some
            for state, some in wanted.items()
            if any(len(self._beside(edges[i], [edges[j] for j in some])) > 1 for i in some)
        }
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
            at = edges[index].targets.values.index(state)
            some, possible = costs[index]
            made[: len(some), :, :, position, 0] = some[:, :, :, at, kept]
            legal[: len(some), :, :, position, 0] = possible[:, :, :, at, kept]
        terms = [_term((edges[0].source_end, (own, [0])), ((made * flow.count, legal),))]
        # Those that do not take the copy may share others.
        layouts = {id(edge): {state.layout for state in edge.targets.values} for edge in edges}
        for edge, (each, possible) in zip(edges, costs, strict=True):
            beside = self._beside(edge, edges)
            most = max(1, len(beside) - 2)
            may_want = Counter(chain.from_iterable(layouts[id(other)] for other in beside))
            others = np.array([min(most, may_want[s.layout]) for s in edge.targets.values])
            terms.append(_copied(edge, (each * flow.count, possible), own, copies, others))
        return Variable(f"copy of flow {number}", copies), terms

    def rows(
        self, number: int, values: Sequence[int], prices: Floats
    ) -> tuple[Floats, tuple[Edge, ...]]:
        """The rows of a flow in one call, and the edges whose redistribution the call remakes."""
        if self._known[0] != prices.tobytes():
            self._known = (prices.tobytes(), {})
        key = number, tuple(values[v] for v in self._variables[number])
        if key not in self._known[1]:
            self._known[1][key] = self._rows(number, values, prices)
        return self._known[1][key]

    def _rows(
        self, number: int, values: Sequence[int], prices: Floats
    ) -> tuple[Floats, tuple[Edge, ...]]:
        total = np.zeros(PARTS)
        wanted: dict[tuple[State, bool], list[int]] = {}
        edges = self.edges[number]
        targets = [edge.target_at(values) for edge in edges]
        for index, edge in enumerate(edges):
            state = edge.targets.values[targets[index][0]]
            if state.absent:
                continue
            key = state, edge.flows
            if not edge.flows:  # a reader without a gradient takes whatever reaches the layout
                key = next((k for k in wanted if k[0].layout == state.layout), key)
            wanted.setdefault(key, []).append(index)
        remade: list[Edge] = []
        for some in wanted.values():
            costs, legal = self.costs[number][some[0]]
            source, seen = edges[some[0]].source_at(values)
            needed = max(targets[i][1] for i in some)
            at = slice(None), source, seen, targets[some[0]][0], needed
            priced = np.where(legal[at], costs[at] @ prices[PASSES], np.inf)
            best = int(priced.argmin())
            total += costs[at][best]
            remade += [edges[i] for i in some] if best else []
        return total, tuple(remade)


def _costs_of_all(
    edges: Sequence[tuple[Edge, ...]], prices: Prices, fates: Fates
) -> list[tuple[Costs, ...]]:
    """The costs of the edges of each flow; edges with equal transitions share one table."""
    distinct = tuple(dict.fromkeys(edge.transitions for some in edges for edge in some))
    tables = dict(zip(distinct, redistributions(prices, distinct), strict=True))
    known: dict[tuple[int, bool, bool], Costs] = {}

    def costs(edge: Edge) -> Costs:
        table = tables[edge.transitions]
        enters = edge.reader is not None and fates.enters(edge.flow, edge.reader)
        key = id(table), enters, edge.stays
        if key not in known:
            known[key] = costs_of(edge, table, prices, enters=enters)
        return known[key]

    return [tuple(map(costs, some)) for some in edges]


def _copied(
    edge: Edge,
    costs: Costs,
    own: View,
    copies: Sequence[tuple[State, int] | None],
    others: Indices,
) -> Term:
    """One reader beside a shared copy: it takes that for nothing, or pays alone; where there is a
    copy, a share, as if as many took another as is possible (`others`).
    """
    targets = edge.targets.values
    takes = np.zeros((1, 1, 1, len(copies), len(targets), 2), dtype=bool)
    for position, copy in enumerate(copies):
        for target, state in enumerate(targets if copy and not edge.stays else ()):
            assert copy is not None
            same = state == copy[0]
            if not edge.flows:  # a reader without a gradient takes whatever gets there
                same = state.layout == copy[0].layout
            takes[0, 0, 0, position, target] = same, same and bool(copy[1])
    alone = costs[0][:, :, :, None], costs[1][:, :, :, None]
    if others.max() > 1:
        paid = np.where(np.arange(len(copies))[:, None] > 0, 1.0 / others, 1.0)
        alone = alone[0] * paid[:, :, None, None], alone[1]
    free = np.zeros((*[1] * takes.ndim, PARTS))
    return _term((edge.source_end, edge.target_end), (alone, (free, takes)), own)


def _term(
    ends: tuple[End, End], alternatives: Sequence[Costs], between: View | None = None
) -> Term:
    """A term over two ends, and over what is `between` them (axis 3), if anything is; fates are
    merged into the states of the ends.
    """
    found = tuple(_fated(costs, ends) for costs in alternatives)
    views = tuple(view for view in (ends[0][0], between, ends[1][0]) if view is not None)
    return Term(views, found, PASSES, "flow")


def _fated(costs: Costs, ends: tuple[End, End]) -> Costs:
    """Costs and what is legal with the fates of both ends merged into their states."""
    (source, seen), (target, needs) = ends
    return (
        _merged(costs[0], seen, needs, 1, source is None, target is None),
        _merged(costs[1], seen, needs, 0, source is None, target is None),
    )


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
