"""Models that ask where they run: each rank of a plan would have to get the same answer.

While a factory builds a model, and while forward and the loss function are traced, what asks for
rank, world size, host, process, device or environment is noted where a module (or the loss
function) asks. Libraries ask for reasons of their own, and so does a factory outside of modules.
"""

import os
import platform
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parloom.capture.assertions import replaced
from parloom.capture.blame import STANDARD_LIBRARY, current_frames, is_user_file, place
from parloom.capture.code import is_library
from parloom.errors import CaptureError

ASKED = (
    (os, "os", ("getpid", "getppid", "uname", "getlogin")),
    (socket, "socket", ("gethostname", "getfqdn")),
    (platform, "platform", ("node", "uname")),
    (uuid, "uuid", ("getnode",)),
    (torch.cuda, "torch.cuda", ("device_count", "current_device", "get_device_name")),
    (dist, "torch.distributed", (
        "get_rank", "get_world_size", "is_initialized", "get_backend", "get_node_local_rank",
        "is_torchelastic_launched",
    )),
)  # fmt: skip
WAY_ON = (
    "every rank of a plan runs one program, on other machines than the one that plans: decide it"
    " outside of the model and pass it as an argument, the same on all ranks"
)


# Who is told; a module may keep a function that notes, and call it in a later trace.
LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("LISTENER", default=None)


@contextmanager
def nothing_asked(model: nn.Module | None = None) -> Iterator[None]:
    """Raise `CaptureError` at the end if a module asked where it runs.

    Of a `model` whose forward is run inside, any code; without one, constructors of modules.
    """
    found: list[str] = []

    def note(what: str) -> None:
        stack = [entry for entry in current_frames() if entry[0].f_code.co_filename != __file__]
        modules = [i for i, (f, _) in enumerate(stack) if isinstance(_owner(f), nn.Module)]
        inside = stack[modules[0] :] if modules else []
        files = [f.f_code.co_filename for f, _ in inside]
        if found or not inside or any(file.startswith("<frozen importlib") for file in files):
            return  # outside of modules, or while a library is imported
        caller = next((f for f, _ in reversed(inside) if not _is_standard(f)), None)
        if caller is None or not _counts(caller):
            return
        built = model or _owner(stack[modules[-1]][0])
        assert isinstance(built, nn.Module)
        asks = "forward asks" if model else "its constructor asks"
        found.append(f"cannot capture {place(built, inside)}: {asks} for {what}")

    with ExitStack() as stack:
        stack.callback(LISTENER.reset, LISTENER.set(note))
        for owner, name, value in _noting():
            stack.enter_context(replaced(owner, name, value))
        try:
            yield
        except Exception as error:
            if found:
                raise CaptureError(f"{found[0]}; {WAY_ON}") from error
            raise
    if found:
        raise CaptureError(f"{found[0]}; {WAY_ON}")


def _noting() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, value that notes) of all that can be asked, wherever it is imported."""

    def noted(original: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(original)
        def asks(*args: Any, **kwargs: Any) -> Any:
            note = LISTENER.get()
            if note is not None:
                note(f"os.environ[{args[1]!r}]" if label == "os.environ" else f"{label}()")
            return original(*args, **kwargs)

        return asks

    environment: Any = type(os.environ)
    yield environment, "__getitem__", noted(environment.__getitem__, "os.environ")
    made: dict[int, Any] = {}
    for module, prefix, names in ASKED:
        for name in names:
            original = getattr(module, name, None)
            if original is not None:
                made[id(original)] = noted(original, f"{prefix}.{name}")
                yield module, name, made[id(original)]
    for module in _files():
        for name, value in tuple(vars(module).items()):
            if id(value) in made:
                yield module, name, made[id(value)]


def _files() -> Iterator[ModuleType]:
    """The modules that the user wrote."""
    for name, module in tuple(sys.modules.items()):
        if isinstance(module, ModuleType) and not is_library(name):
            file = getattr(module, "__file__", None) or ""
            if is_user_file(file) and "site-packages" not in file:
                yield module


def _is_standard(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name == current_frames.__code__.co_filename or name.startswith("<frozen"):
        return True
    return name.startswith(STANDARD_LIBRARY) and "site-packages" not in name


def _counts(frame: FrameType) -> bool:
    """Whether code is a model's rather than a library's that models are made with."""
    return is_user_file(frame.f_code.co_filename) and not is_library(
        frame.f_globals.get("__name__", "")
    )


def _owner(frame: FrameType) -> object:
    """The first argument of a call: the object, where it is a method's."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
