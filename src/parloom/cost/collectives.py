"""Time of a collective on a topology: the fastest algorithm that the back end has, and what it
puts on every level.

    seconds = messages x latency x factor of the protocol + bytes / (rate x share of the protocol)

The second term is summed over levels that take turns, and the slowest of levels that are pipelined.
The constants of NCCL are fitted to nccl-tests tables of A100, H200 and B200 nodes;
`docs/explanation/collectives.md` has the residual, and `benchmarks/collectives.py` prints it row by
row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations
from math import prod
from types import MappingProxyType

from parloom.cost.algorithms import (
    ALGORITHMS,
    NEXT,
    PAIR,
    RING,
    Leg,
    Order,
    Schedule,
    Span,
    group_size,
)
from parloom.cost.embedding import Embedding
from parloom.cost.price import Traffic
from parloom.cost.torus import links_passed, rate, schedules
from parloom.errors import InputError, nearest
from parloom.ir.mesh import Cluster, Level, MeshAxis

Group = tuple[tuple[int, int], ...]
"""(topology level, ranks at that level), fastest level first; sizes multiply to the group's."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a library moves bytes: latency against the link's, and share of its bandwidth."""

    name: str
    latency: float
    share: float


@dataclass(frozen=True, slots=True)
class Backend:
    """What a library does: the algorithms it has per kind, and its protocols.

    `rails`: every device of a node uses its own link to the network. `orders`: it may go through
    the levels in any order, where others number their ranks as the topology nests. `turns`: where
    the directions of a pair take turns, a collective of p ranks is a + b / (p - 1) times slower.
    `scratch`: the part of the whole tensor of which it makes a copy of its own while it runs.
    `slows`: by how much kernels take longer beside a collective, which has cores and memory
    bandwidth of the same device.
    """

    algorithms: Mapping[str, tuple[str, ...]]
    protocols: tuple[Protocol, ...] = (Protocol("", 1.0, 1.0),)
    rails: bool = True
    orders: bool = False
    turns: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scratch: Mapping[str, float] = field(default_factory=dict)
    slows: float = 0.0


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        # LL, LL128 and Simple trade latency for bandwidth. Their shares and relative latencies are
        # fitted; NCCL's own model has 1/4 to 1/2, 0.92 and 1, and latencies as 0.6, 1.9 and 3.4
        # (src/graph/tuning.cc). The algorithms of each kind are those of the same file.
        "nccl": Backend(
            MappingProxyType(
                {
                    "all_reduce": ("ring", "double_tree", "switch"),
                    "reduce_scatter": ("ring",),
                    "all_gather": ("ring",),
                    "all_to_all": ("direct",),
                    "broadcast": ("chain",),
                }
            ),
            (Protocol("LL", 1.0, 0.38), Protocol("LL128", 1.5, 0.92), Protocol("Simple", 2.5, 1.0)),
            # Micro-benchmark: computing takes 18.9 % longer beside collectives, in the mean over
            # A100, H100, MI210 and MI250 (arXiv:2507.03114). 24 channels of 132 cores are 18 %.
            slows=0.189,
        ),
        # Bytes on the wire were counted and times measured over shaped links of 0.1 to 1 Gbit/s
        # with torch 2.13: reduce_scatter moves what all_reduce moves, and broadcast is a tree.
        # all_gather took 1.7 of bytes / rate between two ranks, which send to each other over one
        # socket, and 1.1 to 1.3 among four; all_to_all 2.2 and 1.6 to 1.75.
        "gloo": Backend(
            MappingProxyType(
                {
                    "all_reduce": ("ring",),
                    "reduce_scatter": ("ring_all_reduce",),
                    "all_gather": ("ring",),
                    "all_to_all": ("direct",),
                    "broadcast": ("tree",),
                }
            ),
            rails=False,
            # A shift is an all_to_all in which a rank sends to one other.
            turns=MappingProxyType(
                {"all_gather": (1.0, 0.6), "all_to_all": (1.5, 0.6), "shift": (1.5, 0.6)}
            ),
            # torch's ProcessGroupGloo gathers into flat memory and all-reduces a clone; counted
            # with torch 2.13, as are the others, which need nothing of torch's allocator.
            scratch=MappingProxyType({"all_gather": 1.0, "reduce_scatter": 1.0}),
        ),
        # Devices that none of the back ends above runs on: the best of what libraries have.
        "other": Backend(
            MappingProxyType(
                {
                    "all_reduce": (
                        *("ring", "double_tree", "switch", "halving_doubling", "hierarchical"),
                        *("torus", "tree", "butterfly"),
                    ),
                    "reduce_scatter": ("ring", "halving_doubling", "hierarchical", "torus"),
                    "all_gather": ("ring", "halving_doubling", "hierarchical", "torus"),
                    "all_to_all": ("direct", "hierarchical"),
                    "broadcast": ("chain", "tree"),
                }
            ),
            orders=True,
        ),
    }
)

# Share of the ring's bandwidth that other algorithms of NCCL reach. Trees: NVLSTree over 4 nodes of
# 8 H200, 310 of 365 GB/s. Switches: fitted to H200 and B200 of 5 to 8 devices; NCCL's own model has
# 0.85 for Hopper and 0.74 for Blackwell.
SHARE: Mapping[str, float] = MappingProxyType({"double_tree": 0.85, "switch": 0.82})


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: how it is done, how long it takes alone, and what it puts on each level.

    `latency_s` is the part of `seconds` in which no link is busy. `traffic` is what a device sends
    on average, `busy` how long each level has work at its rate, against the others; `order` names
    the levels in the order in which the algorithm goes through them.
    """

    kind: str
    algorithm: str
    protocol: str
    order: tuple[int, ...]
    seconds: float
    latency_s: float
    traffic: tuple[Traffic, ...]
    busy: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        """`ring LL128`, with the order of levels where it is not fastest first."""
        words = [self.algorithm, self.protocol]
        if list(self.order) != sorted(self.order):
            words.append("over levels " + ", ".join(map(str, self.order)))
        return " ".join(word for word in words if word)


