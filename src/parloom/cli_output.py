"""Where commands write: results on stdout, progress and messages on stderr."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import RenderableType

from parloom.errors import InputError, has_controls, visible
from parloom.report.output import message, show


def say(text: str, *, laid_out: bool = False) -> None:
    """A line of progress or an error: never on stdout; what is `laid_out` has lines of its own,
    others are as wide as the terminal.
    """
    with suppress(OSError):  # a log that is full stops no work
        shown = visible(text) if laid_out else message(text, _columns())
        print(shown, file=sys.stderr, flush=True)


def _columns() -> int | None:
    """How wide the terminal is that messages go to; None where it is none."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else None
    except (OSError, ValueError, AttributeError):  # not a file
        return None


def result(what: str | RenderableType) -> None:
    """A result, as wide as the terminal is."""
    show(what, os.environ.get("COLUMNS", ""))


def quiet(verbose: bool) -> None:
    """Silence the logs of other packages: what matters of them is in our messages."""
    if not verbose:
        logging.disable(logging.ERROR)


def check_printable(arguments: Sequence[str]) -> None:
    """Raise `InputError` for an argument with control characters: results and messages quote it."""
    for position, argument in enumerate(arguments, 1):
        if has_controls(argument):
            raise InputError(f"argument {position} has control characters: {argument!a}")
