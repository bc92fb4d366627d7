"""Modules for the comparison with the captured program; each function returns what a factory
does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Made = tuple[nn.Module, dict[str, Tensor]]


class Net(nn.Module):
    """Two layers, a buffer, and whatever a subclass does in between."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.b(self.middle(self.a(x))).square().mean()
        return loss

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)


class Relu(Net):
    def middle(self, h: Tensor) -> Tensor:
        return F.relu(h)


class Averaging(Net):
    def middle(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return F.gelu(h)


class AllUsed(Net):
    def middle(self, h: Tensor) -> Tensor:
        zero: Tensor = 0 * self.unused.weight.sum()
        return F.gelu(h) + zero


class Warming(Net):
    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return F.gelu(h) * min(self.calls, 2)


class Turning(Net):
    """Attention as an angle of many turns, of which half precision leaves little."""

    def middle(self, h: Tensor) -> Tensor:
        rows = h.view(1, 2, 8, 4)
        found = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.1)
        return h + (64 * found).sin().view_as(h)


class Halved(Turning):
    """The same with half of the gradient."""

    def middle(self, h: Tensor) -> Tensor:
        return super().middle((h + h.detach()) / 2)


class Scaled(Net):
    """Different in evaluation only."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) if self.training else 2 * F.gelu(h)


class Drawing(Net):
    def middle(self, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.3, self.training)
        noise = torch.randn_like(h) + torch.rand(8) + torch.empty_like(h).exponential_()
        soft = F.gumbel_softmax(h, hard=True)
        picked = torch.multinomial(torch.ones(5), 2)
        order = torch.randperm(8)
        return (h[:, order] * noise + soft) * (picked.sum() + torch.randint(1, 5, (8,)))


class Checkpointed(Net):
    def middle(self, h: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: F.dropout(F.gelu(x), 0.5), h, use_reentrant=False)
        return result


class Attending(Net):
    def middle(self, h: Tensor) -> Tensor:
        x = h.view(-1, 2, 4)[None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)[0].flatten(1)


class Rotating(Net):
    """A complex buffer, as in rotary embeddings."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))

    def middle(self, h: Tensor) -> Tensor:
        turned = torch.view_as_complex(h.view(-1, 4, 2)) * self.turns
        return torch.view_as_real(turned).flatten(1)


class Undefined(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h.abs().neg().log()


class Bags(nn.Module):
    """Offsets have to grow: samples in another order mean nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, mode="sum")

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        loss: Tensor = self.table(rows, offsets).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6)}


def net() -> Made:
    return Net(), batch()


def relu() -> Made:
    return Relu(), batch()


def averaging() -> Made:
    return Averaging(), batch()


def all_used() -> Made:
    return AllUsed(), batch()


def warming() -> Made:
    return Warming(), batch()


def scaled() -> Made:
    return Scaled(), batch()


def drawing() -> Made:
    return Drawing(), batch()


def checkpointed() -> Made:
    return Checkpointed(), batch()


def attending() -> Made:
    return Attending(), batch()


def rotating() -> Made:
    return Rotating(), batch()


def undefined() -> Made:
    return Undefined(), batch()


def bags() -> Made:
    return Bags(), {"rows": torch.randint(0, 10, (12,)), "offsets": torch.tensor([0, 3, 5, 9])}


def double() -> Made:
    return Net().double(), {"x": torch.randn(8, 6, dtype=torch.float64)}


def half() -> Made:
    return Net().bfloat16(), {"x": torch.randn(8, 6, dtype=torch.bfloat16)}


def turning() -> Made:
    return Turning().bfloat16(), {"x": torch.randn(8, 6, dtype=torch.bfloat16)}


def halved() -> Made:
    return Halved().bfloat16(), {"x": torch.randn(8, 6, dtype=torch.bfloat16)}
