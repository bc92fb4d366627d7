"""The trainer: a program, its parameters and an optimizer, step after step.

Everything that it hands out is under the user's names and in the user's shapes, whatever the
layout: full tensors (`state_dict`), or the boxes of them that this rank holds (`shards`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from parloom.errors import InputError
from parloom.runtime.comm import Comm
from parloom.runtime.compiled import CompiledBlocks
from parloom.runtime.context import Context
from parloom.runtime.optimizer import (
    check_elementwise,
    load_optimizer_state,
    optimizer_state,
    state_tensors,
)
from parloom.runtime.program import Program, TensorSpec
from parloom.runtime.samples import SampleDims, first_dims, num_samples, sample_axes
from parloom.runtime.sharding import Box, axes_of, boxes, put, untake
from parloom.runtime.step import Batch, Batches, Losses, Step, StepResult, hoist
from parloom.runtime.store import Source, Store

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
    from (name, parameter) pairs, where the parameters are this rank's shards; `scheduler` makes the
    learning-rate scheduler, stepped once after each step. A schedule that counts epochs is not for
    `scheduler`: make it from `trainer.optimizer`, step it yourself, and save its state yourself.
    `sample_dims` says which dim of which inputs counts samples, dim 0 if not given. `watch` is told
    what this rank does next; `blocks` compiles the program's block functions.
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
    ) -> None:
        source = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        self.program = program
        self.evaluation = evaluation
        self.comm = comm
        self.device = device or torch.device("cpu")
        self.store = Store(program, source, comm, self.device, blocks)
        self.optimizer = optimizer([(h.name, h.owned) for h in self.store.helds.values()])
        check_elementwise(self.optimizer)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.clip_norm = clip_norm
        self.samples_seen = 0
        self._samples = first_dims(program) if sample_dims is None else sample_dims
        self._compared = False
        self._ctx = Context(
            comm,
            self.device,
            seed=seed,
            exact_random=exact_random,
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
        when ranks that share samples were given different ones.
        """
        own = sample_axes(self.program, self._samples) if local else ()
        batches = Batches(self.program, self._ctx, batch, self._samples, own)
        if not self._compared:
            batches.check_same()
            self._compared = True
        step = Step(self.program, self._ctx, self.store, self.optimizer, self.clip_norm)
        result = step.train(batches)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(result.loss.item())
        elif self.scheduler is not None:
            self.scheduler.step()
        self._ctx.step += 1
        self._ctx.watch(f"between steps, after step {self._ctx.step}")
        self.samples_seen += num_samples(self.program, self._samples)
        return result

    def evaluate(self, batch: Batch, local: bool = False) -> Evaluation:
        """Loss and full outputs of the evaluation program, without gradients."""
        program = self.evaluation
        if program is None:
            raise InputError("the trainer was made without an evaluation program")
        own = sample_axes(self.program, self._samples) if local else ()
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

        Raises `InputError` for a tensor that is missing or has another shape.
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
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `extra_state` gave, under this or another plan."""
        self._ctx.step = state["step"]
        self._ctx.seed = state["seed"]
        self.samples_seen = state["samples_seen"]
        owned = {held.name: held.owned for held in self.store.helds.values()}
        load_optimizer_state(self.optimizer, owned, state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            current = self.scheduler.state_dict()
            self.scheduler.load_state_dict(_with_keys_of(current, state["scheduler"]))

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
