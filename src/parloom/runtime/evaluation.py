"""The loss and the outputs of a model in evaluation mode: forward passes alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parloom.runtime.batches import Batches
from parloom.runtime.caches import Caches
from parloom.runtime.comm import Comm
from parloom.runtime.passes import Losses, forward_pass, hoist
from parloom.runtime.program import Action, Pipeline, Result, TensorSpec, parsed
from parloom.runtime.same import told_by_some
from parloom.runtime.step import Stages
from parloom.runtime.transfers import Transfers
from parloom.runtime.whole import collect
from parloom.runtime.work import Work

Then = Callable[[Action, Result, Comm], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The global loss and the full output tensors of an evaluation."""

    loss: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)


def judging(pipeline: Pipeline) -> frozenset[int]:
    """The stages that evaluate: those of the first replica."""
    stages = range(len(pipeline.programs))
    return frozenset(stage for stage in stages if not pipeline.replica(stage))


def forward_actions(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """The forward passes of a rank: those of its action list where these are all; else each
    microbatch through its stages in order.
    """
    stages = [stage for stage in pipeline.stages_on(rank) if stage in judging(pipeline)]
    every = [
        Action("F", stage, microbatch)
        for microbatch in range(max(p.num_microbatches for p in pipeline.programs))
        for stage in stages
        if microbatch < pipeline.programs[stage].num_microbatches
    ]
    listed = [action for action in parsed(pipeline.actions[rank]) if action in set(every)]
    return tuple(listed if len(listed) == len(every) else every)


class Evaluator:
    """Runs the evaluation programs of all stages, with the weights of `stages`."""

    def __init__(self, pipeline: Pipeline, stages: Stages) -> None:
        self.pipeline, self._stages = pipeline, stages
        lists = tuple(forward_actions(pipeline, rank) for rank in range(pipeline.num_ranks))
        self._actions = lists[stages.comm.rank]
        self._transfers = Transfers(pipeline, lists, stages.comm, stages.device)
        self._judging = judging(pipeline)
        self._parts = {part.stage: part for part in stages.parts if part.stage in self._judging}

    def run(self, batches: Mapping[int, Batches]) -> Evaluation:
        """Loss and full outputs of a batch, on every rank; `batches` are those of each stage. A
        program without a loss has none: zero.
        """
        programs, outputs = self.pipeline.programs, dict[str, Tensor]()
        losses = {s: Losses(p.comm) for s, p in self._parts.items() if programs[s].has_loss}

        def collected(action: Action, result: Result, comm: Comm) -> None:
            if action.stage in losses:
                losses[action.stage].add(result)
            for spec in programs[action.stage].outputs:
                if spec.name in result.outputs:
                    local = result.outputs[spec.name]
                    _collect(outputs, spec, local, comm, action.microbatch)

        sent = self.forward(batches, collected)
        for of_stage in losses.values():
            of_stage.launch()
        for work in sent:
            work.wait()
        stages, loss = self._stages, torch.zeros(())
        if any(program.has_loss for program in programs):
            loss = stages.total_loss(self.pipeline, losses)
        told = _told_to_all(self.pipeline, self._judging, outputs, stages.comm, stages.device)
        return Evaluation(loss, told)

    def forward(
        self,
        batches: Mapping[int, Batches],
        then: Then,
        caches: Mapping[int, Caches] | None = None,
    ) -> list[Work]:
        """Make this rank's passes, whose results `then` is given one after the other; what it sent
        to other stages, some of it under way. Passes write to the `caches` of each stage.
        """
        programs = self.pipeline.programs
        self._transfers.begin_step()
        with torch.no_grad():
            hoisted = {s: hoist(programs[s], p.ctx, batches[s]) for s, p in self._parts.items()}
            for action in self._actions:
                part, program = self._parts[action.stage], programs[action.stage]
                given = batches[action.stage].microbatch(action.microbatch)
                if caches is not None:
                    given |= caches[action.stage].of(action.microbatch)
                result, _ = forward_pass(
                    part, program, action, given, hoisted[action.stage], self._transfers
                )
                then(action, result, part.comm)
                part.store.end_evaluation()
        return self._transfers.sent()


def _collect(
    outputs: dict[str, Tensor], spec: TensorSpec, local: Tensor, comm: Comm, microbatch: int
) -> None:
    """Write every rank's shard of one microbatch's output into the full tensor."""
    if spec.name not in outputs:
        outputs[spec.name] = local.new_empty(spec.shape)
    collect(outputs[spec.name], local, spec.dims, comm, microbatch)


def _told_to_all(
    pipeline: Pipeline,
    judging: frozenset[int],
    outputs: dict[str, Tensor],
    comm: Comm,
    device: torch.device,
) -> dict[str, Tensor]:
    """The outputs of all stages that evaluate, on every rank."""
    if len(pipeline.programs) == 1:
        return outputs
    found = {}
    for stage in sorted(judging):
        for spec in pipeline.programs[stage].outputs:
            mine = outputs.get(spec.name) if comm.rank == pipeline.ranks[stage][0] else None
            found[spec.name] = told_by_some(mine, spec.shape, spec.dtype, comm, device)
    return found
