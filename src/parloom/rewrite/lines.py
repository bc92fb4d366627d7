"""Lines: sums of extents and numbers, as places in dims of several blocks are.

Every extent is at least one, so that the least that a line may be is known where no extent is
subtracted.
"""

from collections.abc import Iterable
from typing import Any

Line = tuple[tuple[str, int], ...]
"""Extents by their names in order, each with how often it is counted; a number is of no name."""
NUMBER = ""


def line(extent: str) -> Line:
    """An extent."""
    return ((extent, 1),)


def line_of(offset: Any) -> Line:
    """A number or a line as a line."""
    if isinstance(offset, int):
        return ((NUMBER, offset),) if offset else ()
    found: Line = offset
    return found


def offset_of(found: Line) -> Any:
    """A line, or the number that it is."""
    if all(name == NUMBER for name, _ in found):
        return sum(times for _, times in found)
    return found


def plus_lines(one: Line, other: Line, times: int = 1) -> Line:
    """`one + other * times`."""
    total = dict(one)
    for name, number in other:
        total[name] = total.get(name, 0) + number * times
    return tuple(sorted((name, number) for name, number in total.items() if number))


def begins(blocks: Iterable[tuple[str, ...]]) -> list[Line]:
    """Where blocks of one extent, or of one place, begin, and where the last one ends."""
    found: list[Line] = [()]
    for block in blocks:
        found.append(plus_lines(found[-1], extent_of(block)))
    return found


def extent_of(block: tuple[str, ...]) -> Line:
    """How large a block of one extent, or of one place, is."""
    return line(block[0]) if block else line_of(1)


def is_negative(found: Line) -> bool:
    """Whether a line is less than zero for all extents."""
    return is_no_less(plus_lines(line_of(-1), found, -1))


def is_no_less(found: Line) -> bool:
    """Whether a line is zero or more for all extents."""
    names = [times for name, times in found if name != NUMBER]
    return min(names, default=0) >= 0 and sum(times for _, times in found) >= 0
