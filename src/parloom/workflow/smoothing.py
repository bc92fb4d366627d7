"""How regular arrivals are behind other workers, and what is waited then.

A worker hands on its requests no closer than its latency, so that those behind it wait less than a
Poisson process would: M/D/1 waits, which bound a plan's latency, are too long there. After Whitt's
queueing network analyzer, with c the squared coefficient of variation of the times between
arrivals (1: Poisson): behind a worker of utilization u it is (1 - u^2) c; a share p, drawn at
random, has p c + 1 - p; streams that meet have w (mean of c) + 1 - w, with
w = 1 / (1 + 4 (1 - u)^2 (v - 1)) and v = 1 / sum of squared shares. The wait is that of M/D/1 times
c exp(-2 (1 - u) (1 - c)^2 / (3 u c)), after Kraemer and Langenbach-Belz. A single worker that is as
fast as the only one before it lets nothing wait.
"""

import math
from collections.abc import Mapping

from parloom.workflow.plan import Load, Plan
from parloom.workflow.queueing import together

Key = tuple[str, str]
LEAST = 1e-9


def smoothed(plan: Plan) -> Mapping[Key, float]:
    """The mean wait before each worker, by operator and worker."""
    workflow = plan.workflow
    leaving: dict[str, list[tuple[float, float]]] = {  # of each stream: rate and c
        source.name: [(source.rate_per_s, 1.0)] for source in workflow.sources
    }
    pace: dict[str, float] = {source.name: 0.0 for source in workflow.sources}
    found: dict[Key, float] = {}
    for operator in workflow.order:
        name = operator.name
        loads = plan.loads_of(name)
        busiest = max(load.utilization for load in loads)
        inputs = workflow.inputs(name)
        met = [
            _met(leaving[e.producer], workflow.rates[name] / workflow.rates[e.producer], busiest)
            for e in inputs
        ]
        arriving = sum(met) / len(met)
        single = len(inputs) == 1 and inputs[0].ratio <= 1
        gap = pace[inputs[0].producer] if single else 0.0
        one = len(loads) == 1 and loads[0].count == 1
        leaving[name] = []
        for load in loads:
            share = load.rate_per_s / load.count / workflow.rates[name]
            own = share * arriving + 1 - share
            service = operator.variant(load.variant).latency_s[load.worker]
            wait = load.time_s - service
            if one and gap >= service:
                wait = 0.0
            elif not together(workflow, name):
                wait *= _regular(own, load.utilization)
            found[name, load.worker] = wait
            after = (1 - load.utilization**2) * own
            leaving[name] += [(load.rate_per_s / load.count, after)] * load.count
        pace[name] = _pace(plan, loads) if one else 0.0
    return found


def _pace(plan: Plan, loads: tuple[Load, ...]) -> float:
    """The least time between two results of one worker."""
    (load,) = loads
    return plan.workflow.operator(load.operator).variant(load.variant).latency_s[load.worker]


def _met(streams: list[tuple[float, float]], ratio: float, utilization: float) -> float:
    """The c of streams together, of whose requests a ratio below one goes on."""
    whole = sum(rate for rate, _ in streams)
    mean = sum(rate * c for rate, c in streams) / whole
    several = 1 / sum((rate / whole) ** 2 for rate, _ in streams)
    weight = 1 / (1 + 4 * (1 - utilization) ** 2 * (several - 1))
    c = weight * mean + 1 - weight
    return min(ratio, 1.0) * c + 1 - min(ratio, 1.0)


def _regular(c: float, utilization: float) -> float:
    """The wait with arrivals of this c, as a share of that with Poisson ones."""
    c = max(c, LEAST)
    if c >= 1:
        return c
    return c * math.exp(-2 * (1 - utilization) * (1 - c) ** 2 / (3 * utilization * c))
