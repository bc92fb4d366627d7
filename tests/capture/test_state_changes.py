"""Lists of what changes state without an operator: each entry is refused, and none is missing."""

import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from parloom.capture.nodes import written_by
from parloom.capture.state_changes import CHANGES, state_changes_refused
from parloom.errors import CaptureError
from tests.capture.traps.nets import Net

# Setting these is an operator, or nothing.
HARMLESS = frozenset({"real", "imag", "volatile"})


def enter_hooks(net: Any, h: Any) -> None:
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        h.sum()


def draw(net: Any, h: Any) -> None:
    torch.rand(2, generator=torch.Generator())


def fork(net: Any, h: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.rand(2)


def seed(net: Any, h: Any) -> None:
    torch.random.seed()


def assign(name: str, value: Any = None) -> Callable[[Any, Any], None]:
    return lambda net, h: setattr(h, name, value)


def read(name: str) -> Callable[[Any, Any], None]:
    return lambda net, h: getattr(h, name) and None


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "data.__set__": assign("data", torch.ones(3, 4)),
    "requires_grad": lambda net, h: net.a.requires_grad_(False),
    "grad.__get__": lambda net, h: net.a.weight.grad,
    "grad.__set__": assign("grad"),
    "grad.__delete__": lambda net, h: delattr(net.a.weight, "grad"),
    "grad_dtype.__set__": assign("grad_dtype", torch.float32),
    "_grad.__get__": read("_grad"),
    "_grad.__set__": assign("_grad"),
    "_grad_fn.__get__": read("_grad_fn"),
    "_grad_fn.__set__": assign("_grad_fn"),
    "_backward_hooks.__set__": assign("_backward_hooks", OrderedDict()),
    "_post_accumulate_grad_hooks.__set__": assign("_post_accumulate_grad_hooks", OrderedDict()),
    "grad_fn.__get__": read("grad_fn"),
    "grad": lambda net, h: torch.autograd.grad(h.sum(), net.a.weight),
    "backward": lambda net, h: h.sum().backward(),
    "set_": lambda net, h: h.detach().set_(torch.ones(1)),
    "resize_": lambda net, h: h.detach().resize_(2),
    "resize_as_": lambda net, h: h.detach().resize_as_(torch.ones(1)),
    "share_memory_": lambda net, h: h.share_memory_(),
    "swap_tensors": lambda net, h: torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
        h, torch.ones(1)
    ),
    "untyped_storage": lambda net, h: h.untyped_storage(),
    "storage": lambda net, h: h.storage(),
    "as_subclass": lambda net, h: h.as_subclass(type("Mine", (Tensor,), {})),
    "generator": draw,
    "manual_seed": lambda net, h: torch.manual_seed(0),
    "seed": seed,
    "set_state": fork,
    "saved_tensors_hooks": enter_hooks,
    "training": lambda net, h: net.eval(),
    "hooks": lambda net, h: net.a.register_forward_hook(print),
    "set_default_dtype": lambda net, h: torch.set_default_dtype(torch.float64),
    "set_default_device": lambda net, h: torch.set_default_device("cpu"),
    "set_deterministic_algorithms": lambda net, h: torch.use_deterministic_algorithms(True),
    "set_float32_matmul_precision": lambda net, h: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_is_refused(name: str) -> None:
    net: Any = Net(lambda net, x: x)
    h = net.a(torch.ones(3, 4))
    text = rf"cannot capture Net.* \(test_state_changes\.py:\d+\): it {re.escape(CHANGES[name][0])}"
    with pytest.raises(CaptureError, match=text), state_changes_refused(net, training=True):
        CASES[name](net, h)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_what_is_caught_is_refused_in_the_end() -> None:
    net: Any = Net(lambda net, x: x)
    with (
        pytest.raises(CaptureError, match=r"assigns to \.data"),
        state_changes_refused(net, training=True),
        suppress(Exception),
    ):
        net.seen.data = torch.zeros(4)


@pytest.mark.filterwarnings("ignore:volatile was removed")
def test_every_attribute_that_can_be_set_is_in_the_list() -> None:
    found = set()
    for name, attribute in vars(torch._C.TensorBase).items():
        if type(attribute).__name__ != "getset_descriptor":
            continue
        tensor = torch.ones(2, 2)
        try:
            attribute.__set__(tensor, getattr(tensor, name, None))
        except AttributeError:
            continue
        except RuntimeError:
            pass
        found.add(name)
    known = {name.removesuffix(".__set__") for name in CHANGES} | HARMLESS
    assert {"data", "grad", "requires_grad"} <= found <= known


def test_every_operator_that_writes_is_seen_to() -> None:
    count = 0
    for name in dir(torch.ops.aten):
        packet: Any = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            schema = getattr(packet, overload)._schema
            for position, argument in enumerate(schema.arguments):
                if not argument.is_write:
                    continue
                graph = fx.Graph()
                operands = [graph.placeholder(a.name) for a in schema.arguments]
                given = {a.name: o for a, o in zip(schema.arguments, operands, strict=True)}
                split = next(
                    (i for i, a in enumerate(schema.arguments) if a.kwarg_only), len(given)
                )
                named = dict(list(given.items())[split:])
                node = graph.call_function(
                    getattr(packet, overload), tuple(operands[:split]), named
                )
                assert operands[position] in written_by(node), (name, overload)
                count += 1
    assert count > 500
