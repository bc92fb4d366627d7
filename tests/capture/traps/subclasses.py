"""Tensors of other classes."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net, forward

Built = tuple[nn.Module, dict[str, Tensor]]


class Doubling(nn.Parameter):
    """A parameter whose uses are doubled."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        result = super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, kwargs or {}
        )
        return result * 2 if getattr(func, "__name__", "") == "linear" else result


class Named(nn.Parameter):
    """A parameter with a note."""

    note = "sharded"

    def described(self) -> str:
        return self.note


class Buffer(Tensor):
    """A buffer that multiplies otherwise."""

    def __mul__(self, other: Any) -> Tensor:
        return torch.mul(self, other) + 1

    __rmul__ = __mul__


@forward
def plain(net: Net, x: Tensor) -> Any:
    return (net.a(x) * net.seen).sum()


@refused(r"Net: parameter 'a\.weight' is a .*Doubling with __torch_function__ of its own")
def a_parameter() -> Built:
    net, batch = plain()
    net.get_submodule("a").weight = Doubling(torch.ones(4, 4))
    return net, batch


@refused(r"Net: buffer 'seen' is a .*Buffer with __mul__ of its own")
def a_buffer() -> Built:
    net, batch = plain()
    net.register_buffer("seen", torch.ones(4).as_subclass(Buffer))
    return net, batch


@refused(r"Net: batch entry 'x' is a .*Buffer with __mul__ of its own")
def a_batch() -> Built:
    net, batch = plain()
    return net, {"x": batch["x"].as_subclass(Buffer)}


@refused(r"Net: tensor 'table' is a .*Buffer with __mul__ of its own")
def an_attribute() -> Built:
    net, batch = plain()
    net.table = torch.ones(4).as_subclass(Buffer)
    return net, batch


@refused(r"Net \(subclasses\.py:\d+\): it makes a tensor of another class")
@forward
def made_in_forward(net: Net, x: Tensor) -> Any:
    return (net.a(x).as_subclass(Buffer) * 2).sum()


@equal
def a_parameter_with_a_note() -> Built:
    net, batch = plain()
    net.get_submodule("a").weight = Named(torch.ones(4, 4))
    return net, batch


@equal
def a_class_of_torch() -> Built:
    net, batch = plain()
    net.seen = nn.Buffer(torch.full((4,), 0.5))
    return net, batch
