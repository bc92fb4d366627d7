"""JellyBean's two stages (VLDB 2023), after its paper and prototype: variants, then workers.

Stage 1 chooses variants from the results back to the sources and keeps the assignments whose
variants cost least by themselves, among those that can still reach the accuracy. Stage 2 gives each
of these workers: for up to ten topological orders, operator by operator, from the highest tier of
its inputs up to each tier in turn; in those tiers by a greedy cover: the cheapest worker of the
lowest tier that can carry what is left, else the one with the least dollars per request, its
messages included. A tier takes from each tier of an input its share, as far as links are wide
enough. The cheapest partial assignments are kept, and the cheapest answer whose messages can flow
wins; of equal ones the more accurate. Messages never go down, whatever the workflow allows, and
latency bounds are not looked at. `width` 1 is a greedy planner.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from parloom.workflow.accuracy import accuracy_of, best_accuracy, meets
from parloom.workflow.exact import routed
from parloom.workflow.model import ROUNDING, SOLVED, Edge, Operator, Variant, Worker, Workflow
from parloom.workflow.plan import Plan
from parloom.workflow.program import HOUR_S, Place

WIDTH, ORDERS = 10, 10
Pair = tuple[int, int]
"""The tiers of a sender and a receiver."""


@dataclass(frozen=True)
class _State:
    """Workers of the operators so far."""

    usd_per_h: float
    counts: Mapping[Place, int]
    rates: Mapping[Place, float]
    left: Mapping[str, int]
    tiers: Mapping[str, Mapping[int, float]]
    """Of sources and operators: shares of the rate by tier."""
    bytes_per_s: Mapping[Pair, float]
    """Of the messages of each link."""


@dataclass(frozen=True)
class _Sent:
    """What reaches one tier: dollars an hour of one request per second, its bytes by link, and the
    most requests per second for which links have room.
    """

    usd_per_h: float
    num_bytes: Mapping[Pair, float]
    most_per_s: float


def jellybean(
    workflow: Workflow, *, width: int = WIDTH, orders: int = ORDERS, method: str = "jellybean"
) -> Plan | None:
    """The beam's answer; None where it finds none."""
    found = [
        (state.usd_per_h, -(accuracy_of(workflow, variants) or 0.0), variants, state)
        for variants in _variants(workflow, width)
        for state in _assignments(workflow, variants, width, orders)
    ]
    while found:
        least = min(usd for usd, *_ in found) * (1 + SOLVED)
        for one in sorted((one for one in found if one[0] <= least), key=lambda one: one[1]):
            _, _, variants, state = one
            plan = routed(workflow, variants, state.counts, state.rates, method=method)
            if plan is not None:
                return plan
        found = [one for one in found if one[0] > least]
    return None


def _variants(workflow: Workflow, width: int) -> list[dict[str, str]]:
    """Stage 1: whole choices of variants that reach the accuracy, the cheapest first."""
    chosen: list[dict[str, str]] = [{}]
    for operator in reversed(workflow.order):
        longer = [
            {**one, operator.name: variant.name} for one in chosen for variant in operator.variants
        ]
        fits = [one for one in longer if meets(workflow, best_accuracy(workflow, one))]
        chosen = sorted(fits, key=lambda one: _cost_alone(workflow, one))[:width]
    return [one for one in chosen if meets(workflow, accuracy_of(workflow, one))]


def _cost_alone(workflow: Workflow, chosen: Mapping[str, str]) -> float:
    """Dollars an hour of the workers' time that variants take, each on its cheapest worker."""
    total = 0.0
    for name, variant in chosen.items():
        latencies = workflow.operator(name).variant(variant).latency_s
        cheapest = min(workflow.worker(w).usd_per_h * s for w, s in latencies.items())
        total += workflow.rates[name] * cheapest
    return total


def _assignments(
    workflow: Workflow, variants: Mapping[str, str], width: int, orders: int
) -> Iterator[_State]:
    """Stage 2: the beam over each order."""
    one_way = replace(workflow, two_way=False)
    start = _State(
        0.0,
        {},
        {},
        {worker.name: worker.count for worker in workflow.workers},
        {source.name: {source.tier: 1.0} for source in workflow.sources},
        {},
    )
    seen: set[tuple[tuple[Place, float], ...]] = set()
    for order in islice(_orders(workflow), orders):
        states = [start]
        for operator in order:
            variant = operator.variant(variants[operator.name])
            longer = (s for state in states for s in _placed(one_way, state, operator, variant))
            # The same workers for up to another tier are the same assignment.
            apart = {tuple(sorted(state.rates.items())): state for state in longer}
            states = sorted(apart.values(), key=lambda state: state.usd_per_h)[:width]
        for state in states:
            key = tuple(sorted(state.rates.items()))
            if key not in seen:
                seen.add(key)
                yield state


