"""`parloom plan --inference`: plans that serve a model."""

import time
from pathlib import Path
from typing import Any

import typer

from parloom.cli_output import result, say
from parloom.errors import InfeasibleError, InputError
from parloom.ir.expected import Objective
from parloom.ir.plan import GLOBAL, Plan
from parloom.report.output import show_json

Asked = dict[str, Any]


def plan_inference(
    model: str,
    captured: Asked,
    searched: Asked,
    objective: Objective | None,
    other: Asked,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan, print and save; `other` are the values of flags that are about training."""
    _check(captured, searched, other)
    wanted = objective or Objective.LATENCY
    from parloom import api
    from parloom.execute.files import check_folder, default_folder
    from parloom.report.inference import inference_document, inference_screen

    api.check_inference_asked(model, captured | searched | {"objective": wanted})
    check_folder(out or Path("runs"))
    started = time.monotonic()
    keys = ("batch", "seq", "dtype", "seed", "new_tokens", "steps", "weights")
    asked = {key: captured[key] for key in keys}
    program = api.capture_inference(model, **asked, progress=say)
    between = time.monotonic()
    names = ("cluster", "method", "memory", "devices", "calibration", "pin", "forbid", "budget")
    limits = {key: searched[key] for key in names}
    try:
        found = api.search_inference(program, **limits, objective=wanted, progress=say)
    except InfeasibleError as error:
        if as_json:
            show_json({"infeasible": dict(error.document)})
        raise
    capture_s, search_s = between - started, time.monotonic() - between
    say(f"captured in {capture_s:.1f} s, searched in {search_s:.1f} s")
    paths = api.save(found, out or default_folder(model, searched["cluster"], found))
    if as_json:
        show_json(inference_document(found, str(paths["plan"]), capture_s, search_s))
    else:
        result(inference_screen(found, api.load_cluster(searched["cluster"]).cluster, paths))
    if found.interrupted:
        raise typer.Exit(130)
    api.check_gap(found, other["require_gap"])


def tell_program(plan: Plan, as_json: bool) -> None:
    """Say of a plan with two programs which one `simulate` and `explain` show on a screen."""
    from parloom.report.inference import of_one_token

    words = of_one_token(plan)
    if words and not as_json:
        say(words)


def _check(captured: Asked, searched: Asked, other: Asked) -> None:
    """Raise `InputError` for a flag that has no meaning where nothing is trained."""
    flags = {
        "--optimizer": captured["optimizer"],
        "--microbatches": captured["microbatches"],
        "--batch-semantics": captured["batch_semantics"] != GLOBAL,
        "--tokens": other["tokens"],
        "--days": other["days"],
        "--pareto": other["pareto"],
        "--price": searched["price"],
        "--allow": searched["allow"],
    }
    for flag, given in flags.items():
        if given:
            raise InputError(f"{flag} is about training, and --inference plans forward passes")
    if "," in searched["cluster"] and not searched["cluster"].startswith("{"):
        raise InputError("--inference plans for one cluster at a time")
