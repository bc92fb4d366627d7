"""mse_loss and its like call `broadcast_tensors`, which must not hide the batch from the plan."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.capture import capture
from tests.capture.models import assert_equal


class Regression(nn.Module):
    """The target is of the prediction's shape, or has one column for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor, column: Tensor) -> Tensor:
        out = self.layer(x)
        mean, wide = torch.broadcast_tensors(out, column)  # type: ignore[no-untyped-call]
        loss: Tensor = F.mse_loss(out, y) + (mean - wide).square().mean()
        return loss


def test_broadcasts_are_expands_or_nothing() -> None:
    torch.manual_seed(0)
    model = Regression()
    batch = {"x": torch.randn(2, 3), "y": torch.randn(2, 4), "column": torch.randn(2, 1)}
    graph = capture(model, batch)
    operators = [node.op for _, node in graph.unfolded()]
    assert "broadcast_tensors" not in operators
    assert operators.count("expand") == 1
    assert_equal(graph, model, batch)
