"""Splits as plans: their stages lowered, their passes ordered by several schedules, and the fastest
that fits as the simulator plays it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from parloom.cost.pipeline import Edge, StageActions, pass_times
from parloom.cost.stages import PricedStages, StagePlayer
from parloom.cost.timeline import Timeline
from parloom.ir.factors import Factored
from parloom.ir.list_schedule import Link, list_schedule
from parloom.ir.lower_stages import LoweredStages, Stager
from parloom.ir.plan import Decisions, ParameterDecision, Stage
from parloom.ir.schedules import Lists, schedule
from parloom.search.contexts import SimulatedPlan
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.pipelines.split import Split, merges, moves
from parloom.search.refusals import Refusals
from parloom.search.request import Request

SEARCHED = "searched"
"""The schedule of plans whose action lists were made for the times of their stages."""
# Schedules by name are taken where searched lists are faster by less than this share.
SIMPLER = 0.002
# Passes of a plan beyond which lists are not searched.
MOST_PASSES = 30_000


@dataclass(frozen=True, slots=True, eq=False)
class JudgedSplit:
    """A split as a plan, its step, and whether no device holds more than it may."""

    split: Split
    decisions: Decisions
    lowered: LoweredStages
    timeline: Timeline
    fits: bool

    @property
    def step_ps(self) -> int:
        return self.timeline.each_ps

    def predicted(self, request: Request) -> SimulatedPlan:
        """The plan as it is predicted with the bands of the machine."""
        return SimulatedPlan(self.decisions, request.predict_stages(self.lowered, self.decisions))


@dataclass(frozen=True, slots=True)
class _Played:
    name: str
    lists: Lists
    timeline: Timeline

    @property
    def step_ps(self) -> float:
        return self.timeline.each_ps * (1.0 if self.name == SEARCHED else 1 - SIMPLER)


class Judge:
    """Simulates splits of one request's model; what it cannot lower is for `refusals` to count."""

    def __init__(self, request: Request, factored: Factored, refusals: Refusals) -> None:
        self.request, self.refusals = request, refusals
        self.calls = {f.key: f.prefix or f.node.key for f in request.graph.flat()}
        self.stager, self.alike = Stager(factored), AlikeStages()
        self.player = StagePlayer(request.cluster, request.optimizer, request.machine.kernels)

    def judge(self, split: Split) -> JudgedSplit | None:
        """The split as a plan with its fastest schedule that fits; with the one that holds least
        where none fits, None where no schedule takes its placement in the memory there is.

        Raises `LayoutError` where its stages cannot be lowered, `InputError` where a group lies
        over more nodes than it needs.
        """
        decisions, stages = self.priced(split)
        count = decisions.num_microbatches
        played = [
            _Played(name, lists, stages.play(lists, repeated=self.request.passes_follow))
            for name, lists in self._lists(stages, split, count)
        ]
        if not played:
            return None
        fitting = [one for one in played if self.request.fits(one.timeline)]
        best = min(fitting, key=lambda one: one.step_ps, default=None)
        if best is None:
            best = min(played, key=lambda one: one.timeline.peak_bytes)
        actions = best.lists if best.name == SEARCHED else ()
        found = replace(decisions, schedule=best.name, actions=actions)
        return JudgedSplit(split, found, stages.lowered, best.timeline, bool(fitting))

    def priced(self, split: Split) -> tuple[Decisions, PricedStages]:
        """The split as a plan without a schedule, and its stages; raises as `judge` does."""
        decisions = self.decisions(split)
        lowered = self.alike.lower(self.stager.cut(decisions), decisions)
        return decisions, PricedStages(lowered, decisions.stages, self.player)

    def decisions(self, split: Split) -> Decisions:
        """The split as a plan without a schedule."""
        sizes = [costs.num_devices for costs in split.costs]
        begins = split.begins or tuple(accumulate(sizes, initial=0))
        stages, own = [], {}
        at_once = split.at_once or (1,) * len(split.groups)
        ranges = zip(split.ranges, split.groups, at_once, strict=True)
        for (first, last), group, together in ranges:
            whole, items = split.costs[group].whole, split.costs[group].items[first:last]
            devices = range(begins[group], begins[group] + whole.num_ranks)
            stages.append(Stage(items, (devices,), whole.mesh, at_once=together))
            own.update(dict.fromkeys(items, group))
        wholes = [costs.whole for costs in split.costs]
        # Items that no stage owns are computed where they are read, as the first group has them.
        nodes = [
            n
            for group, whole in enumerate(wholes)
            for n in whole.nodes
            if own.get(self.calls[n.key], 0) == group
        ]
        return replace(
            wholes[0],
            stages=tuple(stages),
            nodes=tuple(nodes),
            parameters=tuple(self._parameters(split, stages)),
            activations=tuple(
                a
                for group, whole in enumerate(wholes)
                for a in whole.activations
                if own.get(a.prefix, 0) == group
            ),
        )

    def _parameters(self, split: Split, stages: Sequence[Stage]) -> Iterator[ParameterDecision]:
        """Each parameter as the group stores it whose stage comes first of those that read it."""
        if len({id(costs.whole) for costs in split.costs}) == 1:
            yield from split.costs[0].whole.parameters
            return
        graph = self.request.graph
        stage_of = {item: index for index, stage in enumerate(stages) for item in stage.items}
        owner: dict[str, int] = {}
        names = {i.value.name: i.target for i in graph.of_kind("parameter")}
        for flat in graph.flat():
            stage = stage_of.get(flat.prefix or flat.node.key, 0)
            for name in (names[operand] for operand in flat.operands if operand in names):
                owner[name] = min(stage, owner.get(name, stage))
        for group, costs in enumerate(split.costs):
            for parameter in costs.whole.parameters:
                if split.groups[owner.get(parameter.name, 0)] == group:
                    yield parameter

    def _lists(self, stages: PricedStages, split: Split, count: int) -> Iterator[tuple[str, Lists]]:
        """Named schedules that take the stages as they are placed, and searched ones."""
        num_stages, num_groups = len(split.groups), len(split.costs)
        edges = stages.edges
        chain = all(edge.target == edge.source + 1 for edge in edges)
        for name in _names(split.groups, num_groups) if not split.at_once else ():
            if chain:
                yield name, schedule(name, num_stages, count, num_stages // num_groups)
            elif num_stages == num_groups:  # as lists: schedules by name take chains
                pairs = [(edge.source, edge.target) for edge in edges]
                yield SEARCHED, schedule(name, num_stages, count, edges=pairs)
        if num_stages * count > MOST_PASSES:
            return
        ranks = _numbered(split.groups)
        between = [edge for edge in edges if ranks[edge.source] != ranks[edge.target]]
        for apart in (False, True):
            own = [stages.actions(i, split=apart) for i in range(num_stages)]
            times = [pass_times(actions, i, between) for i, actions in enumerate(own)]
            links = [_link(e) for e in edges]
            limits = [self.request.limit_of(actions.device) for actions in own]
            room = _room(own, ranks, limits)
            if min(room) <= 0:
                continue
            found = list_schedule(
                times, links, ranks, count, at_once=split.at_once, split=apart, limits_bytes=room
            )
            if found is not None:
                yield SEARCHED, found.lists


class Tried:
    """The splits of one request that were simulated, each once; each costs `spend`."""

    def __init__(self, judge: Judge, spend: Callable[[], None]) -> None:
        self.judge, self.spend = judge, spend
        self.judged: list[JudgedSplit] = []
        # With the splits: layouts are told apart by identity, and nothing else may keep them.
        self._known: dict[tuple[object, ...], Split] = {}

    def play(self, split: Split) -> JudgedSplit | None:
        """The split as a plan; None where it was tried before, or cannot be played."""
        wholes = tuple(id(costs.whole) for costs in split.costs)
        items = split.costs[0].items
        stages = tuple(frozenset(items[first:last]) for first, last in split.ranges)
        key = stages, split.groups, split.begins, split.at_once, wholes
        allowed = self.judge.request.pinned.allows_stages(len(split.groups))
        if key in self._known or not allowed:
            return None
        self._known[key] = split
        self.spend()
        found = self.judge.refusals.tried(lambda: self.judge.judge(split))
        if found is not None:
            self.judged.append(found)
        return found

    def fitting(self) -> list[JudgedSplit]:
        """Those that fit, the fastest first."""
        return sorted((o for o in self.judged if o.fits), key=lambda one: one.step_ps)

    def move(self, best: JudgedSplit, most: int) -> None:
        """Move one boundary at a time of a split, as long as that helps, and at most so often."""
        self._climb(best, moves, most)

    def merge(self, counts: Collection[int], most: int) -> None:
        """Give stages of the best split larger microbatches, of `counts` in a step, likewise."""
        for best in self.fitting()[:1]:
            self._climb(best, lambda split: merges(split, counts), most)

    def _climb(
        self, best: JudgedSplit, nearby: Callable[[Split], Iterator[Split]], most: int
    ) -> None:
        left = len(self.judged) + most
        better: JudgedSplit | None = best
        while better is not None:
            best, better = better, None
            for split in nearby(best.split):
                found = self.play(split) if len(self.judged) < left else None
                if found is not None and found.fits and found.step_ps < best.step_ps:
                    better = found
                    break


def _names(groups: tuple[int, ...], num_groups: int) -> tuple[str, ...]:
    """Schedules that place stages so, of those that are worth it."""
    num_stages = len(groups)
    if groups == tuple(stage % num_groups for stage in range(num_stages)):
        if num_stages == num_groups:
            return ("1f1b", "eager_1f1b", "zb_h1")
        return () if num_stages % num_groups else ("interleaved_1f1b",)
    return ("zb_v",) if groups == (*range(num_groups), *reversed(range(num_groups))) else ()


def _numbered(groups: Sequence[int]) -> list[int]:
    """Groups numbered by their first stage."""
    order = {group: rank for rank, group in enumerate(dict.fromkeys(groups))}
    return [order[group] for group in groups]


def _link(edge: Edge) -> Link:
    """Floating-point values count as if a gradient came back: plans are checked so."""
    back = edge.backward.ps if edge.backward else 0
    return Link(edge.source, edge.target, edge.forward.ps, back)


def _room(stages: Sequence[StageActions], ranks: Sequence[int], limits: Sequence[int]) -> list[int]:
    """What activations in flight may take on each rank: the limit, of the devices of each stage,
    less what is there all along, and what the largest pass holds for a while.
    """
    limit = dict(zip(ranks, limits, strict=True))
    base, passing = [0] * (max(ranks) + 1), [0] * (max(ranks) + 1)
    for stage, rank in zip(stages, ranks, strict=True):
        base[rank] += sum(stage.base)
        for kind in [kind for kind in stage.actions if kind[0] in "FBW"]:
            memory = stage.actions[kind].memory
            passing[rank] = max(passing[rank], memory.peak - max(0, sum(memory.net)))
    return [limit[rank] - base[rank] - passing[rank] for rank in range(len(base))]
