"""How values get from where they are made to those that read them, as tables between two variables
(an operator's choice, a weight's home).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parloom.ir.layout import Layout
from parloom.ir.ops import op_of
from parloom.search.choices import Distinct, Menu
from parloom.search.eliminate import Factor, Table
from parloom.search.homes import Home
from parloom.search.prices import KEPT, LINKS, Prices
from parloom.search.program import Flow, Program, Reader, State
from parloom.search.redistribution import Redistribution, Request, redistributions

WHOLE = State(Layout())


@dataclass
class Way:
    """How one reader gets its value: tables between the states of two variables. `share` is what it
    pays of that, [value of the source, state of the reader].
    """

    flow: Flow
    number: int
    reader: Reader | None
    source: int | None
    source_index: NDArray[np.intp]
    target: int | None
    target_index: NDArray[np.intp]
    table: Redistribution
    kept: NDArray[np.int64]
    share: Table

    @property
    def pair(self) -> tuple[int, int] | None:
        """The variables at its ends, if there are two."""
        if self.source is None or self.target is None or self.source == self.target:
            return None
        return self.source, self.target

    def factor(self, costs: Table) -> Factor:
        """Costs [value of the source, state of the reader] as a table over values at both ends."""
        if self.source is None:
            if self.target is None:
                return Factor((), np.asarray(costs[0, 0]))
            return Factor((self.target,), costs[0, self.target_index])
        if self.target is None:
            return Factor((self.source,), costs[:, 0])
        if self.source == self.target:
            return Factor((self.source,), costs[range(len(costs)), self.target_index])
        return Factor((self.source, self.target), costs[:, self.target_index])

    def paid(self, passes: NDArray[np.float64]) -> Table:
        """What the reader pays in one call: [value of the source, state of the reader]."""
        costs: Table = self.unshared(passes) * self.share
        costs += (passes[KEPT] * self.kept)[self.source_index]
        return costs

    def unshared(self, passes: NDArray[np.float64]) -> Table:
        """What it costs in one call, whoever pays: [value of the source, state of the reader]."""
        costs = np.tensordot(passes[:KEPT], self.table.parts[:KEPT], axes=1)
        if passes[LINKS].any():
            costs += np.tensordot(passes[LINKS], self.table.parts[LINKS], axes=1)
        found: Table = costs[self.source_index]
        return found

    def source_value(self, values: Sequence[int]) -> int:
        """The value of its source; 0 where that is no variable."""
        return 0 if self.source is None else values[self.source]

    def states(self, values: Sequence[int]) -> tuple[int, int]:
        """Indices of the states that `values` mean at both ends."""
        target = 0 if self.target is None else values[self.target]
        return int(self.source_index[self.source_value(values)]), int(self.target_index[target])


class Reading:
    """The ways of all flows of a program on one mesh."""

    def __init__(
        self,
        program: Program,
        prices: Prices,
        menus: Sequence[Menu],
        homes: Mapping[int, Sequence[Home]],
        variable: Mapping[int, int],
    ) -> None:
        self.program, self.prices, self.menus = program, prices, menus
        self.homes, self.variable = homes, variable

    def ways(self) -> list[tuple[Way, ...]]:
        """Those of each flow."""
        asked = [list(self._requests(flow)) for flow in self.program.flows]
        wanted = tuple(dict.fromkeys(request for some in asked for request in some))
        tables = dict(zip(wanted, redistributions(self.prices, wanted), strict=True))
        return [
            tuple(self._ways(number, flow, [tables[request] for request in some]))
            for number, (flow, some) in enumerate(zip(self.program.flows, asked, strict=True))
        ]

    def _readers(self, flow: Flow) -> list[Reader]:
        return [r for r in flow.readers if r != flow.like or flow.outside]

    def _requests(self, flow: Flow) -> Iterator[Request]:
        """What is asked of redistributions: for each reader, and for what is written back."""
        _, _, states = self._source(flow)
        for reader in self._readers(flow):
            operator = self.program.operators[reader.operator]
            flows = flow.differentiable and op_of(operator.node).differentiable
            distinct = self.menus[reader.operator].operands[reader.operand]
            yield Request(flow.spec, flows, states, distinct.values)
        if flow.whole:
            yield Request(flow.spec, flow.differentiable, states, (WHOLE,))

    def _ways(self, number: int, flow: Flow, tables: Sequence[Redistribution]) -> Iterator[Way]:
        source, index, states = self._source(flow)
        kept = sum(self.program.keeps(flow, reader) for reader in flow.readers)
        has = self.program.is_there(flow)
        count = len(tables)
        for reader, table in zip(self._readers(flow), tables, strict=False):
            distinct = self.menus[reader.operator].operands[reader.operand]
            sizes = [self.prices.held_bytes(flow.spec, s) for s in distinct.values]
            held = np.array(sizes, dtype=np.int64) * self.program.keeps(flow, reader)
            twice = np.array([[has and s.layout == t.layout for t in distinct.values]
                              for s in states])  # fmt: skip
            yield Way(flow, number, reader, source, index, reader.operator, distinct.index, table,
                       np.where(twice, 0, held // max(kept, 1)),
                       np.full((len(index), len(distinct.values)), 1 / count))  # fmt: skip
        if flow.whole:
            none, nothing = np.zeros(1, dtype=np.intp), np.zeros((len(states), 1), dtype=np.int64)
            yield Way(flow, number, None, source, index, None, none, tables[-1], nothing,
                       np.full((len(index), 1), 1 / count))  # fmt: skip

    def _source(self, flow: Flow) -> tuple[int | None, NDArray[np.intp], tuple[State, ...]]:
        """The variable that a flow comes from, and the states that its values mean."""
        found: Distinct[State]
        if flow.operator >= 0:
            found = self.menus[flow.operator].results[flow.result]
            return flow.operator, found.index, found.values
        if flow.weight >= 0:
            homes = self.homes[flow.weight]
            found = Distinct.of(State(home.layout, home.reduce) for home in homes)
            return self.variable[flow.weight], found.index, found.values
        if flow.like is not None:
            found = self.menus[flow.like.operator].operands[flow.like.operand]
            return flow.like.operator, found.index, found.values
        return None, np.zeros(1, dtype=np.intp), (WHOLE,)
