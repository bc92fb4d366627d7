"""A method's plan of a workflow, or why there is none: how far it is, and what would do."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from parloom.cost.units import format_dollars, format_seconds
from parloom.errors import InfeasibleError
from parloom.workflow.accuracy import best_accuracy, meets
from parloom.workflow.beam import jellybean
from parloom.workflow.exact import cheapest, in_time, least_latency
from parloom.workflow.model import Operator, Worker, Workflow
from parloom.workflow.plan import Plan
from parloom.workflow.program import Goal, Program
from parloom.workflow.solve import Found, solve

Progress = Callable[[str], None]
CLOSE = 1e-6


class Method(StrEnum):
    """Who makes the plan."""

    EXACT = "exact"
    JELLYBEAN = "jellybean"
    GREEDY = "greedy"
    ALL_EDGE = "all-edge"
    ALL_CLOUD = "all-cloud"


def plan_workflow(
    workflow: Workflow,
    method: Method = Method.EXACT,
    *,
    gap: float = 1e-7,
    seconds: float | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The plan of a method. Raises `InfeasibleError` where it has none.

    `gap` and `seconds` end the search of exact methods early; Ctrl-C does, too, with the best plan.
    """
    check_accuracy(workflow)
    if method in (Method.JELLYBEAN, Method.GREEDY):
        width = {} if method is Method.JELLYBEAN else {"width": 1, "orders": 1}
        plan = jellybean(workflow, method=method.value, **width)
        if plan is None:
            explain(workflow)
            raise InfeasibleError(f"{method} finds no plan, and there are some: try --method exact")
        return plan
    only = {Method.ALL_EDGE: 0, Method.ALL_CLOUD: len(workflow.tiers) - 1}.get(method)

    def allowed(operator: Operator, worker: Worker) -> bool:
        return only is None or worker.tier == only

    start = jellybean(workflow) if only is None else None
    if start is not None and not in_time(start):
        start = None
    if start is not None:
        progress(f"{start.usd_per_h:.4f} $/h by jellybean, to begin with")
    asked: dict[str, Any] = {"gap": gap, "seconds": seconds, "progress": progress}
    plan = cheapest(workflow, method=method.value, allowed=allowed, start=start, **asked)
    if plan is None:
        explain(workflow)
        if only is not None:
            tier = workflow.tiers[only]
            raise InfeasibleError(f"not all operators can run in {tier!r} alone ({method})")
        raise InfeasibleError("no plan was found in the time that was given (--seconds)")
    return plan


def check_accuracy(workflow: Workflow) -> None:
    """Raise `InfeasibleError` where no variants reach the floor."""
    best = best_accuracy(workflow, {})
    if best is None or meets(workflow, best):
        return
    floor = workflow.accuracy.floor
    raise InfeasibleError(
        f"{workflow.positions.floor}: floor: no variants reach an accuracy of {_percent(floor)};"
        f" the best reachable is {_percent(best)}",
        {"floor": floor, "best_accuracy": best},
    )


def explain(workflow: Workflow) -> None:
    """Raise `InfeasibleError` with the reason, if the workflow has no plan at all."""
    carried = solve(Program(workflow, Goal(scale=True)).lp)
    share = 0.0 if carried.values is None else -carried.cost
    if share < 1 - CLOSE:
        _too_fast(workflow, share)
    if workflow.latency_s is not None:
        _too_slow(workflow, workflow.latency_s)


def _too_fast(workflow: Workflow, share: float) -> None:
    rates = {source.name: source.rate_per_s for source in workflow.sources}
    now = ", ".join(f"{name} {rate * share:.4g} of {rate:.4g}/s" for name, rate in rates.items())
    message = f"{workflow.positions.rate}: no set of workers carries the rate: {now} at most"
    document: dict[str, object] = {"share": share, "more_workers": None}
    program = Program(workflow, Goal(more_workers=True))
    found = solve(program.lp)
    if found.values is not None:
        more = _more(workflow, program, found)
        listed = ", ".join(f"{n} more {name}" for name, n in more.items())
        paid = sum(workflow.worker(name).usd_per_h * n for name, n in more.items())
        message += f"; {listed} ({format_dollars(paid)} an hour) would"
        document["more_workers"] = more
    else:
        message += "; no more workers would: see the bandwidths of links, and who can run what"
    raise InfeasibleError(message, document)


def _more(workflow: Workflow, program: Program, found: Found) -> dict[str, int]:
    """Workers beyond those that are there."""
    assert found.values is not None
    used: dict[str, int] = {}
    for (_, _, name), column in program.counts.items():
        used[name] = used.get(name, 0) + round(found.values[column])
    more = {name: n - workflow.worker(name).count for name, n in used.items()}
    return {name: n for name, n in more.items() if n > 0}


def _too_slow(workflow: Workflow, most_s: float) -> None:
    least = least_latency(workflow)
    if least <= most_s:
        return
    raise InfeasibleError(
        f"{workflow.positions.latency}: latency_bound: no plan is in time: {format_seconds(most_s)}"
        f" is asked for, and none is below {format_seconds(least)}",
        {"latency_bound_s": most_s, "least_latency_s": least},
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
