"""A simulated step on one screen: what is busy, what is waited for, and memory over time."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.measured import Source
from parloom.cost.tasks import COMPONENTS
from parloom.cost.timeline import Timeline, sampled
from parloom.cost.units import format_bytes, format_seconds
from parloom.report.bars import levels
from parloom.report.gantt import gantt
from parloom.report.words import source_words

COLUMNS = 48


def timeline_screen(
    timeline: Timeline, title: str, names: Sequence[str], source: Source
) -> RenderableType:
    """What `parloom simulate` prints; `names` are the processes'."""
    step = timeline.step_ps
    bound = format_seconds(timeline.bound_ps / 1e12)
    gap = step / timeline.bound_ps - 1 if timeline.bound_ps else 0.0
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(
            f"step time {format_seconds(step / 1e12)} (of this plan at least {bound}, {gap:+.1%})"
        ),
        *([Text(_repeated(timeline))] if timeline.period_ps is not None else []),
        Text(source_words(source.name, source.error, timeline.step_s)),
        *(Text(note) for note in source.notes),
    ]
    if len(names) > 1:
        return Group(*parts, Text(""), gantt(timeline, names))
    for index, name in enumerate(names):
        parts += [Text(""), Text(name, style="bold"), _streams(timeline, index)]
        exposed = timeline.exposed(index)
        if exposed:
            parts += [Text("waiting for"), _amounts(exposed, step)]
        parts += [
            Text("memory over the step, and the most of each, not all at once"),
            _memory(timeline, index),
        ]
    return Group(*parts)


def timeline_document(
    timeline: Timeline, names: Sequence[str], trace: str | None, source: Source
) -> dict[str, Any]:
    """What `simulate --json` prints; seconds and bytes.

    `lower_bound_s` is what no overlap of this plan's work can beat; a plan's `bound_s` is what no
    plan can. `period_s`: from step to step where they follow each other at once, as of tokens in a
    pipeline. `memory` is the most of each component, `memory_at_peak` what makes up
    `peak_bytes`.
    """
    return {
        "step_s": timeline.step_ps / 1e12,
        "period_s": timeline.period_s,
        "source": source.name,
        "band_s": list(source.band(timeline.step_s)),
        "notes": list(source.notes),
        "lower_bound_s": timeline.bound_ps / 1e12,
        "peak_bytes": timeline.peak_bytes,
        "devices": [
            {
                "name": name,
                "busy_s": {k: ps / 1e12 for k, ps in timeline.busy(index).items()},
                "exposed_s": {k: ps / 1e12 for k, ps in timeline.exposed(index).items()},
                "peak_bytes": process.memory.peak,
                "memory": dict(zip(COMPONENTS, process.memory.peaks, strict=True)),
                "memory_at_peak": dict(zip(COMPONENTS, process.memory.at_peak, strict=True)),
            }
            for index, (name, process) in enumerate(zip(names, timeline.processes, strict=True))
        ],
        "trace": trace,
    }


def _repeated(timeline: Timeline) -> str:
    """How passes follow each other, and whether they overlap."""
    text = f"one pass every {format_seconds(timeline.period_s)} where they follow each other"
    if timeline.each_ps < timeline.step_ps:
        return f"{text}: stages begin the next one while others are at this one"
    return f"{text}: no two overlap, for each waits for the tokens of the one before it"


def _streams(timeline: Timeline, index: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stream")
    for column in ("busy", "idle"):
        table.add_column(column, justify="right")
    for name, ps in timeline.busy(index).items():
        share = ps / timeline.step_ps if timeline.step_ps else 0.0
        table.add_row(f"  {name}", f"{format_seconds(ps / 1e12)}  {share:.1%}", f"{1 - share:.1%}")
    return table


def _amounts(amounts: dict[str, int], whole: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for name, ps in sorted(amounts.items(), key=lambda amount: -amount[1]):
        table.add_row(f"  {name}", f"{format_seconds(ps / 1e12)}  {ps / whole:.1%}")
    return table


def _memory(timeline: Timeline, index: int) -> Table:
    """One line a component, all to the same scale: that of the highest peak of all together."""
    memory = timeline.processes[index].memory
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(min_width=COLUMNS)
    table.add_column(justify="right")
    lines = sampled(timeline, index, COLUMNS)
    for name, line, peak in zip(COMPONENTS, lines, memory.peaks, strict=True):
        if peak:
            table.add_row(f"  {name}", Text(levels(line, memory.peak)), format_bytes(peak))
    together = [sum(column) for column in zip(*lines, strict=True)]
    table.add_row("  together", Text(levels(together, memory.peak)), format_bytes(memory.peak))
    return table
