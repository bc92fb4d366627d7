"""The Pareto front: points that no other is as good as in all respects, and better than in one."""

from collections.abc import Callable, Iterable
from math import inf
from typing import TypeVar

T = TypeVar("T")


def pareto_front(points: Iterable[T], of: Callable[[T], tuple[float, float]]) -> list[T]:
    """The points that no other dominates, by two numbers of each that should be small: from the
    least first number to the largest, so that the second falls. Of equal points the first stays;
    points with a number that is not finite are never there.
    """
    front: list[T] = []
    least = inf
    for point in sorted(points, key=of):
        first, second = of(point)
        if first < inf and second < least:
            front.append(point)
            least = second
    return front
