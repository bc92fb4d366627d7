"""Which tests `make test` runs: all but the slow ones, and of sampled ones so many of their cases.

`--whole` (as in `make nightly`) runs all, and so does a command that names a test by `::`, asks for
marks by `-m`, or rewrites the outputs of pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, slots=True)
class Collected:
    """A collected test: the function that it is a case of, and what its marks say."""

    function: str
    is_slow: bool = False
    sample: int | None = None
    """How many of its function's cases are run."""


@dataclass(slots=True)
class _Cases:
    sample: int
    places: list[int] = field(default_factory=list)


def kept(tests: Sequence[Collected]) -> list[int]:
    """The places of those that are run: of samples the first case, and others drawn alike in every
    run. At equal steps, stacked parameters would never meet some of their values.
    """
    sampled: dict[str, _Cases] = {}
    for place, test in enumerate(tests):
        if test.sample is not None:
            sampled.setdefault(test.function, _Cases(test.sample)).places.append(place)
    chosen = {place for one in sampled.values() for place in _drawn(one.places, one.sample)}
    return [
        place
        for place, test in enumerate(tests)
        if not test.is_slow and (test.sample is None or place in chosen)
    ]


def _drawn(places: Sequence[int], number: int) -> list[int]:
    """So many of these, the first among them."""
    first, *others = places
    return [first, *Random(0).sample(others, min(number - 1, len(others)))]
