"""`make test` runs all tests but slow ones, and so many cases of each that is sampled."""

import pytest

from tests.selection import Collected, kept


def test_slow_tests_are_left_out() -> None:
    assert kept([Collected("a"), Collected("b", is_slow=True), Collected("a")]) == [0, 2]


@pytest.mark.parametrize(
    ("cases", "sample", "places"),
    [(10, 1, [0]), (10, 3, [0, 3, 6]), (3, 5, [0, 1, 2]), (1, 1, [0]), (7, 7, list(range(7)))],
)
def test_cases_of_samples_are_spread(cases: int, sample: int, places: list[int]) -> None:
    assert kept([Collected("a", sample=sample)] * cases) == places


def test_each_function_has_its_own_sample() -> None:
    tests = [
        Collected("a", sample=1),
        Collected("b", sample=2),
        Collected("a", sample=1),
        Collected("b", sample=2),
    ]
    assert kept(tests) == [0, 1, 3]
