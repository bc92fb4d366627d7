"""Hugging Face models from their configuration: freshly initialised, with a batch made for them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from parloom.capture.batches import make_batch
from parloom.capture.outside_code import refuse_outside_code, without_outside_code
from parloom.errors import InputError


def library() -> ModuleType:
    """The transformers package.

    Raises: InputError saying how to install it.
    """
    try:
        transformers = import_module("transformers")  # optional, and slow to import
    except ImportError as err:
        raise InputError(
            f"Hugging Face models need the transformers package ({err}): pip install 'parloom[hf]'"
        ) from err
    return transformers


@contextmanager
def quiet(transformers: ModuleType) -> Iterator[None]:
    """Without transformers' remarks on the config, which are about weights nobody loads."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def read_config(spec: str) -> Any:
    """The configuration in a file, in a folder, or of a Hub id (the local cache first)."""
    path = Path(spec)
    local = path.suffix == ".json" or path.is_dir()
    if local and not (path / "config.json" if path.is_dir() else path).is_file():
        raise InputError(f"no file {path / 'config.json' if path.is_dir() else path}")
    transformers = library()
    last: Exception | None = None
    for cached_only in (True,) if local else (True, False):
        try:
            with quiet(transformers):
                return _without_code(transformers, spec, cached_only)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as err:
            last = err
    reason = str(last).strip().splitlines()[0] if str(last).strip() else type(last).__name__
    if local:
        raise InputError(f"{spec}: not a Hugging Face config: {reason}") from last
    raise InputError(
        f"no model {spec!r}: it is no file or folder here, and as a Hub id its config could not be"
        f" read: {reason}"
    ) from last


def _without_code(transformers: ModuleType, spec: str, cached_only: bool) -> Any:
    """The configuration, read as data: nothing that it names is loaded or run."""
    raw, _ = transformers.PreTrainedConfig.get_config_dict(spec, local_files_only=cached_only)
    refuse_outside_code(raw, spec)
    config = transformers.AutoConfig.from_pretrained(
        spec, local_files_only=cached_only, trust_remote_code=False
    )
    if left_out := without_outside_code(config):
        config.parloom_left_out = sorted(left_out)
    return config


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of a config by name; those of its parts (`text_config`) are nested."""
    found: dict[str, Any] = config.to_dict()
    return found


def with_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """The config with some settings replaced (of nested ones only those given)."""
    values = config.to_dict()
    for name, value in settings.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            value = {**values[name], **value}
        values[name] = value
    try:
        with quiet(library()):
            return type(config).from_dict(values)
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise InputError(f"a {type(config).__name__} with {dict(settings)}: {err}") from err


def build_from_config(
    config: Any, batch: int | None, seq: int | None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The architecture that the config names (else a causal language model) and a random batch.

    Both come from torch's global generator. Generation caches are off.
    """
    transformers = library()
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    names = list(getattr(config, "architectures", None) or [])
    kind = getattr(transformers, names[0], None) if names else None
    if names and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InputError(f"transformers {transformers.__version__} has no architecture {names[0]}")
    try:
        with quiet(transformers):
            if kind is None:
                model = transformers.AutoModelForCausalLM.from_config(config)
            else:
                model = kind(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as err:
        label = names[0] if names else type(config).__name__
        raise InputError(f"cannot build {label} from its config: {err}") from err
    model.train()
    if "return_loss" in signature(model.forward).parameters:
        # Models that compare two kinds of input have no labels to ask for the loss with.
        model.forward = partial(model.forward, return_loss=True)
    return model, make_batch(model, config, batch, seq)
