"""Orders of a model's items in which stages are ranges.

In execution order a model runs one branch after the other, or all of them side by side, as it was
written. Stages of parts of one branch are ranges in a depth-first order, stages that have a part of
each branch in an order by depth.
"""

from collections.abc import Sequence

Order = tuple[int, ...]


def orders(count: int, edges: Sequence[tuple[int, int]]) -> tuple[Order, ...]:
    """Execution order, by depth, and depth-first, those that differ: each item comes after those
    that it reads.
    """
    reads: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        reads[target].append(source)
    depths = [0] * count
    for item in range(count):
        depths[item] = max((1 + depths[one] for one in reads[item]), default=0)
    by_depth = sorted(range(count), key=depths.__getitem__)
    found = (tuple(range(count)), tuple(by_depth), _depth_first(count, edges, reads))
    return tuple(dict.fromkeys(found))


def _depth_first(
    count: int, edges: Sequence[tuple[int, int]], reads: Sequence[Sequence[int]]
) -> Order:
    """What an item needs comes just before it: from the last item backwards."""
    read = {source for source, _ in edges}
    found: dict[int, None] = {}
    waiting = [(item, False) for item in reversed(range(count)) if item not in read]
    while waiting:
        item, ready = waiting.pop()
        if item in found:
            continue
        if ready:
            found[item] = None
            continue
        waiting.append((item, True))
        waiting += [(one, False) for one in sorted(reads[item], reverse=True)]
    return tuple(found)
