"""Scaling curves: what more devices buy, as a table, a chart and JSON."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from parloom.cost.money import Work
from parloom.cost.units import format_count, format_dollars, format_seconds
from parloom.ir.mesh import HourlyPrice
from parloom.report.chart import Axis, Mark, chart
from parloom.report.fronts import Priced, cost_document, price_lines, prices_document
from parloom.report.rows import Rows

FORMAT, VERSION = "parloom.scaling", 1


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan on some devices, of which it uses `used`; or the `reason` for none."""

    cluster: str
    num_devices: int
    work: Work
    used: int = 0
    plan: Priced | None = None
    reason: str = ""

    @property
    def per_s(self) -> float:
        """Tokens, or samples, a second; 0 without a plan."""
        return self.work.in_step / self.plan.step_s if self.plan else 0.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Points by the number of devices; `weak`: each device has as many samples in all of them."""

    model: str
    weak: bool
    points: tuple[Point, ...]
    prices: tuple[tuple[str, HourlyPrice], ...]
    interrupted: bool = False

    @property
    def base(self) -> Point:
        """The first one with a plan, which the others are compared with."""
        return next(point for point in self.points if point.plan)

    def speedup(self, point: Point) -> float:
        """How many times as much it trains on a second as the first one."""
        return point.per_s / self.base.per_s

    def efficiency(self, point: Point) -> float:
        """The speedup as a share of how many times as many devices there are."""
        return self.speedup(point) * self.base.num_devices / point.num_devices


def scaling_document(scaling: Scaling) -> dict[str, Any]:
    """What `scale --json` prints."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": scaling.model,
        "mode": "weak" if scaling.weak else "strong",
        "prices": prices_document(scaling.prices),
        "points": [_point_document(point, scaling) for point in scaling.points],
        "interrupted": scaling.interrupted,
    }


def _point_document(point: Point, scaling: Scaling) -> dict[str, Any]:
    document: dict[str, Any] = {
        "cluster": point.cluster,
        "num_devices": point.num_devices,
        f"{point.work.unit}s_per_step": point.work.in_step,
        "reason": point.reason or None,
    }
    found, each = point.plan, f"{point.work.unit}s_per_s"
    if found is None:
        return document | dict.fromkeys(
            ("used", "name", "step_s", "mfu", "peak_bytes", each, "speedup", "efficiency", "cost")
        )
    return document | {
        "used": point.used,
        "name": found.name,
        "step_s": found.step_s,
        "mfu": found.mfu,
        "peak_bytes": found.peak_bytes,
        each: point.per_s,
        "speedup": scaling.speedup(point),
        "efficiency": scaling.efficiency(point),
        "cost": cost_document(point.work, found.step_s, found.usd_per_step),
    }


def scaling_screen(scaling: Scaling) -> RenderableType:
    """The curve as a table and a chart, ready to print."""
    unit = scaling.base.work.unit
    what = "weak scaling, as many samples on each device" if scaling.weak else "strong scaling"
    first = scaling.base
    base = "one device" if first.num_devices == 1 else f"{first.num_devices} devices"
    title = f"{scaling.model}, {what}, against {base}; $/billion: for a billion {unit}s"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(""), _table(scaling, unit)]
    if unit == "sample":
        parts.append(Text("the model reads no sequence of tokens: samples are counted"))
    parts += [Text(f"  {p.num_devices} devices: {p.reason}") for p in scaling.points if p.reason]
    planned = [point for point in scaling.points if point.plan]
    if len(planned) > 1:
        marks = [Mark(p.num_devices, scaling.speedup(p), "●", "bold green") for p in planned]
        marks += [
            Mark(p.num_devices, p.num_devices / first.num_devices, "·", "dim") for p in planned
        ]
        times = Axis("speedup (dots: as many times as devices)", _times)
        parts += [Text(""), chart(marks, Axis("devices", lambda value: f"{value:g}"), times)]
    for before, point in pairwise(planned):
        parts += [Text(line) for line in _bought(scaling, before, point)]
    if scaling.prices:
        lines = price_lines(scaling.prices)
        parts += [Text(""), Text("prices"), *(Text(f"  {line}") for line in lines)]
    if scaling.interrupted:
        parts.append(Text("interrupted: larger clusters were not looked at"))
    return Group(*parts)


def _bought(scaling: Scaling, before: Point, point: Point) -> list[str]:
    """What going from one number of devices to the next buys."""
    assert before.plan is not None, "points with plans"
    assert point.plan is not None, "points with plans"
    more = point.num_devices / before.num_devices
    faster = point.per_s / before.per_s
    idle = point.num_devices - point.used
    rest = f"; {idle} {'stays' if idle == 1 else 'stay'} idle" if idle else ""
    one, other = before.plan.usd_per_step, point.plan.usd_per_step
    if one and other:
        each = other / point.work.in_step / (one / before.work.in_step) - 1
        rest += f"; a {point.work.unit} costs {each:+.0%}"
    return [
        f"{before.num_devices} to {point.num_devices} devices ({more:g}x): {_times(faster)}x{rest}"
    ]


def _times(value: float) -> str:
    """How many times as much, to three digits: `1.97`, `2,048`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(scaling: Scaling, unit: str) -> Rows:
    table = Rows(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("devices")
    columns = ("step", f"{unit}s/s", "speedup", "efficiency", "MFU", "$/billion")
    for column in columns:
        table.add_column(column, justify="right")
    for point in scaling.points:
        found = point.plan
        if found is None:
            table.add_row(str(point.num_devices), *["-"] * len(columns))
            continue
        usd = point.work.usd_per_billion(found.usd_per_step)
        table.add_row(
            str(point.num_devices),
            format_seconds(found.step_s),
            format_count(point.per_s),
            _times(scaling.speedup(point)),
            f"{scaling.efficiency(point):.0%}",
            "-" if found.mfu is None else f"{found.mfu:.1%}",
            "-" if usd is None else format_dollars(usd),
        )
    return table
