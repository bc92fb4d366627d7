"""Two plans of one model: the difference of their steps by cause, and of their memory.

Both steps are sums over causes (`cost.ledger`), so the differences add up to that of the steps, to
the last picosecond; what is held at the two peaks adds up to the difference of the peaks. Times of
a pipeline are means over its devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.ledger import Cause
from parloom.cost.tasks import COMPONENTS
from parloom.cost.units import format_bytes, format_seconds
from parloom.ir.plan_json import ranks_text
from parloom.ir.text import parse_graph
from parloom.report.case import Step
from parloom.report.explain import Document
from parloom.report.explain_screen import seconds_words, table_of, time_words
from parloom.report.words import words


def versus(case: Step, other: Step, name: str) -> Document:
    """What differs, largest first; differences are those of `other`, called `name`, minus the
    plan's, in ps and bytes.
    """
    places = dict.fromkeys((*case.ledger.by_place(), *other.ledger.by_place()))
    memory = zip(COMPONENTS, case.ledger.peak.held, other.ledger.peak.held, strict=True)
    return {
        "plan": _side(case, case.plan.method),
        "versus": _side(other, name),
        "difference_ps": other.ledger.step_ps - case.ledger.step_ps,
        "causes": causes(case.ledger.by_cause(), other.ledger.by_cause()),
        "places": [
            {
                "place": place,
                **_both(case.ledger.by_place()[place], other.ledger.by_place()[place]),
                "causes": causes(_of_place(case, place), _of_place(other, place)),
            }
            for place in places
        ],
        "difference_bytes": other.ledger.peak.num_bytes - case.ledger.peak.num_bytes,
        "memory": [
            {
                "component": component,
                "plan_bytes": mine,
                "versus_bytes": theirs,
                "difference_bytes": theirs - mine,
            }
            for component, mine, theirs in sorted(memory, key=lambda m: -abs(m[2] - m[1]))
            if mine or theirs
        ],
    }


def causes(mine: Mapping[Cause, int], theirs: Mapping[Cause, int]) -> list[Document]:
    """The causes of two sums, those that differ most first; they add up to the difference."""
    found = [
        {
            "what": cause.what,
            "transfer": cause.transfer,
            "level": cause.level,
            **_both(mine.get(cause, 0), theirs.get(cause, 0)),
        }
        for cause in sorted({*mine, *theirs})
    ]
    return sorted(found, key=lambda row: -abs(row["difference_ps"]))


def versus_screen(document: Document) -> RenderableType:
    """What `parloom explain PLAN --versus OTHER` prints."""
    plan, other = document["plan"], document["versus"]
    parts: list[RenderableType] = [Text(headline(document), "bold")]
    for side in (plan, other):
        parts += [Text(""), Text(f"{side['name']}, {format_seconds(side['step_s'])}", "bold")]
        parts += [Text(f"  {line}") for line in side["words"]]
    several = any(len(side["stages"]) > 1 for side in (plan, other))
    title = "step time by cause, the mean over all devices" if several else "step time by cause"
    parts += [Text(""), Text(title, "bold")]
    parts.append(_table(other["name"], document["causes"], document["difference_ps"]))
    for place in document["places"]:
        took = " against ".join(format_seconds(place[f"{k}_ps"] / 1e12) for k in ("plan", "versus"))
        parts += [Text(""), Text(f"{place['place']}: {took}", "bold")]
        parts.append(_table(other["name"], place["causes"], place["difference_ps"]))
    parts += [Text(""), Text("memory at the peak", "bold"), _memory(document)]
    return Group(*parts)


def headline(document: Document) -> str:
    """Which plan is faster, by how much, and by which cause most of all."""
    plan, other, ps = document["plan"], document["versus"], document["difference_ps"]
    name = other["plan_name"]
    if not ps:
        return f"{name} takes exactly as long as the plan"
    word = "slower" if ps > 0 else "faster"
    share = abs(ps) / 1e12 / plan["step_s"] if plan["step_s"] else 0.0
    text = f"{name} is {format_seconds(abs(ps) / 1e12)} ({share:.1%}) {word} than the plan"
    return f"{text}, most of all for {time_words(why(document['causes'], ps))}"


def why(rows: Iterable[Mapping[str, Any]], difference_ps: int) -> Mapping[str, Any]:
    """The cause that speaks most for the difference: the largest of its sign."""
    sign = 1 if difference_ps > 0 else -1
    return max(rows, key=lambda row: sign * int(row["difference_ps"]))


def signed_seconds(ps: int) -> str:
    """`+3.2 ms`, `-80 us`."""
    return f"{'-' if ps < 0 else '+'}{format_seconds(abs(ps) / 1e12)}"


def signed_bytes(size: int) -> str:
    """`+3.2 MiB`, `-80 KiB`."""
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def _side(case: Step, name: str) -> Document:
    return {
        "name": name,
        "plan_name": case.plan.name if name == case.plan.method else name,
        "cluster": case.cluster.name,
        "stages": [
            {
                "devices": ranks_text(stage.devices),
                "mesh": [{"axis": axis.name, "size": axis.size} for axis in stage.mesh.axes],
            }
            for stage in case.decisions.stages
        ],
        "num_microbatches": case.decisions.num_microbatches,
        "step_ps": case.ledger.step_ps,
        "step_s": case.timeline.step_s,
        "peak_bytes": case.ledger.peak.num_bytes,
        "fits": case.fits(case.timeline),
        "words": list(words(parse_graph(case.plan.graph), case.decisions, case.cluster)),
    }


def _both(mine: int, theirs: int) -> Document:
    return {"plan_ps": mine, "versus_ps": theirs, "difference_ps": theirs - mine}


def _of_place(case: Step, place: str) -> dict[Cause, int]:
    return {cause: ps for (at, cause), ps in case.ledger.time.items() if at == place}


def _table(name: str, rows: Iterable[Mapping[str, Any]], difference_ps: int) -> Table:
    table = table_of(("cause", "plan", name, "difference"))
    for column in table.columns[1:]:
        column.justify = "right"
    sums = {"plan_ps": 0, "versus_ps": 0, "difference_ps": difference_ps}
    for row in rows:
        table.add_row(f"  {time_words(row)}", *_cells(row))
        for side in ("plan_ps", "versus_ps"):
            sums[side] += row[side]
    table.add_row("  together", *_cells(sums))
    return table


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shown = (seconds_words(row[side] / 1e12) for side in ("plan_ps", "versus_ps"))
    difference = row["difference_ps"]
    return (*shown, signed_seconds(difference) if difference else "")


def _memory(document: Document) -> Table:
    table = table_of(("component", "plan", document["versus"]["name"], "difference"))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in document["memory"]:
        mine, theirs = format_bytes(row["plan_bytes"]), format_bytes(row["versus_bytes"])
        less = row["difference_bytes"]
        table.add_row(f"  {row['component']}", mine, theirs, signed_bytes(less) if less else "")
    peaks = (format_bytes(document[side]["peak_bytes"]) for side in ("plan", "versus"))
    table.add_row("  together", *peaks, signed_bytes(document["difference_bytes"]))
    return table
