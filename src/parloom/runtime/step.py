"""One training step: the program's action list, run by one rank.

`F0 B0 F1 B1 .. REDUCE STEP GATHER`: forward and backward passes accumulate gradients over the
microbatches; REDUCE makes them whole; STEP unscales, clips and updates the owned chunks, or leaves
them alone where a scaled gradient overflowed; GATHER makes the weights whole again. The loss that a
forward pass returns is its share of the global loss, so gradients and losses are summed, never
averaged. Buffers are written once a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from parloom.errors import InputError, VerifyError
from parloom.runtime.comm import Comm, Work
from parloom.runtime.context import Context
from parloom.runtime.loss_scale import LossScale
from parloom.runtime.program import Program, Result
from parloom.runtime.same import check_same_batch
from parloom.runtime.samples import SampleDims, local_dims
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.runtime.sharding import global_shape, take
from parloom.runtime.store import Store

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The global loss before the update, and the gradient norm before clipping if one was asked.

    `loss_scale` is the scale that the step's gradients had, where the program scales its loss;
    where they overflowed, the step was `skipped`: no parameter was updated.
    """

    loss: Tensor
    grad_norm: Tensor | None = None
    loss_scale: float | None = None
    skipped: bool = False


class Batches:
    """Cuts a batch into this rank's microbatches.

    `own` are the axes along which ranks are given other samples: none for a global batch.
    """

    def __init__(
        self,
        program: Program,
        ctx: Context,
        batch: Batch,
        samples: SampleDims,
        own: tuple[str, ...] = (),
    ) -> None:
        _check_names(program, batch)
        self._ctx = ctx
        self._tensors = {
            spec.name: batch[spec.name].to(ctx.device, non_blocking=True) for spec in program.inputs
        }
        self._dims = {spec.name: local_dims(spec, samples, own) for spec in program.inputs}
        self._own = {spec.name: own if spec.name in samples else () for spec in program.inputs}
        for spec in program.inputs:
            given, dims = self._tensors[spec.name], self._dims[spec.name]
            shape = global_shape(dims, ctx.mesh)
            if tuple(given.shape) != shape or given.dtype != getattr(torch, spec.dtype):
                raise InputError(
                    f"input {spec.name!r} is {str(given.dtype).removeprefix('torch.')}"
                    f"{list(given.shape)}; the plan was made for {spec.dtype}{list(shape)}"
                    f"{_for(spec.name, own, samples)}{_way_on(given, shape, spec.dtype)}"
                )

    def check_same(self) -> None:
        """Raise `InputError` unless ranks that work on the same samples were given the same."""
        check_same_batch(self._ctx.comm, self._tensors, self._own, self._ctx.device)

    def microbatch(self, index: int) -> dict[str, Tensor]:
        """This rank's part of microbatch `index`."""
        mesh = self._ctx.mesh
        coordinates = mesh.coordinates(self._ctx.comm.rank, index)
        return {
            name: take(tensor, self._dims[name], mesh, coordinates)
            for name, tensor in self._tensors.items()
        }


def _check_names(program: Program, batch: Batch) -> None:
    """Raise `InputError` unless `batch` has a tensor for each of the program's inputs.

    Entries that nothing reads may be given in any form, or left out.
    """
    names = {spec.name for spec in program.inputs}
    if not isinstance(batch, Mapping):
        raise InputError(
            f"the batch is a {type(batch).__name__}; pass a dict of tensors by the names of the"
            f" model's arguments: {sorted(names)}"
        )
    if names != set(batch) - set(program.unread):
        raise InputError(
            f"the batch has {sorted(batch)}, the program takes {sorted(names)}; they must agree"
            f"{_leave_out(sorted(set(batch) - names - set(program.unread)))}"
        )
    for name in sorted(names):
        if not isinstance(batch[name], Tensor):
            raise InputError(f"input {name!r} is a {type(batch[name]).__name__}, not a tensor")


def _leave_out(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f": leave out what changes nothing (batch.pop({names[0]!r}), as of a mask without padding),"
        " or plan from a factory that returns a batch with it (file.py:factory)"
    )


def _way_on(given: Tensor, shape: tuple[int, ...], dtype: str) -> str:
    if tuple(given.shape) == shape:
        return f"; cast it: .to(torch.{dtype})"
    drop = "drop the last, smaller batch of an epoch (DataLoader(..., drop_last=True)), or "
    smaller = given.dim() == len(shape) and given.shape[0] < shape[0]
    return f"; {drop if smaller else ''}plan again (parloom plan --batch N, or the factory's batch)"


def _for(name: str, own: tuple[str, ...], samples: SampleDims) -> str:
    if not own:
        return ""
    if name in samples:
        return f" on each rank, with its own samples in dim {samples[name]} and all else whole"
    return " on each rank: all samples share it, so it is given whole"


class Losses:
    """The global loss from what the forward passes leave, some of it partial over mesh axes."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._totals: dict[tuple[str, ...], Tensor] = {}
        self._works: list[Work] = []

    def add(self, result: Result) -> None:
        """Add a microbatch's share."""
        loss = result.loss.detach()
        total = self._totals.get(result.partial)
        # A tensor of its own: the collective works in place.
        self._totals[result.partial] = loss.clone() if total is None else total + loss

    def launch(self) -> None:
        """Start to reduce, when all shares are in."""
        self._works = [
            self._comm.group(axes).all_reduce(total) for axes, total in self._totals.items()
        ]

    def total(self) -> Tensor:
        """The sum over microbatches and ranks."""
        for work in self._works:
            work.wait()
        return torch.stack(list(self._totals.values())).sum(0)


