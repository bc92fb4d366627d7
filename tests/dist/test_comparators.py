"""Plans of other systems' methods compute what one device computes: loss and all gradients."""

import pytest
import torch

from parloom.cost.hardware import DataSheets
from parloom.cost.clusters import load_cluster
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Optimizer
from parloom.candidates import COMPARATORS
from parloom.search.request import Request
from tests.dist import lowered, staged
from tests.equality import TOLERANCE

torch.set_num_threads(1)

CLUSTER = "2x2xH100"


PIPELINES = ("alpa", "alpa_inter", "gpipe", "pipedream", "whale")


def plans(method: str, name: str, cluster: str = CLUSTER) -> list[Decisions]:
    there = load_cluster(cluster)
    graph = lowered.model(name).graph
    # Batch norm looks at the whole batch.
    count = 3 if method in PIPELINES and name != "cnn" else None
    asked = Request(
        graph, DataSheets(there), Optimizer(), there.device.memory_bytes, count, budget=150
    )
    return list(COMPARATORS[method](asked, Decisions(), lambda text: None))


def error_of(name: str, plan: Decisions) -> tuple[float, str]:
    """How far a plan is from one device; a pipeline after three steps."""
    model = lowered.model(name)
    if len(plan.stages) == 1:
        return model.error(plan)
    found = staged.report(model, plan, staged.reference(name))
    return found.worst_error, found.worst_tensor


@pytest.mark.parametrize("name", ["mlp", "dlrm", "cnn", "gpt"])
@pytest.mark.parametrize("method", COMPARATORS)
def test_plans_equal_one_device(method: str, name: str) -> None:
    split = 0
    for plan in plans(method, name):
        error, where = error_of(name, plan)
        assert error <= TOLERANCE, where
        split += len(plan.stages) > 1
        split += any(axes for node in plan.nodes for _, axes in node.factors)
    assert split, "nothing was split, so nothing was shown"


@pytest.mark.parametrize("method", COMPARATORS)
def test_plans_over_axes_of_other_primes_equal_one_device(method: str) -> None:
    for plan in plans(method, "mlp", "1x3xH100" if method == "gpipe" else "2x3xH100"):
        error, where = error_of("mlp", plan)
        assert error <= TOLERANCE, where
