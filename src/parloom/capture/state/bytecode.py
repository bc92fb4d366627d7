"""Which globals code names."""

import builtins
import dis
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from types import CodeType, ModuleType
from typing import Any

from parloom.capture.owners import is_library
from parloom.capture.state.numbers import Number

GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
MEMBERS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
NAMESPACES = frozenset({"globals", "vars", "eval", "exec"})  # builtins that read any global
NUMBERS_AND_TEXT = frozenset({bool, int, float, complex, str, Number})
ABSENT = object()  # in the place of a global or slot that has no value
# What a file says of itself: a script is `__main__`, and elsewhere its path is another one.
UNREAD = frozenset(
    {"__name__", "__file__", "__spec__", "__loader__", "__package__", "__builtins__", "__path__",
     "__doc__", "__cached__", "__annotations__"}
)  # fmt: skip

Namespace = dict[str, Any]
Chain = tuple[str, ...]


def names_in(code: CodeType) -> tuple[Chain, ...]:
    """The globals that code, and the code in it, names, each with the members that follow it.

    `settings.WARMUP` is `("settings", "WARMUP")`; what a function imports begins with
    `"import NAME"`, with the dots of a relative import.
    """
    found: dict[Chain, None] = {}
    chain: Chain = ()
    imported = ""
    constants: list[Any] = []
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in MEMBERS and chain:
            chain = (*chain, name)
            continue
        if chain:
            found[chain] = None
        chain = (name,) if kind in GLOBALS else ()
        if kind == "IMPORT_NAME":
            level = next((c for c in constants[-2:] if type(c) is int), 0)
            imported = f"import {'.' * level}{name}"
            if not constants[-1:] or not constants[-1]:
                found[imported,] = None
        elif kind == "IMPORT_FROM":
            found[imported, name] = None
        constants.append(name if kind.startswith("LOAD_") else None)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(names_in(constant)))
    return tuple(found)


def resolved(chain: Chain, namespace: Namespace) -> Iterator[tuple[Namespace, str]]:
    """The namespaces and names that a chain reads, as far as they are modules of users.

    A module that is passed on as it is may be read anywhere; a name without a value is one that
    code may yet make.
    """
    first, *members = chain
    if first.startswith("import "):
        module = imported_module(first.removeprefix("import "), namespace)
        if module is not None:
            yield from members_of(module, members)
        return
    if first in NAMESPACES and first not in namespace:
        yield from whole(namespace)
        return
    if not is_read(first) or (first not in namespace and hasattr(builtins, first)):
        return
    yield namespace, first
    value = namespace.get(first)
    if isinstance(value, ModuleType):
        yield from members_of(value, members)


def members_of(module: ModuleType, members: list[str]) -> Iterator[tuple[Namespace, str]]:
    """What is read of a module: one member, or everything; of a library's, values that users set.

    Those are numbers and text, which the library may have, too, and instances of users' classes.
    """
    if is_library(module.__name__):
        name, *further = members or ("",)
        value = vars(module).get(name)
        if isinstance(value, ModuleType):
            yield from members_of(value, further)
        elif type(value) in NUMBERS_AND_TEXT or not is_library(type(value).__module__):
            yield vars(module), name
        return
    if not members:
        yield from whole(vars(module))
        return
    yield from resolved(tuple(members), vars(module))


def whole(namespace: Namespace) -> Iterator[tuple[Namespace, str]]:
    """Every name."""
    return ((namespace, name) for name in tuple(namespace) if is_read(name))


def is_read(name: str) -> bool:
    """Whether a global counts; what no source can name, pytest put there as it rewrote `assert`."""
    return name not in UNREAD and name.isidentifier()


def imported_module(name: str, namespace: Namespace) -> ModuleType | None:
    """A module that a function imports, where it is there."""
    try:
        return sys.modules.get(resolve_name(name, namespace.get("__package__") or ""))
    except ImportError:
        return None