class Step:
    """Runs actions; one instance per step."""

    def __init__(
        self,
        program: Program,
        ctx: Context,
        store: Store,
        optimizer: Optimizer | None,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._program = program
        self._ctx = ctx
        self._store = store
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._loss_scale = loss_scale
        self._results: dict[int, Result] = {}
        self._hoisted: tuple[Tensor, ...] = ()
        self._losses = Losses(ctx.comm)
        self._grad_norm: Tensor | None = None
        self._skipped = False

    def train(self, batches: Batches) -> StepResult:
        """Run the whole action list."""
        scale = None if self._loss_scale is None else self._loss_scale.scale
        self._store.begin_step()
        self._hoisted = hoist(self._program, self._ctx, batches)
        backwards = [action for action in self._program.actions if action.startswith("B")]
        once: dict[str, Callable[[], None]] = {
            "REDUCE": self._store.finish_gradients,
            "STEP": self._update,
            "GATHER": self._store.gather_weights,
        }
        for action in self._program.actions:
            self._ctx.watch(f"in action {action}, step {self._ctx.step + 1}")
            if action in once:
                once[action]()
            elif action.startswith("F"):
                self._forward(int(action[1:]), batches)
            elif action.startswith("B"):
                self._backward(int(action[1:]), last=action == backwards[-1])
            else:
                raise VerifyError(f"unknown action {action!r} in {self._program.actions}")
        return StepResult(self._losses.total(), self._grad_norm, scale, self._skipped)

    def _forward(self, microbatch: int, batches: Batches) -> None:
        self._ctx.microbatch = microbatch
        self._store.begin_forward()
        inputs = batches.microbatch(microbatch)
        result = self._program.forward(self._ctx, inputs, self._hoisted)
        self._results[microbatch] = result
        self._losses.add(result)

    def _backward(self, microbatch: int, last: bool) -> None:
        self._ctx.microbatch = microbatch
        result = self._results.pop(microbatch)
        self._store.begin_backward(last)
        if last:
            self._losses.launch()
        scale = self._loss_scale
        torch.autograd.backward(result.loss if scale is None else scale.scaled(result.loss))
        self._store.end_backward()
        # Once a step, after all passes: every microbatch, and a block that is recomputed, reads
        # the buffers of the start of the step, as one pass over the global batch would. Where each
        # microbatch is computed by itself, after its own passes.
        if last or self._program.by_microbatch:
            for name, value in result.updates.items():
                # Memory of its own: the value may be a weight, a batch or another buffer.
                self._store.buffers[name] = value.detach().clone()

    def _update(self) -> None:
        kinds = [node.kind for node in self._program.nodes("STEP")]
        if "update" not in kinds:
            raise VerifyError(f"{self._program.name}: the step program never updates parameters")
        gradients = Gradients(list(self._store.helds.values()), self._ctx.comm, self._ctx.device)
        scale = self._loss_scale
        max_norm = self._clip_norm if "gradient_norm" in kinds else None
        if scale is not None:
            gradients.unscale(scale)
        if scale is not None or max_norm is not None:
            gradients.agree(with_norm=max_norm is not None)
        if scale is not None:
            self._skipped = gradients.overflowed
            scale.update(self._skipped)
        if max_norm is not None:
            self._grad_norm = gradients.norm
        if self._skipped:
            return
        if max_norm is not None:
            gradients.clip(max_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        self._store.publish()


def hoist(program: Program, ctx: Context, batches: Batches) -> tuple[Tensor, ...]:
    """The prologue's values, summed over microbatches."""
    if program.prologue is None:
        return ()
    totals: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for index in range(program.num_microbatches):
            ctx.microbatch = index
            values = program.prologue(ctx, batches.microbatch(index))
            totals = tuple(a + b for a, b in zip(totals, values, strict=True)) if index else values
    return totals


class Gradients:
    """The gradients of all owned chunks, and what all ranks agree on about them."""

    def __init__(self, helds: Sequence[ShardedParameter], comm: Comm, device: torch.device) -> None:
        self._helds = [held for held in helds if held.owned.grad is not None]
        self._comm = comm
        # The sum of squares, and the number of ranks that found a gradient that is not finite.
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def norm(self) -> Tensor:
        """The 2-norm of all gradients as one vector, each element counted once."""
        return self._sums[0].sqrt()

    @property
    def overflowed(self) -> bool:
        """Whether any rank has a gradient that is not finite; waits for the device."""
        return bool(self._sums[1].item())

    def unscale(self, scale: LossScale) -> None:
        """Divide by the scale, and note whether all gradients of this rank are finite."""
        self._sums[1] = scale.unscale(self._all(), self._sums.device)

    def agree(self, *, with_norm: bool) -> None:
        """One all-reduce over all ranks for both sums.

        A chunk that n ranks hold counts 1/n on each of them.
        """
        mesh = self._comm.mesh
        shares: dict[int, list[Tensor]] = {}
        for held, gradient in zip(self._helds, self._all(), strict=True):
            if with_norm and gradient.numel():
                copies = mesh.num_ranks // mesh.size(held.axes)
                shares.setdefault(copies, []).append(gradient)
        for copies, gradients in shares.items():
            norms = torch.stack([n.to(self._sums.dtype) for n in torch._foreach_norm(gradients)])
            self._sums[0] += norms.square().sum() / copies
        self._comm.group(mesh.space).all_reduce(self._sums).wait()

    def clip(self, max_norm: float) -> None:
        """Scale all gradients so that their norm is at most `max_norm`.

        The arithmetic of torch.nn.utils.clip_grad_norm_.
        """
        scale = torch.clamp(max_norm / (self.norm + 1e-6), max=1.0)
        for gradient in self._all():
            gradient.mul_(scale.to(gradient.dtype))

    def _all(self) -> list[Tensor]:
        return [held.owned.grad for held in self._helds if held.owned.grad is not None]
