"""One training step: the program's action list, run by one rank.

`F0 B0 F1 B1 .. REDUCE STEP GATHER`: forward and backward passes accumulate gradients over the
microbatches; REDUCE makes them whole; STEP clips and updates the owned chunks; GATHER makes the
weights whole again. The loss that a forward pass returns is its share of the global loss, so
gradients and losses are summed, never averaged. Buffers are written once a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from parloom.errors import InputError, VerifyError
from parloom.runtime.comm import Comm, Work
from parloom.runtime.context import Context
from parloom.runtime.held import Held
from parloom.runtime.program import Program, Result
from parloom.runtime.same import check_same_batch
from parloom.runtime.samples import SampleDims, local_dims
from parloom.runtime.sharding import global_shape, take
from parloom.runtime.store import Store

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The global loss before the update, and the gradient norm before clipping if one was asked."""

    loss: Tensor
    grad_norm: Tensor | None = None


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
    """Raise `InputError` unless `batch` has a tensor for each of the program's inputs."""
    names = {spec.name for spec in program.inputs}
    if not isinstance(batch, Mapping):
        raise InputError(
            f"the batch is a {type(batch).__name__}; pass a dict of tensors by the names of the"
            f" model's arguments: {sorted(names)}"
        )
    if names != set(batch):
        raise InputError(
            f"the batch has {sorted(batch)}, the program takes {sorted(names)}; they must agree"
        )
    for name in sorted(names):
        if not isinstance(batch[name], Tensor):
            raise InputError(f"input {name!r} is a {type(batch[name]).__name__}, not a tensor")


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
    ) -> None:
        self._program = program
        self._ctx = ctx
        self._store = store
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._results: dict[int, Result] = {}
        self._hoisted: tuple[Tensor, ...] = ()
        self._losses = Losses(ctx.comm)
        self._grad_norm: Tensor | None = None

    def train(self, batches: Batches) -> StepResult:
        """Run the whole action list."""
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
        return StepResult(self._losses.total(), self._grad_norm)

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
        torch.autograd.backward(result.loss)
        self._store.end_backward()
        # Once a step, after all passes: every microbatch, and a block that is recomputed, reads
        # the buffers of the start of the step, as one pass over the global batch would.
        if last:
            for name, value in result.updates.items():
                # Memory of its own: the value may be a weight, a batch or another buffer.
                self._store.buffers[name] = value.detach().clone()

    def _update(self) -> None:
        helds = list(self._store.helds.values())
        nodes = self._program.nodes("STEP")
        if "update" not in [node.kind for node in nodes]:
            raise VerifyError(f"{self._program.name}: the step program never updates parameters")
        for node in nodes:
            if node.kind == "gradient_norm" and self._clip_norm is not None:
                self._grad_norm = clip(helds, self._ctx.comm, self._clip_norm, self._ctx.device)
            elif node.kind == "update" and self._optimizer is not None:
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


def grad_norm(helds: Sequence[Held], comm: Comm, device: torch.device) -> Tensor:
    """The 2-norm of all gradients as one vector, each element counted once.

    A chunk that n ranks hold counts 1/n on each of them, so one all-reduce over all ranks does.
    """
    mesh = comm.mesh
    total = torch.zeros((), dtype=torch.float64, device=device)
    shares: dict[int, list[Tensor]] = {}
    for held in helds:
        if held.owned.grad is not None and held.owned.numel():
            copies = mesh.num_ranks // mesh.size(held.axes)
            shares.setdefault(copies, []).append(held.owned.grad)
    for copies, gradients in shares.items():
        norms = torch.stack([n.to(total.dtype) for n in torch._foreach_norm(gradients)])
        total = total + norms.square().sum() / copies
    comm.group(mesh.space).all_reduce(total).wait()
    return total.sqrt()


def clip(helds: Sequence[Held], comm: Comm, max_norm: float, device: torch.device) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before.

    The arithmetic of torch.nn.utils.clip_grad_norm_.
    """
    norm = grad_norm(helds, comm, device)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in [held.owned.grad for held in helds if held.owned.grad is not None]:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
