"""Time at an operator: service, and the wait in an M/D/1 queue before each worker.

Requests are sent to a worker at random, in the shares of the plan, so that those of a source arrive
there as a Poisson process. With utilization u = rate x latency, the mean wait is
latency x u / (2 (1 - u)). Where messages of one request arrive together (ratio above one, and all
inputs have as many), a message waits for those of its own request, too: on average b of all
workers', of which the rate's share comes to this one, and the wait is
latency x (u + b x rate / all) / (2 (1 - u)).
"""

import math
from collections.abc import Mapping

from parloom.workflow.model import ROUNDING, SOLVED, Workflow

UTILIZATIONS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Where waits are laid tangents from the start."""
BISECTIONS = 200


def together(workflow: Workflow, name: str) -> float:
    """How many others of its request a message arrives with at an operator, on average.

    Messages arrive together where they are made of one message of the input that comes last; which
    that is is not known, so it is the one with the fewest. E[n (n - 1)] / E[n] of n messages, the
    whole number below the mean or the one above it.
    """
    of = workflow.messages
    fewest = min(of[edge.producer].each for edge in workflow.inputs(name))
    mean = max(1.0, of[name].each / fewest)
    whole = int(mean)
    more = mean - whole
    pairs = (1 - more) * whole * (whole - 1) + more * (whole + 1) * whole
    return pairs / mean


def wait_s(latency_s: float, rate_per_s: float, all_per_s: float, others: float) -> float:
    """The mean wait before one worker; infinite where it is busy all the time."""
    utilization = latency_s * rate_per_s
    if utilization >= 1 - SOLVED:
        return float("inf")
    met = utilization + others * rate_per_s / all_per_s
    return latency_s * met / (2 * (1 - utilization))


def tangent(utilization: float, batch: float) -> tuple[float, float]:
    """Slope and value at zero of a line below f(u) = u + u^2 (1 + batch) / (2 (1 - u)).

    f is the requests that are at a worker (rate x time) at utilization u; `batch` is
    others / (all x latency), see the module.
    """
    u, more = utilization, 1 + batch
    slope = 1 + more * (2 * u - u * u) / (2 * (1 - u) ** 2)
    value = u + more * u * u / (2 * (1 - u))
    return slope, value - slope * u


def balanced(
    workers: Mapping[str, tuple[int, float]], rate_per_s: float, all_per_s: float, others: float
) -> dict[str, float]:
    """A rate over workers, (count, latency) by type, so that all its requests' mean time is least.

    The time of one request more is then the same at all that are used. With f as for `tangent`,
    latency x f'(u) is that time where u = 1 - 1 / sqrt(1 + 2 c) and
    c = (time / latency - 1) / (1 + batch).
    """
    capacity = math.fsum(count / latency for count, latency in workers.values())
    if rate_per_s >= capacity * (1 - ROUNDING):
        share = rate_per_s / capacity
        return {name: share * count / latency for name, (count, latency) in workers.items()}

    def rates(time_s: float) -> dict[str, float]:
        found = {}
        for name, (count, latency) in workers.items():
            c = (time_s / latency - 1) / (1 + others / (all_per_s * latency))
            found[name] = (1 - 1 / math.sqrt(1 + 2 * c)) * count / latency if c > 0 else 0.0
        return found

    low = high = min(latency for _, latency in workers.values())
    while math.fsum(rates(high).values()) < rate_per_s:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if math.fsum(rates(middle).values()) < rate_per_s else (low, middle)
        )
    found = rates(high)
    scale = rate_per_s / math.fsum(found.values())
    return {name: rate * scale for name, rate in found.items()}
