"""Settings of a Hugging Face config that would load code, kernels or weights: refused or left out.

A config is data. transformers reads some of its settings as places to load from: attention kernels
of a hub (`org/repo:function`), Python files beside the config (`auto_map`), weights of a backbone.
None of these reaches transformers, in no part of a config.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from parloom.errors import InputError

# What transformers has in its own source and capture takes; other names load packages or kernels.
BUILT_IN: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attn_implementation": (None, "eager", "sdpa"),
        "experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
    }
)
# Left out: they say where code or quantized weights are, and models are built here with neither.
LEFT_OUT = frozenset({"auto_map", "trust_remote_code", "custom_pipelines", "quantization_config"})
# Refused where they are set: the model would be another one without them.
LOADS = frozenset({"use_pretrained_backbone", "use_kernels", "kernel_config"})
PLACES = ("hf-hub:", "hf_hub:", "local-dir:", "http://", "https://", "file://")
INFORMATIVE = frozenset({"_name_or_path", "name_or_path"})


def refuse_outside_code(settings: Mapping[str, Any], spec: str) -> None:
    """Raise `InputError` with the key where a setting, nested ones too, would load something."""
    for key, name, value in _settings(settings, ""):
        kind = name.strip("_").removesuffix("_internal")
        if kind in BUILT_IN:
            _check_built_in(kind, key, value, spec)
        elif kind in LOADS and value:
            raise InputError(
                f"{spec}: {key} is {value!r:.80}, which loads code or weights from elsewhere, and a"
                " config is data here: leave the key out"
            )
        elif isinstance(value, str) and value.startswith(PLACES) and name not in INFORMATIVE:
            raise InputError(
                f"{spec}: {key} is {value!r:.80}, a place to load from, and a config is data here:"
                " name an architecture of the installed packages"
            )


def _check_built_in(kind: str, key: str, value: Any, spec: str) -> None:
    """One name, or one for each part of the config."""
    known = BUILT_IN[kind]
    for part in value.values() if isinstance(value, Mapping) else (value,):
        if not any(part is name or part == name for name in known):
            names = ", ".join(str(name) for name in known if name)
            raise InputError(
                f"{spec}: {key} is {part!r:.80}; implementations that are loaded from packages or"
                f" from a hub are not: take one of {names}, or leave the key out"
            )


def without_outside_code(config: Any) -> tuple[str, ...]:
    """Take what is `LEFT_OUT` off a config and its parts; the keys that were there."""
    found: list[str] = []
    for name, value in list(vars(config).items()):
        if name in LEFT_OUT:
            if value:
                found.append(name)
            delattr(config, name)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found += (f"{name}.{inner}" for inner in without_outside_code(value))
    return tuple(found)


def _settings(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """(dotted key, own name, value) of every setting, those inside lists too."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list | tuple):
        items = ((index, item) for index, item in enumerate(value))
    for name, item in items:
        key = f"{path}.{name}" if path else str(name)
        yield key, str(name), item
        if str(name) not in LEFT_OUT:
            yield from _settings(item, key)
