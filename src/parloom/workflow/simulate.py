"""Events of a plan, request by request: rates, waits and latencies, to hold against its figures.

Requests come as a Poisson process. Each keeps one number drawn from [0, 1), which says whether it
is among those that a ratio below one lets through, and another, which says how many messages it has
where a ratio is above one, so that a join gets all its inputs of the same request. Its tier at each
operator is drawn by the flows from its tier before (`tiers`). In the tier it goes to a worker at
random, by the rates of the plan, waits there in order of arrival, and is served in the variant's
latency. Links pass messages side by side. Only where several inputs that are spread over tiers meet
may a message have to go from one tier to another between which there is no link: it then takes the
mean time of the flows into its tier.

A network without loops needs no list of events: operators are played in order, each worker's
departures follow from its arrivals (Lindley): end_k = max(arrival_k, end_(k-1)) + latency.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from parloom.errors import InputError
from parloom.workflow.model import Edge, Workflow
from parloom.workflow.plan import Load, Plan
from parloom.workflow.smoothing import smoothed
from parloom.workflow.tiers import Times, Whole, routes

Queue = Callable[[Times, float, Load, np.random.Generator], Times]
WARM_UP = 0.1
FEW = 500
"""Requests that each stream gets, at least, so that its means mean something."""
MOST_MESSAGES = 5_000_000
"""Of one operator: what fits into memory, and into some seconds."""
MANY_PARTS = 12
"""Of a service that a wait is made of: the sum of more is drawn from a normal distribution, which
sums of twelve uniform numbers are taken for since the first generators. A worker that is nearly
always busy has millions.
"""
PARTS = 20
"""Of the run, for the error of a mean."""


@dataclass(frozen=True, slots=True)
class Played:
    """Means over the requests of a run after its first tenth, with the standard error of the end
    to end time; `operators_s` is the time at each operator.
    """

    requests: int
    rate_per_s: float
    """Results that the slowest operator without readers hands out after their first tenth."""
    latency_s: float
    """Of the plan's slowest path, waits for other inputs of joins left out: as the plan has it."""
    end_to_end_s: float
    """From a request's start to its last result, joins waited for."""
    error_s: float
    p99_s: float
    operators_s: Mapping[str, float]
    utilizations: Mapping[tuple[str, str], float]
    """By operator and worker: service of those requests, of the time in which they came."""


@dataclass(slots=True)
class _Stream:
    """Messages of one operator: the request of each, and when it is done."""

    request: Whole
    done: Times


@dataclass(frozen=True, slots=True)
class Expected:
    """Mean times without playing: of the plan's slowest path, from end to end (None where messages
    are too rare to find it), of each operator.
    """

    latency_s: float
    end_to_end_s: float | None
    operators_s: Mapping[str, float]


def expected(plan: Plan, requests: int = 40_000) -> Expected:
    """What play will find, by formulas: waits as if each queue were by itself, with arrivals as
    regular as `smoothed` says. Infinite where a worker is busy all the time.
    """
    if not np.isfinite(plan.latency_s):
        never = {operator.name: float("inf") for operator in plan.workflow.operators}
        return Expected(float("inf"), float("inf"), never)
    waits = smoothed(plan)
    times = {
        operator.name: sum(
            load.rate_per_s * (_service_s(plan, load) + waits[load.operator, load.worker])
            for load in plan.loads_of(operator.name)
        )
        / plan.workflow.rates[operator.name]
        for operator in plan.workflow.operators
    }
    path = plan.path
    latency = sum(times[name] for name in path[1:])
    latency += sum(plan.edge_s(*pair) for pair in pairwise(path))
    try:
        whole = play(plan, requests, waits=waits).end_to_end_s
    except InputError:
        whole = None
    return Expected(latency, whole, times)


def _service_s(plan: Plan, load: Load) -> float:
    return plan.workflow.operator(load.operator).variant(load.variant).latency_s[load.worker]


