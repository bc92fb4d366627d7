"""Tensors, and what can be made of them, of which operators are made (`exact.py`).

A tensor is whatever an algebra takes for one: an array of numbers, or elements in normal form. So
are sizes, which are numbers or symbols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Size = Any
"""An extent of a dim: a number, or what an algebra has for one that is not known."""
Names = Sequence[str]


@dataclass(frozen=True, slots=True)
class Window:
    """`size` places `dilation` apart, at every `stride`-th place of a dim and of so many zeros
    `before` and `after` it.
    """

    size: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def less(self) -> int:
        """By how many places, and one, windows at each place are fewer than places of the dim."""
        return (self.size - 1) * self.dilation + 1 - self.before - self.after


class Algebra(Protocol[T]):
    """Operations of tensors."""

    @property
    def one(self) -> Size:
        """The size of a dim of one element."""
        ...

    def count(self, size: Size) -> int:
        """A size that is a number in every algebra, as that of a kernel."""
        ...

    def number(self, count: int) -> Size:
        """A number as a size."""
        ...

    def dims(self, part: T) -> tuple[Size, ...]:
        """The sizes of a tensor."""
        ...

    def product(self, names: Sequence[Names], result: Names, parts: Sequence[T]) -> T:
        """The product of all, summed over the names that the result lacks; a dim of one element is
        repeated along the others of its name.
        """
        ...

    def add(self, one: T, other: T) -> T:
        """The sum, dims aligned from the right, those of one element repeated."""
        ...

    def scale(self, part: T, factor: Fraction) -> T:
        """Each element times a number."""
        ...

    def divide(self, part: T, size: Size) -> T:
        """Each element by a size."""
        ...

    def fill(self, value: Fraction, shape: Sequence[Size]) -> T:
        """The same number everywhere."""
        ...

    def opaque(self, name: str, *parts: T) -> T:
        """A function of elements at one place, of which no more is known than its name."""
        ...

    def rows(self, name: str, part: T, dim: int) -> T:
        """A function of all elements along a dim, and of the place there, likewise."""
        ...

    def concat(self, parts: Sequence[T], dim: int) -> T:
        """One after the other."""
        ...

    def split(self, part: T, dim: int, sizes: Sequence[Size]) -> list[T]:
        """Parts of these sizes along a dim, which they fill."""
        ...

    def take(self, part: T, dim: int, at: Sequence[int]) -> T:
        """The places of these numbers along a dim, negative ones counted from its end."""
        ...

    def reshape(self, part: T, shape: Sequence[Size]) -> T:
        """The same elements in the same order."""
        ...

    def apart(self, part: T, dim: int, outer: Size) -> T:
        """A dim as two, of which the first one has size `outer`."""
        ...

    def lookup(self, table: T, places: T) -> T:
        """Rows of a table, one for each of `places`."""
        ...

    def windows(self, part: T, dim: int, window: Window) -> T:
        """Windows along a dim, their places as a dim behind it; zeros where there are none."""
        ...


def aligned(*ranks: int) -> tuple[list[list[str]], list[str]]:
    """Names for the dims of tensors of these ranks, alike from the last one on; and all names."""
    names = [f"d{i}" for i in range(max(ranks))]
    return [names[len(names) - rank :] for rank in ranks], names
