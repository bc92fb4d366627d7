"""The tier of each request at each operator, drawn from the flows of a plan.

A request has a number, its place, drawn from [0, 1). Each tier of an operator has an interval of
places as long as its share of the rate, low tiers first. Along an edge the interval of the sender's
tier is cut by its flows, and the pieces are put together by the receiver's tier: each pair of tiers
gets the share of its flow, and places stay uniform. Where the low tiers send to the low tiers and
the high ones to the high ones, places stay the same, so that branches that meet fit each other.

At an operator with several inputs that are spread over tiers, the flows of all need not belong to
any choice of tiers request by request. The place at the first of them then gives the tier.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parloom.workflow.plan import Flow, Plan

Times = NDArray[np.float64]
Whole = NDArray[np.int64]
Intervals = Mapping[int, tuple[float, float]]
"""Of places, by tier."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The tier and the place of each request at one source or operator."""

    intervals: Intervals
    tier: Whole
    place: Times


def routes(plan: Plan, place: Times) -> dict[str, Routed]:
    """By source and operator, where the requests with these places go."""
    workflow = plan.workflow
    found = {
        source.name: Routed({source.tier: (0.0, 1.0)}, np.full(len(place), source.tier), place)
        for source in workflow.sources
    }
    for operator in workflow.order:
        inputs = workflow.inputs(operator.name)
        spread = [edge for edge in inputs if len(found[edge.producer].intervals) > 1]
        edge = (spread or inputs)[0]
        intervals, before = _intervals(plan, operator.name), found[edge.producer]
        found[operator.name] = (
            _followed(plan.flows_of(edge.producer, edge.consumer), before, intervals)
            if len(spread) < 2
            else _at(before.place, intervals)
        )
    return found


def _intervals(plan: Plan, name: str) -> Intervals:
    rates: dict[int, float] = {}
    for load in plan.loads_of(name):
        tier = plan.workflow.worker(load.worker).tier
        rates[tier] = rates.get(tier, 0.0) + load.rate_per_s
    return _divided((0.0, 1.0), dict(sorted(rates.items())))


def _divided(interval: tuple[float, float], rates: Mapping[int, float]) -> Intervals:
    """An interval, divided in these shares, in their order."""
    low, high = interval
    ends = low + (high - low) * np.cumsum(list(rates.values())) / sum(rates.values())
    return dict(zip(rates, zip([low, *ends[:-1]], ends, strict=True), strict=True))


def _at(place: Times, intervals: Intervals) -> Routed:
    """The tiers in whose intervals places are."""
    ends = np.array([high for _, high in intervals.values()])
    which = np.minimum(np.searchsorted(ends, place, side="right"), len(ends) - 1)
    return Routed(intervals, np.array(list(intervals))[which], place)


def _followed(flows: tuple[Flow, ...], before: Routed, intervals: Intervals) -> Routed:
    """Tiers drawn by the flows from each request's tier before."""
    pairs = {
        (flow.sender, flow.receiver): flow.rate_per_s
        for flow in sorted(flows, key=lambda flow: (flow.sender, flow.receiver))
        if flow.receiver in intervals
    }
    into = {
        receiver: _divided(
            intervals[receiver], {s: rate for (s, r), rate in pairs.items() if r == receiver}
        )
        for receiver in {receiver for _, receiver in pairs}
    }
    tier, place = np.zeros(len(before.tier), dtype=np.int64), np.zeros(len(before.tier))
    for sender, interval in before.intervals.items():
        mine = np.flatnonzero(before.tier == sender)
        out = {r: rate for (s, r), rate in pairs.items() if s == sender}
        if not out:
            if len(mine):
                raise RuntimeError(f"a plan has no flow for requests that are in tier {sender}")
            continue
        pieces = _divided(interval, out)
        chosen = _at(before.place[mine], pieces)
        for receiver, (low, high) in pieces.items():
            here = chosen.tier == receiver
            start, end = into[receiver][sender]
            part = np.clip((chosen.place[here] - low) / (high - low), 0.0, 1.0)
            tier[mine[here]], place[mine[here]] = receiver, start + part * (end - start)
    return Routed(intervals, tier, place)
