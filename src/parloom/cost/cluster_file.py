"""Cluster files: YAML to a cluster and back to one line of text.

The format: `docs/reference/clusters.md`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

from parloom.cost import units
from parloom.cost.devices import (
    PRICE_KEYS,
    KnownDevice,
    find_device,
    find_interconnect,
    known_devices,
    read_backend,
    read_device,
    read_fabric,
    read_host,
    read_price,
    torus_levels,
)
from parloom.cost.strict_yaml import Section, read
from parloom.ir.mesh import Cluster, Device, Efficiency, Host, Level, Link, Part

# A message over a level that says neither its latency nor a name that is known: the fastest level,
# and those above it.
LATENCIES_S = (3e-6, 5e-6)
# Share of a link that payload reaches where a file does not say: NVLink and InfiniBand are between
# 0.74 and 0.92; gloo over Ethernet 0.96.
EFFICIENCIES: Mapping[str, float] = {"nccl": 0.8, "gloo": 0.96, "other": 0.8}
# Per device and direction; data sheets print twice as much.
NVLINK_BYTES_PER_S: Mapping[str, float] = {"2": 150e9, "3": 300e9, "4": 450e9, "5": 900e9}
MAX_DEVICES = 2**20

_NVLINK = re.compile(r"nv-?link\D*(\d?)", re.IGNORECASE)


@dataclass
class Reading:
    """A file that is being read: where it is, and what had to be assumed so far."""

    where: str
    assumed: list[str] = field(default_factory=list)


def read_cluster_text(text: str, where: str) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that YAML describes, and what had to be assumed.

    Raises `InputError` with file:line:column.
    """
    root = read(text, where)
    reading = Reading(where)
    cluster = _cluster(root, reading, Path(where).stem, None)
    if cluster.num_devices > MAX_DEVICES:
        message = f"{cluster.num_devices} devices; at most {MAX_DEVICES} can be planned for"
        raise root.error(root.node, message)
    return cluster, tuple(dict.fromkeys(reading.assumed))


def one_line(cluster: Cluster) -> str:
    """A cluster as YAML in braces, in base units, so that reading it back is exact."""
    return json.dumps(_document(cluster), ensure_ascii=False)  # JSON is YAML


def _cluster(
    root: Section, reading: Reading, name: str, backend: str | None, more: tuple[str, ...] = ()
) -> Cluster:
    """A cluster or a part of one; `more` are the keys that only parts have."""
    if root.has("parts"):
        return _mixed(root, reading, name, backend, more)
    root.check(("device", "levels"), ("name", "backend", "host", *PRICE_KEYS, *more))
    known, device = _device(root)
    if price := read_price(root):
        device = replace(device, price=price)
    own = backend or (known.backend if known else "nccl")
    backend = root.parse_or("backend", read_backend, own)
    levels: list[Level] = []
    for section in root.sections("levels"):
        levels += _levels(section, reading, len(levels), known, backend)
    cluster = Cluster(root.text_or("name", name), device, tuple(_told_apart(levels)), backend)
    return replace(cluster, host=_host(root, cluster, known))


def _told_apart(levels: Sequence[Level]) -> Iterator[Level]:
    """Levels of one name with a number: links are told apart by the names of their levels."""
    names, seen = Counter(level.name for level in levels), Counter[str]()
    for level in levels:
        seen[level.name] += 1
        number = f" {seen[level.name]}" if names[level.name] > 1 else ""
        yield replace(level, name=f"{level.name}{number}")


