"""The `parloom` command: flags in, results on stdout, progress on stderr, exit codes as documented.

0 done, 1 a bug, 2 bad usage or input, 3 nothing fits (or a strict export leaves something out), 4
cannot be captured, 5 plan of another model, 6 gap not reached, 7 numbers differ, 8 environment
unusable, 130 interrupted. torch is imported by the commands that need it, when they run.
"""

import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Sequence as Texts
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from parloom import __version__, arguments
from parloom.cli_cluster import cluster_app, named_or_here
from parloom.cli_inference import plan_inference, tell_program
from parloom.cli_money import plan_front, scale, tokens_of
from parloom.cli_options import (
    BUDGET,
    CHECKPOINT,
    DEVICES,
    FORBID,
    GAP,
    NO_REWRITES,
    OBJECTIVE,
    PIN,
    RESUME,
    RUN,
    SCRIPT,
    SEMANTICS,
    STRICT,
    THERE,
    TIMEOUT,
    TO,
    TRACE,
    Allowed,
    AsJson,
    Batch,
    Calibrated,
    Clusters,
    Days,
    Dtype,
    Inference,
    Memory,
    Method,
    Model,
    NewTokens,
    OptimizerName,
    Out,
    Pareto,
    PlanPath,
    Plans,
    Price,
    RunLog,
    Sequence,
    Steps,
    Tokens,
    Verbose,
    Weights,
)
from parloom.cli_output import check_printable
from parloom.cli_output import quiet as _quiet
from parloom.cli_output import result as _print
from parloom.cli_output import say as _say
from parloom.cli_workflow import workflow_app
from parloom.cost.clusters import resolve_cluster
from parloom.cost.money import parse_prices
from parloom.errors import (
    EqualityError,
    InexpressibleError,
    InfeasibleError,
    InputError,
    NotYetError,
    ParloomError,
    StoppedError,
    shell_word,
)
from parloom.ir.expected import Objective
from parloom.report.failures import bug_words, lack_words
from parloom.report.output import flush_stdout, show_json
from parloom.search.pins import NO_REWRITE

Asked = dict[str, Any]  # arguments of a function of the api

