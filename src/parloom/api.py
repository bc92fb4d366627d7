"""The main path on one screen: capture, plan, simulate, generate, verify, run, parallelize."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parloom import arguments, searching
from parloom import inference as _inference
from parloom import inference_plan as _inference_plan
from parloom.answer import check_gap as check_gap  # noqa: PLC0414 - part of the API
from parloom.capture import Loss, fingerprint, load_abstract, remarks, scalars_apart, with_culprit
from parloom.capture import capture as _capture
from parloom.capture.ambient import settings
from parloom.capture.live import spec_of
from parloom.capture.load import full_name
from parloom.capture.microbatch import capture_microbatch, split_of
from parloom.capture.ranges import ranges_of
from parloom.cost.calibration import Calibration, calibration_to_json
from parloom.cost.clusters import LoadedCluster, resolve_cluster
from parloom.cost.measured import Source
from parloom.cost.money import check_priced, parse_prices
from parloom.cost.timeline import Timeline
from parloom.errors import CaptureError, InputError, ParloomError, one_line
from parloom.execute import calibrate as calibration_run
from parloom.execute import launch
from parloom.execute.consistent import check_results
from parloom.execute.detect import cluster_here, detect, found_words
from parloom.execute.eager import ADVICE, PLAN, begin, check
from parloom.execute.eager_compare import DIFFERS, EQUAL
from parloom.execute.eager_process import Build, ForkServer
from parloom.execute.files import read_plan, uninterrupted, write_atomic
from parloom.execute.inference import all_programs, source_of_programs
from parloom.execute.log import StageTimes, last_observed
from parloom.execute.machine import cluster_of, machine_for, machine_of
from parloom.execute.optimizers import Maker, name_of, named_optimizer, optimizer_name
from parloom.execute.program import NO_EVALUATION, lowered
from parloom.execute.prove import prove
from parloom.execute.prove_inference import prove_inference
from parloom.execute.requests import check_requests
from parloom.execute.train import Trainer
from parloom.execute.train import parallelize as _parallelize
from parloom.execute.verify import VerifyReport
from parloom.explain import explain as explain  # noqa: PLC0414 - part of the API
from parloom.exporting import export as export  # noqa: PLC0414 - part of the API
from parloom.ir.expected import Objective
from parloom.ir.plan import DTYPES, GLOBAL, MICROBATCH, ModelSource, Plan
from parloom.ir.plan_json import plan_hash, plan_to_json
from parloom.ir.text import parse_graph, print_graph
from parloom.measured_programs import measured_programs
from parloom.notebook import show_sharding as show_sharding  # noqa: PLC0414
from parloom.report.words import WARNING
from parloom.reporting import report as report  # noqa: PLC0414 - part of the API
from parloom.reporting import write_page as write_page  # noqa: PLC0414
from parloom.searching import Captured as Captured  # noqa: PLC0414 - part of the API
from parloom.tracing import traced
from parloom.tracing import write_trace as write_trace  # noqa: PLC0414 - part of the API

Say = Callable[[str], None]
Batch = Mapping[str, Tensor]
Asked = dict[str, Any]  # arguments by name
capture_inference = _inference.capture
search_inference = _inference_plan.find
SERVE = ("-m", "parloom.execute.serve")


def _silent(text: str) -> None:
    """Drop progress messages."""


def plan(  # noqa: PLR0913 - one argument per flag of the command
    model: str | nn.Module | Callable[[], Any],
    batch: int | Batch | None = None,
    optimizer: object = None,
    cluster: str | LoadedCluster = "",
    *,
    loss: Loss | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    method: str = "auto",
    memory: int | str | None = None,
    devices: int | None = None,
    microbatches: int | None = None,
    batch_semantics: str = GLOBAL,
    calibration: str | Path | None = None,
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    allow: Sequence[str] = (),
    budget: int | None = None,
    require_gap: float | None = None,
    seed: int = 0,
    objective: str = Objective.TIME,
    price: str | None = None,
    progress: Say = _silent,
) -> Plan:
    """Capture `model`, price the candidates of `method` on `cluster` and on parts of it, and keep
    the fastest that fits in `memory` per device (bytes, or text such as `70GB`; default: the
    device's). A plan uses `devices` of the cluster's, or as many as are fastest. Under the
    `objective` "cost" it is the cheapest a step, under "memory" the one with the least peak;
    `price` replaces prices of the cluster, as `2.10/gpu-h` or `H100=2.10/gpu-h,A100=1.29/gpu-h`.

    `model` is text that says how to build it (`zoo:NAME`, a Hugging Face config.json, folder or Hub
    id, `file.py:factory`, `pkg.module:factory`), such a function, or a module itself with its
    `batch`, a dict of tensors, and its `loss`, as `parallelize` takes them: it is copied, and this
    process alone can prove its plan.

    `optimizer` is a class of torch.optim, its name, or an optimizer; the default is what the
    model's factory returned, or adamw. `cluster` is a spec or a file's path; without one,
    this machine. With
    `batch_semantics` "microbatch" the loss is the mean of those of `microbatches` microbatches,
    each computed by itself. `calibration` is a file that `parloom calibrate` wrote.
    `pin` and `forbid` fix layouts and rule them out (docs/reference/pins.md), `allow` is a list of
    what plans may do that changes results ("quantized-communication"), `budget` ends the search
    after so much work.

    Raises `InputError`, `CaptureError`, `InfeasibleError` (nothing fits) or `GapError` (the plan is
    further than `require_gap` above what was proved to be the least).
    """
    spec, samples = spec_of(model, batch, loss, optimizer)
    capturing: Asked = {
        "batch": samples,
        "seq": seq,
        "dtype": dtype,
        "optimizer": optimizer_name(optimizer),
        "microbatches": microbatches,
        "batch_semantics": batch_semantics,
        "seed": seed,
    }
    searching: Asked = {
        "cluster": _spec_of(cluster, progress),
        "method": method,
        "memory": memory,
        "devices": devices,
        "microbatches": microbatches,
        "calibration": calibration,
        "pin": pin,
        "forbid": forbid,
        "allow": allow,
        "budget": budget,
        "objective": objective,
        "price": price,
    }
    check_asked(spec, capturing | searching | {"require_gap": require_gap})
    found = search(capture(spec, **capturing, progress=progress), **searching, progress=progress)
    check_gap(found, require_gap)
    return found


def _spec_of(cluster: str | LoadedCluster, progress: Say) -> str:
    """A cluster as text; that of this machine, which is said, where none was named."""
    if isinstance(cluster, LoadedCluster):
        return cluster.spec
    if cluster:
        return cluster
    here = detect()
    progress(found_words(here))
    return cluster_here(here).spec


def check_asked(model: str, asked: Asked) -> None:
    """Raise `InputError` for the first bad argument of `plan`, before the model is captured."""
    arguments.check(model, asked)
    prices = parse_prices(asked.get("price"))
    machine = machine_for(
        asked["cluster"], asked["calibration"], num_devices=asked["devices"], prices=prices
    )
    if asked.get("objective") == Objective.COST:
        check_priced([machine.cluster], "--objective cost")
    prices.check([machine.cluster])
    arguments.check_on(machine.cluster, asked)


def check_inference_asked(model: str, asked: Asked) -> None:
    """Raise `InputError` for the first bad argument of `plan --inference`, before the model is
    captured.
    """
    _inference_plan.check_objective(asked["objective"])
    _inference.check_answer(asked["new_tokens"], asked["steps"], asked["weights"])
    check_asked(model, asked | {"inference": True})


def capture(
    model: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    microbatches: int | None = None,
    batch_semantics: str = GLOBAL,
    seed: int = 0,
    progress: Say = _silent,
) -> Captured:
    """The first half of `plan`: build the model and capture its programs."""
    arguments.check(model, {"batch": batch, "seq": seq, "dtype": dtype, "seed": seed})
    dtype = DTYPES.get(dtype, dtype) if dtype else None
    asked_for = named_optimizer(optimizer) if optimizer else None
    apart = (microbatches or 1) if batch_semantics == MICROBATCH else 1
    told: tuple[str, ...] = ()
    if (bundled := full_name(model)) != model:
        told = (
            f"{model} is {bundled}, which parloom brings; the Hub's is openai-community/{model}",
        )
        progress(told[0])
    source = ModelSource(bundled, batch, seq, dtype)
    with ForkServer() as server:  # before anything of the model is imported
        progress(f"building {model}")
        loaded = load_abstract(model, batch=batch, seq=seq, dtype=dtype, seed=seed)
        if apart == 1:  # where samples lie is known once the model is captured
            begin(server, Build(source, seed), loaded, PLAN)
        chosen = asked_for or named_optimizer(name_of(loaded.optimizer) or "adamw")
        progress("capturing the training program")
        try:
            graph = capture_microbatch(loaded.model, loaded.batch, apart, loss=loaded.loss)
        except CaptureError as err:
            raise with_culprit(model, err, batch, seq) from err
        evaluation, notes = _evaluation(loaded.model, loaded.batch, loaded.loss)
        progress("comparing it with the module itself")
        whole = Build(source, seed, split=split_of(graph, loaded.batch))
        eager = check(server, whole, graph, evaluation, PLAN)
        progress(f"compared in {eager.seconds:.1f} s")
    if eager.outcome == DIFFERS:
        raise CaptureError(f"cannot capture {type(loaded.model).__name__}: {eager}; {ADVICE}")
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in loaded.batch.items())
    for program in (graph, *((parse_graph(evaluation),) if evaluation else ())):
        try:
            check_results(program)  # as whoever reads the plan will
        except ParloomError as err:
            raise CaptureError(f"cannot capture {type(loaded.model).__name__}: {err}") from err
    equal, other = ((str(eager),), ()) if eager.outcome == EQUAL else ((), (str(eager),))
    return Captured(
        source,
        fingerprint(loaded.model, loaded.batch),
        chosen,
        graph,
        evaluation,
        (*told, *equal, f"batch as built: {shapes}"),
        (*other, *remarks(loaded.model, graph), *notes),
        seed,
        settings(),
        ranges_of(loaded.batch),
        apart,
        batch_semantics,
    )


def search(captured: Captured, *, progress: Say = _silent, **asked: Any) -> Plan:
    """The second half of `plan`: price the candidates and keep the fastest that fits, or the best
    by another objective; `asked` are the arguments of `plan` that are not those of `capture`.
    """
    best = searching.find(captured, progress=progress, **asked).plan()
    for line in best.notes:
        if line.startswith(WARNING):
            progress(line)
    return best


def _evaluation(model: nn.Module, batch: Batch, loss: Loss | None) -> tuple[str, tuple[str, ...]]:
    """The evaluation program as text with notes on it, or a note that says why there is none."""
    try:
        graph = _capture(model, batch, loss=loss, training=False)
    except CaptureError as error:
        return "", (f"{NO_EVALUATION}: {one_line(error)}",)
    apart = scalars_apart(graph)
    if not apart or loss is not None:  # who gives a loss function has chosen
        return print_graph(graph), ()
    line = (
        f"{WARNING}scalar outputs that are no part of the loss, so that nothing is trained for"
        f" them: {', '.join(apart)}; the loss is the output `loss`, or else the first one: return"
        " the sum as that, or have the factory return a loss function too"
    )
    return print_graph(graph), (line,)


def save(plan: Plan, folder: str | Path) -> dict[str, Path]:
    """Write `plan.json` and the generated `program.py` into `folder`; their paths."""
    folder = Path(folder)
    with uninterrupted():  # a search may have taken hours
        source = source_of_programs(plan)
        return {
            "plan": write_atomic(folder / "plan.json", plan_to_json(plan)),
            "source": write_atomic(folder / "program.py", source),
        }


def load(path: str | Path) -> Plan:
    """Read a plan file or a folder with one; nothing in it is executed."""
    return read_plan(Path(path))


def load_cluster(spec: str) -> LoadedCluster:
    """The cluster of `2x8xH100`, `8xH100`, `4xcpu` or a YAML file, with what had to be assumed."""
    return resolve_cluster(spec)


def simulate(plan: Plan, calibration: str | Path | None = None) -> Timeline:
    """Play one step of `plan` on the cluster that it was made for; one device stands for all.

    `calibration` is a file that `parloom calibrate` wrote.
    """
    machine = machine_of(plan, calibration)
    follow = plan.inference is not None and plan.inference.steps == 1
    return machine.play(lowered(plan), plan.decisions, plan.optimizer, repeated=follow)


def source_of(plan: Plan, calibration: str | Path | None = None, *, peak_bytes: int = 0) -> Source:
    """Where the numbers of `simulate` come from, and how far they may be off where it holds
    `peak_bytes` at most.
    """
    return machine_of(plan, calibration).source(*lowered(plan).pcgs, peak_bytes=peak_bytes)


def observed(plan: Plan, log: str | Path) -> list[StageTimes]:
    """The last step in a run's log that was observed, stage by stage (in the order of `simulate`).

    Raises `InputError` where the log has no run of this plan, or no observed step of it.
    """
    return last_observed(Path(log), plan_hash(plan))


def calibrate(
    models: Sequence[str] = (),
    plans: Sequence[str | Path] = (),
    *,
    cluster: str | None = None,
    progress: Say = _silent,
) -> Calibration:
    """Measure this machine: products, memory, the operators of `models` (`measured_programs`) and
    of `plans`; under torchrun, with every rank calling alike, also messages and collectives
    between the ranks.
    """
    found = [load(path) for path in plans]
    size = calibration_run.world_size()
    machine = resolve_cluster(cluster or f"{size}xcpu").cluster
    if found:
        used = cluster_of(found[0])  # what the plan uses of the cluster
        machine = used if cluster is None or used.num_devices == size else machine
    programs = (program for plan in found for program in all_programs(plan))
    pcgs = [pcg for program in programs for pcg in program.pcgs]
    for model in models:
        graph = capture(model, progress=progress).graph
        pcgs += measured_programs(graph, machine, progress)
    return calibration_run.calibrate(pcgs, machine, progress)


def save_calibration(calibration: Calibration, path: str | Path) -> Path:
    """Write a calibration, whole or not at all."""
    return write_atomic(Path(path), calibration_to_json(calibration), "choose another with --out")


def generate(plan: Plan) -> str:
    """The source that every rank of the plan runs."""
    return source_of_programs(plan)


def verify(plan: Plan, *, shrink: bool = False, progress: Say = _silent) -> VerifyReport:
    """Prove on this CPU that the plan's program equals the model on one device.

    With `shrink`, a small copy of model and mesh is proved instead; the report says what shrank.
    Raises `FingerprintError` where the model has changed since the plan was made.
    """
    if plan.inference is not None:
        return prove_inference(plan, small=shrink, progress=progress)
    return prove(plan, small=shrink, progress=progress)


def run(
    path: str | Path,
    script: Sequence[str],
    *,
    timeout_s: float | None = None,
    trace: str | Path | None = None,
    progress: Say = _silent,
    verbose: bool = False,
) -> int:
    """Start a training script on every rank of the plan; the exit code. The run ends where a rank
    waits for another one longer than `timeout_s`, by default ten minutes. Its third step is at
    `trace`, as it ran and as it is simulated, for Perfetto. A plan for inference is given a file of
    requests in the place of a script (`execute.serve`).
    """
    path = Path(path)
    file = path / "plan.json" if path.is_dir() else path
    chosen = load(file)
    usual: Asked = {"say": progress, "verbose": verbose, "timeout_s": timeout_s}
    if chosen.inference is not None:
        if trace is not None:
            raise InputError("--trace is of training steps, and this plan is for inference")
        if not script:
            raise InputError("no requests: write `parloom run PLAN -- requests.jsonl [answers]`")
        check_requests(chosen, script)
        return launch.run(chosen, [*SERVE, *script], plan_path=file, **usual)
    with traced(chosen, trace, progress) as observed:
        return launch.run(chosen, script, plan_path=file, observed=observed, **usual)


def parallelize(  # noqa: PLR0913 - one argument per choice of the run
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    optimizer: Maker,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    loss: Loss | None = None,
    weights_path: str | Path | None = None,
    log_path: str | Path | None = None,
    loggers: Sequence[str] = (),
    compile_backend: str | None = None,
    seed: int = 0,
    exact_random: bool = False,
) -> Trainer:
    """A trainer for this rank of `plan`, a `Plan` or its path, with `model`'s current values.

    Call it alike on every rank, under `parloom run` or torchrun; `model` is built as it was when it
    was planned. A plan for one device needs no launcher. Below `parloom run --resume` the trainer
    has loaded the checkpoint: its `steps_done` and `samples_seen` say where the data goes on.

    - `optimizer` makes the optimizer, of the planned class, from (name, parameter) pairs under the
      model's names: `lambda named: torch.optim.AdamW(named, lr=1e-3)`.
    - `scheduler` makes a learning-rate scheduler from it, stepped after each optimizer step; make
      one per epoch, or a ReduceLROnPlateau, from `trainer.optimizer` and step it yourself.
    - `clip_norm` is the largest norm of all gradients together; None does not clip.
    - `loss` is the loss function that the factory returned, if it did: `loss(output, batch)` gets
      what forward returned and the whole batch, with the entries that forward does not take
      (labels), and returns a scalar: `lambda output, batch: F.cross_entropy(output, batch["y"])`.
    - `weights_path` (a safetensors file, or a folder in Hugging Face's layout) replaces the values
      of all parameters, read one tensor at a time: `model` may then be on the meta device.
    - `log_path` is a JSON-lines file, appended to: a record with plan, time, seed and ranks for the
      run, then one for each step, with loss, seconds, learning rate and, where it clips, gradient
      norm.
    - `loggers` name tools that get the numbers of each step, from rank 0: `tensorboard[:FOLDER]`,
      `wandb[:PROJECT]`, `trackio[:PROJECT]`, `mlflow[:EXPERIMENT]`.
    - `compile_backend` names a backend of torch.compile (`inductor`) for the program's blocks, each
      kind compiled once; what stands between blocks runs as it is written.
    - `seed` keys dropout masks, with the step: the same seed draws the same ones again.
    - `exact_random` draws each mask whole on every rank and uses the rank's part, so that they do
      not depend on the plan; otherwise each shard draws its own, which is faster.

    Raises `FingerprintError` where model, loss or optimizer are not what the plan was made for,
    `LaunchError` where the ranks are not, or hold other weights than each other.
    """
    chosen = plan if isinstance(plan, Plan) else load(plan)
    return _parallelize(
        model,
        chosen,
        optimizer=optimizer,
        scheduler=scheduler,
        clip_norm=clip_norm,
        loss=loss,
        weights_path=None if weights_path is None else Path(weights_path),
        log_path=None if log_path is None else Path(log_path),
        loggers=loggers,
        compile_backend=compile_backend,
        seed=seed,
        exact_random=exact_random,
    )
