"""Operators that capture spells as others: the same bits, and nothing left without an entry."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom.capture import capture
from parloom.ir.graph import Graph
from parloom.ir.ops import OPS
from tests.capture.models import assert_equal

Map = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function: Map) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self.a(x)) * 3).sum()


def captured(function: Map) -> Graph:
    torch.manual_seed(0)
    model, batch = Net(function), {"x": torch.randn(4, 4)}
    graph = capture(model, batch)
    assert_equal(graph, model, batch)
    return graph


def ops(graph: Graph) -> set[str]:
    return {node.op for _, node in graph.unfolded()}


def written_row(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1].clone()
    out[:, 0] = 2.0
    out[-1] = x[0]
    return out * x


def written_middle(x: Tensor) -> Tensor:
    out = x.clone()
    out[1:3, :2] = 1.0
    return out.square()


@pytest.mark.parametrize(
    "function",
    [
        written_row,
        written_middle,
        lambda x: F.cosine_similarity(x, x.flip(0), eps=1.0),  # norms above it and below
        lambda x: F.cosine_similarity(x * torch.tensor([[0.0], [1.0], [9.0], [1e-9]]), x.exp()),
        lambda x: F.cosine_similarity(x, torch.arange(4), dim=0),
        lambda x: x.double().square().type_as(x),
        lambda x: x.repeat_interleave(3, 1),
        lambda x: x.repeat_interleave(2),
        lambda x: torch.max(x, x * 2) * torch.min(x, x * x),
        lambda x: x * torch.zeros_like(x).fill_(x.detach().sum()),
        lambda x: x * x.new_empty(4).copy_(x[0]),
        lambda x: x * torch.empty(4).fill_(2) * torch.empty_strided((4, 4), (1, 4)).zero_(),
    ],
)
def test_what_has_no_entry_is_spelled_by_what_has(function: Map) -> None:
    assert ops(captured(function)) <= set(OPS)


def test_a_slice_in_steps_keeps_its_operator() -> None:
    def every_other(x: Tensor) -> Tensor:
        out = x.clone()
        out[::2] = 1.0
        return out

    assert "slice_scatter" in ops(captured(every_other))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout2d(x[None, :, :, None], 0.3),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: x * torch.empty_like(x[:, :1]).bernoulli_(0.3),
    ],
)
def test_masks_of_any_kind_are_dropout(function: Map) -> None:
    found = ops(captured(function))
    assert "dropout" in found
    assert found <= set(OPS)


def test_dropout_in_place_is_dropout() -> None:
    graph = captured(lambda x: F.dropout(x, 0.3, True, inplace=True) + x)
    assert [node.op for _, node in graph.unfolded()] == ["linear", "dropout", "add", "mul", "sum"]
