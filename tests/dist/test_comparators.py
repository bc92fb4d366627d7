"""Plans of other systems' methods compute what one device computes: loss and all gradients."""

import pytest
import torch

from parloom.cost.hardware import DataSheets
from parloom.cost.clusters import load_cluster
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Optimizer
from parloom.candidates import COMPARATORS
from parloom.search.request import Request
from tests.dist import lowered
from tests.equality import TOLERANCE

torch.set_num_threads(1)

CLUSTER = "2x2xH100"


def plans(method: str, name: str, cluster: str = CLUSTER) -> list[Decisions]:
    there = load_cluster(cluster)
    graph = lowered.model(name).graph
    asked = Request(graph, DataSheets(there), Optimizer(), there.device.memory_bytes, budget=150)
    return list(COMPARATORS[method](asked, Decisions(), lambda text: None))


@pytest.mark.parametrize("name", ["mlp", "dlrm", "cnn", "gpt"])
@pytest.mark.parametrize("method", COMPARATORS)
def test_plans_equal_one_device(method: str, name: str) -> None:
    model = lowered.model(name)
    split = 0
    for plan in plans(method, name):
        error, where = model.error(plan)
        assert error <= TOLERANCE, where
        split += any(axes for node in plan.nodes for _, axes in node.factors)
    assert split, "nothing was split, so nothing was shown"


@pytest.mark.parametrize("method", COMPARATORS)
def test_plans_over_axes_of_other_primes_equal_one_device(method: str) -> None:
    model = lowered.model("mlp")
    for plan in plans(method, "mlp", "2x3xH100"):
        error, where = model.error(plan)
        assert error <= TOLERANCE, where
