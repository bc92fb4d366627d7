"""The layout problem on one mesh: a choice for every operator, a home for every weight that several
read, and what all of it costs.

Costs are sums over operators, ways and weights, each a vector (`prices`, `storage`). Under given
multipliers they are numbers, and elimination finds the least sum.

A value that several operators of one call read is brought to each wanted state once. The minimum
counts a share of a movement for each reader, which is never more than the truth (`shares`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from parloom.cost.walk import Walker
from parloom.ir.layout import Layout
from parloom.ir.plan import Decisions, NodeDecision, Optimizer
from parloom.search.choices import Menu, Menus, assignments
from parloom.search.domains import (
    GROWS,
    balance,
    cost_of,
    narrow_minimum,
    narrow_within,
    near_within,
    restricted,
)
from parloom.search.eliminate import Factor, Indices, Minimum, Regret, Table, regrets
from parloom.search.homes import agreements, homes
from parloom.search.policies import Counts, again, policies_of, receiving, recomputed, running
from parloom.search.prices import KEPT, LINKS, PARTS, Known, Prices
from parloom.search.program import Axes, Block, Flags, Program, State, Weight
from parloom.search.reading import Reading, Way
from parloom.search.shares import Payer, Pool
from parloom.search.storage import WEIGHT_PARTS, Level, StoragePrices, Stored, stored_of
from parloom.search.work import Work

Totals = NDArray[np.int64]


@dataclass(frozen=True)
class Multipliers:
    """What a part of a price counts, of operators and ways, and of weights; and how many calls may
    recompute, for each of `LayoutProblem.policies` (where there is nothing: those that must).
    """

    passes: NDArray[np.float64]
    weights: NDArray[np.float64]
    counts: tuple[Counts, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A value per variable (operators, shared weights, policies of recomputation), a level per
    weight, and what passes and weights cost. `bound` is what no solution under the multipliers
    undercuts.
    """

    values: tuple[int, ...]
    levels: tuple[Level, ...]
    passes: Totals
    weights: Totals
    bound: float = 0.0


