"""What becomes of the script's module when a trainer has taken its weights: it says where they are.

The module no longer trains, so that what it computes, holds or saves is not what is trained. Every
module in it gets a class of the same name, whose calls, weights and attributes raise `InputError`
with the trainer's call to use. Its weights are freed: tensors without memory stand for them where
the module prints itself, counts them or says its dtype.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parloom.errors import InputError
from parloom.runtime.taken import take

# What a module is asked for, and the call of the trainer that answers it.
STATE = (
    "trainer.state_dict() has the trained weights, trainer.export(PATH) writes them, and"
    " trainer.device is where they are"
)
RUN = "trainer.step(batch) trains and trainer.evaluate(batch) gives loss and outputs"
LOAD = "trainer.load_state_dict(...) loads whole tensors"
MADE = "the trainer runs what was planned: change the model before parallelize, and plan again"
FLAT = "_flat_weights"  # of recurrent modules: their parameters once more
ANSWERED = ("num_parameters", "get_memory_footprint")  # Hugging Face's: counts, no values


def refuse_handed_over(model: nn.Module) -> None:
    """Raise `InputError` where the model, or a part of it, is another trainer's already."""
    for name, module in model.named_modules():
        if isinstance(module, HandedOver):
            raise InputError(
                f"{f'module {name!r} of the model' if name else 'this model'} was handed over to"
                " another trainer by parallelize, and holds its first weights no more; build the"
                " model again, and load what was trained (trainer.state_dict())"
            )


def hand_over(model: nn.Module, device: torch.device) -> "Original":
    """Make `model` and all its modules raise, and free its weights, which are on `device` now."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    for name, weight in model.named_parameters():
        take(weight, name)
    if not model.training:  # it is trained in training mode
        model.train()
    return Original(model, device, Untouched(tensors))


class Untouched:
    """The module's tensors as they were handed over; it keeps none of them alive."""

    def __init__(self, tensors: tuple[tuple[str, Tensor], ...]) -> None:
        self.seen = [(name, weakref.ref(tensor), _state(tensor)) for name, tensor in tensors]

    def check(self) -> None:
        """Raise `InputError` where one was written to since: the trainer would not see it."""
        for name, reference, state in self.seen:
            tensor = reference()
            if tensor is not None and _state(tensor) != state:
                raise InputError(
                    f"{name} of the model was changed after parallelize, which changes nothing in"
                    f" the trainer, whose weights are its own; {LOAD}"
                )


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the model: its own class and the one that raises."""

    module: nn.Module
    kind: type[nn.Module]
    raising: type[nn.Module]


class Original:
    """The script's model, which raises but inside of `restored`."""

    def __init__(self, model: nn.Module, device: torch.device, untouched: Untouched) -> None:
        self.model = model
        self.device = device
        self.untouched = untouched
        made: dict[type, type[nn.Module]] = {}
        empty: dict[int, Tensor] = {}
        parts = []
        for module in tuple(model.modules()):
            kind = type(module)
            if kind not in made:
                made[kind] = self._raising(kind)
            parts.append(Part(module, kind, made[kind]))
            own = vars(module)
            for name in ("_parameters", "_buffers"):
                own[name] = Weights((n, _empty(t, empty)) for n, t in own[name].items())
            if FLAT in own:
                own[FLAT] = [_empty(t, empty) for t in own[FLAT]]
            object.__setattr__(module, "__class__", made[kind])
        self.parts = tuple(parts)

    def _raising(self, kind: type[nn.Module]) -> type[nn.Module]:
        """A class of the same name; no code of the user's metaclass runs."""
        body: dict[str, Any] = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": None,
            "_original": self,
        }
        for name, value in (("device", lambda _: self.device), ("dtype", _dtype)):
            if isinstance(getattr_static(kind, name, None), property):
                body[name] = property(value)
        body |= {name: _answered(name) for name in ANSWERED if hasattr(kind, name)}
        made: type[nn.Module] = type.__new__(type(kind), kind.__name__, (HandedOver, kind), body)
        return made

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The modules as the script made them, with weights on the meta device."""
        kept = [(vars(p.module)["_parameters"], vars(p.module)["_buffers"]) for p in self.parts]
        if any(type(part.module) is not part.raising for part in self.parts):
            yield  # already
            return
        for part, (parameters, buffers) in zip(self.parts, kept, strict=True):
            vars(part.module).update(_parameters=dict.copy(parameters), _buffers=dict.copy(buffers))
            object.__setattr__(part.module, "__class__", part.kind)
        try:
            yield
        finally:
            for part, (parameters, buffers) in zip(self.parts, kept, strict=True):
                vars(part.module).update(_parameters=parameters, _buffers=buffers)
                object.__setattr__(part.module, "__class__", part.raising)

    def keeps(self, module: nn.Module, mode: bool) -> bool:
        """Whether `module.train(mode)` would leave all modes as they are, as in many loops.

        A model may keep parts of it in evaluation mode, frozen batch norms for example.
        """
        with self.restored():
            before = [part.module.training for part in self.parts]
            module.train(mode)
            after = [part.module.training for part in self.parts]
            for part, training in zip(self.parts, before, strict=True):
                vars(part.module)["training"] = training
        return before == after


def _raising(what: str, way: str) -> Any:
    """A method that raises, whatever it is given."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise _error(what, way)

    return method


