"""Clusters from what a user writes: `2x8xH100`, `8xH100`, `4xcpu`, or a YAML file.

Devices and the links they usually come with are data (`clusters/devices.yaml`). A spec assumes
those links and says so; a file states its own. Bandwidths are per device and direction.

A file:

    name: lab
    device: A100-40GB              # a known name, or {name, memory, memory_bandwidth, rates}
    backend: nccl                  # optional; gloo for CPUs
    levels:                        # fastest first
      - {name: nvlink, size: 8, bandwidth: 300GB/s, latency: 3us}
      - {name: network, size: 2, bandwidth: 25Gbit/s}
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from parloom.cost import units
from parloom.cost.strict_yaml import Section, read
from parloom.errors import InputError, nearest
from parloom.ir.mesh import Cluster, Device, Level, Link

# All_reduce of 32 KiB over 8 A100 (nccl-tests, stas00/ml-engineering network/README.md): 43.8 us
# for the 14 messages of a ring.
SCALE_UP_LATENCY_S = 3e-6
# The same over 4 nodes of 8 devices: 69 us for 56 messages inside and 6 between nodes, with the
# messages inside overlapping.
NETWORK_LATENCY_S = 5e-6
# Where a device has no usual network: one 100 Gbit/s port for each node.
NETWORK_BYTES_PER_S = 12.5e9
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
MAX_DEVICES = 2**20

_SPEC = re.compile(r"(?:(\d{1,7})x)?(\d{1,7})x([A-Za-z][^\s/\\]*)")


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device of the table, its names, and the links it usually comes with."""

    device: Device
    short: tuple[str, ...]
    scale_up: Level
    network: Level
    network_is_known: bool
    backend: str
    source: str
    recalled: str


@dataclass(frozen=True, slots=True)
class LoadedCluster:
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


def resolve_cluster(spec: str) -> LoadedCluster:
    """The cluster of `2x8xH100`, `8xH100`, `4xcpu` or a YAML path, with its assumptions.

    A file's content, in braces, will do instead of its path. Raises `InputError` for an unknown
    device (nearest names), a file that does not exist, and any fault in a file (file:line:column).
    """
    if spec.startswith("{"):
        return _from_text(spec, "cluster")
    if spec.endswith((".yaml", ".yml")) or "/" in spec or "\\" in spec:
        return _from_file(Path(spec))
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise InputError(
            f"cannot read the cluster {spec!r}: write nodes x devices x device as 2x8xH100, one "
            f"node as 8xH100, processes on this machine as 4xcpu, or the path of a YAML file"
        )
    return _from_spec(int(match[1] or 1), int(match[2]), match[3])


@lru_cache(maxsize=1)
def known_devices() -> tuple[KnownDevice, ...]:
    """The device table of the package, in file order."""
    where = "clusters/devices.yaml"
    text = files("parloom").joinpath(where).read_text(encoding="utf-8")
    root = read(text, where)
    return tuple(_known_device(name, root.section(name)) for name in root.names())


def find_device(name: str) -> KnownDevice:
    """The device of that name or short name, in any case; raises `InputError` with near names."""
    table = {alias: d for d in known_devices() for alias in (d.device.name, *d.short)}
    for alias, device in table.items():
        if alias.lower() == name.lower():
            return device
    raise InputError(f"unknown device {name!r}{nearest(name, table)}")


def _known_device(name: str, section: Section) -> KnownDevice:
    section.check(
        ("memory", "memory_bandwidth", "rates", "scale_up", "source"),
        ("short", "network", "backend", "recalled"),
    )
    fabric = section.section("scale_up")
    fabric.check(("name", "bandwidth"), ("domain", "latency"))
    # Without a domain there is no fabric limit that we know of, so none is checked.
    domain = fabric.integer("domain") if fabric.has("domain") else 0
    rate = fabric.parse("bandwidth", units.parse_bandwidth)
    latency = _latency(fabric, SCALE_UP_LATENCY_S)
    return KnownDevice(
        device=_device(name, section),
        short=section.texts("short"),
        scale_up=Level(fabric.text("name"), domain, Link(rate, latency)),
        network=_network(section),
        network_is_known=section.has("network"),
        backend=section.text_or("backend", "nccl"),
        source=section.text("source"),
        recalled=section.text_or("recalled", ""),
    )


def _network(section: Section) -> Level:
    """The network of a usual node; `size` is the number of devices that share its bandwidth."""
    if not section.has("network"):
        return Level("network", 1, Link(NETWORK_BYTES_PER_S, NETWORK_LATENCY_S))
    network = section.section("network")
    network.check(("bandwidth_per_node", "devices_per_node"), ("latency",))
    rate = network.parse("bandwidth_per_node", units.parse_bandwidth)
    size = network.integer("devices_per_node")
    return Level("network", size, Link(rate, _latency(network, NETWORK_LATENCY_S)))


def _device(name: str, section: Section) -> Device:
    rates = section.section("rates")
    known = (*DTYPES, *DTYPES.values())
    rates.check((), known)
    if not rates.names():
        raise rates.error(rates.node, "rates: at least one dtype is needed, as in bf16: 312TFLOP/s")
    per_dtype = {
        DTYPES.get(dtype, dtype): rates.parse(dtype, units.parse_flops_per_s)
        for dtype in rates.names()
    }
    memory = section.parse("memory", units.parse_bytes)
    if not memory:
        raise section.error(section.get("memory"), "memory: must be greater than zero")
    return Device(
        name=name,
        flops_per_s=tuple(sorted(per_dtype.items())),
        memory_bytes=memory,
        memory_bytes_per_s=section.parse("memory_bandwidth", units.parse_bandwidth),
    )


