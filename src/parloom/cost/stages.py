"""The step of a plan whatever its stages: each stage priced and played by itself, then all of them
as their schedule says.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from math import ceil, prod

from parloom.action_text import AHEAD_BYTES, PASSES_AHEAD
from parloom.cost.actions import StageWriter
from parloom.cost.kernels import Kernels
from parloom.cost.pipeline import (
    Edge,
    Send,
    Shared,
    StageActions,
    play_stage,
    send,
    simulate_pipeline,
)
from parloom.cost.simulate import Simulator, simulate
from parloom.cost.step import Priced, priced
from parloom.cost.tasks import COMMUNICATION, COMPONENTS
from parloom.cost.timeline import Timeline
from parloom.ir.generation import TOKENS, feedback
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.lower_stages import LoweredStages, group_lists
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG, PValue, Transfer
from parloom.ir.plan import Decisions, Optimizer, Stage
from parloom.ir.regular_parts import Join, devices_of, joined, own_part
from parloom.ir.schedules import Lists

JoinOf = Callable[[int, int], Join]
"""The level of links between two stages."""
Moved = tuple[float, float]
"""Bytes that each rank of one stage sends, and that each rank of another one receives."""


def simulate_stages(
    lowered: LoweredStages,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
    *,
    repeated: bool = False,
) -> Timeline:
    """Play one step of all stages, which were lowered from `decisions`, on `cluster`; of stages
    that are `repeated`, with the time from step to step where they follow each other at once.
    """
    if len(lowered.pcgs) == 1:
        own = own_part(cluster, decisions.stages[0]) if cluster.parts else cluster
        return simulate(lowered.only, own, decisions, optimizer, kernels)
    player = StagePlayer(cluster, optimizer, kernels)
    stages = PricedStages(lowered, decisions.stages, player)
    return stages.play(tuple(own for _, own in group_lists(decisions)), repeated=repeated)


class StagePlayer:
    """Prices the programs of stages on parts of `cluster` and plays their actions; each program is
    priced and played once on equal devices, however many stages and plans have it.
    """

    def __init__(
        self, cluster: Cluster, optimizer: Optimizer | None = None, kernels: Kernels | None = None
    ) -> None:
        self.cluster, self.optimizer, self.kernels = cluster, optimizer, kernels
        self._simulator = Simulator()
        # One object for equal devices.
        self._own: dict[tuple[range, ...], Cluster] = {}
        self._alike: dict[Cluster, Cluster] = {}
        # By identity: with their programs, which nothing else may keep.
        self._priced: dict[tuple[int, int], tuple[PCG, Priced]] = {}
        self._played: dict[tuple[int, int, bool], StageActions] = {}

    def own(self, stage: Stage) -> Cluster:
        """The devices of a stage; raises `InputError` as `own_part` does."""
        if stage.devices not in self._own:
            found = own_part(self.cluster, stage)
            self._own[stage.devices] = self._alike.setdefault(found, found)
        return self._own[stage.devices]

    def priced(self, pcg: PCG, stage: Stage) -> Priced:
        """What the operators and transfers of a stage's program take."""
        own = self.own(stage)
        key = id(pcg), id(own)
        if key not in self._priced:
            self._priced[key] = pcg, priced(pcg, own, pcg.decisions, self.optimizer, self.kernels)
        return self._priced[key][1]

    def actions(self, pcg: PCG, stage: Stage, *, split: bool) -> StageActions:
        """The actions of a stage, with gradients of weights apart where its passes are `split`."""
        found, own = self.priced(pcg, stage), self.own(stage)
        key = id(pcg), id(own), split
        if key not in self._played:
            device = own.device.name if self.cluster.parts else ""
            played = play_stage("", StageWriter(pcg, own, found), self._simulator, split=split)
            self._played[key] = replace(played, device=device)
        return self._played[key]


