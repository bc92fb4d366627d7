"""Other functions in the place of those of a class or module, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Another attribute of a class or module, for a while."""
    own = name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old) if own else delattr(owner, name)
