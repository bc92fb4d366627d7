"""Optimizers that a plan can name: torch.optim classes that update element by element."""

from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer as TorchOptimizer

from parloom.errors import FingerprintError, InputError, nearest
from parloom.ir.plan import Optimizer

Named = Iterable[tuple[str, torch.nn.Parameter]]

# Name -> (class, states of the size of the parameter that it keeps by default).
OPTIMIZERS = MappingProxyType({
    "adadelta": (torch.optim.Adadelta, 2),
    "adagrad": (torch.optim.Adagrad, 1),
    "adam": (torch.optim.Adam, 2),
    "adamax": (torch.optim.Adamax, 2),
    "adamw": (torch.optim.AdamW, 2),
    "asgd": (torch.optim.ASGD, 1),
    "nadam": (torch.optim.NAdam, 2),
    "radam": (torch.optim.RAdam, 2),
    "rmsprop": (torch.optim.RMSprop, 1),
    "rprop": (torch.optim.Rprop, 2),
    "sgd": (torch.optim.SGD, 0),
})  # fmt: skip


def named_optimizer(name: str) -> Optimizer:
    """The plan's entry for an optimizer; raises `InputError` with the nearest known name."""
    key = name.lower()
    if key not in OPTIMIZERS:
        raise InputError(
            f"unknown optimizer {name!r}{nearest(key, OPTIMIZERS)}; parloom shards optimizers that"
            f" update element by element: {', '.join(OPTIMIZERS)}"
        )
    return Optimizer(key, OPTIMIZERS[key][1])


def name_of(given: object) -> str | None:
    """The class name of what a factory returned as its optimizer: instance, class or partial."""
    while isinstance(given, partial):
        given = given.func
    if isinstance(given, type):
        return given.__name__.lower()
    return type(given).__name__.lower() if isinstance(given, TorchOptimizer) else None


def make(optimizer: Optimizer, named: Named, **settings: Any) -> TorchOptimizer:
    """The plan's optimizer over named parameters."""
    maker: Callable[..., TorchOptimizer] = OPTIMIZERS[optimizer.name][0]
    return maker(list(named), **settings)


def check_same(planned: Optimizer, optimizer: TorchOptimizer) -> None:
    """Raise `FingerprintError` unless `optimizer` is of the class that was planned for."""
    given = type(optimizer).__name__
    if given.lower() != planned.name:
        raise FingerprintError(
            f"the plan was made for the optimizer {planned.name!r}, the script made a {given};"
            f" plan again with --optimizer {given.lower()}"
        )
