"""What one object holds: its attributes, items, slots, closure, hooks, state.

An object of C whose state nothing tells (neither attributes nor slots nor a way to be copied) holds
nothing here: it is known by its class alone.
"""

import array
import gc
import io
import marshal
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from ctypes import Array, Structure, Union, addressof, c_char, sizeof, string_at
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from hashlib import sha256
from itertools import count
from mmap import mmap
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import PurePath
from random import Random, SystemRandom
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from warnings import catch_warnings, simplefilter
from weakref import ReferenceType

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from parloom.capture.owners import (
    Namespace,
    attributes_of,
    foreign,
    is_a,
    is_library,
    registry_of,
)
from parloom.capture.state.bytecode import ABSENT, UNREAD, Chain, names_in, resolved
from parloom.capture.state.numbers import Number

PLAIN = (
    bool, int, float, complex, str, bytes, range, type(None), type(...), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, CodeType,
)  # fmt: skip
PLAIN_KINDS = frozenset((*PLAIN, Number))
OWN = frozenset(vars(nn.Module()))  # parameters, hooks and the like
FLAT = frozenset({"_flat_weights", "_flat_weight_refs"})  # parameters once more
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Known by their classes: nothing in them says what a forward does, or they change all the time.
CLOSED = frozenset(
    {"logging", "threading", "_thread", "typing", "inspect", "abc", "importlib", "ctypes",
     "_ctypes", "concurrent", "multiprocessing", "subprocess", "socket", "asyncio",
     "_frozen_importlib", "_frozen_importlib_external", "unittest", "warnings", "zipimport"}
)  # fmt: skip
NAMED = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch.library.Library)
TRACED = (FakeTensor, FakeTensorMode, torch.SymInt, torch.SymFloat, torch.SymBool, torch.fx.Proxy)
NOT_OF_CLASSES = UNREAD | {
    "__dict__", "__weakref__", "__module__", "__qualname__", "__firstlineno__",
    "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__match_args__",
    "__dataclass_fields__", "__dataclass_params__", "__slots__",
}  # fmt: skip
ITEMS = ("list", "deque", "tuple", "dict", "set", "frozen")
FLAT_KINDS = frozenset({str, int, float, bool, bytes, complex, type(None)})
DATA_OF_C: Any = (Array, Structure, Union, c_char.__mro__[1])
HEAP_TYPE = 1 << 9  # flag of classes made in Python
LONGEST = 1000  # items of an iterator's list that are looked at
DEEPEST = 8  # of what iterators are made of

Parts = tuple[tuple[Any, Any], ...]  # (name or index, value)


