"""Times of collectives between ranks that are all started, by size, for every group of a cluster.

All groups of a size take part at once, as in a plan. What counts is the slowest rank.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parloom.cost.calibration import TimedCollective
from parloom.cost.collectives import Group, group_of
from parloom.execute.measure import WINDOWS
from parloom.ir.mesh import Cluster, MeshAxis
from parloom.runtime.comm import DistributedGroup

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
MOST_CALLS = 20
Call = Callable[[], object]


def collectives(
    cluster: Cluster, device: torch.device, sizes: Sequence[int] = SIZES, least_s: float = 0.1
) -> Iterator[TimedCollective]:
    """All kinds over all groups, on every rank alike; sizes of whole tensors in bytes."""
    for group, members in _groups(cluster):
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for size in sizes:
                seconds, cpu_s = _timed(_call(kind, size, members, device), device, 3 * least_s)
                yield TimedCollective(kind, group, size, seconds, cpu_s)


def overlap(cluster: Cluster, device: torch.device, least_s: float = 0.1) -> float:
    """The part of the shorter of two times that is gained where all-reduces and products, which
    take about as long, run beside each other.
    """
    *_, (_, members) = _groups(cluster)
    count = members.size * (1 << 16)
    tensors = [torch.zeros(count, device=device) for _ in range(4)]
    side = 256
    a, b, out = (torch.rand(side, side, device=device) for _ in range(3))

    def communicate() -> None:
        for work in [members.all_reduce(tensor) for tensor in tensors]:
            work.wait()

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    def both(times: int) -> None:
        works = [members.all_reduce(tensor) for tensor in tensors]
        compute(times)
        for work in works:
            work.wait()

    communicate()
    rounds = max(2, int(3 * least_s / _most(_elapsed(communicate, 1, device)[0])))
    apart = _most(_elapsed(communicate, rounds, device)[0] / rounds)
    each = _most(_elapsed(partial(compute, 50), 2, device)[0] / 100)
    times = max(1, round(apart / each))
    busy = _most(_elapsed(partial(compute, times), rounds, device)[0] / rounds)
    together = _most(_elapsed(partial(both, times), rounds, device)[0] / rounds)
    return min(1.0, max(0.0, (apart + busy - together) / min(apart, busy)))


def _groups(cluster: Cluster) -> Iterator[tuple[Group, DistributedGroup]]:
    """One group like each that the meshes of a plan have: runs of prime axes, fastest first."""
    primes, rank = cluster.prime_axes(), dist.get_rank()
    known: set[Group] = set()
    for first in range(len(primes)):
        for last in range(first + 1, len(primes) + 1):
            axis = MeshAxis("axis", tuple(reversed(primes[first:last])))
            group = group_of((axis,))
            if not group or group in known or axis.size < 2:
                continue
            known.add(group)
            stride = primes[first].stride
            below = stride * axis.size
            mine: tuple[tuple[int, ...], dist.ProcessGroup] | None = None
            for start in range(0, cluster.num_devices, below):
                for offset in range(stride):
                    ranks = tuple(range(start + offset, start + below, stride))
                    made = dist.new_group(list(ranks))
                    if rank in ranks:
                        mine = ranks, made
            assert mine is not None
            yield group, DistributedGroup(mine[1], mine[0], rank)


def _call(kind: str, num_bytes: int, group: DistributedGroup, device: torch.device) -> Call:
    """The collective on float32 tensors, the larger of which has `num_bytes`."""
    whole = max(group.size, num_bytes // 4 // group.size * group.size)
    big = torch.zeros(whole, device=device)
    small = torch.zeros(whole // group.size, device=device)
    stacked = big.view(group.size, -1)
    if kind == "all_reduce":
        return partial(_wait, group.all_reduce, big)
    if kind == "all_gather":
        return partial(_wait, group.all_gather, stacked, small)
    if kind == "reduce_scatter":
        return partial(_wait, group.reduce_scatter, small, stacked)
    return partial(_wait, group.all_to_all, torch.zeros_like(stacked), stacked)


def _wait(start: Callable[..., object], *tensors: Tensor) -> None:
    work = start(*tensors)
    work.wait()  # type: ignore[attr-defined]


def _timed(call: Call, device: torch.device, least_s: float) -> tuple[float, float]:
    """Seconds and own processor seconds of a call, of some windows those in the middle; all ranks
    make as many.
    """
    for _ in range(2):
        call()
    single = _most(_elapsed(call, 2, device)[0] / 2)
    calls = max(1, min(MOST_CALLS, int(least_s / max(single, 1e-9))) // WINDOWS)
    windows = [_elapsed(call, calls, device) for _ in range(WINDOWS)]
    seconds, cpu_s = (
        median(times) / calls
        for times in ([_most(elapsed_s) for elapsed_s, _ in windows], [cpu for _, cpu in windows])
    )
    return max(1e-9, seconds), cpu_s


def _elapsed(call: Call, calls: int, device: torch.device) -> tuple[float, float]:
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, time.process_time() - cpu


def _most(value: float) -> float:
    """The largest of all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())
