"""Clusters and logical meshes.

A cluster's devices factor into *prime axes*, ordered from the fastest link (stride 1) to the
slowest. A logical mesh axis is a product of prime axes, so it knows which level of the topology
each collective over it crosses. Ranks are numbered so that the prime axis of stride 1 varies
fastest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from parloom.errors import InputError, LayoutError
from parloom.ir.shown import Shown


@dataclass(frozen=True, slots=True)
class Link:
    """A link as one device sees it: bandwidth per direction and the latency of one message.

    `efficiency` is the share of the bandwidth that payload reaches in large messages. A device
    that receives at another rate than it sends has `down_bytes_per_s` (0: the same).
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    down_bytes_per_s: float = 0.0

    @property
    def payload_bytes_per_s(self) -> float:
        """What a device that sends as much as it receives gets through, per direction."""
        slower = min(self.bandwidth_bytes_per_s, self.down_bytes_per_s or math.inf)
        return slower * self.efficiency


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peaks that large kernels reach.

    `matmul` and `attention` are those of a loop of one kernel; of `matmul` long runs keep
    `sustained`, under limits of power and temperature that other kernels do not reach. A part with
    a lower limit of power runs at a `clock` of that of its generation, which products and attention
    kernels follow. The defaults are those of GPUs (docs/explanation/fidelity.md).
    """

    matmul: float = 0.8
    memory: float = 0.75
    attention: float = 0.3
    sustained: float = 0.92
    clock: float = 1.0


@dataclass(frozen=True, slots=True)
class HourlyPrice:
    """What one device costs, rented: dollars an hour, who says so, and of when that is."""

    usd: float
    source: str = ""
    date: str = ""

    def __str__(self) -> str:
        said = ", ".join(filter(None, (self.source, self.date or "no date")))
        cents = f"{self.usd:,.2f}" if round(self.usd, 2) == self.usd else f"{self.usd:,.4g}"
        return f"${cents} an hour of a device ({said})"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: dense peak rate per dtype name, memory size and memory bandwidth.

    `generation` names what kernels are written for ("hopper"; empty where it does not matter).
    `price` is None where it is not known. `cores` work on one tile of a matrix product each
    (streaming multiprocessors); 0 where products have no tiles.
    """

    name: str
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bytes_per_s: float
    price: HourlyPrice | None = None
    efficiency: Efficiency = Efficiency()
    cores: int = 0
    generation: str = ""

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s for `dtype`; a dtype the device does not list runs at its slowest rate."""
        rates = dict(self.flops_per_s)
        return rates.get(dtype, min(rates.values()))


@dataclass(frozen=True, slots=True)
class Host:
    """The host of `num_devices` devices: its memory, and the link from each of them to it."""

    memory_bytes: int
    num_devices: int
    link: Link

    @property
    def memory_bytes_per_device(self) -> int:
        return self.memory_bytes // self.num_devices


FABRICS = ("switch", "full_mesh", "ring", "line")


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the topology: `size` children joined by `link` (per device, per direction).

    With oversubscription o, the devices below one child get a share 1/o of their links when all of
    them send at once. In the fabric `full_mesh` every pair has a link of its own, a part of the
    device's bandwidth; a dimension of a torus is a `ring`, or a `line` where nothing wraps around,
    and counts the links of both neighbors. `reduces`: the switch adds up what passes it.
    """

    name: str
    size: int
    link: Link
    oversubscription: float = 1.0
    fabric: str = "switch"
    reduces: bool = False

    def part(self, size: int) -> "Level":
        """`size` of its children alone: in a full mesh they have no use for links to the others,
        and what is cut out of a ring is a line.
        """
        link, fabric = self.link, self.fabric
        if self.fabric == "full_mesh" and 1 < size < self.size:
            share = (size - 1) / (self.size - 1)
            link = replace(
                link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share,
                down_bytes_per_s=link.down_bytes_per_s * share,
            )
        if fabric == "ring" and size < self.size:
            fabric = "line"
        return replace(self, size=size, link=link, fabric=fabric)


@dataclass(frozen=True, slots=True)
class PrimeAxis:
    """A prime factor of the device count: its size, rank stride and topology level index."""

    size: int
    stride: int
    level: int


@dataclass(frozen=True, slots=True)
class Part:
    """`count` equal parts of a mixed cluster, each joined to the others by `link`, per device."""

    cluster: "Cluster"
    count: int
    link: Link


