"""The commands about money and size: several clusters beside each other, and scaling curves."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from parloom import arguments
from parloom.cli_cluster import named_or_here
from parloom.cli_options import (
    BUDGET,
    AsJson,
    Batch,
    Calibrated,
    Dtype,
    Memory,
    OptimizerName,
    Price,
    Sequence,
    Verbose,
)
from parloom.cli_output import quiet, result, say
from parloom.cost import units
from parloom.errors import InputError, NotYetError, shell_word
from parloom.ir.expected import Objective
from parloom.ir.plan import Plan
from parloom.report.output import show_json

Asked = dict[str, Any]


def tokens_of(text: str | None) -> float | None:
    """The tokens of a run, as `2T`."""
    try:
        return None if text is None else units.parse_count(text)
    except InputError as error:
        raise InputError(f"--tokens: {error}") from None


def plan_front(
    model: str,
    clusters: list[str],
    captured: Asked,
    searched: Asked,
    wanted: Asked,
    out: Path | None,
    gap: float | None,
    as_json: bool,
) -> None:
    """Plan on several clusters, print the front, and save the plan that was asked for: the best by
    an objective, of every part of them where costs are `wanted`, and of runs of so many days.
    """
    asked = {key: value for key, value in searched.items() if key not in ("cluster", "objective")}
    from parloom import api, fronts
    from parloom.execute.files import check_folder, default_folder, write_atomic
    from parloom.report.fronts import FRONT, front_document, front_screen

    in_run, days = wanted["in_run"], wanted["days"]
    by = wanted["by"] or (Objective.TIME if days is None else Objective.COST)
    every = wanted["pareto"] or by is Objective.COST
    question = fronts.Question(tuple(clusters), by, every, in_run, days)
    question.check(searched["price"])
    # Prices and what needs them were looked at for all clusters together.
    plain = {"price": None, "objective": Objective.TIME}
    for spec in clusters:
        api.check_asked(model, captured | searched | {"cluster": spec, **plain})
    check_folder(out or Path("runs"))
    program = api.capture(model, **captured, progress=say)
    try:
        answer = fronts.front(program, question, say, asked)
    except fronts.TooSlowError as error:
        shown = error.front
        show_json(front_document(shown, None)) if as_json else result(front_screen(shown))
        raise
    plan, shown = answer.plan, answer.front
    folder = out or default_folder(model, shown.best.cluster if shown.best else "", plan)
    paths = api.save(plan, folder)
    document = front_document(shown, str(paths["plan"]), plan)
    kept = write_atomic(folder / FRONT, json.dumps(document, indent=2) + "\n")
    if as_json:
        show_json(document)
    else:
        result(front_screen(shown))
        result(f"\nsaved\n  {paths['plan']}\n  {paths['source']}\n  {kept}")
        result(f"\nnext: parloom verify {shell_word(paths['plan'])}")
    if shown.interrupted:
        raise typer.Exit(130)
    api.check_gap(plan, gap)


def scale(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN", help="A model as for `plan`, or a plan file.")
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="C",
            help="2x8xH100, or a YAML file; default: the plan's, or this machine.",
        ),
    ] = None,
    up_to: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Double the nodes up to N devices; default: parts of C."
        ),
    ] = None,
    weak: Annotated[
        bool,
        typer.Option("--weak/--strong", help="As many samples on each device, or in all."),
    ] = False,
    batch: Batch = None,
    seq: Sequence = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Cast model and batch to it.")] = None,
    optimizer: OptimizerName = None,
    method: Annotated[
        str | None, typer.Option(help="As for `plan`; default: the plan's, or auto.")
    ] = None,
    memory: Memory = None,
    calibration: Calibrated = None,
    price: Price = None,
    budget: Annotated[int | None, typer.Option(metavar="WORK", min=1, help=BUDGET)] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what more devices buy: the fastest plan on ever larger parts or clusters."""
    built: Asked = {
        "batch": batch,
        "seq": seq,
        "dtype": None if dtype is None else dtype.value,
        "optimizer": optimizer,
    }
    asked: Asked = {"method": method, "memory": memory}
    own = {key: value for key, value in asked.items() if value is not None}
    plain: Asked = {"calibration": calibration, "budget": budget, "price": price}
    plan = _plan_at(model, built)
    cluster = cluster or (plan.cluster if plan else named_or_here(None))
    if plan is None:
        asked = {"method": "auto"} | own | plain
        arguments.check(model, built | asked)
    quiet(verbose)
    from parloom import api
    from parloom import scaling as curve
    from parloom.report.scaling import scaling_document, scaling_screen
    from parloom.searching import Captured, asked_of

    if plan is not None:
        asked = asked_of(plan) | own | plain
        arguments.check(model, asked)
        model = plan.source.spec
        built = {"seq": plan.source.seq, "dtype": plan.source.dtype}
        built["optimizer"] = plan.optimizer.name
    sizes = curve.sizes_of(cluster, up_to)
    curve.check_scaling(sizes, price)
    program = Captured.of(plan) if plan else api.capture(model, **built, progress=say)
    curve.check_weak(program, weak)
    again = (
        (lambda size: api.capture(model, **built | {"batch": size}, progress=say)) if weak else None
    )
    found = curve.scaling(sizes, program, again, say, asked)
    show_json(scaling_document(found)) if as_json else result(scaling_screen(found))
    if found.interrupted:
        raise typer.Exit(130)


def _plan_at(model: str, built: Asked) -> Plan | None:
    """The plan that `model` names, whose model is built as it was; None for a model.

    Raises `InputError` for flags that build a model beside a plan.
    """
    from parloom.execute.files import is_plan, read_plan

    path = Path(model)
    if not is_plan(path):
        return None
    given = [flag for flag, value in built.items() if value is not None]
    if given:
        raise InputError(
            f"--{given[0]}: {model} is a plan, whose model is built as it was; give the model to"
            " build it otherwise"
        )
    plan = read_plan(path)
    if plan.inference is not None:
        raise NotYetError("not yet: scale is of training steps, and this plan is for inference")
    return plan
