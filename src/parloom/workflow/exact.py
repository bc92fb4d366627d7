"""The cheapest plan, by integer programming, with the bound that proves it.

Waits are convex in the rates, so the program has lines below them; where a plan waits longer than
its lines say, lines are added at its utilizations, and it is solved again. Each program is a
relaxation, so its bound holds for the workflow.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from parloom.workflow.fixing import solve_fixed
from parloom.workflow.model import ROUNDING, SOLVED, Workflow
from parloom.workflow.plan import Flow, Plan, flow_of, load_of
from parloom.workflow.program import BUSIEST, COST, Goal, Place, Program
from parloom.workflow.queueing import balanced, together
from parloom.workflow.solve import Found, solve

NEAR = 1e-4
"""Of waits, where a latency is only to be told."""
MOST_ROUNDS = 60


def cheapest(
    workflow: Workflow,
    *,
    method: str = "exact",
    start: Plan | None = None,
    gap: float = 1e-7,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan | None:
    """The cheapest plan within `gap` of its bound, or the best when time or Ctrl-C ends it.

    None where there is none; `start` is a plan to begin with, and the answer where none is better,
    or where the solver says that there is none at all.
    """
    program = Program(workflow, COST)
    ends = None if seconds is None else time.monotonic() + seconds
    begin = _columns(program, start) if start is not None else None
    bound = 0.0
    best = start
    for _ in range(MOST_ROUNDS):
        left = None if ends is None else ends - time.monotonic()
        found = solve_fixed(program.lp, program.counts.values(), gap, left, begin)
        if found.infeasible:  # wrong where there is a plan: no bound either
            break
        bound = max(bound, found.bound)
        plan = _polished(program, found, gap) if found.values is not None else None
        if plan is not None and _is_better(plan, best):
            best = plan
        stopped = found.interrupted or (ends is not None and time.monotonic() >= ends)
        if stopped or found.values is None or best_is_proved(best, bound, gap):
            break
        if not _add_lines(program, found):
            break
        progress(f"at least {bound:.4f} $/h; waits are longer than laid out, solving again")
        begin = None
    if best is None:
        if found.interrupted:
            raise KeyboardInterrupt
        return None
    least = min(bound, best.usd_per_h)
    return replace(best, method=method, bound_usd_per_h=least, interrupted=found.interrupted)


def refined(workflow: Workflow, goal: Goal, off: float) -> tuple[Program, Found, float]:
    """A program with lines where its solution waits, within `off`, that solution, and the bound."""
    program = Program(workflow, goal)
    bound = 0.0
    for _ in range(MOST_ROUNDS):
        found = solve(program.lp, NEAR)
        if found.interrupted:
            raise KeyboardInterrupt
        bound = max(bound, found.bound)
        if found.values is None or not _add_lines(program, found, off):
            break
    return program, found, bound


def least_latency(workflow: Workflow) -> tuple[float, Plan | None]:
    """A latency that no plan is below, near the least there is, and a plan that is near it.

    Infinite, and None, where there is no plan.
    """
    program, found, bound = refined(workflow, Goal(latency=True), NEAR)
    if found.values is None:
        return bound, None
    variants, counts = variants_in(program, found.values), counts_in(program, found.values)
    return bound, routed(replace(workflow, latency_s=bound * (1 + 10 * NEAR)), variants, counts)


def best_is_proved(best: Plan | None, bound: float, gap: float) -> bool:
    """Whether the bound is as near as asked for."""
    return best is not None and best.usd_per_h - bound <= gap * max(best.usd_per_h, ROUNDING)


def in_time(plan: Plan) -> bool:
    """Whether the plan keeps the latency bound, if there is one."""
    most = plan.workflow.latency_s
    return most is None or plan.latency_s <= most * (1 + SOLVED)


def _is_better(plan: Plan, than: Plan | None) -> bool:
    return in_time(plan) and (than is None or plan.usd_per_h < than.usd_per_h)


def counts_in(program: Program, values: tuple[float, ...]) -> dict[Place, int]:
    """Workers in use: one that has no share was no better left out, as it costs nothing."""
    found = {}
    for place, count in program.counts.items():
        name, variant, worker = place
        part = program.parts[name, variant, program.workflow.worker(worker).tier]
        if values[count] > 0.5 and values[program.shares.get(place, part)] > ROUNDING:
            found[place] = round(values[count])
    return found


def variants_in(program: Program, values: tuple[float, ...]) -> dict[str, str]:
    """The variant of each operator."""
    return {name: v for (name, v), column in program.picks.items() if values[column] > 0.5}


def _polished(program: Program, found: Found, gap: float) -> Plan | None:
    """The plan of a solution, with rates and flows solved for its whole numbers."""
    assert found.values is not None
    variants, counts = variants_in(program, found.values), counts_in(program, found.values)
    return routed(program.workflow, variants, counts, gap=gap, like=program)


def routed(
    workflow: Workflow,
    variants: Mapping[str, str],
    counts: Mapping[Place, int],
    rates: Mapping[Place, float] | None = None,
    *,
    method: str = "",
    gap: float = 1e-7,
    like: Program | None = None,
) -> Plan | None:
    """The plan with these workers, whose rates (where not given) and flows cost least.

    With a latency bound, and rates to choose, the plan keeps it, if that is possible.
    """
    plain = workflow if rates is None else replace(workflow, latency_s=None)
    for _ in range(MOST_ROUNDS):
        program = Program(plain)
        if like is not None:
            program.lp.rows = list(like.lp.rows)
        program.fix(variants, counts, rates)
        program.lp.integers = [False] * len(program.lp.integers)
        found = solve(program.lp, gap)
        if found.values is None:
            return None
        plan = _plan(program, found.values, variants, counts, workflow, method)
        if rates is not None or in_time(plan) or not _add_lines(program, found):
            return plan
        like = program
    return plan


def _plan(
    program: Program,
    values: tuple[float, ...],
    variants: Mapping[str, str],
    counts: Mapping[Place, int],
    workflow: Workflow,
    method: str,
) -> Plan:
    loads = tuple(
        load_of(workflow, place, counts[place], rate)
        for place, rate in _balanced(program, values, counts).items()
    )
    flows: list[Flow] = []
    for key, column in program.flows.items():
        if values[column] > ROUNDING:
            producer, _, consumer, *pair = key
            edge = next(e for e in workflow.inputs(consumer) if e.producer == producer)
            size = edge.size(variants.get(producer, ""))
            rate = values[column] * workflow.rates[consumer]
            flows.append(flow_of(workflow, producer, consumer, size, (pair[0], pair[1]), rate))
    return Plan(workflow, method, dict(variants), loads, tuple(flows))


def _balanced(
    program: Program, values: tuple[float, ...], counts: Mapping[Place, int]
) -> dict[Place, float]:
    """The rate of each operator in each tier, shared so that it waits least.

    Dollars depend on tiers alone.
    """
    workflow = program.workflow
    found: dict[Place, float] = {}
    for (name, variant, tier), part in program.parts.items():
        if values[part] <= ROUNDING:
            continue
        latency_s = workflow.operator(name).variant(variant).latency_s
        workers = {
            worker: (count, latency_s[worker])
            for (operator, _, worker), count in counts.items()
            if operator == name and workflow.worker(worker).tier == tier
        }
        rate, others = workflow.rates[name], together(workflow, name)
        shares = balanced(workers, values[part] * rate, rate, others)
        found |= {(name, variant, w): share for w, share in shares.items() if share > 0}
    return found


def _add_lines(program: Program, found: Found, off: float = SOLVED / 10) -> bool:
    """Tangents where the solution waits longer than its lines say; whether there were any."""
    assert found.values is not None
    added = False
    for place, column in program.times.items():
        count, share = found.values[program.counts[place]], found.values[program.shares[place]]
        if share <= ROUNDING or count < 0.5:
            continue
        rate = program.workflow.rates[place[0]]
        load = load_of(program.workflow, place, round(count), share * rate)
        if load.time_s * share > found.values[column] * (1 + off) + 1e-15:
            program.add_tangent(place, min(load.utilization, BUSIEST))
            added = True
    return added


def _columns(program: Program, plan: Plan) -> dict[int, float]:
    """A plan as values of the program's columns; those that follow are the solver's to find."""
    values = {program.picks[item]: 1.0 for item in plan.variants.items()}
    for load in plan.loads:
        place = load.operator, load.variant, load.worker
        if place not in program.counts:
            return {}
        tier = plan.workflow.worker(load.worker).tier
        share = load.rate_per_s / plan.workflow.rates[load.operator]
        values[program.counts[place]] = float(load.count)
        part = program.parts[load.operator, load.variant, tier]
        values[part] = values.get(part, 0.0) + share
        if place in program.shares:
            values[program.shares[place]] = share
        if (load.operator, tier) in program.used:
            values[program.used[load.operator, tier]] = 1.0
    return values
