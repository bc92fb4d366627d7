"""Mixed clusters as regular parts, so that who plans for one needs no case of its own.

Devices are numbered part after part. A regular part has devices of one type on levels that divide
evenly; a cluster without unequal parts is its own only one. All regular parts of a cluster have
equally many levels, of which the last one is that of the links to the other parts: within a part,
it joins equal nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parloom.errors import InputError
from parloom.ir.mesh import Cluster, Device, Level, Link, check_part, part_of
from parloom.ir.plan import Decisions, Stage


@dataclass(frozen=True, slots=True)
class RegularPart:
    """The devices of `cluster`, which are numbered from `first` on in the whole one.

    `uplinks` are the links to other parts, outermost first, each of the part (by its first device)
    in `path` that it leaves.
    """

    first: int
    cluster: Cluster
    path: tuple[int, ...] = ()
    uplinks: tuple[Link, ...] = ()

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.cluster.num_devices)

    @property
    def alone(self) -> Cluster:
        """Without links to other parts."""
        last = max((i for i, each in enumerate(self.cluster.levels) if each.size > 1), default=0)
        return replace(self.cluster, levels=self.cluster.levels[: last + 1])


def regular_parts(cluster: Cluster) -> tuple[RegularPart, ...]:
    """The regular parts of a cluster, in the order of their devices."""
    if not cluster.parts:
        return (RegularPart(0, cluster),)
    found = tuple(_flat(cluster, 0, (), ()))
    depth = max(len(part.cluster.levels) for part in found)
    return tuple(replace(part, cluster=_deepened(part.cluster, depth)) for part in found)


def _flat(
    cluster: Cluster, first: int, path: tuple[int, ...], uplinks: tuple[Link, ...]
) -> Iterator[RegularPart]:
    (join,) = cluster.levels
    for part in cluster.parts:
        own, above = part.cluster, (*uplinks, part.link)
        if own.parts:
            for _ in range(part.count):
                yield from _flat(own, first, (*path, first), above)
                first += own.num_devices
            continue
        level = replace(join, size=part.count, link=part.link)
        name = own.name if part.count == 1 else f"{part.count} x {own.name}"
        whole = replace(own, name=name, levels=(*own.levels, level))
        yield RegularPart(first, whole, (*path, first), above)
        first += whole.num_devices


def _deepened(cluster: Cluster, depth: int) -> Cluster:
    """With levels of one child below the last one, so that there are `depth`."""
    *inner, last = cluster.levels
    missing: list[Level] = [replace(last, size=1)] * (depth - len(cluster.levels))
    return replace(cluster, levels=(*inner, *missing, last))


def part_with(cluster: Cluster, devices: Sequence[int]) -> RegularPart:
    """The regular part that has all `devices`; raises `InputError` where there is none.

    Devices of a regular cluster may be numbered as in a larger one that it is a part of.
    """
    if not cluster.parts:
        return RegularPart(0, cluster)
    for part in regular_parts(cluster):
        if devices[0] in part.devices and devices[-1] in part.devices:
            return part
    there = ", ".join(
        f"{p.devices[0]} to {p.devices[-1]} ({p.cluster.device.name})"
        for p in regular_parts(cluster)
    )
    raise InputError(
        f"devices {devices[0]} to {devices[-1]} of {cluster.name} are not all in one of its parts:"
        f" {there}; a stage lies within one"
    )


@dataclass(frozen=True, slots=True)
class Join:
    """A level of links of a cluster over which stages send to each other; `bridges` says that they
    lie in different regular parts.
    """

    cluster: Cluster
    level: int
    bridges: bool = False


def joined(cluster: Cluster, one: Sequence[int], other: Sequence[int]) -> Join:
    """The outermost level of links between devices of two stages.

    Between two regular parts it is the slowest of the links that lead from one to the other.
    """
    mine, its = part_with(cluster, one), part_with(cluster, other)
    if mine.first == its.first:
        own, begin = mine.cluster, mine.first
        return Join(own, crossed([[d - begin for d in some] for some in (one, other)], own))
    common = 0
    while mine.path[common] == its.path[common]:
        common += 1
    return _bridge(mine.cluster, (*mine.uplinks[common:], *its.uplinks[common:]))


def slowest_join(cluster: Cluster) -> Join:
    """The outermost level of links of a cluster, the slowest of those of its parts."""
    parts = regular_parts(cluster)
    if len(parts) == 1:
        return Join(cluster, len(parts[0].alone.levels) - 1)
    return _bridge(parts[0].cluster, [link for part in parts for link in part.uplinks])


def _bridge(cluster: Cluster, links: Sequence[Link]) -> Join:
    """`cluster` with one level more of its kind around it, as slow as the slowest of `links`."""
    link = replace(
        min(links, key=lambda link: link.payload_bytes_per_s),
        latency_s=max(link.latency_s for link in links),
    )
    *inner, last = cluster.levels
    bridge = replace(cluster, levels=(*inner, replace(last, size=2, link=link)))
    return Join(bridge, len(inner), bridges=True)


def crossed(stages: Sequence[Sequence[int]], cluster: Cluster) -> int:
    """The outermost level of links of a regular cluster that joins the devices of stages."""
    found, below = 0, 1
    for level, each in enumerate(cluster.levels):
        nodes = {devices[end] // below for devices in stages for end in (0, -1)}
        if len(nodes) > 1:
            found = level
        below *= each.size
    return found


def devices_of(stage: Stage) -> list[int]:
    """The devices of a stage, in ascending order."""
    return [device for some in stage.devices for device in some]


def memory_of(cluster: Cluster, device: str = "") -> int:
    """The memory of a device of this type, the least where several are called so; of the largest
    device where none is named.
    """
    devices = [part.cluster.device for part in regular_parts(cluster)]
    sizes = [found.memory_bytes for found in devices if found.name == device]
    return min(sizes) if sizes else max(found.memory_bytes for found in devices)


def check_on_any(cluster: Cluster, check: Callable[[Cluster], object]) -> None:
    """Raise the `InputError` of the first regular part where `check` passes on none."""
    errors = []
    for part in regular_parts(cluster):
        try:
            check(part.cluster)
            return
        except InputError as error:
            errors.append(error)
    raise errors[0]


def used_devices(cluster: Cluster, decisions: Decisions) -> tuple[tuple[Device, int], ...]:
    """The types of devices that a plan has work for, and how many of each."""
    used = {device for stage in decisions.stages for device in devices_of(stage)}
    counts = [
        (part.cluster.device, len(used.intersection(part.devices)))
        for part in regular_parts(cluster)
    ]
    return tuple((device, count) for device, count in counts if count)


def moved_by(decisions: Decisions, first: int) -> Decisions:
    """A plan for a part whose devices begin at `first` as one for the whole cluster."""
    stages = (
        replace(stage, devices=tuple(range(d.start + first, d.stop + first) for d in stage.devices))
        for stage in decisions.stages
    )
    return replace(decisions, stages=tuple(stages))


def aligned(devices: Sequence[int], cluster: Cluster) -> bool:
    """Whether as few nodes of a regular cluster as can be have the devices: a stage is priced as
    such a part.
    """
    below = 1
    for level in cluster.levels:
        below *= level.size
        if len({device // below for device in devices}) > max(1, len(devices) // below):
            return False
    return True


def own_part(cluster: Cluster, stage: Stage) -> Cluster:
    """The devices of a stage as a cluster of their own.

    Raises `InputError` where they lie in two parts, or over more nodes than they need.
    """
    devices = devices_of(stage)
    part = part_with(cluster, devices)
    if not aligned([device - part.first for device in devices], part.cluster):
        raise InputError(
            f"a stage has devices {devices[0]} to {devices[-1]} of {cluster.name}, which lie over"
            " more nodes than so many need: that is not predicted yet; begin at a multiple"
        )
    return part_of(part.cluster, len(devices))


def used_cluster(cluster: Cluster, decisions: Decisions) -> Cluster:
    """What of a cluster a plan is priced on: of a regular one the first devices, of a mixed one the
    devices of the only stage, or all.

    Raises `InputError` for devices that are no part of it.
    """
    used = sorted({device for stage in decisions.stages for device in devices_of(stage)})
    if not cluster.parts:
        check_part(cluster, len(used))
        for index, stage in enumerate(decisions.stages):
            last = max(devices_of(stage))
            if last >= cluster.num_devices:
                raise InputError(
                    f"stage {index} has device {last}, and {cluster.name} has"
                    f" {cluster.num_devices}, numbered from 0"
                )
        if used[-1] >= len(used):
            missing = min(set(range(used[-1])) - set(used))
            raise InputError(
                f"no stage has device {missing}, and some have devices after it; only the first"
                f" devices of {cluster.name} may be"
            )
        return cluster if len(used) == cluster.num_devices else part_of(cluster, len(used))
    own = [own_part(cluster, stage) for stage in decisions.stages]
    return own[0] if len(own) == 1 else cluster
