"""What becomes of the script's module when a trainer has taken its weights: it says where they are.

The module no longer trains, so that what it computes, holds or saves is not what is trained. Every
module in it gets a class of the same name, whose calls, weights and attributes raise `InputError`
with the trainer's call to use; it still prints.
"""

import weakref
from typing import Any, NoReturn

from torch import Tensor, nn

from parloom.errors import InputError

# What a module is asked for, and the call of the trainer that answers it.
STATE = "trainer.state_dict() has the trained weights, trainer.export(PATH) writes them"
RUN = "trainer.step(batch) trains and trainer.evaluate(batch) gives loss and outputs"
LOAD = "trainer.load_state_dict(...) loads whole tensors"
MADE = "the trainer runs what was planned: change the model before parallelize, and plan again"


def refuse_handed_over(model: nn.Module) -> None:
    """Raise `InputError` where the model, or a part of it, is another trainer's already."""
    for name, module in model.named_modules():
        if isinstance(module, HandedOver):
            raise InputError(
                f"{f'module {name!r} of the model' if name else 'this model'} was handed over to"
                " another trainer by parallelize, and holds its first weights no more; build the"
                " model again, and load what was trained (trainer.state_dict())"
            )


def hand_over(model: nn.Module) -> "Untouched":
    """Make `model` and all its modules raise; what notices later changes of their tensors."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if not model.training:  # it is trained in training mode
        model.train()
    for module in tuple(model.modules()):
        kind = type(module)
        for name in ("_parameters", "_buffers"):
            module.__dict__[name] = Weights(module.__dict__[name])
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": None}
        module.__class__ = type(kind.__name__, (HandedOver, kind), body)
    return Untouched(tensors)


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


def _raising(what: str, way: str) -> Any:
    """A method that raises, whatever it is given."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise _error(what, way)

    return method


class Weights(dict[str, Any]):
    """The tensors of a module that was handed over; only its own printing may look at them."""

    shown = False

    def __getitem__(self, name: str) -> Any:
        if self.shown:
            return super().__getitem__(name)
        raise _error(f"its tensor {name!r} was asked for", STATE)

    get = items = values = copy = _raising("its tensors were asked for", STATE)
    __setitem__ = update = setdefault = _raising("a tensor of it was set", LOAD)
    __delitem__ = pop = popitem = clear = _raising("a tensor of it was deleted", MADE)


class HandedOver(nn.Module):
    """Comes before the user's class in the classes of modules that were handed over."""

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
        """Allowed where it changes nothing, as at the head of many loops."""
        if any(module.training != mode for module in self.modules()):
            raise _error(f"it was put into {'training' if mode else 'evaluation'} mode", RUN)
        return self

    def __repr__(self) -> str:
        own = (vars(self)["_parameters"], vars(self)["_buffers"])
        for tensors in own:
            tensors.shown = True
        try:
            return super().__repr__()
        finally:
            for tensors in own:
                tensors.shown = False


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes with every write that torch knows of."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, 0 if tensor.is_meta else tensor.data_ptr()


def _error(what: str, way: str) -> InputError:
    return InputError(
        f"{what} after parallelize, and the model does not train: the trainer has its weights in"
        f" the plan's layout; {way}"
    )
