"""The passes of one pipeline stage in a step: forward, backward, and gradients of weights apart.

What arrives from other stages is a leaf of the stage's own autograd graph; a backward pass begins
at the loss and at what has left for other stages, with the gradients that come back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parloom.runtime.batches import Batches
from parloom.runtime.comm import Comm
from parloom.runtime.context import Context
from parloom.runtime.loss_scale import LossScale
from parloom.runtime.memory import apart
from parloom.runtime.part import Part
from parloom.runtime.program import Action, Program, Result
from parloom.runtime.split_backward import SplitBackward
from parloom.runtime.transfers import Transfers
from parloom.runtime.work import Work


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


class Passes:
    """Runs the actions `own` of one stage; one instance per step."""

    def __init__(
        self,
        part: Part,
        batches: Batches,
        transfers: Transfers,
        own: Sequence[Action],
        loss_scale: LossScale | None,
    ) -> None:
        self._part, self._batches, self._transfers = part, batches, transfers
        self._loss_scale = loss_scale
        self._split = {action.microbatch for action in own if action.kind == "W"}
        backwards = [action for action in own if action.kind == "B"]
        makes_weights = [a for a in own if a.kind == ("W" if a.microbatch in self._split else "B")]
        self._last_backward, self._last = backwards[-1:], makes_weights[-1:]
        self._updates: Mapping[str, Tensor] = {}
        self._hoisted = hoist(part.program, part.ctx, batches)
        self._results: dict[int, Result] = {}
        self._left: dict[int, dict[str, GradientEdge]] = {}
        self._arrived: dict[int, dict[str, Tensor]] = {}
        self._halves: dict[int, SplitBackward] = {}
        self.losses = Losses(part.comm) if part.program.has_loss else None

    def forward(self, microbatch: int) -> None:
        """Compute the microbatch, and send what other stages need of it."""
        part, program = self._part, self._part.program
        action = Action("F", part.stage, microbatch)
        given = self._batches.microbatch(microbatch)
        result, arrived = forward_pass(part, program, action, given, self._hoisted, self._transfers)
        if self.losses is not None:
            self.losses.add(result)
        # What has left takes no memory here: its place in the graph is all that is kept.
        self._left[microbatch] = {
            c.value: get_gradient_edge(result.leaving[c.value]) for c in program.leaving if c.flows
        }
        self._results[microbatch] = replace(result, leaving={}, outputs={})
        self._arrived[microbatch] = arrived

    def backward(self, microbatch: int) -> None:
        """Compute the gradients, and send those that other stages wait for; where those of weights
        are made apart, these alone.
        """
        part, program = self._part, self._part.program
        result = self._results.pop(microbatch)
        roots, gradients = self._roots(result, microbatch)
        self._transfers.receive_ahead()
        part.ctx.microbatch = microbatch
        action = Action("B", part.stage, microbatch)
        last = self._last_backward == [action]
        arrived = self._arrived.pop(microbatch)
        flowing = [arrived[c.spec.name] for c in program.arriving if c.flows]
        if last and self.losses is not None:
            self.losses.launch()
        if last or program.by_microbatch:
            self._updates = result.updates
        if microbatch in self._split:
            self._halves[microbatch] = half = SplitBackward(roots, flowing)
            part.store.begin_inputs()
            found = half.inputs(gradients)
            part.store.end_inputs()
        else:
            part.store.begin_backward(last=self._last == [action])
            if roots:
                torch.autograd.backward(roots, gradients)
            part.store.end_backward()
            found = [tensor.grad for tensor in flowing]
            if flowing:
                found = apart(found, part.store.collected_gradients())
            self._write_buffers(action)
        names = [c.value for c in program.arriving if c.flows]
        gradients_of = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for name, tensor, gradient in zip(names, flowing, found, strict=True)
        }
        self._transfers.send(action, gradients_of)

    def weights(self, microbatch: int) -> None:
        """Compute the gradients of weights of a microbatch whose backward pass left them out."""
        part, action = self._part, Action("W", self._part.stage, microbatch)
        part.ctx.microbatch = microbatch
        part.store.begin_backward(last=self._last == [action])
        self._halves.pop(microbatch).weights()
        part.store.end_backward()
        self._write_buffers(action)

    def _write_buffers(self, action: Action) -> None:
        """Once a step, after all passes: every microbatch, and a block that is recomputed, reads
        the buffers of the start of the step, as one pass over the global batch would. Where each
        microbatch is computed by itself, after its own passes.
        """
        if self._last == [action] or self._part.program.by_microbatch:
            self._part.store.write_buffers(self._updates)

    def _roots(self, result: Result, microbatch: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward pass begins, and the gradients there."""
        part, scale = self._part, self._loss_scale
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if part.program.has_loss:
            loss = result.loss if scale is None else scale.scaled(result.loss)
            roots.append(get_gradient_edge(loss))
            gradients.append(torch.ones_like(loss))
        for value, edge in self._left.pop(microbatch).items():
            roots.append(edge)
            gradients.append(self._transfers.receive_gradient(part.stage, value, microbatch))
        return roots, gradients


def forward_pass(
    part: Part,
    program: Program,
    action: Action,
    given: Mapping[str, Tensor],
    hoisted: tuple[Tensor, ...],
    transfers: Transfers,
) -> tuple[Result, dict[str, Tensor]]:
    """Compute a microbatch in a stage, and send what other stages need of it; the results, and what
    has arrived for them. `given` is of the batch.
    """
    arrived = {
        crossing.spec.name: transfers.receive(part.stage, crossing.value, action.microbatch)
        .requires_grad_(crossing.flows)
        for crossing in program.arriving
    }  # fmt: skip
    transfers.receive_ahead()
    part.ctx.microbatch = action.microbatch
    part.store.begin_forward()
    result = program.forward(part.ctx, {**given, **arrived}, hoisted)
    leaving = {name: part.store.owned_memory(v) for name, v in result.leaving.items()}
    transfers.send(action, leaving)
    return result, arrived


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
