"""Checks that `random_modules.py --inject` undoes, to show that it finds what they catch."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
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


def _grad_modes_dropped(stack: ExitStack) -> None:
    from parloom.capture.gradient_paths import with_gradients_stopped as stop

    _without()(stack)
    stack.enter_context(
        patch("parloom.capture.program.with_gradients_stopped", lambda m, n, _: stop(m, n, False))
    )


def _first_input_only(stack: ExitStack) -> None:
    from parloom.runtime import samples

    whole = samples.sample_axes

    def of_first(program: Any, dims: Mapping[str, int]) -> tuple[str, ...]:
        first = program.inputs[0].name
        return whole(program, {first: 0})

    def own(spec: Any, dims: Mapping[str, int], axes: tuple[str, ...]) -> Any:
        if not axes:
            return spec.dims
        return tuple(tuple(d for d in digits if isinstance(d, int)) for digits in spec.dims)

    stack.enter_context(patch("parloom.runtime.trainer.sample_axes", of_first))
    stack.enter_context(patch("parloom.runtime.step.local_dims", own))


def _changes_traced(*also: str) -> Callable[[ExitStack], None]:
    """Changes of tensors' and torch's state are traced like any other code."""

    def undo(stack: ExitStack) -> None:
        _without("parloom.capture.program.refuse_hooks", *also)(stack)
        for name in ("state_changes_refused", "gradients_seen"):
            stack.enter_context(
                patch(f"parloom.capture.program.{name}", lambda *_, **__: nullcontext())
            )

    return undo


def _narrow_draws(stack: ExitStack) -> None:
    import torch

    from parloom.capture import draws

    def exponential(x: torch.Tensor, rate: float = 1.0, **_: object) -> torch.Tensor:
        return torch.log1p(-torch.rand(x.shape, dtype=x.dtype)) / -rate

    def drawn(stream: Any, shape: Any, kind: str, dtype: torch.dtype, device: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(abs(hash(stream)) % 2**31)
        function = torch.randn if kind == "randn" else torch.rand
        return function(shape, generator=generator, dtype=dtype)

    stack.enter_context(patch("parloom.runtime.random._drawn", drawn))
    table = {**draws.DRAWS, torch.ops.aten.exponential.default: exponential}
    stack.enter_context(patch("parloom.capture.spelling.DRAWS", table))


FAULTS: Mapping[str, Fault] = {
    "writes": Fault("writes that autograd does not see", "A1",
                    _grad_modes_dropped),
    "changes": Fault("changes of tensors that no graph shows", "A2", _changes_traced()),
    "hooks": Fault("hooks on gradients and on what is saved for backward", "A3",
                   _changes_traced()),
    "functions": Fault("the derivatives of custom functions", "A4",
                       _without("parloom.capture.program.check_derivatives")),
    "modes": Fault("seeds and modes that forward sets", "A5", _changes_traced()),
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