def _mixed(
    root: Section, reading: Reading, name: str, backend: str | None, more: tuple[str, ...]
) -> Cluster:
    """Unequal parts; equal ones make an ordinary cluster with a level more."""
    root.check(("parts", "join"), ("name", "backend", *more))
    name = root.text_or("name", name)
    backend = root.parse_or("backend", read_backend, backend)
    sections = root.sections("parts")
    clusters = [
        _cluster(section, reading, f"{name} part {index + 1}", backend, ("count", "uplink"))
        for index, section in enumerate(sections)
    ]
    backend = clusters[0].backend
    for section, cluster in zip(sections, clusters, strict=True):
        if cluster.backend != backend:
            message = f"this part has back end {cluster.backend}, the first {backend}"
            raise section.error(section.node, f"{message}; all ranks of a program use one")
    join = root.section("join")
    join.check(("name", "bandwidth"), ("latency", "efficiency", "oversubscription"))
    level = _level(join, reading, 1, None, backend)
    parts = []
    for section, cluster in zip(sections, clusters, strict=True):
        link = level.link
        if section.has("uplink"):
            uplink = section.section("uplink")
            uplink.check(("bandwidth",), ("latency", "efficiency"))
            link = _link(uplink, reading, level.name, 1, None, backend)
        count = section.integer("count") if section.has("count") else 1
        parts.append(Part(cluster, count, link))
    level = replace(level, size=sum(part.count for part in parts))
    first = parts[0]
    alike = all(_same(p.cluster, first.cluster) and p.link == first.link for p in parts)
    if alike and not first.cluster.parts:
        levels = (*first.cluster.levels, replace(level, link=first.link))
        return replace(first.cluster, name=name, levels=levels)
    return Cluster(name, first.cluster.device, (level,), backend, parts=tuple(parts))


def _same(one: Cluster, other: Cluster) -> bool:
    return replace(one, name=other.name) == other


def _device(root: Section) -> tuple[KnownDevice | None, Device]:
    if not root.is_mapping("device"):
        known = root.parse("device", find_device)
        return known, known.device
    section = root.section("device")
    section.check(
        ("name", "memory", "memory_bandwidth", "rates"),
        (*PRICE_KEYS, "cores", "efficiency", "generation"),
    )
    return None, read_device(section.text("name"), section)


def _host(root: Section, cluster: Cluster, known: KnownDevice | None) -> Host | None:
    """The host that the file states, or that of a usual node."""
    if not root.has("host"):
        return known.host_of(_devices_of_a_node(cluster)) if known else None
    section = root.section("host")
    host = read_host(section)
    if host.num_devices > cluster.num_devices:
        raise section.error(
            section.get("devices"),
            f"devices: a host of {host.num_devices} devices, but there are {cluster.num_devices}",
        )
    return host


def _devices_of_a_node(cluster: Cluster) -> int:
    """Devices that are joined below the first network; all where no level is one."""
    networks = {d.network.interconnect.name.lower() for d in known_devices() if d.network}
    inside = takewhile(lambda level: level.name.lower() not in networks, cluster.levels)
    return prod(level.size for level in inside)


def _levels(
    section: Section, reading: Reading, index: int, known: KnownDevice | None, backend: str
) -> tuple[Level, ...]:
    """One level, or the dimensions of a torus."""
    shape = "torus" if section.has("torus") else "size"
    optional = ("latency", "efficiency", "oversubscription", "reduces")
    shaped = "wraps" if shape == "torus" else "fabric"
    if not section.has(shape):
        section.check(("name", "bandwidth"), ("size", "torus", *optional, "fabric", "wraps"))
        raise section.error(section.node, "missing key 'size' (or 'torus', a list of sizes)")
    section.check(("name", "bandwidth", shape), (*optional, shaped))
    level = _level(section, reading, index, known, backend)
    if shape == "torus":
        wraps = section.flag("wraps") if section.has("wraps") else True
        sides = section.integers("torus")
        return torus_levels(level, sides, (wraps,) * len(sides))
    return (replace(level, size=section.integer("size")),)


def _level(
    section: Section, reading: Reading, index: int, known: KnownDevice | None, backend: str
) -> Level:
    """A level of size 1, without the keys that only some have."""
    name = section.text("name")
    return Level(
        name,
        1,
        _link(section, reading, name, index, known, backend),
        section.parse_or("oversubscription", units.parse_factor, 1.0),
        section.parse_or("fabric", read_fabric, "switch"),
        section.flag("reduces"),
    )


def _link(
    section: Section,
    reading: Reading,
    name: str,
    index: int,
    known: KnownDevice | None,
    backend: str,
) -> Link:
    """The link of a level; what it does not say is that of the interconnect of its name."""
    up, down = _bandwidth(section, name, index, known)
    usual = find_interconnect(name)
    if usual is None and known is not None and index == 0:
        usual = find_interconnect(known.scale_up.level.name)
    latency = usual.latency_s if usual else LATENCIES_S[min(index, 1)]
    efficiency = usual.efficiency if usual else EFFICIENCIES[backend]
    told = []
    if section.has("latency"):
        latency = section.parse("latency", units.parse_seconds)
    else:
        told.append(f"takes {units.format_seconds(latency)} a message")
    if section.has("efficiency"):
        efficiency = section.parse("efficiency", units.parse_share)
    else:
        told.append(f"gives payload {efficiency:.0%} of its bandwidth")
    if told:
        like = f", as for {usual.name}" if usual else ""
        reading.assumed.append(f"{reading.where}: {name} {' and '.join(told)} (assumed{like})")
    return Link(up, latency, efficiency, down)


