"""Whether two calls of modules find the same: then one computes what the other one computes.

All that a call can reach from its module and its arguments is walked in one order. Two calls are
alike where every step of the two walks is: classes, plain values, functions, shapes of tensors, and
which objects are met again. So what one reaches is the other's under other names, and an object
that both reach must have the same place in both: a list of all layers, in reach of each of them,
tells them apart. What tells nothing of itself must be the same object.
"""

import inspect
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from parloom.capture import recorded
from parloom.capture.owners import is_a, is_library
from parloom.capture.state.aspects import NAMED, Look, is_plain
from parloom.capture.state.numbers import Number
from parloom.capture.state.reach import TRANSIENT, UNREAD, Reached, Walk
from parloom.capture.state.snapshot import LARGEST

# What tells calls apart by what no walk shows: addresses, the frames of callers, and lists to which
# calls append as they repeat. Code names it as a member of a module, or it is a global of another
# name.
TELLING = frozenset(
    {"id", "_getframe", "_current_frames", "currentframe", "getouterframes", "f_back",
     recorded.COLLECTOR}
)  # fmt: skip
TELLS = (id, sys._getframe, sys._current_frames, inspect.currentframe, inspect.stack)
MEMOS = ("nonzero", "item", "unique", "unique_consecutive", "nested_int")
OWN_OF_TENSORS = frozenset(
    {"_fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor", "_is_param",
     *(f"_{name}_memo{part}" for name in MEMOS for part in ("", "_vc", "_epoch"))}
)  # fmt: skip
Places = Mapping[int, frozenset[str]]  # names of attributes that are indices, by module


@dataclass(frozen=True, slots=True)
class Found:
    """What a call finds: its steps, and the tensors and the indices among them.

    Indices are no part of the steps: each is an attribute of a module, with its value. `counted`
    are numbers in closures that note what is read of them: their values are steps. `kept` keeps
    every object, so that none gets the id of another.
    """

    steps: tuple[object, ...]
    tensors: tuple[Tensor, ...]
    indices: tuple[tuple[nn.Module, str, int], ...]
    counted: tuple[Number, ...]
    kept: Walk

    @property
    def values(self) -> dict[int, int]:
        """The values of the indices, by their place among them."""
        return {number: value for number, (_, _, value) in enumerate(self.indices)}

    def is_unchanged(self, before: "Found") -> bool:
        """Whether a call left all as it was."""
        return (
            self.steps == before.steps
            and self.values == before.values
            and len(self.tensors) == len(before.tensors)
            and all(a is b for a, b in zip(self.tensors, before.tensors, strict=True))
        )


@dataclass(slots=True)
class Finder:
    """Describes what calls find; `places` are attributes that are indices of modules."""

    places: Places
    look: Look = field(default_factory=lambda: Look(LARGEST))

    def found(self, module: nn.Module, args: Any, kwargs: Any) -> Found:
        """What a call of a module with these arguments finds."""
        steps: list[object] = [*surroundings()]
        tensors: list[Tensor] = []
        indices: list[tuple[nn.Module, str, int]] = []
        counted: list[Number] = []
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            look = replace(self.look, files=set())
            walk = Walk((("self", module), ("args", args), ("kwargs", kwargs)), look)
            for _, value, aspects in walk.steps():
                if aspects is None:
                    steps.append(("again", walk.numbers[id(value)]))
                    continue
                steps.append(identity(value, aspects))
                if is_a(value, Tensor):
                    tensors.append(value)
                for held in aspects:
                    steps.append((held.aspect.style, exact(held.aspect.fixed), held.aspect.content))
                    steps += self.parts(held, indices, counted)
        return Found(tuple(steps), tuple(tensors), tuple(indices), tuple(counted), walk)

    def parts(
        self, held: Reached, indices: list[tuple[nn.Module, str, int]], numbers: list[Number]
    ) -> list[object]:
        """The parts of an aspect: plain values, classes of others, places of indices."""
        style = held.aspect.style
        of_module = style == "attributes" and is_a(held.owner, nn.Module)
        counted = self.places.get(id(vars(held.owner)), ()) if of_module else ()
        steps: list[object] = []
        for name, value in held.aspect.parts:
            if name in counted:
                plain = value.value if type(value) is Number else value
                indices.append((held.owner, name, plain))
                steps.append((name, "index"))
            elif style == "cell" and type(value) is Number:
                numbers.append(value)
                steps.append((exact(name), exact(value.value)))
            elif style == "hooks" and recorded.is_recorder(value):
                steps.append(("recorder", recorded.state()))  # its name counts all hooks
            elif name not in UNREAD:
                steps.append((exact(name), exact(value) if is_plain(value) else id(type(value))))
        # A library's hook may hand on what it sees to anybody, and what it reads is not walked.
        if style == "hooks" and not all(recorded.is_recorder(v) for _, v in held.aspect.parts):
            steps.append(object())
        return steps


