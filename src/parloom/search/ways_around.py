"""Orders in which an axis may go through its places on a torus: rows one after the other, there and
back, and closed ways whose every step is to a neighbor.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

Place = tuple[int, ...]
Way = tuple[Place, ...]


def ways_through(shape: Sequence[int]) -> Iterator[Way]:
    """Ways through a box of places other than row by row, none twice."""
    seen: set[Way] = set()
    sides = [index for index, size in enumerate(shape) if size > 1]
    if len(sides) < 2:
        found = [_folded(shape, side) for side in sides if shape[side] > 2]
    else:
        found = []
        for order in permutations(sides):
            found += [_there_and_back(shape, order), *_closed(shape, order)]
    for way in found:
        if way not in seen:
            seen.add(way)
            yield way


def row_by_row(shape: Sequence[int], order: Sequence[int]) -> Way:
    """All places of a box, sides in `order` from the one that is gone along first."""
    found: Way = ((0,) * len(shape),)
    for side in order:
        found = tuple(_put(place, side, at) for at in range(shape[side]) for place in found)
    return found


def _there_and_back(shape: Sequence[int], order: Sequence[int]) -> Way:
    """Each step is to a neighbor; the end is not beside the beginning."""
    found: Way = ((0,) * len(shape),)
    for side in order:
        found = tuple(
            _put(place, side, at)
            for at in range(shape[side])
            for place in (found if at % 2 == 0 else found[::-1])
        )
    return found


def _closed(shape: Sequence[int], order: Sequence[int]) -> Iterator[Way]:
    """A closed way, which there is where the last side has an even size: a way through the other
    sides makes rows. Out along the first places of all rows, and back through the rest of them.
    """
    *others, last = order
    if shape[last] % 2:
        return
    path = _there_and_back([size if i in others else 1 for i, size in enumerate(shape)], others)
    found = [_put(path[0], last, at) for at in range(shape[last])]
    for number, at in enumerate(reversed(range(shape[last]))):
        rest = path[1:] if number % 2 == 0 else path[:0:-1]
        found += [_put(place, last, at) for place in rest]
    yield tuple(found)


def _folded(shape: Sequence[int], side: int) -> Way:
    """Up by every other place of a line and back by the rest: no step is longer than two."""
    size = shape[side]
    line = (*range(0, size, 2), *reversed(range(1, size, 2)))
    return tuple(_put((0,) * len(shape), side, at) for at in line)


def _put(place: Place, side: int, at: int) -> Place:
    return (*place[:side], at, *place[side + 1 :])
