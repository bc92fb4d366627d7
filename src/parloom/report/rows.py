"""A table, or where it is too narrow for its words, one paragraph a row: nothing is cut in two."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

GAP = 2


class Rows(Table):
    """Each row as its first cell, and below it `header cell, header cell, ...`, where the width is
    not enough for the first column and the longest word of every other.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [_width(column, console) for column in self.columns]
        spare = options.max_width - sum(widths) - GAP * len(widths)
        if spare >= 0:
            # Rich would shorten the widest column first, below its longest word. Of what is left,
            # each column has what it needs, or as much as any other.
            needs = [
                max(map(cell_len, _lines(column, console)), default=0) - width
                for column, width in zip(self.columns, widths, strict=True)
            ]
            for left, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
                more = min(spare // (len(needs) - left), needs[index])
                column, spare = self.columns[index], spare - more
                column.width = widths[index] + more
                column.no_wrap = False
            yield from super().__rich_console__(console, options)
            return
        cells = (_texts(column, console) for column in self.columns)
        for first, *others in zip(*cells, strict=True):
            yield _indented(first, 2)
            pairs = [
                f"{str(column.header).strip()} {' '.join(text.plain.split())}"
                for column, text in zip(self.columns[1:], others, strict=True)
                if text.plain.strip()
            ]
            if pairs:
                yield _indented(Text(", ".join(pairs)), 4)


def _indented(text: Text, by: int) -> Padding:
    return Padding(Text(text.plain.strip(), overflow="fold"), (0, 0, 0, by))


def _texts(column: Column, console: Console) -> Iterator[Text]:
    for cell in column.cells:
        yield cell if isinstance(cell, Text) else console.render_str(str(cell))


def _lines(column: Column, console: Console) -> Iterator[str]:
    yield str(column.header)
    for text in _texts(column, console):
        yield from text.plain.split("\n")


def _width(column: Column, console: Console) -> int:
    """Cells that a column needs: its longest word, or all of a number with its unit."""
    header = str(column.header)
    texts = [text.plain for text in _texts(column, console)]
    if column.justify == "right":
        return max(map(cell_len, [*header.split(), *texts]), default=0)
    indent = len(header) - len(header.lstrip())
    return indent + max(
        (cell_len(word) for text in (header, *texts) for word in text.split()), default=0
    )
