"""Checks that `random_modules.py --inject` undoes, to show that it finds what they catch."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
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


FAULTS: Mapping[str, Fault] = {
    "state": Fault("the second trace of a module that keeps state", "B",
                   _without("parloom.capture.steady.Watch.check")),
}  # fmt: skip
