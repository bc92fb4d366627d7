"""How far tensors are apart."""

from math import inf, isnan, nan

import pytest

from parloom.execute.relative import Difference, judged, largest


@pytest.mark.parametrize("errors", [(nan, 0.0), (0.0, nan), (inf, nan), (nan, inf)])
def test_what_is_no_number_is_the_largest(errors: tuple[float, ...]) -> None:
    """Python's own `max` returns the first of two that cannot be compared."""
    assert isnan(largest(errors))
    found = judged([Difference(str(error), error) for error in errors], 1.0)
    assert isnan(found.worst)
    assert found.first is not None


def test_the_largest_of_numbers() -> None:
    assert largest([0.5, inf, 1.0]) == inf
    assert largest([0.5, 0.0]) == 0.5
    assert judged([Difference("a", 0.5), Difference("b", 1.0)], 1.0).first is None
