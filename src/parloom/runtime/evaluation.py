"""The loss and the outputs of a model in evaluation mode: forward passes alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parloom.runtime.batches import Batches
from parloom.runtime.comm import Comm
from parloom.runtime.passes import Losses, hoist
from parloom.runtime.program import Action, Pipeline, TensorSpec
from parloom.runtime.same import told_by_one
from parloom.runtime.sharding import axes_of, put
from parloom.runtime.step import Stages
from parloom.runtime.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The global loss and the full output tensors of an evaluation."""

    loss: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)


def forward_actions(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """The forward passes of a rank: each microbatch through its stages in order."""
    return tuple(
        Action("F", stage, microbatch)
        for microbatch in range(pipeline.programs[0].num_microbatches)
        for stage in pipeline.stages_on(rank)
    )


def evaluate(pipeline: Pipeline, stages: Stages, batches: Mapping[int, Batches]) -> Evaluation:
    """Run the evaluation programs of all stages, with the weights of `stages`."""
    comm, device = stages.comm, stages.device
    actions = tuple(forward_actions(pipeline, rank) for rank in range(pipeline.num_ranks))
    transfers = Transfers(pipeline, actions, comm, device)
    transfers.begin_step()
    parts = {part.stage: part for part in stages.parts}
    outputs: dict[str, Tensor] = {}
    losses: dict[int, Losses] = {
        part.stage: Losses(part.comm)
        for part in stages.parts
        if pipeline.programs[part.stage].has_loss
    }
    with torch.no_grad():
        hoisted = {
            stage: hoist(pipeline.programs[stage], part.ctx, batches[stage])
            for stage, part in parts.items()
        }
        for action in actions[comm.rank]:
            part, program = parts[action.stage], pipeline.programs[action.stage]
            arrived = {
                c.spec.name: transfers.receive(part.stage, c.value, action.microbatch)
                for c in program.arriving
            }
            transfers.receive_ahead()
            part.ctx.microbatch = action.microbatch
            part.store.begin_forward()
            inputs = batches[part.stage].microbatch(action.microbatch) | arrived
            result = program.forward(part.ctx, inputs, hoisted[part.stage])
            leaving = {name: part.store.owned_memory(v) for name, v in result.leaving.items()}
            transfers.send(action, leaving)
            if part.stage in losses:
                losses[part.stage].add(result)
            for spec in program.outputs:
                if spec.name in result.outputs:
                    local = result.outputs[spec.name]
                    _collect(outputs, spec, local, part.comm, action.microbatch)
            part.store.end_evaluation()
        for of_stage in losses.values():
            of_stage.launch()
        transfers.end_step()
    loss = stages.total_loss(pipeline, losses)
    return Evaluation(loss, _told_to_all(pipeline, outputs, comm, device))


def _collect(
    outputs: dict[str, Tensor], spec: TensorSpec, local: Tensor, comm: Comm, microbatch: int
) -> None:
    """Write every rank's shard of one microbatch's output into the full tensor."""
    mesh = comm.mesh
    axes = tuple(a for a in axes_of(spec.dims) if a in mesh.space)
    group = comm.group(axes)
    stacked = local.new_empty(group.size, *local.shape)
    group.all_gather(stacked, local.contiguous()).wait()
    if spec.name not in outputs:
        outputs[spec.name] = local.new_empty(spec.shape)
    for shard, rank in zip(stacked, mesh.group(axes, comm.rank), strict=True):
        put(outputs[spec.name], shard, spec.dims, mesh, mesh.coordinates(rank, microbatch))


def _told_to_all(
    pipeline: Pipeline, outputs: dict[str, Tensor], comm: Comm, device: torch.device
) -> dict[str, Tensor]:
    """The outputs of all stages, on every rank."""
    if len(pipeline.programs) == 1:
        return outputs
    found = {}
    for stage, program in enumerate(pipeline.programs):
        for spec in program.outputs:
            mine = outputs.get(spec.name) if comm.rank == pipeline.ranks[stage][0] else None
            found[spec.name] = told_by_one(mine, spec.shape, spec.dtype, comm, device)
    return found
