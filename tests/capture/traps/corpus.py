"""The marks of the functions in this folder, and how they are found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
MARK = "expected_refusal"


@dataclass(frozen=True, slots=True)
class Trap:
    """The factory `spec` (`file.py:function`); `refusal` is a pattern of the error, or empty."""

    spec: str
    refusal: str

    def __str__(self) -> str:
        path, _, name = self.spec.rpartition(":")
        return f"{Path(path).stem}-{name}"


def equal(build: F) -> F:
    """The captured program trains as the module does."""
    setattr(build, MARK, "")
    return build


def refused(pattern: str) -> Callable[[F], F]:
    """Capturing the module raises an error whose message `pattern` is found in."""

    def mark(build: F) -> F:
        setattr(build, MARK, pattern)
        return build

    return mark


def traps() -> Iterator[Trap]:
    """Every marked function of the modules in this folder."""
    folder = Path(__file__).parent
    for path in sorted(folder.glob("*.py")):
        module = import_module(f"tests.capture.traps.{path.stem}")
        for name, value in vars(module).items():
            if hasattr(value, MARK) and value.__module__ == module.__name__:
                yield Trap(f"{path}:{name}", getattr(value, MARK))
