"""The layout problem on one mesh: a choice for every operator, a home for every weight that several
read, and what all of it costs.

Costs are sums over operators, ways and weights, each a vector (`prices`, `storage`). Under given
multipliers they are numbers, and elimination finds the least sum. Ways are priced exactly only
where a minimum uses them: as long as it uses an optimistic price, that price is replaced and the
minimum sought again, so that the last one is a minimum under the true prices.

A value that several operators of one call read is brought to each wanted state once. The minimum
counts a share of a movement for each reader, which is never more than the truth (`shares`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from parloom.cost.walk import Walker
from parloom.ir.layout import Layout
from parloom.ir.ops import Site, op_of
from parloom.ir.plan import Decisions, NodeDecision, Optimizer
from parloom.search.choices import Distinct, Menu, assignments, menu_of
from parloom.search.domains import (
    GROWS,
    balance,
    cost_of,
    narrow_minimum,
    near_within,
    restricted,
)
from parloom.search.eliminate import Factor, Indices, Minimum, Regret, Table, regrets
from parloom.search.homes import agreements, homes
from parloom.search.prices import KEPT, LINKS, PARTS, Known, Prices
from parloom.search.program import (
    Axes,
    Block,
    Flow,
    Operator,
    Program,
    Reader,
    State,
    Weight,
)
from parloom.search.shares import Payer, Pool
from parloom.search.storage import WEIGHT_PARTS, Level, StoragePrices, Stored, stored_of
from parloom.search.ways import Ways
from parloom.search.work import Work

Totals = NDArray[np.int64]
WHOLE = State(Layout())


@dataclass(frozen=True)
class Multipliers:
    """What a part of a price counts: per function for operators and ways, and for weights."""

    functions: Mapping[str, NDArray[np.float64]]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """A value per variable (operators, then shared weights), a level per weight, and what it costs
    per function and for all weights. `bound` is what no solution under the multipliers undercuts.
    """

    values: tuple[int, ...]
    levels: tuple[Level, ...]
    functions: Mapping[str, Totals]
    weights: Totals
    bound: float = 0.0


@dataclass
class _Way:
    """How one reader gets its value: tables between the states of two variables. `share` is what it
    pays of that, [value of the source, state of the reader].
    """

    flow: Flow
    reader: Reader | None
    source: int | None
    source_index: NDArray[np.intp]
    target: int | None
    target_index: NDArray[np.intp]
    ways: Ways
    kept: NDArray[np.int64]
    function: str
    share: Table

    @property
    def pair(self) -> tuple[int, int] | None:
        """The variables at its ends, if there are two."""
        if self.source is None or self.target is None or self.source == self.target:
            return None
        return self.source, self.target


class LayoutProblem:
    """All variables and tables of `program` on the mesh of `walker`.

    `menus` and `storage` take the place of all choices that there are.
    `shared`: what is known of prices that hold on every mesh. `work` counts what is solved.
    """

    def __init__(
        self,
        program: Program,
        walker: Walker,
        decisions: Decisions,
        optimizer: Optimizer,
        *,
        menus: Sequence[Menu] = (),
        storage: StoragePrices | None = None,
        shared: Known | None = None,
        work: Work | None = None,
    ) -> None:
        self.program, self.mesh, self.work = program, walker.mesh, work or Work()
        self.prices = Prices(program, walker, shared)
        self.storage = storage or StoragePrices(walker, decisions, optimizer)
        self.menus = list(menus) or [self._menu(o) for o in program.operators]
        self.homes = {
            index: tuple(homes(weight, self.menus, self.mesh))
            for index, weight in enumerate(program.weights)
            if len(weight.readers) > 1
        }
        self.variable = {
            index: len(self.menus) + position for position, index in enumerate(self.homes)
        }
        self.sizes = [*map(len, self.menus), *(len(h) for h in self.homes.values())]
        self.operators = [self._operator_parts(i) for i in range(len(self.menus))]
        self.agreements = tuple(
            agreements(program, self.mesh, self.menus, self.homes, self.variable)
        )
        self.solved: tuple[int, ...] | None = None  # the minimum sought last
        self.decided: dict[tuple[str, int], NodeDecision] = {}
        self.tables: dict[object, Ways] = {}
        self.ways_of = [tuple(self._ways(flow)) for flow in program.flows]
        self.ways = [way for ways in self.ways_of for way in ways]

    def solve(self, multipliers: Multipliers, tolerance: float = 0.0) -> Solution:
        """The least cost under `multipliers`, or what is above it by a share of `tolerance`."""
        found = self._minimum(multipliers, tolerance)
        return self.evaluate(found.values, multipliers, found.cost)

    def undercut(self, multipliers: Multipliers, enough: float) -> float:
        """What no solution undercuts, as soon as that is `enough` or cannot be."""
        return self._minimum(multipliers, 0.0, enough).cost

    def _minimum(
        self, multipliers: Multipliers, share: float, enough: float | None = None
    ) -> Minimum:
        """A bound, and a solution that is at most a `share` above it if that can be proved; with
        `enough`, until it is known on which side of that the least cost is.
        """
        fixed, best, bound, before = self._fixed(multipliers), Minimum(inf, ()), -inf, -inf
        factors = [*fixed, *self._moving(multipliers)]
        while True:
            self.work.spend()
            found = narrow_minimum(self.sizes, factors, self.solved)
            self.solved, bound = found.values, max(bound, found.cost)
            if not isfinite(found.cost) or (enough is not None and bound >= enough):
                return Minimum(bound, found.values)
            sharpened = self.sharpen(found.values)
            if sharpened:
                factors = [*fixed, *self._moving(multipliers)]
            cost = cost_of(factors, found.values) + self.unpaid(found.values, multipliers)
            best = min(best, Minimum(cost, found.values), key=lambda some: some.cost)
            near = best.cost - bound <= share * abs(bound)
            if near or (enough is not None and best.cost < enough):
                return Minimum(bound, best.values)
            if not sharpened:
                if min(best.cost - bound, bound - before) <= GROWS * abs(bound):
                    return Minimum(bound, best.values)
                before = bound
                self.balance(multipliers)
                factors = [*fixed, *self._moving(multipliers)]

    def near(
        self, multipliers: Multipliers, limit: float, at_most: int
    ) -> tuple[tuple[int, ...], ...] | None:
        """All values that cost at most `limit` under `multipliers`; None where there are more than
        `at_most`.
        """
        while True:
            factors = self.factors(multipliers)
            found = near_within(self.sizes, factors, limit, at_most)
            # What only optimistic prices of movements let in is gone the next time.
            if found is None or not any([self.sharpen(values) for values in found]):
                return found

    def factors(self, multipliers: Multipliers) -> list[Factor]:
        """The whole cost as tables; ways as exact as they are."""
        return [*self._fixed(multipliers), *self._moving(multipliers)]

    def _fixed(self, multipliers: Multipliers) -> list[Factor]:
        return [
            *self._operator_factors(multipliers),
            *self._weight_factors(multipliers),
            *self.agreements,
        ]

    def _moving(self, multipliers: Multipliers) -> list[Factor]:
        return [self._way_factor(way, multipliers) for way in self.ways]

    def _states(self, way: _Way, values: Sequence[int]) -> tuple[int, int]:
        """Indices of the states that `values` mean at both ends of a way."""
        source = way.source_index[0 if way.source is None else values[way.source]]
        target = way.target_index[0 if way.target is None else values[way.target]]
        return int(source), int(target)

    # Choices and homes

    def _menu(self, operator: Operator) -> Menu:
        place = operator.function, operator.node.key
        allowed = self.program.pinned.allowed(place, operator.rule, self.mesh)
        every = assignments(operator.rule, self.mesh)
        return menu_of(operator, self.prices.single, allowed and filter(allowed, every))

    def _operator_parts(self, index: int) -> Totals:
        """Prices of all choices of an operator, all its calls together: [choice, part]."""
        operator = self.program.operators[index]
        found = np.zeros((len(self.menus[index]), PARTS), dtype=np.int64)
        for row, choice in enumerate(self.menus[index].choices):
            for flags, count in operator.flows:
                found[row] += count * self.prices.operator(index, choice, flags)
        return found

    # Ways

    def _ways(self, flow: Flow) -> Iterator[_Way]:
        source, index, states = self._source(flow)
        kept = sum(self.program.keeps(flow, reader) for reader in flow.readers)
        has = self._is_there(flow)
        count = len(flow.readers) - (flow.like is not None) + flow.whole
        for reader in flow.readers:
            if reader == flow.like and not flow.outside:
                continue
            operator = self.program.operators[reader.operator]
            flows = flow.differentiable and op_of(operator.node).differentiable
            distinct = self.menus[reader.operator].operands[reader.operand]
            table = self._table(flow, flows, states, distinct.values)
            sizes = [self.prices.held_bytes(flow.spec, s) for s in distinct.values]
            held = np.array(sizes, dtype=np.int64) * self.program.keeps(flow, reader)
            twice = np.array([[has and s.layout == t.layout for t in distinct.values]
                              for s in states])  # fmt: skip
            yield _Way(flow, reader, source, index, reader.operator, distinct.index, table,
                       np.where(twice, 0, held // max(kept, 1)), operator.function,
                       np.full((len(index), len(distinct.values)), 1 / count))  # fmt: skip
        if flow.whole:
            table = self._table(flow, flow.differentiable, states, (WHOLE,))
            none, nothing = np.zeros(1, dtype=np.intp), np.zeros((len(states), 1), dtype=np.int64)
            main = self.program.graph.main.name
            yield _Way(flow, None, source, index, None, none, table, nothing, main,
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

    def _table(
        self, flow: Flow, flows: bool, sources: tuple[State, ...], targets: tuple[State, ...]
    ) -> Ways:
        key = flow.spec, flows, sources, targets
        if key not in self.tables:
            self.tables[key] = Ways(self.prices, flow.spec, flows, sources, targets)
        return self.tables[key]

    def _is_there(self, flow: Flow) -> bool:
        """Whether the value as it is made stays in memory of this part, whoever reads it."""
        if flow.operator < 0:
            return flow.like is not None and not flow.outside
        operator = self.program.operators[flow.operator]
        site = Site(operator.node, operator.operands)
        flows = any(any(flags) for flags, _ in operator.flows)
        return flows and ("result", flow.result) in op_of(operator.node).saves(site)

    # Numbers

    def _operator_factors(self, multipliers: Multipliers) -> Iterator[Factor]:
        for index, parts in enumerate(self.operators):
            weights = multipliers.functions[self.program.operators[index].function]
            yield Factor((index,), parts @ weights)

    def _way_factor(self, way: _Way, multipliers: Multipliers) -> Factor:
        """A way as a table over the choices at both ends."""
        kept = multipliers.functions[way.function][KEPT] * way.flow.count * way.kept
        costs = self._unshared(way, multipliers) * way.share + kept[way.source_index]
        costs = np.where(way.ways.legal[way.source_index], costs, np.inf)
        if way.source is None:
            return Factor(
                (way.target,) if way.target is not None else (), costs[0, way.target_index]
            )
        if way.target is None:
            return Factor((way.source,), costs[:, 0])
        if way.source == way.target:
            return Factor((way.source,), costs[range(len(costs)), way.target_index])
        return Factor((way.source, way.target), costs[:, way.target_index])

    def _unshared(self, way: _Way, multipliers: Multipliers) -> Table:
        """What a way costs whoever pays for it: [value of the source, state of the reader]."""
        weights = multipliers.functions[way.function] * way.flow.count
        costs = np.tensordot(weights[:KEPT], way.ways.parts[:KEPT], axes=1)
        if weights[LINKS].any():
            costs += np.tensordot(weights[LINKS], way.ways.parts[LINKS], axes=1)
        found: Table = costs[way.source_index]
        return found

    def balance(self, multipliers: Multipliers) -> None:
        """Share movements among readers such that the least cost under `multipliers` grows."""
        pools: dict[Pool, list[_Way]] = {}
        for ways in self.ways_of:
            for flows in (False, True):
                some = [way for way in ways if way.pair and way.ways.flows == flows]
                if len(some) > 1:
                    payers = [self._payer(way, multipliers) for way in some]
                    pools[Pool(payers, len(some) / len(ways))] = some
        self.work.spend()
        balance(self.sizes, self.factors(multipliers), pools)
        for pool, some in pools.items():
            for way, share in zip(some, pool.shares(), strict=True):
                way.share = share

    def _payer(self, way: _Way, multipliers: Multipliers) -> Payer:
        assert way.pair, "the reader of a way between two variables"
        prices = np.where(way.ways.legal[way.source_index], self._unshared(way, multipliers), 0.0)
        # Where no gradient comes back, whatever reaches the layout will do.
        states = [s if way.ways.flows else s.layout for s in way.ways.targets]
        return Payer(*way.pair, way.target_index, states, prices, way.share)

    def _weight_factors(self, multipliers: Multipliers) -> Iterator[Factor]:
        for index, weight in enumerate(self.program.weights):
            if index in self.homes:
                costs = [
                    self._level(weight, h.layout, h.reduce, multipliers)[0]
                    for h in self.homes[index]
                ]
                yield Factor((self.variable[index],), np.array(costs))
            elif weight.readers:
                (reader,) = weight.readers
                distinct = self.menus[reader.operator].operands[reader.operand]
                costs = [
                    self._level(weight, s.layout, s.varying, multipliers)[0]
                    for s in distinct.values
                ]
                yield Factor((reader.operator,), np.array(costs)[distinct.index])
            else:
                yield Factor((), np.array(self._level(weight, Layout(), (), multipliers)[0]))

    def _level(
        self, weight: Weight, layout: Layout, reduce: Axes, multipliers: Multipliers
    ) -> tuple[float, Level, Totals]:
        """The best level for all weights that are equal: cost, level, parts."""
        stored = stored_of(self.program, weight, layout, reduce)
        levels, parts = self.storage.options(stored)
        if not levels:  # pins: not with this layout
            return float("inf"), Level(), np.zeros(WEIGHT_PARTS, dtype=np.int64)
        costs = parts @ multipliers.weights
        best = int(costs.argmin())
        return float(costs[best]) * weight.count, levels[best], parts[best] * weight.count

    # Answers

    def evaluate(
        self, values: Sequence[int], multipliers: Multipliers, bound: float = 0.0
    ) -> Solution:
        """What `values` cost in truth, with the levels that are best under `multipliers`."""
        levels, weights = self._levels(values, multipliers)
        return Solution(tuple(values), levels, self.passes(values), weights, bound)

    def passes(self, values: Sequence[int]) -> dict[str, Totals]:
        """Prices of all calls per function."""
        graph = self.program.graph
        found = {f.name: np.zeros(PARTS, dtype=np.int64) for f in (graph.main, *graph.functions)}
        for index, parts in enumerate(self.operators):
            found[self.program.operators[index].function] += parts[values[index]]
        for index, flow in enumerate(self.program.flows):
            if self.ways_of[index]:
                function = self.ways_of[index][0].function
                found[function] += flow.count * self._moved(index, values)
        return found

    def passes_of(self, block: Block, values: Sequence[int]) -> Totals:
        """The price of one call."""
        found = np.zeros(PARTS, dtype=np.int64)
        for index, flags in block.operators:
            found += self.prices.operator(index, self.menus[index].choices[values[index]], flags)
        for index in block.flows:
            found += self._moved(index, values)
        return found

    def regrets(
        self, multipliers: Multipliers, kept: Sequence[Indices]
    ) -> tuple[float, tuple[Regret, ...]]:
        """The least cost under `multipliers`, and what every choice kept costs above it."""
        self.work.spend()
        return regrets([len(k) for k in kept], restricted(self.factors(multipliers), kept))

    def sharpen(self, values: Sequence[int]) -> bool:
        """Price the ways that `values` use; whether any was optimistic."""
        changed = False
        for way in self.ways:
            changed |= way.ways.sharpen(*self._states(way, values))
        return changed

    def beyond(self, index: int, values: Sequence[int]) -> NDArray[np.float64]:
        """What a flow costs in all calls beyond what is counted for each of its readers, by parts,
        as far as prices are known; never below zero.
        """
        flow, ways = self.program.flows[index], self.ways_of[index]
        whole = self._moved(index, values, exact=False).astype(float)
        whole[KEPT] = 0
        for way in ways:
            source, target = self._states(way, values)
            share = way.share[0 if way.source is None else values[way.source], target]
            whole[:KEPT] -= share * way.ways.parts[:KEPT, source, target]
        return flow.count * whole

    def unpaid(self, values: Sequence[int], multipliers: Multipliers) -> float:
        """What all flows cost beyond what their readers pay."""
        return sum(
            float(self.beyond(i, values)[:KEPT] @ multipliers.functions[ways[0].function][:KEPT])
            for i, ways in enumerate(self.ways_of)
            if len(ways) > 1
        )

    def _moved(self, index: int, values: Sequence[int], exact: bool = True) -> Totals:
        """What it costs to bring a value to all its readers in a call, equal wishes once."""
        found = np.zeros(PARTS, dtype=np.int64)
        wanted: set[State] = set()
        layouts: set[Layout] = set()
        for way in self.ways_of[index]:
            source, target = self._states(way, values)
            if exact:
                way.ways.sharpen(source, target)
            state = way.ways.targets[target]
            found[KEPT] += way.kept[source, target]
            # A reader that returns no gradient takes whatever reaches the layout.
            known = state in wanted if way.ways.flows else state.layout in layouts
            if not known:
                found[:KEPT] += way.ways.parts[:KEPT, source, target]
                found[LINKS] += way.ways.parts[LINKS, source, target]
            if way.ways.flows:
                wanted.add(state)
            layouts.add(state.layout)
        return found

    def _levels(
        self, values: Sequence[int], multipliers: Multipliers
    ) -> tuple[tuple[Level, ...], Totals]:
        levels, total = [], np.zeros(WEIGHT_PARTS, dtype=np.int64)
        for index, weight in enumerate(self.program.weights):
            layout, reduce = self.home(index, values)
            _, level, parts = self._level(weight, layout, reduce, multipliers)
            levels.append(level)
            total += parts
        return tuple(levels), total

    def stored(self, index: int, values: Sequence[int]) -> Stored:
        """A weight where `values` put it."""
        return stored_of(self.program, self.program.weights[index], *self.home(index, values))

    def home(self, index: int, values: Sequence[int]) -> tuple[Layout, Axes]:
        """Compute layout of a weight, and the axes over which its gradient is partial."""
        weight = self.program.weights[index]
        if index in self.homes:
            home = self.homes[index][values[self.variable[index]]]
            return home.layout, home.reduce
        if not weight.readers:
            return Layout(), ()
        (reader,) = weight.readers
        state = (
            self.menus[reader.operator].choices[values[reader.operator]].operands[reader.operand]
        )
        return state.layout, state.varying

    def decisions(self, values: Sequence[int], base: Decisions) -> Decisions:
        """The layouts of `values` as a plan says them."""
        nodes = []
        for name, index in self.program.index.items():
            key = name, values[index]
            if key not in self.decided:
                choice = self.menus[index].choices[values[index]]
                self.decided[key] = NodeDecision(name, choice.assignment)
            nodes.append(self.decided[key])
        return replace(base, mesh=self.mesh, nodes=tuple(nodes))
