"""Answers to `parloom report`: plans as one page that needs no network."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parloom.cost.timeline import Timeline
from parloom.errors import InputError, ParloomError
from parloom.execute.files import read_plan, write_atomic
from parloom.execute.log import last_observed
from parloom.execute.machine import machine_of
from parloom.explain import Say, case_of, check_comparable, other_plan
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_hash
from parloom.report.case import Case, PipelineCase
from parloom.report.fronts import FRONT, read_front
from parloom.report.observed import observed_timeline
from parloom.report.page.document import report_document
from parloom.report.page.html import page
from parloom.report.page.sides import Side

# Rules of thumb that every plan is compared with.
OTHERS = ("data_parallel", "fsdp", "megatron")
ELSEWHERE = "choose another file with --out"
Known = dict[tuple[object, ...], Case | PipelineCase | None]
"""Plans to compare with, by the question that they answer; None where there is none."""


def report(
    paths: Sequence[str | Path | Plan],
    *,
    run: str | Path | None = None,
    calibration: str | Path | None = None,
    progress: Say = lambda text: None,
) -> dict[str, Any]:
    """What a page shows of plans, or of the plans at `paths`, the first beside the others; `run` is
    the log of a run of the first, whose last observed step is drawn beside the predicted one.

    Raises `InputError` for what is no plan or log, and `FingerprintError` for plans of several
    models.
    """
    plans = [path if isinstance(path, Plan) else read_plan(Path(path)) for path in paths]
    names = list(_names(paths))
    for name, plan in zip(names, plans, strict=True):
        check_comparable(plans[0], plan, name)
    known: Known = {}
    sides = [
        _side(plan, name, run if index == 0 else None, calibration, known, progress)
        for index, (name, plan) in enumerate(zip(names, plans, strict=True))
    ]
    fronts = (
        None if isinstance(path, Plan) else _front(plan, Path(path))
        for path, plan in zip(paths, plans, strict=True)
    )
    files = [not isinstance(path, Plan) for path in paths]
    sides = [
        replace(side, front=front, is_file=is_file)
        for side, front, is_file in zip(sides, fronts, files, strict=True)
    ]
    return report_document(sides, progress)


def _names(paths: Sequence[str | Path | Plan]) -> Iterator[str]:
    """Paths of files; plans that are in none by their methods, numbered where these are equal."""
    seen = Counter[str]()
    for path in paths:
        if isinstance(path, Plan):
            seen[path.method] += 1
            yield f"{path.method} {seen[path.method]}" if seen[path.method] > 1 else path.method
        else:
            yield str(path)


def write_page(document: dict[str, Any], out: Path) -> Path:
    """The page of a report: one HTML file that needs no network."""
    return write_atomic(out, page(document), ELSEWHERE)


def _side(
    plan: Plan,
    path: str,
    run: str | Path | None,
    calibration: str | Path | None,
    known: Known,
    say: Say,
) -> Side:
    observed = _observed(plan, Path(run)) if run is not None else None
    machine = machine_of(plan, calibration)
    play = partial(machine.simulate, optimizer=plan.optimizer)
    others = {
        method: other
        for method in OTHERS
        if method != plan.method and (other := _other(plan, method, calibration, known, say))
    }
    return Side(path, case_of(plan, calibration), play, others, observed)


def _front(plan: Plan, path: Path) -> dict[str, Any] | None:
    """What was planned on other clusters, where `parloom plan --pareto` left it with the plan."""
    file = (path if path.is_dir() else path.parent) / FRONT
    try:
        return read_front(file.read_text(encoding="utf-8"), plan)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read {file}: {error}; delete it, or plan again") from None


def _other(
    plan: Plan, method: str, calibration: str | Path | None, known: Known, say: Say
) -> Case | PipelineCase | None:
    """The plan of a rule of thumb, whether or not it fits."""
    decisions, asked = plan.decisions, tuple(constraint.text for constraint in plan.constraints)
    question = (method, plan.cluster, decisions.num_microbatches, decisions.apart, asked)
    if question not in known:
        say(f"plan by {method}, to compare with")
        try:
            found = case_of(other_plan(plan, method, calibration, say), calibration)
        except ParloomError as error:  # a rule of thumb has no plan of every model
            say(f"{method}: {error}")
            found = None
        known[question] = found
    return known[question]


def _observed(plan: Plan, log: Path) -> tuple[int, Timeline]:
    found = last_observed(log, plan_hash(plan))
    return found[0].step, observed_timeline([own.actions for own in found])
