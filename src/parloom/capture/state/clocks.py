"""Clocks, files and sources of the system that user code asks while it is traced."""

import builtins
import datetime
import io
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from multiprocessing.managers import BaseProxy
from threading import get_ident
from types import CellType
from typing import Any

from parloom.capture.owners import attributes_of, is_library
from parloom.capture.replace import replaced
from parloom.capture.state.aspects import items_of
from parloom.capture.state.snapshot import Snapshot

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
WITH_TIME = ("localtime", "gmtime", "ctime")  # of now, where no time is given
DATES = (("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"))
SOURCES: tuple[tuple[Any, str, str], ...] = (
    (os, "urandom", ""), (uuid, "uuid1", ""), (uuid, "uuid4", ""), (secrets, "token_bytes", ""),
    (secrets, "token_hex", ""), (secrets, "randbits", ""), (secrets, "randbelow", ""),
    (secrets, "choice", ""), (random, "SystemRandom", ""), (os, "getrandom", ""),
    (time, "strftime", ""), (time, "clock_gettime", ""), (time, "clock_gettime_ns", ""),
    (os, "times", ""), (os, "getloadavg", ""), (os, "stat", ""), (os, "listdir", ""),
    (os, "scandir", ""), (os, "read", ""), (os.path, "exists", "os.path.exists"),
    (os.path, "isfile", "os.path.isfile"), (os, "system", ""), (os, "popen", ""),
    (subprocess.Popen, "__init__", "subprocess"), (socket.socket, "recv", "socket"),
    (BaseProxy, "_callmethod", "multiprocessing.Manager"), (tempfile, "mkdtemp", ""),
    (builtins, "input", "input"),
)  # fmt: skip
# What is read once, by the first call, is as good as a constant.
FILES = frozenset(
    {"open", "os.stat", "os.listdir", "os.scandir", "os.read", "os.path.exists", "os.path.isfile"}
)
OPENS = ((builtins, "open"), (io, "open"))
# Files of libraries that ask for whoever calls them.
PASSING_ON = frozenset(
    {"pathlib", "pathlib._local", "pathlib._abc", "genericpath", "posixpath", "subprocess", "json",
     "multiprocessing.managers", "torch.serialization", "torch.storage", "numpy.lib._npyio_impl",
     "numpy.lib.npyio", "numpy.lib._datasource", "numpy", "os", "tempfile", "gzip", "fileinput",
     "contextlib", "urllib.request", "socket"}
)  # fmt: skip
EXCHANGED = ("global", "attributes", "dict", "cell")


@contextmanager
def asked(before: Snapshot, ahead_s: int) -> Iterator[set[str]]:
    """Inside, the names of clocks and sources that user code of this thread asks are collected.

    Clocks are `ahead_s` seconds ahead. `before` is the state, which may have them by themselves
    (`from time import time`).
    """
    found: set[str] = set()
    thread = get_ident()

    def counts(frame: Any) -> bool:
        name = frame.f_globals.get("__name__")
        while name in PASSING_ON and frame.f_back is not None:
            frame = frame.f_back
            name = frame.f_globals.get("__name__")
        return get_ident() == thread and not is_library(name)

    def noting(
        name: str, function: Callable[..., Any], given: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        @wraps(function)
        def ask(*args: Any, **kwargs: Any) -> Any:
            if not counts(sys._getframe(1)):
                return function(*args, **kwargs)
            found.add(name)
            return (given or function)(*args, **kwargs)

        return ask

    def opening(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def ask(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if ("r" in mode or "+" in mode) and counts(sys._getframe(1)):
                found.add("open")
            return function(file, mode, *args, **kwargs)

        return ask

    changes = [(time, n, noting(f"time.{n}", o, g)) for n, o, g in clocks(ahead_s)]
    changes += [
        (owner, name, noting(label or f"{owner.__name__}.{name}", getattr(owner, name)))
        for owner, name, label in SOURCES
        if hasattr(owner, name)
    ]
    changes += [(owner, name, opening(getattr(owner, name))) for owner, name in OPENS]
    changes += [(datetime, kind, dates(kind, noting, ahead_s)) for kind in ("datetime", "date")]
    instead = {id(getattr(owner, name)): new for owner, name, new in changes}
    with ExitStack() as stack:
        for (_, style), held in before.held.items():
            if style in EXCHANGED:
                stack.enter_context(exchanged(held.owner, style, instead))
        for owner, name, new in changes:
            stack.enter_context(replaced(owner, name, new))
        yield found


def clocks(ahead_s: int) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Name, function, and function that is ahead, of the clocks of `time`."""

    def shifted(function: Callable[..., Any], by: int) -> Callable[..., Any]:
        def ask() -> Any:
            now = function()
            return now + type(now)(by)

        return ask

    def of_time(function: Callable[..., Any], now: Callable[[], float]) -> Callable[..., Any]:
        return lambda seconds=None: function(now() + ahead_s if seconds is None else seconds)

    for name in CLOCKS:
        function = getattr(time, name)
        yield name, function, shifted(function, ahead_s)
        function = getattr(time, f"{name}_ns")
        yield f"{name}_ns", function, shifted(function, ahead_s * 10**9)
    for name in WITH_TIME:
        function = getattr(time, name)
        yield name, function, of_time(function, time.time)


def dates(kind: str, noting: Callable[..., Any], ahead_s: int) -> Any:
    """The class `datetime` or `date`, whose `now` and `today` are noted and ahead."""
    real: Any = getattr(datetime, kind)

    class Kind(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, real)

    def shifted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (
            function(*args, **kwargs) + datetime.timedelta(seconds=ahead_s)
        )

    made = {
        name: staticmethod(
            noting(f"datetime.{kind}.{name}", getattr(real, name), shifted(getattr(real, name)))
        )
        for owner, name in DATES
        if owner == kind
    }
    made["__new__"] = staticmethod(lambda cls, *args, **kwargs: real(*args, **kwargs))
    return Kind(kind, (real,), made)


@contextmanager
def exchanged(owner: Any, style: str, instead: Mapping[int, Any]) -> Iterator[None]:
    """Other functions in a namespace or cell, for a while."""
    if isinstance(owner, CellType):
        namespace: Any = {"": owner.cell_contents} if filled(owner) else {}
    else:
        namespace = attributes_of(owner) if style == "attributes" else owner
    old = {name: value for name, value in items_of(namespace) if id(value) in instead}

    def put(name: Any, value: Any) -> None:
        if isinstance(owner, CellType):
            owner.cell_contents = value
        else:
            dict.__setitem__(namespace, name, value)

    for name, value in old.items():
        put(name, instead[id(value)])
    try:
        yield
    finally:
        for name, value in old.items():
            now = owner.cell_contents if isinstance(owner, CellType) else dict.get(namespace, name)
            if now is instead[id(value)]:
                put(name, value)


def filled(cell: CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
