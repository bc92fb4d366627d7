"""Hugging Face models from their configuration: freshly initialised, with a batch made for them."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_module_registration_hook

from parloom.capture.batches import make_batch
from parloom.capture.config_faults import (
    blamed,
    check_values,
    position_of,
    read_values,
    reason_of,
)
from parloom.capture.outside_code import refuse_outside_code, without_outside_code
from parloom.errors import CaptureError, InputError, ParloomError

MOST_MODULES = 50_000  # Llama-3-405B is of 1,900, a mixture of 128 experts in 94 layers of 37,000


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise whatever the library raises as an `InputError` of one line that begins with `what`.

    Values that it does not check fail anywhere in it, in any way.
    """
    try:
        with quiet(library()):
            yield
    except ParloomError:
        raise
    except Exception as err:
        raise InputError(f"{what}: {reason_of(err)}") from err


def local_file(spec: str) -> Path | None:
    """The file that has the config; None for a Hub id."""
    path = Path(spec)
    if path.is_dir():
        return path / "config.json"
    return path if path.suffix == ".json" else None


def read_config(spec: str) -> Any:
    """The configuration in a file, in a folder, or of a Hub id (the local cache first).

    Raises: InputError; of a local file with the key that is to blame, where there is one.
    """
    path = local_file(spec)
    if path is None:
        return _read_cached(spec)
    if not path.exists():
        raise InputError(f"no file {path}")
    values, text = read_values(path)
    refuse_outside_code(values, str(path))
    check_values(values, path, text)
    families = library().CONFIG_MAPPING
    named = values.get("model_type")
    if named is not None and named not in families and "auto_map" not in values:
        near = get_close_matches(named, list(families), 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        place = position_of(text, ("model_type",))
        raise InputError(f"{path}{place}: transformers has no model_type {named!r}{hint}")
    try:
        with refusing(f"{path}: not a Hugging Face config"):
            return _without_code(library(), spec, cached_only=True)
    except InputError as err:
        raise blamed(path, values, text, _from_values, err) from err


def _read_cached(spec: str) -> Any:
    """The configuration of a Hub id."""
    last: Exception | None = None
    for cached_only in (True, False):
        try:
            with refusing("its config could not be read"):
                return _without_code(library(), spec, cached_only)
        except InputError as err:
            last = err
    raise InputError(
        f"no model {spec!r}: it is no file or folder here, and as a Hub id {_hub_words(spec, last)}"
    ) from last


def _hub_words(spec: str, error: BaseException | None) -> str:
    """Why a config of the Hub could not be read, and what to do."""
    kinds, cause = set(), error
    while cause is not None:
        kinds.add(type(cause).__name__)
        cause = cause.__cause__
    if "GatedRepoError" in kinds:
        return "it is gated: ask for access at its page on the Hub, then `hf auth login`"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        where = import_module("huggingface_hub.constants").HF_HUB_CACHE
        return (
            f"there is no network, and the config for {spec} is not in {where}: run once online, or"
            " name a local folder"
        )
    return str(error)


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


def _from_values(values: dict[str, Any]) -> Any:
    """The configuration with these settings, which name its family."""
    refuse_outside_code(values, "config")
    with quiet(library()):
        config = library().CONFIG_MAPPING[values["model_type"]].from_dict(values)
    without_outside_code(config)
    return config


def with_culprit(spec: str, err: ParloomError, batch: int | None, seq: int | None) -> ParloomError:
    """The error of a model that could not be built or captured, with the key of its config that is
    to blame; the error itself where there is none, or the model is from elsewhere.
    """
    path = local_file(spec)
    if path is None or not path.is_file():
        return err

    def attempt(values: dict[str, Any]) -> None:
        config = _from_values(values)
        with torch.device("meta"):
            model, tensors = build_from_config(config, batch, seq)
        if isinstance(err, CaptureError):
            _call(config, model, tensors, batch, seq)

    with torch.random.fork_rng(devices=[]):
        return blamed(path, *read_values(path), attempt, err)


def _call(config: Any, model: nn.Module, tensors: dict[str, Tensor], *sizes: int | None) -> None:
    """Call a model without data; where it looks at values, as a mask of ones, as a trace would."""
    with quiet(library()):
        try:
            model(**tensors)
        except RuntimeError as err:
            if "meta tensors" not in str(err):
                raise
            with FakeTensorMode():
                model, tensors = build_from_config(config, *sizes)
                model(**tensors)


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
    with refusing(f"a {type(config).__name__} with {dict(settings)}"):
        return type(config).from_dict(values)


def build_from_config(
    config: Any, batch: int | None, seq: int | None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The architecture that the config names (else a causal language model) and a random batch.

    Both come from torch's global generator. Generation caches are off.
    """
    label = type(config).__name__
    with refusing(f"cannot build {label}"):
        for name, value in settings_of_training(config).items():
            setattr(config, name, value)
        kind = architecture(config)
        label = label if kind is None else kind.__name__
    with refusing(f"cannot build {label} from its config"), few_modules():
        transformers = library()
        model: nn.Module = (
            transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
        )
    model.train()
    if empty := [name for name, p in model.named_parameters() if not p.numel()]:
        raise InputError(f"cannot build {label} from its config: {empty[0]} has no elements")
    ask_for_loss(model)
    with refusing(f"cannot make a batch for {label}"):
        return model, make_batch(model, config, batch, seq)


def settings_of_training(config: Any) -> dict[str, Any]:
    """Settings that a model is planned with, whatever its config says: no generation caches."""
    found: dict[str, Any] = {"use_cache": False}
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        found["decoder_start_token_id"] = getattr(config, "pad_token_id", None) or 0
    return found


def ask_for_loss(model: nn.Module) -> None:
    """Models that compare two kinds of input have no labels to ask for the loss with."""
    if "return_loss" in signature(model.forward).parameters:
        model.forward = partial(model.forward, return_loss=True)


@contextmanager
def set_for_training(model: nn.Module) -> Iterator[None]:
    """A script's model as `build_from_config` sets up its own, for a while.

    Parts of a model may have copies of its config; configs of other classes are not touched.
    """
    own, parts = getattr(model, "config", None), model.modules()
    if own is None or not isinstance(own, library().PreTrainedConfig):
        yield
        return
    configs = {id(c): c for c in (getattr(part, "config", None) for part in parts)}
    changed = [model, *(c for c in configs.values() if type(c) is type(own))]
    kept = [dict(vars(each)) for each in changed]
    settings = settings_of_training(own)
    try:
        for config in changed[1:]:
            for name, value in settings.items():
                setattr(config, name, value)
        ask_for_loss(model)
        yield
    finally:
        for each, values in zip(changed, kept, strict=True):
            vars(each).clear()
            vars(each).update(values)


def architecture(config: Any) -> Any:
    """The class that a config names; None where it names none."""
    transformers = library()
    names = getattr(config, "architectures", None) or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"architectures must be a list of class names, got {names!r:.80}")
    if not names:
        return None
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InputError(f"transformers {transformers.__version__} has no architecture {names[0]}")
    return kind


@contextmanager
def few_modules() -> Iterator[None]:
    """Raise `InputError` where a model becomes of more modules than anybody trains.

    A number of layers with a digit too many would be built for hours.
    """
    counted = count(1)

    def check(*_: object) -> None:
        if next(counted) > MOST_MODULES:
            raise InputError(f"more than {MOST_MODULES} modules; is a number of layers too large?")

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()
