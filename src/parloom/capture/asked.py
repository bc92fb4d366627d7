"""Models that ask where they run: each rank of a plan would have to get the same answer.

While a factory builds a model, and while forward and the loss function are traced, what asks for
rank, world size, host, process, device or environment is noted where a module (or the loss
function) asks. Libraries ask for reasons of their own, and so does a factory outside of modules.
"""

import getpass
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parloom.capture.blame import current_frames, place
from parloom.capture.owners import (
    LIBRARIES,
    STANDARD_LIBRARY,
    is_a,
    is_library,
    is_user_file,
)
from parloom.errors import CaptureError

# Functions of these modules ask, but for those that are named: they read files, hold for every
# rank, or tell nothing.
ASKING: tuple[tuple[ModuleType, frozenset[str]], ...] = (
    (platform, frozenset({"system", "python_version", "python_version_tuple",
                          "python_implementation", "python_compiler", "python_build"})),
    (socket, frozenset()),
    (getpass, frozenset()),
    (subprocess, frozenset()),
    (dist, frozenset({"is_available"})),
    *((module, frozenset({"is_available", "is_initialized", "synchronize", "empty_cache",
                          "manual_seed", "manual_seed_all", "init"}))
      for module in (torch.cuda, torch.xpu, torch.mps, torch.cpu, torch.accelerator)),
)  # fmt: skip
# Of other modules only some do.
NAMED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("uname", "cpu_count", "process_cpu_count", "times", "sysconf", "confstr", "ctermid",
          "ttyname", "popen", "system", "statvfs")),
    (uuid, ("getnode", "uuid1")),
    (threading, ("get_ident", "get_native_id")),
    (multiprocessing, ("cpu_count", "current_process", "parent_process")),
    (torch, ("get_num_threads", "get_num_interop_threads")),
)  # fmt: skip
ASKS_OF_OS = ("get", "sched_")  # how other names in `os` begin
NOT_OF_OS = frozenset(
    {"getcwd", "getcwdb", "getenv", "getenvb", "get_exec_path", "get_blocking", "get_inheritable",
     "getxattr", "getrandom"}
)  # fmt: skip
OPTIONAL = ("psutil", "pynvml", "pwd", "grp", "resource")  # where the process has them
INSTALLED = tuple(f"{name}." for name in LIBRARIES)
FUNCTIONS = (FunctionType, BuiltinFunctionType, type(cache(id)))
WAY_ON = (
    "every rank of a plan runs one program, on other machines than the one that plans: decide it"
    " outside of the model and pass it as an argument, the same on all ranks"
)


# Who is told; a module may keep a function that notes, and call it in a later trace.
Listener = Callable[[str, Callable[[FrameType], bool]], None]
LISTENER: ContextVar[Listener | None] = ContextVar("LISTENER", default=None)


@contextmanager
def nothing_asked(model: nn.Module | None = None) -> Iterator[None]:
    """Raise `CaptureError` at the end if a module asked where it runs.

    Of a `model` whose forward is run inside, any code; without one, constructors of modules.
    """
    found: list[str] = []

    def note(what: str, passes: Callable[[FrameType], bool]) -> None:
        stack = [entry for entry in current_frames() if entry[0].f_code.co_filename != __file__]
        modules = [i for i, (f, _) in enumerate(stack) if is_a(_owner(f), nn.Module)]
        inside = stack[modules[0] :] if modules else []
        files = [f.f_code.co_filename for f, _ in inside]
        if found or not inside or any(file.startswith("<frozen importlib") for file in files):
            return  # outside of modules, or while a library is imported
        # Libraries ask for reasons of their own, those of the standard library among them.
        caller = next((f for f, _ in reversed(inside) if not passes(f)), None)
        if caller is None or not _counts(caller):
            return
        built = model or _owner(stack[modules[-1]][0])
        assert isinstance(built, nn.Module)
        asks = "forward asks" if model else "its constructor asks"
        found.append(f"cannot capture {place(built, inside)}: {asks} for {what}")

    with ExitStack() as stack:
        stack.callback(LISTENER.reset, LISTENER.set(note))
        noting = _Noting()
        stack.callback(noting.undo)
        noting.run()
        try:
            yield
        except Exception as error:
            if found:
                raise CaptureError(f"{found[0]}; {WAY_ON}") from error
            raise
    if found:
        raise CaptureError(f"{found[0]}; {WAY_ON}")


