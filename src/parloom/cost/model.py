"""What one operator and one collective cost: roofline and alpha-beta, every constant sourced.

Operator: max(FLOPs / rate, bytes / memory bandwidth) + a fixed overhead. Collective: rings, level
by level; over a group with k ranks inside a node and m nodes an all_reduce is a reduce_scatter
inside, an all_reduce of a k-th between nodes, and an all_gather inside, and the levels work at the
same time (their chunks are pipelined), so the slowest level sets the time.
"""

from math import prod

from parloom.cost.price import Traffic
from parloom.errors import InputError, nearest
from parloom.ir.mesh import Cluster, Device, MeshAxis

# Achieved over peak bf16 matmul: A100 0.87 and 0.81, H100 0.80, B200 0.78, GH200 0.84, MI300X 0.51
# (stas00/ml-engineering 744d01e, compute/accelerator, maximum achievable matmul FLOPS).
MATMUL_EFFICIENCY = 0.8
# Streaming kernels reach about this share of the data sheet's bandwidth (recalled: BabelStream).
MEMORY_EFFICIENCY = 0.85
# All_reduce bus bandwidth over the link's: A100 235/300, H100 370/450, B200 682/900, MI300X 313/448
# (same source, network, nccl-tests at 16 GiB).
NCCL_EFFICIENCY = 0.78
# Gloo at 4 MiB over shaped links of 0.1 to 1 Gbit/s took 1.03 to 1.05 of bytes / rate.
GLOO_EFFICIENCY = 0.96
# What gloo takes beyond the ring's bytes, measured on the same links. Its reduce_scatter is an
# all_reduce (twice the bytes); in all_gather (1.2 to 1.6) and all_to_all (1.6 to 2.0) the two
# directions of a pair take turns.
GLOO_FACTOR = {"reduce_scatter": 2.0, "all_gather": 1.4, "all_to_all": 1.8}
# Launching one kernel from eager PyTorch; on CPUs dispatch takes about as long.
OPERATOR_OVERHEAD_S = 5e-6

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "halo_exchange",
)

Group = tuple[tuple[int, int], ...]
"""(topology level, ranks at that level), fastest level first; sizes multiply to the group's."""


def compute_seconds(flops: float, num_bytes: float, dtype: str, device: Device) -> float:
    """Roofline time of one operator that does `flops` and moves `num_bytes` through memory."""
    if not flops and not num_bytes:
        return 0.0
    work = flops / (device.rate(dtype) * MATMUL_EFFICIENCY)
    movement = num_bytes / (device.memory_bytes_per_s * MEMORY_EFFICIENCY)
    return max(work, movement) + OPERATOR_OVERHEAD_S


def group_of(axes: tuple[MeshAxis, ...]) -> Group:
    """How many ranks of the joint group of `axes` each topology level joins."""
    sizes: dict[int, int] = {}
    for prime in (p for axis in axes for p in axis.primes):
        sizes[prime.level] = sizes.get(prime.level, 1) * prime.size
    return tuple(sorted(sizes.items()))


def traffic(kind: str, num_bytes: float, group: Group, backend: str) -> tuple[Traffic, ...]:
    """What each device sends per level in one collective over `group`.

    `num_bytes` is the whole tensor of the group: what all_reduce and broadcast hold on every rank,
    the result of all_gather, the input of reduce_scatter, the local tensor of all_to_all, and for
    halo_exchange the rows sent both ways.
    """
    if kind not in COLLECTIVES:
        raise InputError(
            f"no cost is known for the collective {kind!r}{nearest(kind, COLLECTIVES)}"
        )
    group = tuple((level, size) for level, size in group if size > 1)
    ranks = prod(size for _, size in group)
    if ranks == 1:
        return ()
    factor = GLOO_FACTOR.get(kind, 1.0) if backend == "gloo" else 1.0
    if kind == "halo_exchange":
        # Neighbours of one row of ranks: one of them is across the slowest level.
        return ((group[-1][0], num_bytes * factor, 2),)
    if kind == "all_to_all":
        return _all_to_all(num_bytes * factor, group, ranks)
    result: list[Traffic] = []
    inside = 1
    passes = 2 if kind == "all_reduce" else 1
    for level, size in group:
        share = passes * (size - 1) / size * num_bytes / inside
        result.append((level, share * factor, passes * (size - 1)))
        inside *= size
    return tuple(result)


def comm_seconds(comm: tuple[Traffic, ...], cluster: Cluster) -> float:
    """Time of one collective: the slowest level's bytes, and every level's messages."""
    efficiency = GLOO_EFFICIENCY if cluster.backend == "gloo" else NCCL_EFFICIENCY
    waits, moves = 0.0, 0.0
    for level, num_bytes, messages in comm:
        link = cluster.levels[level].link
        waits += messages * link.latency_s
        moves = max(moves, num_bytes / (link.bandwidth_bytes_per_s * efficiency))
    return waits + moves


def collective_seconds(kind: str, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Time of one collective of `num_bytes` (see `traffic`) over `group` on `cluster`."""
    return comm_seconds(traffic(kind, num_bytes, group, cluster.backend), cluster)


def _all_to_all(num_bytes: float, group: Group, ranks: int) -> tuple[Traffic, ...]:
    """A p-th of the tensor goes to each of the other ranks, over the level that joins the pair."""
    result: list[Traffic] = []
    reached = 1
    for level, size in group:
        peers = reached * size - reached
        result.append((level, num_bytes * peers / ranks, peers))
        reached *= size
    return tuple(result)
