"""What one plan costs, and what it was chosen by, in words and in JSON values."""

from typing import Any

from parloom.cost.money import Work, usd_per_hour, usd_per_step, work_of
from parloom.cost.units import format_bytes, format_dollars, format_seconds
from parloom.ir.expected import OF_INFERENCE, Aim, Objective
from parloom.ir.factors import factorize
from parloom.ir.mesh import Cluster, HourlyPrice
from parloom.ir.plan import Plan
from parloom.ir.regular_parts import used_devices
from parloom.ir.samples import num_samples
from parloom.ir.text import parse_graph
from parloom.report.fronts import cost_document, days_words, price_lines, prices_document


def plan_work(plan: Plan, in_run: float | None = None) -> Work:
    """What a step of a plan trains on, and a run where it is known."""
    return work_of(parse_graph(plan.graph), plan.decisions.apart, in_run)


def plan_samples(plan: Plan) -> int:
    """The size of the batch of a step."""
    return num_samples(factorize(parse_graph(plan.graph))) * plan.decisions.apart


def _prices(plan: Plan, cluster: Cluster) -> list[tuple[str, HourlyPrice]]:
    used = used_devices(cluster, plan.decisions)
    return [(device.name, device.price) for device, _ in used if device.price is not None]


def plan_cost_document(
    plan: Plan, cluster: Cluster, step_s: float, in_run: float | None = None
) -> dict[str, Any]:
    """What a plan whose step takes `step_s` costs, in JSON values."""
    work = plan_work(plan, in_run)
    usd = usd_per_step(cluster, plan.decisions, step_s)
    return cost_document(work, step_s, usd) | {
        f"{work.unit}s_per_step": work.in_step,
        "usd_per_hour": usd_per_hour(cluster, plan.decisions),
        "prices": prices_document(_prices(plan, cluster)),
    }


def cost_lines(
    plan: Plan, cluster: Cluster, step_s: float, in_run: float | None = None
) -> list[str]:
    """What a plan whose step takes `step_s` costs in words, and by which prices; the days of a run
    without any, too.
    """
    usd = usd_per_step(cluster, plan.decisions, step_s)
    if usd is None and in_run is None:
        return []
    work, lines = plan_work(plan, in_run), []
    days, run = work.days(step_s), work.usd_of_run(usd)
    if days is not None:
        money = "" if run is None else f", {format_dollars(run)}"
        lines.append(f"{days_words(days)} days{money} for the run")
    billion = work.usd_per_billion(usd)
    if usd is not None and billion is not None:
        each = f"{format_dollars(billion)} a billion {work.unit}s"
        lines.append(f"{format_dollars(usd)} a step, {each}")
        lines += price_lines(_prices(plan, cluster))
    return lines


def aim_words(aim: Aim) -> str:
    """What a plan was chosen by, and what no other has less than."""
    if aim.objective in OF_INFERENCE:
        value, what = format_seconds(aim.value), f"the best {aim.objective} that was found"
        bound = aim.bound and format_seconds(aim.bound)
        least = f"no plan that is searched takes less than {bound}, however well it overlaps"
    elif aim.objective is Objective.MEMORY:
        value, what = format_bytes(aim.value), "the least peak that was found"
        bound = aim.bound and format_bytes(aim.bound)
        least = f"each plan of one stage that is searched holds {bound} or more"
    else:
        value, what = format_dollars(aim.value), "the cheapest step that was found"
        bound = aim.bound and format_dollars(aim.bound)
        least = f"no plan that is searched costs less than {bound}, however well it overlaps"
    if not aim.bound:
        return f"{what}: {value}; nothing is proved of others"
    return f"{what}: {value}; {least}; this one is {aim.value / aim.bound - 1:.0%} above that"
