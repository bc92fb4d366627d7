"""What stages take at least, and what a split of them does, as `every.py` orders splits by it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from parloom.cost.ledger import UPDATE
from parloom.cost.pipeline import Edge, Shared, StageActions
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Stage
from parloom.ir.stages import stage_items
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.judge import Judge
from parloom.search.pipelines.split import Split

Ways = tuple[float, float]
"""Of whole backward passes, and of those with gradients of weights apart."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a stage takes at least: all its passes of a step, one forward pass, one backward pass,
    what comes before updates wait for each other, and updates; what it holds when all gradients are
    there, and what its update takes beside that.
    """

    passes_ps: Ways
    forward_ps: float
    backward_ps: Ways
    reduce_ps: float
    update_ps: float
    stored_bytes: float
    updating_bytes: float

    @property
    def load_ps(self) -> Ways:
        """A step of the stage."""
        once_ps = self.reduce_ps + self.update_ps
        return self.passes_ps[0] + once_ps, self.passes_ps[1] + once_ps


IMPOSSIBLE = Bound((inf, inf), inf, (inf, inf), inf, inf, inf, 0.0)


def members(some: int) -> list[int]:
    """The items of a set, in execution order."""
    return [item for item in range(some.bit_length()) if some >> item & 1]


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """How operators are laid out that no stage owns: as in the layout of the first group, along
    axes that all of a plan's meshes have.
    """

    first: Decisions
    meshes: tuple[Mesh, ...]


class StageBounds:
    """Prices stages by the set of items before them and the one with them; each costs `spend`."""

    def __init__(self, judge: Judge, spend: Callable[[], None]) -> None:
        self.judge, self.spend = judge, spend
        graph = judge.request.graph
        items = set(stage_items(graph))
        free = {f.key for f in graph.flat() if (f.prefix or f.node.key) not in items}
        self.free = frozenset(free)
        self._known: dict[tuple[int, int, int, object], Bound] = {}
        self._wholes: list[Decisions] = []  # which are told apart by identity

    def of(self, costs: ItemCosts, before: int, after: int, free: Free) -> Bound:
        """The stage of what `after` has beyond `before`, in the layouts of `costs`."""
        rest = (id(free.first), free.meshes) if self.free else None
        key = id(costs.whole), before, after, rest
        if key not in self._known:
            self._wholes += costs.whole, free.first
            self.spend()
            tried = self.judge.refusals.tried
            found = tried(lambda: self._priced(costs, before, after, free))
            self._known[key] = found or IMPOSSIBLE
        return self._known[key]

    def _priced(self, costs: ItemCosts, before: int, after: int, free: Free) -> Bound:
        every = (1 << len(costs.items)) - 1
        sets = [some for some in (before, after & ~before, every & ~after) if some]
        whole, devices = costs.whole, costs.whole.stages[0].devices
        stages = [
            Stage(tuple(costs.items[i] for i in members(some)), devices, whole.mesh)
            for some in sets
        ]
        judge, place = self.judge, sets.index(after & ~before)
        nodes = [node for node in whole.nodes if node.key not in self.free]
        nodes += (node for node in free.first.nodes if node.key in self.free)
        apart = replace(whole, stages=tuple(stages), nodes=tuple(nodes))
        parts = judge.stager.cut(apart)
        # The other meshes count for what all stages compute alike.
        others = (Stage((), devices, mesh) for mesh in free.meshes)
        pcg = judge.alike.stage(parts, replace(apart, stages=(*stages, *others)), place)
        together, split = (
            judge.player.actions(pcg, stages[place], split=way) for way in (False, True)
        )
        count = costs.num_microbatches
        whole_ps = min(together.actions[kind].ps for kind in together.actions if kind[0] == "B")
        reduce, step, gather = (together.actions[kind].ps for kind in UPDATE)
        return Bound(
            (_passes_ps(together, count), _passes_ps(split, count)),
            together.actions["F"].ps,
            (whole_ps, split.actions["B"].ps),
            reduce,
            step + gather,
            sum(together.base) + _gradient_bytes(together, count),
            together.actions["STEP"].memory.peak,
        )


def _gradient_bytes(stage: StageActions, count: int) -> int:
    """What is left of all passes and reductions when the update begins."""
    names = ["B first", *["B"] * (count - 2), *["B last"] * (count > 1), *["F"] * count, "REDUCE"]
    each = {name: sum(stage.actions[name].memory.net) for name in set(names)}
    return max(0, sum(map(each.__getitem__, names)))


def _passes_ps(stage: StageActions, count: int) -> float:
    """What the passes of a step take."""
    actions = stage.actions
    if "W" in actions:
        each = actions["F"].ps + actions["B"].ps + actions["W"].ps
        return count * each - actions["W"].ps + actions["W last"].ps
    ends = actions["B last"].ps + (actions["B first"].ps if count > 1 else 0)
    return count * actions["F"].ps + max(0, count - 2) * actions["B"].ps + ends


def least_ps(
    split: Split, bounds: Sequence[Bound], edges: Collection[Edge], shared: Sequence[Shared] = ()
) -> float:
    """What a split takes at least. Before updates wait for each other: of each group, the forward
    passes before its first stage, its own passes, and the backward passes after its last one; of a
    microbatch, its way there and back; of each group's links, what is sent after the first pass.
    Where passes follow each other at once, no group waits for the first one.
    """
    groups = split.groups
    before, after = _ways(split, bounds, edges)
    update_ps = [0.0] * len(split.costs)
    for group, bound in zip(groups, bounds, strict=True):
        update_ps[group] += bound.update_ps
    apart = [edge for edge in edges if groups[edge.source] != groups[edge.target]]
    found = [max(_links_ps(split, bounds, before, apart), default=0.0)] * 2
    for way in range(2):
        ends_ps, reduced_ps = [0.0] * len(split.costs), [0.0] * len(split.costs)
        for group in range(len(split.costs)):
            own = [stage for stage, other in enumerate(groups) if other == group]
            passes_ps, reduce_ps = (
                sum(bounds[stage].passes_ps[way] for stage in own),
                sum(bounds[stage].reduce_ps for stage in own),
            )
            # Gradients of weights may be the last passes.
            rest_ps = 0.0 if way else min(after[stage][way] for stage in own)
            begins_ps = 0.0 if split.repeats else min(before[stage] for stage in own)
            reduced_ps[group] = begins_ps + passes_ps + reduce_ps
            ends_ps[group] = begins_ps + passes_ps + max(reduce_ps, rest_ps)
        for ring in shared:
            members_of = {groups[stage] for stage in ring.stages}
            if len(members_of) > 1:
                found[way] = max(found[way], ring.sent.ps + max(reduced_ps[g] for g in members_of))
        there_and_back = (
            before[stage] + bound.forward_ps + bound.backward_ps[way] + after[stage][way]
            for stage, bound in enumerate(bounds)
        )
        found[way] = max(found[way], *ends_ps, *there_and_back)
    return min(found) + max(update_ps)


def _ways(
    split: Split, bounds: Sequence[Bound], edges: Collection[Edge]
) -> tuple[list[float], list[list[float]]]:
    """How long the forward passes take that come before a stage, and, by way, the backward passes
    that come after it.
    """
    before, after = [0.0] * len(bounds), [[0.0, 0.0] for _ in bounds]
    for edge in sorted(edges, key=lambda e: (e.source, e.target)):
        one, other = edge.source, edge.target
        apart = split.groups[one] != split.groups[other]
        reached = before[one] + bounds[one].forward_ps + (edge.forward.ps if apart else 0)
        before[other] = max(before[other], reached)
        for way in range(2) if edge.backward is not None else ():
            assert edge.backward is not None
            left = after[one][way] + bounds[one].backward_ps[way]
            left += edge.backward.ps if apart else 0
            after[other][way] = max(after[other][way], left)
    return before, after


def _links_ps(
    split: Split, bounds: Sequence[Bound], before: Sequence[float], apart: Collection[Edge]
) -> Iterator[float]:
    """When the links of each group, of each level and direction, have moved all microbatches."""
    moves: dict[tuple[int, int, bool], float] = {}
    starts: dict[tuple[int, int, bool], float] = {}
    for edge in apart:
        starts_ps = before[edge.source] + bounds[edge.source].forward_ps
        starts_ps *= not split.repeats
        one, other = split.groups[edge.source], split.groups[edge.target]
        for sent, ends in ((edge.forward, (one, other)), (edge.backward, (other, one))):
            if sent is None:
                continue
            for group, inward, own_ps in zip(
                ends, (False, True), (sent.sends_ps, sent.receives_ps), strict=True
            ):
                key, each_ps = (group, sent.level, inward), sent.moves_ps + own_ps
                moves[key] = moves.get(key, 0.0) + split.num_microbatches * each_ps
                starts[key] = min(starts.get(key, inf), starts_ps)
    yield from (starts[key] + moves[key] for key in moves)
