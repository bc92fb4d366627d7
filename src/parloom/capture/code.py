"""Whose code a thing is, and which globals code names."""

import builtins
import dis
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any

LIBRARIES = frozenset({"torch", "numpy", "transformers"})
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
MEMBERS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
NAMESPACES = frozenset({"globals", "vars", "eval", "exec"})  # builtins that read any global
ABSENT = object()  # in the place of a global or slot that has no value
# What a file says of itself: a script is `__main__`, and elsewhere its path is another one.
UNREAD = frozenset(
    {"__name__", "__file__", "__spec__", "__loader__", "__package__", "__builtins__", "__path__",
     "__doc__", "__cached__", "__annotations__"}
)  # fmt: skip

Namespace = dict[str, Any]
Chain = tuple[str, ...]


def is_library(module: object) -> bool:
    """Whether a module of that name is torch's, numpy's, transformers', standard, or ours.

    A user's `torchish.py` is not torch's, and neither is a `calendar.py` beside a script the
    standard library's. The zoo's models are as a user's.
    """
    if not isinstance(module, str):
        return False
    top = module.partition(".")[0]
    if top == "parloom":
        return not module.startswith("parloom.zoo")
    if top in LIBRARIES or top == "builtins":
        return True
    if top not in sys.stdlib_module_names or top == "__main__":
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or (file.startswith(STANDARD_LIBRARY) and "site-packages" not in file)


def is_foreign(thing: object) -> bool:
    """Whether a function or class is not a library's."""
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    elif isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, FunctionType):
        # `__module__` may be copied from what a function wraps.
        return not is_library(thing.__globals__.get("__name__"))
    return isinstance(thing, type) and not is_library(thing.__module__)


def foreign(namespace: Namespace) -> Iterator[tuple[str, Any]]:
    """Functions and classes of others in a library's class or file, and in its registries."""
    for name, value in tuple(namespace.items()):
        if is_foreign(value):
            yield name, value
        registry = getattr(value, "_global_mapping", value) if is_named(value) else None
        if type(registry) is dict:
            for key, item in tuple(registry.items()):
                if is_foreign(item):
                    yield f"{name}[{key!r}]", item


def is_named(value: object) -> bool:
    """Whether a value is a dict, or an instance of a class of transformers."""
    return type(value) is dict or type(value).__module__.startswith("transformers.")


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
    if first in UNREAD or (first not in namespace and hasattr(builtins, first)):
        return
    yield namespace, first
    value = namespace.get(first)
    if isinstance(value, ModuleType):
        yield from members_of(value, members)


def members_of(module: ModuleType, members: list[str]) -> Iterator[tuple[Namespace, str]]:
    """What is read of a module: one member, or everything."""
    if is_library(module.__name__):
        return
    if not members:
        yield from whole(vars(module))
        return
    yield from resolved(tuple(members), vars(module))


def whole(namespace: Namespace) -> Iterator[tuple[Namespace, str]]:
    """Every name."""
    return ((namespace, name) for name in tuple(namespace) if name not in UNREAD)


def imported_module(name: str, namespace: Namespace) -> ModuleType | None:
    """A module that a function imports, where it is there."""
    try:
        return sys.modules.get(resolve_name(name, namespace.get("__package__") or ""))
    except ImportError:
        return None
