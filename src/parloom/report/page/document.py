"""All that a report shows, as one JSON document: what its page is drawn from."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from math import prod
from typing import Any

from parloom.cost.money import usd_per_hour, usd_per_step
from parloom.cost.utilization import model_flops, utilization
from parloom.errors import shell_word
from parloom.ir.plan_json import ranks_text
from parloom.ir.regular_parts import used_devices
from parloom.ir.text import parse_graph
from parloom.report.case import Case, PipelineCase, Step
from parloom.report.costs import cost_lines, plan_samples, plan_work
from parloom.report.explain import bound_words
from parloom.report.naming import SAMPLES
from parloom.report.page.cards import cards, parameter_cards
from parloom.report.page.graph import graph_view, operator_times
from parloom.report.page.network import network_view
from parloom.report.page.sides import Side
from parloom.report.page.steps import device_limits, memory_view, steps_view
from parloom.report.rewrites import rewrites_explained
from parloom.report.versus import headline, versus
from parloom.report.words import constraint_lines, device_words, title_words, words

Document = dict[str, Any]
Say = Callable[[str], None]
FORMAT, VERSION = "parloom.report", 1


def report_document(sides: Sequence[Side], say: Say) -> Document:
    """The report of one plan, or of several beside each other."""
    first = sides[0]
    return {
        "format": FORMAT,
        "version": VERSION,
        "plans": [_plan(side, say) for side in sides],
        "differences": [_versus(first.step, side.step, side.path) for side in sides[1:]],
    }


def _plan(side: Side, say: Say) -> Document:
    plan, step, graph, cases = side.plan, side.step, side.graph(), side.cases()
    say(f"{side.path}: model, devices, step and memory")
    return {
        "path": side.path,
        "is_file": side.is_file,
        "word": shell_word(side.path),
        "title": title_words(plan, step.cluster),
        "model": plan.source.spec,
        "summary": _summary(side),
        "words": list(words(parse_graph(plan.graph), plan.decisions, step.cluster)),
        "bound_by": bound_words(step) if isinstance(step, Case) else "",
        "constraints": list(constraint_lines(plan)),
        "assumptions": list(plan.assumptions),
        "notes": [*plan.notes, *filter(None, (step.warning,)), *step.source.notes],
        "command": plan.command(),
        "causes": [
            {"what": c.what, "transfer": c.transfer, "level": c.level, "ps": ps}
            for c, ps in sorted(step.ledger.by_cause().items(), key=lambda own: (-own[1], own[0]))
        ],
        "graph": graph_view(graph, cases, plan.decisions.num_ranks),
        "cards": cards(side, say) | parameter_cards(side),
        "network": network_view(side),
        "steps": steps_view(side),
        "memory": memory_view(side),
        "alternatives": [
            {
                "name": a.name,
                "step_s": a.step_s,
                "peak_bytes": a.peak_bytes,
                "fits": a.fits,
                "is_plan": index == plan.own,
            }
            for index, a in enumerate(plan.alternatives)
        ],
        "front": _front(side),
        "why_not": [_versus(step, other, name) for name, other in side.others.items()],
        "rewrites": list(rewrites_explained(step, side.play)),
        "stages": _stages(side),
    }


def _summary(side: Side) -> Document:
    plan, step = side.plan, side.step
    step_s = step.timeline.step_s
    low, high = step.source.band(step_s)
    whole = step.whole
    model, used = parse_graph(plan.graph), used_devices(whole, plan.decisions)
    work, samples = plan_work(plan), plan_samples(plan)
    peaks = [process.peak_bytes for process in step.timeline.processes]
    limits = device_limits(side)
    fullest, limit = max(zip(peaks, limits, strict=True), key=lambda both: both[0] / both[1])
    return {
        "step_s": step_s,
        "band_s": [low, high],
        "source": step.source.name,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "solver_gap": plan.solver_gap,
        "peak_bytes": fullest,
        "limit_bytes": limit,
        "devices": device_words(step.cluster),
        "num_devices": plan.decisions.num_ranks,
        "cluster": step.cluster.name,
        "method": plan.method,
        "num_microbatches": plan.decisions.num_microbatches,
        "num_stages": len(plan.decisions.stages),
        "schedule": plan.decisions.schedule if len(plan.decisions.stages) > 1 else "",
        "price_per_hour": usd_per_hour(whole, plan.decisions),
        "price_per_step": usd_per_step(whole, plan.decisions, step_s),
        "cost": cost_lines(plan, whole, step_s),
        "status": plan.status,
        "model_flops": plan.decisions.apart * model_flops(model),
        "mfu": utilization(model, used, step_s, plan.decisions.apart),
        "work": {"unit": work.unit, "in_step": work.in_step},
        "samples": samples,
        "at_once": _at_once(side.cases()[0], samples),
        "parameters": sum(e.value.spec.num_elements for e in model.of_kind("parameter")),
        "parloom": version("parloom"),
    }


def _at_once(case: Case, samples: int) -> int:
    """Samples that a device works on at a time, in the operator that takes longest."""
    times = operator_times([case])
    longest = max(times, key=lambda place: sum(times[place]), default=("", ""))
    axes = case.splits.get(longest, {})
    split = prod(case.mesh[a].size for a, ways in axes.items() if SAMPLES in ways)
    return max(1, samples // (case.decisions.num_microbatches * split))


def _front(side: Side) -> Document | None:
    """What was planned on other clusters, as far as it is drawn."""
    if side.front is None:
        return None
    rows = [row for row in side.front["rows"] if row["reason"] is None]
    return {"unit": side.front["work"]["unit"], "rows": rows, "prices": side.front["prices"]}


def _stages(side: Side) -> list[Document]:
    decisions = side.plan.decisions
    if not isinstance(side.step, PipelineCase):
        return []
    reads = defaultdict[int, set[int]](set)
    for transfer in side.step.stages.transfers:
        reads[transfer.target].add(transfer.source)
    return [
        {
            "items": list(stage.items),
            "devices": ranks_text(stage.devices),
            "microbatches": list(stage.microbatches),
            "at_once": stage.at_once,
            "reads": sorted(reads[index]),
        }
        for index, stage in enumerate(decisions.stages)
    ]


def _versus(step: Step, other: Step, name: str) -> Document:
    found = versus(step, other, name)
    return found | {"headline": headline(found)}