class _Noting:
    """Lets everything that can be asked note it, wherever the user has imported it, until `undo`.
    It is done for every trace, among all modules of the process: each class, function and container
    is looked at once.
    """

    def __init__(self) -> None:
        # What puts things back.
        self.undone: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        # What notes, by the id of what it stands for, and what was looked at.
        self.made: dict[int, Any] = {}
        self.seen: dict[int, Any] = {}

    def undo(self) -> None:
        """Put everything back."""
        for put, given in reversed(self.undone):
            put(*given)

    def run(self) -> None:
        environment: Any = type(os.environ)
        for name in ("__getitem__", "__iter__"):
            self._replace(environment, name, _noted(getattr(environment, name), _variable))
        for module, name, original in _questions():
            if id(original) not in self.made:
                self.made[id(original)] = _question(original, f"{module.__name__}.{name}()")
            self._replace(module, name, self.made[id(original)])
        arguments = Arguments(sys.argv)
        self.made[id(sys.argv)] = arguments
        self._replace(sys, "argv", arguments)
        for file in _files():
            self._aliases(vars(file), partial(self._replace, file))

    def _aliases(self, namespace: Mapping[str, Any], put: Callable[[str, Any], None]) -> None:
        """Other names of what was made to note: of a file, its classes, containers and defaults."""
        made, seen = self.made, self.seen
        for name, value in tuple(namespace.items()):
            number = id(value)
            if number in seen:
                continue
            if number in made:
                put(name, made[number])
            elif issubclass(type(value), partial):
                if id(value.func) in made:
                    put(name, partial(made[id(value.func)], *value.args, **value.keywords))
            else:
                seen[number] = value
                self._look_into(value)

    def _look_into(self, value: Any) -> None:
        """Functions of C have no names of their own."""
        kind = type(value)
        if kind is FunctionType:
            if value.__defaults__:
                self._function(value)
        elif kind is list or kind is dict:
            self._container(value)
        elif issubclass(kind, type):
            self._class(value)

    def _class(self, value: type) -> None:
        if not is_library(value.__module__):
            own = {n: getattr(v, "__func__", v) for n, v in vars(value).items()}
            asks = {
                n: v for n, v in own.items() if id(v) in self.made or isinstance(v, FunctionType)
            }
            self._aliases(asks, partial(self._of_class, value))

    def _function(self, value: Any) -> None:
        if self._has_some(value.__defaults__):
            found = tuple(self.made.get(id(item), item) for item in value.__defaults__)
            self._attribute(value, "__defaults__", found, value.__defaults__)

    def _container(self, value: Any) -> None:
        items = value.items() if type(value) is dict else enumerate(value)
        if self._has_some(value.values() if type(value) is dict else value):
            for key, item in tuple(items):
                if id(item) in self.made:
                    value[key] = self.made[id(item)]
                    self.undone.append((value.__setitem__, (key, item)))

    def _has_some(self, values: Iterable[object]) -> bool:
        return not self.made.keys().isdisjoint(map(id, values))

    def _replace(self, owner: Any, name: str, value: object) -> None:
        """Another attribute of a class or module, for a while."""
        own, old = name in vars(owner), getattr(owner, name)
        setattr(owner, name, value)
        self.undone.append((setattr, (owner, name, old)) if own else (delattr, (owner, name)))

    def _of_class(self, kind: type, name: str, value: Any) -> None:
        """Another attribute of a class, for a while; functions of C are bound to no instance."""
        self._attribute(kind, name, staticmethod(value), vars(kind)[name])

    def _attribute(self, owner: Any, name: str, value: Any, old: Any) -> None:
        setattr(owner, name, value)
        self.undone.append((setattr, (owner, name, old)))


def _questions() -> Iterator[tuple[Any, str, Any]]:
    """(module, name, function) of all that can be asked; what a module imports is none of its."""
    optional = ((sys.modules[name], frozenset[str]()) for name in OPTIONAL if name in sys.modules)
    for module, harmless in (*ASKING, *optional):
        own = module.__name__, "torch._C"
        for name, value in tuple(vars(module).items()):
            if type(value) not in FUNCTIONS or name in harmless or name.startswith("_"):
                continue
            origin = str(value.__module__)
            if origin.removeprefix("_").startswith(own):
                yield module, name, value
                if (
                    vars(sys.modules.get(origin, module)).get(name) is value
                    and origin != module.__name__
                ):
                    yield sys.modules[origin], name, value
    for name, value in tuple(vars(os).items()):
        if name.startswith(ASKS_OF_OS) and name not in NOT_OF_OS and callable(value):
            yield os, name, value
    for module, names in NAMED:
        yield from ((module, n, getattr(module, n)) for n in names if hasattr(module, n))


def _noted(
    original: Callable[..., Any],
    label: Callable[..., str],
    passes: Callable[[FrameType], bool] | None = None,
) -> Callable[..., Any]:
    """A function that tells the listener that it was called, and by whom."""

    @wraps(original)
    def asks(*args: Any, **kwargs: Any) -> Any:
        note = LISTENER.get()
        if note is not None:
            note(label(*args), passes or _is_standard)
        return original(*args, **kwargs)

    return asks


@cache
def _question(original: Callable[..., Any], label: str) -> Callable[..., Any]:
    return _noted(original, lambda *_: label, _is_between)


def _variable(_: Any, *names: Any) -> str:
    return f"os.environ[{names[0]!r}]" if names else "os.environ"


def _argument(name: str) -> Any:
    """A method of `sys.argv`."""
    return _noted(getattr(list, name), lambda *_: "sys.argv")


class Arguments(list[str]):
    """`sys.argv`, which tells who reads it."""

    __getitem__ = _argument("__getitem__")
    __iter__ = _argument("__iter__")
    __len__ = _argument("__len__")
    __contains__ = _argument("__contains__")


def _is_between(frame: FrameType) -> bool:
    """Whether a frame is no caller's: the noting itself."""
    return frame.f_code.co_filename in (current_frames.__code__.co_filename, __file__)


def _files() -> Iterator[ModuleType]:
    """The modules that the user wrote."""
    for name, module in tuple(sys.modules.items()):
        # First what leaves out most of thousands of modules: they are installed packages'.
        if name.startswith(INSTALLED) or not is_a(module, ModuleType):
            continue
        if "site-packages" not in (vars(module).get("__file__") or "") and not is_library(name):
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
