"""Clusters and parts of them beside each other: what a step, a run and a billion tokens cost."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from string import ascii_lowercase
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from parloom.cost.money import Work
from parloom.cost.pareto import pareto_front
from parloom.cost.units import format_bytes, format_count, format_dollars, format_seconds
from parloom.ir.expected import Objective
from parloom.ir.mesh import HourlyPrice
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_hash
from parloom.report.chart import Axis, Mark, chart
from parloom.report.clusters import price_document
from parloom.report.rows import Rows

FORMAT, VERSION = "parloom.front", 1
FRONT = "front.json"  # beside the plan


@dataclass(frozen=True, slots=True)
class Priced:
    """The best plan on some devices of a cluster; `usd_per_step` is None without a price."""

    name: str
    step_s: float
    peak_bytes: int
    mfu: float | None
    usd_per_step: float | None


@dataclass(frozen=True, slots=True)
class FrontRow:
    """Devices of a cluster, which may be `mixed`, with the best plan on them, or the `reason` why
    there is none.
    """

    cluster: str
    devices: str
    num_devices: int
    plan: Priced | None = None
    reason: str = ""
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Front:
    """What was found on clusters and parts of them; `best` is what was asked for, if anything is.

    Runs may take `limit_days`. No plan that was searched costs less than `bound_usd` a step.
    """

    model: str
    objective: Objective
    work: Work
    rows: tuple[FrontRow, ...]
    prices: tuple[tuple[str, HourlyPrice], ...]
    best: FrontRow | None
    limit_days: float | None = None
    bound_usd: float | None = None
    interrupted: bool = False

    @property
    def pareto(self) -> list[FrontRow]:
        """The rows that no other is as cheap as and faster, or as fast as and cheaper; the cheapest
        comes first.
        """
        priced = [row for row in self.rows if row.plan and row.plan.usd_per_step is not None]
        return pareto_front(priced, _cost_and_time)


def _cost_and_time(row: FrontRow) -> tuple[float, float]:
    assert row.plan is not None, "a row with a plan"
    return row.plan.usd_per_step or 0.0, row.plan.step_s


def cost_document(work: Work, step_s: float, usd_per_step: float | None) -> dict[str, Any]:
    """What a plan costs in JSON values: `usd` is for the whole run."""
    return {
        "usd": work.usd_of_run(usd_per_step),
        "usd_per_step": usd_per_step,
        f"usd_per_billion_{work.unit}s": work.usd_per_billion(usd_per_step),
        "days": work.days(step_s),
    }


def prices_document(prices: Sequence[tuple[str, HourlyPrice]]) -> list[dict[str, Any]]:
    """Prices of devices in JSON values, with who says so."""
    return [{"device": name, **price_document(price)} for name, price in prices]


def read_front(text: str, plan: Plan) -> dict[str, Any] | None:
    """The front that was saved beside `plan`; None where it is of another plan.

    Raises `ValueError` where the text is none.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (
        FORMAT,
        VERSION,
    ):
        raise ValueError(f"no {FORMAT} {VERSION}")
    return document if document["plan_hash"] == plan_hash(plan) else None


def front_document(front: Front, path: str | None, plan: Plan | None = None) -> dict[str, Any]:
    """What `plan --json` prints of several clusters; `path` is that of the best `plan`."""
    pareto = front.pareto
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": front.model,
        "objective": front.objective.value,
        "work": asdict(front.work),
        "limit_days": front.limit_days,
        "prices": prices_document(front.prices),
        "pareto": [_row_document(row, front, True) for row in pareto],
        "rows": [_row_document(row, front, row in pareto) for row in front.rows],
        "best": None
        if front.best is None
        else _row_document(front.best, front, front.best in pareto),
        "bound_usd_per_step": front.bound_usd,
        "interrupted": front.interrupted,
        "plan": path,
        "plan_hash": None if plan is None else plan_hash(plan),
    }


def _row_document(row: FrontRow, front: Front, on_front: bool) -> dict[str, Any]:
    found = row.plan
    document: dict[str, Any] = {
        "cluster": row.cluster,
        "devices": row.devices,
        "num_devices": row.num_devices,
        "pareto": on_front,
        "reason": row.reason or None,
    }
    if found is None:
        return document | dict.fromkeys(("name", "step_s", "mfu", "peak_bytes", "cost"))
    return document | {
        "name": found.name,
        "step_s": found.step_s,
        "mfu": found.mfu,
        "peak_bytes": found.peak_bytes,
        "cost": cost_document(front.work, found.step_s, found.usd_per_step),
    }


def price_lines(prices: Sequence[tuple[str, HourlyPrice]]) -> list[str]:
    """A line for each device: its price, who says so, and of when that is."""
    return [f"{name}: {price}" for name, price in prices]


