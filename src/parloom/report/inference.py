"""An inference plan on one screen, and as a document."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parloom.cost.units import format_bytes, format_count, format_seconds
from parloom.errors import shell_word
from parloom.ir.expected import Objective, Prediction
from parloom.ir.factors import factorize
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Decisions, Inference, Plan
from parloom.ir.samples import num_samples
from parloom.ir.text import parse_graph
from parloom.report.alternatives import alternatives_table
from parloom.report.words import constraint_lines, source_words, title_words, words


def rate_of(plan: Plan) -> tuple[float, str]:
    """How much is answered in a second, and in what unit."""
    inference = _inference(plan)
    count = num_samples(factorize(parse_graph(plan.graph)))
    per_answer = max(1, inference.new_tokens)
    rate = count * per_answer / inference.batch_s(_expected(plan).step_s)
    return rate, "tokens" if inference.new_tokens else "samples"


def of_one_token(plan: Plan) -> str | None:
    """Which of a plan's two programs is shown, in words; None where it has one."""
    inference = plan.inference
    if inference is None or inference.prefill is None:
        return None
    times, prompts = inference.new_tokens - 1, format_seconds(inference.prefill.step_s)
    return f"shown is the program of one token, which runs {times} times; prompts take {prompts}"


def inference_document(plan: Plan, path: str, capture_s: float, search_s: float) -> dict[str, Any]:
    """What `plan --inference --json` prints; `step_s` is one pass of the plan's own program."""
    inference, found, aim = _inference(plan), _expected(plan), plan.aim
    rate, unit = rate_of(plan)
    held = _held(inference, found)
    return {
        "latency_s": inference.answer_s(found.step_s),
        "prefill_s": None if inference.prefill is None else inference.prefill.step_s,
        "step_s": found.step_s,
        "passes": dict(zip(("prefill", "step"), inference.passes, strict=True)),
        "throughput": {"unit": unit, "per_s": rate},
        "new_tokens": inference.new_tokens,
        "objective": None
        if aim is None
        else {"name": aim.objective.value, "value": aim.value, "bound": aim.bound},
        "gap": plan.gap,
        "status": plan.status,
        "peak_bytes": held["peak"],
        "memory": {name: size for name, size in held.items() if name != "peak"},
        "prediction_source": found.source,
        "prediction_error": found.error,
        "capture_s": capture_s,
        "search_s": search_s,
        "method": plan.method,
        "mesh": [{"axis": a.name, "size": a.size} for a in plan.decisions.stages[0].mesh.axes],
        "alternatives": [
            {"name": a.name, "batch_s": a.step_s, "peak_bytes": a.peak_bytes, "fits": a.fits}
            for a in plan.alternatives
        ],
        "constraints": [
            {"text": c.text, "without_s": c.step_s, "without_peak_bytes": c.peak_bytes}
            for c in plan.constraints
        ],
        "assumptions": list(plan.assumptions),
        "notes": list(plan.notes),
        "plan": path,
    }


def inference_screen(plan: Plan, cluster: Cluster, paths: Mapping[str, Path]) -> RenderableType:
    """The answer to `parloom plan --inference`, ready to print."""
    inference, found = _inference(plan), _expected(plan)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for index, line in enumerate(words(parse_graph(plan.graph), plan.decisions, cluster)):
        table.add_row("" if index else "plan", Text(line))
    for name, line in _lines(plan, inference, found):
        table.add_row(name, Text(line))
    parts: list[RenderableType] = [Text(title_words(plan, cluster), style="bold"), Text(""), table]
    if plan.alternatives:
        parts += [Text(""), alternatives_table(plan)]
    asked = ("asked for", constraint_lines(plan))
    for title, lines in (asked, ("notes", plan.notes), ("assumed", plan.assumptions)):
        if lines:
            parts += [Text(""), Text(title), *(Text(f"  {line}") for line in lines)]
    if paths:
        parts += [Text(""), Text("saved"), *(Text(f"  {path}") for path in paths.values())]
        parts += [Text(""), Text(f"next: parloom verify {shell_word(paths['plan'])}", style="bold")]
    return Group(*parts)


def _lines(plan: Plan, inference: Inference, found: Prediction) -> list[tuple[str, str]]:
    answer_s = inference.answer_s(found.step_s)
    source = source_words(found.source, found.error, answer_s)
    rate, unit = rate_of(plan)
    lines = []
    if inference.prefill is None:
        times = inference.steps
        each = "" if times == 1 else f", {times} steps of {format_seconds(found.step_s)} each"
        lines.append(
            ("pass" if times == 1 else "latency", f"{format_seconds(answer_s)} ({source}){each}")
        )
    else:
        prompt_s, times = inference.prefill.step_s, inference.new_tokens - 1
        parts = f"prompts {format_seconds(prompt_s)}, then {times} x {format_seconds(found.step_s)}"
        lines.append(("latency", f"{format_seconds(answer_s)} ({source})"))
        lines.append(("", f"{inference.new_tokens} tokens after each prompt: {parts}"))
        if len(plan.decisions.stages) > 1:
            lines.append(("pipeline", _overlap(plan.decisions)))
    lines.append(("throughput", f"{format_count(rate)} {unit} a second{_follows(inference)}"))
    aim = plan.aim
    if aim is not None and aim.bound:
        what = "an answer takes" if aim.objective is Objective.LATENCY else f"each of {unit} takes"
        least = f"no plan that is searched is below {format_seconds(aim.bound)}"
        above = f"this one is {aim.value / aim.bound - 1:.0%} above that"
        lines.append(("bound", f"{what} {format_seconds(aim.value)}; {least}; {above}"))
    held = _held(inference, found)
    sizes = ", ".join(f"{n} {format_bytes(size)}" for n, size in held.items() if n != "peak")
    lines.append(("memory", f"{format_bytes(held['peak'])} per device at the peak: {sizes}"))
    return lines


def _follows(inference: Inference) -> str:
    """How batches follow each other in stages."""
    if inference.period_s is None:
        return ""
    return f": a batch every {format_seconds(inference.period_s)}, as stages begin the next one"


def _overlap(decisions: Decisions) -> str:
    """How passes of tokens follow each other in stages."""
    count, stages = decisions.num_microbatches, len(decisions.stages)
    if count == 1:
        return (
            f"one microbatch: no two passes overlap, each token waits for the one before it on its"
            f" way through all {stages} stages (more prompts at once, --batch, and --objective"
            " throughput give more microbatches)"
        )
    return f"{count} microbatches: stages begin the next token of one while others are at the rest"


def _held(inference: Inference, found: Prediction) -> dict[str, int]:
    """Weights, caches and the rest of what a device holds at most, in either program."""
    both = (found, *([inference.prefill] if inference.prefill else []))
    most = max(both, key=lambda prediction: prediction.peak_bytes)
    weights = dict(most.memory).get("weights", 0)
    rest = most.peak_bytes - weights - inference.cache_bytes
    return {
        "peak": most.peak_bytes,
        "weights": weights,
        "cache": inference.cache_bytes,
        "working set": rest,
    }


def _inference(plan: Plan) -> Inference:
    assert plan.inference is not None, "a plan for inference"
    return plan.inference


def _expected(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "a plan with a prediction"
    return plan.prediction
