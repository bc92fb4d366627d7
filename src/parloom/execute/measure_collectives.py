"""Times of collectives between ranks that are all started, by size, for every group of a cluster.

All groups of a size take part at once, as in a plan. What counts is the slowest rank.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parloom.cost.calibration import TimedCollective
from parloom.cost.collectives import Group, group_of
from parloom.execute.clock import WINDOWS
from parloom.ir.mesh import MeshAxis
from parloom.ir.regular_parts import RegularPart
from parloom.runtime.comm import DistributedGroup
from parloom.runtime.work import DONE, Work

SIZES = {
    "cpu": (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22),
    "cuda": (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 25, 1 << 28),
}
SIDE = 256  # of the products that run between collectives and beside them
# Processors under a quota run in turns of some milliseconds; what is shorter says nothing.
LEAST_COMPUTED_S = 0.005
# What a processor under a quota saves while it waits is spent after computing for so long.
SAVED_S = 0.03
Start = Callable[[], Work]
Pair = tuple[int, int] | tuple[()]
"""Sender and receiver; nothing for a rank that does neither."""


def collectives(
    part: RegularPart,
    device: torch.device,
    sizes: Sequence[int] | None = None,
    least_s: float = 0.1,
) -> Iterator[TimedCollective]:
    """All kinds over all groups of a part, on every rank alike; sizes of whole tensors in bytes.
    Ranks of other parts do nothing meanwhile.
    """
    products = _Products.on(device, least_s, idle=dist.get_rank() not in part.devices)
    for group, pair in _pairs(part):
        yield from _sends(group, pair, products, sizes or SIZES[device.type], least_s)
    for group, members in _groups(part):
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for size in sizes or SIZES[device.type]:
                start = _starter(kind, size, members, device)
                seconds, lost = _timed(start, products, least_s)
                yield TimedCollective(kind, group, size, seconds, lost)


def sends_between(
    parts: Sequence[RegularPart], device: torch.device, least_s: float = 0.1
) -> Iterator[TimedCollective]:
    """Messages between the first devices of each part and the next one, every other pair at once;
    of pairs that differ the slower counts.
    """
    group, rank = ((len(parts[0].cluster.levels) - 1, 2),), dist.get_rank()
    for first in range(min(2, len(parts) - 1)):
        after = zip(parts[first::2], parts[first + 1 :: 2], strict=False)
        pairs = [(one.first, other.first) for one, other in after]
        pair: Pair = next((both for both in pairs if rank in both), ())
        products = _Products.on(device, least_s, idle=not pair)
        yield from _sends(group, pair, products, SIZES[device.type], least_s)


def _sends(
    group: Group, pair: Pair, products: "_Products", sizes: Sequence[int], least_s: float
) -> Iterator[TimedCollective]:
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4), device=products.a.device)
        timed = _timed(partial(_send, tensor, pair), products, least_s)
        yield TimedCollective("send", group, size, *timed)


def _pairs(part: RegularPart) -> Iterator[tuple[Group, Pair]]:
    """For each level, the sender and the receiver of the pair of neighbors that this rank is in;
    nothing where it has no neighbor.
    """
    rank, stride = dist.get_rank(), 1
    for level, each in enumerate(part.alone.levels):
        if each.size > 1:
            index = (rank - part.first) // stride % each.size
            first = rank - index % 2 * stride
            alone = index % 2 == 0 and index + 1 == each.size
            outside = rank not in part.devices
            yield ((level, 2),), () if alone or outside else (first, first + stride)
        stride *= each.size


def _send(tensor: Tensor, pair: Pair) -> Work:
    """One message from the first to the second of the pair."""
    if not pair:
        return DONE
    sender, receiver = pair
    sends = dist.get_rank() == sender
    work = dist.isend(tensor, receiver) if sends else dist.irecv(tensor, sender)
    assert work is not None
    return work


def _groups(part: RegularPart) -> Iterator[tuple[Group, DistributedGroup | None]]:
    """One group like each that the meshes of a plan have: runs of prime axes, fastest first. Ranks
    of other parts are in none.
    """
    primes, rank = part.alone.prime_axes(), dist.get_rank()
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
            for start in range(part.devices.start, part.devices.stop, below):
                for offset in range(stride):
                    ranks = tuple(range(start + offset, start + below, stride))
                    made = dist.new_group(list(ranks))
                    if rank in ranks:
                        mine = ranks, made
            yield group, DistributedGroup(mine[1], mine[0], rank) if mine is not None else None


@dataclass(frozen=True, slots=True)
class _Products:
    """Matrix products, each of which takes `each_s` where all ranks compute that are not `idle`."""

    a: Tensor
    b: Tensor
    out: Tensor
    each_s: float = 0.0
    idle: bool = False

    @classmethod
    def on(cls, device: torch.device, least_s: float, *, idle: bool = False) -> "_Products":
        a, b, out = (torch.rand(SIDE, SIDE, device=device) for _ in range(3))
        made = cls(a, b, out, idle=idle)
        made.compute(10)
        calls = 10
        while (elapsed_s := _most(_elapsed(partial(made.compute, calls), 1, device))) < least_s:
            calls *= 2
        return cls(a, b, out, elapsed_s / calls, idle)

    def compute(self, count: int) -> None:
        for _ in range(0 if self.idle else count):
            torch.mm(self.a, self.b, out=self.out)

    def count(self, seconds: float) -> int:
        """As many as take so long."""
        return max(1, round(seconds / self.each_s))


def _starter(
    kind: str, num_bytes: int, group: DistributedGroup | None, device: torch.device
) -> Start:
    """The collective on float32 tensors, the larger of which has `num_bytes`."""
    if group is None:
        return lambda: DONE
    whole = max(group.size, num_bytes // 4 // group.size * group.size)
    big = torch.zeros(whole, device=device)
    small = torch.zeros(whole // group.size, device=device)
    stacked = big.view(group.size, -1)
    if kind == "all_reduce":
        return partial(group.all_reduce, big)
    if kind == "all_gather":
        return partial(group.all_gather, stacked, small)
    if kind == "reduce_scatter":
        return partial(group.reduce_scatter, small, stacked)
    return partial(group.all_to_all, torch.zeros_like(stacked), stacked)


def _timed(start: Start, products: _Products, least_s: float) -> tuple[float, float]:
    """Seconds of a collective, and the part of their time that products lose beside it; of some
    windows those in the middle. All ranks make as many calls.
    """
    device = products.a.device

    def alone() -> None:
        start().wait()

    for _ in range(2):
        alone()
    single_s = _most(_elapsed(alone, 2, device) / 2)
    least = LEAST_COMPUTED_S if device.type == "cpu" else 0.0
    count = products.count(max(single_s, least))

    def beside() -> None:
        work = start()
        products.compute(count)
        work.wait()

    calls = max(1, round(2 * least_s / (single_s + count * products.each_s)))
    kinds = (alone, partial(products.compute, count), beside)
    spend = partial(products.compute, products.count(min(SAVED_S, least_s)))
    windows = [
        [_most(_elapsed(run, calls, device, spend) / calls) for run in kinds]
        for _ in range(WINDOWS if single_s < least_s else 1)
    ]
    alone_s, busy_s, beside_s = (median(times) for times in zip(*windows, strict=True))
    lost = (beside_s - max(alone_s, busy_s)) / min(alone_s, busy_s)
    return max(1e-9, alone_s), max(0.0, lost)


def _elapsed(
    call: Callable[[], object],
    calls: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of calls, with nothing under way at both ends."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    before()
    settle()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    settle()
    return time.perf_counter() - began


def _most(value: float) -> float:
    """The largest of all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())
