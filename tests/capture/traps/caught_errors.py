"""Reads of values that a trace does not have, in code that catches the error of the trace."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.traps.attributes import Made, net
from tests.capture.traps.corpus import equal, refused

VALUES = "depends on the values of a tensor"


def guarded(read: Callable[[Tensor], Any]) -> Made:
    """The batch that it is compared on does not take the branch."""

    def body(self: Any, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        try:
            if read(h):
                h = h * 2
        except Exception:
            pass
        return h.square().mean()  # type: ignore[no-any-return]

    return net(body)


@refused(VALUES)
def a_branch() -> Made:
    return guarded(lambda h: h.abs().max() > 1e6)


@refused(VALUES)
def an_item() -> Made:
    return guarded(lambda h: h.max().item() > 1e6)


@refused(VALUES)
def a_number() -> Made:
    return guarded(lambda h: float(h.max()) > 1e6)


@refused(VALUES)
def an_integer() -> Made:
    return guarded(lambda h: int(h.max().item()) > 1_000_000)


@refused(VALUES)
def a_list() -> Made:
    return guarded(lambda h: h.tolist()[0][0] > 1e6)


@refused("leaves torch for numpy")
def an_array() -> Made:
    return guarded(lambda h: h.detach().numpy().max() > 1e6)


@refused(VALUES)
def a_member() -> Made:
    return guarded(lambda h: 1e6 in h)


@refused(VALUES)
def suppressed() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        with contextlib.suppress(Exception):
            h = h * (2 if bool((h > 1e6).any()) else 1)
        return h.square().mean()  # type: ignore[no-any-return]

    return net(body)


@equal
def a_shape() -> Made:
    return guarded(lambda h: h.shape[0] > 1_000_000)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.inner = torch.jit.script(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()  # type: ignore[no-any-return]


@refused("Linear is compiled by torch.jit")
def scripted() -> tuple[nn.Module, dict[str, Tensor]]:
    return Scripted(), {"x": torch.randn(3, 4)}
