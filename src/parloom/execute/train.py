"""The trainer that `parallelize` returns: the runtime's, with logs, checkpoints and weights."""

import hashlib
import os
import resource
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parloom.capture import Loss, fingerprint, parameters_of
from parloom.cost.clusters import load_cluster
from parloom.errors import FingerprintError, InputError, LaunchError
from parloom.execute import checkpoint, optimizers, weights
from parloom.execute.launch import check_world_size
from parloom.execute.log import StepLog, StepRecord
from parloom.execute.program import evaluation_program, training_program
from parloom.execute.watch import watcher
from parloom.ir.graph import Graph
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_to_json
from parloom.ir.text import parse_graph
from parloom.runtime import DistributedComm, SingleComm, StepResult, check_same_values
from parloom.runtime import Trainer as RuntimeTrainer

NamedParameters = list[tuple[str, nn.Parameter]]
TIMEOUT = timedelta(minutes=10)


class Trainer(RuntimeTrainer):
    """`parloom.runtime.Trainer` that logs every step and reads and writes files.

    Made by `parallelize`; all ranks make the same calls in the same order.
    """

    plan: Plan
    plan_hash: str
    log: StepLog
    state_names: frozenset[str]
    _items: tuple[int, str]

    def step(self, batch: Mapping[str, Tensor], local: bool = False) -> StepResult:
        """Train on one batch (see the runtime's trainer) and log one line."""
        started = time.perf_counter()
        result = super().step(batch, local)
        loss = float(result.loss)  # waits for the device, so that the time is the step's
        prediction = self.plan.prediction
        self.log.write(
            StepRecord(
                self.steps_done,
                loss,
                time.perf_counter() - started,
                *self._items,
                memory_bytes=_memory_bytes(self.device),
                predicted_s=prediction.step_s if prediction else None,
            )
        )
        return result

    def save(
        self, folder: str | os.PathLike[str], *, asynchronous: bool = False
    ) -> checkpoint.Handle:
        """Write a checkpoint that loads under any other plan of the same model."""
        return checkpoint.save(self, folder, asynchronous=asynchronous, plan_hash=self.plan_hash)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint, whatever plan it was saved under."""
        checkpoint.load(self, folder)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers under the names of the model's own `state_dict`."""
        return {n: t for n, t in super().state_dict().items() if n in self.state_names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors; buffers that a `state_dict` leaves out keep their values."""
        own = super().state_dict()
        kept = {n: t for n, t in own.items() if n not in self.state_names}
        super().load_state_dict({**kept, **state})

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors under the user's names."""
        weights.export_safetensors(self, path, names=self.state_names)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: Callable[[NamedParameters], Optimizer],
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    loss: Loss | None = None,
    weights_path: Path | None = None,
    log_path: Path | None = None,
    seed: int = 0,
    exact_random: bool = False,
) -> Trainer:
    """A trainer for this rank of `plan`, with `model`'s current values.

    `weights_path` (a safetensors file, or a folder in Hugging Face's layout) replaces the values of
    all parameters, read one tensor at a time: `model` may then be on the meta device. Call it on
    every rank, under torchrun or `parloom run`. Raises `FingerprintError` where model or optimizer
    are not what the plan was made for, `LaunchError` where the ranks are not.
    """
    graph = parse_graph(plan.graph)
    check_model(model, plan, graph, loss)
    device = _device(plan)
    ranks = plan.decisions.mesh.num_ranks
    if ranks > 1 or "RANK" in os.environ:
        _join(plan, device)
    training = training_program(plan, graph)
    evaluation = evaluation_program(plan, training.pcg)
    program = training.program
    comm = (
        DistributedComm(program.mesh, program.groups)
        if dist.is_initialized()
        else SingleComm(program.mesh)
    )
    source = _values(model, graph, weights_path)
    if weights_path is None:
        names = (i.target for i in graph.inputs if i.kind in ("parameter", "buffer"))
        check_same_values(comm, ((name, source(name)) for name in names), device)
    trainer = Trainer(
        program,
        source,
        optimizer=optimizer,
        comm=comm,
        scheduler=scheduler,
        clip_norm=clip_norm,
        device=device,
        evaluation=evaluation.program if evaluation else None,
        seed=seed,
        exact_random=exact_random,
    )
    optimizers.check_same(plan.optimizer, trainer.optimizer)
    trainer._ctx.watch = watcher()
    trainer.plan = plan
    trainer.plan_hash = hashlib.sha256(plan_to_json(plan).encode()).hexdigest()[:16]
    trainer.state_names = frozenset(model.state_dict().keys())
    trainer.log = StepLog(comm.rank, log_path)
    trainer._items = _items(graph)
    return trainer


def _values(model: nn.Module, graph: Graph, path: Path | None) -> Callable[[str], Tensor]:
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


def check_model(model: nn.Module, plan: Plan, graph: Graph, loss: Loss | None = None) -> None:
    """Raise `FingerprintError` unless `model` is the one that was planned."""
    batch = {
        i.target: torch.empty(
            i.value.spec.shape, dtype=getattr(torch, i.value.spec.dtype), device="meta"
        )
        for i in graph.of_kind("batch")
    }
    found = fingerprint(model, batch, loss)
    if found == plan.fingerprint:
        return
    planned = {i.target: (i.value.spec.shape, i.trainable) for i in graph.of_kind("parameter")}
    own = dict(model.named_parameters())
    differ = [
        f"{name} ({_shape(own.get(name))}, planned {shape})"
        for name, (shape, trainable) in planned.items()
        if name not in own or own[name].shape != shape or own[name].requires_grad != trainable
    ]
    differ += [f"{name} (not in the plan)" for name in own if name not in planned]
    what = (
        f"{len(differ)} of {len(planned)} parameters differ: {'; '.join(differ[:3])}"
        if differ
        else "the source of its module classes or of the loss, its buffers or dtypes differ"
    )
    raise FingerprintError(
        f"the plan was made for model {plan.fingerprint}, this is {found}: {what}; plan again:"
        f" parloom plan {plan.source.spec} --cluster {plan.cluster}"
    )


def _shape(parameter: nn.Parameter | None) -> str:
    return "missing" if parameter is None else str(tuple(parameter.shape))


def _device(plan: Plan) -> torch.device:
    if load_cluster(plan.cluster).backend != "nccl":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"the plan is for {plan.cluster}, and torch sees no GPU here; plan for 4xcpu to try it"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(plan: Plan, device: torch.device) -> None:
    """Make the default process group unless the script did, and check its size."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            ranks = plan.decisions.mesh.num_ranks
            raise LaunchError(
                f"the plan has {ranks} ranks and this process was not started as one of them;"
                " use `parloom run PLAN -- script.py` or torchrun"
            )
        check_world_size(plan, int(os.environ["WORLD_SIZE"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    check_world_size(plan, dist.get_world_size())


def _items(graph: Graph) -> tuple[int, str]:
    """What a step's rate counts: tokens where the first batch tensor holds integers, or samples."""
    batch = graph.of_kind("batch")
    if not batch or not batch[0].value.spec.shape:
        return 0, "samples"
    spec = batch[0].value.spec
    if len(spec.shape) == 2 and not spec.is_float:
        return spec.num_elements, "tok"
    return spec.shape[0], "samples"


def _memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: the device's allocator on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
