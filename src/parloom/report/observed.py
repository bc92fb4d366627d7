"""A step of a run beside the simulated one: what each stage did when, and for how long."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.timeline import (
    MESSAGES,
    NORM,
    SHARED,
    Memory,
    Played,
    Process,
    Span,
    Timeline,
)
from parloom.cost.units import format_seconds
from parloom.report.gantt import LEGEND, Chart, pass_of, row
from parloom.runtime.spans import ActionSpan

TITLES = {"P": "prologue", "F": "forward", "B": "backward", "W": "weights", "U": "update"}
WAITS = {
    MESSAGES: "waits for messages",
    SHARED: "waits for shared weights",
    NORM: "waits for all gradients",
}
# What actions wait for; all others are passes, which wait for messages.
AWAITED = {"REDUCE": SHARED, "STEP": NORM, "GATHER": SHARED}
PS = 1e12


def observed_timeline(observed: Sequence[Sequence[ActionSpan]]) -> Timeline:
    """What was observed of each process as a simulated step has it; memory is not observed. Actions
    are taken to wait before they compute, as receivers of messages do.
    """
    processes = []
    for spans in observed:
        played, waited = [], Counter[str]()
        for span in spans:
            begin_s = span.begin_s + span.waited_s
            busy = Played(round((span.end_s - begin_s) * PS), (), (), (), Memory())
            played.append(Span(round(begin_s * PS), span.action, busy))
            waited[AWAITED.get(span.action, MESSAGES)] += round(span.waited_s * PS)
        processes.append(Process("", tuple(played), waited=tuple(waited.items())))
    step_s = max(span.end_s for spans in observed for span in spans)
    return Timeline(round(step_s * PS), tuple(processes), 0)


def observed_screen(
    predicted: Timeline, observed: Timeline, names: Sequence[str], step: int
) -> RenderableType:
    """Both steps of each process on one scale, and how long it took for what."""
    longest = max(predicted.step_ps, observed.step_ps)
    each = zip(names, predicted.processes, observed.processes, strict=True)
    chart = Chart(
        tuple(
            (label, partial(row, process, longest), "")
            for name, known, own in each
            for label, process in ((f"{name} predicted", known), (f"{name} observed", own))
        )
    )
    took = format_seconds(observed.step_s)
    off = observed.step_ps / max(1, predicted.step_ps) - 1
    title = f"step {step} took {took} ({off:+.1%} of {format_seconds(predicted.step_s)} predicted)"
    return Group(
        Text(title, style="bold"),
        chart,
        Text(f"{LEGEND}\n0 to {format_seconds(longest / PS)}", style="dim"),
        Text(""),
        _amounts(predicted, observed, names),
    )


def observed_document(
    observed: Sequence[Sequence[ActionSpan]], names: Sequence[str], step: int
) -> dict[str, Any]:
    """What `simulate --run --json` adds; seconds."""
    timeline = observed_timeline(observed)
    return {
        "step": step,
        "step_s": timeline.step_s,
        "devices": [
            {
                "name": name,
                "seconds": {k: ps / PS for k, ps in by_kind(timeline, index).items()},
                "actions": [asdict(span) for span in observed[index]],
            }
            for index, name in enumerate(names)
        ],
    }


def _amounts(predicted: Timeline, observed: Timeline, names: Sequence[str]) -> Table:
    """Seconds of each kind, observed and predicted."""
    both = [(by_kind(observed, i), by_kind(predicted, i)) for i in range(len(names))]
    titles = (*TITLES.values(), *WAITS.values())
    kinds = [kind for kind in titles if any(one.get(kind) for pair in both for one in pair)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("observed (predicted)")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name, (own, known) in zip(names, both, strict=True):
        cells = (
            f"{format_seconds(own.get(kind, 0) / PS)} ({format_seconds(known.get(kind, 0) / PS)})"
            for kind in kinds
        )
        table.add_row(name, *cells)
    return table


def by_kind(timeline: Timeline, process: int) -> dict[str, int]:
    """Picoseconds of passes by kind, of the step program, and of waits for other stages."""
    device, found = timeline.processes[process], Counter(dict.fromkeys(WAITS.values(), 0))
    for span in device.spans:
        found[TITLES[pass_of(span.name)]] += span.played.ps
    for kind, ps in device.waited:
        # Reductions that passes left under way: those that are observed are waited for in REDUCE.
        found[WAITS.get(kind, TITLES["U"])] += ps
    return dict(found)