NOTHING = Collective("", "", "", (), 0.0, 0.0, ())
"""A collective of one rank."""


def group_of(axes: tuple[MeshAxis, ...]) -> Group:
    """How many ranks of the joint group of `axes` each topology level joins."""
    sizes: dict[int, int] = {}
    for prime in (p for axis in axes for p in axis.primes):
        sizes[prime.level] = sizes.get(prime.level, 1) * prime.size
    return tuple(sorted(sizes.items()))


@lru_cache(maxsize=65536)
def collective(
    kind: str,
    num_bytes: float,
    group: Group,
    cluster: Cluster,
    algorithm: str | None = None,
    alone: bool = False,
    embedding: Embedding | None = None,
) -> Collective:
    """The fastest way to do `kind` over `group`; see `algorithms` for what `num_bytes` counts.

    By default every rank of the cluster takes part, each in its own group, and they share uplinks;
    `alone`: nobody else sends. `algorithm` asks for that one, whether the back end has it or not.
    On a torus, groups are neighbors along its dimensions unless an `embedding` says where they lie;
    then all of them send, by any algorithm.
    Raises `InputError` for an unknown kind or algorithm and for a group that is not in the cluster.
    """
    if embedding is not None:
        found = tuple(_on_torus(kind, num_bytes, embedding, cluster))
    else:
        found = candidates(kind, num_bytes, group, cluster, algorithm, alone)
    return min(found, key=lambda c: c.seconds, default=NOTHING)


