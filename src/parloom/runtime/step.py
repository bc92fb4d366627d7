"""One training step: this rank's action list.

`F0 B0 F1 B1 .. REDUCE STEP GATHER`: forward and backward passes accumulate gradients over the
microbatches; REDUCE makes them whole; STEP unscales, clips and updates the owned chunks, or leaves
them alone where a scaled gradient overflowed; GATHER makes the weights whole again. The loss that a
forward pass returns is its share of the global loss, so gradients and losses are summed, never
averaged. Buffers are written once a step. In a pipeline an action names its stage (`2F0`), and
`W0` makes the gradients of weights apart from the backward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from parloom.errors import SilentRankError, VerifyError
from parloom.runtime.batches import Batches
from parloom.runtime.comm import Comm
from parloom.runtime.loss_scale import LossScale
from parloom.runtime.part import Part
from parloom.runtime.passes import Losses, Passes
from parloom.runtime.program import Action, Pipeline
from parloom.runtime.same import told_by_some
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.runtime.shared import SharedParameters
from parloom.runtime.spans import ActionSpan, Spans, action_of, named, waiting_of
from parloom.runtime.transfers import Transfers


@dataclass(frozen=True, slots=True)
class StepResult:
    """The global loss before the update, and the gradient norm before clipping if one was asked.

    `loss_scale` is the scale that the step's gradients had, where the program scales its loss;
    where they overflowed, the step was `skipped`: no parameter was updated. `spans`: when this
    rank ran its actions, of a step that was `observed`.
    """

    loss: Tensor
    grad_norm: Tensor | None = None
    loss_scale: float | None = None
    skipped: bool = False
    spans: tuple[ActionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Stages:
    """What a rank has of a pipeline for all its steps; `comm` is the way to all ranks."""

    pipeline: Pipeline
    parts: tuple[Part, ...]
    actions: tuple[Action, ...]
    transfers: Transfers
    shared: SharedParameters
    comm: Comm
    owned: Mapping[str, tuple[ShardedParameter, Part]]

    @property
    def device(self) -> torch.device:
        return self.parts[0].ctx.device

    def total_loss(self, pipeline: Pipeline, losses: Mapping[int, Losses]) -> Tensor:
        """The loss of the stages that have one, on all ranks."""
        own = {stage: of_stage.total() for stage, of_stage in losses.items()}
        if len(pipeline.programs) == 1:
            return own[0]
        # Each rank of a stage has the loss of its replica: the first one tells all.
        first = [loss for stage, loss in own.items() if pipeline.ranks[stage][0] == self.comm.rank]
        mine = torch.stack(first).sum(0) if first else None
        return told_by_some(mine, (), pipeline.loss_dtype, self.comm, self.device)


class Step:
    """Runs actions; one instance per step."""

    def __init__(
        self,
        stages: Stages,
        optimizer: Optimizer | None,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._stages = stages
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._loss_scale = loss_scale
        self._grad_norm: Tensor | None = None
        self._skipped = False
        self._spans: Spans | None = None

    def train(self, batches: Mapping[int, Batches], observed: bool = False) -> StepResult:
        """Run the whole action list; `batches` are those of each stage. Where it is observed, all
        ranks begin together.
        """
        stages = self._stages
        if observed:
            self._together()
        self._spans = spans = Spans(stages.device) if observed else None
        scale = None if self._loss_scale is None else self._loss_scale.scale
        stages.transfers.begin_step(spans)
        passes: dict[int, Passes] = {}
        for part in stages.parts:
            own = [action for action in stages.actions if action.stage == part.stage]
            part.store.begin_step(splits=any(action.kind == "W" for action in own))
            prologue = spans if part.program.prologue is not None else None
            with action_of(prologue, f"{part.stage or ''}P"):
                passes[part.stage] = Passes(
                    part, batches[part.stage], stages.transfers, own, self._loss_scale
                )
        for action in stages.actions:
            with self._seen(action), named(str(action)), action_of(spans, str(action)):
                self._run(action, passes)
        losses = {stage: p.losses for stage, p in passes.items() if p.losses is not None}
        with self._seen(stages.actions[-1]):  # whoever waits here has done it, others may not
            stages.transfers.end_step()
            loss = stages.total_loss(stages.pipeline, losses)
        seen = spans.read() if spans else ()
        return StepResult(loss, self._grad_norm, scale, self._skipped, seen)

    @contextmanager
    def _seen(self, action: Action) -> Iterator[None]:
        """Say what this rank does, also where another one leaves it waiting."""
        stages = self._stages
        for part in stages.parts:
            part.ctx.watch(f"in action {action}, step {part.ctx.step + 1}")
        try:
            yield
        except SilentRankError as error:
            silent = error.ranks, error.waiting, error.timeout_s
            raise SilentRankError(*silent, str(action), stages.pipeline.named) from error

    def _together(self) -> None:
        """Begin when all ranks do."""
        stages = self._stages
        with self._seen(stages.actions[0]):
            here = torch.zeros(1, device=stages.device)
            stages.comm.group(stages.comm.mesh.space).all_reduce(here).wait()

    def _run(self, action: Action, passes: Mapping[int, Passes]) -> None:
        once: dict[str, Callable[[], None]] = {
            "REDUCE": self._reduce, "STEP": self._update, "GATHER": self._gather,
        }  # fmt: skip
        if action.kind in once:
            once[action.kind]()
            return
        own = passes[action.stage]
        run = {"F": own.forward, "B": own.backward, "W": own.weights}
        run[action.kind](action.microbatch)

    def _reduce(self) -> None:
        for part in self._stages.parts:
            part.store.finish_gradients()
        self._stages.shared.reduce(self._spans)

    def _gather(self) -> None:
        for part in self._stages.parts:
            part.store.gather_weights()
        self._stages.shared.publish(self._spans)

    def _update(self) -> None:
        stages = self._stages
        nodes = [node for part in stages.parts for node in part.program.nodes("STEP")]
        kinds = {node.kind for node in nodes}
        if "update" not in kinds:
            name = stages.parts[0].program.name
            raise VerifyError(f"{name}: the step program never updates parameters")
        gradients = Gradients(list(stages.owned.values()), stages.comm, stages.device)
        scale = self._loss_scale
        max_norm = self._clip_norm if "gradient_norm" in kinds else None
        if scale is not None:
            gradients.unscale(scale)
        if scale is not None or max_norm is not None:
            gradients.agree(with_norm=max_norm is not None, spans=self._spans)
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
        for part in stages.parts:
            part.store.publish()


class Gradients:
    """The gradients of all owned chunks, and what all ranks agree on about them."""

    def __init__(
        self, held: Sequence[tuple[ShardedParameter, Part]], comm: Comm, device: torch.device
    ) -> None:
        self._held = [(held, part) for held, part in held if held.owned.grad is not None]
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

    def agree(self, *, with_norm: bool, spans: Spans | None = None) -> None:
        """One all-reduce over all ranks for both sums; `spans` note the wait.

        A chunk that n ranks hold counts 1/n on each of them.
        """
        shares: dict[int, list[Tensor]] = {}
        for (held, part), gradient in zip(self._held, self._all(), strict=True):
            if with_norm and gradient.numel():
                mesh = part.comm.mesh
                copies = mesh.num_ranks // mesh.size(held.axes)
                shares.setdefault(copies, []).append(gradient)
        for copies, gradients in shares.items():
            norms = torch.stack([n.to(self._sums.dtype) for n in torch._foreach_norm(gradients)])
            self._sums[0] += norms.square().sum() / copies
        with waiting_of(spans):
            self._comm.group(self._comm.mesh.space).all_reduce(self._sums).wait()

    def clip(self, max_norm: float) -> None:
        """Scale all gradients so that their norm is at most `max_norm`.

        The arithmetic of torch.nn.utils.clip_grad_norm_.
        """
        scale = torch.clamp(max_norm / (self.norm + 1e-6), max=1.0)
        for gradient in self._all():
            gradient.mul_(scale.to(gradient.dtype))

    def _all(self) -> list[Tensor]:
        return [held.owned.grad for held, _ in self._held if held.owned.grad is not None]