@dataclass(frozen=True, slots=True)
class OfKey:
    """The name of a part of a dict that is a key."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Aspect:
    """What `owner` holds in one way.

    `fixed` is what of it is no object (the position of an iterator), as plain nested tuples;
    `content` are the bytes of a tensor or an array.
    """

    owner: Any
    style: str
    parts: Parts = ()
    fixed: object = None
    content: bytes | None = None


@dataclass(slots=True)
class Look:
    """Looks into objects; of tensors and arrays of more than `limit` bytes the hash is told.

    Weights are as large as a model: those of more bytes stay closed.
    """

    limit: int | None = None
    weights: frozenset[int] = frozenset()
    chains: dict[CodeType, tuple[Chain, ...]] = field(default_factory=dict)
    slots: dict[type, tuple[tuple[str, Any], ...]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)  # of libraries, searched for what is foreign
    known: dict[int, tuple[list[Any], tuple[int, ...], Namespace]] = field(default_factory=dict)

    def aspects(self, value: Any) -> Iterator[Aspect]:
        """What a value that is not plain holds."""
        if is_a(value, type):
            yield from self.of_class(value)
            return
        kind = type(value)
        if is_a(value, ModuleType):
            if not is_library(value.__name__):
                named = {n: v for n, v in vars(value).items() if n not in UNREAD}
                yield Aspect(vars(value), "global", by_name(named))
            return
        if is_a(value, NAMED + TRACED):
            return
        if top_of(kind) in CLOSED:
            yield from of_memory(value)
            return
        if is_a(value, nn.Module):
            yield from of_module(value)
        elif (own := attributes_of(value)) is not None:
            yield Aspect(value, "attributes", by_name(own))
        slots = () if is_a(value, PurePath) else self.slots_of(kind)
        if slots:
            yield Aspect(value, "slots", tuple((n, slot(d, value)) for n, d in slots))
        yield from self.special(value)
        if kind.__module__ != "builtins":
            yield Aspect(value, "of", (("class", kind),))

    def special(self, value: Any) -> Iterator[Aspect]:
        """What objects hold in ways that their kind alone has."""
        if is_a(value, FunctionType):
            yield from self.of_function(value)
        elif is_a(value, Tensor):
            content = tensor_bytes(value)
            fixed: Any = (tuple(map(str, value.shape)), str(value.dtype), value.requires_grad)
            if content is not None and self.limit is not None and content.nbytes > self.limit:
                closed = id(value) in self.weights or isinstance(value, nn.Parameter)
                fixed = fixed if closed else (*fixed, sha256(content).digest())
                content = None
            yield Aspect(value, "tensor", (), fixed, None if content is None else bytes(content))
        elif is_a(value, numpy.ndarray):
            yield of_array(value, self.limit)
        elif is_a(value, DATA_OF_C):
            yield from of_c(value)
        elif not is_a(value, nn.Module):
            found = of_container(value) or of_callable(value) or of_source(value)
            if found is not None:
                yield found
            elif not self.slots_of(type(value)) and attributes_of(value) is None:
                yield reduced(value)

    def of_function(self, function: FunctionType) -> Iterator[Aspect]:
        """Closure, defaults, code, and globals of a function; the last two of users' alone."""
        names = function.__code__.co_freevars
        cells = function.__closure__ or ()
        if cells:
            yield Aspect(function, "closure", tuple(zip(names, cells, strict=True)))
        if is_library(function.__globals__.get("__name__")):
            return
        yield Aspect(
            function,
            "function",
            (
                ("__code__", function.__code__),
                ("__defaults__", function.__defaults__),
                ("__kwdefaults__", function.__kwdefaults__),
            ),
        )
        code = function.__code__
        if code not in self.chains:
            self.chains[code] = names_in(code)
        by_file: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for chain in self.chains[code]:
            for namespace, name in resolved(chain, function.__globals__):
                named = by_file.setdefault(id(namespace), (namespace, {}))[1]
                named[name] = namespace.get(name, ABSENT)
        for namespace, named in by_file.values():
            yield Aspect(namespace, "global", by_name(named))

    def of_class(self, kind: type) -> Iterator[Aspect]:
        """Attributes and bases of a user's class; what others put into a library's."""
        if is_library(kind.__module__):
            put = self.foreign_in(vars(kind))
            if issubclass(kind, nn.Module) and kind.__module__ not in self.files:
                self.files.add(kind.__module__)
                file = sys.modules.get(kind.__module__)
                others = self.foreign_in(vars(file) if file else {})
                put = put | {f"file {n}": v for n, v in others.items()}
            if put:
                yield Aspect(kind, "of", tuple(put.items()))
        else:
            named = {n: v for n, v in vars(kind).items() if n not in NOT_OF_CLASSES}
            yield Aspect(kind, "class", by_name(named))
        bases = tuple((f"base {i}", base) for i, base in enumerate(kind.__bases__))
        if type(kind) is not type and not is_library(type(kind).__module__):
            bases = (*bases, ("metaclass", type(kind)))
        yield Aspect(kind, "of", tuple(item for item in bases if item[1] is not object))

    def foreign_in(self, namespace: Mapping[str, Any]) -> Namespace:
        """What others put into a namespace of a library; looked for again where it has changed."""
        registries, before, found = self.known.get(id(namespace), ([], (), {}))
        if before != tuple(id(v) for named in (namespace, *registries) for v in named.values()):
            registries = [r for v in namespace.values() if (r := registry_of(v)) is not None]
            found = dict(foreign(dict(namespace)))
            now = tuple(id(v) for named in (namespace, *registries) for v in named.values())
            self.known[id(namespace)] = registries, now, found
        return found

    def slots_of(self, kind: type) -> tuple[tuple[str, Any], ...]:
        """The `__slots__` of a class and of those it inherits from."""
        if kind not in self.slots:
            self.slots[kind] = tuple(
                (name, member)
                for base in kind.__mro__
                if base.__flags__ & HEAP_TYPE
                for name, member in vars(base).items()
                # Types of C have members of their own, which nobody can set.
                if isinstance(member, MemberDescriptorType) and not is_special(name)
            )
        return self.slots[kind]


def is_special(name: str) -> bool:
    """Whether a name is Python's own."""
    return name.startswith("__") and name.endswith("__")


def is_plain(value: object) -> bool:
    """Whether a value is immutable and holds no other object."""
    return type(value) in PLAIN_KINDS


def text_of(value: object) -> str:
    """The text of a plain value; Python refuses to write large integers in decimal."""
    large = type(value) is int and value.bit_length() > 64
    return hex(value) if large and isinstance(value, int) else repr(value)


def by_name(named: Mapping[str, Any]) -> Parts:
    """Attributes in an order that does not depend on what set them."""
    return tuple(sorted(named.items(), key=lambda item: str(item[0])))


def top_of(kind: type) -> str:
    """The package that a class is from, where that is the standard library's."""
    name = kind.__module__
    return name.partition(".")[0] if isinstance(name, str) and is_library(name) else ""


