"""One rank's part in a pipeline: the stages that it has, and how values travel between stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from parloom.runtime.adjacent import check_same
from parloom.runtime.comm import Comm
from parloom.runtime.compiled import CompiledBlocks
from parloom.runtime.context import Context
from parloom.runtime.program import Pipeline, Program
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.runtime.store import Source, Store, stage_groups, weight_groups


@dataclass(frozen=True, slots=True)
class Part:
    """A stage on this rank: its program, the way to the stage's other ranks, and its weights."""

    stage: int
    program: Program
    comm: Comm
    store: Store
    ctx: Context


def make_parts(
    pipeline: Pipeline,
    others: tuple[Pipeline, ...],
    source: Source,
    comm: Comm,
    device: torch.device,
    blocks: CompiledBlocks | None,
    *,
    seed: int,
    exact_random: bool,
    watch: Callable[[str], None],
) -> tuple[Part, ...]:
    """This rank's parts; every rank makes the groups of all stages, and of those of `others`, which
    compute with the same weights. Raises `VerifyError` where these would lie otherwise.
    """
    parts = []
    for stage, (program, ranks) in enumerate(zip(pipeline.programs, pipeline.ranks, strict=True)):
        own: Comm | None = comm
        if len(pipeline.programs) > 1:
            groups = stage_groups(program)
            for other in others:
                groups += stage_groups(other.programs[stage])
            own = comm.stage(program.mesh, ranks, groups, weight_groups(program))
        if own is None:
            continue
        for other in others:
            check_same(program, other.programs[stage])
        store = Store(program, source, own, device, blocks)
        ctx = Context(
            own,
            device,
            seed=seed,
            exact_random=exact_random,
            own_draws=program.by_microbatch,
            store=store,
            watch=watch,
        )
        parts.append(Part(stage, program, own, store, ctx))
    return tuple(parts)


def owned(
    parts: tuple[Part, ...], pipeline: Pipeline
) -> Mapping[str, tuple[ShardedParameter, Part]]:
    """What this rank holds of parameters, but for copies of what another stage owns."""
    return {
        name: (held, part)
        for part in parts
        for name, held in part.store.helds.items()
        if pipeline.owner(name, part.stage) == part.stage
    }
