"""Clusters from what a user writes: `2x8xH100`, `8xH100`, `4xcpu`, or a YAML file.

Devices and the links they usually come with are data (`clusters/devices.yaml`). A spec assumes
those links and says so; a file states its own (`docs/reference/clusters.md`). Bandwidths are per
device and direction.
"""

import re
from dataclasses import dataclass, replace
from importlib.resources import files
from math import prod
from pathlib import Path

from parloom.cost import units
from parloom.cost.cluster_file import MAX_DEVICES, one_line, read_cluster_text
from parloom.cost.devices import (
    KnownDevice,
    Network,
    find_device,
    find_interconnect,
    torus_shape,
)
from parloom.cost.money import AS_LISTED, Prices
from parloom.errors import InputError
from parloom.input_files import read_input
from parloom.ir.mesh import Cluster, Level
from parloom.ir.shown import Shown

# Where a device has no usual network: one port of 100 Gbit/s for each node.
NETWORK_BYTES_PER_S = 12.5e9
MOST_BYTES = 64 << 10  # of a cluster file; a megabyte of YAML takes seconds

_SPEC = re.compile(r"(?:(\d{1,7})x)?(\d{1,7})x([A-Za-z][^\\]*)", re.ASCII)
_SLICE = re.compile(r"([A-Za-z][^\\:]*):(\d{1,5}(?:x\d{1,5})*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LoadedCluster(Shown):
    """A cluster and what had to be assumed about it, one printable line each.

    `spec` is text that `load_cluster` reads back on any machine: what the user wrote, or a file's
    content on one line.
    """

    cluster: Cluster
    assumptions: tuple[str, ...]
    spec: str


def load_cluster(spec: str) -> Cluster:
    """The cluster that a spec or a YAML file describes; see `resolve_cluster`."""
    return resolve_cluster(spec).cluster


def short_name(spec: str) -> str:
    """A cluster in a sentence: its spec, or the name that a file's content gives it."""
    return load_cluster(spec).name if spec.startswith("{") else spec


def resolve_cluster(spec: str, prices: Prices = AS_LISTED) -> LoadedCluster:
    """The cluster of `2x8xH100`, `8xH100`, `4xcpu` or a YAML path, with its assumptions; `prices`
    replace its own.

    A file's content, in braces, will do instead of its path. Raises `InputError` for an unknown
    device (nearest names), a file that does not exist, and any fault in a file (file:line:column).
    """
    if spec.startswith("{"):
        return _from_text(spec, "cluster", prices)
    if spec.endswith((".yaml", ".yml")):
        return _from_file(Path(spec), prices)
    match = _SPEC.fullmatch(spec.strip())
    if spec.strip() in presets():
        text = files("parloom").joinpath(f"clusters/{spec.strip()}.yaml").read_text("utf-8")
        return _from_text(text, f"{spec.strip()}.yaml", prices)
    if part := _SLICE.fullmatch(spec.strip()):
        return _from_slice(part[1], part[2], prices)
    if match is None and ("/" in spec or "\\" in spec):
        return _from_file(Path(spec), prices)
    if match is None:
        raise InputError(
            f"cannot read the cluster {spec!r}: write nodes x devices x device as 2x8xH100, one "
            f"node as 8xH100, a slice of a torus as TPU-v5e:4x4, processes on this machine as"
            f" 4xcpu, or the path of a YAML file"
        )
    return _from_spec(int(match[1] or 1), int(match[2]), match[3], prices)


def presets() -> tuple[str, ...]:
    """Names of clusters that the package brings as files."""
    there = (Path(entry.name) for entry in files("parloom").joinpath("clusters").iterdir())
    names = {path.stem for path in there if path.suffix == ".yaml"}
    return tuple(sorted(names - {"devices"}))


def _from_slice(name: str, sides: str, prices: Prices) -> LoadedCluster:
    """`TPU-v5e:4x8`: a slice of a pod by its sides."""
    usual = find_device(name)
    known, fabric = prices.known(usual), usual.scale_up
    shape = tuple(map(int, sides.split("x")))
    spec = f"{usual.device.name}:{sides}"
    if not fabric.torus:
        raise InputError(f"{spec}: {usual.device.name} is in no torus: write 2x8x{name}")
    if len(shape) != fabric.torus or not fabric.has_slice(shape):
        listed = f"{', '.join(fabric.slices)} and, " if fabric.slices else ""
        raise InputError(
            f"{spec}: a pod of {usual.device.name} has no such slice; there are {listed}up to"
            f" {fabric.domain} devices, those with {fabric.torus} sides that are multiples of"
            f" {fabric.wraps}"
        )
    levels, count = fabric.levels(tuple(sorted(shape))), prod(shape)
    recalled = [f"written from memory, so check them: {', '.join(known.recalled)}"]
    assumed = (
        f"one slice with {count} x {usual.device.name}",
        _rates(known),
        *([_inside_line(known, list(levels))] if count > 1 else []),
        *(recalled if known.recalled else []),
        f"plans for {usual.device.name} are priced; no back end here runs them",
    )
    cluster = Cluster(spec, known.device, levels, known.backend, known.host_of(count))
    return LoadedCluster(cluster, assumed, spec if known == usual else one_line(cluster))


def _from_spec(num_nodes: int, num_devices: int, name: str, prices: Prices) -> LoadedCluster:
    usual = find_device(name)
    known = prices.known(usual)
    if not 1 <= num_nodes * num_devices <= MAX_DEVICES or not num_devices:
        raise InputError(
            f"a cluster of {num_nodes} x {num_devices} devices is out of range; "
            f"1 to {MAX_DEVICES} devices can be planned for"
        )
    assumed = [_read_back(num_nodes, num_devices, known), _rates(known)]
    levels = list(_inside(known, num_devices))
    if num_devices > 1:
        assumed.append(_inside_line(known, levels))
    domain = known.scale_up.domain
    if 0 < domain < num_devices:
        assumed.append(f"{num_devices} devices a node are joined as fast as {domain} usually are")
    if num_nodes > 1:
        outer = _between(known, num_nodes, num_devices)
        levels += outer
        if len(outer) > 1:
            assumed.append(_link_line(f"between {outer[0].size} nodes of a rack", outer[0]))
        assumed.append(_link_line(f"between {'racks' if outer[1:] else 'nodes'}", outer[-1]))
        if known.network is None and levels[-1].name == "network":
            assumed.append(f"no usual network is known for {known.device.name}: 100 Gbit/s a node")
    if known.recalled:
        assumed.append(f"written from memory, so check them: {', '.join(known.recalled)}")
    if known.backend == "other":
        assumed.append(f"plans for {known.device.name} are priced; no back end here runs them")
    shape = f"{num_nodes}x{num_devices}" if num_nodes > 1 else f"{num_devices}"
    host = known.host_of(num_devices)
    name = f"{shape}x{known.device.name}"
    cluster = Cluster(name, known.device, tuple(levels), known.backend, host)
    return LoadedCluster(cluster, tuple(assumed), name if known == usual else one_line(cluster))


def _inside(known: KnownDevice, num_devices: int) -> tuple[Level, ...]:
    """The levels of a node, or of a slice of a torus."""
    fabric = known.scale_up
    if not fabric.torus:
        usual = replace(fabric.level, size=max(num_devices, fabric.domain))
        return (usual.part(num_devices),)
    return fabric.levels(torus_shape(num_devices, fabric.torus))


def _between(known: KnownDevice, num_nodes: int, num_devices: int) -> tuple[Level, ...]:
    """What joins nodes: in racks such as GB200-NVL72 the fabric, as far as it goes; a network."""
    fabric, network = known.scale_up, known.network
    rack = 1
    if network is not None and fabric.domain > network.devices and not fabric.torus:
        most = max(1, min(num_nodes, fabric.domain // num_devices))
        rack = next(count for count in range(most, 0, -1) if num_nodes % count == 0)
    racks = num_nodes // rack
    name = f"{fabric.level.name} between nodes"
    inside = (replace(fabric.level, name=name, size=rack),) if rack > 1 else ()
    if racks == 1:
        return inside
    if network:
        return (*inside, network.level(racks, num_devices))
    usual = find_interconnect("Ethernet")
    assert usual is not None
    level = Network(usual, NETWORK_BYTES_PER_S, num_devices, 1).level(num_nodes, num_devices)
    return (replace(level, name="network"),)


def on_this_machine(loaded: LoadedCluster, num_cores: int) -> LoadedCluster:
    """A one-node cluster of processes as `num_cores` cores can run it; others are left alone.

    More processes than cores share them: each gets its part of the rates and of the memory
    bandwidth.
    """
    cluster = loaded.cluster
    ranks = cluster.num_devices
    if cluster.device.name != "cpu" or len(cluster.levels) > 1 or ranks <= num_cores:
        return loaded
    share = num_cores / ranks
    device = replace(
        cluster.device,
        flops_per_s=tuple((name, rate * share) for name, rate in cluster.device.flops_per_s),
        memory_bytes_per_s=cluster.device.memory_bytes_per_s * share,
    )
    shared = f"{ranks} processes share {num_cores} cores: each computes at {share:.0%} of a core"
    return replace(
        loaded,
        cluster=replace(cluster, device=device),
        assumptions=(*loaded.assumptions, shared),
    )


def _read_back(num_nodes: int, num_devices: int, known: KnownDevice) -> str:
    """What was understood: swapped numbers are legal and would otherwise pass unnoticed."""
    total = num_nodes * num_devices
    name = known.device.name
    if num_nodes == 1:
        return f"one node with {total} x {name}"
    return f"{num_nodes} nodes x {num_devices} devices = {total} x {name}"


def _rates(known: KnownDevice) -> str:
    device = known.device
    rates = ", ".join(
        f"{dtype} {units.format_rate(rate, 'FLOP/s')}" for dtype, rate in device.flops_per_s
    )
    memory = units.format_bytes(device.memory_bytes)
    bandwidth = units.format_rate(device.memory_bytes_per_s, "B/s")
    return f"{device.name}: {rates}, {memory} at {bandwidth} (source: {known.source})"


def _inside_line(known: KnownDevice, levels: list[Level]) -> str:
    if not known.scale_up.torus:
        return _link_line("between devices of a node", levels[0])
    shape = "x".join(str(level.size) for level in levels)
    around = [str(level.size) for level in levels if level.fabric == "ring"]
    wraps = "with" if around else "without"
    some = f" of {', '.join(around)}" if around and len(around) < len(levels) else ""
    line = _link_line(f"a torus of {shape} {wraps} wrap-around{some}", levels[0])
    both = "per dimension and direction (to both neighbors together)"
    return line.replace("per device and direction", both)


def _link_line(where: str, level: Level) -> str:
    link = level.link
    rate = units.format_rate(link.bandwidth_bytes_per_s, "B/s")
    shared = ""
    if level.oversubscription > 1:
        shared = f", {level.oversubscription:g} devices share it"
    latency = units.format_seconds(link.latency_s)
    return (
        f"{where}: {level.name}, {rate} per device and direction{shared}, {link.efficiency:.0%} of "
        f"it for payload, {latency} a message (assumed)"
    )


def _from_file(path: Path, prices: Prices) -> LoadedCluster:
    data = read_input(path, "the cluster file", MOST_BYTES)
    try:
        return _from_text(data.decode("utf-8"), str(path), prices)
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None


def _from_text(text: str, where: str, prices: Prices) -> LoadedCluster:
    cluster, assumed = read_cluster_text(text, where)
    cluster = prices.on(cluster)
    return LoadedCluster(cluster, assumed, one_line(cluster))
