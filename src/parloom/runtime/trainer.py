"""The trainer: a program, its parameters and an optimizer, step after step.

Everything that it hands out is under the user's names and in the user's shapes, whatever the
layout: full tensors (`state_dict`), or the boxes of them that this rank holds (`shards`).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parloom.errors import InputError, LaunchError, VerifyError
from parloom.runtime.batches import Batch, BatchReader
from parloom.runtime.comm import Comm
from parloom.runtime.compiled import CompiledBlocks
from parloom.runtime.evaluation import Evaluation, Evaluator
from parloom.runtime.loss_scale import LossScale
from parloom.runtime.optimizer import (
    joined_states,
    load_optimizer_state,
    optimizer_state,
    state_tensors,
)
from parloom.runtime.part import Part, make_parts, owned
from parloom.runtime.program import Pipeline, Program, TensorSpec, one_stage, parsed
from parloom.runtime.same import check_same_values, told_by_all, told_by_some
from parloom.runtime.same_settings import check_same_settings, due, settings_in, settings_of
from parloom.runtime.samples import SampleDims, first_dims, local_axes, num_samples, position
from parloom.runtime.sharding import Box, axes_of, boxes, untake
from parloom.runtime.shared import SharedParameters
from parloom.runtime.step import Stages, Step, StepResult
from parloom.runtime.store import Source, given
from parloom.runtime.transfers import Transfers
from parloom.runtime.whole_shapes import make_optimizer

NamedParameters = list[tuple[str, nn.Parameter]]


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
        program: Program | Pipeline,
        tensors: Mapping[str, Tensor] | Source,
        *,
        optimizer: Callable[[NamedParameters], Optimizer],
        comm: Comm,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        clip_norm: float | None = None,
        device: torch.device | None = None,
        evaluation: Program | Pipeline | None = None,
        seed: int = 0,
        exact_random: bool = False,
        sample_dims: SampleDims | None = None,
        watch: Callable[[str], None] = lambda text: None,
        blocks: CompiledBlocks | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        source = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        self.pipeline = one_stage(program) if isinstance(program, Program) else program
        judged = one_stage(evaluation) if isinstance(evaluation, Program) else evaluation
        self.comm = comm
        self.device = device or torch.device("cpu")
        self.parts = make_parts(
            self.pipeline,
            () if judged is None else (judged,),
            source,
            comm,
            self.device,
            blocks,
            seed=seed,
            exact_random=exact_random,
            watch=watch,
        )
        self.owned = owned(self.parts, self.pipeline)
        self._stages = Stages(
            self.pipeline,
            self.parts,
            parsed(self.pipeline.actions[comm.rank]),
            Transfers(self.pipeline, tuple(map(parsed, self.pipeline.actions)), comm, self.device),
            SharedParameters(self.pipeline, self.parts, comm, self.device),
            comm,
            self.owned,
        )
        self.evaluation = None if judged is None else Evaluator(judged, self._stages)
        specs = [spec for program in self.pipeline.programs for spec in program.parameters]
        self.optimizer, self._untouched = make_optimizer(optimizer, self.owned, specs)
        self._stages.shared.publish(frozen=True)  # it may have written to weights
        self.scheduler = None if scheduler is None else _stepped(scheduler(self.optimizer))
        self.clip_norm = clip_norm
        scales = any(p.scales_loss for p in self.pipeline.programs)
        self.loss_scale = (loss_scale or LossScale()) if scales else None
        for of_stage in self.pipeline.programs:
            _check_masters(of_stage)
        self.samples_seen = 0
        self._samples = first_dims(self.pipeline) if sample_dims is None else sample_dims
        self._axes = local_axes(self.pipeline, self._samples)
        self._reader = self._reader_of(self.pipeline)
        self._evaluation_reader = None if judged is None else self._reader_of(judged)
        self._compared = False
        self._since_loaded = 0
        self._steps_done, self._seed = 0, seed
        self._exact_random, self._watch = exact_random, watch

    @property
    def steps_done(self) -> int:
        """Finished steps; also the step number that keys the next step's random masks."""
        return self._steps_done

    @property
    def sampler_position(self) -> tuple[int, int]:
        """(num_replicas, rank) for a DistributedSampler that feeds `step(batch, local=True)`.

        Ranks that share samples get the same rank. Where the plan cuts the samples of the inputs
        along different axes, that is all of them: (1, 0), and a local batch is the global one.
        """
        part = next((p for p in self.parts if _is_sampled(p.program, self._samples)), self.parts[0])
        own = self._axes[part.stage]
        return part.comm.mesh.size(own), position(part.comm.mesh, part.comm.rank, own)

    def step(self, batch: Batch, local: bool = False, *, observed: bool = False) -> StepResult:
        """Train on one batch: the global one, the same on all ranks, or this rank's own samples.

        A local batch has the samples of this rank's `sampler_position`, whole in all other dims,
        and whole inputs where all samples share them. A rank of a pipeline may be given only what
        its own stages read, from the first batch on: all then agree before each step, which on a
        GPU waits for the steps before. Where a step is observed, on all ranks alike, these begin
        it together, and its result says when each action ran.

        Raises `InputError` when the batch is not what the plan was made for, and in the first step
        when ranks that share samples were given different ones; in the first step, and after 1, 2,
        4, 8, ..., also when ranks have different settings (options of the optimizer, schedule,
        clip_norm, seed). Where gradients overflow, the
        update, and the scheduler's turn, are skipped on all ranks; raises `InputError` where no
        loss scale is left to try.
        """
        self._untouched.check(self.optimizer)
        batches = self._reader.read(batch, local)
        if not self._compared:
            self._reader.check_same(batches, local)
            self._compared = True
        if due(self._since_loaded):
            self._check_settings(local)
        step = Step(self._stages, self.optimizer, self.clip_norm, self.loss_scale)
        result = step.train(batches, observed)
        if result.skipped:
            self._check_scale(result)
        elif self.scheduler is not None:
            self.scheduler.step()
        self._set_steps_done(self._steps_done + 1)
        self._since_loaded += 1
        self._watch(f"between steps, after step {self._steps_done}")
        self.samples_seen += num_samples(self.pipeline, self._samples)
        return result

    def evaluate(self, batch: Batch, local: bool = False) -> Evaluation:
        """Loss and full outputs of the evaluation program, without gradients."""
        if self.evaluation is None or self._evaluation_reader is None:
            raise InputError("the trainer was made without an evaluation program")
        return self.evaluation.run(self._evaluation_reader.read(batch, local))

    # Full tensors.

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) one after the other, without aliases; every rank must drain it."""
        for stage, program in enumerate(self.pipeline.programs):
            part = next((p for p in self.parts if p.stage == stage), None)
            for spec in program.parameters:
                if self.pipeline.owner(spec.name, stage) == stage:
                    whole = None
                    if part is not None:
                        whole = part.store.helds[spec.name].whole(part.comm)
                    full = self._told(stage, whole, spec.shape, spec.dtype)
                    yield spec.name, full[tuple(slice(size) for size in spec.user_shape)]
            for buffer in program.buffers:
                if buffer.name in self._buffers_before(stage):
                    continue
                kept = None
                if part is not None:
                    kept = untake(part.store.buffers[buffer.name], buffer.dims, part.comm)
                yield buffer.name, self._told(stage, kept, buffer.shape, buffer.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers on every rank, aliases included."""
        state: dict[str, Tensor] = {}
        aliases = {s.name: s.aliases for p in self.pipeline.programs for s in p.parameters}
        for name, full in self.full_tensors():
            state[name] = full.detach().clone()
            for alias in aliases.get(name, ()):
                state[alias] = state[name]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load full parameters and buffers; every rank passes the same.

        Raises `InputError` for a tensor that is missing, has another shape, or differs on ranks.
        """
        source, programs = state.__getitem__, self.pipeline.programs
        everything = chain.from_iterable(given(program, source) for program in programs)
        try:
            check_same_values(self.comm, everything, self.device)
        except LaunchError as error:
            raise InputError(f"load_state_dict: {error}") from None
        for part in self.parts:
            part.store.load(source)

    # Checkpoints.

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every parameter, optimizer state tensor and buffer.

        To load: `load_extra_state` first, which allocates the optimizer's states, then write to the
        shards, then `refresh`.
        """
        for held, part in self.owned.values():
            found = held.boxes(part.comm)
            primary = _is_primary(part.comm, held.axes)
            shape = held.spec.user_shape
            yield Shard(held.name, shape, found, held.owned.detach(), primary)
            for key, tensor in state_tensors(self.optimizer, held.owned).items():
                yield Shard(f"optimizer/{key}/{held.name}", shape, found, tensor, primary)
        for part, spec in self._own_buffers():
            coordinates = part.comm.mesh.coordinates(part.comm.rank)
            first = spec.name not in self._buffers_before(part.stage)
            yield Shard(
                spec.name,
                spec.shape,
                boxes(spec.dims, part.comm.mesh, coordinates),
                part.store.buffers[spec.name],
                first and _is_primary(part.comm, axes_of(spec.dims)),
            )

    def _own_buffers(self) -> Iterator[tuple[Part, TensorSpec]]:
        """The buffers of this rank, each in the first of its stages that reads it."""
        found: dict[str, tuple[Part, TensorSpec]] = {}
        for part in self.parts:
            for spec in part.program.buffers:
                found.setdefault(spec.name, (part, spec))
        yield from found.values()

    def refresh(self) -> None:
        """Bring everything that follows from the shards up to date, after they were written."""
        for part in self.parts:
            part.store.publish()
            part.store.gather_weights()
        self._stages.shared.publish(frozen=True)
        for part, spec in self._own_buffers():
            others = [p for p in self.parts if p is not part and spec.name in p.store.buffers]
            if others:
                whole = untake(part.store.buffers[spec.name], spec.dims, part.comm)
                for other in others:
                    other.store.load_buffer(spec.name, whole)

    def extra_state(self) -> dict[str, Any]:
        """All other state, as JSON values that are equal on every rank; every rank asks."""
        names = {id(held.owned): held.name for held, _ in self.owned.values()}
        return {
            "step": self._steps_done,
            "samples_seen": self.samples_seen,
            "seed": self._seed,
            "optimizer": self._joined(optimizer_state(self.optimizer, names)),
            "scheduler": None if self.scheduler is None else _plain(self.scheduler.state_dict()),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state(),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `extra_state` gave, under this or another plan."""
        self._since_loaded = 0
        self._seed = state["seed"]
        self._set_steps_done(state["step"])
        self.samples_seen = state["samples_seen"]
        mine = {held.name: held.owned for held, _ in self.owned.values()}
        names = [spec.name for p in self.pipeline.programs for spec in p.parameters]
        groups = self._untouched.groups
        load_optimizer_state(self.optimizer, mine, state["optimizer"], groups, names)
        if self.scheduler is not None and state["scheduler"] is not None:
            current = self.scheduler.state_dict()
            self.scheduler.load_state_dict(_with_keys_of(current, state["scheduler"]))
        # Checkpoints of other dtypes, and older ones, have none.
        if self.loss_scale is not None and state.get("loss_scale") is not None:
            self.loss_scale.load(state["loss_scale"])

    def _reader_of(self, pipeline: Pipeline) -> BatchReader:
        """Reads batches for the programs of training or evaluation."""
        return BatchReader(
            pipeline,
            self.parts,
            self._samples,
            self._axes,
            self.sampler_position,
            self.comm,
            self.device,
        )

    def _set_steps_done(self, steps: int) -> None:
        self._steps_done = steps
        for part in self.parts:
            part.ctx.step, part.ctx.seed = steps, self._seed

    def _buffers_before(self, stage: int) -> frozenset[str]:
        """The buffers that earlier stages have, too."""
        before = self.pipeline.programs[:stage]
        return frozenset(spec.name for program in before for spec in program.buffers)

    def _joined(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state of all stages; every rank asks."""
        if len(self.pipeline.programs) == 1:
            return mine
        told = told_by_all(self.comm, json.dumps(mine), self.device)
        return joined_states([json.loads(text) for text in told])

    def _told(self, stage: int, full: Tensor | None, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A whole tensor of a stage, on all ranks."""
        if len(self.pipeline.programs) == 1:
            assert full is not None
            return full
        mine = full if self.comm.rank == self.pipeline.ranks[stage][0] else None
        return told_by_some(mine, shape, dtype, self.comm, self.device)

    def _check_settings(self, local: bool) -> None:
        """Raise `InputError` where ranks differ in what they must train alike with."""
        own = {
            "clip_norm": self.clip_norm,
            "seed": self._seed,
            "exact_random": self._exact_random,
            "the number of steps done": self._steps_done,
            "local": local,
        }
        # Whatever has a `step` may be a scheduler.
        schedule: dict[str, Any] = getattr(self.scheduler, "state_dict", dict)()
        scale = {} if self.loss_scale is None else self.loss_scale.state()
        settings = {
            "the scheduler's class": type(self.scheduler).__name__,
            "the optimizer's class": type(self.optimizer).__name__,
            **settings_in("", own),
            **settings_in("the scheduler's ", schedule),
            **settings_in("the loss scale's ", scale),
        }
        check_same_settings(self.comm, settings, self.device)
        for part in self.parts:
            names = {id(held.owned): n for n, (held, p) in self.owned.items() if p is part}
            check_same_settings(part.comm, settings_of(self.optimizer, names), self.device)

    def _check_scale(self, result: StepResult) -> None:
        """Raise `InputError` where steps would be skipped forever."""
        scale = self.loss_scale
        if scale is None or not scale.exhausted:
            return
        bad = (
            held.name
            for held, _ in self.owned.values()
            if held.owned.grad is not None and not held.owned.grad.isfinite().all()
        )
        name = next(bad, None)
        where = f", that of {name} on this rank," if name else ""
        raise InputError(
            f"step {self._steps_done + 1}: the last {scale.num_skipped} steps were skipped, because"
            f" gradients{where} are infinite or NaN in float16 at every loss scale down to"
            f" {result.loss_scale:.3g} (the loss of this step is {result.loss.item():.4g}):"
            " nothing is trained any more. Numbers above 65504 overflow in float16: look for large"
            " weights, inputs and sums, or train in float32 or bfloat16 (--dtype fp32, --dtype"
            " bf16)"
        )


def _is_sampled(program: Program, samples: SampleDims) -> bool:
    """Whether some input of a program has a dim of samples."""
    return any(spec.name in samples for spec in program.inputs)


def _is_primary(comm: Comm, axes: tuple[str, ...]) -> bool:
    """Whether a rank is the first of those that hold the same of a tensor that `axes` shard."""
    coordinates = comm.mesh.coordinates(comm.rank)
    return all(coordinates[axis] == 0 for axis in comm.mesh.space if axis not in axes)


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