def play(
    plan: Plan,
    requests: int = 200_000,
    seed: int = 0,
    *,
    waits: Mapping[tuple[str, str], float] | None = None,
) -> Played:
    """Play so many requests, or as many as `sized` says; the same seed plays the same.

    With mean `waits`, each wait is drawn from a distribution, whatever the other requests do.
    """
    workflow = plan.workflow
    requests = sized(workflow, requests)
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / workflow.fastest_per_s, requests))
    kept, where, more = rng.random(requests), rng.random(requests), rng.random(requests)
    routed = routes(plan, where)
    streams: dict[str, _Stream] = {}
    for source in workflow.sources:
        sent = np.flatnonzero(kept < workflow.messages[source.name].present)
        streams[source.name] = _Stream(sent, starts[sent])
    spent: dict[str, float] = {}
    edges: dict[tuple[str, str], float] = {}
    busy: dict[tuple[str, str], float] = {}
    for operator in workflow.order:
        name = operator.name
        mine = workflow.messages[name]
        number = np.where(kept < mine.present, _number(mine.each, more), 0)
        request = np.repeat(np.arange(requests), number)
        index = np.arange(len(request)) - np.repeat(np.cumsum(number) - number, number)
        loads = plan.loads_of(name)
        tier = routed[name].tier[request]
        arrival = np.zeros(len(request))
        warm = request >= _first_warm(requests)
        for edge in workflow.inputs(name):
            on_its_way = _on_its_way_s(plan, edge, routed[edge.producer].tier[request], tier)
            parent = _parents(streams[edge.producer], request, index, number)
            edges[edge.producer, name] = float(on_its_way[warm].mean())
            arrival = np.maximum(arrival, streams[edge.producer].done[parent] + on_its_way)
        queue = _waits if waits is None else partial(_drawn_waits, waits)
        done = _served(plan, loads, arrival, tier, warm, rng, busy, queue)
        spent[name] = float((done - arrival)[warm].mean())
        streams[name] = _Stream(request, done)
    return _measured(plan, starts, streams, spent, edges, busy)


def sized(workflow: Workflow, requests: int) -> int:
    """As many requests, but enough for the rarest stream, and no more than can be played.

    Raises `InputError` where that is not possible.
    """
    found = workflow.messages
    rarest = min(found, key=lambda name: found[name].present)
    least = math.ceil(FEW / found[rarest].present)
    most = int(MOST_MESSAGES / max(own.present * own.each for own in found.values()))
    if least > most:
        raise InputError(
            f"{rarest!r} is reached by one of {1 / found[rarest].present:.4g} requests: too few to"
            f" simulate; rates that are nearer to each other can be"
        )
    return min(max(requests, least), most)


def _first_warm(count: int) -> int:
    """The first of so many that is not of the first tenth."""
    return math.ceil(WARM_UP * count)


def _number(mean: float, drawn: Times) -> Whole:
    """Messages of each request that has some: the whole number below the mean, or one more."""
    whole = int(mean)
    return whole + (drawn < mean - whole).astype(np.int64)


