"""All that a call of a model, of its hooks and of the loss function can reach, each object once.

The walk goes through attributes, slots, classes, methods, closures, defaults, function attributes,
the globals that bytecode names, containers, hooks, iterators, arrays and generators. It stops at
the code of torch, numpy, transformers and the standard library; their instances are walked, and so
are functions of others that were put into them.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from parloom.capture.owners import foreign, is_a, is_library
from parloom.capture.state.aspects import ITEMS, NAMED, PLAIN_KINDS, Aspect, Look, is_plain, text_of
from parloom.capture.state.bytecode import ABSENT

# Aspects that are told by what holds the object.
INSIDE = (
    *ITEMS, "cell", "of", "array", "tensor", "bytes", "iterator", "opaque", "file", "cache",
    "variable", "draws", "hooks",
)  # fmt: skip
EVERYWHERE = frozenset(
    {"_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks",
     "_global_backward_pre_hooks"}
)  # fmt: skip
Root = tuple[str, Any]  # how an error calls it, the object
# How weights came about, a hash of strings, and where a model is stored.
UNREAD = frozenset(
    {"_is_hf_initialized", "_original_object_hash", "_name_or_path", "name_or_path"}
)  # fmt: skip
TRANSIENT = ("draws", "cache", "file", "variable")  # aspects whose `fixed` moves by itself


@dataclass(slots=True, eq=False)
class Reached:
    """An aspect of an object (its attributes, its items, its closure), and where it was found.

    `above` is the aspect that has the object as its part `name`; None for a root, with its name.
    """

    aspect: Aspect
    above: "Reached | None"
    name: Any

    @property
    def owner(self) -> Any:
        """The object."""
        return self.aspect.owner

    def label(self, part: Any) -> str:
        """How an error calls a part: `self.inner.steps[2].count`, `file.COUNTS`."""
        owner, style = self.owner, self.aspect.style
        if style == "global":
            return f"{owner.get('__name__', 'globals')}.{part}"
        if style == "class":
            return f"{owner.__name__}.{part}"
        if style == "function":
            return f"{getattr(owner, '__qualname__', 'function')}.{part}"
        if style == "closure":
            return f"closure of {owner.__qualname__}: {part}"
        if style in ITEMS:
            shown = text_of(part) if is_plain(part) else "..."
            return f"{self.found}[{shown}]"
        if style in INSIDE:
            return self.found
        return f"{self.found}.{part}"

    @property
    def found(self) -> str:
        """How an error calls the object itself."""
        return str(self.name) if self.above is None else self.above.label(self.name)

    def attribute(self, part: Any) -> tuple["Reached", Any]:
        """The part, or the attribute, global or variable whose container it is in."""
        held, name = self, part
        while held.above is not None and held.aspect.style in INSIDE:
            held, name = held.above, held.name
        return held, name


Place = tuple[Reached | None, Any]  # what holds an object, and as which part


def path_of(place: Place) -> str:
    """How an error calls what is there, outside of the model's class."""
    held, name = place
    label = str(name) if held is None else held.label(name)
    return f"model{label[4:]}" if label == "self" or label.startswith("self.") else label


@dataclass(slots=True)
class Walk:
    """Breadth first, so that paths are short; every object is opened once."""

    roots: tuple[Root, ...]
    look: Look
    numbers: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # so that no other object gets one of these ids

    def __iter__(self) -> Iterator[Reached]:
        for _, _, found in self.steps():
            yield from found or ()

    def steps(self) -> Iterator[tuple[Place, Any, tuple[Reached, ...] | None]]:
        """Every object that is not plain, where it is, and its aspects; None where met before."""
        waiting: deque[tuple[Any, Reached | None, Any]] = deque((v, None, n) for n, v in self.roots)
        while waiting:
            value, above, name = waiting.popleft()
            if id(value) in self.numbers:
                yield (above, name), value, None
                continue
            self.numbers[id(value)] = len(self.numbers)
            self.kept.append(value)
            found = tuple(Reached(a, above, name) for a in self.look.aspects(value))
            yield (above, name), value, found
            for held in found:
                waiting.extend(
                    (v, held, n) for n, v in held.aspect.parts if type(v) not in PLAIN_KINDS
                )


