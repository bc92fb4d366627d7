"""The chain of stages that the cluster benchmark gives torch's 1F1B computes the model's loss."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from parloom import zoo

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def sides() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("torch_sides")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("by_flops", [False, True])
@pytest.mark.parametrize("name", ["dlrm", "gpt", "candle_uno_artifact"])
def test_stages_one_after_another_are_the_model(
    sides: ModuleType, name: str, by_flops: bool
) -> None:
    torch.manual_seed(0)
    scale = 1 / 64 if name.endswith("artifact") else 1.0
    model, batch = zoo.build(name, batch=4, scale=scale)
    parts = sides.split_layers(model, batch, 3, by_flops=by_flops)
    received: tuple[Tensor, ...] = ()
    for part in parts:
        found = part(*received, **batch)
        received = found if isinstance(found, tuple) else (found,)
    loss, _ = model(**batch)
    assert torch.equal(received[0], loss)
    held = [{id(weight) for weight in part.parameters()} for part in parts]
    assert set.union(*held) == {id(weight) for weight in model.parameters()}
    twice = [weight for weight in set.union(*held) if sum(weight in part for part in held) > 1]
    tied = [id(model.get_parameter("tokens.weight"))] if name == "gpt" else []
    assert twice == tied
    assert all(held)


def test_stages_have_equal_flops_as_far_as_layers_allow(sides: ModuleType) -> None:
    """A head as dear as three blocks is a stage of its own."""
    model, batch = zoo.build("gpt", batch=2, seq=8, vocab=1152, width=32, depth=6, heads=2)
    parts = sides.split_layers(model, batch, 3, by_flops=True)
    products = [
        [node for node in part.graph.nodes if "aten.linear" in str(node.target)] for part in parts
    ]
    assert list(map(len, products)) == [3 * 4, 3 * 4, 1]
