"""The candidates that a plan was chosen from, as a table."""

from rich.table import Table

from parloom.cost.units import format_bytes, format_seconds
from parloom.ir.plan import Plan


def alternatives_table(plan: Plan) -> Table:
    """A row per name: of candidates that no word tells apart the plan, or else the best one, and
    how many.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("alternatives")
    of = "step time" if plan.inference is None else "answers"
    for column in (of, "against plan", "peak", "fits"):
        table.add_column(column, justify="right")
    chosen = plan.counted.step_s if plan.counted else 0.0
    alike: dict[tuple[str, bool], list[int]] = {}
    for index, other in enumerate(plan.alternatives):
        alike.setdefault((other.name, other.fits), []).append(index)
    for (name, fits), others in alike.items():
        is_plan = plan.own in others
        fastest = min(others, key=lambda index: plan.alternatives[index].step_s)
        best = plan.alternatives[plan.own if is_plan and plan.own is not None else fastest]
        which = "one" if is_plan and plan.own != fastest else "best"
        many = f", {which} of {len(others)}" if len(others) > 1 else ""
        table.add_row(
            f"  {name}{many}{', this plan' if is_plan else ''}",
            format_seconds(best.step_s),
            f"{best.step_s / chosen - 1:+.1%}" if chosen else "",
            format_bytes(best.peak_bytes),
            "yes" if fits else "no",
        )
    return table