def slot(member: Any, value: Any) -> Any:
    """What is in a slot."""
    try:
        return member.__get__(value, type(value))
    except AttributeError:
        return ABSENT


def own_names(value: object) -> frozenset[str]:
    """The attributes that torch's own modules keep of themselves."""
    if is_a(value, nn.RNNBase):
        return OWN | FLAT
    return OWN if is_a(value, nn.Module) else frozenset()


def of_module(module: nn.Module) -> Iterator[Aspect]:
    """Attributes, submodules, weights and hooks."""
    own = {n: v for n, v in vars(module).items() if n not in own_names(module)}
    yield Aspect(module, "attributes", by_name(own))
    yield Aspect(module._modules, "modules", tuple(module._modules.items()))
    weights = (*module._parameters.items(), *module._buffers.items())
    yield Aspect(module, "weights", weights, module.training)
    for name in HOOKS:
        hooks = getattr(module, name)
        yield Aspect(hooks, "hooks", tuple(hooks.items()))


def of_memory(value: Any) -> Iterator[Aspect]:
    """Values that threads and processes share or have each for themselves, and those of C."""
    if is_a(value, threading.local):
        yield Aspect(value, "attributes", by_name(vars(value)))
    elif is_a(value, SynchronizedBase):
        yield Aspect(value, "of", (("value", value.get_obj()),))
    else:
        yield from of_c(value)


def of_c(value: Any) -> Iterator[Aspect]:
    """The bytes of an object of C; what they point to is not known."""
    if is_a(value, DATA_OF_C):
        yield Aspect(value, "bytes", (), None, string_at(addressof(value), sizeof(value)))


def of_array(array: Any, limit: int | None) -> Aspect:
    """Shape, dtype and values."""
    fixed = (array.shape, str(array.dtype))
    if array.dtype.hasobject:
        return Aspect(array, "list", tuple(enumerate(array.ravel().tolist())), fixed)
    if limit is None or array.nbytes <= limit:
        return Aspect(array, "array", (), fixed, array.tobytes())
    whole: Any = numpy.ascontiguousarray(array).view(numpy.uint8).reshape(-1)
    return Aspect(array, "array", (), (*fixed, sha256(whole).digest()))


