"""The step of a plan whatever its stages: each stage priced and played by itself, then all of them
as their schedule says.
"""

from collections.abc import Callable, Iterable, Sequence
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
from parloom.errors import InputError
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.lower_stages import LoweredStages, group_lists
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.pcg import PCG, PValue
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.plan import Stage as PlannedStage
from parloom.ir.schedules import Lists
from parloom.ir.stages import Crossing

LevelOf = Callable[[int, int], int]
"""The level of links between two stages."""
Moved = tuple[float, float]
"""Bytes that each rank of one stage sends, and that each rank of another one receives."""


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
    player = StagePlayer(cluster, optimizer, kernels)
    stages = PricedStages(lowered, decisions.stages, player)
    return stages.play(tuple(own for _, own in group_lists(decisions)))


class StagePlayer:
    """Prices the programs of stages on parts of `cluster` and plays their actions; each program is
    priced and played once, however many stages and plans have it.
    """

    def __init__(
        self, cluster: Cluster, optimizer: Optimizer | None = None, kernels: Kernels | None = None
    ) -> None:
        self.cluster, self.optimizer, self.kernels = cluster, optimizer, kernels
        self._simulator = Simulator()
        # By identity: with their programs, which nothing else may keep.
        self._priced: dict[int, tuple[PCG, Priced]] = {}
        self._played: dict[tuple[int, bool], StageActions] = {}

    def priced(self, pcg: PCG) -> Priced:
        """What the operators and transfers of a program take."""
        if id(pcg) not in self._priced:
            found = priced(pcg, self._part(pcg), pcg.decisions, self.optimizer, self.kernels)
            self._priced[id(pcg)] = pcg, found
        return self._priced[id(pcg)][1]

    def actions(self, pcg: PCG, *, split: bool) -> StageActions:
        """The actions of a stage, with gradients of weights apart where its passes are `split`."""
        own, key = self.priced(pcg), (id(pcg), split)
        if key not in self._played:
            stage = Stage(pcg, self._part(pcg), own)
            self._played[key] = play_stage("", stage, self._simulator, split=split)
        return self._played[key]

    def _part(self, pcg: PCG) -> Cluster:
        return part_of(self.cluster, pcg.decisions.mesh.num_ranks)


class PricedStages:
    """The stages of a plan, to be played under any action lists. `level_of` says over which level
    of links two stages send, where that is not the one between their devices.
    """

    def __init__(
        self,
        lowered: LoweredStages,
        planned: Sequence[PlannedStage],
        player: StagePlayer,
        level_of: LevelOf | None = None,
    ) -> None:
        cluster = player.cluster
        for index, stage in enumerate(planned):
            _check_aligned(index, stage, cluster)
        self.lowered, self.player = lowered, player
        devices = [[d for part in stage.devices for d in part] for stage in planned]
        self.level_of = level_of or (lambda a, b: crossed(devices[a], devices[b], cluster))
        self.edges = tuple(_edges(lowered, self.level_of, cluster))
        self.shared = tuple(self._shared(*each) for each in lowered.cut.shared.items())

    def actions(self, index: int, *, split: bool) -> StageActions:
        """The actions of a stage, by its number; see `StagePlayer.actions`."""
        played = self.player.actions(self.lowered.pcgs[index], split=split)
        return replace(played, name=f"stage {index}")

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
            held = self.player.priced(pcg).parameters
            own = held.by_name[pcg.graph.inputs[position].value.name]
            sizes.append(held.stored_of(own).get("gradients", 0))
        level = max(self.level_of(holders[0], other) for other in holders[1:])
        ring = len(holders)
        size = 2 * (ring - 1) / ring * max(sizes)
        return Shared(tuple(holders), send(size, size, level, self.player.cluster))


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


def _edges(lowered: LoweredStages, level_of: LevelOf, cluster: Cluster) -> list[Edge]:
    """What crosses between stages: all values of two of them together, over a level of links."""
    found: dict[tuple[int, int], list[tuple[Moved, Moved | None]]] = {}
    for crossing in lowered.cut.crossings:
        for target in crossing.targets:
            values = found.setdefault((crossing.source, target), [])
            values.append(crossing_bytes(lowered, crossing, target))
    edges = []
    for (source, target), values in sorted(found.items()):
        level = level_of(source, target)
        forward = send(*_sum(there for there, _ in values), level, cluster)
        back = [moved for _, moved in values if moved is not None]
        edges.append(
            Edge(source, target, forward, send(*_sum(back), level, cluster) if back else None)
        )
    return edges


def _sum(values: Iterable[Moved]) -> Moved:
    sent, received = zip(*values, strict=True)
    return sum(sent), sum(received)


def crossing_bytes(
    lowered: LoweredStages, crossing: Crossing, target: int
) -> tuple[Moved, Moved | None]:
    """What moves of a microbatch of a value to stage `target`, and of its gradient back: None where
    there is none.
    """
    # By position: equal stages have one program, in which values have the names of one of them.
    name, graphs = crossing.value.name, lowered.cut.graphs
    source_pcg, target_pcg = lowered.pcgs[crossing.source], lowered.pcgs[target]
    sent = source_pcg.leaving[graphs[crossing.source].leaving.index(name)]
    position = next(i for i, e in enumerate(graphs[target].inputs) if e.value.name == name)
    own = target_pcg.graph.inputs[position].value.name
    received = next(v for v in target_pcg.main.inputs if v.name == own)
    forward = _moved(received, source_pcg, target_pcg)
    return forward, _moved(sent, target_pcg, source_pcg) if received.differentiable else None


def _moved(received: PValue, source: PCG, target: PCG) -> Moved:
    each = prod(local_shape(received.layout, received.spec.shape, target.mesh))
    each *= DTYPE_BYTES[received.spec.dtype]
    return each * target.decisions.mesh.num_ranks / source.decisions.mesh.num_ranks, each


def crossed(one: Sequence[int], other: Sequence[int], cluster: Cluster) -> int:
    """The outermost level of links that joins devices of two stages."""
    found, below = 0, 1
    for level, each in enumerate(cluster.levels):
        parts = {devices[end] // below for devices in (one, other) for end in (0, -1)}
        if len(parts) > 1:
            found = level
        below *= each.size
    return found