def _answered(name: str) -> Callable[..., Any]:
    """A method of the user's class, which needs no values of weights."""

    def method(module: Any, *args: Any, **kwargs: Any) -> Any:
        with module._original.restored():
            return getattr(module, name)(*args, **kwargs)

    return method


def _dtype(module: Any) -> Any:
    """What a module says of its weights."""
    with module._original.restored():
        return module.dtype


class Weights(dict[str, Any]):
    """The tensors of a module that was handed over: nobody may look at them."""

    __getitem__ = get = items = values = copy = _raising("its tensors were asked for", STATE)
    __setitem__ = update = setdefault = _raising("a tensor of it was set", LOAD)
    __delitem__ = pop = popitem = clear = _raising("a tensor of it was deleted", MADE)


class HandedOver(nn.Module):
    """Comes before the user's class in the classes of modules that were handed over."""

    _original: Original
    __call__ = forward = _raising("it was called", RUN)
    state_dict = parameters = named_parameters = _raising("its weights were asked for", STATE)
    buffers = named_buffers = _raising("its buffers were asked for", STATE)
    get_parameter = get_buffer = _raising("a tensor of it was asked for", STATE)
    __reduce_ex__ = __deepcopy__ = __copy__ = _raising("it was copied or pickled", STATE)
    load_state_dict = _raising("weights were loaded into it", LOAD)
    _apply = to = _raising("its tensors were moved or cast", MADE)
    requires_grad_ = register_parameter = register_buffer = _raising("it was changed", MADE)
    register_module = add_module = compile = _raising("it was changed", MADE)
    register_forward_hook = register_forward_pre_hook = _raising("it was given a hook", MADE)
    register_full_backward_hook = _raising("it was given a hook", MADE)
    register_full_backward_pre_hook = _raising("it was given a hook", MADE)

    def __init_subclass__(cls) -> None:
        """Nothing of what the user's class does for classes that are written."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise _error(f"its attribute {name!r} was set", MADE)

    def __delattr__(self, name: str) -> None:
        raise _error(f"its attribute {name!r} was deleted", MADE)

    def train(self, mode: bool = True) -> Any:
        """Allowed where it changes nothing."""
        if not self._original.keeps(self, mode):
            raise _error(f"it was put into {'training' if mode else 'evaluation'} mode", RUN)
        return self

    def __repr__(self) -> str:
        with self._original.restored():
            return repr(self)


def _empty(tensor: Any, made: dict[int, Tensor]) -> Any:
    """A tensor of the same kind without memory; one for each, as of tied weights."""
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        return tensor
    if id(tensor) not in made:
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
    return made[id(tensor)]


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes with every write that torch knows of."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, 0 if tensor.is_meta else tensor.data_ptr()


def _error(what: str, way: str) -> InputError:
    return InputError(
        f"{what} after parallelize, and the model does not train: the trainer has its weights in"
        f" the plan's layout; {way}"
    )