class PricedStages:
    """The stages of a plan, to be played under any action lists. `join_of` says over which level of
    links two stages send, where that is not the one between their devices.
    """

    def __init__(
        self,
        lowered: LoweredStages,
        planned: Sequence[Stage],
        player: StagePlayer,
        join_of: JoinOf | None = None,
    ) -> None:
        self.lowered, self.planned, self.player = lowered, planned, player
        for stage in planned:
            player.own(stage)
        devices = [devices_of(stage) for stage in planned]
        self.join_of = join_of or (lambda a, b: joined(player.cluster, devices[a], devices[b]))
        self.edges = tuple(_edges(lowered, self.join_of, player.kernels))
        self.later = tuple(self._chosen_tokens())
        self.shared = tuple(self._shared_weights())

    def alone(self, index: int, *, split: bool) -> StageActions:
        """The actions of a stage, by its number; see `StagePlayer.actions`."""
        pcg, stage = self.lowered.pcgs[index], self.planned[index]
        return replace(self.player.actions(pcg, stage, split=split), name=f"stage {index}")

    def actions(self, index: int, *, split: bool) -> StageActions:
        """The same with memory for messages: what is received ahead of need, and what was sent
        last of each value, which is there until its reader answers.
        """
        found, ahead = self.alone(index, split=split), [0] * len(COMPONENTS)
        ahead[COMMUNICATION] = ceil(self._message_bytes(index))
        return replace(found, base=tuple(map(sum, zip(found.base, ahead, strict=True))))

    def _message_bytes(self, index: int) -> float:
        """What the ranks of a stage receive ahead, and one message of each value that they send."""
        return self._ahead_bytes(index) + self._sent_bytes(index)

    def _sent_bytes(self, index: int) -> float:
        found = 0.0
        for source, target, there, back in self._crossings(index):
            found += there[0] if index == source else 0.0
            found += back[0] if back and index == target else 0.0
        return found

    def _ahead_bytes(self, index: int) -> float:
        """The passes of each sender that are received ahead of need, as they are the largest; those
        of a group of devices count in its first stage.
        """
        own = self.planned[index].devices
        here = [i for i, stage in enumerate(self.planned) if stage.devices == own]
        if index != here[0]:
            return 0.0
        passes: dict[tuple[range, ...], Counter[tuple[int, bool]]] = {}
        pcgs = self.lowered.pcgs
        for stage in here:
            for source, target, there, back in self._crossings(stage):
                backward = stage == source
                moved, sender = (back, target) if backward else (there, source)
                if moved is not None:
                    # A pass of the other stage may be several messages.
                    most = max(pcgs[source].num_microbatches, pcgs[target].num_microbatches)
                    of_sender = passes.setdefault(self.planned[sender].devices, Counter())
                    size = ceil(moved[1] * most / pcgs[sender].num_microbatches)
                    of_sender[sender, backward] += size
        found = 0.0
        for of_sender in passes.values():
            count = sum(pcgs[sender].num_microbatches for sender, _ in of_sender)
            largest = max(of_sender.values())
            found += largest * min(PASSES_AHEAD, count, ceil(AHEAD_BYTES / max(1, largest)))
        return found

    def _crossings(self, index: int) -> Iterator[tuple[int, int, Moved, Moved | None]]:
        """What a stage and others on other devices send each other: source, target, there, back."""
        for transfer in self.lowered.transfers:
            source, target = transfer.source, transfer.target
            if index not in (source, target):
                continue
            if self.planned[source].devices != self.planned[target].devices:
                yield source, target, *transfer_bytes(transfer, self.lowered.pcgs)

    def play(self, lists: Lists, *, repeated: bool = False) -> Timeline:
        """One step as the lists of all ranks say; of passes that feed each other, or where that is
        asked for, with the time from one to the next.
        """
        split = {action.stage for own in lists for action in own if action.kind == "W"}
        stages = [self.actions(i, split=i in split) for i in range(len(self.lowered.pcgs))]
        edges = (*self.edges, *self.later)
        return simulate_pipeline(
            lists, stages, edges, shared=self.shared, synchronizes=not repeated
        )

    def _chosen_tokens(self) -> Iterator[Edge]:
        """Of a program of tokens, those that go to the stages which read them in the next pass."""
        graphs, pcgs = self.lowered.cut.graphs, self.lowered.pcgs
        for source, target in feedback(graphs):
            tokens = next(
                e.value.spec for e in graphs[target].of_kind("batch") if e.target == TOKENS
            )
            count = max(pcgs[source].num_microbatches, pcgs[target].num_microbatches)
            size = tokens.num_bytes / count
            sent = send(size, size, self.join_of(source, target), self.player.kernels)
            yield Edge(source, target, sent, None, later=True)

    def _shared_weights(self) -> Iterator[Shared]:
        """Gradients go to the stage that owns a parameter, and then weights come back, those of the
        same stages in one message. All stages send at once, and the one with the most takes the
        longest: where replicas own in turns, that of the largest parameter may.
        """
        owned: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}
        for name, (owner, *rest) in self.lowered.cut.shared.items():
            holders = tuple(sorted((owner, *rest)))
            by_owner = owned.setdefault(holders, {})
            gradients, weights = by_owner.get(owner, (0, 0))
            gradients += self._bytes(name, holders, "gradients")
            by_owner[owner] = gradients, weights + self._bytes(name, holders, "weights")
        kernels = self.player.kernels
        for holders, by_owner in owned.items():
            others = len(holders) - 1
            ways = zip(*by_owner.values(), strict=True)
            # An owner has to do with all others, and they with it.
            size = sum(max(max(others * own, sum(way) - own) for own in way) for way in ways)
            if not size:  # nothing is trained
                continue
            joins = (self.join_of(holders[0], other) for other in holders[1:])
            sends = (send(size, size, join, kernels) for join in joins)
            yield Shared(holders, max(sends, key=lambda sent: sent.ps))

    def _bytes(self, name: str, holders: Sequence[int], what: str) -> int:
        """What a rank has of a parameter, in the stage where that is the most."""
        sizes = []
        for stage in holders:
            pcg, graph = self.lowered.pcgs[stage], self.lowered.cut.graphs[stage]
            position = next(i for i, entry in enumerate(graph.inputs) if entry.target == name)
            held = self.player.priced(pcg, self.planned[stage]).parameters
            own = held.by_name[pcg.graph.inputs[position].value.name]
            sizes.append(held.stored_of(own).get(what, 0) if own.input.trainable else 0)
        return max(sizes)


