"""Which operands of operators lie in memory from pass to pass, and that they are measured apart."""

import pytest
import torch

from parloom.capture import capture
from parloom.comparators.baselines import METHODS
from parloom.cost.calibration import Timed
from parloom.cost.clusters import load_cluster
from parloom.execute import measure
from parloom.execute.clock import Clock
from parloom.execute.measure import operators
from parloom.execute.stored import stored_bytes, stored_values
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG, Compute
from tests.zoo_sizes import small


def lowered(name: str) -> PCG:
    model, batch = small(name)
    graph = capture(model.train(), batch)
    return lower(graph, next(iter(METHODS["data_parallel"](graph, load_cluster("2xcpu"), 1, 0))))


@pytest.fixture(scope="module")
def gpt() -> PCG:
    return lowered("gpt")


def test_stored_bytes_are_those_of_parameters_and_buffers(gpt: PCG) -> None:
    model, _ = small("gpt")
    tensors = [*model.parameters(), *model.buffers()]
    assert stored_bytes(gpt) == sum(t.numel() * t.element_size() for t in tensors)


def test_weights_of_linear_layers_are_stored_and_what_they_multiply_is_not(gpt: PCG) -> None:
    stored, seen = stored_values(gpt), 0
    for function in (gpt.main, *gpt.functions):
        for item in function.body:
            if isinstance(item, Compute) and item.node.op == "linear":
                x, weight, *_ = (value.name for value in item.operands)
                assert weight in stored[function.name]
                assert x not in stored[function.name]
                seen += 1
    assert seen >= 4


def test_weights_are_used_in_more_copies_than_what_they_multiply(
    gpt: PCG, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fill a pass; nothing else has more than before."""
    made: dict[str, list[int]] = {}
    timed = measure._Trial.timed

    def looked(trial: measure._Trial, key: str) -> Timed:
        operands = zip(*trial._copies, strict=True)
        made[key] = [len({tensor.data_ptr() for tensor in several}) for several in operands]
        return timed(trial, key)

    monkeypatch.setattr(measure._Trial, "timed", looked)
    list(operators([gpt], Clock(torch.device("cpu"), 1e-4)))
    x, weight, *_ = next(own for key, own in made.items() if key.startswith("linear"))
    assert x <= measure.MOST_COPIES < weight <= measure.MOST_STORED
