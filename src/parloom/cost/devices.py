"""The device table of the package (`clusters/devices.yaml`): devices, interconnects, sources.

Devices have names, short names, the links they usually come with, and for every number where it is
from. Bandwidths are per device and direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from math import inf, prod

from parloom.cost import units
from parloom.cost.strict_yaml import Section, read
from parloom.errors import InputError, nearest
from parloom.ir.mesh import FABRICS, Device, Efficiency, Host, HourlyPrice, Level, Link

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "tf32": "tfloat32",
    "fp8": "float8",
    "fp4": "float4",
}
BACKEND_NAMES = ("nccl", "gloo", "other")
RECALLED = "recalled"
# Of one device in dollars, where that is from, and of when it is.
PRICE_KEYS = ("price_per_hour", "price_source", "price_date")
FROM_FILE = "cluster file"
# Of a fabric what is no number.
UNSOURCED = ("name", "fabric", "reduces", "by_side")


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The two fitted constants of a kind of link, and where they are from."""

    name: str
    latency_s: float
    efficiency: float
    source: str

    def link(self, bytes_per_s: float) -> Link:
        return Link(bytes_per_s, self.latency_s, self.efficiency)


@dataclass(frozen=True, slots=True)
class ScaleUp:
    """The fabric inside a node: up to `domain` devices (0: no limit is known).

    A torus of `torus` dimensions (0: none) has `level.link` to each neighbor, and wraps around
    where all dimensions are multiples of `wraps`, or each that is one (`by_side`). Slices of it are
    those whose sides are all such multiples, and `slices`.
    """

    level: Level
    domain: int = 0
    torus: int = 0
    wraps: int = 1
    by_side: bool = False
    slices: tuple[str, ...] = ()

    def levels(self, shape: tuple[int, ...]) -> tuple[Level, ...]:
        """A slice with these sides, those of one device left out."""
        whole = len(shape) == self.torus and all(side % self.wraps == 0 for side in shape)
        sides = tuple(side for side in shape if side > 1) or (1,)
        wraps = tuple(whole or (self.by_side and side % self.wraps == 0) for side in sides)
        return torus_levels(self.level, sides, wraps)

    def has_slice(self, shape: tuple[int, ...]) -> bool:
        """Whether a pod has a slice with these sides, in any order."""
        fits = prod(shape) <= (self.domain or inf)
        whole = all(side % self.wraps == 0 for side in shape)
        return fits and (whole or "x".join(map(str, sorted(shape))) in self.slices)


