"""A plan on one screen: what was decided, what it should cost, what was assumed, what is next."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.units import format_bytes, format_seconds
from parloom.errors import shell_word
from parloom.ir.expected import Aim, Objective, Prediction
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Plan, Stage
from parloom.ir.plan_json import ranks_text
from parloom.ir.text import parse_graph
from parloom.report.alternatives import alternatives_table
from parloom.report.bars import bars
from parloom.report.costs import aim_words, cost_lines, plan_cost_document
from parloom.report.mixed import fullest_bytes, peak_lines
from parloom.report.words import (
    constraint_lines,
    explained_words,
    run_words,
    source_words,
    title_words,
    words,
)

BAR_WIDTH = 32
MEMORY = "memory per device when most is held (optimizer: its state, and what an update works on)"


def plan_screen(
    plan: Plan,
    cluster: Cluster,
    paths: Mapping[str, Path],
    calibration: str | Path | None,
    in_run: float | None = None,
    prove: str = "",
) -> RenderableType:
    """The answer to `parloom plan`, ready to print; `calibration` is the file that it was given,
    `in_run` how many tokens or samples are trained on, `prove` the flags of a proof here.
    """
    parts: list[RenderableType] = [Text(title_words(plan, cluster), style="bold"), Text("")]
    parts.append(_facts(plan, cluster, in_run))
    if plan.prediction is not None:
        parts += [Text(""), Text(MEMORY), _memory(plan, cluster)]
    if plan.alternatives:
        parts += [Text(""), alternatives_table(plan)]
    costs = constraint_lines(plan)
    listed = ("asked for", costs), ("notes", plan.notes), ("assumed", plan.assumptions)
    for title, lines in listed:
        if lines:
            parts += [Text(""), Text(title), *(Text(f"  {line}") for line in lines)]
    if paths:
        parts += [Text(""), Text("saved"), *(Text(f"  {path}") for path in paths.values())]
        word = shell_word(paths["plan"])
        parts += [Text(""), Text(f"next: parloom verify {word}{prove}", style="bold")]
        parts.append(Text(f"then: {run_words(plan, cluster, word, 'train.py')}", style="bold"))
        explained = explained_words(paths["plan"], calibration)
        parts.append(Text(f"why:  parloom explain {explained}", style="bold"))
    return Group(*parts)


def prediction_screen(found: Prediction) -> RenderableType:
    """What a step takes, and what fills memory when most is held."""
    source = source_words(found.source, found.error, found.step_s)
    line = (
        f"{format_seconds(found.step_s)} ({source}), {format_bytes(found.peak_bytes)} at the peak"
    )
    return Group(Text(line), Text(""), Text(MEMORY), _components(found, found.peak_bytes))


def plan_document(
    plan: Plan,
    cluster: Cluster,
    capture_s: float,
    search_s: float,
    path: str,
    in_run: float | None = None,
) -> dict[str, Any]:
    """What `plan --json` prints; the keys are the command line's contract.

    `search_s` is what it took to choose among plans, `capture_s` to build and capture the model.
    """
    prediction = plan.prediction
    step_s = prediction.step_s if prediction else None
    aim = plan.aim or Aim(Objective.TIME, step_s or 0.0, plan.bound_s)
    return {
        "step_s": step_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "solver_gap": plan.solver_gap,
        "objective": {"name": aim.objective.value, "value": aim.value, "bound": aim.bound},
        "cost": None if step_s is None else plan_cost_document(plan, cluster, step_s, in_run),
        "status": plan.status,
        "peak_bytes": prediction.peak_bytes if prediction else None,
        "peaks": dict(prediction.peaks) if prediction else {},
        "memory": [dict(prediction.memory)] if prediction else [],
        "prediction_source": prediction.source if prediction else None,
        "prediction_error": prediction.error if prediction else None,
        "capture_s": capture_s,
        "search_s": search_s,
        "method": plan.method,
        "mesh": _mesh(plan.decisions.stages[0]) if len(plan.decisions.stages) == 1 else [],
        "stages": [
            {
                "items": list(s.items),
                "devices": ranks_text(s.devices),
                "mesh": _mesh(s),
                "microbatches": list(s.microbatches),
                "at_once": s.at_once,
            }
            for s in plan.decisions.stages
        ],
        "num_microbatches": plan.decisions.num_microbatches,
        "batch_semantics": plan.decisions.batch_semantics,
        "schedule": plan.decisions.schedule,
        "alternatives": [
            {"name": a.name, "step_s": a.step_s, "peak_bytes": a.peak_bytes, "fits": a.fits}
            for a in plan.alternatives
        ],
        "constraints": [
            {
                "text": c.text,
                "without_step_s": c.step_s,
                "without_peak_bytes": c.peak_bytes,
                "instead": c.instead,
            }
            for c in plan.constraints
        ],
        "assumptions": list(plan.assumptions),
        "notes": list(plan.notes),
        "plan": path,
    }


def _mesh(stage: Stage) -> list[dict[str, Any]]:
    return [{"axis": axis.name, "size": axis.size} for axis in stage.mesh.axes]


def _facts(plan: Plan, cluster: Cluster, in_run: float | None) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    graph = parse_graph(plan.graph)
    for index, line in enumerate(words(graph, plan.decisions, cluster)):
        table.add_row("" if index else "plan", Text(line))
    used = plan.decisions.num_ranks
    if used < cluster.num_devices:
        table.add_row("devices", Text(f"{used} of {cluster.num_devices}"))
    table.add_row("microbatches", Text(str(plan.decisions.num_microbatches)))
    if plan.prediction is not None:
        step_s, said = plan.prediction.step_s, plan.prediction
        source = source_words(said.source, said.error, step_s)
        table.add_row("step time", Text(f"{format_seconds(step_s)} ({source})"))
        if plan.bound_s:
            above = f"{plan.prediction.step_s / plan.bound_s - 1:.0%}"
            least = f"no plan that is searched takes less than {format_seconds(plan.bound_s)}"
            table.add_row(
                "bound", Text(f"{least}, however well it overlaps; this one is {above} above that")
            )
        for index, line in enumerate(peak_lines(plan, cluster)):
            table.add_row("" if index else "peak", Text(line))
        for index, line in enumerate(cost_lines(plan, cluster, step_s, in_run)):
            table.add_row("" if index else "cost", Text(line))
        if plan.aim is not None:
            table.add_row("objective", Text(aim_words(plan.aim)))
    return table


def _memory(plan: Plan, cluster: Cluster) -> Table:
    """One bar per component, the largest at full width; the share is of what may be used."""
    assert plan.prediction is not None, "a plan with a prediction"
    return _components(plan.prediction, fullest_bytes(plan, cluster))


def _components(found: Prediction, limit: int) -> Table:
    full = max([size for _, size in found.memory] + [1])
    rows = (
        (name, size / full, f"{format_bytes(size)}  {size / max(1, limit):.1%}")
        for name, size in found.memory
    )
    return bars(rows, BAR_WIDTH)
