"""MODEL, as a user names it, to a model and a batch.

`zoo:NAME`, a Hugging Face `config.json` or its folder, `pkg.module:factory`, `file.py:factory`, or
a Hub id (its config only). Weights are freshly initialised from the seed; on the meta device they
take no memory.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from parloom import zoo
from parloom.capture.asked import nothing_asked
from parloom.capture.batches import check_elements
from parloom.capture.check import check_initialised
from parloom.capture.hugging_face import (
    build_from_config,
    read_config,
    settings_of,
    with_culprit,
    with_settings,
)
from parloom.capture.live import held
from parloom.capture.program import Loss
from parloom.errors import InputError, NotYetError, ParloomError
from parloom.ir.plan import DTYPES, LIVE

MAX_WEIGHTS = 1 << 30  # of a model that is built with weights in order to be captured
Settings = Mapping[str, Any]
# Models of the zoo that go by the name that everybody knows, too: they need no network and no
# package but torch.
BUNDLED = ("gpt2",)
FORMS = (
    "zoo:NAME, a Hugging Face config.json or its folder, pkg.module:factory, file.py:factory,"
    " or a Hub id"
)


def full_name(spec: str) -> str:
    """`zoo:NAME` for the short name of a bundled model, where no file or folder is called so."""
    return f"zoo:{spec}" if spec in BUNDLED and not Path(spec).exists() else spec


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, the keyword arguments it is called with, and what a factory said about training.

    `loss` is called with the model's output and the batch; `optimizer` is whatever the factory
    returned for it: a class, a partial, a function of named parameters, or an instance.
    """

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Loss | None = None
    optimizer: Any = None


def load_model(
    spec: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    sizes: Settings | None = None,
) -> Loaded:
    """The model that `spec` names, with freshly initialised weights.

    `batch` and `seq` apply to batches that are built here, and are refused where they do not.
    `dtype` (`fp32` or `float32`) is what model and batch are cast to; None leaves them. `device` is
    `cpu` or `meta`. `sizes` replaces some of the model's `sizes_of`. Equal arguments give equal
    weights and batches.

    Raises: InputError naming the nearest valid choice; NotYetError for saved programs.
    """
    target = None if dtype is None else torch_dtype(dtype)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        loaded = build(spec, batch, seq, sizes or {})
    if target is not None:
        cast_model(loaded.model, target)
        loaded = replace(loaded, batch=cast_batch(loaded.batch, target))
    return loaded


def load_abstract(
    spec: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
    limit: int | None = MAX_WEIGHTS,
) -> Loaded:
    """The model as `load_model` builds it, without weights where it has more than `limit`.

    None is no limit. What is captured and the fingerprint are the same. Factories are called as
    they are.
    """
    if limit is not None and sizes_of(spec) is not None:
        try:
            found = load_model(spec, batch=batch, seq=seq, dtype=dtype, device="meta", seed=seed)
        except InputError as err:
            if not needs_weights(err):
                raise
            found = None
        if found is not None:
            check_elements(found.batch)
            if sum(p.numel() for p in found.model.parameters()) > limit:
                return found
            # Freed first: the modules of a model refer to each other.
            del found
    return load_model(spec, batch=batch, seq=seq, dtype=dtype, seed=seed)


def needs_weights(err: BaseException) -> bool:
    """Whether a model could not be built because its weights are on the meta device."""
    return "meta" in f"{err} {err.__cause__}"


def sizes_of(spec: str) -> dict[str, Any] | None:
    """What `load_model` can be told to build in other sizes; None for a user's factory."""
    spec = full_name(spec)
    path = Path(spec)
    if not spec:
        raise InputError(f"no model named; a model is {FORMS}")
    if spec.startswith("zoo:"):
        name = spec.removeprefix("zoo:")
        return dict(zoo.sizes(name)) if name in zoo_names() else None
    local = path.suffix == ".json" or path.is_dir()
    hub = ":" not in spec and spec not in zoo_names() and path.suffix not in (".py", ".pt2")
    if not local and (not hub or not spec or path.exists() or spec.startswith((".", "/"))):
        return None
    return settings_of(read_config(spec))


