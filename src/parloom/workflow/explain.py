"""Why a workflow has no plan: how far it is, and what would do."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite

from parloom.cost.units import format_dollars, format_rate, format_seconds
from parloom.errors import InfeasibleError
from parloom.workflow.accuracy import best_accuracy, meets
from parloom.workflow.exact import least_latency, refined
from parloom.workflow.model import SOLVED, Link, Workflow
from parloom.workflow.program import BUSIEST, Goal, Program
from parloom.workflow.simulate import expected
from parloom.workflow.solve import Found, solve

SPARE, MOST_SPARE = 10, 1000
"""Times the workers that carry a rate: so many are asked for first, and at most, to be in time."""
NO_MORE = f"no more workers would be in time, up to {MOST_SPARE} times those that carry the rate"


def check_accuracy(workflow: Workflow) -> None:
    """Raise `InfeasibleError` where no variants reach the floor."""
    best = best_accuracy(workflow, {})
    if best is None or meets(workflow, best):
        return
    floor, at = workflow.accuracy.floor, workflow.positions.floor
    document = {"floor": floor, "best_accuracy": best if isfinite(best) else None}
    if not isfinite(best):
        raise InfeasibleError(f"{at}: floor: no row of the table is of variants that are", document)
    raise InfeasibleError(
        f"{at}: floor: no variants reach an accuracy of {_percent(floor)};"
        f" the best reachable is {_percent(best)}",
        document,
    )


def explain(workflow: Workflow) -> None:
    """Raise `InfeasibleError` with the reason, if the workflow has no plan at all."""
    share = _carried(workflow)
    if share < 1 - SOLVED:
        _too_fast(workflow, share)
    if workflow.latency_s is not None:
        _too_slow(workflow, workflow.latency_s, share)


def _carried(workflow: Workflow) -> float:
    """The share of all rates that its workers and links carry."""
    found = solve(Program(workflow, Goal(scale=True)).lp)
    if found.interrupted:
        raise KeyboardInterrupt
    return 0.0 if found.values is None else max(0.0, -found.cost)  # a solver's zero may be below it


def _too_fast(workflow: Workflow, share: float) -> None:
    rates = {source.name: source.rate_per_s for source in workflow.sources}
    now = ", ".join(f"{name} {rate * share:.4g} of {rate:.4g}/s" for name, rate in rates.items())
    message = f"{workflow.positions.rate}: no set of workers carries the rate: {now} at most"
    unbounded = replace(workflow, latency_s=None)
    if workflow.latency_s is not None and _carried(unbounded) >= 1 - SOLVED:
        message += f" (with a latency bound, no worker is busier than {_percent(BUSIEST)})"
    more = _more_workers(workflow)
    ways = [] if more is None else [_listed(workflow, more)]
    for words, changed in _links(workflow):
        besides = _more_workers(changed)
        if besides == {} or (besides is not None and more is None):
            ways.append(f"{words} and {_listed(workflow, besides)}" if besides else words)
    document: dict[str, object] = {"share": share, "more_workers": more}
    if ways:
        raise InfeasibleError(f"{message}; {', or '.join(ways)} would", document)
    late = _more_workers(unbounded) if workflow.latency_s is not None else None
    if late is not None:
        would = f"{_listed(workflow, late)} would carry it, but not within the latency bound"
        raise InfeasibleError(f"{message}; {would}, and {NO_MORE}", document)
    raise InfeasibleError(f"{message}; no more workers and no single link would", document)


def _more_workers(workflow: Workflow) -> dict[str, int] | None:
    """Workers beyond those that are there, with which there is a plan; None where there is none
    with `MOST_SPARE`.
    """
    for times in (SPARE, MOST_SPARE) if workflow.latency_s is not None else (1,):
        program, found, _ = refined(workflow, Goal(more_workers=times), SOLVED / 10)
        if found.values is not None:
            return _beyond(workflow, program, found)
    return None


def _beyond(workflow: Workflow, program: Program, found: Found) -> dict[str, int]:
    assert found.values is not None
    used: dict[str, int] = {}
    for (_, _, name), column in program.counts.items():
        used[name] = used.get(name, 0) + round(found.values[column])
    more = {name: n - workflow.worker(name).count for name, n in used.items()}
    return {name: n for name, n in more.items() if n > 0}


def _listed(workflow: Workflow, more: Mapping[str, int]) -> str:
    paid = sum(workflow.worker(name).usd_per_h * n for name, n in more.items())
    return f"{', '.join(f'{n} more {k}' for k, n in more.items())} ({format_dollars(paid)} an hour)"


def _links(workflow: Workflow) -> Iterator[tuple[str, Workflow]]:
    """The workflow with one link more or wider, for each that is missing or limited, and words."""
    tiers = range(len(workflow.tiers))
    for pair in ((a, b) for a in tiers for b in tiers):
        own, listed = workflow.link(*pair), workflow.links.get(pair)
        ends = f"from {workflow.tiers[pair[0]]!r} to {workflow.tiers[pair[1]]!r}"
        if own is None and listed is not None:
            words = f"two-way traffic, with the link {ends}"
        elif own is None:
            words = f"a link {ends}" + (", with two-way traffic" if pair[0] > pair[1] else "")
        elif isfinite(own.bytes_per_s):
            words = f"a wider link {ends} (now {format_rate(8 * own.bytes_per_s, 'bit/s')})"
        else:
            continue
        open_pairs = {p: link for p, link in workflow.links.items() if workflow.link(*p)}
        wide = replace(own or listed or Link(), bytes_per_s=float("inf"))
        yield words, replace(workflow, links=open_pairs | {pair: wide}, two_way=True)


def _too_slow(workflow: Workflow, most_s: float, share: float) -> None:
    least, plan = least_latency(workflow)
    if least <= most_s:
        return
    if plan is None:  # it just carries no rate, by the solver's tolerance
        _too_fast(workflow, share)
        return
    message = (
        f"{workflow.positions.latency}: latency_bound: no plan is in time: {format_seconds(most_s)}"
        f" is asked for, and none is below {format_seconds(least)} with the waits of M/D/1 queues"
    )
    found = expected(plan).latency_s
    if found < least * (1 - SOLVED):
        message += (
            f" (expected are {format_seconds(found)}: queues behind other workers are shorter)"
        )
    more = _more_workers(workflow)
    message += f"; {_listed(workflow, more)} would" if more else f"; {NO_MORE}"
    document = {"latency_bound_s": most_s, "least_latency_s": least}
    raise InfeasibleError(
        message, {**document, "expected_latency_s": found, "more_workers": more or None}
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
