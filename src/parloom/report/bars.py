"""Shares as bars: names left, numbers right, and bars as long as there is room for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

LEAST = 4
LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Bar:
    """A `share` of a line of `width` characters, or of fewer where the screen is narrow."""

    share: float
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full = round(min(self.width, options.max_width) * min(1.0, self.share))
        yield Text("█" * full or ("▏" if self.share else ""))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(LEAST, self.width)


def bars(rows: Iterable[tuple[str, float, str]], width: int) -> Table:
    """Name, share as a bar, and what is said of it, which is never cut."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for name, share, said in rows:
        table.add_row(Text(f"  {name}"), Bar(share, width), Text(said))
    return table


def levels(line: Sequence[int], full: int) -> str:
    """One character for each number, as high as its share of `full`."""
    top = len(LEVELS) - 1
    return "".join(
        LEVELS[min(top, max(1, -(-top * size // full))) if size > 0 else 0] for size in line
    )
