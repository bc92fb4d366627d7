"""Benchmark models as plain `nn.Module`s, with a batch for each.

A zoo model imports torch only, takes the batch's keys as keyword arguments and returns the loss
first. A module of this package is one model: it defines `build(*, batch, seq, **sizes)`, whose
keyword defaults are the documented sizes; `scale` multiplies the widths.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from types import MappingProxyType

from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]

# Name -> module of this package. Modules are imported when asked for, so a long zoo stays cheap.
_MODULES = MappingProxyType(
    {
        "cnn": "cnn",
        "dlrm": "dlrm",
        "gpt": "gpt",
        "llama": "llama",
        "mlp": "mlp",
    }
)


def names() -> tuple[str, ...]:
    """The models there are, sorted."""
    return tuple(sorted(_MODULES))


def sizes(name: str) -> dict[str, object]:
    """The keywords that `build(name, ...)` takes besides batch and seq, with their defaults.

    Raises:
        KeyError: no such model.
    """
    parameters = signature(_builder(name)).parameters
    return {k: p.default for k, p in parameters.items() if k not in ("batch", "seq")}


def build(
    name: str, *, batch: int | None = None, seq: int | None = None, **overrides: float
) -> Built:
    """The model, initialised from torch's global generator, and a batch that never changes.

    Sizes left out take the model's defaults; `seq` is ignored by models without a sequence.

    Raises:
        KeyError: no such model.
        ValueError: a keyword that the model does not have, or sizes that do not fit each other.
    """
    known = sizes(name)
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"zoo:{name} has no size {unknown[0]!r}; it has {', '.join(known)}")
    given = {k: v for k, v in (("batch", batch), ("seq", seq)) if v is not None}
    return _builder(name)(**given, **overrides)


def _builder(name: str) -> Callable[..., Built]:
    builder: Callable[..., Built] = import_module(f"parloom.zoo.{_MODULES[name]}").build
    return builder