def build(spec: str, batch: int | None, seq: int | None, sizes: Settings) -> Loaded:
    """The model and its batch, as the form of `spec` asks."""
    spec = full_name(spec)
    path = Path(spec)
    if not spec:
        raise InputError(f"no model named; a model is {FORMS}")
    if spec.startswith("zoo:"):
        return build_zoo(spec.removeprefix("zoo:"), batch, seq, sizes)
    if path.suffix == ".pt2":
        raise NotYetError(
            f"{spec}: saved programs are not read yet, because torch.export.load unpickles what the"
            " file brings; name the factory that made the model instead (file.py:factory)"
        )
    if path.suffix == ".json" or path.is_dir():
        return build_configured(spec, batch, seq, sizes)
    if spec.startswith(LIVE):
        refuse("its batch is the caller's", spec, batch=batch, seq=seq)
        return unpack(f"model {spec}", held(spec))
    if ":" in spec:
        refuse("this factory builds its own batch", spec, batch=batch, seq=seq)
        return build_factory(spec)
    if spec in zoo_names():
        raise InputError(f"no model {spec!r}; did you mean zoo:{spec}?")
    if path.suffix == ".py":
        raise InputError(f"{spec}: name the factory in the file: {spec}:FUNCTION")
    if path.exists() or spec.startswith((".", "/")):
        raise InputError(f"cannot read a model from {spec!r}; a model is {FORMS}")
    return build_configured(spec, batch, seq, sizes)


def build_configured(spec: str, batch: int | None, seq: int | None, sizes: Settings) -> Loaded:
    """A Hugging Face model, with some settings of its config replaced."""
    config = read_config(spec)
    try:
        made = build_from_config(with_settings(config, sizes) if sizes else config, batch, seq)
    except InputError as err:
        if sizes or (torch.get_default_device().type == "meta" and needs_weights(err)):
            raise
        raise with_culprit(spec, err, batch, seq) from err
    if "pixel_values" in made[1] and "input_ids" not in made[1]:
        refuse("its batch is images", spec, seq=seq)
    return Loaded(*made)


def zoo_names() -> tuple[str, ...]:
    """The models of the zoo, for training and for inference alone."""
    return (*zoo.names(), *zoo.denoisers())


def build_zoo(name: str, batch: int | None, seq: int | None, sizes: Settings) -> Loaded:
    """A benchmark model."""
    if name not in zoo_names():
        near = get_close_matches(name, zoo_names(), 1, 0.5)
        hint = f"did you mean zoo:{near[0]}?" if near else f"there are {', '.join(zoo_names())}"
        raise InputError(f"no model zoo:{name}; {hint}")
    if not zoo.has_sequence(name):
        refuse("its batch has no sequence", f"zoo:{name}", seq=seq)
    try:
        return Loaded(*zoo.build(name, batch=batch, seq=seq, **sizes))
    except ValueError as err:
        raise InputError(f"zoo:{name}: {err}") from err


def refuse(why: str, spec: str, **sizes: int | None) -> None:
    """Raise `InputError` for a size that was asked for and would have no effect."""
    for name, given in sizes.items():
        if given is not None:
            raise InputError(f"{spec}: {why}; --{name} has no effect, leave it out")


class UserCode(AbstractContextManager["UserCode"]):
    """Turns whatever user code raises into an InputError with the line that raised it."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if err is None or isinstance(err, ParloomError | KeyboardInterrupt | GeneratorExit):
            return
        frames = extract_tb(trace)
        own = str(Path(__file__).parent)
        outside = [f for f in frames if not f.filename.startswith((own, "<frozen"))]
        where = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
        if isinstance(err, SyntaxError) and err.filename:
            where = f" at {err.filename}:{err.lineno}:{err.offset}"
        raise InputError(f"{self.what} raised{where}: {type(err).__name__}: {err}") from err


def build_factory(spec: str) -> Loaded:
    """The model that a user's function returns."""
    location, _, name = spec.rpartition(":")
    module = load_file(Path(location)) if location.endswith(".py") else load_module(location)
    factory = getattr(module, name, None)
    if factory is None:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = get_close_matches(name, public, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"{location} has no {name!r}{hint}")
    if not callable(factory):
        raise InputError(f"{spec} is a {type(factory).__name__}, not a function")
    with UserCode(f"factory {spec}"), nothing_asked():
        made = factory()
    return unpack(f"factory {spec}", made)