app = typer.Typer(
    name="parloom",
    help="Plan, prove, predict and run parallel training of an unmodified PyTorch model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(cluster_app, name="cluster")
app.add_typer(workflow_app, name="workflow")


@app.command()
def plan(
    model: Model,
    cluster: Clusters = None,
    batch: Batch = None,
    seq: Sequence = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast model and batch to it; default: as they are.")
    ] = None,
    optimizer: OptimizerName = None,
    method: Method = "auto",
    memory: Memory = None,
    devices: Annotated[int | None, typer.Option(metavar="N", min=1, help=DEVICES)] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches a step.")] = None,
    batch_semantics: Annotated[
        str, typer.Option(metavar="global|microbatch", help=SEMANTICS)
    ] = "global",
    calibration: Calibrated = None,
    pin: Annotated[list[str] | None, typer.Option(metavar="NAME=LAYOUT", help=PIN)] = None,
    forbid: Annotated[list[str] | None, typer.Option(metavar="NAME=LAYOUT", help=FORBID)] = None,
    allow: Allowed = None,
    no_rewrites: Annotated[bool, typer.Option("--no-rewrites", help=NO_REWRITES)] = False,
    objective: Annotated[Objective | None, typer.Option(help=OBJECTIVE)] = None,
    inference: Inference = False,
    new_tokens: NewTokens = None,
    steps: Steps = None,
    weights: Weights = None,
    tokens: Tokens = None,
    days: Days = None,
    pareto: Pareto = False,
    price: Price = None,
    budget: Annotated[int | None, typer.Option(metavar="WORK", min=1, help=BUDGET)] = None,
    require_gap: Annotated[float | None, typer.Option(metavar="G", min=0, help=GAP)] = None,
    batch_norm: Annotated[str, typer.Option(help="global; local: not yet.")] = "global",
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    out: Out = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Find the fastest plan that fits and save it with its generated source."""
    if batch_norm != "global":
        raise NotYetError(f"not yet: --batch-norm {batch_norm} is still to come")
    cluster = named_or_here(cluster)
    captured: Asked = {
        "batch": batch,
        "seq": seq,
        "dtype": None if dtype is None else dtype.value,
        "optimizer": optimizer,
        "microbatches": microbatches,
        "batch_semantics": batch_semantics,
        "seed": seed,
    }
    searched: Asked = {
        "cluster": cluster,
        "method": method,
        "memory": memory,
        "devices": devices,
        "microbatches": microbatches,
        "calibration": calibration,
        "pin": pin or [],
        "forbid": [*(forbid or []), *([NO_REWRITE] if no_rewrites else [])],
        "allow": allow or [],
        "budget": budget,
        "objective": (objective or Objective.TIME).value,
        "price": price,
    }
    asked = captured | searched | {"require_gap": require_gap}
    answered: Asked = {"new_tokens": new_tokens, "steps": steps, "weights": weights}
    arguments.check(model, asked | answered | {"inference": inference})
    in_run, clusters = tokens_of(tokens), arguments.clusters_of(cluster)
    searched |= {"cluster": clusters[0]} if len(clusters) == 1 else {}
    _quiet(verbose)
    if inference:
        of_training: Asked = {"tokens": tokens, "days": days, "pareto": pareto}
        other = of_training | {"require_gap": require_gap}
        plan_inference(model, captured | answered, searched, objective, other, out, as_json)
        return
    if pareto or days is not None or len(clusters) > 1:
        wanted: Asked = {"by": objective, "pareto": pareto, "in_run": in_run, "days": days}
        plan_front(model, clusters, captured, searched, wanted, out, require_gap, as_json)
        return
    _plan(model, captured, searched, out, as_json, require_gap, in_run)


def _plan(
    model: str,
    captured: Asked,
    searched: Asked,
    out: Path | None,
    as_json: bool,
    gap: float | None,
    in_run: float | None,
) -> None:
    cluster = searched["cluster"]
    loaded = resolve_cluster(cluster, parse_prices(searched["price"]))
    from parloom import api
    from parloom.execute.files import check_folder, default_folder
    from parloom.execute.shrink import needs_copy
    from parloom.report import terminal

    api.check_asked(model, captured | searched)
    check_folder(out or Path("runs"))
    started = time.monotonic()
    program = api.capture(model, **captured, progress=_say)
    between = time.monotonic()
    try:
        found = api.search(program, **searched, progress=_say)
    except InfeasibleError as error:
        if as_json:
            show_json({"infeasible": dict(error.document)})
        raise
    capture_s, search_s = between - started, time.monotonic() - between
    _say(f"captured in {capture_s:.1f} s, searched in {search_s:.1f} s")
    paths = api.save(found, out or default_folder(model, cluster, found))
    if as_json:
        path = str(paths["plan"])
        show_json(terminal.plan_document(found, loaded.cluster, capture_s, search_s, path, in_run))
    else:
        given = searched["calibration"]
        prove = " --shrink" if needs_copy(found) else ""
        _print(terminal.plan_screen(found, loaded.cluster, paths, given, in_run, prove))
    if found.interrupted:
        raise typer.Exit(130)
    api.check_gap(found, gap)


@app.command()
def verify(
    path: PlanPath,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Prove a small copy of a big model.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Prove that the plan's program equals the model on one device (exit 7 where it does not)."""
    _quiet(verbose)
    from parloom import api
    from parloom.execute.machine import cluster_of
    from parloom.report.words import run_words

    chosen = api.load(path)
    report = api.verify(chosen, shrink=shrink, progress=_say)
    if as_json:
        show_json(asdict(report))
    else:
        _print(str(report))
    if not report.passed:
        raise typer.Exit(EqualityError.exit_code)
    if not as_json:
        given = "train.py" if chosen.inference is None else "requests.jsonl answers.jsonl"
        _print(f"next: {run_words(chosen, cluster_of(chosen), shell_word(path), given)}")


@app.command()
def run(
    path: PlanPath,
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help=RUN)],
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help=TIMEOUT)] = None,
    trace: Annotated[Path | None, typer.Option(metavar="F", help=TRACE)] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help=CHECKPOINT)] = None,
    cluster: Annotated[str | None, typer.Option(metavar="C", help=THERE)] = None,
    devices: Annotated[int | None, typer.Option(metavar="N", min=1, help=DEVICES)] = None,
    verbose: Verbose = False,
) -> None:
    """Start a training script on every rank of the plan with torchrun."""
    of_resume: Asked = {"checkpoint": checkpoint, "cluster": cluster, "devices": devices}
    if not resume and any(given is not None for given in of_resume.values()):
        raise InputError("--checkpoint, --cluster and --devices go with --resume")
    from parloom import api
    from parloom.resume import resume as go_on

    # Below torchrun this process is a rank: the script sees Ctrl-C as in any other program.
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    usual: Asked = {"timeout_s": timeout, "trace": trace, "progress": _say, "verbose": verbose}
    if resume:
        raise typer.Exit(go_on(path, script, **of_resume, **usual))
    raise typer.Exit(api.run(path, script, **usual))


