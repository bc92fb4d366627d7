"""Clocks and sources of the system that user code asks while it is traced."""

import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from parloom.capture.assertions import replaced
from parloom.capture.code import is_library

CLOCKS = ("time", "monotonic", "perf_counter", "process_time")
SOURCES: tuple[tuple[Any, str], ...] = (
    (os, "urandom"), (uuid, "uuid1"), (uuid, "uuid4"), (secrets, "token_bytes"),
    (secrets, "token_hex"), (secrets, "randbits"), (secrets, "randbelow"), (secrets, "choice"),
    (random, "SystemRandom"),
)  # fmt: skip


@contextmanager
def asked(globals_: list[dict[str, Any]], ahead_s: int) -> Iterator[set[str]]:
    """Inside, the names of clocks and sources that user code asks are collected.

    Clocks are `ahead_s` seconds ahead. `globals_` are namespaces that may have them by themselves
    (`from time import time`). A `datetime` is not seen.
    """
    found: set[str] = set()

    def wrapped(name: str, function: Callable[..., Any], shift: float) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            if is_library(sys._getframe(1).f_globals.get("__name__")):
                return answer
            found.add(name)
            return answer + type(answer)(shift) if shift else answer

        return ask

    changes: list[tuple[Any, str, Callable[..., Any]]] = []
    for name in CLOCKS:
        changes.append((time, name, wrapped(f"time.{name}", getattr(time, name), ahead_s)))
        nanoseconds = f"{name}_ns"
        function = getattr(time, nanoseconds)
        changes.append((time, nanoseconds, wrapped(f"time.{name}", function, ahead_s * 10**9)))
    for module, name in SOURCES:
        label = f"{module.__name__}.{name}"
        changes.append((module, name, wrapped(label, getattr(module, name), 0)))
    instead = {id(getattr(module, name)): new for module, name, new in changes}
    with ExitStack() as stack:
        for namespace in globals_:
            stack.enter_context(exchanged(namespace, instead))
        for module, name, new in changes:
            stack.enter_context(replaced(module, name, new))
        yield found


@contextmanager
def exchanged(namespace: dict[str, Any], instead: Mapping[int, Any]) -> Iterator[None]:
    """Other functions in a namespace, for a while."""
    old = {name: value for name, value in namespace.items() if id(value) in instead}
    namespace.update({name: instead[id(value)] for name, value in old.items()})
    try:
        yield
    finally:
        namespace.update(old)