def of_container(value: Any) -> Aspect | None:
    """Items of a container; of a subclass, without what its own methods do."""
    if is_a(value, list | tuple | dict):
        kind: Any = next(k for k in (list, tuple, dict) if is_a(value, k))
        if kind.__len__(value) > LONGEST:
            long = items_of(value) if kind is dict else [*kind.__iter__(value)]
            if all(map(is_flat, long)):
                # Version 2 writes every string in full, however often it comes.
                return Aspect(value, kind.__name__, (), len(long), marshal.dumps(long, 2))
    if is_a(value, dict | MappingProxyType):
        items = items_of(value)
        objects = tuple((OfKey(i), k) for i, (k, _) in enumerate(items) if not is_plain(k))
        style = "dict" if is_a(value, dict) else "frozen"
        return Aspect(value, style, (*items, *objects))
    for kind in (list, tuple, deque):
        if is_a(value, kind):
            fixed = deque.maxlen.__get__(value) if kind is deque else None
            return Aspect(value, kind.__name__, tuple(enumerate(kind.__iter__(value))), fixed)
    if is_a(value, set | frozenset):
        style = "set" if is_a(value, set) else "frozen"
        return Aspect(value, style, tuple(enumerate(sorted(value, key=shallow))))
    if is_a(value, bytearray | array.array | mmap):
        return Aspect(value, "bytes", (), None, bytes(memoryview(value).cast("B")))
    if is_a(value, memoryview):
        return Aspect(value, "bytes", (), None, value.tobytes())
    return None


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dict, of a subclass of it, or of a view of one."""
    # An ordered dict has an order of its own, which `dict.items` does not know.
    kind: Any = next((k for k in (OrderedDict, dict) if is_a(value, k)), type(value))
    return [*kind.items(value)]


def is_flat(item: object) -> bool:
    """Whether an item is plain and can be written as bytes, or a tuple of such."""
    kind = type(item)
    return kind in FLAT_KINDS or (kind is tuple and all(type(i) in FLAT_KINDS for i in item))  # type: ignore[attr-defined]


def of_callable(value: Any) -> Aspect | None:
    """What a callable object calls and is bound to, and what a descriptor wraps."""
    if is_a(value, CellType):
        try:
            return Aspect(value, "cell", (("cell_contents", value.cell_contents),))
        except ValueError:
            return Aspect(value, "cell", (("cell_contents", ABSENT),))
    if is_a(value, MethodType):
        return Aspect(value, "of", (("__func__", value.__func__), ("__self__", value.__self__)))
    if is_a(value, BuiltinFunctionType | MethodWrapperType):
        bound = value.__self__
        unbound = is_a(bound, ModuleType | type | None)
        return Aspect(value, "of", () if unbound else (("__self__", bound),), value.__qualname__)
    if is_a(value, partial):
        return Aspect(
            value, "of", (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        )
    if is_a(value, property):
        return Aspect(value, "of", (("fget", value.fget), ("fset", value.fset)))
    if is_a(value, staticmethod | classmethod):
        return Aspect(value, "of", (("__func__", value.__func__),))
    if is_a(value, _lru_cache_wrapper):
        # What is found in it again is not counted: nothing is kept then.
        entries = value.cache_info()[1:]
        return Aspect(value, "cache", (("__wrapped__", value.__wrapped__),), entries)
    return None


def of_source(value: Any) -> Aspect | None:
    """The state of generators and files, and what references refer to."""
    if is_a(value, SystemRandom):
        return Aspect(value, "opaque")
    if is_a(value, Random):
        return Aspect(value, "draws", (), value.getstate())
    if is_a(value, numpy.random.Generator):
        return Aspect(value, "draws", (), repr(value.bit_generator.state))
    if is_a(value, numpy.random.RandomState):
        return Aspect(value, "draws", (), repr(value.get_state(legacy=False)))
    if is_a(value, numpy.random.BitGenerator):
        return Aspect(value, "draws", (), repr(value.state))
    if is_a(value, torch.Generator):
        return Aspect(value, "opaque")
    if is_a(value, GeneratorType):
        position = None if value.gi_frame is None else value.gi_frame.f_lasti
        return Aspect(value, "iterator", referents(value), position)
    if is_a(value, ReferenceType):
        return Aspect(value, "of", (("target", value()),))
    if is_a(value, ContextVar):
        return Aspect(value, "variable", (("value", value.get(ABSENT)),))
    if is_a(value, numpy.generic | numpy.dtype | PurePath):
        return Aspect(value, "opaque", (), repr(value))
    return of_file(value) if is_a(value, io.IOBase) else None


def of_file(file: io.IOBase) -> Aspect:
    """Where in a file the next read begins, and what is written in one that is in memory."""
    position = position_in(file)
    if isinstance(file, io.StringIO | io.BytesIO) and position is not None:
        return Aspect(file, "file", (("written", file.getvalue()),), position)
    return Aspect(file, "file", (), position)


def referents(value: Any) -> Parts:
    """The variables of a generator, and iterators of its loops, which no variable names."""
    found = (v for v in gc.get_referents(value) if not is_a(v, FrameType))
    return tuple((f"variable {i}", v) for i, v in enumerate(found))


def position_in(file: io.IOBase) -> int | None:
    """Where in a file the next read begins."""
    try:
        return file.tell()
    except (OSError, ValueError):
        return None


def is_reducible(value: Any) -> bool:
    """Whether an object is of C and may say how it is copied; users' `__reduce__` is not run."""
    kind = type(value)
    return not kind.__flags__ & HEAP_TYPE or is_library(kind.__module__)


def reduced(value: Any) -> Aspect:
    """What an object of C says of itself when it is copied."""
    objects: list[Any] = []
    numbers = count()

    def flat(item: Any, depth: int = 0) -> object:
        if is_plain(item):
            return item
        if depth < DEEPEST and type(item) in (tuple, list, dict) and len(item) <= LONGEST:
            items = item.items() if isinstance(item, dict) else item
            return tuple(flat(i, depth + 1) for i in items)
        if depth < DEEPEST and hasattr(type(item), "__next__") and is_reducible(item):
            return flat(reduction(item), depth + 1)
        objects.append(item)
        return next(numbers)

    fixed = flat(reduction(value)) if is_reducible(value) else None
    style = "iterator" if hasattr(type(value), "__next__") else "opaque"
    return Aspect(value, style, tuple((f"part {i}", o) for i, o in enumerate(objects)), fixed)


def reduction(value: Any) -> Any:
    """How an object is copied; None where it cannot be."""
    try:
        with catch_warnings():
            simplefilter("ignore")
            return value.__reduce_ex__(2)
    except Exception:  # any object of C may say no in its own way
        return None


def shallow(value: Any) -> tuple[str, str]:
    """An order of the elements of a set that no address decides, as far as there is one."""
    kind = type(value)
    name = value if is_plain(value) else getattr(value, "__qualname__", "")
    return kind.__qualname__, text_of(name)


def tensor_bytes(tensor: Tensor) -> memoryview | None:
    """The values of a tensor; None where it has none."""
    if is_a(tensor, FakeTensor) or tensor.is_meta:
        return None
    try:
        plain: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return memoryview(plain)
    except (RuntimeError, TypeError):  # a layout of its own
        return None