def candidates(
    kind: str,
    num_bytes: float,
    group: Group,
    cluster: Cluster,
    algorithm: str | None = None,
    alone: bool = False,
) -> tuple[Collective, ...]:
    """Every way to do a collective that the back end of `cluster` has; none for a single rank."""
    if kind not in ALGORITHMS:
        raise InputError(f"no cost is known for the collective {kind!r}{nearest(kind, ALGORITHMS)}")
    if not 0 <= num_bytes < math.inf:
        raise InputError(f"a collective of {num_bytes} bytes")
    nested = spans(group, cluster)
    if not nested:
        return ()
    backend = BACKENDS[cluster.backend]
    has = ALGORITHMS[kind]
    if algorithm is not None and algorithm not in has:
        raise InputError(f"no algorithm {algorithm!r} for {kind}{nearest(algorithm, has)}")
    own = backend.algorithms.get(kind, tuple(has))
    if algorithm is None:
        own = tuple(name for name in own if _applies(name, nested, cluster))
    orders = tuple(permutations(nested)) if backend.orders and len(nested) <= 4 else (nested,)
    return tuple(
        cost
        for name in ((algorithm,) if algorithm else own)
        for order in orders
        for cost in _costs(
            kind, name, has[name](num_bytes, order, backend.rails), order, cluster, alone
        )
    )


def _on_torus(
    kind: str, num_bytes: float, embedding: Embedding, cluster: Cluster
) -> Iterator[Collective]:
    """Every way of the back end over groups that lie on a torus so."""
    backend = BACKENDS[cluster.backend]
    names = backend.algorithms.get(kind, tuple(ALGORITHMS[kind]))
    for name, order, schedule in schedules(kind, names, num_bytes, embedding, backend.rails):
        times = [leg.num_bytes / rate(leg, embedding, cluster) for leg in schedule.legs]
        waits = sum(
            leg.messages * cluster.levels[leg.level].link.latency_s * links_passed(leg, embedding)
            for leg in schedule.legs
        )
        yield from _timed(kind, name, schedule, order, backend, (waits, times), embedding.size)


def spans(group: Group, cluster: Cluster) -> Order:
    """The levels that `group` crosses, fastest first.

    Raises `InputError` where it is not in the cluster, and for one of unequal parts.
    """
    if cluster.parts:
        cluster.prime_axes()
    result = []
    inside = 1
    for level, size in sorted(group):
        if not 0 <= level < len(cluster.levels) or size > cluster.levels[level].size:
            raise InputError(
                f"a group of {size} at level {level} has more ranks than {cluster.name} has there: "
                + ", ".join(f"{i}: {x.size}" for i, x in enumerate(cluster.levels))
            )
        if size > 1:
            result.append(Span(level, size, inside))
            inside *= size
    return tuple(result)


def bound_s(
    kind: str, num_bytes: float, group: Group, cluster: Cluster, alone: bool = False
) -> float:
    """Seconds that no algorithm can beat: what has to leave or reach the ranks below a child.

    A part with C like it in the group sends, or receives, (C-1)/C of what its ranks hold or want:
    twice for all_reduce, where no switch adds up, and all of it once for broadcast.
    """
    order = spans(group, cluster)
    if not order or kind == "halo_exchange":
        return 0.0
    ranks = group_size(order)
    if kind in ("send", "shift"):
        return num_bytes / level_rate(order[-1], 1 / order[-1].inside, cluster, alone)
    worst = 0.0
    for position, span in enumerate(order):
        parts = ranks // span.inside
        leaves = (parts - 1) / parts * num_bytes
        if kind == "all_reduce":
            adds = any(cluster.levels[s.level].reduces for s in order[position:])
            leaves = num_bytes if adds and parts > 2 else 2 * leaves
        elif kind == "broadcast":
            leaves = num_bytes
        held = leaves if kind == "all_to_all" else leaves / span.inside
        rate = sum(level_rate(s, 1.0, cluster, alone) for s in order[position:])
        worst = max(worst, held / rate)
    return worst


def level_rate(span: Span, senders: float, cluster: Cluster, alone: bool) -> float:
    """Bytes/s of each of `senders` (share of the group's devices below a child) over a level.

    The devices below one child share its uplink, whose capacity is that of all their links over the
    oversubscription.
    """
    level = cluster.levels[span.level]
    below = prod(lower.size for lower in cluster.levels[: span.level])
    groups = 1 if alone else below / span.inside
    sending = senders * span.inside * groups
    return level.link.payload_bytes_per_s * min(1.0, below / (level.oversubscription * sending))


