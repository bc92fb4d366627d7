"""A pipeline explained: what each stage has, its action lists, and the step over time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.units import format_bytes, format_seconds
from parloom.ir.lower_stages import group_lists
from parloom.ir.plan_json import ranks_text
from parloom.ir.text import parse_graph
from parloom.report.case import PipelineCase
from parloom.report.costs import cost_lines, plan_cost_document
from parloom.report.explain import Document
from parloom.report.explain_screen import largest_lines, notes_lines, recomputed_lines
from parloom.report.memory import largest_tensors, recomputed
from parloom.report.name_screen import name_screen
from parloom.report.rewrite_screen import rewrite_screen
from parloom.report.timeline import timeline_document, timeline_screen
from parloom.report.words import process_names, title_words, words

SHOWN = 24  # actions of a list
STAGES = 3  # stages that have what is asked for


def pipeline_explained(case: PipelineCase, rewrites: Iterable[Document] = ()) -> dict[str, Any]:
    """All of it as JSON values; seconds and bytes."""
    plan, timeline = case.plan, case.timeline
    names = process_names(plan.decisions)
    stages = plan.decisions.stages
    return {
        "title": title_words(plan, case.cluster),
        "words": list(words(parse_graph(plan.graph), plan.decisions, case.cluster)),
        "num_microbatches": plan.decisions.num_microbatches,
        "schedule": plan.decisions.schedule,
        "status": plan.status,
        "notes": list(plan.notes),
        "cost": plan_cost_document(plan, case.whole, timeline.step_s),
        "stages": [
            {
                "items": list(s.items),
                "devices": ranks_text(s.devices),
                "microbatches": list(s.microbatches),
                "at_once": s.at_once,
            }
            for s in stages
        ],
        "actions": [[str(action) for action in own] for _, own in group_lists(plan.decisions)],
        "passes": [
            {"name": name, **{f"{k}_s": _longest(case, i, k) for k in "FB"}}
            for i, name in enumerate(names)
        ],
        "rewrites": list(rewrites),
        "largest": _largest(case),
        "recomputed": list(_recomputed(case)),
        **timeline_document(timeline, names, None, case.source),
    }


def pipeline_screen(case: PipelineCase, document: Document) -> RenderableType:
    """What `parloom explain` prints of a pipeline, `document` of it."""
    decisions = case.plan.decisions
    names = process_names(decisions)
    facts = words(parse_graph(case.plan.graph), decisions, case.cluster)
    title = title_words(case.plan, case.cluster)
    return Group(
        timeline_screen(case.timeline, title, names, case.source),
        *map(Text, cost_lines(case.plan, case.whole, case.timeline.step_s)),
        Text(""),
        *(Text(line) for line in facts),
        Text(f"{decisions.num_microbatches} microbatches"),
        *(part for own in document["rewrites"] for part in (Text(""), *rewrite_screen(own))),
        Text(""),
        Text("longest passes and action lists", style="bold"),
        _passes(case, names),
        Text(""),
        Text(
            f"most memory: {names[_fullest(case)]}, {format_bytes(case.timeline.peak_bytes)};"
            " activations below are of one microbatch"
        ),
        *largest_lines(_largest(case)),
        *recomputed_lines(list(_recomputed(case))),
        *notes_lines(case.plan.notes),
    )


def _fullest(case: PipelineCase) -> int:
    """The group of devices that holds most."""
    processes = case.timeline.processes
    return max(range(len(processes)), key=lambda index: processes[index].peak_bytes)


def _largest(case: PipelineCase) -> list[Document]:
    """The largest tensors of the devices that hold most."""
    fullest = _fullest(case)
    own, _ = list(group_lists(case.plan.decisions))[fullest]
    at_peak = case.timeline.processes[fullest].memory.at_peak
    return largest_tensors((case.stage(index) for index in own), at_peak)


def _recomputed(case: PipelineCase) -> Iterator[Document]:
    for index in range(len(case.decisions.stages)):
        for row in recomputed(case.stage(index)):
            yield {"stage": index} | row


def stages_named_screen(document: Document, path: str) -> RenderableType:
    """What `parloom explain PLAN NAME` prints of a pipeline: the name in each stage that has it."""
    found = document["stages"]
    parts: list[RenderableType] = []
    for index, one in enumerate(found[:STAGES]):
        own = str(one["devices"])
        many = "device" if own.isdigit() else "devices"
        title = f"stage {one['stage']} ({many} {own} of the cluster; below from 0 on)"
        parts += [Text("\n" * bool(index) + title, "bold underline"), name_screen(one, path)]
    if len(found) > STAGES:
        rest = ", ".join(str(one["stage"]) for one in found[STAGES:])
        parts += [Text(""), Text(f"and in the stages {rest}; --json has all")]
    return Group(*parts)


def _passes(case: PipelineCase, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for title in ("forward", "backward"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("actions", overflow="fold")
    lists = [own for _, own in group_lists(case.plan.decisions)]
    for index, (name, own) in enumerate(zip(names, lists, strict=True)):
        more = f" .. {own[-1]}" if len(own) > SHOWN else ""
        times = (format_seconds(_longest(case, index, kind)) for kind in "FB")
        table.add_row(name, *times, " ".join(map(str, own[:SHOWN])) + more)
    return table


def _longest(case: PipelineCase, process: int, kind: str) -> float:
    """The longest pass of a kind on a group of devices."""
    spans = case.timeline.processes[process].spans
    passes = [s.played.ps for s in spans if s.name.lstrip("0123456789")[:1] == kind]
    return max(passes, default=0) / 1e12
