"""Series and parallel parts of a directed acyclic graph of items.

An order is series-parallel where it is made of single items by putting orders after each other and
beside each other: where no four items are a < c, b < c, b < d with no other relation between them
(Valdes, Tarjan, Lawler, SIAM J. Comput. 11, 1982, section 2). Their reductions build the tree from
its leaves. Here it is cut from its root, on sets of items as bits: parts in series are those
between which all is ordered, parallel ones are not connected. That costs more than linear time, and
a set that is neither shows where an order has to be added; all else keeps its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Parts within parts beyond which items stay in the order in which they are given.
DEEPEST = 100


@dataclass(frozen=True, slots=True)
class Series:
    """Parts of which each one is before the next."""

    parts: tuple["Tree", ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts between which nothing is ordered."""

    parts: tuple["Tree", ...]


Tree = int | Series | Parallel
"""An item, or parts, which are never of the kind of what they are parts of."""


def decompose(count: int, edges: Iterable[tuple[int, int]]) -> Tree:
    """The tree of `count` items, numbered so that edges go to later ones: one item at least.

    Its order contains that of the edges, and is the same where that is series-parallel. Parallel
    parts come in the order of their first items. Raises `ValueError` for other edges.
    """
    after, before = [0] * count, [0] * count
    by_target = sorted(edges, key=lambda edge: edge[1])
    for source, target in by_target:
        if not 0 <= source < target < count:
            raise ValueError(f"edge {source} -> {target} does not go to a later one of {count}")
        before[target] |= 1 << source | before[source]
    for source, target in sorted(by_target, reverse=True):
        after[source] |= 1 << target | after[target]
    return _Order(after, before).tree((1 << count) - 1)


def items_in(tree: Tree) -> tuple[int, ...]:
    """The items of a tree, each behind all that are before it."""
    if isinstance(tree, int):
        return (tree,)
    return tuple(item for part in tree.parts for item in items_in(part))


class _Order:
    """Sets of items as bits: what comes after each item, and before it."""

    def __init__(self, after: list[int], before: list[int]) -> None:
        self.after, self.before = after, before

    def tree(self, items: int, depth: int = 0) -> Tree:
        found: list[Tree] = []
        left = [items]
        while left:
            part = left.pop()
            cuts = [part] if depth < DEEPEST else [1 << item for item in _bits(part)]
            if len(cuts) == 1:
                cuts = list(self.in_series(part))
            if len(cuts) > 1:
                left += reversed(cuts)
            elif part.bit_count() == 1:
                found.append(part.bit_length() - 1)
            elif len(beside := list(self.connected(part))) > 1:
                found.append(Parallel(tuple(self.tree(own, depth + 1) for own in beside)))
            else:
                first = self.least_cut(part)
                left += (part & ~first, first)
        return found[0] if len(found) == 1 else Series(tuple(found))

    def in_series(self, items: int) -> Iterator[int]:
        """The parts of `items` of which each is before all of the next ones."""
        part, common, rest = 0, -1, items
        for item in _bits(items):
            part |= 1 << item
            rest &= ~(1 << item)
            common &= self.after[item]
            if not rest & ~common:
                yield part
                part, common = 0, -1

    def connected(self, items: int) -> Iterator[int]:
        """The parts of `items` between which nothing is ordered."""
        while items:
            part, new = 0, items & -items
            while new:
                part |= new
                near = 0
                for item in _bits(new):
                    near |= self.after[item] | self.before[item]
                new = near & items & ~part
            yield part
            items &= ~part

    def least_cut(self, items: int) -> int:
        """The items that are at most so many steps from a start, such that the smallest share of
        the pairs is ordered anew where they come before all others.
        """
        found: list[int] = []
        near = 0
        while left := items & ~near:
            near |= sum(1 << item for item in _bits(left) if not self.before[item] & left)
            found.append(near)
        return min(found[:-1], key=lambda first: self.added(first, items & ~first))

    def added(self, first: int, second: int) -> tuple[float, int]:
        """The share of the pairs between two sets that are not ordered yet, and how unequal in size
        the sets are.
        """
        pairs = sum((second & ~self.after[item]).bit_count() for item in _bits(first))
        sizes = first.bit_count(), second.bit_count()
        return pairs / (sizes[0] * sizes[1]), abs(sizes[0] - sizes[1])


def _bits(items: int) -> Iterator[int]:
    """The items of a set, in ascending order."""
    while items:
        yield (items & -items).bit_length() - 1
        items &= items - 1