class LayoutProblem:
    """All variables and tables of `program` on the mesh of `walker`.

    `menus` and `storage` take the place of all choices that there are.
    `shared`: what is known of prices that hold on every mesh. `work` counts what is solved.
    Activations of `in_flight` microbatches are kept at once.
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
        in_flight: int = 1,
    ) -> None:
        self.program, self.mesh, self.work = program, walker.mesh, work or Work()
        self.prices = Prices(program, walker, shared, in_flight)
        self.storage = storage or StoragePrices(walker, decisions, optimizer)
        self.menus = list(menus) or list(self._menus())
        self.homes = {
            index: tuple(homes(weight, self.menus, self.mesh))
            for index, weight in enumerate(program.weights)
            if len(weight.readers) > 1
        }
        self.variable = {
            index: len(self.menus) + position for position, index in enumerate(self.homes)
        }
        self.sizes = [*map(len, self.menus), *(len(h) for h in self.homes.values())]
        self.policies = policies_of(program)
        self.running, self.receiving = running(self.policies), receiving(self.policies)
        self.calls: dict[tuple[int, Flags], Totals] = {}
        self.operators = [self._operator_parts(i) for i in range(len(self.menus))]
        self.agreements = tuple(
            agreements(program, self.mesh, self.menus, self.homes, self.variable)
        )
        self.solved: dict[object, tuple[int, ...]] = {}  # the minima sought last
        self.decided: dict[tuple[str, int], NodeDecision] = {}
        reading = Reading(program, self.prices, self.menus, self.homes, self.variable)
        self.ways_of = reading.ways()
        self.ways = [way for ways in self.ways_of for way in ways]

    def solve(
        self,
        multipliers: Multipliers,
        tolerance: float = 0.0,
        enough: float = inf,
        barred: Sequence[Factor] = (),
    ) -> Solution:
        """The least cost under `multipliers`, or what is above it by a share of `tolerance`, with
        the tables of `barred`.

        Without values where nothing is possible, nothing possible was seen, or all costs `enough`.
        """
        found = self._minimum(multipliers, tolerance, enough, barred)
        if not found.values:
            passes, weights = (np.zeros(n, dtype=np.int64) for n in (PARTS, WEIGHT_PARTS))
            return Solution((), (), passes, weights, found.cost)
        return self.evaluate(found.values, multipliers, found.cost)

    def undercut(self, multipliers: Multipliers, enough: float) -> float:
        """What no solution undercuts, as soon as that is `enough` or cannot be."""
        return self._minimum(multipliers, 0.0, enough, decides=True).cost

    def _minimum(
        self,
        multipliers: Multipliers,
        share: float,
        enough: float,
        barred: Sequence[Factor] = (),
        *,
        decides: bool = False,
    ) -> Minimum:
        """A bound, and a solution that is at most a `share` above it if that can be proved; only a
        bound where that is `enough`. What `decides` ends where something costs less than that.
        """
        best, bound, before = Minimum(inf, ()), -inf, -inf
        fixed = [*self._fixed(multipliers), *barred]
        factors = [*fixed, *self._moving(multipliers)]
        sizes, apart = self.domains(multipliers), self.apart(multipliers)
        while True:
            self.work.spend()
            like = self.solved.get(multipliers.counts)
            found = narrow_minimum(
                sizes, factors, like, apart=apart, share=share / 2, enough=enough
            )
            bound = max(bound, found.cost)
            if bound >= enough or not found.values:
                return Minimum(bound, () if bound >= enough else best.values)
            self.solved[multipliers.counts] = found.values
            cost = cost_of(factors, found.values) + self.unpaid(found.values, multipliers)
            best = min(best, Minimum(cost, found.values), key=lambda some: some.cost)
            near = best.cost - bound <= share * abs(bound)
            if near or (decides and best.cost < enough):
                return Minimum(bound, best.values)
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
        sizes, apart = self.domains(multipliers), self.apart(multipliers)
        return near_within(sizes, self.factors(multipliers), limit, at_most, apart)

    def factors(self, multipliers: Multipliers) -> list[Factor]:
        """The whole cost as tables."""
        return [*self._fixed(multipliers), *self._moving(multipliers)]

    def domains(self, multipliers: Multipliers) -> list[int]:
        """How many values each variable has: where calls may recompute, policies are variables."""
        return [*self.sizes, *map(len, multipliers.counts)]

    def apart(self, multipliers: Multipliers) -> list[int]:
        """The variables that are policies: nearly all tables of their block kinds have them."""
        sizes = self.domains(multipliers)
        return [v for v in range(len(self.sizes), len(sizes)) if sizes[v] > 1]

    def narrowed(self, multipliers: Multipliers, limit: float) -> list[Indices] | None:
        """See `domains.narrow_within`."""
        sizes, factors = self.domains(multipliers), self.factors(multipliers)
        return narrow_within(sizes, factors, limit, self.apart(multipliers))

    def layouts(self, values: Sequence[int]) -> tuple[int, ...]:
        """`values` without those of policies."""
        return tuple(values[: len(self.sizes)])

    def _fixed(self, multipliers: Multipliers) -> list[Factor]:
        return [
            *self._operator_factors(multipliers),
            *self._weight_factors(multipliers),
            *self.agreements,
        ]

    def _moving(self, multipliers: Multipliers) -> list[Factor]:
        return [self._way_factor(way, multipliers) for way in self.ways]

    # Choices and homes

    def _menus(self) -> Iterator[Menu]:
        """All choices that pins allow."""
        menus = Menus(self.program, self.prices.single)
        for index, operator in enumerate(self.program.operators):
            place = operator.function, operator.node.key
            allowed = self.program.pinned.allowed(place, operator.rule, self.mesh)
            every = allowed and filter(allowed, assignments(operator.rule, self.mesh))
            yield menus.of(index, every)

    def _operator_parts(self, index: int) -> Totals:
        """Prices of all choices of an operator, all its calls together: [choice, part]."""
        operator = self.program.operators[index]
        found = np.zeros((len(self.menus[index]), PARTS), dtype=np.int64)
        for flags, count in operator.flows:
            found += count * self._call(index, flags)
        return found

    def _call(self, index: int, flags: Flags) -> Totals:
        """Prices of all choices of an operator in one call: [choice, part]."""
        key = index, flags
        if key not in self.calls:
            prices = [self.prices.operator(index, c, flags) for c in self.menus[index].choices]
            self.calls[key] = np.array(prices, dtype=np.int64).reshape(-1, PARTS)
        return self.calls[key]

    # Numbers

    def _operator_factors(self, multipliers: Multipliers) -> Iterator[Factor]:
        more = again(multipliers.passes)
        for index, parts in enumerate(self.operators):
            plain = Factor((index,), parts @ multipliers.passes)
            adding = [(p, self._call(index, flags) @ more) for p, flags in self.running[index]]
            yield self._with_policies(plain, adding, multipliers)

    def _way_factor(self, way: Way, multipliers: Multipliers) -> Factor:
        """A way as a table over the choices at both ends, and the policies of its calls."""
        costs = way.flow.count * way.paid(multipliers.passes)
        plain = way.factor(np.where(way.table.legal[way.source_index], costs, np.inf))
        policies = self.receiving[way.number]
        once = way.factor(way.paid(again(multipliers.passes))).costs if policies else None
        adding = [(p, once) for p in policies if once is not None]
        return self._with_policies(plain, adding, multipliers)

    def _with_policies(
        self, plain: Factor, adding: Sequence[tuple[int, Table]], multipliers: Multipliers
    ) -> Factor:
        """A table, and what is added by each call that recomputes, for some policies."""
        scope, costs = plain.scope, plain.costs
        for position, once in adding:
            least = self.policies[position].least
            counts = multipliers.counts[position] if multipliers.counts else ((least, least),)
            once = once.reshape(*once.shape, *[1] * (costs.ndim - once.ndim))
            every = [costs + np.minimum(low * once, high * once) for low, high in counts]
            costs = every[0] if len(every) == 1 else np.stack(every, axis=-1)
            scope = scope if len(every) == 1 else (*scope, len(self.sizes) + position)
        return Factor(scope, costs)

    def balance(self, multipliers: Multipliers) -> None:
        """Share movements among readers such that the least cost under `multipliers` grows, where
        no call recomputes that need not.
        """
        plain = replace(multipliers, counts=())
        pools: dict[Pool, list[Way]] = {}
        for ways in self.ways_of:
            for flows in (False, True):
                some = [way for way in ways if way.pair and way.table.request.flows == flows]
                if len(some) > 1:
                    payers = [self._payer(way, multipliers) for way in some]
                    pools[Pool(payers, len(some) / len(ways))] = some
        self.work.spend()
        balance(self.sizes, self.factors(plain), pools)
        for pool, some in pools.items():
            for way, share in zip(some, pool.shares(), strict=True):
                way.share = share

    def _payer(self, way: Way, multipliers: Multipliers) -> Payer:
        assert way.pair, "the reader of a way between two variables"
        policies = (self.policies[position] for position in self.receiving[way.number])
        forced = sum(policy.least for policy in policies)
        counted = way.flow.count * multipliers.passes + forced * again(multipliers.passes)
        prices = np.where(way.table.legal[way.source_index], way.unshared(counted), 0.0)
        # Where no gradient comes back, whatever reaches the layout will do.
        asked = way.table.request
        states = [s if asked.flows else s.layout for s in asked.targets]
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
        passes = self.passes(values)
        for position, policy in enumerate(self.policies):
            more = self.again_of(policy.block, values)
            low, high = self.counts(position, values, multipliers)
            passes += (low if more @ multipliers.passes >= 0 else high) * more
        return Solution(tuple(values), levels, passes, weights, bound)

    def passes(self, values: Sequence[int], recomputing: Sequence[int] = ()) -> Totals:
        """Prices of all calls, where none recomputes, or so many of each block do."""
        found = np.zeros(PARTS, dtype=np.int64)
        for index, parts in enumerate(self.operators):
            found += parts[values[index]]
        for index, flow in enumerate(self.program.flows):
            found += flow.count * self._moved(index, values)
        for count, block in zip(recomputing, self.program.blocks, strict=bool(recomputing)):
            found += count * self.again_of(block, values)
        return found

    def passes_of(self, block: Block, values: Sequence[int]) -> Totals:
        """The price of one call."""
        found = np.zeros(PARTS, dtype=np.int64)
        for index, flags in block.operators:
            found += self._call(index, flags)[values[index]]
        for index in block.flows:
            found += self._moved(index, values)
        return found

    def again_of(self, block: Block, values: Sequence[int]) -> Totals:
        """What one call costs more where it recomputes."""
        once = self.passes_of(block, values)
        return recomputed(once) - once

    def regrets(
        self, multipliers: Multipliers, kept: Sequence[Indices]
    ) -> tuple[float, tuple[Regret, ...]]:
        """The least cost under `multipliers`, and what every choice kept costs above it."""
        self.work.spend()
        return regrets([len(k) for k in kept], restricted(self.factors(multipliers), kept))

    def ends(self, index: int, multipliers: Multipliers) -> frozenset[int]:
        """The variables on which it depends what a flow costs."""
        ends = (end for way in self.ways_of[index] for end in (way.source, way.target))
        policies = self.receiving[index] if multipliers.counts else ()
        found = {end for end in ends if end is not None}
        return frozenset(found.union(len(self.sizes) + p for p in policies))

    def beyond(
        self, index: int, values: Sequence[int], multipliers: Sequence[Multipliers]
    ) -> list[float]:
        """What a flow costs in all calls beyond what its readers pay, under each of `multipliers`;
        never below zero.
        """
        whole = self._moved(index, values).astype(float)
        for way in self.ways_of[index]:
            source, target = way.states(values)
            share = way.share[way.source_value(values), target]
            whole[:KEPT] -= share * way.table.parts[:KEPT, source, target]
        found = []
        for some in multipliers:
            calls = sum(self.counts(p, values, some)[0] for p in self.receiving[index])
            counted = self.program.flows[index].count * some.passes + calls * again(some.passes)
            found.append(float(whole[:KEPT] @ counted[:KEPT]))
        return found

    def counts(
        self, position: int, values: Sequence[int], multipliers: Multipliers
    ) -> tuple[int, int]:
        """The fewest and the most calls that recompute where a policy is as `values` say."""
        if not multipliers.counts:
            return self.policies[position].least, self.policies[position].least
        return multipliers.counts[position][values[len(self.sizes) + position]]

    def unpaid(self, values: Sequence[int], multipliers: Multipliers) -> float:
        """What all flows cost beyond what their readers pay."""
        shared = (index for index, ways in enumerate(self.ways_of) if len(ways) > 1)
        return sum(self.beyond(index, values, [multipliers])[0] for index in shared)

    def _moved(self, index: int, values: Sequence[int]) -> Totals:
        """What it costs to bring a value to all its readers in a call, equal wishes once."""
        found = np.zeros(PARTS, dtype=np.int64)
        wanted: set[State] = set()
        layouts: set[Layout] = set()
        for way in self.ways_of[index]:
            source, target = way.states(values)
            asked, parts = way.table.request, way.table.parts
            state = asked.targets[target]
            found[KEPT] += way.kept[source, target]
            # A reader that returns no gradient takes whatever reaches the layout.
            known = state in wanted if asked.flows else state.layout in layouts
            if not known:
                found[:KEPT] += parts[:KEPT, source, target]
                found[LINKS] += parts[LINKS, source, target]
            if asked.flows:
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
