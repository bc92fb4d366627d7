"""Results on stdout: text, screens and JSON documents."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType

from parloom.errors import InputError

# Pipes have no width; a narrow default would break paths.
WIDTH = 120


def show(what: str | RenderableType, columns: str) -> None:
    """Print a result; where no terminal says how wide it is, `columns` does, if it is a number."""
    with _stdout():
        console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
        if isinstance(what, str):
            print(what)
        elif console.is_terminal:
            console.print(what)
        else:
            width = int(columns) if columns.isdigit() and int(columns) else WIDTH
            print(rendered(what, width))


def rendered(what: RenderableType, width: int) -> str:
    """A screen as plain lines; cells are padded, lines are not."""
    text = StringIO()
    Console(file=text, width=width, highlight=False, emoji=False, markup=False).print(what)
    return "\n".join(line.rstrip() for line in text.getvalue().removesuffix("\n").split("\n"))


def show_json(document: Any) -> None:
    """Print one JSON document, strict and indented."""
    with _stdout():
        print(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def _stdout() -> Iterator[None]:
    """Raise `InputError` where stdout takes nothing: the disk is full, or the reader is gone."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # Or what is still buffered fails again when the interpreter ends.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"cannot write the result to stdout: {error.strerror or error}") from None


def _finite(document: Any) -> Any:
    """The document with null for numbers that JSON has not (NaN and infinities)."""
    if isinstance(document, Mapping):
        return {name: _finite(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
