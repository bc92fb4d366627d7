"""An explained plan on the terminal: tables with bars, from the document that `--json` prints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.ledger import MAIN, WAITING
from parloom.cost.units import format_bytes, format_seconds
from parloom.errors import shell_word
from parloom.ir.graph import below
from parloom.report.bars import bars
from parloom.report.explain import ALIKE, Document
from parloom.report.grid import Grid
from parloom.report.rewrite_screen import rewrite_screen
from parloom.report.rows import Rows
from parloom.report.words import memory_words

BAR = 24
# Rows of a table; `--json` has all.
OPERATORS, COLLECTIVES, EXPENSIVE, STORED, LARGEST, NAMES = 6, 8, 8, 8, 6, 6
ACTIONS = MappingProxyType(
    {
        "PROLOGUE": "before the first microbatch",
        "F": "in a forward pass",
        "B": "in a backward pass",
        "B last": "in the last backward pass",
        "REDUCE": "when gradients are made whole",
        "STEP": "in the update",
        "GATHER": "after the update",
    }
)
# What makes the rows of a place the sum above them.
OTHERS = "weights, gradients, waiting in line"
BESIDE = "of it beside computing"
BUSY = "  of the step, whatever is waited for meanwhile: computing, and the links of each level"
RIGHT = ("bytes", "times", "takes", "waited for", "time", "of the step", "own", "moving",
         "weights", "gradients", "optimizer", "parameters")  # fmt: skip


def plan_explained_screen(
    document: Document, mesh: Grid, cost: Sequence[str], path: str
) -> RenderableType:
    """What `parloom explain PLAN` prints; `mesh` is the grid of devices, `cost` lines of it."""
    parts: list[RenderableType] = [*_head(document), *map(Text, cost)]
    parts += [Text(""), Text("mesh", "bold"), *_mesh(document), mesh.table("  ")]
    parts += [Text(""), Text("decided", "bold"), *(Text(f"  {line}") for line in document["words"])]
    parts += [Text(f"  asked for: {line}") for line in document["constraints"]]
    for rewrite in document["rewrites"]:
        parts += [Text(""), *rewrite_screen(rewrite)]
    parts += [Text(""), Text("where the step goes", "bold"), _times(document["time"])]
    parts += [Text(f"  {document['bound_by']}"), Text(""), Text("busy", "bold")]
    parts.append(_bars([(s["stream"], s["share"], s["busy_s"]) for s in document["streams"]]))
    parts.append(Text(BUSY))
    for place in document["places"]:
        parts += [Text(""), *_place(place, [axis["axis"] for axis in document["mesh"]])]
    parts += [Text(""), Text("parameters, bytes per device", "bold")]
    parts.append(_parameters(document["parameters"]))
    if document["collectives"]:
        parts += [Text(""), Text("sent in a step, by each device", "bold")]
        parts.append(_collectives(document["collectives"]))
    parts += [Text(""), *_peak(document["peak"]), *recomputed_lines(document["recomputed"])]
    parts += [Text(""), Text("most expensive", "bold"), _expensive(document["expensive"])]
    parts += notes_lines(document["notes"])
    if document["next"]:
        name = shell_word(document["next"])
        parts += [Text(""), Text(f"next: parloom explain {path} {name}", "bold")]
    return Group(*parts)


def table_of(columns: Iterable[str], margin: bool = True) -> Table:
    """A table as all of this page has them."""
    table = Rows(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        justify = "right" if column in RIGHT else "left"
        name = f"  {column}" if margin and not index else column
        table.add_column(
            name,
            justify=justify,  # type: ignore[arg-type]
            overflow="fold",
            no_wrap=not index,
        )
    return table


def seconds_words(seconds: float) -> str:
    """A time in a table; nothing where it is none."""
    return format_seconds(seconds) if seconds else ""


def time_words(cause: Mapping[str, Any]) -> str:
    """A cause of a document in a line."""
    if cause["what"] != WAITING:
        return str(cause["what"])
    level = f" ({cause['level']})" if cause["level"] else ""
    return f"waiting for {cause['transfer']}{level}"


def _head(document: Document) -> list[RenderableType]:
    low, high = document["source"]["band_s"]
    line = f"step time {format_seconds(document['step_s'])}, likely {format_seconds(low)} .."
    line += f" {format_seconds(high)} ({document['source']['name']})"
    if document["num_microbatches"] > 1:
        line += f", {document['num_microbatches']} microbatches"
    lines: list[RenderableType] = [Text(document["title"], style="bold"), Text(line)]
    if document["bound_s"]:
        least = format_seconds(document["bound_s"])
        lines.append(
            Text(f"no plan that was searched takes less than {least}, however well it overlaps")
        )
    return lines


def _mesh(document: Document) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for axis in document["mesh"]:
        over = ", ".join(axis["levels"])
        lines.append(Text(f"  {axis['axis']} = {axis['size']} over {over or 'one device'}"))
    return lines


def _times(causes: Sequence[Mapping[str, Any]]) -> Table:
    return _bars([(time_words(c), c["share"], c["s"]) for c in causes])


def _bars(rows: Iterable[tuple[str, float, float]]) -> Table:
    """Name, share of the step as a bar, time."""
    return bars(
        ((name, share, f"{format_seconds(s)}  {share:.1%}") for name, share, s in rows), BAR
    )


def _place(place: Mapping[str, Any], axes: Sequence[str]) -> list[RenderableType]:
    calls = "" if place["place"] == MAIN else f", {place['calls']} calls"
    if place["recomputed"]:
        calls += f", {place['recomputed']} of them recompute"
    if place["recompute_values"]:
        calls += f", {place['recompute_values']} of them recompute some of their values"
    took = f"{format_seconds(place['s'])}, {place['share']:.1%} of the step"
    table = table_of(("operator", *(f"{axis} splits" for axis in axes), "own", "moving"))
    for operator in place["operators"][:OPERATORS]:
        split = (", ".join(operator["axes"].get(axis, ())) or "-" for axis in axes)
        table.add_row(
            f"  {operator['key']}", *split, seconds_words(operator["own_s"]),
            seconds_words(operator["moving_s"]),
        )  # fmt: skip
    rest = place["operators"][OPERATORS:]
    if rest:
        sums = (seconds_words(sum(o[key] for o in rest)) for key in ("own_s", "moving_s"))
        table.add_row(f"  {len(rest)} more", *[""] * len(axes), *sums)
    others_s = place["others_s"]
    if others_s:
        what = OTHERS if others_s > 0 else BESIDE
        table.add_row(f"  {what}", *[""] * (len(axes) + 1), format_seconds(others_s))
    return [Text(f"{place['place']}{calls}: {took}", "bold"), table]


def _parameters(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of(
        ("of", "parameters", "computed", "stored", "weights", "gradients", "optimizer")
    )
    for row in rows[:STORED]:
        split = f"split over {row['split_over']}" if row["split_over"] else "whole"
        parts = [n for n in ("weight", "gradient", "optimizer") if not row[n].startswith(ALIKE)]
        stored = ALIKE
        if parts:
            stored = f"{', '.join(parts)} {row[parts[-1]]}"
        table.add_row(
            f"  {row['place']}", str(row["count"]), split, stored,
            *(format_bytes(row[f"{n}_bytes"]) for n in ("weight", "gradient", "optimizer")),
        )  # fmt: skip
    if len(rows) > STORED:
        rest = rows[STORED:]
        table.add_row(
            "  others", str(sum(r["count"] for r in rest)), "", "",
            *(format_bytes(sum(r[f"{n}_bytes"] for r in rest))
              for n in ("weight", "gradient", "optimizer")),
        )  # fmt: skip
    return table


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of(
        ("what", "in", "over", "level", "times", "bytes", "takes", "waited for"),
    )
    for row in rows[:COLLECTIVES]:
        table.add_row(
            f"  {row['transfer']}", row["place"], ", ".join(row["axes"]), row["level"],
            str(row["count"]), format_bytes(row["bytes"]), format_seconds(row["s"]),
            seconds_words(row["waited_s"]),
        )  # fmt: skip
    rest = rows[COLLECTIVES:]
    if rest:
        table.add_row(
            f"  {len(rest)} more kinds", "", "", "", str(sum(r["count"] for r in rest)),
            format_bytes(sum(r["bytes"] for r in rest)), format_seconds(sum(r["s"] for r in rest)),
            seconds_words(sum(r["waited_s"] for r in rest)),
        )  # fmt: skip
    return table


def _peak(peak: Mapping[str, Any]) -> list[RenderableType]:
    title = memory_words(peak["bytes"], peak["limit_bytes"], peak["device_bytes"])
    title = f"memory at its most: {title}"
    if peak["action"]:
        title += f", {ACTIONS[peak['action']]} ({below(peak['module'], peak['operator'])})"
    full = max(1, peak["bytes"])
    held = ((name, size) for name, size in peak["memory"].items() if size)
    rows = ((name, n / full, f"{format_bytes(n)}  {n / full:.1%}") for name, n in held)
    return [Text(title, "bold"), bars(rows, BAR), Text(""), *largest_lines(peak["largest"])]


def largest_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """The largest tensors of a device, equal ones of the calls of a block kind together."""
    table = table_of(("tensor", "component", "how many", "together"))
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows[:LARGEST]:
        size = format_bytes(row["bytes"])
        table.add_row(f"  {row['name']}", row["component"], str(row["count"]), size)
    if rows:
        yield Text("largest tensors that a device keeps", "bold")
        yield table


def notes_lines(notes: Sequence[str]) -> Iterator[RenderableType]:
    """What is to be known of a plan beside its numbers."""
    if notes:
        yield Text("")
        yield Text("notes", "bold")
        yield from (Text(f"  {line}") for line in notes)


def recomputed_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """What the calls of each block kind make again in their backward passes."""
    if rows:
        yield Text("")
        yield Text("made again in backward passes", "bold")
    for row in rows:
        stage = f"stage {row['stage']}, " if "stage" in row else ""
        yield Text(f"  {stage}{row['calls']}: {remade_words(row)}")


def remade_words(row: Mapping[str, Any]) -> str:
    """What a call makes again: operators that stand for most of it first."""
    if row["all"]:
        return f"all {row['of']} operators"
    parts = []
    if row["values"]:
        parts.append(f"{len(row['values'])} of {row['of']} operators: {_some(row['values'])}")
    if row["moves"]:
        parts.append(f"movements of {_some(row['moves'])}")
    return "; ".join(parts) or "nothing"


def _some(names: Sequence[str]) -> str:
    rest = f", {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{', '.join(names[:NAMES])}{rest}"


def _expensive(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of(("operator or movement", "in", "time", "of the step"))
    for row in rows[:EXPENSIVE]:
        name = f"{row['movement']} for {row['key']}" if row["movement"] else row["key"]
        table.add_row(f"  {name}", row["place"], format_seconds(row["s"]), f"{row['share']:.1%}")
    return table
