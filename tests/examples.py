"""How many random examples a test has: few by default, ten times as many in `make nightly`."""

from hypothesis import settings

DEFAULT = 100  # what hypothesis has where no profile says otherwise
TIMES = settings().max_examples // DEFAULT


def examples(count: int) -> settings:
    """The settings of a test that has `count` examples by default."""
    return settings(max_examples=count * TIMES)
