"""Answers to `parloom explain`: a plan, or one name of it, beside another plan where asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from parloom import arguments
from parloom.choose import Choice, NothingFitsError, choose
from parloom.cost.stages import StagePlayer
from parloom.cost.step import priced
from parloom.errors import FingerprintError, InputError, nearest
from parloom.execute.files import read_plan
from parloom.execute.machine import Machine, machine_for, machine_of
from parloom.execute.program import lowered
from parloom.ir.expected import Status
from parloom.ir.plan import DEVICES, Plan
from parloom.ir.plan_json import ranks_text
from parloom.ir.regular_parts import memory_of
from parloom.ir.shown import Shown
from parloom.ir.text import parse_graph
from parloom.report.case import Case, PipelineCase
from parloom.report.costs import cost_lines
from parloom.report.explain import Document, plan_explained
from parloom.report.explain_name import name_explained
from parloom.report.explain_screen import plan_explained_screen
from parloom.report.grid import mesh_grid
from parloom.report.name_screen import name_screen
from parloom.report.names import Names
from parloom.report.pipeline_screen import (
    pipeline_explained,
    pipeline_screen,
    stages_named_screen,
)
from parloom.report.replaced import Replaced, replaced
from parloom.report.rewrites import rewrites_explained
from parloom.report.versus import versus as compared
from parloom.report.versus import versus_screen
from parloom.report.words import INTERRUPTED, explained_words, memory_limit
from parloom.rewrite.rewrites import rewritten
from parloom.search.request import Request

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer(Shown):
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
    case = case_of(plan, calibration)
    there = None
    if versus is not None:
        there = case_of(other_plan(plan, versus, calibration, progress), calibration)
    for warning in dict.fromkeys(
        w for c in (case, there) if c for w in (c.warning, *c.source.notes)
    ):
        if warning:
            progress(warning)
    path = explained_words(path, calibration)
    if name is not None:
        found = _named(case, name, calibration, path)
        if versus is None or there is None:
            return found
        other = _named(there, name, calibration, versus)
        both = Group(found.screen, Text(f"\n{versus}", "bold underline"), other.screen)
        return Answer({"plan": found.document, "versus": other.document}, both)
    if versus is not None and there is not None:
        document = compared(case, there, versus)
        return Answer(document, versus_screen(document))
    if isinstance(case, PipelineCase):
        document = pipeline_explained(case, rewrites_explained(case))
        return Answer(document, pipeline_screen(case, document))
    play = partial(machine_of(case.plan, calibration).simulate, optimizer=case.plan.optimizer)
    document = plan_explained(case, rewrites_explained(case, play))
    cost = cost_lines(plan, case.whole, case.timeline.step_s)
    return Answer(document, plan_explained_screen(document, mesh_grid(case.mesh), cost, path))


def _named(
    case: Case | PipelineCase, name: str, calibration: str | Path | None, path: str
) -> Answer:
    gone = replaced(parse_graph(case.plan.graph), case.decisions.rewrites, name)
    there = _there(case, name, gone)
    if isinstance(case, PipelineCase):
        found = _named_in_stages(case, there, path)
    else:
        machine = machine_of(case.plan, calibration)
        play = partial(machine.simulate, optimizer=case.plan.optimizer)
        document = name_explained(case, Names(case.pcg.graph).find(there), play)
        found = Answer(document, name_screen(document, path))
    lines = [own.text for own in gone]
    screen = Group(*map(Text, lines), Text(""), found.screen) if lines else found.screen
    return Answer(found.document | {"replaced": lines}, screen)


def _there(case: Case | PipelineCase, name: str, gone: Sequence[Replaced]) -> str:
    """The name of what is explained: that of the first operator that is in the place of one that is
    gone, where nothing else has this name.
    """
    into = [key for own in gone for key in own.into]
    if not into:
        return name
    graph = rewritten(parse_graph(case.plan.graph), case.decisions.rewrites)
    try:
        Names(graph).find(name)
    except InputError:
        return into[0]
    return name


def _named_in_stages(pipeline: PipelineCase, name: str, path: str) -> Answer:
    """What a name is in each stage that has it."""
    found: list[Document] = []
    for index, stage in enumerate(pipeline.decisions.stages):
        case = pipeline.stage(index)
        try:
            named = Names(case.pcg.graph).find(name)
        except InputError:
            continue
        place = {"stage": index, "devices": ranks_text(stage.devices)}
        found.append(place | name_explained(case, named, case.play))
    if not found:  # what is near is known of the whole graph
        Names(rewritten(parse_graph(pipeline.plan.graph), pipeline.decisions.rewrites)).find(name)
        raise InputError(f"{name} is in no stage: no stage reads it")
    document = {"name": name, "stages": found}
    return Answer(document, stages_named_screen(document, path))


def other_plan(plan: Plan, versus: str, calibration: str | Path | None, say: Say) -> Plan:
    """The plan of that path, or the best one of that method; the smallest if none of it fits."""
    if versus in arguments.METHODS:
        machine, count = _asked_of(plan, calibration), plan.decisions.num_microbatches
        mixed = bool(machine.cluster.parts)  # methods choose among its parts
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
        try:
            found = choose(request, say)
        except NothingFitsError as error:
            say(f"{versus}: {error}")
            if not error.proposed.found:
                raise
            small = min(error.proposed.found, key=lambda own: own.prediction.peak_bytes)
            found = Choice(small, error.proposed.found, request.fits)
        if found.status is Status.INTERRUPTED:
            say(f"{versus}: {INTERRUPTED}")
        return replace(found, constraints=plan.constraints).recorded(replace(plan, notes=()))
    if not Path(versus).exists():
        hint = nearest(versus, arguments.METHODS)
        raise InputError(f"versus: no method or plan file {versus!r}{hint}")
    other = read_plan(Path(versus))
    check_comparable(plan, other, versus)
    return other


def _asked_of(plan: Plan, calibration: str | Path | None) -> Machine:
    """The devices that a plan was chosen on: all, or as many as `--devices` says; of one that was
    chosen by dollars or memory those that it uses, as other plans use fewer or more for that.
    """
    if plan.aim is not None:
        return machine_of(plan, calibration)
    given = (c.text.removeprefix(DEVICES) for c in plan.constraints if c.text.startswith(DEVICES))
    count = next(map(int, given), None)
    cores = plan.prediction.cores if plan.prediction else None
    return machine_for(plan.cluster, calibration, cores, count)


def check_comparable(plan: Plan, other: Plan, name: str) -> None:
    """Raise `FingerprintError` where `other`, called `name`, is a plan of another model."""
    if other.fingerprint != plan.fingerprint:
        raise FingerprintError(
            f"{name} is a plan of {other.source.spec} ({other.fingerprint}), not of"
            f" {plan.source.spec} ({plan.fingerprint}): only plans of one model, with one batch and"
            f" one dtype, are compared; plan again: {plan.command()}"
        )


def case_of(plan: Plan, calibration: str | Path | None = None) -> Case | PipelineCase:
    """A plan with its programs, prices and step on the cluster that it was made for."""
    machine, stages = machine_of(plan, calibration), lowered(plan)
    cluster, played = machine.cluster, machine.play(stages, plan.decisions, plan.optimizer)
    source = machine.source(*stages.pcgs, peak_bytes=played.peak_bytes)
    if len(stages.pcgs) > 1:
        player = StagePlayer(cluster, plan.optimizer, machine.kernels)
        return PipelineCase(plan, cluster, played, source, stages, player)
    pcg = stages.only
    found = priced(pcg, cluster, plan.decisions, plan.optimizer, machine.kernels)
    return Case(plan, cluster, played, source, pcg, found)