def front_screen(front: Front) -> RenderableType:
    """The table and the front as a chart, ready to print."""
    work, pareto = front.work, front.pareto
    letters = dict(zip(map(id, pareto), cycle(ascii_lowercase), strict=False))
    size = f"{format_count(work.in_step)} {work.unit}s a step"
    run = "" if work.in_run is None else f", {units_words(work.in_run)} in the run"
    parts: list[RenderableType] = [Text(f"{front.model}: {size}{run}", style="bold")]
    if work.unit == "sample":
        parts.append(Text("the model reads no sequence of tokens: samples are counted"))
    parts += [Text(f"$/billion: for a billion {work.unit}s"), Text(""), _table(front, letters)]
    missing = dict.fromkeys((row.cluster, row.reason) for row in front.rows if row.reason)
    parts += [Text(f"  {cluster}: {reason}") for cluster, reason in missing]
    if len(pareto) > 1:
        parts += [Text(""), _chart(front, letters)]
    if pareto:
        last = letters[id(pareto[-1])]
        ends = "a is" if last == "a" else f"a to {last} are"
        parts += [Text(""), Text(f"{ends} the front: no other is as cheap and faster, or cheaper")]
    if front.prices:
        parts += [Text(""), Text("prices"), *(Text(f"  {p}") for p in price_lines(front.prices))]
    if front.best is not None:
        parts += [Text(""), Text(best_words(front), style="bold")]
    return Group(*parts)


def best_words(front: Front) -> str:
    """What was asked for."""
    row, wanted = front.best, {"time": "fastest", "cost": "cheapest", "memory": "smallest"}
    limit = (
        "" if front.limit_days is None else f" of those that take at most {front.limit_days:g} days"
    )
    until = "interrupted: of what was found until then, " if front.interrupted else ""
    if row is None or row.plan is None:
        return f"{until}no plan that was found trains that{_too_late(front)}"
    found, work = row.plan, front.work
    run = _dollars(work.usd_of_run(found.usd_per_step))
    takes = work.days(found.step_s)
    ends = f", {days_words(takes)} days" if takes is not None else ""
    money = f", {run} for the run" if run else f", {_dollars(found.usd_per_step) or '-'} a step"
    at = _where(row)
    bound = ""
    if front.bound_usd and found.usd_per_step and front.objective is Objective.COST:
        least = format_dollars(front.bound_usd)
        bound = f"; no plan that was searched costs less than {least} a step"
    return f"{until}the {wanted[front.objective]}{limit}: {at}{ends}{money}{bound}"


def _too_late(front: Front) -> str:
    """Why nothing is in time: the fastest plan is not."""
    planned = [(row.plan.step_s, row) for row in front.rows if row.plan]
    step_s, row = min(planned, key=lambda entry: entry[0])
    took = days_words(front.work.days(step_s) or 0.0)
    return f" in {front.limit_days or 0:g} days: the fastest takes {took}, {_where(row)}"


def _table(front: Front, letters: dict[int, str]) -> Rows:
    work = front.work
    table = Rows(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("devices")
    with_run = work.in_run is not None
    run = ("$/run", "days") if with_run else ()
    for column in ("step", "MFU", "peak", "$/step", "$/billion", *run):
        table.add_column(column, justify="right")
    for row in front.rows:
        if (found := row.plan) is None:
            cells = ["-"] * (7 if with_run else 5)
        else:
            usd, days = found.usd_per_step, work.days(found.step_s)
            cells = [
                format_seconds(found.step_s),
                "-" if found.mfu is None else f"{found.mfu:.1%}",
                format_bytes(found.peak_bytes),
                _dollars(usd) or "-",
                _dollars(work.usd_per_billion(usd)) or "-",
            ]
            if days is not None:
                late = front.limit_days is not None and days > front.limit_days
                cells += [
                    _dollars(work.usd_of_run(usd)) or "-",
                    f"{days_words(days)}{'!' if late else ''}",
                ]
        table.add_row(letters.get(id(row), ""), _where(row), *cells)
    return table


def _chart(front: Front, letters: dict[int, str]) -> Text:
    """Each row by time and dollars: of the run where its length is known, else of a step."""
    work, marks = front.work, []
    whole = work.in_run is not None
    for row in sorted(front.rows, key=lambda row: id(row) not in letters):
        if row.plan is None or row.plan.usd_per_step is None:
            continue
        usd, step_s = row.plan.usd_per_step, row.plan.step_s
        x, y = work.days(step_s), work.usd_of_run(usd)
        character = letters.get(id(row), "·")
        style = "bold green" if id(row) in letters else "dim"
        marks.append(Mark(step_s if x is None else x, usd if y is None else y, character, style))
    across = Axis("days", days_words) if whole else Axis("step time", format_seconds)
    return chart(
        marks, across, Axis(f"dollars of {'the run' if whole else 'a step'}", format_dollars)
    )


def units_words(number: float) -> str:
    """Tokens or samples as they are counted: a billion is B."""
    return format_count(number).replace("G", "B")


def _where(row: FrontRow) -> str:
    """The devices in a table: their types are named where a cluster has several."""
    return f"{row.devices if row.mixed else row.num_devices} of {row.cluster}"


def _dollars(usd: float | None) -> str:
    return "" if usd is None else format_dollars(usd)


def days_words(days: float) -> str:
    """Days, to three digits."""
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"