def _edges(lowered: LoweredStages, join_of: JoinOf, kernels: Kernels | None) -> list[Edge]:
    """What crosses between stages: all values of two of them together, over a level of links."""
    found: dict[tuple[int, int], list[tuple[Moved, Moved | None]]] = {}
    for transfer in lowered.transfers:
        values = found.setdefault((transfer.source, transfer.target), [])
        values.append(transfer_bytes(transfer, lowered.pcgs))
    edges = []
    for (source, target), values in sorted(found.items()):
        join = join_of(source, target)
        sends = [
            [send(moved[0], moved[1], join, kernels) for moved in way if moved]
            for way in zip(*values, strict=True)
        ]
        forward, back = (reduce(Send.beside, way) if way else None for way in sends)
        assert forward is not None
        edges.append(Edge(source, target, forward, back))
    return edges


def transfer_bytes(transfer: Transfer, pcgs: Sequence[PCG]) -> tuple[Moved, Moved | None]:
    """What moves of a value, and of its gradient back, None where there is none: of a microbatch,
    the smaller one where the stages have unequal ones.
    """
    source, target = pcgs[transfer.source], pcgs[transfer.target]
    forward = _moved(transfer.received, source, target)
    back = transfer.received.differentiable
    return forward, _moved(transfer.sent, target, source) if back else None


def _moved(received: PValue, source: PCG, target: PCG) -> Moved:
    most = max(source.num_microbatches, target.num_microbatches)
    elements = prod(local_shape(received.layout, received.spec.shape, target.mesh))
    each = elements * DTYPE_BYTES[received.spec.dtype] * target.num_microbatches / most
    return each * target.decisions.mesh.num_ranks / source.decisions.mesh.num_ranks, each
