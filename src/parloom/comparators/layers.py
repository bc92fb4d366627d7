"""Operators clustered into layers, between which pipelines are cut (Alpa: Zheng et al., OSDI 2022,
section 5.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from parloom.ir.factors import Factored, site_of
from parloom.ir.graph import Call, Graph
from parloom.ir.ops import op_of
from parloom.ir.stages import item_key, operands, results, stage_items

# A layer has at most this share more FLOPs than layers of equal size.
IMBALANCE = 0.5
# Bytes, and FLOPs, that differ by less than this share are the same.
SAME = 1e-4


@dataclass(frozen=True, slots=True)
class Chain:
    """The items of stages in execution order: FLOPs of their forward passes, and values that cross
    between them as (bytes, the item that makes it, the items that read it).
    """

    keys: tuple[str, ...]
    flops: tuple[float, ...]
    values: tuple[tuple[int, int, tuple[int, ...]], ...]


def chain_of(graph: Graph, factored: Factored) -> Chain:
    """The items of `graph` with what they compute and pass on."""
    keys = stage_items(graph)
    flops = dict.fromkeys(keys, 0.0)
    known = dict(_flops(graph, factored))
    for flat in graph.flat():
        key = flat.prefix or flat.node.key
        if key in flops:
            flops[key] += known[flat.function, flat.node.key]
    place = {key: index for index, key in enumerate(keys)}
    specs, made = graph.main.specs(), dict[str, int]()
    readers: dict[str, list[int]] = {}
    for item in graph.main.body:
        at = place.get(item_key(item))
        if at is not None:
            for name in dict.fromkeys(operands(item)):
                if name in made:
                    readers.setdefault(name, []).append(at)
            made |= dict.fromkeys(results(item), at)
    values = ((specs[name].num_bytes, made[name], tuple(at)) for name, at in readers.items())
    return Chain(keys, tuple(flops.values()), tuple(values))


def _flops(graph: Graph, factored: Factored) -> Iterator[tuple[tuple[str, str], float]]:
    for function in (graph.main, *graph.functions):
        specs = function.specs()
        for node in function.body:
            if not isinstance(node, Call):
                rule = factored.rule(function.name, node)
                yield (function.name, node.key), op_of(node).flops(site_of(node, specs), rule)


def clustered(chain: Chain, count: int) -> tuple[int, ...]:
    """The ends of at most `count` layers: the most bytes that enter a layer are the least, then all
    bytes together, then the squares of their FLOPs.

        G(k, q) = min over i of max(G(i - 1, q - 1), C(i, k)), where FLOP(i..k) <= 1.5 FLOP / count

    An item with more FLOPs than that is allowed them, and where no layers have so few, all have
    half as many again.
    """
    count = min(count, max(1, sum(flops > 0 for flops in chain.flops)))
    size = len(chain.keys)
    before = (0.0, *accumulate(chain.flops))
    most = max((1 + IMBALANCE) * before[-1] / count, *chain.flops)
    entering, limit = _entering(chain), inf
    ranges: dict[tuple[int, int], float] = {}
    while limit == inf:
        ranges = {
            (first, last): float(entering[first, last - 1])
            for last in range(1, size + 1)
            for first in range(last)
            if before[last] - before[first] <= most * (1 + SAME)
        }
        limit, most = _least_max(ranges, size, count), most * (1 + IMBALANCE)
    costs = {
        key: (sent, (before[key[1]] - before[key[0]]) ** 2)
        for key, sent in ranges.items()
        if sent <= limit * (1 + SAME)
    }
    return _least_sum(costs, size, count)


def _entering(chain: Chain) -> Mapping[tuple[int, int], int]:
    """C(i, k): the bytes that enter items i to k from earlier ones."""
    size = len(chain.keys)
    found = {}
    for first in range(size):
        enters = [0] * size
        for num_bytes, maker, readers in chain.values:
            inside = [reader for reader in readers if reader >= first]
            if maker < first and inside:
                enters[min(inside)] += num_bytes
        for last, total in enumerate(accumulate(enters)):
            found[first, last] = total
    return found


def _least_max(ranges: Mapping[tuple[int, int], float], size: int, count: int) -> float:
    """The least that the costliest of `count` ranges costs."""
    best = [0.0, *[inf] * size]
    for _ in range(count):
        now = [inf] * (size + 1)
        for (first, last), cost in ranges.items():
            now[last] = min(now[last], max(best[first], cost))
        best = now
    return best[size]


def _least_sum(
    costs: Mapping[tuple[int, int], tuple[float, float]], size: int, count: int
) -> tuple[int, ...]:
    """The ends of the `count` ranges that cost the least, in order of their parts."""
    worst = (inf, inf)
    best: list[tuple[float, float]] = [(0.0, 0.0), *[worst] * size]
    came: list[list[int]] = []
    for _ in range(count):
        now, begins = [worst] * (size + 1), [0] * (size + 1)
        for (first, last), (sent, square) in costs.items():
            total = best[first][0] + sent, best[first][1] + square
            if total < now[last]:
                now[last], begins[last] = total, first
        best = now
        came.append(begins)
    ends, at = [], size
    for begins in reversed(came):
        ends.append(at)
        at = begins[at]
    return tuple(reversed(ends))


def layers_of(chain: Chain, ends: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The items of every layer."""
    starts = (0, *ends[:-1])
    return tuple(chain.keys[first:last] for first, last in zip(starts, ends, strict=True))
