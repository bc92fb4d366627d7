"""A workflow's plan, and its simulation, on a screen and as JSON documents."""

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from parloom.cost.units import format_dollars, format_rate, format_seconds
from parloom.report.rows import Rows
from parloom.workflow.exact import in_time
from parloom.workflow.model import SOLVED, Rule, Worker, Workflow
from parloom.workflow.plan import Load, Plan
from parloom.workflow.simulate import Expected, Played


def plan_document(plan: Plan, whole: Expected, search_s: float) -> dict[str, Any]:
    """The plan in JSON values; infinite times are null."""
    workflow = plan.workflow
    return {
        "workflow": workflow.name,
        "method": plan.method,
        "traffic": workflow.traffic.value,
        "usd_per_h": plan.usd_per_h,
        "workers_usd_per_h": plan.workers_usd_per_h,
        "traffic_usd_per_h": plan.traffic_usd_per_h,
        "bound_usd_per_h": plan.bound_usd_per_h,
        "gap": plan.gap,
        "accuracy": plan.accuracy,
        "accuracy_floor": None if workflow.accuracy.rule is Rule.NONE else workflow.accuracy.floor,
        "latency_s": plan.latency_s,
        "latency_bound_s": workflow.latency_s,
        "in_time": _in_time(plan),
        "path": list(plan.path),
        "expected_latency_s": whole.latency_s,
        "end_to_end_s": whole.end_to_end_s,
        "operators": [
            {
                "name": operator.name,
                "variant": plan.variants[operator.name],
                "rate_per_s": workflow.rates[operator.name],
                "time_s": plan.operator_s(operator.name),
            }
            for operator in workflow.order
        ],
        "workers": [_load_document(workflow, load) for load in plan.loads],
        "flows": [
            {
                "from": flow.producer,
                "to": flow.consumer,
                "from_tier": workflow.tiers[flow.sender],
                "to_tier": workflow.tiers[flow.receiver],
                "rate_per_s": flow.rate_per_s,
                "bytes_per_s": flow.bytes_per_s,
                "usd_per_h": flow.usd_per_h,
            }
            for flow in plan.flows
        ],
        "search_s": search_s,
        "interrupted": plan.interrupted,
        "assumptions": _assumptions(workflow),
    }


def _load_document(workflow: Workflow, load: Load) -> dict[str, Any]:
    worker = workflow.worker(load.worker)
    return {
        "operator": load.operator,
        "variant": load.variant,
        "worker": load.worker,
        "tier": workflow.tiers[worker.tier],
        "count": load.count,
        "rate_per_s": load.rate_per_s,
        "utilization": load.utilization,
        "time_s": load.time_s,
        "usd_per_h": worker.usd_per_h * load.count,
    }


def _in_time(plan: Plan) -> bool | None:
    return None if plan.workflow.latency_s is None else in_time(plan)


def _assumptions(workflow: Workflow) -> list[str]:
    ends = [tuple(workflow.tiers[tier] for tier in pair) for pair in workflow.unused_links]
    return [
        *workflow.assumed,
        *(
            f"traffic is {workflow.traffic}: the link from {a!r} to {b!r} is not used"
            for a, b in ends
        ),
    ]


def plan_screen(plan: Plan, whole: Expected, next_command: str) -> RenderableType:
    """What is deployed where, what it costs, and what it reaches."""
    workflow = plan.workflow
    lines: list[RenderableType] = [
        Text(f"{workflow.name}: {plan.method}, {workflow.traffic} traffic")
    ]
    lines += [Text(_cost_words(plan)), *map(Text, _reached(plan, whole))]
    lines += [Text(""), _workers_table(plan), Text(""), _flows_table(plan)]
    full = sorted({load.worker for load in plan.loads if math.isinf(load.time_s)})
    if full:
        bounded = workflow.latency_s is not None
        advice = f"{plan.method} looks at no bound" if bounded else "--latency leaves room"
        busy = f"{', '.join(full)}: busy all the time, so that waits grow for ever; {advice}"
        lines += [Text(""), Text(busy)]
    if _in_time(plan) is False:
        late = f"this plan misses the latency bound, which {plan.method} does not look at;"
        lines += [Text(""), Text(f"{late} --method exact keeps it, where a plan does")]
    if assumed := _assumptions(workflow):
        lines += [Text(""), *(Text(f"assumed {line}") for line in assumed)]
    if plan.interrupted:
        lines += [Text(""), Text("the search was interrupted: the best plan so far")]
    return Group(*lines, Text(""), Text(f"next: {next_command}"))


def _cost_words(plan: Plan) -> str:
    text = (
        f"{dollars(plan.usd_per_h)} an hour: workers {dollars(plan.workers_usd_per_h)},"
        f" traffic {dollars(plan.traffic_usd_per_h)}"
    )
    if plan.bound_usd_per_h is None or plan.gap is None:
        return f"{text}; no bound ({plan.method} proves none)"
    of = "" if plan.method == "exact" else " of plans of this kind"
    proved = "the least there is" if plan.gap < 1e-6 else f"gap {plan.gap:.2%}"
    return f"{text}; bound {dollars(plan.bound_usd_per_h)}{of}, {proved}"