def _parents(stream: _Stream, request: Whole, index: Whole, number: Whole) -> Whole:
    """Of each message, which one of the producer's it is made of."""
    first = np.searchsorted(stream.request, np.arange(len(number)))
    sent = np.append(first[1:], len(stream.request)) - first
    # The k-th of n messages is made of the producer's at the same place among its request's.
    return np.asarray(first[request] + index * sent[request] // number[request])


def _on_its_way_s(plan: Plan, edge: Edge, sender: Whole, receiver: Whole) -> Times:
    """How long each message of an edge takes from tier to tier."""
    workflow = plan.workflow
    size = edge.size(plan.variants.get(edge.producer, ""))
    seconds = np.zeros(len(sender))
    for pair in product(np.unique(sender).tolist(), np.unique(receiver).tolist()):
        between = (sender == pair[0]) & (receiver == pair[1])
        if not between.any():
            continue
        link = workflow.link(*pair)
        if link is not None:
            seconds[between] = link.seconds(size)
            continue
        into = [f for f in plan.flows_of(edge.producer, edge.consumer) if f.receiver == pair[1]]
        if len(workflow.inputs(edge.consumer)) == 1 or not into:
            ends = " to ".join(repr(workflow.tiers[tier]) for tier in pair)
            raise RuntimeError(f"a message goes from {ends}, between which there is no link")
        whole = sum(flow.rate_per_s for flow in into)
        seconds[between] = sum(flow.time_s * flow.rate_per_s for flow in into) / whole
    return seconds


def _served(
    plan: Plan,
    loads: tuple[Load, ...],
    arrival: Times,
    tier: Whole,
    warm: NDArray[np.bool_],
    rng: np.random.Generator,
    busy: dict[tuple[str, str], float],
    queue: Queue,
) -> Times:
    """When each message is done, by the worker that it is sent to; `busy` gets the seconds of
    service that each worker gives to warm ones.
    """
    done = np.zeros(len(arrival))
    drawn = rng.random(len(arrival))
    for level in np.unique(tier):
        here = [load for load in loads if plan.workflow.worker(load.worker).tier == level]
        each = [(load, load.rate_per_s / load.count) for load in here for _ in range(load.count)]
        edges = np.cumsum([rate for _, rate in each])
        mine = np.flatnonzero(tier == level)
        chosen = np.minimum(
            np.searchsorted(edges / edges[-1], drawn[mine], side="right"), len(each) - 1
        )
        for position, (load, _) in enumerate(each):
            messages = mine[chosen == position]
            latency = plan.workflow.operator(load.operator).variant(load.variant)
            service = latency.latency_s[load.worker]
            order = messages[np.argsort(arrival[messages], kind="stable")]
            done[order] = arrival[order] + queue(arrival[order], service, load, rng) + service
            key = load.operator, load.worker
            seconds = int(warm[messages].sum()) * service
            busy[key] = busy.get(key, 0.0) + seconds / load.count
    return done


def _waits(arrival: Times, service_s: float, load: Load, rng: np.random.Generator) -> Times:
    """Before one worker, of messages in order of arrival."""
    steps = service_s * np.arange(len(arrival))
    return np.asarray(np.maximum.accumulate(arrival - steps) + steps - arrival)


def _drawn_waits(
    waits: Mapping[tuple[str, str], float],
    arrival: Times,
    service_s: float,
    load: Load,
    rng: np.random.Generator,
) -> Times:
    """By Pollaczek and Khinchine: a geometric number of uniform parts of a service, stretched to
    the mean.
    """
    parts = rng.geometric(1 - load.utilization, len(arrival)) - 1
    many = parts > MANY_PARTS
    of = np.repeat(np.arange(len(arrival)), np.where(many, 0, parts))
    drawn = np.bincount(of, rng.random(len(of)), len(arrival))
    drawn[many] = rng.normal(parts[many] / 2, np.sqrt(parts[many] / 12))
    plain = load.utilization / (2 * (1 - load.utilization))
    return np.asarray(drawn * (waits[load.operator, load.worker] / plain))


def _measured(
    plan: Plan,
    starts: Times,
    streams: Mapping[str, _Stream],
    spent: Mapping[str, float],
    edges: Mapping[tuple[str, str], float],
    busy: Mapping[tuple[str, str], float],
) -> Played:
    requests = len(starts)
    last = np.zeros(requests)
    rates = []
    for sink in plan.workflow.sinks:
        stream = streams[sink]
        np.maximum.at(last, stream.request, stream.done)
        wanted = plan.workflow.rates[sink]
        done = np.sort(stream.done)
        first = _first_warm(len(done))
        seconds = float(done[-1] - done[first - 1])
        rates.append(((len(done) - first) / seconds / wanted, sink))
    slowest = min(rates)
    path = plan.path
    latency = sum(spent[name] for name in path[1:])
    latency += sum(edges[pair] for pair in pairwise(path))
    seen = np.flatnonzero(last > 0)
    first = _first_warm(requests)
    span_s = float(starts[-1] - starts[first - 1])
    seen = seen[seen >= first]
    whole = last[seen] - starts[seen]
    parts = [part.mean() for part in np.array_split(whole, PARTS)]
    return Played(
        requests,
        slowest[0] * plan.workflow.rates[slowest[1]],
        latency,
        float(whole.mean()),
        float(np.std(parts, ddof=1) / np.sqrt(PARTS)),
        float(np.quantile(whole, 0.99)),
        dict(spent),
        {key: seconds / span_s for key, seconds in busy.items()},
    )
