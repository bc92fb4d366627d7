"""What an algorithm of a collective sends over the links of a torus, on which its groups lie as an
embedding says.

Rings, exchanges with everybody and shifts go the ways of the embedding. Other algorithms go
dimension by dimension, which they can where all groups are products of places along them.
"""

from collections.abc import Iterator
from itertools import permutations

from parloom.cost.algorithms import (
    ALGORITHMS,
    ALL,
    IN_FLIGHT,
    PAIR,
    Leg,
    Order,
    Schedule,
    Span,
)
from parloom.cost.embedding import Embedding, Pattern
from parloom.cost.links import neighbor_bytes_per_s
from parloom.ir.mesh import Cluster

# A leg whose bytes are those of the busiest link, and whose messages count the links passed.
LOADED = "loaded"
# Algorithms that go the ways of the embedding, and how often they go around.
PASSES = {
    ("all_reduce", "ring"): 2,
    ("reduce_scatter", "ring"): 1,
    ("reduce_scatter", "ring_all_reduce"): 2,
    ("all_gather", "ring"): 1,
}
# In-switch reduction has no switch here; the others have whole tensors on one link.
NOT_HERE = frozenset({"switch", "parameter_server", "naive", "send", "double_tree"})


def schedules(
    kind: str, names: tuple[str, ...], num_bytes: float, embedding: Embedding, rails: bool
) -> Iterator[tuple[str, Order, Schedule]]:
    """Of each algorithm in `names`: its name, the dimensions in the order that it takes, legs."""
    inside, spans = 1, []
    for one in embedding.along:
        spans.append(Span(one.level, one.size, inside))
        inside *= one.size
    crossed = tuple(Span(level, 2, 1) for level, load in enumerate(embedding.pairs.loads) if load)
    for name in names:
        legs = _embedded(kind, name, num_bytes, embedding, rails)
        if legs is not None:
            yield name, crossed, Schedule(legs, pipelined=True)
        elif spans and name not in NOT_HERE and (name != "torus" or len(spans) > 1):
            for order in permutations(spans) if name != "torus" else (tuple(spans),):
                yield name, order, ALGORITHMS[kind][name](num_bytes, order, rails)


def rate(leg: Leg, embedding: Embedding, cluster: Cluster) -> float:
    """Bytes/s of the busiest link for what a leg counts."""
    link = neighbor_bytes_per_s(cluster.levels[leg.level])
    return link if leg.pattern == LOADED else link / _along(leg, embedding)[0]


def links_passed(leg: Leg, embedding: Embedding) -> float:
    """How many links each of a leg's messages passes."""
    return 1.0 if leg.pattern == LOADED else _along(leg, embedding)[1]


def _along(leg: Leg, embedding: Embedding) -> tuple[float, float]:
    (own,) = (one for one in embedding.along if one.level == leg.level)
    return own.every if leg.pattern == ALL else own.pair if leg.pattern == PAIR else own.ring


def _embedded(
    kind: str, name: str, num_bytes: float, embedding: Embedding, rails: bool
) -> tuple[Leg, ...] | None:
    """The legs of an algorithm that goes the ways of the embedding."""
    peers = embedding.size - 1
    share = peers / embedding.size * num_bytes
    if (kind, name) in PASSES:
        passes = PASSES[kind, name]
        return _legs(embedding.ring, passes * share, passes)
    if name == "chain":
        return _legs(embedding.ring, num_bytes, 1)
    if (kind, name) == ("all_to_all", "direct"):
        return _legs(embedding.pairs, share, -(-peers // (IN_FLIGHT if rails else 1)))
    if kind == "shift":
        return _legs(embedding.shift, num_bytes, 1)
    if kind == "halo_exchange":
        return _legs(embedding.row, num_bytes, 2)
    return None


def _legs(pattern: Pattern, num_bytes: float, rounds: int) -> tuple[Leg, ...]:
    """`num_bytes` for each byte that the pattern counts; messages are of the busiest level."""
    busiest = max(range(len(pattern.loads)), key=lambda level: pattern.loads[level])
    return tuple(
        Leg(
            level,
            num_bytes * load,
            num_bytes * mean,
            round(rounds * pattern.hops) if level == busiest else 0,
            pattern=LOADED,
        )
        for level, (load, mean) in enumerate(zip(pattern.loads, pattern.means, strict=True))
        if load
    )
