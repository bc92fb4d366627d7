"""Time at an operator: service, and the wait in an M/D/1 queue before each worker.

Requests are sent to a worker at random, in the shares of the plan, so that those of a source arrive
there as a Poisson process. With utilization u = rate x latency, the mean wait is
latency x u / (2 (1 - u)). Where the messages of one request arrive together (ratio above one), a
message waits for those of its own request, too: on average b of all workers', of which the rate's
share comes to this one, and the wait is latency x (u + b x rate / all) / (2 (1 - u)).
"""

from collections.abc import Mapping

from parloom.workflow.model import Workflow

UTILIZATIONS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Where waits are laid tangents from the start."""


def together(workflow: Workflow) -> Mapping[str, float]:
    """Of each operator: how many others of its request a message arrives with, on average.

    E[n (n - 1)] / E[n] of n messages, the whole number below the ratio or the one above it.
    """
    found = {}
    for operator in workflow.operators:
        # The last input sets when a join begins, and its rate.
        ratio = max(edge.ratio for edge in workflow.inputs(operator.name))
        whole = int(ratio)
        more = ratio - whole
        pairs = (1 - more) * whole * (whole - 1) + more * (whole + 1) * whole
        found[operator.name] = pairs / ratio
    return found


def wait_s(latency_s: float, rate_per_s: float, all_per_s: float, others: float) -> float:
    """The mean wait before one worker; infinite where it is busy all the time."""
    utilization = latency_s * rate_per_s
    if utilization >= 1:
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
