"""Points in the terminal, on logarithmic axes where no number is zero."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from rich.text import Text

WIDTH, HEIGHT = 64, 16
# Axes that span less than this ratio would show differences that nobody can rely on.
LEAST_SPAN = 1.5


@dataclass(frozen=True, slots=True)
class Mark:
    """A point, drawn as one character; of those on one place the first mark is seen."""

    x: float
    y: float
    character: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis counts, and how a number on it is written."""

    title: str
    written: Callable[[float], str]


def chart(marks: Sequence[Mark], x: Axis, y: Axis) -> Text:
    """Marks on a grid with the ends of both axes written out; empty where there are none."""
    if not marks:
        return Text()
    across, up = _Scale([mark.x for mark in marks]), _Scale([mark.y for mark in marks])
    grid: dict[tuple[int, int], Mark] = {}
    for mark in marks:
        grid.setdefault((up.place(mark.y, HEIGHT), across.place(mark.x, WIDTH)), mark)
    ends = {HEIGHT - 1: y.written(up.most), 0: y.written(up.least)}
    margin = max(map(len, ends.values()))
    logarithmic = [axis.title for axis, own in ((x, across), (y, up)) if own.is_logarithmic]
    scales = "both axes are logarithmic"
    if len(logarithmic) < 2:
        scales = f"logarithmic: {', '.join(logarithmic) or 'neither axis'}"
    text = Text(f"{y.title} ({scales})\n")
    for row in range(HEIGHT - 1, -1, -1):
        text.append(f"{ends.get(row, ''):>{margin}} │")
        for column in range(WIDTH):
            found = grid.get((row, column))
            text.append(found.character if found else " ", style=found.style if found else "")
        text.append("\n")
    first, last = x.written(across.least), x.written(across.most)
    between = x.title.center(WIDTH - len(first) - len(last))
    text.append(f"{'':>{margin}} └{'─' * WIDTH}\n{'':>{margin}}  {first}{between}{last}")
    return text


class _Scale:
    """Numbers on an axis: logarithmic, or from zero on and linear where one of them is zero."""

    def __init__(self, values: Sequence[float]) -> None:
        self.least, self.most = min(values), max(values)
        self.is_logarithmic = self.least > 0
        if self.is_logarithmic and self.most < self.least * LEAST_SPAN:
            middle = (self.least * self.most) ** 0.5
            self.least, self.most = middle / LEAST_SPAN**0.5, middle * LEAST_SPAN**0.5

    def place(self, value: float, places: int) -> int:
        if self.is_logarithmic:
            share = log(value / self.least) / log(self.most / self.least)
        else:
            share = value / self.most if self.most else 0.0
        return min(places - 1, max(0, round(share * (places - 1))))