def _reached(plan: Plan, whole: Expected) -> list[str]:
    workflow, found = plan.workflow, []
    if plan.accuracy is not None:
        floor = workflow.accuracy.floor
        found.append(f"accuracy {100 * plan.accuracy:.2f}%, at least {100 * floor:.4g}% asked for")
    most = workflow.latency_s
    asked = "" if most is None else f", at most {format_seconds(most)} asked for"
    late = "" if _in_time(plan) in (None, True) else ": TOO LATE"
    found.append(f"latency {seconds(plan.latency_s)} on the slowest path (M/D/1){asked}{late}")
    found.append(f"  {' -> '.join(plan.path)}")
    if math.isfinite(whole.latency_s):
        shorter = whole.latency_s < plan.latency_s * (1 - SOLVED)
        why = ", as queues behind others are shorter" if shorter else ""
        line = f"  expected {seconds(whole.latency_s)}{why}"
        end = whole.end_to_end_s
        joins = "" if end is None else f"; {seconds(end)} from end to end, joins waited for"
        found.append(line + joins)
    return found


def _workers_table(plan: Plan) -> Rows:
    table = Rows(box=None, pad_edge=False)
    for name in ("operator", "variant", "workers", "tier"):
        table.add_column(name)
    for name in ("requests/s", "busy", "time", "$/h"):
        table.add_column(name, justify="right")
    for operator in plan.workflow.order:
        for load in plan.loads_of(operator.name):
            worker = plan.workflow.worker(load.worker)
            table.add_row(operator.name, load.variant, *_load_cells(plan.workflow, worker, load))
    return table


def _load_cells(workflow: Workflow, worker: Worker, load: Load) -> tuple[str, ...]:
    return (
        f"{load.count} x {worker.name}",
        workflow.tiers[worker.tier],
        f"{load.rate_per_s:.4g}",
        f"{load.utilization:.1%}",
        seconds(load.time_s),
        f"{worker.usd_per_h * load.count:.3f}",
    )


def _flows_table(plan: Plan) -> Rows:
    table = Rows(box=None, pad_edge=False)
    table.add_column("messages")
    table.add_column("tiers")
    for name in ("per second", "traffic", "$/h"):
        table.add_column(name, justify="right")
    tiers = plan.workflow.tiers
    for flow in plan.flows:
        table.add_row(
            f"{flow.producer} -> {flow.consumer}",
            f"{tiers[flow.sender]} -> {tiers[flow.receiver]}",
            f"{flow.rate_per_s:.4g}",
            format_rate(flow.bytes_per_s, "B/s"),
            f"{flow.usd_per_h:.3f}",
        )
    return table


def dollars(usd: float) -> str:
    """An hour's dollars to a tenth of a cent."""
    return f"${usd:.3f}" if usd < 1000 else format_dollars(usd)


def seconds(time_s: float) -> str:
    """A time, where it has a mean."""
    return format_seconds(time_s) if math.isfinite(time_s) else "unbounded"


# --- simulation ---------------------------------------------------------------------------------


def played_document(plan: Plan, whole: Expected, played: Played, seed: int) -> dict[str, Any]:
    """Planned and simulated figures beside each other."""
    workflow = plan.workflow
    return {
        "workflow": workflow.name,
        "method": plan.method,
        "usd_per_h": plan.usd_per_h,
        "requests": played.requests,
        "seed": seed,
        "planned": {
            "rate_per_s": slowest_rate(workflow),
            "latency_s": whole.latency_s,
            "end_to_end_s": whole.end_to_end_s,
        },
        "simulated": {
            "rate_per_s": played.rate_per_s,
            "latency_s": played.latency_s,
            "end_to_end_s": played.end_to_end_s,
            "error_s": played.error_s,
            "p99_s": played.p99_s,
        },
        "operators": [
            {
                "name": operator.name,
                "planned_s": whole.operators_s[operator.name],
                "simulated_s": played.operators_s[operator.name],
            }
            for operator in workflow.order
        ],
        "workers": [
            {
                "operator": load.operator,
                "worker": load.worker,
                "planned": load.utilization,
                "simulated": played.utilizations[load.operator, load.worker],
            }
            for load in plan.loads
        ],
    }


def slowest_rate(workflow: Workflow) -> float:
    """Of all results."""
    return min(workflow.rates[sink] for sink in workflow.sinks)


def played_screen(plan: Plan, whole: Expected, played: Played) -> RenderableType:
    """Planned and simulated rate, latencies and times of operators."""
    workflow = plan.workflow
    table = Rows(box=None, pad_edge=False)
    table.add_column("")
    for name in ("planned", "simulated", "difference"):
        table.add_column(name, justify="right")
    wanted = slowest_rate(workflow)
    rate = f"{wanted:.4g}/s", f"{played.rate_per_s:.4g}/s"
    table.add_row("rate", *rate, _difference(wanted, played.rate_per_s))
    rows = [("slowest path", whole.latency_s, played.latency_s)]
    end = float("nan") if whole.end_to_end_s is None else whole.end_to_end_s
    rows += [("end to end", end, played.end_to_end_s)]
    rows += [
        (f"  {o.name}", whole.operators_s[o.name], played.operators_s[o.name])
        for o in workflow.order
    ]
    for name, planned, found in rows:
        table.add_row(name, seconds(planned), seconds(found), _difference(planned, found))
    title = f"{workflow.name}: {plan.method}, {dollars(plan.usd_per_h)} an hour"
    count = f"{played.requests} requests; 99% end within {seconds(played.p99_s)}"
    error = f"the mean end to end is known to {format_seconds(played.error_s)} (standard error)"
    return Group(Text(title), Text(count), Text(""), table, Text(""), Text(error))


def _difference(planned: float, found: float) -> str:
    return f"{found / planned - 1:+.1%}" if math.isfinite(planned) and planned else "-"
