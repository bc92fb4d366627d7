"""Every zoo model is captured to the bit, and its plans on four ranks equal one device."""

import pytest
import torch
from torch import Tensor, nn

from parloom import zoo
from parloom.capture import capture
from parloom.capture.load import cast_batch, cast_model
from parloom.comparators.baselines import data_parallel, random_plan
from parloom.cost.clusters import resolve_cluster
from parloom.execute.consistent import check_results
from parloom.ir.mesh import grid
from tests.capture.models import assert_equal
from tests.dist import lowered
from tests.equality import TOLERANCE
from tests.zoo_sizes import small

torch.set_num_threads(1)

# torch.export takes the flat weights of an LSTM for attributes that its trace assigns.
pytestmark = pytest.mark.filterwarnings("ignore:(?s)The tensor attributes.*_flat_weights")


def moved(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model whose zero weights have left zero."""
    model, batch = small(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.05)
    return model, batch


# The others are in tests/dist/test_random.py.
NAMES = [name for name in zoo.names() if name not in lowered.BUILDERS]


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", NAMES)
def test_captured_and_parallel_equal_the_model(name: str) -> None:
    model, batch = moved(name)
    graph = lowered.small_graph(name)
    assert_equal(graph, model, batch)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

    held = lowered.of(model, batch, graph)
    plans = {
        "data_parallel": next(iter(data_parallel(held.graph, resolve_cluster("4xcpu").cluster))),
        "random": random_plan(held.graph, held.factored, grid({"x": 2, "y": 2}), 0),
    }
    for method, plan in plans.items():
        error, where = held.error(plan)
        assert error <= TOLERANCE, f"{method}: {where}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dit_xl", "wan_1_3b", "unet", "llama", "gshard", "cnn"])
def test_captured_in_low_precision(name: str, dtype: torch.dtype) -> None:
    """Tables stay in float32, and what they make meets weights of less; files of it can be read."""
    model, batch = small(name)
    cast_model(model, dtype)
    graph = capture(model, cast_batch(batch, dtype))
    assert {f"torch.{e.value.spec.dtype}" for e in graph.of_kind("parameter")} == {str(dtype)}
    check_results(graph)
