"""The trainer that `parallelize` returns: the runtime's, with logs, checkpoints and weights."""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parloom.capture import Loss, parameters_of
from parloom.capture.ambient import check_settings, refuse_around_step
from parloom.cost.clusters import load_cluster, short_name
from parloom.cost.kernels import SPEC
from parloom.errors import InputError, LaunchError
from parloom.execute import checkpoint, optimizers, weights
from parloom.execute.handed_over import Original, hand_over, refuse_handed_over
from parloom.execute.log import NUM_COMPARED, RunRecord, StageTimes, StepLog, StepRecord
from parloom.execute.loggers import Guarded, Settings, begun, check_names
from parloom.execute.out_of_memory import out_of_memory, seen_on, snapshot
from parloom.execute.program import NO_EVALUATION, evaluation_program, training_program
from parloom.execute.same_model import check_again, check_on_ranks, check_tensors
from parloom.execute.startup import check_runs_here, check_world_size
from parloom.execute.stopwatch import Reading, begin
from parloom.execute.unchanged import Unchanged
from parloom.execute.watch import CHECKPOINT, DEFAULT_TIMEOUT_S, OBSERVED, Watch, timeout, watcher
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, Node
from parloom.ir.lower_stages import stage_groups, stage_ranks
from parloom.ir.microbatches import with_whole_batch
from parloom.ir.ops import op_of
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_hash
from parloom.ir.samples import sample_dims
from parloom.ir.text import parse_graph
from parloom.runtime import (
    Axis,
    Comm,
    CompiledBlocks,
    DistributedComm,
    Evaluation,
    Mesh,
    Pipeline,
    Program,
    SingleComm,
    StepResult,
    agreed,
    check_same_values,
)
from parloom.runtime import Trainer as RuntimeTrainer
from parloom.runtime.spans import ActionSpan, waiting_share
from parloom.runtime.store import Source

