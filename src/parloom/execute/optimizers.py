"""The plan's optimizer: its entry, an instance of it, and whether a script makes the same one."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature

import torch
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.lr_scheduler import LRScheduler

from parloom.errors import FingerprintError, InputError, nearest
from parloom.ir.plan import Optimizer, Plan
from parloom.runtime.optimizer import OPTIMIZERS

Named = Iterable[tuple[str, torch.nn.Parameter]]
NamedParameters = list[tuple[str, torch.nn.Parameter]]
Maker = Callable[[NamedParameters], TorchOptimizer]


def named_optimizer(name: str) -> Optimizer:
    """The plan's entry for an optimizer; raises `InputError` with the nearest known name."""
    key = name.lower()
    able = [known for known, entry in OPTIMIZERS.items() if not entry.why_whole]
    if key not in able:
        what = f"unknown optimizer {name!r}{nearest(key, able)}"
        if key in OPTIMIZERS:
            what = f"optimizer {name!r} cannot update shards: {OPTIMIZERS[key].why_whole}"
        raise InputError(
            f"{what}; parloom shards optimizers that update element by element: {', '.join(able)}"
        )
    return Optimizer(key, OPTIMIZERS[key].num_states)


def class_of(given: object) -> type | None:
    """The class of an optimizer: of an instance, of a class itself, or of partials of one.

    None where only a call would tell.
    """
    while isinstance(given, partial):
        given = given.func
    if isinstance(given, type):
        return given
    return type(given) if isinstance(given, TorchOptimizer) else None


def name_of(given: object) -> str | None:
    """The name of what a factory returned as its optimizer, as `named_optimizer` takes it."""
    found = class_of(given)
    return None if found is None else found.__name__.lower()


def optimizer_name(given: object) -> str | None:
    """The name of a class of torch.optim that is given as its name, the class or an instance.

    Raises `InputError` for what only a call would tell.
    """
    if given is None or isinstance(given, str):
        return given
    found = name_of(given)
    if found is None:
        raise InputError(
            f"optimizer: which class {given!r} makes, only a call would tell: give the class, as"
            " torch.optim.AdamW"
        )
    return found


def make(optimizer: Optimizer, named: Named, *, lr: float, eps: float) -> TorchOptimizer:
    """The plan's optimizer over named parameters; `eps` where its class has one."""
    maker: Callable[..., TorchOptimizer] = OPTIMIZERS[optimizer.name].maker
    settings = {"eps": eps} if "eps" in signature(maker).parameters else {}
    return maker(list(named), lr=lr, **settings)


def checked(plan: Plan, maker: Maker) -> Maker:
    """`maker`, refused with `FingerprintError` where it makes another class than was planned.

    At once where the class can be told without a call, else as soon as `maker` has been called.
    Raises `InputError` for an optimizer that is made already, and for what makes none.
    """
    check_maker("optimizer", maker, "lambda named: torch.optim.AdamW(named, lr=1e-3)")
    known = class_of(maker)
    if known is not None and issubclass(known, TorchOptimizer):
        _require(plan, known)
        return maker

    def make_checked(named: NamedParameters) -> TorchOptimizer:
        optimizer = maker(named)
        if not isinstance(optimizer, TorchOptimizer):
            raise InputError(f"`optimizer` made a {type(optimizer).__name__}, not an optimizer")
        _require(plan, type(optimizer))
        return optimizer

    return make_checked


def check_maker(argument: str, given: object, example: str) -> None:
    """Raise `InputError` where an argument of `parallelize` is no function."""
    if not callable(given):
        made = isinstance(given, TorchOptimizer | LRScheduler)
        why = ", made before with other parameters than the trainer's" if made else ""
        raise InputError(
            f"{argument} is {'an' if type(given).__name__[0] in 'AEIO' else 'a'}"
            f" {type(given).__name__}{why}; give a function: {argument}={example}"
        )


def _require(plan: Plan, given: type[TorchOptimizer]) -> None:
    """The class itself is compared: another package's AdamW keeps other states."""
    wanted = OPTIMIZERS.get(plan.optimizer.name)
    if wanted is None or given is not wanted.maker:
        name = given.__name__.lower()
        entry = OPTIMIZERS.get(name)
        known = entry is not None and given is entry.maker and not entry.why_whole
        other = replace(plan, optimizer=named_optimizer(name)) if known else plan
        raise FingerprintError(
            f"the plan was made for the optimizer {plan.optimizer.name!r} of torch.optim, the"
            f" script made a {given.__name__} ({given.__module__}); "
            + (f"plan again: {other.command()}" if known else "make the one that was planned")
        )
