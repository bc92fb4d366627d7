"""The step of a plan whatever its stages: each stage priced and played by itself, then all of them
as their schedule says.
"""

from collections.abc import Sequence
from math import prod

from parloom.cost.actions import Stage
from parloom.cost.kernels import Kernels
from parloom.cost.parameters import Parameters
from parloom.cost.pipeline import (
    Edge,
    Shared,
    StageActions,
    play_stage,
    send,
    simulate_pipeline,
)
from parloom.cost.simulate import Simulator, simulate
from parloom.cost.step import priced
from parloom.cost.timeline import Timeline
from parloom.errors import InputError
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.lower_stages import LoweredStages, group_lists
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.pcg import PCG, PValue
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.plan import Stage as PlannedStage


def simulate_stages(
    lowered: LoweredStages,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
) -> Timeline:
    """Play one step of all stages, which were lowered from `decisions`, on `cluster`."""
    if len(lowered.pcgs) == 1:
        return simulate(lowered.only, cluster, decisions, optimizer, kernels)
    player = Simulator()
    lists = tuple(own for _, own in group_lists(decisions))
    split = {action.stage for own in lists for action in own if action.kind == "W"}
    stages: list[StageActions] = []
    parameters: list[Parameters] = []
    for index, pcg in enumerate(lowered.pcgs):
        _check_aligned(index, decisions.stages[index], cluster)
        own = part_of(cluster, pcg.decisions.mesh.num_ranks)
        found = priced(pcg, own, pcg.decisions, optimizer, kernels)
        actions = Stage(pcg, own, found)
        stages.append(play_stage(f"stage {index}", actions, player, split=index in split))
        parameters.append(found.parameters)
    devices = [[d for part in stage.devices for d in part] for stage in decisions.stages]
    edges = _edges(lowered, devices, cluster)
    shared = [
        _shared(name, holders, parameters, devices, cluster)
        for name, holders in lowered.cut.shared.items()
    ]
    return simulate_pipeline(lists, stages, edges, shared=shared)


def aligned(devices: Sequence[int], cluster: Cluster) -> bool:
    """Whether as few nodes as can be have the devices: a stage is priced as such a part."""
    below = 1
    for level in cluster.levels:
        below *= level.size
        if len({device // below for device in devices}) > max(1, len(devices) // below):
            return False
    return True


def _check_aligned(index: int, stage: PlannedStage, cluster: Cluster) -> None:
    devices = [device for part in stage.devices for device in part]
    if not aligned(devices, cluster):
        raise InputError(
            f"stage {index} has devices {devices[0]} to {devices[-1]} of {cluster.name}, which lie"
            " over more nodes than so many need: that is not predicted yet; begin at a multiple"
        )


def _edges(
    lowered: LoweredStages, devices: Sequence[Sequence[int]], cluster: Cluster
) -> list[Edge]:
    """What crosses between stages: all values of two of them together."""
    found: dict[tuple[int, int], list[tuple[PValue, PValue]]] = {}
    for crossing in lowered.cut.crossings:
        name, sender = crossing.value.name, lowered.pcgs[crossing.source]
        sent = sender.leaving[sender.graph.leaving.index(name)]
        for target in crossing.targets:
            received = next(v for v in lowered.pcgs[target].main.inputs if v.name == name)
            found.setdefault((crossing.source, target), []).append((sent, received))
    edges = []
    for (source, target), values in sorted(found.items()):
        level = crossed(devices[source], devices[target], cluster)
        ends = lowered.pcgs[source], lowered.pcgs[target]
        forward = send(sum(_sent_bytes(*pair, *ends) for pair in values), level, cluster)
        back = [pair[::-1] for pair in values if pair[1].differentiable]
        size = sum(_sent_bytes(*pair, *ends[::-1]) for pair in back)
        edges.append(Edge(source, target, forward, send(size, level, cluster) if back else None))
    return edges


def _sent_bytes(sent: PValue, received: PValue, source: PCG, target: PCG) -> float:
    """What the busier end of a transfer sends, or receives, of a microbatch on each rank."""
    each = prod(local_shape(received.layout, received.spec.shape, target.mesh))
    ranks = target.decisions.mesh.num_ranks / source.decisions.mesh.num_ranks
    return each * max(1.0, ranks) * DTYPE_BYTES[sent.spec.dtype]


def _shared(
    name: str,
    holders: Sequence[int],
    parameters: Sequence[Parameters],
    devices: Sequence[Sequence[int]],
    cluster: Cluster,
) -> Shared:
    """Gradients go to the stage that owns a parameter, and weights come back: twice its bytes
    between two stages, as around a ring.
    """
    entries = [
        (held, p)
        for held in (parameters[stage] for stage in holders)
        for p in held.by_name.values()
        if p.input.target == name
    ]
    size = max(held.stored_of(p).get("gradients", 0) for held, p in entries)
    level = max(crossed(devices[holders[0]], devices[other], cluster) for other in holders[1:])
    ring = len(holders)
    return Shared(tuple(holders), send(2 * (ring - 1) / ring * size, level, cluster))


def crossed(one: Sequence[int], other: Sequence[int], cluster: Cluster) -> int:
    """The outermost level of links that joins devices of two stages."""
    found, below = 0, 1
    for level, each in enumerate(cluster.levels):
        parts = {devices[end] // below for devices in (one, other) for end in (0, -1)}
        if len(parts) > 1:
            found = level
        below *= each.size
    return found