def _orders(workflow: Workflow) -> Iterator[tuple[Operator, ...]]:
    """Topological orders, one at a time."""
    operators = {operator.name for operator in workflow.operators}
    before = {
        o.name: {e.producer for e in workflow.inputs(o.name)} & operators
        for o in workflow.operators
    }
    by_name = {operator.name: operator for operator in workflow.operators}

    def longer(done: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(done) == len(by_name):
            yield done
            return
        for name in by_name:
            if name not in done and before[name] <= set(done):
                yield from longer((*done, name))

    for names in longer(()):
        yield tuple(by_name[name] for name in names)


def _placed(
    workflow: Workflow, state: _State, operator: Operator, variant: Variant
) -> Iterator[_State]:
    """The operator on tiers from its inputs' highest up to each."""
    edges = workflow.inputs(operator.name)
    lowest = max(max(state.tiers[edge.producer]) for edge in edges)
    for highest in range(lowest, len(workflow.tiers)):
        tiers = range(lowest, highest + 1)
        reached = ((tier, _sent(workflow, state, edges, tier)) for tier in tiers)
        sent = {tier: own for tier, own in reached if own is not None}
        taken = _cover(workflow, state, operator, variant, sent)
        if taken is not None:
            yield _with(workflow, state, operator, variant, sent, taken)


def _sent(workflow: Workflow, state: _State, edges: tuple[Edge, ...], tier: int) -> _Sent | None:
    """What reaches a tier of each input's tiers; None where a link is missing."""
    usd = 0.0
    num_bytes: dict[Pair, float] = {}
    for edge in edges:
        size = edge.size(_variant_of(state, edge.producer))
        for sender, share in state.tiers[edge.producer].items():
            link = workflow.link(sender, tier)
            if link is None:
                return None
            usd += share * size * link.usd_per_byte * HOUR_S
            pair = sender, tier
            num_bytes[pair] = num_bytes.get(pair, 0.0) + share * size
    rooms = [float("inf")]
    for pair, own in num_bytes.items():
        link = workflow.link(*pair)
        assert link is not None
        if own > 0:
            rooms.append((link.bytes_per_s - state.bytes_per_s.get(pair, 0.0)) / own)
    return _Sent(usd, num_bytes, max(0.0, min(rooms)))


def _variant_of(state: _State, name: str) -> str:
    return next((place[1] for place in state.counts if place[0] == name), "")


def _cover(
    workflow: Workflow,
    state: _State,
    operator: Operator,
    variant: Variant,
    sent: Mapping[int, _Sent],
) -> list[tuple[Worker, float]] | None:
    """Workers, one by one with their rates, until the operator's rate is carried."""
    whole = rest = workflow.rates[operator.name]
    room = {tier: own.most_per_s for tier, own in sent.items()}
    free = []
    for name, latency in variant.latency_s.items():
        worker = workflow.worker(name)
        if worker.tier in sent and state.left[name]:
            # Dollars per request of a worker that is busy all the time.
            usd = worker.usd_per_h * latency + sent[worker.tier].usd_per_h
            free.append((usd, worker, latency))
    free.sort(key=lambda one: (one[0], one[0] / one[2]))
    left = {worker.name: state.left[worker.name] for _, worker, _ in free}
    taken: list[tuple[Worker, float]] = []
    while rest > ROUNDING * whole:
        free = [one for one in free if left[one[1].name] and room[one[1].tier] > ROUNDING * whole]
        if not free:
            return None
        lowest = min(worker.tier for _, worker, _ in free)
        alone = [
            (worker.usd_per_h + rest * sent[lowest].usd_per_h, -latency, worker, latency)
            for _, worker, latency in free
            if worker.tier == lowest
            and rest * latency <= 1 + ROUNDING
            and rest <= room[lowest] * (1 + ROUNDING)
        ]
        if alone:
            _, _, worker, latency = min(alone, key=lambda one: one[:2])
        else:
            _, worker, latency = free[0]
        carried = min(rest, 1 / latency, room[worker.tier])
        taken.append((worker, carried))
        rest -= carried
        room[worker.tier] -= carried
        left[worker.name] -= 1
    return taken


def _with(
    workflow: Workflow,
    state: _State,
    operator: Operator,
    variant: Variant,
    sent: Mapping[int, _Sent],
    taken: list[tuple[Worker, float]],
) -> _State:
    counts, rates, left = dict(state.counts), dict(state.rates), dict(state.left)
    shares: dict[int, float] = {}
    num_bytes = dict(state.bytes_per_s)
    usd = state.usd_per_h
    for worker, rate in taken:
        place = operator.name, variant.name, worker.name
        counts[place] = counts.get(place, 0) + 1
        rates[place] = rates.get(place, 0.0) + rate
        left[worker.name] -= 1
        part = rate / workflow.rates[operator.name]
        shares[worker.tier] = shares.get(worker.tier, 0.0) + part
        usd += worker.usd_per_h + rate * sent[worker.tier].usd_per_h
        for pair, each in sent[worker.tier].num_bytes.items():
            num_bytes[pair] = num_bytes.get(pair, 0.0) + rate * each
    return _State(usd, counts, rates, left, {**state.tiers, operator.name: shares}, num_bytes)