def _costs(
    kind: str, name: str, schedule: Schedule, order: Order, cluster: Cluster, alone: bool
) -> Iterator[Collective]:
    """The schedule under each protocol of the back end."""
    by_level = {span.level: span for span in order}
    waits = sum(_wait_s(leg, by_level[leg.level], cluster) for leg in schedule.legs)
    times = [
        leg.num_bytes / _rate(leg, by_level[leg.level], cluster, alone) for leg in schedule.legs
    ]
    backend = BACKENDS[cluster.backend]
    yield from _timed(kind, name, schedule, order, backend, (waits, times), group_size(order))


def _timed(
    kind: str,
    name: str,
    schedule: Schedule,
    order: Order,
    backend: Backend,
    seconds: tuple[float, Sequence[float]],
    ranks: int,
) -> Iterator[Collective]:
    """A schedule whose messages wait and whose legs take so many `seconds`, under each protocol."""
    waits, times = seconds
    always, in_pairs = backend.turns.get(kind, (1.0, 0.0))
    turns = always + in_pairs / (ranks - 1)
    moves = max(times) if schedule.pipelined else sum(times)
    traffic = tuple(sorted((g.level, g.mean_bytes, g.messages) for g in schedule.legs))
    busy: dict[int, float] = {}
    for leg, taken in zip(schedule.legs, times, strict=True):
        busy[leg.level] = busy.get(leg.level, 0.0) + taken
    # In-switch reduction has one protocol, which waits as Simple does.
    protocols = backend.protocols[-1:] if name == "switch" else backend.protocols
    levels = tuple(span.level for span in order)
    for protocol in protocols:
        share = protocol.share * SHARE.get(name, 1.0)
        wait = waits * protocol.latency
        yield Collective(
            kind,
            name,
            protocol.name,
            levels,
            wait + moves * turns / share,
            wait,
            traffic,
            tuple(busy.items()),
        )


def _wait_s(leg: Leg, span: Span, cluster: Cluster) -> float:
    """Latency of a leg's messages, through the devices in between where there is no switch."""
    level = cluster.levels[leg.level]
    hops = 1.0
    if level.fabric in ("ring", "line") and leg.pattern not in (RING, NEXT):
        hops = _mean_hops(span.size, _wraps(level, span.size))
    return leg.messages * level.link.latency_s * hops


def _rate(leg: Leg, span: Span, cluster: Cluster, alone: bool) -> float:
    level = cluster.levels[leg.level]
    return level_rate(span, leg.senders, cluster, alone) * _usable(level, span.size, leg.pattern)


def _usable(level: Level, size: int, pattern: str) -> float:
    """The part of a device's bandwidth at a level that `size` of its children can use."""
    if level.fabric == "switch":
        return 1.0
    if level.fabric == "full_mesh":
        return (1 if pattern in (NEXT, PAIR) else size - 1) / (level.size - 1)
    wraps = _wraps(level, size)
    if pattern == NEXT:
        return 1.0 if wraps and size == 2 else 0.5  # one of a device's links
    if pattern == RING:
        # Without the wrap-around the ring goes there and back over the same links.
        return 1.0 if wraps else 0.5
    if pattern == PAIR:
        return 0.5 / _mean_hops(size, wraps)  # one way around, through the links of others
    if wraps:
        return 1 / _mean_hops(size, wraps)
    return 2 * (size - 1) / size**2  # everything between the halves passes the middle


def _wraps(level: Level, size: int) -> bool:
    return level.fabric == "ring" and size == level.size


def _mean_hops(size: int, wraps: bool) -> float:
    """Links between one of `size` devices in a ring or a line and another, on average."""
    if wraps:
        return sum(min(i, size - i) for i in range(size)) / (size - 1)
    return (size + 1) / 3


def _applies(name: str, order: Order, cluster: Cluster) -> bool:
    levels = [cluster.levels[span.level] for span in order]
    if name == "switch":
        return len(levels) == 1 and levels[0].reduces
    if name == "torus":
        return len(levels) > 1 and all(level.fabric in ("ring", "line") for level in levels)
    return True