def unpack(what: str, made: object) -> Loaded:
    """What `what` gave: `(model, batch[, loss][, optimizer])`; None stands for one left out."""
    expected = "return (model, batch), (model, batch, loss) or (model, batch, loss, optimizer)"
    if not isinstance(made, tuple | list) or not 2 <= len(made) <= 4:
        size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise InputError(f"{what} returned a {type(made).__name__}{size}; {expected}")
    model, batch, *rest = made
    if not isinstance(model, nn.Module):
        raise InputError(f"{what}: the model is a {type(model).__name__}; {expected}")
    check_initialised(model)
    rule = "it must be a dict of tensors, the model's keyword arguments"
    if not isinstance(batch, Mapping):
        raise InputError(f"{what}: the batch is a {type(batch).__name__}; {rule}")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{what}: batch[{key!r}] is a {type(value).__name__}; values must be"
                " tensors: wrap the model in a module whose forward takes them one by one"
            )
    loss: Loss | None = None
    optimizer: object = None
    for item in rest:
        if is_optimizer(item) or (len(rest) == 2 and item is rest[1]):
            optimizer = item
        elif item is not None and not callable(item):
            raise InputError(f"{what}: the loss is a {type(item).__name__}; {expected}")
        else:
            loss = item
    return Loaded(model, {str(k): v for k, v in batch.items()}, loss, optimizer)


def is_optimizer(item: object) -> bool:
    """Whether a value is an optimizer, its class, or a partial of its class."""
    if isinstance(item, partial):
        item = item.func
    kind = item if isinstance(item, type) else type(item)
    return issubclass(kind, torch.optim.Optimizer)


def load_module(name: str) -> ModuleType:
    """An importable module; the working directory counts, as for `python -m`."""
    put_on_path(Path.cwd())
    with UserCode(f"import of {name}"):
        try:
            return import_module(name)
        except ModuleNotFoundError as err:
            if err.name is not None and name.startswith(err.name):
                raise InputError(f"no module {name!r}; a model is {FORMS}") from err
            raise


def load_file(path: Path) -> ModuleType:
    """A file as a module; files beside it can be imported, as when it is run as a script."""
    if not path.is_file():
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1, 0.5)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise InputError(f"no file {path}{hint}")
    put_on_path(path.resolve().parent)
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_from_file"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file")
    module = module_from_spec(spec)
    # Classes find their source text through sys.modules.
    sys.modules[name] = module
    with UserCode(f"{path}"):
        spec.loader.exec_module(module)
    return module


def put_on_path(folder: Path) -> None:
    """Let imports find `folder`, first."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def torch_dtype(name: str) -> torch.dtype:
    """The floating dtype of that name (`bf16` or `bfloat16`)."""
    if name not in DTYPES and name not in DTYPES.values():
        choices = (*DTYPES, *DTYPES.values())
        near = get_close_matches(name, choices, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(DTYPES)}"
        raise InputError(f"no dtype {name!r}; {hint}")
    found = getattr(torch, DTYPES.get(name, name))
    assert isinstance(found, torch.dtype), "the table names dtypes"
    return found


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast in place; computed tables (non-persistent buffers) are never narrowed.

    Rotary frequencies in bfloat16 would move positions; libraries keep them in float32 too. Complex
    tensors stay as they are, of which `Module.to` would drop the imaginary part.
    """
    saved = set(model.state_dict(keep_vars=True))
    tables = {n: b for n, b in model.named_buffers() if n not in saved and b.is_floating_point()}
    model._apply(  # type: ignore[no-untyped-call]
        lambda t: t.to(dtype) if t.is_floating_point() else t
    )
    for name, table in tables.items():
        if table.element_size() > dtype.itemsize:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = table


def cast_batch(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors of the batch in `dtype`."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