def walk(model: nn.Module, loss: object = None, limit: int | None = None) -> Walk:
    """All that a call of the model and of the loss function can reach.

    Of tensors and arrays of more than `limit` bytes the hash is told; of weights nothing.
    """
    hooks = [
        (f"torch {name}", list(value.values()))
        for name, value in vars(torch.nn.modules.module).items()
        if name in EVERYWHERE and value
    ]
    functions = [("torch.nn.functional", dict(foreign(vars(torch.nn.functional))))]
    roots = [root for root in (model, loss) if isinstance(root, nn.Module)]
    weights = frozenset(id(t) for root in roots for t in (*root.parameters(), *root.buffers()))
    look = Look(limit, weights)
    return Walk((("self", model), ("loss", loss), *hooks, *functions), look)


def key(model: nn.Module, loss: object = None) -> str:
    """A SHA-256, in hex, of `described_parts`: equal where nothing that is told there differs."""
    return key_of(described_parts(model, loss))


def key_of(parts: Iterable[tuple[Place, str]]) -> str:
    """A SHA-256, in hex, of what parts are; where they are may differ."""
    digest = sha256()
    for _, text in parts:
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def described_parts(model: nn.Module, loss: object = None) -> Iterator[tuple[Place, str]]:
    """(place, text) of all that a call of the model and of the loss function can reach.

    Attributes, closures, defaults, globals, settings, bytecode and class names count, and the
    values of tensors and arrays; of the model's parameters and buffers name, shape, dtype and
    `requires_grad`. Line numbers, paths of files, addresses and the order of sets do not. Equal
    in every process, with one version of Python, torch and transformers. Objects that tell
    nothing of themselves (locks, handles of libraries in C) count by their class alone, generators
    of random numbers without their state, loggers and threads by their class.
    """
    versions = [list(sys.version_info[:2]), torch.__version__, numpy.__version__]
    versions += [str(getattr(sys.modules.get("transformers"), "__version__", ""))]
    yield (None, "versions of Python, torch, numpy, transformers"), repr(versions)
    found = walk(model, loss)
    for where, value, aspects in found.steps():
        if aspects is None:
            yield where, f"again {found.numbers[id(value)]}"
            continue
        yield where, name_of(value)
        for held in aspects:
            yield from told(held, model.training, values=id(value) not in found.look.weights)


def told(held: Reached, training: bool, values: bool) -> Iterator[tuple[Place, str]]:
    """What an aspect holds that is not an object of its own, and with `values` its content."""
    aspect = held.aspect
    fixed = None if aspect.style in TRANSIENT else aspect.fixed
    if aspect.style == "weights":
        # A model that is not in training mode is put into it, with all that is in it.
        fixed = bool(fixed) or not training
    itself = held.above, held.name
    yield itself, f"{aspect.style} {fixed!r}"
    for name, value in aspect.parts:
        if name not in UNREAD:
            yield (held, name), f"{token(name)}={token(value)}"
    if values and aspect.content is not None:
        yield itself, f"values with SHA-256 {sha256(aspect.content).hexdigest()}"


def token(value: Any) -> str:
    """A plain value; the class of another one."""
    if is_a(value, CodeType):
        return code_text(value)
    if is_a(value, torch.device):
        return str(value.type)  # each rank has another one, and a plan places tensors itself
    if value is ABSENT:
        return "absent"
    return text_of(value) if is_plain(value) else f"<{class_name(type(value))}>"


def code_text(code: CodeType) -> str:
    """Bytecode with names and constants; neither lines nor files."""
    constants = [constant_text(c) for c in code.co_consts]
    return repr(
        (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
         code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount,
         code.co_exceptiontable, constants)
    )  # fmt: skip


def constant_text(value: Any) -> str:
    """A constant of bytecode; sets in an order of their own."""
    if is_a(value, tuple | frozenset):
        items = [constant_text(item) for item in value]
        return repr(items if is_a(value, tuple) else sorted(items))
    plain = is_plain(value) or is_a(value, CodeType)
    return token(value) if plain else repr(value)


def name_of(value: Any) -> str:
    """A class, function or module of a library by its name, everything else by its class."""
    if is_a(value, type):
        return f"class {class_name(value)}"
    if is_a(value, ModuleType):
        return f"module {value.__name__}" if is_library(value.__name__) else "module"
    if is_a(value, FunctionType):
        file = value.__globals__.get("__name__")
        where = f"{file}." if is_library(file) else ""
        return f"function {where}{value.__qualname__}"
    if is_a(value, NAMED):
        return f"operator {value}"
    return f"object {class_name(type(value))}"


def class_name(kind: type) -> str:
    """A class by name; a user's file is `__main__` in a script, so it does not count."""
    if is_library(kind.__module__):
        return f"{kind.__module__}.{kind.__qualname__}"
    return kind.__qualname__