@dataclass(frozen=True, slots=True)
class Network:
    """What a usual node of `devices` devices sends per direction, over `ports` equal ports."""

    interconnect: Interconnect
    bytes_per_s: float
    devices: int
    ports: int

    def level(self, num_nodes: int, per_node: int) -> Level:
        """The level that joins nodes of `per_node` devices, which share the ports there are.

        More devices than a usual node has are taken to have more ports.
        """
        link = self.interconnect.link(self.bytes_per_s / self.ports)
        shared = max(1.0, min(per_node, self.devices) / self.ports)
        return Level(self.interconnect.name, num_nodes, link, shared)


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device of the table, the links it usually comes with, and the source of every number.

    `sources` has (field, reference), as in ("rates.float32", "recalled").
    """

    device: Device
    short: tuple[str, ...]
    scale_up: ScaleUp
    network: Network | None
    host: Host | None
    backend: str
    sources: tuple[tuple[str, str], ...]

    @property
    def recalled(self) -> tuple[str, ...]:
        """What was written from memory: fields, or the group where that is all of it."""
        groups: dict[str, list[str]] = {}
        for field, _ in self.sources:
            groups.setdefault(field.split(".")[0], []).append(field)
        named = {field for field, source in self.sources if source == RECALLED}
        found: list[str] = []
        for group, named_fields in groups.items():
            whole = named.issuperset(named_fields)
            found += [group] if whole else [f for f in named_fields if f in named]
        return tuple(found)

    @property
    def source(self) -> str:
        """All references but memory, each once."""
        read = dict.fromkeys(source for _, source in self.sources if source != RECALLED)
        return "; ".join(read) or RECALLED

    def host_of(self, num_devices: int) -> Host | None:
        """The usual host, or the share of it that goes with fewer devices than it has."""
        host = self.host
        if host is None or host.num_devices <= num_devices:
            return host
        memory = host.memory_bytes_per_device * num_devices
        return replace(host, memory_bytes=memory, num_devices=num_devices)


@dataclass(frozen=True, slots=True)
class Table:
    """The whole file."""

    interconnects: tuple[Interconnect, ...]
    devices: tuple[KnownDevice, ...]


@lru_cache(maxsize=1)
def table() -> Table:
    """The device table of the package."""
    where = "clusters/devices.yaml"
    root = read(files("parloom").joinpath(where).read_text(encoding="utf-8"), where)
    root.check(("references", "interconnects", "devices"))
    listed = root.section("references")
    references = {name: listed.text(name) for name in listed.names()}
    section = root.section("interconnects")
    links = {
        name: _interconnect(name, section.section(name), references) for name in section.names()
    }
    devices = root.section("devices")
    return Table(
        tuple(links.values()),
        tuple(_known(name, devices.section(name), links, references) for name in devices.names()),
    )


def known_devices() -> tuple[KnownDevice, ...]:
    """The devices, in file order."""
    return table().devices


def find_device(name: str) -> KnownDevice:
    """The device of that name or short name, in any case; raises `InputError` with near names."""
    names = {alias: d for d in known_devices() for alias in (d.device.name, *d.short)}
    for alias, device in names.items():
        if alias.lower() == name.lower():
            return device
    hint = nearest(name, names)
    raise InputError(f"unknown device {name!r}{hint}; all: parloom cluster show --known")


def find_interconnect(name: str) -> Interconnect | None:
    """The kind of link of that name, in any case."""
    return next((link for link in table().interconnects if link.name.lower() == name.lower()), None)


def read_price(section: Section) -> HourlyPrice | None:
    """The price of one device from `PRICE_KEYS`, where it is given; a file is its own source."""
    for key in PRICE_KEYS[1:]:
        if section.has(key) and not section.has(PRICE_KEYS[0]):
            raise section.error(section.get(key), f"{key}: goes with {PRICE_KEYS[0]}")
    if not section.has(PRICE_KEYS[0]):
        return None
    usd, (source, date) = section.parse(PRICE_KEYS[0], units.parse_dollars), PRICE_KEYS[1:]
    return HourlyPrice(usd, section.text_or(source, FROM_FILE), section.text_or(date, ""))


def read_device(name: str, section: Section) -> Device:
    """A device from the keys memory, memory_bandwidth, rates, cores, generation, efficiency and
    `PRICE_KEYS` of `section`.
    """
    rates = section.section("rates")
    rates.check((), (*DTYPES, *DTYPES.values()))
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
        price=read_price(section),
        efficiency=_efficiency(section.section("efficiency"))
        if section.has("efficiency")
        else Efficiency(),
        cores=section.integer("cores") if section.has("cores") else 0,
        generation=section.text("generation") if section.has("generation") else "",
    )


def _efficiency(section: Section) -> Efficiency:
    names = [field.name for field in fields(Efficiency)]
    section.check((), tuple(names))
    return Efficiency(**{n: section.parse(n, units.parse_share) for n in section.names()})


def read_host(section: Section) -> Host:
    """A host from the keys memory, devices, bandwidth and latency."""
    section.check(("memory", "devices", "bandwidth"), ("latency", "efficiency"))
    link = Link(
        section.parse("bandwidth", units.parse_bandwidth),
        section.parse_or("latency", units.parse_seconds, 10e-6),
        section.parse_or("efficiency", units.parse_share, 1.0),
    )
    return Host(section.parse("memory", units.parse_bytes), section.integer("devices"), link)


def read_fabric(text: str) -> str:
    """One of the fabrics of a level."""
    if text not in FABRICS:
        raise InputError(f"unknown fabric {text!r}{nearest(text, FABRICS)}")
    return text


def read_backend(text: str) -> str:
    """One of the back ends."""
    if text not in BACKEND_NAMES:
        raise InputError(f"unknown backend {text!r}{nearest(text, BACKEND_NAMES)}")
    return text


def torus_levels(level: Level, shape: tuple[int, ...], wraps: Sequence[bool]) -> tuple[Level, ...]:
    """The dimensions of a torus as levels, of which some wrap around; `level.link` is to one
    neighbor.

    A device sends to both of its neighbors in a dimension, so each has twice the link's bandwidth.
    """
    link = replace(
        level.link,
        bandwidth_bytes_per_s=2 * level.link.bandwidth_bytes_per_s,
        down_bytes_per_s=2 * level.link.down_bytes_per_s,
    )
    names = "xyzw" if len(shape) <= 4 else [f"dimension {i}" for i in range(len(shape))]
    return tuple(
        replace(
            level,
            name=f"{level.name} {name}",
            size=size,
            link=link,
            fabric="ring" if around and size > 2 else "line",
        )
        for name, size, around in zip(names, shape, wraps, strict=False)
    )


def torus_shape(number: int, dimensions: int) -> tuple[int, ...]:
    """`number` devices as a torus that is as close to a cube as it divides, smallest side first."""
    if dimensions == 1:
        return (number,)
    shapes = [
        tuple(sorted((side, *torus_shape(number // side, dimensions - 1))))
        for side in range(1, round(number ** (1 / dimensions)) + 1)
        if side**dimensions <= number and number % side == 0
    ]
    return min(shapes, key=sum)


def _interconnect(name: str, section: Section, references: Mapping[str, str]) -> Interconnect:
    section.check(("latency", "efficiency", "source"))
    return Interconnect(
        name,
        section.parse("latency", units.parse_seconds),
        section.parse("efficiency", units.parse_share),
        _reference(section, section.text("source"), references),
    )


def _known(
    name: str,
    section: Section,
    links: Mapping[str, Interconnect],
    references: Mapping[str, str],
) -> KnownDevice:
    section.check(
        ("memory", "memory_bandwidth", "rates", "scale_up", "sources"),
        (
            "short",
            "network",
            "host",
            "price_per_hour",
            "price_date",
            "backend",
            "cores",
            "efficiency",
            "generation",
        ),
    )
    device = read_device(name, section)
    sources = _sources(section, device, references)
    if device.price is not None:
        price = replace(device.price, source=dict(sources)["price_per_hour"])
        device = replace(device, price=price)
    return KnownDevice(
        device=device,
        short=section.texts("short"),
        scale_up=_scale_up(section.section("scale_up"), links),
        network=_network(section.section("network"), links) if section.has("network") else None,
        host=read_host(section.section("host")) if section.has("host") else None,
        backend=section.parse_or("backend", read_backend, "nccl"),
        sources=sources,
    )


def _scale_up(section: Section, links: Mapping[str, Interconnect]) -> ScaleUp:
    optional = ("domain", "fabric", "reduces", "torus", "wraps", "by_side", "slices")
    section.check(("name", "bandwidth"), optional)
    link = _named(section, links).link(section.parse("bandwidth", units.parse_bandwidth))
    level = Level(
        section.text("name"),
        1,
        link,
        fabric=section.parse_or("fabric", read_fabric, "switch"),
        reduces=section.flag("reduces"),
    )
    whole = {n: section.integer(n) for n in ("domain", "torus", "wraps") if section.has(n)}
    slices = section.texts("slices") if section.has("slices") else ()
    by_side = section.flag("by_side")
    sizes = (whole.get("domain", 0), whole.get("torus", 0), whole.get("wraps", 1))
    return ScaleUp(level, *sizes, by_side, slices)


def _network(section: Section, links: Mapping[str, Interconnect]) -> Network:
    section.check(("name", "bandwidth_per_node", "devices_per_node", "ports"))
    rate = section.parse("bandwidth_per_node", units.parse_bandwidth)
    return Network(
        _named(section, links),
        rate,
        section.integer("devices_per_node"),
        section.integer("ports"),
    )


def _named(section: Section, links: Mapping[str, Interconnect]) -> Interconnect:
    name = section.text("name")
    if name not in links:
        raise section.error(section.get("name"), f"unknown interconnect {name!r}")
    return links[name]


def _sources(
    section: Section, device: Device, references: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """(field, reference) of every number; the longest name that covers a field decides."""
    given: dict[str, str] = {}
    listed = section.section("sources")
    for name in listed.names():
        text = _reference(listed, name, references)
        given |= dict.fromkeys(listed.texts(name), text)
    named = ["memory", "memory_bandwidth", *(f"rates.{dtype}" for dtype, _ in device.flops_per_s)]
    for group in ("scale_up", "network", "host"):
        if section.has(group):
            keys = section.section(group).names()
            named += [f"{group}.{key}" for key in keys if key not in UNSOURCED]
    named += [n for n in ("price_per_hour", "cores", "efficiency") if section.has(n)]
    found = []
    for field in named:
        covering = [n for n in given if field == n or field.startswith(f"{n}.")]
        if not covering:
            raise listed.error(listed.node, f"{device.name}: no source for {field}")
        found.append((field, given[max(covering, key=len)]))
    unused = [n for n in given if not any(f == n or f.startswith(f"{n}.") for f in named)]
    if unused:
        raise listed.error(
            listed.node, f"{device.name}: a source for {unused[0]}, which has no number"
        )
    return tuple(found)


def _reference(section: Section, name: str, references: Mapping[str, str]) -> str:
    if name not in references:
        raise section.error(section.node, f"unknown reference {name!r}{nearest(name, references)}")
    return references[name]
