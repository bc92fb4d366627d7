"""The cuts of a small model into stages on groups of devices: which there are, and how many.

A stage is what one downward-closed set of items has beyond a smaller one, so that values go to
later stages only, whatever the graph.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import comb, factorial

import numpy as np
from numpy.typing import NDArray

# Stages of a model and microbatches on them, with their groups, that are all looked at.
MOST_SPLITS = 150_000
MOST_DEVICES = 8
# Sets of items between which stages are cut.
MOST_SETS = 40


def item_sets(count: int, edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The sets of items, as bits, that have all that their items read, the smallest first; those of
    execution order alone where there are more than `MOST_SETS`.
    """
    reads = [0] * count
    for source, target in edges:
        reads[target] |= 1 << source
    found, new = {0}, [0]
    while new and len(found) <= MOST_SETS:
        some = new.pop()
        for item in range(count):
            larger = some | 1 << item
            if larger not in found and reads[item] & ~some == 0:
                found.add(larger)
                new.append(larger)
    if new:
        found = {(1 << n) - 1 for n in range(count + 1)}
    return tuple(sorted(found, key=lambda some: (some.bit_count(), some)))


@dataclass(frozen=True, slots=True)
class Kind:
    """Splits that differ in their cuts only: microbatches, the group of each stage, the devices of
    each group.
    """

    count: int
    groups: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Splits of one kind: the sets between their stages, [split, stage + 1], by their places."""

    kind: Kind
    chains: NDArray[np.int64]


class CutSpace:
    """All cuts of a model of so many items, whose values go along `edges`, over groups that are all
    of `num_devices` together.
    """

    def __init__(self, num_items: int, edges: Sequence[tuple[int, int]], num_devices: int) -> None:
        self.num_items, self.num_devices = num_items, num_devices
        self.sets = item_sets(num_items, edges)
        beyond = [[a != b and a & ~b == 0 for b in self.sets] for a in self.sets]
        self.beyond = np.array(beyond)

    def kinds(self, sizes_of: Mapping[int, Collection[int]]) -> list[Kind]:
        """All kinds of splits over groups of these sizes, by the number of microbatches; those of
        regular placements where there are more than `MOST_SPLITS`, none where these are too many.
        """
        devices, items = self.num_devices, self.num_items
        if devices > MOST_DEVICES:
            return []
        sizes = [
            (count, num, own)
            for count, some in sizes_of.items()
            for num in range(2, min(devices, items) + 1)
            for own in self._sizes(sorted(some), num)
        ]
        for placed_by, number in ((all_placements, stirling), (_regular, _num_regular)):
            if self._are_few(items, [groups for _, groups, _ in sizes], number):
                return [
                    Kind(count, placed, own)
                    for count, groups, own in sizes
                    for stages in range(groups, items + 1)
                    for placed in placed_by(stages, groups)
                ]
        return []

    def _sizes(self, sizes: Sequence[int], num_groups: int) -> Iterator[tuple[int, ...]]:
        """The devices of groups, each of which begins at a multiple of its own."""
        for own in product(sizes, repeat=num_groups):
            begins = [sum(own[:index]) for index in range(num_groups)]
            if any(begin % size for begin, size in zip(begins, own, strict=True)):
                continue
            if sum(own) == self.num_devices:
                yield own

    def _are_few(
        self, items: int, groups: Sequence[int], number: Callable[[int, int], int]
    ) -> bool:
        """Whether there are no more than `MOST_SPLITS`, placed on groups in so many ways."""
        beyond, ways, total = self.beyond.astype(float), np.zeros(len(self.sets)), 0.0
        ways[0] = 1
        for stages in range(1, items + 1):
            ways = ways @ beyond  # how many ways there are to cut so many stages
            if stages > 1:
                placed = sum(number(stages, some) for some in groups if some <= stages)
                total += float(ways[-1]) * placed
            if total > MOST_SPLITS:
                return False
        return True

    def chains(self, num_stages: int) -> NDArray[np.int64]:
        """The sets between stages, [way, stage + 1], by their places in `sets`."""
        last = len(self.sets) - 1
        longest = np.zeros(last + 1, dtype=np.int64)  # how many stages there may be after each set
        for some in reversed(range(last)):
            longest[some] = 1 + longest[self.beyond[some]].max()
        found = np.zeros((1, 1), dtype=np.int64)
        for left in reversed(range(num_stages)):
            nexts = longest >= left if left else np.arange(last + 1) == last
            ways, after = np.nonzero(self.beyond[found[:, -1]] & nexts)
            found = np.column_stack([found[ways], after])
        return found


def all_placements(num_stages: int, num_groups: int) -> Iterator[tuple[int, ...]]:
    """The group of each stage in all ways, groups numbered by their first stage."""

    def visit(groups: tuple[int, ...], used: int) -> Iterator[tuple[int, ...]]:
        left = num_stages - len(groups)
        if not left:
            yield groups
            return
        for group in range(min(used + 1, num_groups)):
            now = max(used, group + 1)
            if num_groups - now <= left - 1:
                yield from visit((*groups, group), now)

    yield from visit((), 0)


def stirling(num_stages: int, num_groups: int) -> int:
    """How many ways there are to share stages among groups (Stirling, second kind)."""
    signs = (
        (-1) ** left * comb(num_groups, left) * (num_groups - left) ** num_stages
        for left in range(num_groups)
    )
    found: int = sum(signs) // factorial(num_groups)
    return found


def _num_regular(num_stages: int, num_groups: int) -> int:
    return sum(1 for _ in _regular(num_stages, num_groups))


def _regular(num_stages: int, num_groups: int) -> Iterator[tuple[int, ...]]:
    """Those that are tried of large models; see `split.py`."""
    if num_stages % num_groups in (0, 1):
        yield tuple(stage % num_groups for stage in range(num_stages))
    if num_stages == 2 * num_groups:
        yield (*range(num_groups), *reversed(range(num_groups)))
