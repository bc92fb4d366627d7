"""Whose code a thing is: the user's, a library's or ours."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

LIBRARIES = frozenset({"torch", "numpy", "transformers"})
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
TORCH_FOLDER = str(Path(torch.__file__).parent)
OWN_FOLDER = str(Path(__file__).parent)

METHODS = (staticmethod, classmethod, property)

Namespace = dict[str, Any]


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's or a model library's, rather than torch's or ours."""
    if filename.startswith(("<", TORCH_FOLDER, OWN_FOLDER)):
        return False
    return "site-packages" in filename or not filename.startswith(STANDARD_LIBRARY)


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


def is_a(value: object, kinds: Any) -> bool:
    """Whether a value's class is one of `kinds`; `isinstance` asks `value.__class__`, too.

    That may be code of the value's class: a proxy that loads what it stands for, or that raises.
    """
    return issubclass(type(value), kinds)


def attributes_of(value: object) -> Namespace | None:
    """The `__dict__` of an object that has one, whatever its class's own `__getattr__` does."""
    try:
        found = type(value).__getattribute__(value, "__dict__")
    except Exception:  # a property of the user's
        return None
    return found if type(found) is dict else None


def is_foreign(thing: Any) -> bool:
    """Whether a function or class is not a library's."""
    kind = type(thing)
    if issubclass(kind, METHODS):
        thing = thing.fget if issubclass(kind, property) else thing.__func__
        kind = type(thing)
    if issubclass(kind, FunctionType):
        # `__module__` may be copied from what a function wraps.
        return not is_library(thing.__globals__.get("__name__"))
    return issubclass(kind, type) and not is_library(thing.__module__)


def foreign(namespace: Namespace) -> Iterator[tuple[str, Any]]:
    """Functions and classes of others in a library's class or file, and in its registries.

    A notebook's shell is among the names of Python itself, which each file has as a dict.
    """
    for name, value in tuple(namespace.items()):
        if name == "__builtins__":
            continue
        if is_foreign(value):
            yield name, value
        registry = registry_of(value)
        for key, item in tuple(registry.items()) if registry else ():
            if is_foreign(item):
                yield f"{name}[{key!r}]", item


def registry_of(value: Any) -> dict[Any, Any] | None:
    """The dict of a library's registry, or None."""
    registry = getattr(value, "_global_mapping", value) if is_named(value) else None
    return registry if type(registry) is dict else None


def is_named(value: object) -> bool:
    """Whether a value is a dict, or an instance of a class of transformers."""
    return type(value) is dict or type(value).__module__.startswith("transformers.")
