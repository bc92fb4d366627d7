"""Results on stdout, and messages: text, screens and JSON documents.

What is printed may hold names out of files. None of them reaches a terminal as control characters.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from textwrap import wrap
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from parloom.errors import InputError, visible

# Pipes have no width; a narrow default would break paths.
WIDTH = 120
# How far lines of a text hang, and the characters that must be left for that.
HANG, LEAST = 2, 8
# Characters that JSON allows and terminals obey: C1 controls, marks of direction and of no width.
HIDDEN = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def show(what: str | RenderableType, columns: str) -> None:
    """Print a result; where no terminal says how wide it is, `columns` does, if it is a number."""
    with _stdout():
        console = Screen(file=sys.stdout, highlight=False, emoji=False, markup=False)
        if isinstance(what, str):
            print(visible(what))
        elif console.is_terminal:
            console.print(_Visible(what))
        else:
            width = int(columns) if re.fullmatch("[1-9][0-9]{0,8}", columns) else WIDTH
            print(rendered(what, width))


def rendered(what: RenderableType, width: int) -> str:
    """A screen as plain lines; cells are padded, lines are not."""
    text = StringIO()
    Screen(file=text, width=width, highlight=False, emoji=False, markup=False).print(_Visible(what))
    return "\n".join(line.rstrip() for line in text.getvalue().removesuffix("\n").split("\n"))


def show_json(document: Any) -> None:
    """Print one JSON document, strict and indented."""
    with _stdout():
        text = json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)
        print(HIDDEN.sub(_json_escape, text))


def message(text: str, columns: int | None = None) -> str:
    """A message for stderr: lines after the first are indented, so that no name forges a line.

    Where `columns` are known, lines are broken between words, and what is broken off hangs; a path
    or a command's word stays whole.
    """
    lines = visible(text).replace("\n", f"\n{' ' * HANG}").split("\n")
    if columns is None:
        return "\n".join(lines)
    return "\n".join(part for line in lines for part in _broken(line, columns))


def _broken(line: str, columns: int) -> list[str]:
    indent = len(line) - len(line.lstrip(" "))
    if len(line) <= columns or columns - indent - HANG < LEAST:
        return [line]
    return wrap(
        line.strip(),
        columns,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + HANG),
        break_long_words=False,
        break_on_hyphens=False,
    )


class Screen(Console):
    """A console on which an indented text that takes several lines hangs: the lines after its
    first are indented by `HANG` more.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        asked = options or self.options
        text = self.render_str(renderable) if isinstance(renderable, str) else renderable
        if isinstance(text, Text) and not asked.no_wrap:
            text = self._hanging(text, asked)
        return super().render(text, options)

    def _hanging(self, text: Text, asked: ConsoleOptions) -> Text:
        indent = len(text.plain) - len(text.plain.lstrip(" "))
        room = asked.max_width - indent - HANG
        if not indent or text.cell_len <= asked.max_width or room < LEAST:
            return text
        lines = text[indent:].wrap(self, room, overflow=asked.overflow or text.overflow)
        rest = (Text(" " * (indent + HANG)) + line for line in lines[1:])
        return Text("\n").join([Text(" " * indent) + lines[0], *rest])


@dataclass(frozen=True, slots=True)
class _Visible:
    """A screen whose text is `visible`; what the screen itself does to the terminal stays."""

    screen: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.screen, options):
            text = segment.text if segment.control else visible(segment.text)
            yield Segment(text, segment.style, segment.control)


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


@contextmanager
def _stdout() -> Iterator[None]:
    """Raise `InputError` where stdout takes nothing as the disk is full.

    A reader that is gone, as `head` is after its lines, has what it wants.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        flush_stdout()
    except OSError as error:
        flush_stdout()
        raise InputError(f"cannot write the result to stdout: {error.strerror or error}") from None


def flush_stdout() -> None:
    """Write what is buffered, or drop it: it would fail again when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(document: Any) -> Any:
    """The document with null for numbers that JSON has not (NaN and infinities)."""
    if isinstance(document, Mapping):
        return {name: _finite(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
