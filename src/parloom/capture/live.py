"""Models that the caller holds: planned as they are, under a name by which this process, and forks
of it, build them again.
"""

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn

from parloom.capture.program import Loss
from parloom.errors import InputError
from parloom.ir.plan import LIVE

SCRIPT = "__main__"


@dataclass(frozen=True, slots=True)
class Held:
    """A model that lives as long as its owner keeps it, and the batch it is called with."""

    model: ReferenceType[nn.Module]
    batch: Mapping[str, Tensor]
    loss: Loss | None
    optimizer: Any


_HELD: dict[str, Held] = {}


def hold(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Loss | None, optimizer: object
) -> str:
    """The name under which `model` is built again: the last one of its class that was held."""
    spec = f"{LIVE}{type(model).__qualname__}"
    _HELD[spec] = Held(ref(model), batch, loss, optimizer)
    return spec


def held(spec: str) -> tuple[nn.Module, Mapping[str, Tensor], Loss | None, Any]:
    """A copy of the model of that name, without gradients, and what belongs to it.

    Raises `InputError` where this process holds no such model, or it cannot be copied.
    """
    found = _HELD.get(spec)
    model = None if found is None else found.model()
    if found is None or model is None:
        raise InputError(
            f"the plan was made of a {spec.removeprefix(LIVE)} that lived in another process, or is"
            " gone: hold such a model (parloom.plan), or plan from what builds it on every rank:"
            " file.py:factory"
        )
    try:
        copy = deepcopy(model)
    except Exception as error:  # whatever an object of the user's does when it is copied
        name = type(model).__name__
        raise InputError(
            f"{name} cannot be copied ({type(error).__name__}: {error}): plan from a function that"
            " returns (model, batch), as file.py:factory"
        ) from error
    copy.zero_grad(set_to_none=True)
    return copy, found.batch, found.loss, found.optimizer


def spec_of(
    model: object,
    batch: int | Mapping[str, Tensor] | None,
    loss: Loss | None,
    optimizer: object,
) -> tuple[str, int | None]:
    """Text that says how a model is built (`load_model`), and the size of its batch where that is
    a number: of text, of a function that returns (model, batch), or of a module and its batch.

    Raises `InputError` for anything else.
    """
    if isinstance(model, nn.Module):
        if not isinstance(batch, Mapping):
            # A tensor would be all of its numbers.
            got = repr(batch) if isinstance(batch, int | str | None) else type(batch).__name__
            raise InputError(
                f"batch: {type(model).__name__} is called with a dict of tensors, its keyword"
                f" arguments; got {got}"
            )
        return hold(model, batch, loss, optimizer), None
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"the model is the class {model.__name__}: give one that is built")
    if loss is not None or isinstance(batch, Mapping):
        raise InputError("loss and a batch of tensors go with a module: a function returns its own")
    if isinstance(model, str):
        return model, batch
    if not callable(model):
        raise InputError(
            f"the model is a {type(model).__name__}: give a module with its batch, a function that"
            " returns (model, batch), or text: zoo:NAME, a Hugging Face config.json, folder or Hub"
            " id, 'file.py:factory', 'pkg.module:factory'"
        )
    spec = _importable(model)
    if spec is None:
        raise InputError(
            "the model is a function that other processes cannot import: call it, and give what it"
            " returns (parloom.plan(model, batch, ...)), or put it into a file"
        )
    return spec, batch


def _importable(factory: Any) -> str | None:
    """`pkg.module:factory` of a function that other processes can import; None for others."""
    name, module = getattr(factory, "__name__", ""), getattr(factory, "__module__", SCRIPT)
    there = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if module != SCRIPT and there is factory else None
