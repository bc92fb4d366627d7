"""The mesh of a generated program: named axes over ranks, and at most one axis in time.

A coordinate along an axis is a mixed-radix number over its prime axes, most significant first; a
coordinate along a tuple of axes continues the same way, first axis most significant.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

from parloom.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: `primes` are (size, rank stride) pairs, most significant first.

    An axis of size > 1 without primes is in time: its coordinate is the microbatch.
    """

    name: str
    size: int
    primes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.primes and prod(size for size, _ in self.primes) != self.size:
            raise LayoutError(f"axis {self.name!r} of size {self.size} has primes {self.primes}")

    @property
    def in_time(self) -> bool:
        """Whether every rank visits all of this axis, one microbatch after the other."""
        return self.size > 1 and not self.primes

    def coordinate(self, rank: int) -> int:
        """Position of `rank` along this axis, in [0, size); 0 along an axis in time."""
        index = 0
        for size, stride in self.primes:
            index = index * size + rank // stride % size
        return index


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes, outermost first; the sizes of those in space multiply to the number of ranks."""

    axes: tuple[Axis, ...]

    @property
    def num_ranks(self) -> int:
        return prod(axis.size for axis in self.axes if not axis.in_time)

    @property
    def space(self) -> tuple[str, ...]:
        """Names of the axes that are made of ranks."""
        return tuple(axis.name for axis in self.axes if not axis.in_time)

    @property
    def time(self) -> str | None:
        """Name of the axis in time, or None."""
        return next((axis.name for axis in self.axes if axis.in_time), None)

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"no mesh axis {name!r}; the mesh has {[a.name for a in self.axes]}")

    def size(self, axes: tuple[str, ...]) -> int:
        """Product of the sizes of `axes`."""
        return prod([self[name].size for name in axes])

    def coordinates(self, rank: int, microbatch: int = 0) -> dict[str, int]:
        """Coordinate of `rank` along every axis, the axis in time included."""
        return {
            axis.name: microbatch if axis.in_time else axis.coordinate(rank) for axis in self.axes
        }

    def index(self, axes: tuple[str, ...], rank: int) -> int:
        """Position of `rank` in its group of `axes`."""
        index = 0
        for name in axes:
            index = index * self[name].size + self[name].coordinate(rank)
        return index

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, in the order of the group."""
        primes = [prime for name in axes for prime in self[name].primes]
        base = rank - sum(rank // stride % size * stride for size, stride in primes)
        digits = product(*(range(size) for size, _ in primes))
        return tuple(
            base + sum(d * stride for d, (_, stride) in zip(index, primes, strict=True))
            for index in digits
        )


def grid(sizes: dict[str, int]) -> Mesh:
    """A mesh of the given axis sizes, outermost first: the last axis has rank stride 1."""
    axes: list[Axis] = []
    stride = prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        axes.append(Axis(name, size, ((size, stride),) if size > 1 else ()))
    return Mesh(tuple(axes))
