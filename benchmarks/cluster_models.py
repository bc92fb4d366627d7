"""Models of the cluster benchmark, as factories for `parloom plan`: (model, global batch).

No label is ignored, so that the mean of the ranks' losses is the loss of the whole batch, which is
what torch's DDP and FSDP2 take for granted.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import zoo

Built = tuple[nn.Module, dict[str, Tensor]]


class Regression(nn.Module):
    """Equal linear layers with ReLU and a mean squared error."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, y)


def mlp() -> Built:
    """1.8 M parameters, batch 512."""
    torch.manual_seed(0)
    model = Regression(width=672, depth=4)
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(512, 672, generator=g) for _ in range(2))
    return model, {"x": x, "y": y}


def gpt() -> Built:
    """1.7 M parameters with a tied head; batch 8, sequence 64."""
    torch.manual_seed(0)
    model, batch = zoo.build("gpt", batch=8, seq=64, vocab=512, width=160, depth=5, heads=4)
    return model, {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}


MODELS = {"mlp": mlp, "gpt": gpt}