DRAWS_DEPEND = (
    "dropout masks and other random draws depend on the plan: each rank draws its own part;"
    " parallelize(..., exact_random=True) draws alike under every plan, more slowly"
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a trainer is told beside its program, weights and optimizer.

    `items` of `unit` (tokens or samples) are in a batch; `state_names` are the names of the model's
    own `state_dict`, in its order.
    """

    plan: Plan
    state_names: tuple[str, ...]
    items: int
    unit: str
    device: torch.device
    clip_norm: float | None = None
    compile_backend: str | None = None
    seed: int = 0
    exact_random: bool = False
    sample_dims: Mapping[str, int] | None = None
    log_path: Path | None = None
    loggers: Sequence[Guarded] = ()
    watch: Callable[[str], None] = lambda text: None


class Trainer(RuntimeTrainer):
    """`parloom.runtime.Trainer` that logs every step and reads and writes files.

    Made by `parallelize`; all ranks make the same calls in the same order.
    """

    def __init__(
        self,
        program: Program | Pipeline,
        tensors: Source,
        run: Run,
        *,
        optimizer: optimizers.Maker,
        comm: Comm,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        evaluation: Program | Pipeline | None = None,
    ) -> None:
        super().__init__(
            program,
            tensors,
            optimizer=optimizer,
            comm=comm,
            scheduler=scheduler,
            clip_norm=run.clip_norm,
            device=run.device,
            evaluation=evaluation,
            seed=run.seed,
            exact_random=run.exact_random,
            sample_dims=run.sample_dims,
            watch=run.watch,
            blocks=CompiledBlocks(run.compile_backend) if run.compile_backend else None,
        )
        self.run = run
        self._steps_here = 0
        self._model: Original | None = None
        self._unchanged: Unchanged | None = None
        self._observes = OBSERVED in os.environ or len(run.plan.decisions.stages) > 1
        paths = (run.log_path, os.environ.get(OBSERVED))
        self.log = StepLog(comm.rank, [Path(p) for p in paths if p], loggers=run.loggers)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = RunRecord(plan_hash(run.plan), now, run.seed, comm.mesh.num_ranks)
        self.log.begin(record, run.plan.prediction)
        # The last step's line, where nobody asks for it any more.
        weakref.finalize(self, _close, self.log)

    def step(
        self, batch: Mapping[str, Tensor], local: bool = False, *, observed: bool = False
    ) -> StepResult:
        """Train on one batch (see the runtime's trainer) and log one line; the log has when each
        stage ran its actions in a step that is observed, as the third one of a pipeline always is.

        On a GPU the line comes one step late, or with the next `evaluate` or `save`: nothing here
        waits for the step that it has queued (in float16 all wait, to know whether gradients
        overflowed). Raises `FingerprintError` under other settings of
        torch than were planned with, `InputError` under autocast, a mode or no_grad, and where the
        script's model was written to after `parallelize`.
        """
        self._check_surroundings("step")
        if not torch.is_grad_enabled():
            raise InputError(
                "trainer.step was called where gradients are off (torch.no_grad, inference_mode):"
                " call it outside; trainer.evaluate computes no gradients"
            )
        reading = begin(self.device) if self.log.writes else None
        # Before the scheduler's turn; a tensor would change under it.
        rate = self.optimizer.param_groups[0]["lr"]
        rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        observed = observed or (self._observes and self._steps_here + 1 == NUM_COMPARED)
        try:
            result = super().step(batch, local, observed=observed)
        except NotImplementedError as error:
            raise LaunchError(_no_kernel(error, self.device)) from error
        except torch.OutOfMemoryError as error:
            rank, seen = self.comm.rank, seen_on(self.device, error)
            file = snapshot(rank)
            raise out_of_memory(self.run.plan, rank, self.steps_done + 1, seen, file) from error
        if reading is not None:
            numbers: dict[str, Tensor | float] = {"loss": result.loss, "lr": rate}
            if result.grad_norm is not None:
                numbers["grad_norm"] = result.grad_norm
            if result.loss_scale is not None:
                numbers["loss_scale"] = result.loss_scale
            reading.stop(numbers)
            memory_bytes = _memory_bytes(self.device)
            self.log.later(
                partial(_record, self.run, self.steps_done, reading, memory_bytes, result.skipped)
            )
            if reading.ready:
                self.log.flush()
        self._steps_here += 1
        if result.spans:
            self._tell_stages(result.spans)
        return result

    def _tell_stages(self, spans: tuple[ActionSpan, ...]) -> None:
        """Log an observed step: of each stage what its first rank did, and how long all its ranks
        waited for others, beside what was predicted.
        """
        decisions, prediction = self.run.plan.decisions, self.run.plan.prediction
        ranks, groups = stage_ranks(decisions), stage_groups(decisions)
        first = {ranks[stages[0]][0] for stages in groups}
        mine = (waiting_share(spans), spans if self.comm.rank in first else ())
        told = [mine] * decisions.num_ranks
        if len(told) > 1:
            dist.gather_object(mine, told if self.comm.rank == 0 else None)
        known = prediction.waits_s if prediction and prediction.source != SPEC else ()
        found = []
        for index, stages in enumerate(groups):
            own = ranks[stages[0]]
            waits = fmean(told[rank][0] for rank in own)
            predicted = known[index] / prediction.step_s if prediction and known else None
            found.append(StageTimes(self.steps_done, stages, waits, predicted, told[own[0]][1]))
        self.log.observed(found)

    def evaluate(self, batch: Mapping[str, Tensor], local: bool = False) -> Evaluation:
        """Loss and full outputs of the evaluation program (see the runtime's trainer).

        Raises `InputError` where the model could not be captured in evaluation mode.
        """
        if self.evaluation is None:
            why = [note for note in self.run.plan.notes if note.startswith(NO_EVALUATION)]
            raise InputError(f"the plan has {why[0] if why else NO_EVALUATION}")
        self._check_surroundings("evaluate")
        self.log.flush()
        return super().evaluate(batch, local)

    def take_over(self, model: nn.Module, loss: Loss | None) -> None:
        """Make `model`, whose weights this trainer has, refuse to be used in its place; watch what
        it and the loss function can reach.
        """
        self._model = original = hand_over(model, self.device)

        def compare() -> None:
            with original.restored():
                check_again(model, loss, self.run.plan)

        self._unchanged = Unchanged(original, loss, compare)

    def _check_surroundings(self, call: str) -> None:
        refuse_around_step(call)
        check_settings(self.run.plan.settings)
        if self._model is not None and self._unchanged is not None:
            self._model.untouched.check()
            self._unchanged.check()

    def save(
        self, folder: str | os.PathLike[str], *, asynchronous: bool = False
    ) -> checkpoint.Handle:
        """Write a checkpoint that loads under any other plan of the same model."""
        self.log.flush()
        named = plan_hash(self.run.plan)
        with self._seen("saving"):
            return checkpoint.save(self, folder, asynchronous=asynchronous, plan_hash=named)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint, whatever plan it was saved under."""
        with self._seen("loading"):
            checkpoint.load(self, folder)

    @contextmanager
    def _seen(self, doing: str) -> Iterator[None]:
        """Say what this rank does between steps."""
        self.run.watch(f"{doing}, after step {self.steps_done}")
        yield
        self.run.watch(f"between steps, after step {self.steps_done}")

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers, as the model's own `state_dict` names and orders them."""
        own = super().state_dict()
        return {name: own[name] for name in self.run.state_names if name in own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors; buffers that a `state_dict` leaves out keep their values."""
        own = super().state_dict()
        kept = {name: own[name] for name in own.keys() - set(self.run.state_names)}
        super().load_state_dict({**kept, **state})

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors under the user's names."""
        weights.export_safetensors(self, path, names=frozenset(self.run.state_names))


def parallelize(  # noqa: PLR0913 - one argument per choice of the run
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: optimizers.Maker,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    loss: Loss | None = None,
    weights_path: Path | None = None,
    log_path: Path | None = None,
    loggers: Sequence[str] = (),
    compile_backend: str | None = None,
    seed: int = 0,
    exact_random: bool = False,
) -> Trainer:
    """A trainer for this rank of `plan`; `parloom.parallelize` says what the arguments are."""
    graph = parse_graph(plan.graph)
    device, watch = device_of(plan), watcher()
    ranks = plan.decisions.num_ranks
    if ranks > 1 or "RANK" in os.environ:
        join_ranks(plan, device)
    # Rank 0 alone captures the model again: how long ranks may wait counts from the first step on.
    together = comm_of(Mesh((Axis("all", ranks, ((ranks, 1),)),)), _set_up_timeout(), watch)
    with agreed(together, device):
        refuse_handed_over(model)
        optimizer = optimizers.checked(plan, optimizer)
        _check_functions(scheduler, loss)
        check_names(loggers)
        check_tensors(model, plan, graph)
    training = training_program(plan, graph)
    evaluation = evaluation_program(plan, training.lowered)
    pipeline = training.pipeline
    comm = comm_of(pipeline.mesh, timeout(), watch)
    check_on_ranks(model, loss, plan, together, device)
    with agreed(together, device):
        source = values_of(model, graph, weights_path)
        names = [i.target for i in graph.inputs if i.kind in ("parameter", "buffer")]
        values = [] if weights_path else [(name, source(name)) for name in names]
        told = begun(loggers, _settings(plan, seed)) if comm.rank == 0 else ()
    check_same_values(together, values, device)
    del values
    say_of_draws(graph, comm, exact_random)
    samples = graph.sample_dims or sample_dims(factorize(graph))
    run = Run(
        plan,
        tuple(model.state_dict()),
        *_items(with_whole_batch(graph, plan.decisions.num_microbatches), samples),
        device,
        clip_norm=clip_norm,
        compile_backend=compile_backend,
        seed=seed,
        exact_random=exact_random,
        sample_dims=samples,
        log_path=log_path,
        loggers=told,
        watch=watch,
    )
    trainer = Trainer(
        pipeline,
        source,
        run,
        optimizer=optimizer,
        comm=comm,
        scheduler=scheduler,
        evaluation=evaluation.pipeline if evaluation else None,
    )
    trainer.take_over(model, loss)
    if last := os.environ.get(CHECKPOINT):
        trainer.load(last)
    return trainer


def _check_functions(scheduler: object, loss: object) -> None:
    """Raise `InputError` for an object where a function that makes or takes one belongs."""
    if scheduler is not None:
        example = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        optimizers.check_maker("scheduler", scheduler, example)
    if loss is not None:
        optimizers.check_maker("loss", loss, "lambda output, batch: ...")


def say_of_draws(graph: Graph, comm: Comm, exact_random: bool) -> None:
    """Tell the user, on rank 0, that random numbers depend on the plan, where they do."""
    if comm.rank or comm.mesh.num_ranks == 1 or exact_random:
        return
    if any(
        op_of(node).random
        or (node.op == "scaled_dot_product_attention" and node.arg(4, "dropout_p", 0.0))
        for function in (graph.main, *graph.functions)
        for node in function.body
        if isinstance(node, Node)
    ):
        print(DRAWS_DEPEND, file=sys.stderr, flush=True)


def values_of(model: nn.Module, graph: Graph, path: Path | None) -> Callable[[str], Tensor]:
    """Full tensors by name: the model's own, or those stored under `path` with its own buffers."""
    own = parameters_of(model, graph)
    stored = None if path is None else weights.import_safetensors(path)
    names = {i.target: (i.target, *i.aliases) for i in graph.of_kind("parameter")}

    def read(name: str) -> Tensor:
        if stored is not None:
            kept = next((n for n in names.get(name, (name,)) if n in stored.files), None)
            if kept is not None or name in names:
                return stored(kept or name)
        if own[name].is_meta:
            raise InputError(
                f"{name} has no values (meta device); build the model on the CPU, or give its"
                " weights as parallelize(..., weights_path=FOLDER)"
            )
        return own[name]

    return read


def _set_up_timeout() -> timedelta:
    """How long ranks wait for each other before they train."""
    return max(timedelta(seconds=DEFAULT_TIMEOUT_S), timeout() or timedelta())


def comm_of(mesh: Mesh, longest: timedelta | None, watch: Watch) -> Comm:
    """The ranks that were started, or this one alone."""
    if not dist.is_initialized():
        return SingleComm(mesh)
    return DistributedComm(mesh, timeout=longest, tell=watch.waiting)


def device_of(plan: Plan) -> torch.device:
    """This rank's device."""
    check_runs_here(plan)
    if load_cluster(plan.cluster).backend != "nccl":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"the plan is for {short_name(plan.cluster)}, and torch sees no GPU here; plan for"
            " 4xcpu to try it"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join_ranks(plan: Plan, device: torch.device) -> None:
    """Make the default process group unless the script did, and check its size."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            ranks = plan.decisions.num_ranks
            raise LaunchError(
                f"the plan has {ranks} ranks and this process was not started as one of them;"
                " use `parloom run PLAN -- script.py` or torchrun"
            )
        check_world_size(plan, int(os.environ["WORLD_SIZE"]))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_set_up_timeout())
    check_world_size(plan, dist.get_world_size())


def _items(graph: Graph, samples: Mapping[str, int]) -> tuple[int, str]:
    """What a step's rate counts: tokens where the first batch tensor holds integers, or samples."""
    batch = graph.of_kind("batch")
    if not batch or not batch[0].value.spec.shape:
        return 0, "samples"
    spec = batch[0].value.spec
    if len(spec.shape) == 2 and not spec.is_float:
        return spec.num_elements, "tok"
    return spec.shape[samples.get(batch[0].target, 0)], "samples"


def _record(run: Run, step: int, reading: Reading, memory_bytes: int, skipped: bool) -> StepRecord:
    numbers, step_s = reading.read()
    prediction = run.plan.prediction
    of = "tensors" if run.device.type == "cuda" else "process"
    return StepRecord(
        step,
        step_s=step_s,
        items=run.items,
        unit=run.unit,
        memory_bytes=memory_bytes,
        memory_of=of,
        predicted_s=prediction.step_s if prediction else None,
        calibrated=prediction is not None and prediction.source != SPEC,
        skipped=skipped,
        **numbers,
    )


def _no_kernel(error: NotImplementedError, device: torch.device) -> str:
    """Torch has no kernel of an operator for a dtype, as some in float16 on CPUs."""
    return (
        f"an operator of the program cannot run on {device.type} ({str(error).splitlines()[0]});"
        " plan with another --dtype, or for devices that have it"
    )


def _settings(plan: Plan, seed: int) -> Settings:
    """What tells a run from others, for the tools that keep them."""
    found: dict[str, str | int | float] = {
        "model": plan.source.name,
        "cluster": plan.cluster,
        "method": plan.method,
        "plan": plan_hash(plan),
        "ranks": plan.decisions.num_ranks,
        "microbatches": plan.decisions.num_microbatches,
        "optimizer": plan.optimizer.name,
        "seed": seed,
    }
    return found | ({"predicted_s": plan.prediction.step_s} if plan.prediction else {})


def _close(log: StepLog) -> None:
    with suppress(RuntimeError):  # a device that has failed has said so
        log.close()


def _memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: the device's allocator on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # noqa: PLC0415 - Windows plans and has no such module

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
