"""What each algorithm of a collective sends over each level of the topology; no time yet.

A group of N ranks crosses some levels; at each it has ranks below `size` children, `inside` of them
below every child. An algorithm goes through the levels in some order, and its legs say what crosses
each. S is the size of the whole tensor: what all_reduce and broadcast hold on every rank, the
result of all_gather, the input of reduce_scatter, the local tensor of all_to_all, send and shift.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
MPICH" (2005); Sanders, Speck, Traeff, "Two-tree algorithms" (2009); Patarasuk, Yuan, "Bandwidth
optimal all-reduce" (2009); the lecture's table as corrected in the tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType

# How a leg uses a fabric that is no switch: both neighbors, the next one, a partner, everybody.
RING, NEXT, PAIR, ALL = "ring", "next", "pair", "all"


@dataclass(frozen=True, slots=True)
class Span:
    """One level that a group crosses: children with ranks, and ranks below each child."""

    level: int
    size: int
    inside: int


Order = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Leg:
    """What crosses one level.

    `num_bytes` is what a sending device sends, one message after the other; `senders` is the share
    of the group's devices below one child that send at the same time; `mean_bytes` is what a device
    of the group sends on average.
    """

    level: int
    num_bytes: float
    mean_bytes: float
    messages: int
    senders: float = 1.0
    pattern: str = RING


@dataclass(frozen=True, slots=True)
class Schedule:
    """The legs of one algorithm; where it is `pipelined`, all levels work at the same time."""

    legs: tuple[Leg, ...]
    pipelined: bool = False


Algorithm = Callable[[float, Order, bool], Schedule]
"""(S, levels in the order in which they are gone through, rails) -> legs. With rails, the library
gives every device of a node its own link to the network, and has several sends under way."""

# Sends to different peers that NCCL has under way at once (recalled: its point-to-point rounds).
IN_FLIGHT = 8


def group_size(order: Order) -> int:
    """The number of ranks."""
    return prod(span.size for span in order)


def ring_edges(order: Order) -> dict[int, int]:
    """How many edges of the ring cross each level, where the first level's index runs fastest."""
    edges = dict.fromkeys((span.level for span in order), 0)
    rest = group_size(order)
    crossed = 0
    for span in order:
        rest //= span.size
        crossed = max(crossed, span.level)  # the indices before this one wrap around
        edges[crossed] += (span.size - 1) * rest
    edges[crossed] += 1
    return edges


def _ring(passes: int, num_bytes: float, order: Order, rails: bool) -> Schedule:
    """`passes` times around the ring, an N-th of the tensor in each of N-1 steps."""
    ranks = group_size(order)
    return _around(passes, passes * (ranks - 1) / ranks * num_bytes, order, rails)