@app.command()
def doctor(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Versions, backends, processors and memory, ready to paste (exit 8 where nothing can run)."""
    from parloom.execute import doctor as diagnosis

    found = diagnosis.diagnose()
    if as_json:
        show_json(found)
    else:
        _print("\n".join(diagnosis.lines(found)))
    diagnosis.check(found)


@app.command()
def simulate(
    path: PlanPath,
    trace: Annotated[
        Path | None, typer.Option(metavar="F", help="Write a Chrome trace, as for Perfetto.")
    ] = None,
    run_log: Annotated[
        Path | None,
        typer.Option("--run", metavar="LOG", help="Beside it a step of a run with this log_path."),
    ] = None,
    calibration: Calibrated = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Play one step of the plan: what is busy, what is waited for, and memory over time."""
    from parloom import api
    from parloom.execute.machine import cluster_of
    from parloom.report import observed, timeline
    from parloom.report.words import process_names, title_words, uncalibrated_words

    chosen = api.load(path)
    seen = api.observed(chosen, run_log) if run_log else []
    spans = [of_stage.actions for of_stage in seen]
    beside = observed.observed_timeline(spans) if seen else None
    tell_program(chosen, as_json)
    played = api.simulate(chosen, calibration)
    source = api.source_of(chosen, calibration, peak_bytes=played.peak_bytes)
    if warning := uncalibrated_words(chosen, source):
        _say(warning)
    names = process_names(chosen.decisions)
    if trace is not None and not trace.parent.exists():
        _say(f"making the folder {trace.parent}")
    written = (
        None if trace is None else str(api.write_trace(played, trace, *names, observed=beside))
    )
    if as_json:
        document = timeline.timeline_document(played, names, written, source)
        if seen:
            document["observed"] = observed.observed_document(spans, names, seen[0].step)
        show_json(document)
        return
    title = title_words(chosen, cluster_of(chosen))
    _print(timeline.timeline_screen(played, title, names, source))
    if beside is not None:
        _print("")
        _print(observed.observed_screen(played, beside, names, seen[0].step))
    if written is not None:
        _print(f"trace {written}: open it in ui.perfetto.dev")


@app.command()
def explain(
    path: PlanPath,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="An operator, parameter, tensor or module path."),
    ] = None,
    versus: Annotated[
        str | None, typer.Option(metavar="METHOD|PLAN", help="What differs from it, by cause.")
    ] = None,
    calibration: Calibrated = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what was decided, what it costs, and what bounds it."""
    _quiet(verbose)
    from parloom import api

    chosen = api.load(path)
    tell_program(chosen, as_json)
    answer = api.explain(
        chosen,
        name=name,
        path=str(path),
        versus=versus,
        calibration=calibration,
        progress=_say,
    )
    show_json(answer.document) if as_json else _print(answer.screen)


@app.command()
def calibrate(
    out: Annotated[
        Path, typer.Option(metavar="F", help="Where to write what was measured.")
    ] = Path("calibration.json"),
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Measure its operators, too.")
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option(metavar="PLAN", help="Measure its operators, too.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="C", help="What the ranks are; default: one node.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure this machine; under torchrun, on every rank, also collectives between the ranks."""
    _quiet(verbose)
    from parloom import api
    from parloom.execute import calibrate as measuring
    from parloom.execute.files import check_folder

    check_folder(out.parent)
    with measuring.ranks() as rank:
        say = _say if rank == 0 else lambda text: None
        found = api.calibrate(model or (), plan or (), cluster=cluster, progress=say)
        if rank:
            return
        path = api.save_calibration(found, out)
    if as_json:
        show_json(json.loads(path.read_text(encoding="utf-8")))
        return
    measured = f"{len(found.products)} products, {len(found.operators)} operators"
    _print(
        f"{path}: {found.fingerprint.processor}: {measured},"
        f" {len(found.collectives)} collectives; repetitions differ by {found.error:.0%}"
    )
    _print(f"next: parloom plan MODEL --cluster C --calibration {shell_word(path)}")