def identity(value: Any, aspects: tuple[Reached, ...]) -> object:
    """What an object is, besides of what it holds; never equal where that cannot be told."""
    kind = id(type(value))
    if any(value is told for told in TELLS) or recorded.is_collector(value):
        return object()
    if is_a(value, Tensor):
        return tensor_identity(value)
    if is_a(value, FunctionType):
        code = value.__code__
        if not is_library(value.__globals__.get("__name__")):
            return object() if tells(code) else (kind, exact(code), id(value.__globals__))
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return kind, id(code), id(value.__globals__), *map(id, defaults)
    if is_a(value, type) and issubclass(value, nn.Module):
        return kind, id(value), ids(vars(value)), ids(vars(sys.modules[value.__module__]))
    transient = any(held.aspect.style in TRANSIENT for held in aspects)
    named = is_a(value, type | ModuleType) or is_a(value, NAMED)
    if transient or named or all(map(is_silent, aspects)):
        return kind, id(value)
    return kind


def ids(namespace: Mapping[str, Any]) -> tuple[int, ...]:
    """Which objects are in a namespace; libraries' are not walked."""
    return tuple(map(id, namespace.values()))


def is_silent(held: Reached) -> bool:
    """Whether an aspect tells no more of its object than its class, or the name of its code."""
    aspect = held.aspect
    named = all(name == "class" for name, _ in aspect.parts)
    return named and (aspect.style == "of" or (aspect.style == "opaque" and aspect.fixed is None))


def tells(code: CodeType) -> bool:
    """Whether code, or code in it, may tell calls apart by what no walk shows."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    names = set(code.co_names)
    return bool(TELLING & names) or {"inspect", "stack"} <= names or any(map(tells, inner))


def tensor_identity(tensor: Tensor) -> object:
    """Shape, strides and place of a tensor; users' attributes of it are not walked."""
    own = vars(tensor)
    if own.keys() - OWN_OF_TENSORS or tensor.layout is not torch.strided:
        return object()
    if own.get("constant") is not None:
        return "constant", id(tensor)  # a trace knows its value
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (
        "tensor", is_a(tensor, nn.Parameter), is_a(tensor, FakeTensor), tuple(map(str, sizes)),
        tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), whole,
    )  # fmt: skip


def exact(value: Any) -> object:
    """A plain value in a form that tells 1, 1.0, True, 0.0 and -0.0 apart."""
    kind = type(value)
    if kind is Number:
        return object()  # an index that is handed on, which a call may read
    if kind is CodeType:
        return kind, id(value)
    if kind in (tuple, list):
        return kind, tuple(map(exact, value))
    return kind, repr(value) if kind in (float, complex) else value


def surroundings() -> tuple[object, ...]:
    """What a call finds around it: gradients, autocast, modes, settings, states of generators."""
    functions: Any = _get_current_function_mode_stack
    modes = (*functions(), *_get_current_dispatch_mode_stack())
    words: Any = numpy.random.get_state(legacy=False)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        tuple(map(id, modes)), random.getstate(), str(words["state"]["pos"]),
        words["state"]["key"].tobytes(), ids(vars(torch)), ids(vars(F)), ids(vars(Tensor)),
    )  # fmt: skip
