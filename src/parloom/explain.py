"""Answers to `parloom explain`: a plan, or one name of it, beside another plan where asked."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from parloom import arguments
from parloom.choose import choose
from parloom.cost.clusters import resolve_cluster
from parloom.cost.step import priced
from parloom.errors import FingerprintError, InfeasibleError, InputError, NotYetError, nearest
from parloom.execute.files import read_plan
from parloom.execute.machine import machine_for, machine_of
from parloom.execute.program import lowered
from parloom.ir.plan import OF_ONE_STAGE, Plan, Status
from parloom.ir.regular_parts import memory_of
from parloom.ir.text import parse_graph
from parloom.report.case import Case
from parloom.report.explain import plan_explained
from parloom.report.explain_name import name_explained
from parloom.report.explain_screen import plan_explained_screen
from parloom.report.grid import mesh_grid
from parloom.report.name_screen import name_screen
from parloom.report.names import Names
from parloom.report.pipeline_screen import PipelineCase, pipeline_explained, pipeline_screen
from parloom.report.versus import versus as compared
from parloom.report.versus import versus_screen
from parloom.report.words import INTERRUPTED, explained_words, memory_limit
from parloom.search.request import Request

Say = Callable[[str], None]
# More bytes than any device has.
UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Answer:
    """What is printed: as one JSON document, or on the terminal."""

    document: dict[str, Any]
    screen: RenderableType


def explain(
    plan: Plan,
    *,
    name: str | None = None,
    path: str = "PLAN",
    versus: str | None = None,
    calibration: str | Path | None = None,
    progress: Say = lambda text: None,
) -> Answer:
    """Say what `plan`, which was read from `path`, decides and what it costs.

    `name` is an operator, a parameter, another tensor or a module path: how it lies, what it costs,
    and what would be next best. `versus` is a method or the path of another plan: what differs.

    Raises `InputError` for an unknown name and for what is neither method nor plan,
    `FingerprintError` where the other plan is of another model.
    """
    if len(plan.decisions.stages) > 1:
        return _pipeline(plan, calibration, name or versus)
    case = case_of(plan, calibration)
    there = None
    if versus is not None:
        there = case_of(_other(plan, versus, calibration, progress), calibration)
    for warning in dict.fromkeys(
        w for c in (case, there) if c for w in (c.warning, *c.source.notes)
    ):
        if warning:
            progress(warning)
    path = explained_words(path, calibration)
    if name is not None:
        found = _named(case, name, calibration)
        screen = name_screen(found, path)
        if versus is None or there is None:
            return Answer(found, screen)
        other = _named(there, name, calibration)
        title = Text(f"\n{versus}", "bold underline")
        both = Group(screen, title, name_screen(other, versus))
        return Answer({"plan": found, "versus": other}, both)
    if versus is not None and there is not None:
        document = compared(case, there, versus)
        return Answer(document, versus_screen(document))
    document = plan_explained(case)
    return Answer(document, plan_explained_screen(document, mesh_grid(case.mesh), path))


def _pipeline(plan: Plan, calibration: str | Path | None, asked: str | None) -> Answer:
    """A plan of several stages; raises `NotYetError` where more is `asked`."""
    if asked is not None:
        raise NotYetError(OF_ONE_STAGE)
    machine, stages = machine_of(plan, calibration), lowered(plan)
    played = machine.play(stages, plan.decisions, plan.optimizer)
    case = PipelineCase(plan, machine.cluster, played, machine.source(*stages.pcgs))
    return Answer(pipeline_explained(case), pipeline_screen(case))


def _named(case: Case, name: str, calibration: str | Path | None) -> dict[str, Any]:
    machine = machine_of(case.plan, calibration)
    play = partial(machine.simulate, optimizer=case.plan.optimizer)
    return name_explained(case, Names(case.pcg.graph).find(name), play)


def _other(plan: Plan, versus: str, calibration: str | Path | None, say: Say) -> Plan:
    """The plan of that path, or the best one of that method; one that does not fit if none does."""
    if versus in arguments.METHODS:
        machine, count = machine_of(plan, calibration), plan.decisions.num_microbatches
        mixed = bool(resolve_cluster(plan.cluster).cluster.parts)
        if mixed:  # methods choose among its parts
            machine = machine_for(plan.cluster, calibration)
        request = Request(
            parse_graph(plan.graph),
            machine,
            plan.optimizer,
            memory_limit(plan, memory_of(machine.cluster)),
            count if count > 1 else None,
            plan.seed,
            batch_semantics=plan.decisions.batch_semantics,
            method=versus,
            all_devices=not mixed,
        )
        for limit in (request.limit_bytes, UNLIMITED):
            try:
                found = choose(replace(request, limit_bytes=limit), say)
            except InfeasibleError as error:
                say(f"{versus}: {error}")
                continue
            if found.status is Status.INTERRUPTED:
                say(f"{versus}: {INTERRUPTED}")
            return replace(found, constraints=plan.constraints).recorded(replace(plan, notes=()))
        raise AssertionError("without a limit every plan fits")
    if not Path(versus).exists():
        hint = nearest(versus, arguments.METHODS)
        raise InputError(f"versus: no method or plan file {versus!r}{hint}")
    other = read_plan(Path(versus))
    if other.fingerprint != plan.fingerprint:
        raise FingerprintError(
            f"{versus} is a plan of {other.source.spec} ({other.fingerprint}), not of"
            f" {plan.source.spec} ({plan.fingerprint}): only plans of one model, with one batch and"
            f" one dtype, are compared; plan again: {plan.command()}"
        )
    return other


def case_of(plan: Plan, calibration: str | Path | None = None) -> Case:
    """A plan with its program, prices and step on the cluster that it was made for."""
    machine = machine_of(plan, calibration)
    pcg = lowered(plan).only
    found = priced(pcg, machine.cluster, plan.decisions, plan.optimizer, machine.kernels)
    timeline = machine.simulate(pcg, plan.decisions, plan.optimizer)
    return Case(plan, pcg, machine.cluster, found, timeline, machine.source(pcg))
