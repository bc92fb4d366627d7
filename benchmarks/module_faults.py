"""Checks that `random_modules.py --inject` undoes, to show that it finds what they catch."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, slots=True)
class Fault:
    """What is undone, the class of traps that it let through, and how."""

    what: str
    trap: str
    undo: Callable[[ExitStack], None]


def _without(*targets: str) -> Callable[[ExitStack], None]:
    """Functions that do nothing, and no comparison with the module itself."""

    def undo(stack: ExitStack) -> None:
        stack.enter_context(patch("parloom.api.check", _not_compared))
        for target in targets:
            stack.enter_context(patch(target, lambda *_, **__: None))

    return undo


def _not_compared(*_: object, **__: object) -> object:
    from parloom.execute.eager_compare import NOT_COMPARED, EagerReport

    return EagerReport(NOT_COMPARED, "switched off")


def _gives(target: str, value: object) -> Callable[[ExitStack], None]:
    """A function that always gives one value."""

    def undo(stack: ExitStack) -> None:
        stack.enter_context(patch(target, lambda *_, **__: value))

    return undo


def _first_input_only(stack: ExitStack) -> None:
    from parloom.runtime import samples

    whole = samples.sample_axes

    def of_first(program: Any, dims: Mapping[str, int]) -> tuple[str, ...]:
        first = program.inputs[0].name
        return whole(program, {first: 0})

    stack.enter_context(patch("parloom.runtime.trainer.sample_axes", of_first))


def _narrow_draws(stack: ExitStack) -> None:
    import torch

    from parloom.capture import spelling

    def exponential(x: torch.Tensor, rate: float = 1.0, **_: object) -> torch.Tensor:
        return torch.log1p(-torch.rand(x.shape, dtype=x.dtype)) / -rate

    table = {**spelling.DECOMPOSITIONS, torch.ops.aten.exponential.default: exponential}
    stack.enter_context(patch("parloom.capture.spelling.DECOMPOSITIONS", table))


FAULTS: Mapping[str, Fault] = {
    "writes": Fault("writes that autograd does not see", "A1",
                    _without("parloom.capture.gradient_paths.Paths.finish")),
    "state": Fault("the second trace of a module that keeps state", "B",
                   _without("parloom.capture.steady.Watch.check")),
    "another_model": Fault("the comparison of the script's model with the plan", "",
                           _gives("parloom.execute.same_model.first_difference", "")),
    "draws": Fault("draws in float32 where the result is narrower", "D", _narrow_draws),
    "own_samples": Fault("samples of all inputs over the same axes", "", _first_input_only),
    "operators": Fault("the list of operators that a plan may call", "",
                       _without("parloom.execute.files.check_results",
                               "parloom.execute.program.check_operators")),
}  # fmt: skip