@app.command()
def report(
    path: Plans,
    run_log: RunLog = None,
    calibration: Calibrated = None,
    out: Annotated[Path, typer.Option(metavar="F", help="The page.")] = Path("report.html"),
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write plans, beside each other where there are several, as one page to look at."""
    _quiet(verbose)
    from parloom import api
    from parloom.execute.files import check_file

    if not as_json:
        check_file(out, "choose another file with --out")
    document = api.report(path, run=run_log, calibration=calibration, progress=_say)
    if as_json:
        show_json(document)
        return
    api.write_page(document, out)
    _print(f"report {out}: open it in a browser; it needs no network")


@app.command()
def export(
    path: PlanPath,
    to: Annotated[str, typer.Option(metavar="TARGET", help=TO)],
    script: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SCRIPT [ARGS]...]", help=SCRIPT)
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")] = Path("launch"),
    strict: Annotated[bool, typer.Option("--strict", help=STRICT)] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write the file by which a launcher starts the plan, or another framework is set up so."""
    _quiet(verbose)
    from parloom import api, exporting

    try:
        document = api.export(path, to, script or ["train.py"], out, strict=strict)
    except InexpressibleError as error:
        if as_json:
            show_json({"to": to, "not_expressible": list(error.missing)})
        raise
    if as_json:
        show_json(document)
        return
    _print(exporting.export_screen(document))


app.command()(scale)


def main(argv: Texts[str] | None = None) -> int:
    """Run one command; the exit code of the contract."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verbose = "-v" in own or "--verbose" in own
    disabled = logging.root.manager.disable
    try:
        if own == ["--version"]:
            _print(f"parloom {__version__}")
            return 0
        check_printable(own)
        app(arguments, prog_name="parloom")
    except SystemExit as stop:
        if stop.code == 130:
            _say("interrupted")
        if stop.code == 2 and own in ([], ["cluster"], ["workflow"]):
            _say("error: no command was given; the help lists them")
        if isinstance(stop.__context__, BrokenPipeError):
            return 0  # whoever reads has enough, and the help is all there is
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (KeyboardInterrupt, StoppedError):
        _say("interrupted")
        return 130
    except ParloomError as error:
        if verbose:
            _say(traceback.format_exc())
        _say(f"error: {error}", laid_out=isinstance(error, InfeasibleError))
        return error.exit_code
    except Exception as error:
        why = lack_words(error)
        if why:
            flush_stdout()
        if verbose:
            _say(traceback.format_exc())
        _say(f"error: {why}" if why else bug_words(error, arguments, __version__))
        return 8 if why else 1
    finally:
        logging.disable(disabled)
    return 0
