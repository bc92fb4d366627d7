"""The step of a plan whatever its stages: each stage priced and played by itself, then all of them
as their schedule says.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod

from parloom.cost.actions import Stage
from parloom.cost.kernels import Kernels
from parloom.cost.pipeline import (
    Edge,
    Shared,
    StageActions,
    play_stage,
    send,
    simulate_pipeline,
)
from parloom.cost.simulate import Simulator, simulate
from parloom.cost.step import Priced, priced
from parloom.cost.timeline import Timeline
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.lower_stages import LoweredStages, group_lists
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG, PValue
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.plan import Stage as PlannedStage
from parloom.ir.regular_parts import devices_of, joined, own_part
from parloom.ir.schedules import Lists

JoinOf = Callable[[int, int], tuple[Cluster, int]]
"""The level of links between two stages, and a cluster that has it."""


def simulate_stages(
    lowered: LoweredStages,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
) -> Timeline:
    """Play one step of all stages, which were lowered from `decisions`, on `cluster`."""
    if len(lowered.pcgs) == 1:
        own = own_part(cluster, decisions.stages[0]) if cluster.parts else cluster
        return simulate(lowered.only, own, decisions, optimizer, kernels)
    stages = PricedStages(lowered, decisions.stages, cluster, optimizer, kernels)
    return stages.play(tuple(own for _, own in group_lists(decisions)))


class PricedStages:
    """Stages that are priced once, to be played under any action lists; equal programs (one object
    in `lowered`) on equal devices are played once, too. `join_of` says over which level of links
    two stages send, where that is not the one between their devices.
    """

    def __init__(
        self,
        lowered: LoweredStages,
        planned: Sequence[PlannedStage],
        cluster: Cluster,
        optimizer: Optimizer | None = None,
        kernels: Kernels | None = None,
        join_of: JoinOf | None = None,
    ) -> None:
        self.lowered, self.player, self.is_mixed = lowered, Simulator(), bool(cluster.parts)
        self.own = [own_part(cluster, stage) for stage in planned]
        self.priced: dict[Hashable, Priced] = {}
        for index, pcg in enumerate(lowered.pcgs):
            key = self._key(index)
            if key not in self.priced:
                own = self.own[index]
                self.priced[key] = priced(pcg, own, pcg.decisions, optimizer, kernels)
        devices = [devices_of(stage) for stage in planned]
        self.join_of = join_of or (lambda a, b: joined(cluster, devices[a], devices[b]))
        self.edges = tuple(_edges(lowered, self.join_of))
        self.shared = tuple(self._shared(*each) for each in lowered.cut.shared.items())
        self._played: dict[Hashable, StageActions] = {}

    def _key(self, index: int) -> Hashable:
        return id(self.lowered.pcgs[index]), self.own[index]

    def actions(self, index: int, *, split: bool) -> StageActions:
        """The actions of a stage, with gradients of weights apart where its passes are `split`."""
        pcg, own = self.lowered.pcgs[index], self.own[index]
        key = self._key(index), split
        if key not in self._played:
            stage = Stage(pcg, own, self.priced[self._key(index)])
            self._played[key] = play_stage("", stage, self.player, split=split)
        device = own.device.name if self.is_mixed else ""
        return replace(self._played[key], name=f"stage {index}", device=device)

    def play(self, lists: Lists) -> Timeline:
        """One step as the lists of all ranks say."""
        split = {action.stage for own in lists for action in own if action.kind == "W"}
        stages = [self.actions(i, split=i in split) for i in range(len(self.lowered.pcgs))]
        return simulate_pipeline(lists, stages, self.edges, shared=self.shared)

    def _shared(self, name: str, holders: Sequence[int]) -> Shared:
        """Gradients go to the stage that owns a parameter, and weights come back: twice its bytes
        between two stages, as around a ring.
        """
        sizes = []
        for stage in holders:
            pcg, graph = self.lowered.pcgs[stage], self.lowered.cut.graphs[stage]
            position = next(i for i, entry in enumerate(graph.inputs) if entry.target == name)
            held = self.priced[self._key(stage)].parameters
            own = held.by_name[pcg.graph.inputs[position].value.name]
            sizes.append(held.stored_of(own).get("gradients", 0))
        ring = len(holders)
        size = 2 * (ring - 1) / ring * max(sizes)
        joins = (self.join_of(holders[0], other) for other in holders[1:])
        slowest = max((send(size, level, own) for own, level in joins), key=lambda sent: sent.ps)
        return Shared(tuple(holders), slowest)


def _edges(lowered: LoweredStages, join_of: JoinOf) -> list[Edge]:
    """What crosses between stages: all values of two of them together, over a level of links."""
    found: dict[tuple[int, int], list[tuple[PValue, PValue]]] = {}
    for crossing in lowered.cut.crossings:
        # By position: equal stages have one program, in which values have the names of one of them.
        name, graphs = crossing.value.name, lowered.cut.graphs
        position = graphs[crossing.source].leaving.index(name)
        sent = lowered.pcgs[crossing.source].leaving[position]
        for target in crossing.targets:
            position = next(i for i, e in enumerate(graphs[target].inputs) if e.value.name == name)
            pcg = lowered.pcgs[target]
            own = pcg.graph.inputs[position].value.name
            received = next(v for v in pcg.main.inputs if v.name == own)
            found.setdefault((crossing.source, target), []).append((sent, received))
    edges = []
    for (source, target), values in sorted(found.items()):
        cluster, level = join_of(source, target)
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
