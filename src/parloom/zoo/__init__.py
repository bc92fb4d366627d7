"""Benchmark models as plain `nn.Module`s, with a batch for each.

A zoo model imports torch only, takes the batch's keys as keyword arguments and returns the loss
first. Its module defines `build(*, batch, seq, **sizes)`, whose keyword defaults are the documented
sizes; `scale` multiplies the widths. Models named after a publication have its sizes by default.
Where the model of the published FlexFlow and Unity artifacts differs from the one that it is named
after, NAME_artifact is the artifact's. A diffusion model's network without noise and loss, which
inference calls once a step, is NAME_denoiser.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]

# Name -> (module of this package, function). Modules are imported when asked for, so a long zoo
# stays cheap.
_BUILDERS = MappingProxyType(
    {
        "alexnet": ("alexnet", "build"),
        "alexnet_artifact": ("alexnet", "build_artifact"),
        "bert_large": ("bert", "build"),
        "bert_large_artifact": ("bert", "build_artifact"),
        "candle_uno": ("candle_uno", "build"),
        "candle_uno_artifact": ("candle_uno", "build_artifact"),
        "cnn": ("cnn", "build"),
        "dit_xl": ("dit", "build"),
        "dlrm": ("dlrm", "build"),
        "dlrm_artifact": ("dlrm", "build_artifact"),
        "dlrm_criteo": ("dlrm", "build_criteo"),
        "gnmt": ("gnmt", "build"),
        "gpt": ("gpt", "build"),
        "gpt2": ("gpt2", "build"),
        "gshard": ("gshard", "build"),
        "inception_v3": ("inception", "build"),
        "inception_v3_artifact": ("inception", "build_artifact"),
        "llama": ("llama", "build"),
        "mlp": ("mlp", "build"),
        "mlp_unify": ("mlp_unify", "build"),
        "mmt": ("mmt", "build"),
        "resnext50": ("resnet", "build_resnext50"),
        "resnext50_artifact": ("resnet", "build_resnext50_artifact"),
        "unet": ("unet", "build"),
        "wan_1_3b": ("wan", "build"),
        "wan_14b": ("wan", "build_14b"),
        "wide_resnet": ("resnet", "build_wide_resnet"),
        "xdl": ("xdl", "build"),
    }
)
_DENOISERS = MappingProxyType(
    {
        "dit_xl_denoiser": ("dit", "build_denoiser"),
        "wan_1_3b_denoiser": ("wan", "build_denoiser"),
        "wan_14b_denoiser": ("wan", "build_14b_denoiser"),
    }
)


def names() -> tuple[str, ...]:
    """The models that can be trained, sorted."""
    return tuple(sorted(_BUILDERS))


def denoisers() -> tuple[str, ...]:
    """The models that have no loss, which are for inference, sorted."""
    return tuple(sorted(_DENOISERS))


def sizes(name: str) -> dict[str, object]:
    """The keywords that `build(name, ...)` takes besides batch and seq, with their defaults.

    Raises:
        KeyError: no such model.
    """
    parameters = signature(_builder(name)).parameters
    return {k: p.default for k, p in parameters.items() if k not in ("batch", "seq")}


def has_sequence(name: str) -> bool:
    """Whether the batch of a model has a sequence, whose length `seq` is.

    Raises:
        KeyError: no such model.
    """
    return signature(_builder(name)).parameters["seq"].default is not None


def build(
    name: str,
    *,
    artifact: bool = False,
    batch: int | None = None,
    seq: int | None = None,
    **overrides: Any,
) -> Built:
    """The model, initialised from torch's global generator, and a batch that never changes.

    Sizes left out take the model's defaults; `seq` is ignored by models without a sequence.
    `artifact` is short for the name NAME_artifact.

    Raises:
        KeyError: no such model, or none that differs in the artifact.
        ValueError: a keyword that the model does not have, or sizes that do not fit each other.
    """
    if artifact:
        name = f"{name}_artifact"
    known = sizes(name)
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"zoo:{name} has no size {unknown[0]!r}; it has {', '.join(known)}")
    given = {k: v for k, v in (("batch", batch), ("seq", seq)) if v is not None}
    return _builder(name)(**given, **overrides)


def _builder(name: str) -> Callable[..., Built]:
    module, function = _BUILDERS.get(name) or _DENOISERS[name]
    builder: Callable[..., Built] = getattr(import_module(f"parloom.zoo.{module}"), function)
    return builder
