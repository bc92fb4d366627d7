"""Weights that a trainer took over: an optimizer made before it would update them for nothing."""

from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from parloom.errors import InputError

_NAMES = WeakTensorKeyDictionary()  # of the weights, as long as a script keeps them


def take(weight: Tensor, name: str) -> None:
    """From now on the step of every optimizer that was given `weight` raises `InputError`."""
    if refuse_taken not in torch_optimizer._global_optimizer_pre_hooks.values():
        torch_optimizer.register_optimizer_step_pre_hook(refuse_taken)
    _NAMES[weight] = name


def refuse_taken(optimizer: torch_optimizer.Optimizer, *_: object) -> None:
    """Raise `InputError` where an optimizer is about to update a weight that was taken."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    name = next((_NAMES[weight] for weight in weights if weight in _NAMES), None)
    if name is not None:
        raise InputError(
            f"{type(optimizer).__name__}.step() would update {name}, which this optimizer was given"
            " before parallelize and which nobody trains any more: trainer.step(batch) updates the"
            " weights, with the optimizer that parallelize(optimizer=...) is given"
        )
