"""`parloom workflow`: plan, simulate and profile workflows of models from edge to cloud."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from parloom.cli_options import AsJson, Verbose
from parloom.cli_output import quiet, result, say
from parloom.cost.units import parse_service_s
from parloom.errors import InfeasibleError, InputError
from parloom.report.output import show_json
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.examples import path_of
from parloom.workflow.model import Traffic, Workflow
from parloom.workflow.plan import Plan
from parloom.workflow.read import load, models

Asked = Callable[[Workflow], Workflow]

workflow_app = typer.Typer(
    no_args_is_help=True, help="Serve a workflow of models over workers from edge to cloud."
)


File = Annotated[
    str, typer.Argument(metavar="FILE", help="A workflow file, or example:NAME that is shipped.")
]
By = Annotated[Method, typer.Option(help="Who makes the plan.")]
Ways = Annotated[
    Traffic | None,
    typer.Option("--tiers", help="Whether messages may go down, too; default: as the file says."),
]
Gap = Annotated[
    float, typer.Option(metavar="G", min=0, help="End when this share above the bound.")
]
Seconds = Annotated[
    float | None, typer.Option(metavar="S", min=0, help="End with the best plan after S seconds.")
]
Latency = Annotated[
    str | None, typer.Option(metavar="TIME", help="The latency_bound, in place of the file's.")
]


@workflow_app.command()
def plan(
    file: File,
    method: By = Method.EXACT,
    tiers: Ways = None,
    latency: Latency = None,
    gap: Gap = 1e-7,
    seconds: Seconds = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """The variants, workers and flows of least cost that reach the accuracy and the latency."""
    from parloom.report.workflows import plan_document, plan_screen
    from parloom.workflow.simulate import expected

    quiet(verbose)
    found, search_s = _planned(file, method, asked(tiers, latency), gap, seconds, as_json)
    whole = expected(found)
    if as_json:
        show_json(plan_document(found, whole, search_s))
    else:
        flags = "" if method is Method.EXACT else f" --method {method}"
        flags += f" --tiers {tiers}" if tiers else ""
        flags += f" --latency {latency}" if latency else ""
        result(plan_screen(found, whole, f"parloom workflow simulate {file}{flags}"))
    if found.interrupted:
        raise typer.Exit(130)


@workflow_app.command()
def simulate(
    file: File,
    method: By = Method.EXACT,
    tiers: Ways = None,
    latency: Latency = None,
    requests: Annotated[int, typer.Option(min=1000, help="How many to play.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    gap: Gap = 1e-7,
    seconds: Seconds = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Play the plan request by request, and hold rate and latency against the planned ones."""
    from parloom.report.workflows import played_document, played_screen
    from parloom.workflow.simulate import expected, play

    quiet(verbose)
    found, _ = _planned(file, method, asked(tiers, latency), gap, seconds, as_json)
    whole, played = expected(found), play(found, requests, seed)
    if as_json:
        show_json(played_document(found, whole, played, seed))
    else:
        result(played_screen(found, whole, played))
    if found.interrupted:
        raise typer.Exit(130)


@workflow_app.command()
def profile(
    file: File,
    worker: Annotated[
        str, typer.Option(metavar="NAME", help="What the workflow calls a worker as this machine.")
    ],
    out: Annotated[Path, typer.Option(metavar="F", help="The profile to write.")] = Path(
        "profile.yaml"
    ),
    repetitions: Annotated[int, typer.Option(min=3, help="Requests that are timed.")] = 30,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Time the variants that name a PyTorch model on this machine, one request at a time."""
    quiet(verbose)
    from parloom.execute.files import check_file, write_atomic
    from parloom.execute.time_models import timed
    from parloom.workflow.profiles import profile_text

    named = models(path_of(file), worker)
    if out.resolve() == path_of(file).resolve():
        raise InputError(f"--out: {out} is the workflow itself; name another file for its profile")
    check_file(out)
    found = timed(named, worker, repetitions, say)
    path = write_atomic(out, profile_text(found))
    if as_json:
        entries = [
            {
                "operator": operator,
                "variant": variant,
                "latency_s": s,
                "spread": found.spread.get(key),
            }
            for key, s in found.latency_s.items()
            for operator, variant in [key]
        ]
        machine = {"worker": worker, "machine": found.machine}
        show_json({"profile": str(path), **machine, "latencies": entries})
        return
    result(f"{path}: {len(found.latency_s)} variants on {worker}; {found.machine}")
    result(f"next: parloom workflow plan {file}, which has to list it under `profiles:`")


def asked(tiers: Traffic | None, latency: str | None) -> Asked:
    """A workflow as flags ask for it, in place of what its file says."""
    found: dict[str, Any] = {}
    if tiers is not None:
        found["two_way"] = tiers is Traffic.TWO_WAY
    if latency is not None:
        try:
            found["latency_s"] = parse_service_s(latency)
        except InputError as error:
            raise InputError(f"--latency: {error}") from None

    def changed(workflow: Workflow) -> Workflow:
        at = replace(workflow.positions, latency="--latency") if latency else workflow.positions
        return replace(workflow, positions=at, **found)

    return changed


def _planned(
    file: str,
    method: Method,
    asked: Asked,
    gap: float,
    seconds: float | None,
    as_json: bool,
) -> tuple[Plan, float]:
    workflow = asked(load(path_of(file)))
    started = time.monotonic()
    try:
        found = plan_workflow(workflow, method, gap=gap, seconds=seconds, progress=say)
    except InfeasibleError as error:
        if as_json:
            show_json({"infeasible": dict(error.document)})
        raise
    return found, time.monotonic() - started
