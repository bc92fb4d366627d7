"""The trainer: a program, its parameters and an optimizer, step after step.

Everything that it hands out is under the user's names and in the user's shapes, whatever the
layout: full tensors (`state_dict`), or the boxes of them that this rank holds (`shards`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parloom.errors import InputError, VerifyError
from parloom.runtime.comm import Comm
from parloom.runtime.compiled import CompiledBlocks
from parloom.runtime.context import Context
from parloom.runtime.loss_scale import LossScale
from parloom.runtime.optimizer import (
    load_optimizer_state,
    optimizer_state,
    state_tensors,
)
from parloom.runtime.program import Program, TensorSpec
from parloom.runtime.same_settings import check_same_settings, due, settings_in, settings_of
from parloom.runtime.samples import SampleDims, first_dims, num_samples, sample_axes
from parloom.runtime.sharding import Box, axes_of, boxes, put, untake
from parloom.runtime.step import Batch, Batches, Losses, Step, StepResult, hoist
from parloom.runtime.store import Source, Store
from parloom.runtime.whole_shapes import make_optimizer

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The global loss and the full output tensors of an evaluation."""

    loss: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of a tensor whose full shape is `global_shape`, box by box.

    `tensor` is the live memory: writing to it and then calling `Trainer.refresh` loads it. Of the
    ranks that hold the same boxes one is `primary`.
    """

    name: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor: Tensor
    primary: bool


class Trainer:
    """One rank's training run; every rank makes the same calls in the same order.

    `tensors` gives full parameters and buffers by the user's names, `optimizer` makes the optimizer
    from (name, parameter) pairs, where the parameters are this rank's shards (it is called with
    stand-ins of the whole shapes, too); `scheduler` makes the learning-rate scheduler, stepped once
    after each step. A schedule that counts epochs, or is told a loss, is not for `scheduler`: make
    it from `trainer.optimizer`, step it yourself, and save its state yourself.
    `sample_dims` says which dim of which inputs counts samples, dim 0 if not given. `watch` is told
    what this rank does next; `blocks` compiles the program's block functions. A program that
    unscales its gradients has a `loss_scale`, made with torch's defaults if not given.
    """

    def __init__(  # noqa: PLR0913 - one argument per choice of the run
        self,
        program: Program,
        tensors: Mapping[str, Tensor] | Source,
        *,
        optimizer: Callable[[NamedParameters], Optimizer],
        comm: Comm,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        clip_norm: float | None = None,
        device: torch.device | None = None,
        evaluation: Program | None = None,
        seed: int = 0,
        exact_random: bool = False,
        sample_dims: SampleDims | None = None,
        watch: Callable[[str], None] = lambda text: None,
        blocks: CompiledBlocks | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        source = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        self.program = program
        self.evaluation = evaluation
        self.comm = comm
        self.device = device or torch.device("cpu")
        self.store = Store(program, source, comm, self.device, blocks)
        self.optimizer, self._untouched = make_optimizer(optimizer, self.store.helds, comm)
        self.scheduler = None if scheduler is None else _stepped(scheduler(self.optimizer))
        self.clip_norm = clip_norm
        self.loss_scale = (loss_scale or LossScale()) if program.scales_loss else None
        _check_masters(program)
        self.samples_seen = 0
        self._samples = first_dims(program) if sample_dims is None else sample_dims
        self._compared = False
        self._since_loaded = 0
        self._ctx = Context(
            comm,
            self.device,
            seed=seed,
            exact_random=exact_random,
            own_draws=program.by_microbatch,
            store=self.store,
            watch=watch,
        )

    @property
    def steps_done(self) -> int:
        """Finished steps; also the step number that keys the next step's random masks."""
        return self._ctx.step

    @property
    def sampler_position(self) -> tuple[int, int]:
        """(num_replicas, rank) for a DistributedSampler that feeds `step(batch, local=True)`.

        Ranks that share samples get the same rank. Where the plan cuts the samples of the inputs
        along different axes, that is all of them: (1, 0), and a local batch is the global one.
        """
        mesh, position = self.comm.mesh, 0
        coordinates = mesh.coordinates(self.comm.rank)
        axes = sample_axes(self.program, self._samples)
        for axis in axes:
            position = position * mesh[axis].size + coordinates[axis]
        return mesh.size(axes), position

    def step(self, batch: Batch, local: bool = False) -> StepResult:
        """Train on one batch: the global one, the same on all ranks, or this rank's own samples.

        A local batch has the samples of this rank's `sampler_position`, whole in all other dims,
        and whole inputs where all samples share them.

        Raises `InputError` when the batch is not what the plan was made for, and in the first step
        when ranks that share samples were given different ones; in the first step, and after 1, 2,
        4, 8, ..., also when ranks have different settings (options of the optimizer, schedule,
        clip_norm, seed). Where gradients overflow, the
        update, and the scheduler's turn, are skipped on all ranks; raises `InputError` where no
        loss scale is left to try.
        """
        self._untouched.check(self.optimizer)
        own = self._own(local)
        batches = Batches(self.program, self._ctx, batch, self._samples, own)
        if not self._compared:
            batches.check_same()
            self._compared = True
        if due(self._since_loaded):
            check_same_settings(self.comm, self._settings(local), self.device)
        step = Step(
            self.program, self._ctx, self.store, self.optimizer, self.clip_norm, self.loss_scale
        )
        result = step.train(batches)
        if result.skipped:
            self._check_scale(result)
        elif self.scheduler is not None:
            self.scheduler.step()
        self._ctx.step += 1
        self._since_loaded += 1
        self._ctx.watch(f"between steps, after step {self._ctx.step}")
        self.samples_seen += num_samples(self.program, self._samples)
        return result

    def evaluate(self, batch: Batch, local: bool = False) -> Evaluation:
        """Loss and full outputs of the evaluation program, without gradients."""
        program = self.evaluation
        if program is None:
            raise InputError("the trainer was made without an evaluation program")
        own = self._own(local)
        if not set(own) <= set(sample_axes(program, self._samples)):
            raise InputError(
                f"the plan cuts samples over {', '.join(own)} in training and not in evaluation;"
                " pass the global batch"
            )
        batches = Batches(program, self._ctx, batch, self._samples, own)
        outputs: dict[str, Tensor] = {}
        losses = Losses(self.comm)
        with torch.no_grad():
            hoisted = hoist(program, self._ctx, batches)
            for index in range(program.num_microbatches):
                self._ctx.microbatch = index
                self.store.begin_forward()
                result = program.forward(self._ctx, batches.microbatch(index), hoisted)
                losses.add(result)
                for spec in program.outputs:
                    if spec.name in result.outputs:
                        self._collect(outputs, spec, result.outputs[spec.name], index)
                self.store.end_evaluation()
            losses.launch()
        return Evaluation(losses.total(), outputs)

    # Full tensors.

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) one after the other, without aliases; every rank must drain it."""
        for held in self.store.helds.values():
            spec = held.spec
            full = held.whole(self.comm)
            yield spec.name, full[tuple(slice(size) for size in spec.user_shape)]
        for buffer in self.program.buffers:
            yield buffer.name, untake(self.store.buffers[buffer.name], buffer.dims, self.comm)

    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers on every rank, aliases included."""
        state: dict[str, Tensor] = {}
        for name, full in self.full_tensors():
            state[name] = full.detach().clone()
            held = self.store.helds.get(name)
            for alias in held.spec.aliases if held is not None else ():
                state[alias] = state[name]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load full parameters and buffers; every rank passes the same.

        Raises `InputError` for a tensor that is missing, has another shape, or differs on ranks.
        """
        self.store.load(state.__getitem__)

    # Checkpoints.

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every parameter, optimizer state tensor and buffer.

        To load: `load_extra_state` first, which allocates the optimizer's states, then write to the
        shards, then `refresh`.
        """
        for held in self.store.helds.values():
            found = held.boxes(self.comm)
            primary = self._primary(held.axes)
            shape = held.spec.user_shape
            yield Shard(held.name, shape, found, held.owned.detach(), primary)
            for key, tensor in state_tensors(self.optimizer, held.owned).items():
                yield Shard(f"optimizer/{key}/{held.name}", shape, found, tensor, primary)
        for spec in self.program.buffers:
            coordinates = self.comm.mesh.coordinates(self.comm.rank)
            yield Shard(
                spec.name,
                spec.shape,
                boxes(spec.dims, self.comm.mesh, coordinates),
                self.store.buffers[spec.name],
                self._primary(axes_of(spec.dims)),
            )

    def refresh(self) -> None:
        """Bring everything that follows from the shards up to date, after they were written."""
        self.store.publish()
        self.store.gather_weights()

    def extra_state(self) -> dict[str, Any]:
        """All other state, as JSON values that are equal on every rank."""
        names = {id(held.owned): held.name for held in self.store.helds.values()}
        return {
            "step": self._ctx.step,
            "samples_seen": self.samples_seen,
            "seed": self._ctx.seed,
            "optimizer": optimizer_state(self.optimizer, names),
            "scheduler": None if self.scheduler is None else _plain(self.scheduler.state_dict()),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state(),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `extra_state` gave, under this or another plan."""
        self._since_loaded = 0
        self._ctx.step = state["step"]
        self._ctx.seed = state["seed"]
        self.samples_seen = state["samples_seen"]
        owned = {held.name: held.owned for held in self.store.helds.values()}
        load_optimizer_state(self.optimizer, owned, state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            current = self.scheduler.state_dict()
            self.scheduler.load_state_dict(_with_keys_of(current, state["scheduler"]))
        # Checkpoints of other dtypes, and older ones, have none.
        if self.loss_scale is not None and state.get("loss_scale") is not None:
            self.loss_scale.load(state["loss_scale"])

    def _own(self, local: bool) -> tuple[str, ...]:
        """The axes along which the ranks give samples of their own."""
        if not isinstance(local, bool):
            raise InputError(
                f"the argument after the batch, local, is a {type(local).__name__}, not True or"
                " False; pass one batch: a dict of tensors by the names of the model's arguments"
            )
        return sample_axes(self.program, self._samples) if local else ()

    def _settings(self, local: bool) -> dict[str, str]:
        """All that ranks must train alike with, by what an error calls it."""
        names = {id(held.owned): held.name for held in self.store.helds.values()}
        own = {
            "clip_norm": self.clip_norm,
            "seed": self._ctx.seed,
            "exact_random": self._ctx.exact_random,
            "the number of steps done": self._ctx.step,
            "local": local,
        }
        # Whatever has a `step` may be a scheduler.
        schedule: Mapping[str, Any] = getattr(self.scheduler, "state_dict", dict)()
        scale = {} if self.loss_scale is None else self.loss_scale.state()
        return {
            "the scheduler's class": type(self.scheduler).__name__,
            **settings_of(self.optimizer, names),
            **settings_in("", own),
            **settings_in("the scheduler's ", schedule),
            **settings_in("the loss scale's ", scale),
        }

    def _check_scale(self, result: StepResult) -> None:
        """Raise `InputError` where steps would be skipped forever."""
        scale = self.loss_scale
        if scale is None or not scale.exhausted:
            return
        bad = (
            held.name
            for held in self.store.helds.values()
            if held.owned.grad is not None and not held.owned.grad.isfinite().all()
        )
        name = next(bad, None)
        where = f", that of {name} on this rank," if name else ""
        raise InputError(
            f"step {self._ctx.step + 1}: the last {scale.num_skipped} steps were skipped, because"
            f" gradients{where} are infinite or NaN in float16 at every loss scale down to"
            f" {result.loss_scale:.3g} (the loss of this step is {result.loss.item():.4g}):"
            " nothing is trained any more. Numbers above 65504 overflow in float16: look for large"
            " weights, inputs and sums, or train in float32 or bfloat16 (--dtype fp32, --dtype"
            " bf16)"
        )

    def _primary(self, axes: tuple[str, ...]) -> bool:
        coordinates = self.comm.mesh.coordinates(self.comm.rank)
        return all(coordinates[axis] == 0 for axis in self.comm.mesh.space if axis not in axes)

    def _collect(
        self, outputs: dict[str, Tensor], spec: TensorSpec, local: Tensor, microbatch: int
    ) -> None:
        """Write every rank's shard of one microbatch's output into the full tensor."""
        mesh, axes = (
            self.comm.mesh,
            tuple(a for a in axes_of(spec.dims) if a in self.comm.mesh.space),
        )
        group = self.comm.group(axes)
        stacked = local.new_empty(group.size, *local.shape)
        group.all_gather(stacked, local.contiguous()).wait()
        if spec.name not in outputs:
            outputs[spec.name] = local.new_empty(spec.shape)
        for shard, rank in zip(stacked, mesh.group(axes, self.comm.rank), strict=True):
            put(outputs[spec.name], shard, spec.dims, mesh, mesh.coordinates(rank, microbatch))


def _stepped(scheduler: LRScheduler) -> LRScheduler:
    """The scheduler; raises `InputError` unless it can be stepped after each optimizer step.

    One that is told a loss, as ReduceLROnPlateau, is made for that of a validation.
    """
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise InputError(
            f"`scheduler` made a {type(scheduler).__name__}, which has no step(); make a"
            " torch.optim.lr_scheduler: scheduler=lambda optimizer: StepLR(optimizer, 10)"
        )
    told = [
        name
        for name, parameter in signature(step).parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    if told:
        name = type(scheduler).__name__
        raise InputError(
            f"{name}.step needs {', '.join(told)}, and `scheduler` is stepped after each optimizer"
            " step without: leave it out, make it after parallelize, as in schedule ="
            f" {name}(trainer.optimizer), and call schedule.step(...) yourself, with the loss of"
            " trainer.evaluate, for example"
        )
    return scheduler


def _check_masters(program: Program) -> None:
    """Raise `VerifyError` where float16 weights would be updated in float16: small steps vanish."""
    for spec in program.parameters:
        if (
            program.scales_loss
            and spec.trainable
            and (spec.master_dtype or spec.dtype) == "float16"
        ):
            raise VerifyError(f"{spec.name} is trained in float16 without a float32 master weight")


def _plain(value: Any) -> Any:
    """`value` with everything dropped that JSON cannot say."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _with_keys_of(current: Any, saved: Any) -> Any:
    """`saved` with the integer keys that JSON made strings (the milestones of a MultiStepLR)."""
    if isinstance(current, dict) and isinstance(saved, dict):
        numbered = any(isinstance(key, int) for key in current)
        restored = {
            (int(key) if numbered else key): _with_keys_of(current.get(key), value)
            for key, value in saved.items()
        }
        return Counter(restored) if isinstance(current, Counter) else restored
    lists = isinstance(current, list | tuple) and isinstance(saved, list)
    if lists and len(current) == len(saved):
        return [_with_keys_of(*pair) for pair in zip(current, saved, strict=True)]
    return saved


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return True
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
