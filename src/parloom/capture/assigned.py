"""Parameters and buffers that forward replaces, `self.mean = 0.9 * self.mean + ...`, not writes.

What a trace returns are writes. Torch sees an assignment only where the traced module itself makes
it, and forgets those of submodules, so here each becomes a write to the buffer that was there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from parloom.errors import CaptureError

Registered = list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]


@contextmanager
def assignments_written(model: nn.Module) -> Iterator[None]:
    """Around a call of forward: what it assigned to a buffer is written there.

    A buffer that it registers is taken for one that is made once, and goes again.
    Raises: CaptureError for a parameter that is replaced, and for a buffer that has another shape
    or dtype than before, or had no value.
    """
    before: Registered = [
        (path, module, dict(module._parameters), dict(module._buffers))
        for path, module in model.named_modules()
    ]
    try:
        yield
        written: list[tuple[Tensor, Tensor]] = []
        for path, module, parameters, buffers in before:
            where = ".".join(part for part in (type(model).__name__, path) if part)
            refuse_parameters(where, module, parameters)
            written += new_values(where, module, buffers)
        for buffer, value in written:
            buffer.copy_(value)
    finally:
        for _, module, parameters, buffers in before:
            restore(module._parameters, parameters)
            restore(module._buffers, buffers)


def refuse_parameters(where: str, module: nn.Module, before: dict[str, Any]) -> None:
    """Raise `CaptureError` for a parameter that is no longer what it was."""
    for name, now in module._parameters.items():
        if now is not before.get(name):
            raise CaptureError(
                f"cannot capture {where}: forward assigns a new parameter to self.{name}, which a"
                " plan cannot train; make parameters in __init__, and use what is computed of them"
                " as a plain tensor"
            )


def new_values(
    where: str, module: nn.Module, before: dict[str, Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The buffers that something was assigned to, with copies of that: it may be another buffer."""
    for name, old in before.items():
        now = module._buffers.get(name)
        if now is old:
            continue
        if now is None or old is None or (now.shape, now.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"cannot capture {where}: forward makes the buffer self.{name} {described(now)},"
                f" and it was {described(old)}; register it in __init__ with the shape and dtype"
                " that it keeps"
            )
        yield old, now.detach().clone()


def described(tensor: Tensor | None) -> str:
    """`float32[4, 2]`, or `None`."""
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Put back what was there, in its order."""
    if now.keys() != before.keys() or any(now[name] is not t for name, t in before.items()):
        now.clear()
        now.update(before)
