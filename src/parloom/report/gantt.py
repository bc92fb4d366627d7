"""A pipeline over time in the terminal: a row for each group of devices, and what it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from parloom.cost.tasks import COMPUTE
from parloom.cost.timeline import MESSAGES, NORM, SHARED, Process, Timeline, sampled
from parloom.cost.units import format_bytes, format_seconds
from parloom.report.bars import levels

COLUMNS, LEAST = 72, 16
GAP = 2
IDLE = "·"
# What a column shows: the kind that takes most of it.
COLORS = {"P": "yellow", "F": "blue", "B": "green", "W": "cyan", "U": "magenta"}
LEGEND = (
    "P prologue, F forward, B backward, W gradients of weights apart, U reduce and update, · idle"
)


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows of a label, what is drawn in so many columns, and what is said of it: as many columns
    as there is room for, and at most `COLUMNS`.
    """

    rows: tuple[tuple[str, Callable[[int], Text], str], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        beside = max(cell_len(label) for label, _, _ in self.rows) + GAP
        beside += max(cell_len(said) for _, _, said in self.rows) + GAP
        columns = max(LEAST, min(COLUMNS, options.max_width - beside))
        chart = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
        for justify in ("left", "left", "right"):
            chart.add_column(justify=justify, no_wrap=True)
        for label, draw, said in self.rows:
            chart.add_row(label, draw(columns), said)
        yield chart


def gantt(timeline: Timeline, names: Sequence[str]) -> RenderableType:
    """Rows of stages over the step; then for each what it does, waits for, sends and holds."""
    rows = []
    for index, (name, process) in enumerate(zip(names, timeline.processes, strict=True)):
        rows += [
            (name, partial(row, process, timeline.step_ps), ""),
            ("", partial(_held, timeline, index), format_bytes(process.memory.peak)),
        ]
    end = f"0 to {format_seconds(timeline.step_s)}; below each row the memory in use"
    legend = Text(f"{LEGEND}\n{end}", style="dim")
    return Group(Chart(tuple(rows)), legend, Text(""), _shares(timeline, names))


def _held(timeline: Timeline, index: int, columns: int) -> Text:
    lines = zip(*sampled(timeline, index, columns), strict=True)
    return Text(levels([sum(column) for column in lines], timeline.peak_bytes))


def row(process: Process, step_ps: int, columns: int = COLUMNS) -> Text:
    """One character for each equal part of the step."""
    taken: list[dict[str, int]] = [{} for _ in range(columns)]
    edges = [step_ps * column // columns for column in range(columns + 1)]
    for span in process.spans:
        kind = pass_of(span.name)
        end = span.start_ps + span.played.ps
        first = min(columns - 1, span.start_ps * columns // max(1, step_ps))
        for column in range(first, columns):
            inside = min(end, edges[column + 1]) - max(span.start_ps, edges[column])
            if inside > 0:
                taken[column][kind] = taken[column].get(kind, 0) + inside
            if end <= edges[column + 1]:
                break
    text = Text()
    for column, kinds in enumerate(taken):
        idle = edges[column + 1] - edges[column] - sum(kinds.values())
        kind, most = max(kinds.items(), key=lambda entry: entry[1], default=("", 0))
        if most < idle or not kind:
            text.append(IDLE, style="dim")
        else:
            text.append(kind, style=COLORS[kind])
    return text


def pass_of(name: str) -> str:
    """`F`, `B` or `W` of a pass (`F3`, `2B0`; of one stage `F`, `B last`), `P` of the prologue,
    which all microbatches have before the first pass (`P0`; of one stage `PROLOGUE`), `U` of the
    rest.
    """
    action = name.lstrip("0123456789")
    letter, rest = action[:1], action[1:]
    is_pass = letter in ("P", "F", "B", "W") and (rest == "" or rest.isdigit() or rest[0] == " ")
    return letter if is_pass or action == "PROLOGUE" else "U"


def _shares(timeline: Timeline, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for title in ("computes", "waits for others", "waits for its own", "sends", "idle"):
        table.add_column(title, justify="right")
    step = max(1, timeline.step_ps)
    for index, name in enumerate(names):
        busy = timeline.busy(index)
        exposed = timeline.exposed(index)
        others = sum(exposed.get(kind, 0) for kind in (MESSAGES, SHARED, NORM))
        own = sum(exposed.values()) - others
        sends = sum(m.end_ps - m.start_ps for m in timeline.messages if m.sender == index)
        idle = step - busy.get(COMPUTE, 0)
        shares = (busy.get(COMPUTE, 0), others, own, sends, idle)
        table.add_row(name, *(f"{share / step:.1%}" for share in shares))
    return table