def _chain(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """The whole tensor, in pieces, along the ring."""
    return _around(1, num_bytes, order, rails)


def _around(passes: int, on_edge: float, order: Order, rails: bool) -> Schedule:
    """`on_edge` bytes on every edge of the ring.

    A node's edges may be many rings with one link each (`rails`), or one ring that leaves it over
    one link. What leaves it passes the levels below as well.
    """
    ranks, edges = group_size(order), ring_edges(order)
    skipped = min(level for level, count in edges.items() if count)  # N-1 steps, N edges
    legs = []
    for span in order:
        crossing = sum(count for level, count in edges.items() if level >= span.level)
        leaving = crossing * span.inside / ranks
        mean = on_edge * leaving / span.inside
        steps = passes * (edges[span.level] - (span.level == skipped))
        if rails:
            legs.append(Leg(span.level, mean, mean, steps))
        else:
            legs.append(Leg(span.level, on_edge, mean, steps, leaving / span.inside))
    return Schedule(tuple(legs), pipelined=True)


def _tree(passes: int, num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Binomial trees, whole tensors: `passes` = 1 down, 2 up and down."""
    ranks, rest = group_size(order), group_size(order)
    legs = []
    for position, span in enumerate(order):
        rest //= span.size
        # One tree for every rank that the levels still to come tell apart.
        together = prod(s.size for s in order[position + 1 :] if s.level < span.level)
        depth = passes * _depth(span.size)
        mean = passes * num_bytes * (span.size - 1) * rest / ranks
        share = together / span.inside
        legs.append(Leg(span.level, depth * num_bytes, mean, depth, share, PAIR))
    return Schedule(tuple(legs))


def _double_tree(passes: int, num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Two pipelined trees with half of the tensor each, every rank inside one of them and a leaf
    of the other: as NCCL does it, with chains between the devices of a node.
    """
    legs = []
    for span in order:
        mean = passes * (span.size - 1) / span.size * num_bytes / span.inside
        steps = span.size - 1 if span.level == 0 else _depth(span.size)
        legs.append(Leg(span.level, mean, mean, passes * steps))
    return Schedule(tuple(legs), pipelined=True)


def _butterfly(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Recursive doubling: partners exchange whole tensors.

    Ranks beyond a power of two hand theirs to a partner first and get the result at the end.
    """
    legs = []
    for span in order:
        steps = span.size.bit_length() - 1 + 2 * _uneven(span.size)
        size = steps * num_bytes
        legs.append(Leg(span.level, size, size, steps, pattern=PAIR))
    return Schedule(tuple(legs))


def _halving_doubling(passes: int, num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Partners exchange halves, then halves of halves: the first level carries the most."""
    legs = []
    for span in order:
        extra = passes * _uneven(span.size)
        steps = passes * (span.size.bit_length() - 1) + extra
        size = (passes * (span.size - 1) / span.size + extra) * num_bytes
        legs.append(Leg(span.level, size, size, steps, pattern=PAIR))
        num_bytes /= span.size
    return Schedule(tuple(legs))


def _hierarchical(passes: int, num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Rings level by level: each level works on what the level before has left of the tensor."""
    legs = []
    for span in order:
        size = passes * (span.size - 1) / span.size * num_bytes
        legs.append(Leg(span.level, size, size, passes * (span.size - 1)))
        num_bytes /= span.size
    return Schedule(tuple(legs))


def _torus(passes: int, num_bytes: float, order: Order, rails: bool) -> Schedule:
    """The tensor in as many parts as there are dimensions; each part starts with another one, so
    that all links are busy.
    """
    sizes = dict.fromkeys((span.level for span in order), 0.0)
    for start in range(len(order)):
        rotated = (*order[start:], *order[:start])
        part = _hierarchical(passes, num_bytes / len(order), rotated, rails)
        for leg in part.legs:
            sizes[leg.level] += leg.num_bytes
    legs = (Leg(s.level, sizes[s.level], sizes[s.level], passes * (s.size - 1)) for s in order)
    return Schedule(tuple(legs), pipelined=True)


def _switch(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """The switch adds up what all send and hands it to all (NVLink SHARP): each rank sends its
    tensor for others to read, and an N-th that it has read and sends to all.
    """
    (span,) = order
    size = num_bytes * (1 + 1 / span.size)
    return Schedule((Leg(span.level, size, size, 2 * (span.size - 1), pattern=ALL),))


def _parameter_server(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """One server beside the ranks: all push to its link, then all pull from it."""
    top = order[-1]
    through = 2 * group_size(order) * num_bytes
    return Schedule((Leg(top.level, through, 2 * num_bytes, 2, 1 / top.inside, ALL),))


def _naive(
    per_peer: Callable[[int], float], num_bytes: float, order: Order, rails: bool
) -> Schedule:
    """Everybody sends a share of the tensor to everybody at once."""
    each = per_peer(group_size(order)) * num_bytes
    top = max(span.level for span in order)
    legs = []
    for span in order:
        size = each * _peers(span)
        legs.append(Leg(span.level, size, size, int(span.level == top), pattern=ALL))
    return Schedule(tuple(legs), pipelined=True)


def _naive_broadcast(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """The root sends the tensor to everybody."""
    ranks, top = group_size(order), max(span.level for span in order)
    legs = []
    for span in order:
        size, message = num_bytes * _peers(span), int(span.level == top)
        legs.append(Leg(span.level, size, size / ranks, message, 1 / span.inside, ALL))
    return Schedule(tuple(legs), pipelined=True)


def _direct(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """An N-th of the tensor goes to each of the others, over the level that joins the pair."""
    ranks = group_size(order)
    legs = []
    for span in order:
        size = num_bytes * _peers(span) / ranks
        rounds = -(-_peers(span) // (IN_FLIGHT if rails else 1))
        legs.append(Leg(span.level, size, size, rounds, pattern=ALL))
    return Schedule(tuple(legs), pipelined=True)


def _staged(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """all_to_all level by level: more bytes, fewer messages."""
    legs = []
    for span in order:
        size = (span.size - 1) / span.size * num_bytes
        legs.append(Leg(span.level, size, size, span.size - 1, pattern=ALL))
    return Schedule(tuple(legs))


def _send(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """One device sends to one other."""
    top = order[-1]
    return Schedule((Leg(top.level, num_bytes, num_bytes, 1, 1 / top.inside, PAIR),))


def _shift(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Every rank sends to the next one of the ring at once; each edge is one pair of devices."""
    ranks, edges = group_size(order), ring_edges(order)
    legs = []
    for span in order:
        crossing = sum(count for level, count in edges.items() if level >= span.level)
        share = crossing / ranks
        last = int(span is order[-1])
        legs.append(Leg(span.level, num_bytes, num_bytes * share, last, share, NEXT))
    return Schedule(tuple(legs), pipelined=True)


def _halo(num_bytes: float, order: Order, rails: bool) -> Schedule:
    """Neighbors in a row of ranks, both ways: one of them is across the slowest level, and may get
    all of it.
    """
    level = max(span.level for span in order)
    return Schedule((Leg(level, num_bytes, num_bytes, 2, pattern=NEXT),))


def _peers(span: Span) -> int:
    """How many ranks of the group a rank reaches over this level."""
    return span.inside * (span.size - 1)


def _depth(size: int) -> int:
    return (size - 1).bit_length()


def _uneven(size: int) -> int:
    return int(size & (size - 1) != 0)


def _a_part(ranks: int) -> float:
    return 1 / ranks


def _scattering() -> Mapping[str, Algorithm]:
    """reduce_scatter and all_gather are each other backwards and cost the same."""
    return MappingProxyType(
        {
            "ring": partial(_ring, 1),
            "halving_doubling": partial(_halving_doubling, 1),
            "hierarchical": partial(_hierarchical, 1),
            "torus": partial(_torus, 1),
            "naive": partial(_naive, _a_part),
        }
    )


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {
                "ring": partial(_ring, 2),
                "double_tree": partial(_double_tree, 2),
                "switch": _switch,
                "halving_doubling": partial(_halving_doubling, 2),
                "hierarchical": partial(_hierarchical, 2),
                "torus": partial(_torus, 2),
                "tree": partial(_tree, 2),
                "butterfly": _butterfly,
                "naive": partial(_naive, lambda ranks: 1.0),
                "parameter_server": _parameter_server,
            }
        ),
        "reduce_scatter": MappingProxyType({**_scattering(), "ring_all_reduce": partial(_ring, 2)}),
        "all_gather": _scattering(),
        "all_to_all": MappingProxyType({"direct": _direct, "hierarchical": _staged}),
        "broadcast": MappingProxyType(
            {"chain": _chain, "tree": partial(_tree, 1), "naive": _naive_broadcast}
        ),
        "send": MappingProxyType({"send": _send}),
        "shift": MappingProxyType({"ring": _shift}),
        "halo_exchange": MappingProxyType({"send": _halo}),
    }
)
"""kind -> algorithm name -> algorithm; every back end has some of them."""
