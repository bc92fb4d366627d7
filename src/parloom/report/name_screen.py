"""One explained name on the terminal: layouts drawn, terms in a table, and the next best ways."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.units import format_bytes, format_rate, format_seconds
from parloom.errors import shell_word
from parloom.ir.pcg import TIME
from parloom.report.explain import Document
from parloom.report.explain_name import INPUT, MODULE, PARAMETER
from parloom.report.explain_screen import seconds_words, table_of, time_words
from parloom.report.grid import Grid
from parloom.report.versus import signed_bytes, signed_seconds

READERS, CAUSES = 8, 3
NOTHING = "nothing: every device does all of it"


def name_screen(document: Document, path: str) -> RenderableType:
    """What `parloom explain PLAN NAME` prints."""
    kind = document["kind"]
    if kind == MODULE:
        return _module(document, path)
    if kind == INPUT:
        return Group(*_input(document))
    parts = _parameter(document) if kind == PARAMETER else _operator(document)
    parts += [Text(""), Text("what it costs", "bold"), _terms(document["terms"])]
    return Group(*parts, Text(""), *_ways(document))


def _operator(document: Document) -> list[RenderableType]:
    calls, runs = len(document["alike"]), document["runs_a_step"]
    where = f" at {document['source']}" if document["source"] else ""
    parts: list[RenderableType] = [Text(document["name"], "bold")]
    line = f"{document['op']} in {document['place']}{where}"
    line += f", run {runs} times a step" if runs > 1 else ""
    line += ", and again in the backward pass" if document["recomputed_a_step"] else ""
    if calls > 1:
        line += (
            f"; decided alike for {calls} calls, {format_seconds(document['alike_s'])} of a step"
        )
    parts.append(Text(line))
    work = f"{format_rate(document['flops'], 'FLOP')} a device in each forward pass; "
    parts.append(Text(f"{work if document['flops'] else ''}bound by {document['bound_by']}"))
    parts += [Text(""), Text("split by", "bold")]
    splits = [f"  {axis}: {what}" for axis, what in document["splits"].items()]
    parts += [Text(line) for line in splits or [f"  {NOTHING}"]]
    parts += [Text(""), Text("factors", "bold"), _factors(document["factors"])]
    parts += [Text(""), Text("tensors", "bold"), _tensors(document)]
    for weight in document["weights"]:
        parts += [Text(""), Text(f"how {weight['name']} is stored", "bold")]
        parts.append(_stored(weight["stored"]))
    shown = document.get("tensor") or next(iter(document["results"]), None)
    for tensor in [shown] if shown else []:
        parts += [Text(""), *_drawn(tensor, f"which device makes which part of {tensor['name']}")]
    return parts


def _factors(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of(("factor", "size", "over"))
    for row in rows:
        note = "" if row["kind"] == "plain" else f"  ({row['kind']})"
        over = ", ".join(row["axes"]) or "-"
        table.add_row(f"  {row['factor']}", str(row["size"] or "any"), f"{over}{note}")
    return table


def _tensors(document: Document) -> Table:
    table = table_of(("tensor", "from", "shape", "layout"))
    for tensor in document["operands"]:
        table.add_row(f"  {tensor['name']}", tensor["from"], _shape(tensor), tensor["layout"])
    for tensor in document["results"]:
        table.add_row(f"  {tensor['name']}", "made here", _shape(tensor), tensor["layout"])
    return table


def _shape(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['dtype']}{tensor['shape']}"


def _drawn(tensor: Mapping[str, Any], title: str) -> list[RenderableType]:
    """The grid of a tensor; sums that are still to be made are said."""
    drawn = tensor["grid"]
    grid = Grid(tuple(drawn["rows"]), tuple(drawn["columns"]), tuple(map(tuple, drawn["devices"])))
    parts: list[RenderableType] = [Text(title, "bold"), grid.table("  ")]
    for axis, reduction in tensor.get("partial", ()):
        what = "a part of the sum" if reduction == "sum" else f"a candidate of the {reduction}"
        who = "each microbatch makes" if axis == TIME else f"over {axis} each device holds"
        parts.append(Text(f"  {who} {what}"))
    return parts


def _terms(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of(("term", "of", "over", "level", "bytes", "forward", "backward", "a step"))
    for column in table.columns[5:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"  {row['what']}", row["of"], ", ".join(row["axes"]), row["level"],
            format_bytes(row["bytes"]) if row["bytes"] else "",
            seconds_words(row["forward_s"]), seconds_words(row["backward_s"]),
            seconds_words(row["step_s"]),
        )  # fmt: skip
    return table


def _ways(document: Document) -> list[RenderableType]:
    """The runners-up, with what is added to the step and by what."""
    best, total, tried = (document[k] for k in ("runners_up", "ways", "ways_tried"))
    left_out = document["ways_left_out"]
    if not best:
        return [Text("there is no other way", "bold")]
    title = f"the next best of {tried} other ways, all else as it is"
    if left_out:
        title += f" (of {total}, those that cost least by themselves)"
    elif tried < total:
        title += f" ({total - tried} more are not possible)"
    rows = [*best, *([document["first_that_fits"]] if document["first_that_fits"] else [])]
    table = table_of(("way", "step", "difference", "peak", "fits"))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"  {way_words(row)}", format_seconds(row["step_s"]),
            signed_seconds(row["difference_ps"]),
            f"{format_bytes(row['peak_bytes'])} ({signed_bytes(row['difference_bytes'])})",
            "yes" if row["fits"] else "no",
        )  # fmt: skip
    reasons = table_of(("way", "against the plan"))
    for row in rows:
        reasons.add_row(f"  {way_words(row)}", sentence(row))
    faster = best[0]["difference_ps"] < 0 and best[0]["fits"]
    note = [Text("  the first is faster than the plan's own way: plan again with --method auto")]
    return [Text(title, "bold"), table, *(note if faster else []), Text(""), reasons]


def way_words(row: Mapping[str, Any]) -> str:
    """Another way in words."""
    if "splits" in row:
        return "; ".join(f"{a}: {what}" for a, what in row["splits"].items()) or NOTHING
    stored = {role: row[role] for role in ("weight", "gradient", "optimizer")}
    same = [role for role in stored if stored[role] == stored["optimizer"]]
    rest = [role for role in stored if role not in same]
    text = f"{', '.join(same)} {stored['optimizer']}"
    return f"{text}; {', '.join(rest)} {stored[rest[0]]}" if rest else text


def sentence(row: Mapping[str, Any]) -> str:
    """Why a way is slower, or faster, than the plan's: its causes, the largest first."""
    difference = row["difference_ps"]
    if not difference:
        return "takes as long"
    shown = [f"{time_words(c)} {signed_seconds(c['difference_ps'])}" for c in row["causes"]]
    more = ", ..." if len(shown) > CAUSES else ""
    word = "slower" if difference > 0 else "faster"
    return f"{word}: {', '.join(shown[:CAUSES])}{more}"


