"""Sizes that depend on data: the message names the place, and gives the advice for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net

Made = tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]
# And no word of experts.
MASK = r"a shape, .*multiply by the mask, or use torch\.where((?!expert).)*$"


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 4), "y": torch.randint(0, 4, (8,))}


def with_loss(loss: Callable[..., Tensor]) -> Made:
    return Net(lambda self, x: self.a(x)), batch(), loss


def focal(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    logs, mask = F.log_softmax(output, -1), F.one_hot(batch["y"], 4).bool()
    return -((1 - logs.exp()[mask]) ** 2 * logs[mask]).mean()


class Ranked(nn.Module):
    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output[batch["y"] > 0].square().sum()


class Called:
    def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output[output > 0].sum()


def scaled(scale: float, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return scale * torch.masked_select(output, output > 0).sum()


@refused(r"cannot capture the loss function focal \(selections\.py:\d+\): " + MASK)
def a_function() -> Made:
    return with_loss(focal)


@refused(r"cannot capture the loss function Ranked \(selections\.py:\d+\): " + MASK)
def a_module() -> Made:
    return with_loss(Ranked())


@refused(r"cannot capture the loss function Called \(selections\.py:\d+\): " + MASK)
def an_object() -> Made:
    return with_loss(Called())


@refused(r"cannot capture the loss function scaled \(selections\.py:\d+\): " + MASK)
def a_partial() -> Made:
    return with_loss(partial(scaled, 2.0))


@refused(r"cannot capture Net \(nets\.py:\d+\): " + MASK)
def in_forward() -> Made:
    return (
        Net(lambda self, x: self.a(x)[x[:, 0] > 0]),
        batch(),
        lambda output, batch: output.square().sum(),
    )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x[x[:, 0] > 0])
        return result


@refused(r"cannot capture Net\.c .*multiply by the mask.*; for experts, .*torch\.bmm")
def of_experts() -> Made:
    net = Net(lambda self, x: self.c(x))
    net.c = Experts()  # type: ignore[assignment]
    return net, batch(), lambda output, batch: output.square().sum()


@equal
def by_product() -> Made:
    def masked(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        logs, mask = F.log_softmax(output, -1), F.one_hot(batch["y"], 4)
        return -((1 - logs.exp()) ** 2 * logs * mask).sum() / mask.sum()

    return with_loss(masked)


def averaging(kind: type[Any], *shape: int) -> Made:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = kind(4, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(x.reshape(8, 4, *shape)).square().mean()
            return result

    return Averaged(), {"x": batch()["x"]}, lambda output, batch: output


@refused(r"Averaged\.norm \(selections.*momentum=None averages .*set momentum to a number")
def an_average_of_all_calls() -> Made:
    return averaging(nn.BatchNorm1d)


@refused(r"Averaged\.norm \(selections.*momentum=None averages .*set momentum to a number")
def an_average_of_all_calls_in_two_dims() -> Made:
    return averaging(nn.BatchNorm2d, 1, 1)
