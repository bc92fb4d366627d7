"""`make test` runs all tests but slow ones, and so many cases of each that is sampled."""

import pytest

from tests.selection import Collected, kept


def test_slow_tests_are_left_out() -> None:
    assert kept([Collected("a"), Collected("b", is_slow=True), Collected("a")]) == [0, 2]


@pytest.mark.parametrize(("cases", "sample"), [(10, 1), (10, 3), (3, 5), (1, 1), (7, 7)])
def test_so_many_cases_of_samples_are_run_and_the_first(cases: int, sample: int) -> None:
    places = kept([Collected("a", sample=sample)] * cases)
    assert len(set(places)) == min(cases, sample)
    assert places[0] == 0
    assert places == kept([Collected("a", sample=sample)] * cases)


def test_stacked_parameters_have_all_of_their_values() -> None:
    """Ten of a grid of ten methods on four models."""
    places = kept([Collected("a", sample=10)] * 40)
    assert {place % 4 for place in places} == set(range(4))
    assert len({place // 4 for place in places}) > 5


def test_each_function_has_its_own_sample() -> None:
    tests = [
        Collected("a", sample=1),
        Collected("b", sample=2),
        Collected("a", sample=1),
        Collected("b", sample=2),
    ]
    assert kept(tests) == [0, 1, 3]
