"""The integer program of a workflow: variants, counts of workers, shares of rates, flows.

Columns: `picks` (operator, variant) in {0, 1}; `counts` (operator, variant, worker) whole numbers:
workers of one type are alike, so that no two solutions differ by their names; `parts` of the
operator's rate that a tier takes, and, where waits count, `shares` that a type of workers takes;
`flows` of an edge from tier to tier, as shares of the consumer's rate. One worker's part of its
type's share is the same for all, which no other split beats: costs depend on sums only, and waits
are convex. `used` (operator, tier) in {0, 1} says whether a tier does any of an operator's work,
where messages cannot go from every tier to every other: an operator that is used in a tier has an
input that is used in a tier before it. Fractions of counts do not show that; the solver branches on
it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from parloom.linear_program import LinearProgram
from parloom.workflow.accuracy import add_floor
from parloom.workflow.model import ROUNDING, Edge, Operator, Variant, Workflow
from parloom.workflow.queueing import UTILIZATIONS, tangent, together

HOUR_S = 3600.0
BUSIEST = 0.999
"""The most that a worker is busy where there is a latency bound: a wait of 500 latencies."""
MOST_DIVISORS = 12
LEAST_PART = 1e-3
Place = tuple[str, str, str]
"""An operator, its variant, and a type of workers."""
Part = tuple[str, str, int]
"""An operator, its variant, and a tier."""
FlowKey = tuple[str, str, str, int, int]
"""Producer, its variant ("" where all send alike), consumer, and the tiers of both."""


@dataclass(frozen=True)
class Goal:
    """What is made small: dollars (by default), latency, or less of the rates left out (`scale`,
    whose waits are not looked at).

    `more_workers`: the dollars of workers beyond those that are there, instead of all dollars; with
    a latency bound, up to so many times the workers that carry the rate.
    """

    latency: bool = False
    scale: bool = False
    more_workers: int = 0


COST = Goal()


@dataclass
class Program:
    """The program of one workflow, and its columns by what they decide."""

    workflow: Workflow
    goal: Goal = COST
    lp: LinearProgram = field(default_factory=LinearProgram)
    picks: dict[tuple[str, str], int] = field(default_factory=dict)
    counts: dict[Place, int] = field(default_factory=dict)
    parts: dict[Part, int] = field(default_factory=dict)
    shares: dict[Place, int] = field(default_factory=dict)
    used: dict[tuple[str, int], int] = field(default_factory=dict)
    flows: dict[FlowKey, int] = field(default_factory=dict)
    times: dict[Place, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    scale: int | None = None

    def __post_init__(self) -> None:
        if self.goal.scale:
            self.scale = self.lp.column(-1.0, high=1.0)
        for operator in self.workflow.order:
            self._operator(operator)
        self._workers()
        for edge in self.workflow.edges:
            self._edge(edge)
            self._follow(edge)
        self._bandwidths()
        add_floor(self.lp, self.workflow, self.picks)
        if self.timed:
            self._latency()

    @property
    def timed(self) -> bool:
        """Whether waits count, and are in time."""
        return self.goal.latency or (self.workflow.latency_s is not None and not self.goal.scale)

    @property
    def busiest(self) -> float:
        """The most that a worker is busy; no wait has a mean where it is busy all the time."""
        return BUSIEST if self.goal.latency or self.workflow.latency_s is not None else 1.0

    def paid(self, usd_per_h: float) -> float:
        """The cost of a column whose dollars count, if dollars are the goal."""
        return usd_per_h if self.goal == COST else 0.0

    def _operator(self, operator: Operator) -> None:
        lp, rate = self.lp, self.workflow.rates[operator.name]
        picks = [lp.column(0.0, high=1.0, integer=True) for _ in operator.variants]
        lp.row(dict.fromkeys(picks, 1.0), low=1.0, high=1.0)
        everything: dict[int, float] = {}
        for variant, pick in zip(operator.variants, picks, strict=True):
            self.picks[operator.name, variant.name] = pick
            parts = self._places(operator, variant, pick, rate)
            if self.scale is None:
                lp.row({**dict.fromkeys(parts, 1.0), pick: -1.0}, low=0.0, high=0.0)
            else:
                lp.row({**dict.fromkeys(parts, 1.0), pick: -1.0}, high=0.0)
                everything |= dict.fromkeys(parts, 1.0)
        if self.scale is not None:
            lp.row({**everything, self.scale: -1.0}, low=0.0, high=0.0)

    def _places(self, operator: Operator, variant: Variant, pick: int, rate: float) -> list[int]:
        """Columns of the parts that tiers take, of which workers carry no more than they can."""
        tiers: dict[int, dict[int, float]] = {}
        for name, latency in variant.latency_s.items():
            worker = self.workflow.worker(name)
            # Share of the rate that one worker carries.
            capacity = self.busiest / (latency * rate)
            enough = math.ceil(1 / capacity * (1 - ROUNDING))
            most = worker.count if self.timed else min(worker.count, enough)
            if self.goal.more_workers:
                most = enough * self.goal.more_workers if self.timed else enough
            count = self.lp.column(self.paid(worker.usd_per_h), high=float(most), integer=True)
            self.counts[operator.name, variant.name, name] = count
            tiers.setdefault(worker.tier, {})[count] = min(capacity, 1.0)
        parts = []
        for tier, carried in tiers.items():
            part = self.parts[operator.name, variant.name, tier] = self.lp.column(0.0, high=1.0)
            parts.append(part)
            self._carry(operator, variant, part, carried)
        if self.scale is None:
            self._cover({c: a for carried in tiers.values() for c, a in carried.items()}, pick)
        return parts

    def _carry(
        self, operator: Operator, variant: Variant, part: int, carried: Mapping[int, float]
    ) -> None:
        """A tier's part is within what its workers carry: together, or each by itself."""
        if not self.timed:
            self.lp.row({part: 1.0} | {count: -a for count, a in carried.items()}, high=0.0)
            return
        own = {count: place for place, count in self.counts.items() if count in carried}
        shares = {}
        for count, capacity in carried.items():
            shares[count] = self.shares[own[count]] = self.lp.column(0.0, high=1.0)
            self.lp.row({shares[count]: 1.0, count: -capacity}, high=0.0)
        self.lp.row({**dict.fromkeys(shares.values(), 1.0), part: -1.0}, low=0.0, high=0.0)

    def _cover(self, capacities: Mapping[int, float], pick: int) -> None:
        """Rows on counts alone that whole numbers imply: workers come in no parts.

        Of sum a n >= pick, mixed-integer rounding: with b = 1 / divisor, f = b - floor(b),
        sum (floor(a b) + min(1, (a b - floor(a b)) / f)) n >= ceil(b) pick.
        """
        if not capacities:
            return
        self.lp.row({**capacities, pick: -1.0}, low=0.0)
        paid = sorted(capacities, key=lambda c: self.lp.costs[c] / capacities[c])
        for divisor in {round(capacities[c], 9) for c in paid[:MOST_DIVISORS]}:
            if divisor < LEAST_PART:  # a part of so many workers matters little
                continue
            whole = math.floor(1 / divisor)
            part = 1 / divisor - whole
            if part < LEAST_PART:
                continue
            terms = {}
            for column, capacity in capacities.items():
                times = capacity / divisor
                under = math.floor(times + ROUNDING)
                terms[column] = under + min(1.0, max(0.0, times - under) / part + ROUNDING)
            self.lp.row({**terms, pick: -(whole + 1.0)}, low=0.0)

    def _workers(self) -> None:
        for worker in self.workflow.workers:
            used = [c for (_, _, name), c in self.counts.items() if name == worker.name]
            if not used:
                continue
            terms = dict.fromkeys(used, 1.0)
            if self.goal.more_workers:
                # A worker that costs nothing is one more all the same.
                more = self.lp.column(max(worker.usd_per_h, 1e-3), integer=True)
                terms[more] = -1.0
            self.lp.row(terms, high=float(worker.count))

    def _edge(self, edge: Edge) -> None:
        """Flows of one edge: what its producers have to send, and what its consumers get."""
        sent = self._sent(edge)
        got = self._tiers(edge.consumer, None)
        from_to: dict[int, dict[int, float]] = {tier: {} for tier in got}
        for (variant, sender), (parts, given) in sent.items():
            leaving: dict[int, float] = {}
            for receiver in got:
                link = self.workflow.link(sender, receiver)
                if link is None:
                    continue
                size = edge.size(variant)
                cost = size * self.workflow.rates[edge.consumer] * link.usd_per_byte * HOUR_S
                column = self.lp.column(self.paid(cost))
                self.flows[edge.producer, variant, edge.consumer, sender, receiver] = column
                leaving[column] = from_to[receiver][column] = 1.0
            if leaving:
                # Of messages that are more than a join takes, each tier sends its share: which of
                # them meet others, is not chosen.
                self.lp.row({**leaving, **dict.fromkeys(parts, -1.0)}, low=given, high=given)
        for receiver, shares in got.items():
            self.lp.row({**from_to[receiver], **dict.fromkeys(shares, -1.0)}, low=0.0, high=0.0)

    def _sent(self, edge: Edge) -> dict[tuple[str, int], tuple[list[int], float]]:
        """By variant and tier, the share of the consumer's messages: the sum of columns and of a
        number.
        """
        source = self.workflow.source(edge.producer)
        if source is not None:
            if self.scale is not None:
                return {("", source.tier): ([self.scale], 0.0)}
            return {("", source.tier): ([], 1.0)}
        operator = self.workflow.operator(edge.producer)
        variants = [v.name for v in operator.variants] if edge.by_variant else [None]
        return {
            (variant or "", tier): (parts, 0.0)
            for variant in variants
            for tier, parts in self._tiers(edge.producer, variant).items()
        }

    def _tiers(self, name: str, variant: str | None) -> dict[int, list[int]]:
        """Part columns of an operator, or of one variant of it, by tier."""
        found: dict[int, list[int]] = {}
        for (operator, own, tier), column in self.parts.items():
            if operator == name and variant in (None, own):
                found.setdefault(tier, []).append(column)
        return found

    def _follow(self, edge: Edge) -> None:
        """A tier in which a consumer is used is reached from one in which its producer is."""
        if self.scale is not None or self.workflow.source(edge.producer) is not None:
            return
        senders = self._tiers(edge.producer, None)
        for receiver in self._tiers(edge.consumer, None):
            before = [s for s in senders if self.workflow.link(s, receiver) is not None]
            if len(before) < len(senders):
                terms = {self._use(edge.producer, sender): 1.0 for sender in before}
                self.lp.row({**terms, self._use(edge.consumer, receiver): -1.0}, low=0.0)

    def _use(self, name: str, tier: int) -> int:
        """Whether the tier does any of the operator's work: a part, by a worker at least."""
        if (name, tier) not in self.used:
            column = self.used[name, tier] = self.lp.column(0.0, high=1.0, integer=True)
            parts = dict.fromkeys(self._tiers(name, None)[tier], 1.0)
            self.lp.row({**parts, column: -1.0}, high=0.0)
            workers = {
                count: 1.0
                for (operator, _, worker), count in self.counts.items()
                if operator == name and self.workflow.worker(worker).tier == tier
            }
            self.lp.row({**workers, column: -1.0}, low=0.0)
        return self.used[name, tier]

    def _bandwidths(self) -> None:
        for pair, link in self.workflow.links.items():
            if link.bytes_per_s == float("inf"):
                continue
            terms = {
                column: self.flow_bytes_per_s(key) / link.bytes_per_s
                for key, column in self.flows.items()
                if key[3:] == pair
            }
            if terms:
                self.lp.row(terms, high=1.0)

    def flow_bytes_per_s(self, key: FlowKey) -> float:
        """Bytes per second of a whole flow, which is as much as its consumer's rate."""
        producer, variant, consumer, *_ = key
        edge = next(e for e in self.workflow.inputs(consumer) if e.producer == producer)
        return edge.size(variant) * self.workflow.rates[consumer]

    def _latency(self) -> None:
        """Mean times add up along each path; the latest result is in time."""
        for operator in self.workflow.order:
            self.reached[operator.name] = self.lp.column(0.0)
        for place, share in self.shares.items():
            self.times[place] = self.lp.column(0.0)
            latency = self.workflow.operator(place[0]).variant(place[1]).latency_s[place[2]]
            self.lp.row({self.times[place]: 1.0, share: -latency}, low=0.0)
            for utilization in UTILIZATIONS:
                self.add_tangent(place, utilization)
        for edge in self.workflow.edges:
            self._arrival(edge)
        most, slowest = self.workflow.latency_s, None
        if self.goal.latency:
            slowest, most = self.lp.column(1.0), 0.0
        for sink in self.workflow.sinks:
            terms = {self.reached[sink]: 1.0} | ({} if slowest is None else {slowest: -1.0})
            self.lp.row(terms, high=float("inf") if most is None else most)

    def _arrival(self, edge: Edge) -> None:
        """An operator is done its own time after an input is there, on average."""
        terms = {self.reached[edge.consumer]: 1.0}
        for place, column in self.times.items():
            if place[0] == edge.consumer:
                terms[column] = -1.0
        for key, column in self.flows.items():
            if (key[0], key[2]) == (edge.producer, edge.consumer):
                link = self.workflow.link(*key[3:])
                if link is not None and (seconds := link.seconds(edge.size(key[1]))):
                    terms[column] = -seconds
        if edge.producer in self.reached:
            terms[self.reached[edge.producer]] = -1.0
        self.lp.row(terms, low=0.0)

    def add_tangent(self, place: Place, utilization: float) -> None:
        """A line below the time at these workers, where each is so busy."""
        name, variant, worker = place
        latency = self.workflow.operator(name).variant(variant).latency_s[worker]
        rate = self.workflow.rates[name]
        batch = together(self.workflow, name) / (rate * latency)
        slope, at_zero = tangent(utilization, batch)
        terms = {self.times[place]: 1.0, self.shares[place]: -slope * latency}
        self.lp.row({**terms, self.counts[place]: -at_zero / rate}, low=0.0)

    def fix(
        self,
        variants: Mapping[str, str],
        counts: Mapping[Place, int],
        rates: Mapping[Place, float] | None = None,
    ) -> None:
        """Leave flows, and the rates that are not given, as the only decisions."""
        for (name, variant), column in self.picks.items():
            self._hold(column, float(variants[name] == variant))
        for place, column in self.counts.items():
            self._hold(column, float(counts.get(place, 0)))
        if rates is None:
            return
        for (name, variant, tier), column in self.parts.items():
            own = (
                rate
                for (o, v, worker), rate in rates.items()
                if (o, v, self.workflow.worker(worker).tier) == (name, variant, tier)
            )
            self._hold(column, math.fsum(own) / self.workflow.rates[name])
        for place, column in self.shares.items():
            self._hold(column, rates.get(place, 0.0) / self.workflow.rates[place[0]])

    def _hold(self, column: int, value: float) -> None:
        self.lp.bounds[column] = (value, value)