@dataclass(frozen=True, slots=True)
class Cluster(Shown):
    """A device type and its levels, innermost (fastest) first.

    A cluster of unequal `parts` (devices, or the size of nodes) has one level, which joins them,
    and the device of its first part; `regular_parts` says what it consists of.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: str = "nccl"
    host: Host | None = None
    parts: tuple[Part, ...] = ()

    @property
    def num_devices(self) -> int:
        if self.parts:
            return sum(part.count * part.cluster.num_devices for part in self.parts)
        return prod(level.size for level in self.levels)

    @property
    def price_per_hour(self) -> float | None:
        """Dollars for an hour of all devices; None where the price of one is not known."""
        if not self.parts:
            own = self.device.price
            return None if own is None else own.usd * self.num_devices
        total = 0.0
        for part in self.parts:
            price = part.cluster.price_per_hour
            if price is None:
                return None
            total += price * part.count
        return total

    def prime_axes(self) -> tuple[PrimeAxis, ...]:
        """Prime axes from the fastest link to the slowest; `InputError` for unequal parts."""
        if self.parts:
            names = ", ".join(f"{part.count} x {part.cluster.name}" for part in self.parts)
            raise InputError(
                f"{self.name} has unequal parts ({names}), and this needs equal devices"
            )
        axes: list[PrimeAxis] = []
        stride = 1
        for index, level in enumerate(self.levels):
            for prime in prime_factors(level.size):
                axes.append(PrimeAxis(prime, stride, index))
                stride *= prime
        return tuple(axes)


def part_of(cluster: Cluster, count: int) -> Cluster:
    """`count` devices of `cluster`, which has several such parts: of each level, the innermost
    first, as many as divide both. They are neighbors where inner levels are whole.

    Raises `InputError` where there is no such part, and for a mixed cluster.
    """
    if cluster.parts:
        cluster.prime_axes()
    levels: list[Level] = []
    left = count
    for level in cluster.levels:
        size = math.gcd(left, level.size)
        levels.append(level.part(size))
        left //= size
    if left > 1:
        raise InputError(f"{count} devices are no regular part of {cluster.name}")
    return replace(cluster, name=f"{count} of {cluster.name}", levels=tuple(levels))


def check_part(cluster: Cluster, num_devices: int) -> None:
    """Raise `InputError` where the first `num_devices` are neither `cluster` nor a part of it."""
    sizes = (cluster.num_devices, *part_sizes(cluster))
    if num_devices not in sizes:
        raise InputError(
            f"{num_devices} devices are no part of {cluster.name}; a plan uses"
            f" {', '.join(map(str, sizes))} of them"
        )


def part_sizes(cluster: Cluster) -> tuple[int, ...]:
    """How many devices the parts of `cluster` have, the largest first: a divisor of a level above
    whole inner levels (of 2 x 8 devices 8, 4, 2, 1), so that a part is the first devices. A mixed
    cluster has no such parts.
    """
    if cluster.parts:
        return ()
    sizes: set[int] = set()
    inner = 1
    for level in cluster.levels:
        sizes |= {inner * n for n in range(1, level.size + 1) if level.size % n == 0}
        inner *= level.size
    return tuple(sorted(sizes - {inner}, reverse=True))


@dataclass(frozen=True)
class MeshAxis:
    """A logical axis: its name and its prime axes, most significant first.

    An axis in time (microbatches) has no primes and `steps` > 0: every rank visits all of it.
    """

    name: str
    primes: tuple[PrimeAxis, ...] = ()
    steps: int = 0

    @cached_property
    def size(self) -> int:
        return self.steps or prod(p.size for p in self.primes)

    @property
    def level(self) -> int:
        """The slowest topology level that a collective over this axis crosses."""
        return max((p.level for p in self.primes), default=0)

    def coordinate(self, rank: int) -> int:
        """Position of `rank` along this axis, in [0, size)."""
        index = 0
        for prime in self.primes:
            index = index * prime.size + rank // prime.stride % prime.size
        return index


@dataclass(frozen=True)
class Mesh:
    """A logical mesh: axes, outermost first, whose sizes multiply to the number of ranks.

    At most one axis is in time; it does not count towards the ranks. `order` is the device of each
    rank, where that is not the rank's own number: ways around a torus that no strides describe.
    """

    axes: tuple[MeshAxis, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError(f"mesh axis names repeat: {names}")
        if self.order and sorted(self.order) != list(range(self.num_ranks)):
            raise LayoutError(
                f"the order of devices does not number {self.num_ranks} ranks once each"
            )

    @property
    def num_ranks(self) -> int:
        return prod(axis.size for axis in self.axes if not axis.steps)

    @property
    def devices(self) -> Sequence[int]:
        """The device of each rank."""
        return self.order or range(self.num_ranks)

    @cached_property
    def is_nested(self) -> bool:
        """Whether the axes lie as the topology nests, the slowest links first."""
        strides = [p.stride for axis in self.axes for p in axis.primes if p.size > 1]
        return not self.order and strides == sorted(strides, reverse=True)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def by_name(self) -> dict[str, MeshAxis]:
        return {axis.name: axis for axis in self.axes}

    def __getitem__(self, name: str) -> MeshAxis:
        axis = self.by_name.get(name)
        if axis is None:
            raise LayoutError(f"no mesh axis {name!r}; the mesh has {list(self.names)}")
        return axis

    def size(self, names: tuple[str, ...]) -> int:
        """Product of the sizes of the named axes."""
        size = 1
        for name in names:
            size *= self[name].size
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` along every axis."""
        return {axis.name: axis.coordinate(rank) for axis in self.axes if not axis.steps}


def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors of `number` >= 1 in ascending order, with multiplicity."""
    if number < 1:
        raise InputError(f"a level needs at least one device, got {number}")
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


def grid(sizes: dict[str, int]) -> Mesh:
    """A mesh from axis sizes, outermost first, on one topology level (for tests and tools)."""
    axes: list[MeshAxis] = []
    stride = prod(sizes.values())
    for name, size in sizes.items():
        primes: list[PrimeAxis] = []
        for prime in prime_factors(size):
            stride //= prime
            primes.append(PrimeAxis(prime, stride, 0))
        axes.append(MeshAxis(name, tuple(primes)))
    return Mesh(tuple(axes))
