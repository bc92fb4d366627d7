"""State in closures, hooks, defaults, attributes of functions, and globals of other files."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.traps import settings, torchish
from tests.capture.traps.attributes import LATER, NEXT, Made, net, scaled
from tests.capture.traps.corpus import equal, refused

COUNT = 0


def counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def with_default(notes: list[int] = []) -> int:  # noqa: B006 - that is the trap
    notes.append(1)
    return len(notes)


def with_attribute() -> int:
    with_attribute.calls = getattr(with_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return with_attribute.calls  # type: ignore[attr-defined, no-any-return]


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        wrapper.calls += 1  # type: ignore[attr-defined]
        return function(*args) * wrapper.calls  # type: ignore[attr-defined]

    wrapper.calls = 0  # type: ignore[attr-defined]
    return wrapper


@counted
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@refused(r"forward changes closure of counter\.<locals>\.step: count" + NEXT)
def in_a_closure_of_an_attribute() -> Made:
    return net(lambda self, x: scaled(self, x, self.step()), step=counter())


@refused(r"forward changes closure of counter\.<locals>\.step: count" + NEXT)
def in_a_closure_of_forward() -> Made:
    step = counter()
    return net(lambda self, x: scaled(self, x, step()))


@refused(r"forward changes closure of counter\.<locals>\.step: count" + NEXT)
def in_a_closure_of_a_hook() -> Made:
    step = counter()
    model, batch = net(lambda self, x: self.a(x).sum())
    model.get_submodule("a").register_forward_hook(lambda module, args, h: h * step())
    return model, batch


@refused(r"forward changes closure of counter\.<locals>\.step: count" + NEXT)
def in_a_closure_of_a_pre_hook() -> Made:
    step = counter()
    model, batch = net(lambda self, x: self.a(x).sum())
    model.get_submodule("a").register_forward_pre_hook(lambda module, args: (args[0] * step(),))
    return model, batch


@refused(r"forward changes closure of counter\.<locals>\.step: count" + NEXT)
def in_a_closure_in_a_partial() -> Made:
    def scale(step: Callable[[], int], x: Tensor) -> Tensor:
        return x * step()

    part = functools.partial(scale, counter())
    return net(lambda self, x: self.part(self.a(x)).sum(), part=part)


@refused(r"forward changes with_default\.__defaults__" + NEXT)
def in_a_mutable_default() -> Made:
    return net(lambda self, x: scaled(self, x, with_default()))


@refused(r"with_attribute\.calls" + NEXT)
def in_an_attribute_of_a_function() -> Made:
    return net(lambda self, x: scaled(self, x, with_attribute()))


@refused(r"\.calls" + NEXT)
def in_a_decorator() -> Made:
    return net(lambda self, x: doubled(self.a(x)).sum())


@refused(r"closures\w*\.COUNT" + NEXT)
def in_a_global() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return scaled(self, x, COUNT)

    return net(body)


@refused(r"settings\.WARMUP" + NEXT)
def in_a_global_of_another_file() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        settings.WARMUP += 1
        return scaled(self, x, settings.WARMUP)

    return net(body)


@refused(r"settings\.WARMUP" + NEXT)
def in_a_global_that_another_files_function_changes() -> Made:
    return net(lambda self, x: scaled(self, x, settings.advance()))


@refused(r"settings\.STEPS" + NEXT)
def in_a_global_imported_in_forward() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        from tests.capture.traps.settings import STEPS

        STEPS["done"] += 1
        return scaled(self, x, STEPS["done"])

    return net(body)


@refused(r"torchish\.CALLS" + NEXT)
def in_a_file_with_a_name_like_torchs() -> Made:
    return net(lambda self, x: scaled(self, x, torchish.asked()))


@refused(r"forward changes closure of counter\.<locals>\.step: count" + LATER)
def in_a_closure_after_a_while() -> Made:
    step = counter()
    return net(lambda self, x: scaled(self, x, 2.0 if step() > 500 else 1.0))


@refused(r"forward changes closure of .*hook: last" + NEXT)
def in_a_tensor_that_a_hook_keeps() -> Made:
    last: Any = None

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal last
        result = output if last is None else output + last
        last = output.detach()
        return result

    model, batch = net(lambda self, x: self.a(x).sum())
    model.get_submodule("a").register_forward_hook(hook)
    return model, batch


@equal
def hooks_that_keep_what_nobody_reads() -> Made:
    seen: list[Tensor] = []
    model, batch = net(lambda self, x: self.a(x).square().mean())
    model.get_submodule("a").register_forward_hook(lambda module, args, h: seen.append(h.detach()))
    return model, batch


@equal
def a_closure_that_counts_for_nobody() -> Made:
    step = counter()

    def body(self: Any, x: Tensor) -> Tensor:
        step()
        return scaled(self, x, 2.0)

    return net(body)


@equal
def a_default_that_is_a_cache() -> Made:
    def mask(size: int, made: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
        if size not in made:
            made[size] = torch.ones(size, size).tril()
        return made[size]

    return net(lambda self, x: (self.a(x) @ mask(x.shape[1])).square().mean())
