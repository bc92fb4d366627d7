"""A method's plan of a workflow, or why there is none."""

import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

from parloom.errors import InfeasibleError
from parloom.workflow.beam import jellybean
from parloom.workflow.exact import cheapest, in_time
from parloom.workflow.explain import check_accuracy, explain
from parloom.workflow.model import Operator, Workflow
from parloom.workflow.plan import Plan

Progress = Callable[[str], None]


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
    asked: dict[str, Any] = {"gap": gap, "seconds": seconds, "progress": progress}
    if method is Method.EXACT:
        started = time.monotonic()
        start = jellybean(workflow)
        if seconds is not None:
            asked["seconds"] = max(0.0, seconds - (time.monotonic() - started))
        if start is not None and not in_time(start):
            start = None
        if start is not None:
            progress(f"{start.usd_per_h:.4f} $/h by jellybean, to begin with")
        return _cheapest(workflow, method, start, **asked)
    tier = 0 if method is Method.ALL_EDGE else len(workflow.tiers) - 1
    try:
        plan = _cheapest(_alone(workflow, tier), method, None, **asked)
    except InfeasibleError as error:
        where = f"{method}: in {workflow.tiers[tier]!r} alone"
        raise InfeasibleError(f"{error} ({where})", error.document) from None
    return replace(plan, workflow=workflow)


def _cheapest(workflow: Workflow, method: Method, start: Plan | None, **asked: Any) -> Plan:
    check_accuracy(workflow)
    plan = cheapest(workflow, method=method.value, start=start, **asked)
    if plan is not None:
        return plan
    explain(workflow)
    if asked["seconds"] is not None:
        raise InfeasibleError("no plan was found in the time that was given (--seconds)")
    raise InfeasibleError("no plan was found, nor ruled out: the solver can not tell by its digits")


def _alone(workflow: Workflow, tier: int) -> Workflow:
    """The workflow with what runs in one tier; raises `InfeasibleError` where nothing does."""
    operators = []
    for operator in workflow.operators:
        several = []
        for variant in operator.variants:
            here = {
                name: seconds
                for name, seconds in variant.latency_s.items()
                if workflow.worker(name).tier == tier
            }
            several += [replace(variant, latency_s=here)] if here else []
        if not several:
            raise InfeasibleError(f"no worker of {workflow.tiers[tier]!r} runs {operator.name!r}")
        operators.append(Operator(operator.name, tuple(several)))
    return replace(workflow, operators=tuple(operators))
