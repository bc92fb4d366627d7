"""The Pareto front against a look at all pairs."""

from collections.abc import Callable
from math import inf, nan
from random import Random

import pytest

from parloom.cost.pareto import pareto_front

Point = tuple[float, float]


def dominates(one: Point, other: Point) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one != other


def by_pairs(points: list[Point]) -> set[Point]:
    """The points that no other dominates."""
    return {p for p in points if not any(dominates(other, p) for other in points)}


def points(seed: int) -> list[Point]:
    """Few values, so that many points tie in one number or in both."""
    random = Random(seed)
    values = [random.uniform(0.1, 9.0) for _ in range(random.randint(1, 6))]
    return [(random.choice(values), random.choice(values)) for _ in range(random.randint(0, 25))]


def as_it_is(point: Point) -> Point:
    return point


def check(front: Callable[[list[Point]], list[Point]], seed: int) -> None:
    found = front(points(seed))
    assert set(found) == by_pairs(points(seed))
    assert len(set(found)) == len(found)
    assert found == sorted(found)
    assert [p[1] for p in found] == sorted((p[1] for p in found), reverse=True)


@pytest.mark.parametrize("seed", range(200))
def test_no_point_of_the_front_is_dominated_and_all_others_are(seed: int) -> None:
    check(lambda own: pareto_front(own, as_it_is), seed)


def test_a_wrong_front_is_found_out() -> None:
    """Fronts that keep ties in one number, or drop one end, differ from the pairs on some seed."""

    def keeps_ties(own: list[Point]) -> list[Point]:
        front: list[Point] = []
        for point in sorted(own):
            if not front or point[1] <= front[-1][1]:
                front.append(point)
        return front

    def drops_an_end(own: list[Point]) -> list[Point]:
        return pareto_front(own, as_it_is)[:-1]

    def check_all(front: Callable[[list[Point]], list[Point]]) -> None:
        for seed in range(200):
            check(front, seed)

    for wrong in (keeps_ties, drops_an_end):
        with pytest.raises(AssertionError):
            check_all(wrong)


def test_numbers_that_are_not_finite_are_not_there() -> None:
    named = {"a": (1.0, 2.0), "no price": (0.5, inf), "never": (inf, 1.0)}
    assert pareto_front(named, named.__getitem__) == ["a"]
    assert pareto_front([(1.0, nan)], as_it_is) == []
    assert pareto_front([], as_it_is) == []


def test_of_equal_points_the_first_stays() -> None:
    named = {"first": (1.0, 1.0), "second": (1.0, 1.0)}
    assert pareto_front(named, named.__getitem__) == ["first"]