def _latency(section: Section, default: float) -> float:
    return section.parse("latency", units.parse_seconds) if section.has("latency") else default


def _from_spec(num_nodes: int, num_devices: int, name: str) -> LoadedCluster:
    known = find_device(name)
    if not 1 <= num_nodes * num_devices <= MAX_DEVICES or not num_devices:
        raise InputError(
            f"a cluster of {num_nodes} x {num_devices} devices is out of range; "
            f"1 to {MAX_DEVICES} devices can be planned for"
        )
    link = known.scale_up.link
    levels = [Level(known.scale_up.name, num_devices, link)]
    assumed = [_read_back(num_nodes, num_devices, known), _rates(known)]
    if num_devices > 1:
        assumed.append(_link_line("between devices of a node", known.scale_up.name, link))
    if 0 < known.scale_up.size < num_devices:
        assumed.append(
            f"{num_devices} devices a node are joined as fast as {known.scale_up.size} usually are"
        )
    if num_nodes > 1:
        inside = known.scale_up.size
        if inside > known.network.size and num_nodes * num_devices <= inside:
            # Racks such as GB200-NVL72: the fabric joins nodes too.
            levels.append(Level(f"{known.scale_up.name} between nodes", num_nodes, link))
        else:
            levels.append(Level("network", num_nodes, _per_device(known)))
        assumed.append(_link_line("between nodes", levels[1].name, levels[1].link))
        if not known.network_is_known:
            assumed.append(f"no usual network is known for {known.device.name}: 100 Gbit/s a node")
    shape = f"{num_nodes}x{num_devices}" if num_nodes > 1 else f"{num_devices}"
    cluster = Cluster(f"{shape}x{known.device.name}", known.device, tuple(levels), known.backend)
    return LoadedCluster(cluster, tuple(assumed), cluster.name)


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
    shared = (
        f"{ranks} processes share {num_cores} cores here: each computes at {share:.0%} of a core"
    )
    return replace(
        loaded,
        cluster=replace(cluster, device=device),
        assumptions=(*loaded.assumptions, shared),
    )


def _per_device(known: KnownDevice) -> Link:
    link = known.network.link
    return Link(link.bandwidth_bytes_per_s / known.network.size, link.latency_s)


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


def _link_line(where: str, name: str, link: Link) -> str:
    rate = units.format_rate(link.bandwidth_bytes_per_s, "B/s")
    latency = units.format_seconds(link.latency_s)
    return f"{where}: {name}, {rate} per device and direction, {latency} a message (assumed)"


def _from_file(path: Path) -> LoadedCluster:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot read the cluster file {path}: {error.strerror}") from None
    return _from_text(text, str(path))


def _from_text(text: str, where: str) -> LoadedCluster:
    root = read(text, where)
    root.check(("device", "levels"), ("name", "backend"))
    device, backend = _file_device(root)
    levels: list[Level] = []
    assumed: list[str] = []
    for index, section in enumerate(root.sections("levels")):
        section.check(("name", "size", "bandwidth"), ("latency",))
        default = NETWORK_LATENCY_S if index else SCALE_UP_LATENCY_S
        rate = section.parse("bandwidth", units.parse_bandwidth)
        link = Link(rate, _latency(section, default))
        levels.append(Level(section.text("name"), section.integer("size"), link))
        if not section.has("latency"):
            name, latency = levels[-1].name, units.format_seconds(default)
            assumed.append(f"{where}: {name} takes {latency} a message (assumed)")
    backend = root.parse("backend", _backend) if root.has("backend") else backend
    cluster = Cluster(root.text_or("name", Path(where).stem), device, tuple(levels), backend)
    if cluster.num_devices > MAX_DEVICES:
        message = f"{cluster.num_devices} devices; at most {MAX_DEVICES} can be planned for"
        raise root.error(root.get("levels"), message)
    return LoadedCluster(cluster, tuple(assumed), _one_line(cluster))


def _one_line(cluster: Cluster) -> str:
    """A cluster as YAML in braces, in base units, so that reading it back is exact."""
    device = cluster.device
    document = {
        "name": cluster.name,
        "device": {
            "name": device.name,
            "memory": f"{device.memory_bytes}B",
            "memory_bandwidth": f"{device.memory_bytes_per_s!r}B/s",
            "rates": {dtype: f"{rate!r}FLOP/s" for dtype, rate in device.flops_per_s},
        },
        "backend": cluster.backend,
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "bandwidth": f"{level.link.bandwidth_bytes_per_s!r}B/s",
                "latency": f"{level.link.latency_s!r}s",
            }
            for level in cluster.levels
        ],
    }
    return json.dumps(document, ensure_ascii=False)  # JSON is YAML


def _file_device(root: Section) -> tuple[Device, str]:
    if not root.is_mapping("device"):
        parser: Callable[[str], KnownDevice] = find_device
        known = root.parse("device", parser)
        return known.device, known.backend
    section = root.section("device")
    section.check(("name", "memory", "memory_bandwidth", "rates"))
    return _device(section.text("name"), section), "nccl"


def _backend(text: str) -> str:
    if text not in ("nccl", "gloo"):
        raise InputError(f"unknown backend {text!r}{nearest(text, ('nccl', 'gloo'))}")
    return text
