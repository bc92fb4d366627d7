"""Prices are vectors: compute time and traffic per topology level; never one number.

What a price costs in seconds depends on the cluster and on what overlaps, and is decided later.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Traffic = tuple[int, float, int]
"""Topology level, bytes that one device sends over it, messages one after the other."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of compute, and `Traffic` per level (sorted, one entry a level)."""

    compute_s: float = 0.0
    comm: tuple[Traffic, ...] = ()

    def __post_init__(self) -> None:
        merged: dict[int, tuple[float, int]] = {}
        for level, num_bytes, messages in self.comm:
            old_bytes, old_messages = merged.get(level, (0.0, 0))
            merged[level] = (old_bytes + num_bytes, old_messages + messages)
        comm = tuple((level, *merged[level]) for level in sorted(merged))
        object.__setattr__(self, "comm", comm)

    def __add__(self, other: "Price") -> "Price":
        return Price(self.compute_s + other.compute_s, (*self.comm, *other.comm))

    def times(self, count: int) -> "Price":
        """This price `count` times over."""
        comm = tuple((level, size * count, messages * count) for level, size, messages in self.comm)
        return Price(self.compute_s * count, comm)


def total(prices: Iterable[Price]) -> Price:
    """The sum of many prices, in linear time."""
    listed = list(prices)
    return Price(
        sum(p.compute_s for p in listed),
        tuple(traffic for p in listed for traffic in p.comm),
    )