def _parameter(document: Document) -> list[RenderableType]:
    calls = len(document["alike"])
    line = f"parameter in {document['place']}, {_shape(document)}"
    line += "" if document["trainable"] else ", not trained"
    line += f"; decided alike for {calls} calls" if calls > 1 else ""
    parts: list[RenderableType] = [Text(document["name"], "bold"), Text(line)]
    parts.append(Text(f"computed with as {document['layout']}"))
    if document["partial_gradient"]:
        over = ", ".join(document["partial_gradient"])
        parts.append(Text(f"its gradient is a sum over {over}"))
    parts += [Text(""), *_drawn(document, "which device computes with which part")]
    parts += [Text(""), Text("stored", "bold")]
    parts.append(_stored(document["stored"]))
    cut = next((s for s in document["stored"].values() if s["grid"]), None)
    if cut is not None:
        parts += [Text(""), *_drawn(cut, "which device stores which chunk of its part")]
    return [*parts, Text(""), *_readers(document["readers"])]


def _stored(roles: Mapping[str, Mapping[str, Any]]) -> Table:
    table = table_of(("", "how", "bytes per device"))
    for role, stored in roles.items():
        table.add_row(f"  {role}", stored["words"], format_bytes(stored["bytes"]))
    return table


def _readers(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    table = table_of(("read by", "as"))
    for row in rows[:READERS]:
        table.add_row(f"  {row['name']}", row["layout"])
    if len(rows) > READERS:
        table.add_row(f"  {len(rows) - READERS} more", "")
    return [table]


def _input(document: Document) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(document["name"], "bold")]
    parts.append(Text(f"{document['is']} tensor, {_shape(document)}: {document['layout']}"))
    if document["is"] == "batch":
        parts.append(Text("it lies as the first operator that reads it wants it"))
    parts += [Text(""), *_drawn(document, "which device has which part")]
    return [*parts, Text(""), *_readers(document["readers"])]


def _module(document: Document, path: str) -> RenderableType:
    parts: list[RenderableType] = [Text(document["name"], "bold")]
    if document["operators"]:
        table = table_of(("operator", "split by", "makes", "a step"))
        table.columns[3].justify = "right"
        for row in document["operators"]:
            words = "; ".join(f"{axis}: {what}" for axis, what in row["splits"].items())
            name = row["name"].removeprefix(document["name"]).lstrip(".")
            table.add_row(f"  {name}", words or "-", row["layout"], seconds_words(row["step_s"]))
        parts += [Text(""), table]
    if document["inputs"]:
        table = table_of(("tensor", "computed as", "weight", "gradient", "optimizer"))
        for row in document["inputs"]:
            stored = (row[role] for role in ("weight", "gradient", "optimizer"))
            name = row["name"].removeprefix(document["name"]).lstrip(".")
            table.add_row(f"  {name}", row["layout"], *stored)
        parts += [Text(""), table]
    first = next((row["name"] for row in (*document["operators"], *document["inputs"])), None)
    if first is not None:
        parts += [Text(""), Text(f"next: parloom explain {path} {shell_word(first)}", "bold")]
    return Group(*parts)
