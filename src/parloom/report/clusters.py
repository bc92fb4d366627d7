"""A cluster on one screen: devices, levels, host, price, what was assumed and what was recalled."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.collectives import Collective, collective
from parloom.cost.devices import PRICE_KEYS, known_devices
from parloom.cost.units import format_bytes, format_rate, format_seconds
from parloom.ir.mesh import Cluster, HourlyPrice, Level, Link
from parloom.report.rows import Rows

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
JOINS = "joins: so many devices, or groups of the level in the line above"
RINGS = "bandwidth of a ring or line: to both neighbors together"
WHOLE = "sizes: of the whole tensor on one rank, before it is reduced or after it is gathered"
SIZES = (2**16, 2**21, 2**26, 2**32)
LEFT = ("level", "fabric")
COLUMNS = ("level", "joins", "bandwidth", "payload", "latency", "shared", "fabric")


def cluster_screen(cluster: Cluster, assumptions: tuple[str, ...]) -> RenderableType:
    """Levels and links of a cluster, ready to print."""
    notes = [Text(""), Text("assumed"), *(Text(f"  {line}") for line in assumptions)]
    return Group(*_screen(cluster), *(notes if assumptions else []))


def cluster_document(cluster: Cluster, assumptions: tuple[str, ...]) -> dict[str, Any]:
    """What `cluster show --json` prints."""
    document: dict[str, Any] = {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "backend": cluster.backend,
        "price_per_hour": cluster.price_per_hour,
        "device": {
            "name": cluster.device.name,
            "memory_bytes": cluster.device.memory_bytes,
            "memory_bytes_per_s": cluster.device.memory_bytes_per_s,
            "flops_per_s": dict(cluster.device.flops_per_s),
            **price_document(cluster.device.price),
        },
        "host": None,
        "levels": [_level_document(level) for level in cluster.levels],
        "parts": [
            cluster_document(part.cluster, ())
            | {"count": part.count, "uplink": _link_document(part.link)}
            for part in cluster.parts
        ],
        "collectives": [
            {
                "kind": kind,
                "num_bytes": size,
                "algorithm": found.name,
                "seconds": found.seconds,
            }
            for kind, size, found in _collectives(cluster)
        ],
        "assumptions": list(assumptions),
    }
    if cluster.host:
        document["host"] = {
            "memory_bytes": cluster.host.memory_bytes,
            "num_devices": cluster.host.num_devices,
            **_link_document(cluster.host.link),
        }
    return document


def devices_document() -> list[dict[str, Any]]:
    """What `cluster show --known --json` prints: devices, and the source of every number."""
    return [
        {
            "name": known.device.name,
            "short": list(known.short),
            "sources": dict(known.sources),
            "recalled": list(known.recalled),
        }
        for known in known_devices()
    ]


def devices_screen() -> RenderableType:
    """Each known device: its names, and what was written from memory."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for known in known_devices():
        table.add_row(known.device.name, Text(", ".join(known.short)))
        if known.recalled:
            table.add_row("", Text(f"  recalled: {', '.join(known.recalled)}"))
    return table


def _screen(cluster: Cluster) -> list[RenderableType]:
    if cluster.parts:
        parts = ", ".join(f"{part.count} x {part.cluster.name}" for part in cluster.parts)
        lines: list[RenderableType] = [
            Text(f"{cluster.name}: {cluster.num_devices} devices, {cluster.backend}", "bold"),
            Text(f"unequal parts ({parts}); a stage lies within one"),
            *_price(cluster),
            Text(""),
            *_table(cluster.levels),
        ]
        for part in cluster.parts:
            link = _row(Level("", 1, part.link))
            uplink = f"{part.count} x {part.cluster.name}, uplink {link[2]}, {link[4]} a message"
            lines += [Text(""), Text(uplink), *_screen(part.cluster)]
        return lines
    device = cluster.device
    rates = ", ".join(f"{dtype} {format_rate(r, 'FLOP/s')}" for dtype, r in device.flops_per_s)
    memory = (
        f"{format_bytes(device.memory_bytes)} at {format_rate(device.memory_bytes_per_s, 'B/s')}"
    )
    lines = [
        Text(f"{cluster.name}: {cluster.num_devices} x {device.name}, {cluster.backend}", "bold"),
        Text(f"memory per device {memory}"),
        Text(f"peaks {rates}"),
    ]
    if cluster.host:
        host = cluster.host
        lines.append(
            Text(
                f"host memory {format_bytes(host.memory_bytes)} for {host.num_devices} devices,"
                f" {format_rate(host.link.bandwidth_bytes_per_s, 'B/s')} to each"
            )
        )
    return [*lines, *_price(cluster), Text(""), *_table(cluster.levels), *_chosen(cluster)]


