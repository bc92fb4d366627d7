"""What is said of modules that are handed over in evaluation mode."""

from typing import Any

import torch
from torch import nn

from parloom.capture import capture, remarks
from parloom.ir.graph import Graph
from tests.capture.traps.nets import Net, forward


@forward
def both(net: Net, x: torch.Tensor) -> Any:
    return net.drop(net.norm(net.a(x)) + net.b(x) + net.c(net.inner(x))).sum()


def captured() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    return both()


def said(model: nn.Module, graph: Graph) -> list[str]:
    return [line for line in remarks(model, graph) if "evaluation mode" in line]


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    model, batch = captured()
    assert said(model, capture(model, batch)) == []
    model.eval()
    graph = capture(model, batch)
    assert {"dropout", "batch_norm"} <= {node.op for _, node in graph.unfolded()}
    (line,) = said(model, graph)
    assert "is trained in training mode: dropout (drop), batch norm (norm) differ" in line


def test_parts_in_evaluation_mode_stay_so() -> None:
    model, batch = captured()
    model.get_submodule("norm").eval()
    model.get_submodule("a").eval()
    assert said(model, capture(model, batch)) == [
        "batch norm (norm) were in evaluation mode and stay so"
    ]
    assert said(model, capture(model, batch, training=False)) == []


def test_a_model_without_such_modules_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.0), nn.Flatten(0), nn.Softmax(0)).eval()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.inner(x).square().sum()
            return total

    whole = Sum().eval()
    (line,) = said(whole, capture(whole, {"x": torch.randn(3, 4)}))
    assert "no dropout or batch norm is in it" in line
