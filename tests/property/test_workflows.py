"""The cheapest plan of a workflow is what enumeration finds, and its bound proves it."""

from dataclasses import replace

import pytest

from parloom.errors import InfeasibleError
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.model import Workflow
from parloom.workflow.plan import Plan
from tests.workflows import drawn, least_dollars

BLOCKS, EACH = 10, 20


def exact(workflow: Workflow) -> Plan | None:
    try:
        return plan_workflow(workflow)
    except InfeasibleError:
        return None


@pytest.mark.parametrize("block", range(BLOCKS))
def test_exact_plans_cost_what_enumeration_finds(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        workflow = drawn(seed)
        plan, least = exact(workflow), least_dollars(workflow)
        assert (plan is None) == (least is None), seed
        if plan is not None and least is not None:
            assert plan.usd_per_h == pytest.approx(least, rel=1e-6, abs=1e-9), seed
            assert plan.bound_usd_per_h == pytest.approx(least, rel=1e-6, abs=1e-9), seed