def _bandwidth(
    section: Section, name: str, index: int, known: KnownDevice | None
) -> tuple[float, float]:
    """Up and down (0: as up) in bytes per second."""
    if section.is_mapping("bandwidth"):
        both = section.section("bandwidth")
        both.check(("up", "down"))
        up, down = (both.parse(key, units.parse_bandwidth) for key in ("up", "down"))
        return up, 0.0 if down == up else down
    rate = section.parse("bandwidth", units.parse_bandwidth)
    text = section.text("bandwidth")
    if re.search(r"direction$|\dB/s$", text.strip()):
        return rate, 0.0  # the file says so, or was written by `one_line`
    for one in _one_direction(name, index, known):
        if abs(rate / (2 * one) - 1) < 0.02:
            raise section.error(
                section.get("bandwidth"),
                f"bandwidth: {text!r} is what {name} moves in both directions together; write "
                f"{units.format_rate(one, 'B/s').replace(' ', '')} if that is meant, or "
                f"'{text} per direction' if a device sends that much",
            )
    return rate, 0.0


def _one_direction(name: str, index: int, known: KnownDevice | None) -> tuple[float, ...]:
    """What the level may have per direction: the known device's fabric, or NVLink's by its name."""
    match = _NVLINK.match(name)
    if known is not None and known.backend == "gloo":
        return ()
    if known is not None and index == 0:
        return (known.scale_up.level.link.bandwidth_bytes_per_s,)
    if match is None:
        return ()
    if match[1]:
        return tuple(rate for version, rate in NVLINK_BYTES_PER_S.items() if version == match[1])
    return tuple(NVLINK_BYTES_PER_S.values())


def _document(cluster: Cluster) -> dict[str, Any]:
    if cluster.parts:
        (join,) = cluster.levels
        level = _level_document(join)
        shared = {"name": cluster.name, "backend": cluster.backend}
        del level["size"], level["fabric"], level["reduces"]
        parts = [
            _document(p.cluster) | {"count": p.count, "uplink": _link_document(p.link)}
            for p in cluster.parts
        ]
        return shared | {"join": level, "parts": parts}
    device = cluster.device
    described: dict[str, Any] = {
        "name": device.name,
        "memory": f"{device.memory_bytes}B",
        "memory_bandwidth": f"{device.memory_bytes_per_s!r}B/s",
        "rates": {dtype: f"{rate!r}FLOP/s" for dtype, rate in device.flops_per_s},
    }
    if device.efficiency != Efficiency():
        described["efficiency"] = {n: repr(v) for n, v in asdict(device.efficiency).items()}
    if device.cores:
        described["cores"] = device.cores
    if device.generation:
        described["generation"] = device.generation
    if price := device.price:
        values = (f"{price.usd!r}USD", price.source, price.date)
        described |= {key: text for key, text in zip(PRICE_KEYS, values, strict=True) if text}
    result = {"name": cluster.name, "device": described, "backend": cluster.backend}
    if cluster.host:
        size = {"memory": f"{cluster.host.memory_bytes}B", "devices": cluster.host.num_devices}
        result["host"] = size | _link_document(cluster.host.link)
    return result | {"levels": [_level_document(level) for level in cluster.levels]}


def _level_document(level: Level) -> dict[str, Any]:
    document = {"name": level.name, "size": level.size, **_link_document(level.link)}
    document |= {"oversubscription": repr(level.oversubscription), "fabric": level.fabric}
    return document | {"reduces": level.reduces}


def _link_document(link: Link) -> dict[str, Any]:
    up = f"{link.bandwidth_bytes_per_s!r}B/s"
    down = f"{link.down_bytes_per_s!r}B/s"
    return {
        "bandwidth": {"up": up, "down": down} if link.down_bytes_per_s else up,
        "latency": f"{link.latency_s!r}s",
        "efficiency": repr(link.efficiency),
    }