def _collectives(cluster: Cluster) -> list[tuple[str, int, Collective]]:
    """The algorithm that is chosen per kind and size, over all devices."""
    if cluster.parts or cluster.num_devices == 1:
        return []
    group = tuple((index, level.size) for index, level in enumerate(cluster.levels))
    return [
        (kind, size, collective(kind, float(size), group, cluster))
        for kind in KINDS
        for size in SIZES
    ]


def _chosen(cluster: Cluster) -> list[RenderableType]:
    """A table of collectives over all devices: two lines per kind, a column per size."""
    found = _collectives(cluster)
    if not found:
        return []
    table = Rows(box=None, pad_edge=False)
    table.add_column("over all devices")
    for size in SIZES:
        table.add_column(format_bytes(size))
    for kind in KINDS:
        cells = [f"{format_seconds(c.seconds)}\n{c.name}" for k, _, c in found if k == kind]
        table.add_row(kind, *cells)
    return [Text(""), table, Text(WHOLE)]


def price_document(price: HourlyPrice | None) -> dict[str, Any]:
    """The price of one device in JSON values, under the names that it has in a cluster file."""
    if price is None:
        return dict.fromkeys(PRICE_KEYS)
    values = price.usd, price.source, price.date or None
    return dict(zip(PRICE_KEYS, values, strict=True))


def _price(cluster: Cluster) -> list[RenderableType]:
    """Of all devices, and of one where all are of one type."""
    total, own = cluster.price_per_hour, cluster.device.price
    if total is None or own is None:
        return []
    each = "" if cluster.parts else f": {own}"
    return [Text(f"price {total:,.2f} USD an hour{each}")]


def _table(levels: tuple[Level, ...]) -> list[RenderableType]:
    """A row a level, and what its columns mean where that is not plain."""
    table = Rows(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right")
    for level in levels:
        table.add_row(*_row(level))
    rings = any(level.fabric in ("ring", "line") for level in levels)
    return [table, *([Text(JOINS)] if len(levels) > 1 else []), *([Text(RINGS)] if rings else [])]


def _row(level: Level) -> tuple[str, ...]:
    link = level.link
    bandwidth = f"{link.bandwidth_bytes_per_s / 1e9:g} GB/s"
    if link.down_bytes_per_s:
        bandwidth += f" up, {link.down_bytes_per_s / 1e9:g} GB/s down"
    return (
        level.name,
        str(level.size),
        bandwidth,
        f"{link.efficiency:.0%}",
        format_seconds(link.latency_s),
        f"{level.oversubscription:g}:1",
        level.fabric + (", adds up" if level.reduces else ""),
    )


def _level_document(level: Level) -> dict[str, Any]:
    return {
        "name": level.name,
        "size": level.size,
        **_link_document(level.link),
        "oversubscription": level.oversubscription,
        "fabric": level.fabric,
        "reduces": level.reduces,
    }


def _link_document(link: Link) -> dict[str, Any]:
    return {
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "down_bytes_per_s": link.down_bytes_per_s or link.bandwidth_bytes_per_s,
        "latency_s": link.latency_s,
        "efficiency": link.efficiency,
    }
