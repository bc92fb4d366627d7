"""A screen of the terminal as static HTML, for notebooks: tables and lists, neither script nor
style, so that it survives where outputs are cleaned (GitHub, nbviewer).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby

from jinja2 import Environment, StrictUndefined
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parloom.errors import visible
from parloom.report.bars import Bar

BAR_WIDTH = 24
TITLE, LINE, ITEMS, TABLE = "title", "line", "items", "table"
TEMPLATE = "static.html.jinja"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a page: a title, a line, the items of a list, or a table with its `header`."""

    kind: str
    text: str = ""
    items: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[bool, ...] = ()


def static_html(screen: RenderableType) -> str:
    """The HTML of a screen that consists of lines and tables; all text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = files("parloom.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text).render(blocks=list(_grouped(_blocks(screen))))


def _blocks(screen: RenderableType) -> Iterator[Block]:
    if isinstance(screen, Group):
        for part in screen.renderables:
            yield from _blocks(part)
    elif isinstance(screen, Table):
        yield _table(screen)
    elif isinstance(screen, Padding):
        yield from _blocks(screen.renderable)
    else:
        text = _plain(screen)
        indented, bold = (
            text.startswith("  "),
            isinstance(screen, Text) and "bold" in str(screen.style),
        )
        kind = TITLE if bold else ITEMS if indented else LINE
        yield Block(kind, text.strip(), (text.strip(),) if kind == ITEMS else ())


def _grouped(blocks: Iterator[Block]) -> Iterator[Block]:
    """Items that follow each other are one list; empty lines are the page's own."""
    shown = (block for block in blocks if block.kind == TABLE or block.text)
    for kind, group in groupby(shown, key=lambda block: block.kind):
        if kind == ITEMS:
            yield Block(ITEMS, items=tuple(item for block in group for item in block.items))
        else:
            yield from group


def _table(table: Table) -> Block:
    header = tuple(_plain(column.header).strip() for column in table.columns)
    cells = [[_plain(cell).strip() for cell in column.cells] for column in table.columns]
    return Block(
        TABLE,
        header=header if table.show_header and any(header) else (),
        rows=tuple(zip(*cells, strict=True)),
        right=tuple(column.justify == "right" for column in table.columns),
    )


def _plain(what: RenderableType) -> str:
    """The text of a line or a cell."""
    if isinstance(what, Padding):
        return _plain(what.renderable)
    if isinstance(what, Bar):
        return "█" * round(BAR_WIDTH * min(1.0, what.share)) or ("▏" if what.share else "")
    if isinstance(what, Text):
        return visible(what.plain)
    if isinstance(what, str):
        return visible(what)
    raise TypeError(f"a screen for notebooks has lines and tables, no {type(what).__name__}")
