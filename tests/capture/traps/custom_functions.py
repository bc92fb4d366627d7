"""Backward passes written by hand: right ones are derived, wrong ones refused."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net, forward

WRONG = r"Net \(custom_functions\.py:\d+\): custom autograd function \w+ has a backward that is not"


def apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class Chosen(Function):
    """Picks a column per row; its backward is right for the first two columns only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(columns)
        ctx.shape = x.shape
        return x.gather(1, columns[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (columns,) = ctx.saved_tensors
        made = gradients[0].new_zeros(ctx.shape)
        return made.scatter(1, columns.clamp(max=1)[:, None], gradients[0][:, None]), None


@refused(WRONG)
@forward
def right_for_small_integers(net: Net, x: Tensor) -> Any:
    return apply(Chosen, net.a(x), torch.tensor([0, 3, 1])).sum()


class Bounded(Function):
    """The gradient is cut for values that random numbers do not reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] * (x.abs() < 1000)


@refused(WRONG)
@forward
def right_for_small_numbers(net: Net, x: Tensor) -> Any:
    return apply(Bounded, net.a(x)).sum()


class Simplex(Function):
    """Right unless rows sum to one, as they do here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        ones = (x.sum(1, keepdim=True) - 1).abs() < 1e-5
        return gradients[0] * 2 * x * torch.where(ones, 0.5, 1.0)


@refused(WRONG)
@forward
def right_for_random_numbers(net: Net, x: Tensor) -> Any:
    return apply(Simplex, net.a(x).softmax(1)).sum()


class Layer(Function):
    """Runs a module, whose weights autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.weight = module.weight
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.weight, None


@refused(WRONG)
@forward
def weights_that_get_no_gradient(net: Net, x: Tensor) -> Any:
    return apply(Layer, net.a(x), net.b).sum()


@equal
@forward
def without_an_input_that_needs_one(net: Net, x: Tensor) -> Any:
    return (apply(Layer, x, net.b) * net.a(x)).sum()


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


@refused(WRONG)
@forward
def a_reversed_gradient(net: Net, x: Tensor) -> Any:
    return apply(Reversed, net.a(x)).sum()


class Scaled(Function):
    """With a context of its own, a number and another result that has no gradient."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x * scale, x.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None if gradients[0] is None else gradients[0] * ctx.scale), None


@equal
@forward
def a_right_one(net: Net, x: Tensor) -> Any:
    h, _ = apply(Scaled, net.a(x), 3.0)
    return net.b(h).sum()


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


@equal
@forward
def a_right_one_in_place(net: Net, x: Tensor) -> Any:
    return net.b(apply(InPlace, net.a(x))).sum()


class Fixed(Function):
    """One result is marked to have no gradient, and the other has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        scale = x.abs().amax()
        ctx.mark_non_differentiable(scale)
        return x.square(), scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x


@equal
@forward
def a_fixed_result(net: Net, x: Tensor) -> Any:
    h, scale = apply(Fixed, net.a(x))
    return (h / scale).sum()


class Stateful(Function):
    """Its backward looks at a number of the class."""

    factor = 3.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * Stateful.factor


@refused(WRONG)
@forward
def a_number_of_the_class(net: Net, x: Tensor) -> Any:
    return apply(Stateful, net.a(x)).sum()


class Listed(Function):
    """Takes a list, in which autograd sees no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:
        return x + others[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@refused(r"custom autograd function Listed gets tensors in a list")
@forward
def tensors_in_a_list(net: Net, x: Tensor) -> Any:
    return apply(Listed, net.a(x), [net.b(x)]).sum()
