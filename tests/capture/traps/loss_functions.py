"""State in loss functions, of every kind that can be called."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.traps import settings
from tests.capture.traps.attributes import LATER, NEXT, batch
from tests.capture.traps.closures import counter
from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net

Made = tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]


def with_loss(loss: Callable[..., Tensor]) -> Made:
    return Net(lambda self, x: self.a(x)), batch(), loss


class Warmup:
    def __init__(self, read: bool = True) -> None:
        self.calls, self.read = 0, read

    def __call__(self, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return output.square().mean() * (self.calls if self.read else 1)

    def method(self, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return self(output, inputs)


class Late(Warmup):
    def __call__(self, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return output.square().mean() if self.calls < 300 else output.abs().mean()


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m: Any = None

    def forward(self, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        loss = output.square().mean()
        result = loss if self.m is None else loss / self.m
        self.m = loss.detach()
        return result


class Noted(Average):
    def forward(self, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        loss = output.square().mean()
        self.m = loss.detach()
        return loss


@refused(r"the loss function changes loss\.calls" + NEXT)
def a_callable_object() -> Made:
    return with_loss(Warmup())


@refused(r"the loss function changes loss\.calls" + NEXT)
def a_bound_method() -> Made:
    return with_loss(Warmup().method)


@refused(r"the loss function changes loss\.calls" + LATER)
def a_warm_up_of_many_calls() -> Made:
    return with_loss(Late())


@refused(r"the loss function changes loss\.m" + NEXT)
def a_module_that_keeps_its_loss() -> Made:
    return with_loss(Average())


@refused(r"closure of counter\.<locals>\.step: count" + NEXT)
def a_closure() -> Made:
    step = counter()
    return with_loss(lambda output, inputs: output.square().mean() * step())


@refused(r"loss.*\.calls" + NEXT)
def a_partial() -> Made:
    def loss(policy: Warmup, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return policy(output, inputs)

    return with_loss(functools.partial(loss, Warmup()))


@refused(r"settings\.WARMUP" + NEXT)
def a_global_of_another_file() -> Made:
    return with_loss(lambda output, inputs: output.square().mean() * settings.advance())


@refused(r"closure of .*: steps" + NEXT)
def an_iterator() -> Made:
    steps = itertools.count(1)
    return with_loss(lambda output, inputs: output.square().mean() * next(steps))


@refused(r"draws from random")
def a_draw() -> Made:
    return with_loss(lambda output, inputs: output.square().mean() * random.random())


@refused(r"draws from closure of .*: source")
def a_draw_of_its_own() -> Made:
    source = random.Random(3)
    return with_loss(lambda output, inputs: output.square().mean() * source.random())


@equal
def a_count_that_nobody_reads() -> Made:
    return with_loss(Warmup(read=False))


@equal
def a_loss_that_is_noted() -> Made:
    return with_loss(Noted())


@equal
def weights_made_in_the_first_call() -> Made:
    made: dict[str, Tensor] = {}

    def loss(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if "w" not in made:
            made["w"] = torch.arange(1.0, 5.0)
        return (output * made["w"]).square().mean()

    return with_loss(loss)


@equal
def a_function_of_torch() -> Made:
    return with_loss(lambda output, inputs: nn.functional.mse_loss(output, inputs["x"]))
