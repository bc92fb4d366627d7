"""FlexFlow's placements: on which devices operators are (Jia, Zaharia, Aiken; SysML 2019).

An operator's configuration names its devices (section 4, the O of SOAP). Here devices are cut into
groups of one size; an item of main (an operator, or a block call) is on one of them, whose devices
share its samples. Items of a group that depend on each other through none of another group are a
stage of a pipeline.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from random import Random

from parloom.comparators.chains import chain
from parloom.comparators.pipelines import costs_by_size
from parloom.ir.factors import factorize
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Decisions
from parloom.ir.regular_parts import crossed, used_cluster
from parloom.ir.stages import item_edges, stage_items
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.pipelines.judge import Judge
from parloom.search.pipelines.split import Split
from parloom.search.refusals import Refusals
from parloom.search.request import Request, Say

Placement = tuple[int, ...]
"""The group of each item."""


def placed(
    request: Request, base: Decisions, penalty_ps: float, budget: int, say: Say
) -> Iterator[Decisions]:
    """The best placement on groups of each size, from chains of `budget` proposals: one begins with
    neighboring items on each group, one at random.
    """
    graph, factored = request.graph, factorize(request.graph)
    judge = Judge(request, factored, Refusals())
    edges, rng = item_edges(graph), Random(request.seed)
    pricer = Pricer(request, factored, stage_items(graph), request.machine)
    for size, costs in costs_by_size(request, base, pricer, base.num_microbatches).items():
        walk = Placements(costs, request.cluster, request.limit_bytes, penalty_ps, rng)
        if walk.num_groups == 1:
            continue
        count = len(costs.items)
        starts = {
            "in a row": tuple(i * walk.num_groups // count for i in range(count)),
            "random": tuple(rng.randrange(walk.num_groups) for _ in range(count)),
        }
        for name, start in starts.items():
            walk.go_back(start)
            cost_ps, placement = chain(walk, budget, rng)
            say(f"flexflow: groups of {size}, {name}: estimated {cost_ps / 1e12:.4g} s")
            yield from _plan(judge, costs, placement, edges)
    if refused := judge.refusals.words():
        say(f"flexflow: {refused}")


class Placements:
    """A walk over placements of items on groups of `costs.num_devices` devices each.

    The cost is when the last item is over, where each group takes its items in the order of the
    model and messages delay only who reads them, and sums of gradients of weights that several
    groups have, with `penalty_ps` for each byte above the limit.
    """

    def __init__(
        self, costs: ItemCosts, cluster: Cluster, limit_bytes: int, penalty_ps: float, rng: Random
    ) -> None:
        self._limit_bytes, self._penalty_ps, self._rng = limit_bytes, penalty_ps, rng
        size, count = costs.num_devices, costs.num_microbatches
        self.num_groups = cluster.num_devices // size
        self._loads_ps = [int(ps) for ps in costs.loads_ps]
        self._bytes = [int(held) for held in costs.stored_bytes + count * costs.kept_bytes]
        # Of each item what it reads: (who makes it, ps by level of links).
        self._reads: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in costs.items]
        for value in costs.sent:
            for target in value.targets:
                self._reads[target].append((value.source, tuple(count * ps for ps in value.ps)))
        self._shared = costs.shared_ps
        devices = [range(g * size, (g + 1) * size) for g in range(self.num_groups)]
        self._levels = [[crossed((one, other), cluster) for other in devices] for one in devices]
        self._placement: Placement = (0,) * len(costs.items)

    def cost(self) -> float:
        return self._cost(self._placement)

    def propose(self) -> tuple[float, Callable[[], None]] | None:
        """One item on another group, both drawn alike."""
        item = self._rng.randrange(len(self._placement))
        group = self._rng.randrange(self.num_groups)
        if group == self._placement[item]:
            return None
        changed = (*self._placement[:item], group, *self._placement[item + 1 :])
        return self._cost(changed), partial(self.go_back, changed)

    def state(self) -> Placement:
        return self._placement

    def go_back(self, state: Placement) -> None:
        self._placement = state

    def _cost(self, placement: Placement) -> float:
        free, held = [0] * self.num_groups, [0] * self.num_groups
        ends: list[int] = []
        for item, group in enumerate(placement):
            begin, levels = free[group], self._levels[group]
            for source, ps in self._reads[item]:
                other = placement[source]
                there = ends[source] + (ps[levels[other]] if other != group else 0)
                begin = max(begin, there)
            free[group] = begin + self._loads_ps[item]
            ends.append(free[group])
            held[group] += self._bytes[item]
        above = sum(max(0, own - self._limit_bytes) for own in held)
        sums = sum(ps for a, b, ps in self._shared if placement[a] != placement[b])
        return max(free) + sums + self._penalty_ps * above


def stages_of(placement: Placement, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Items in stages, each after those that it reads: an item is in the last stage of its group
    where no other stage lies on a way between them.
    """
    reads: dict[int, list[int]] = defaultdict(list)
    for source, target in edges:
        reads[target].append(source)
    stages: list[list[int]] = []
    before: list[set[int]] = []  # the stages that come before each, on any way
    stage_of: list[int] = []
    last: dict[int, int] = {}
    for item, group in enumerate(placement):
        own = last.get(group, -1)
        sources = {stage_of[source] for source in reads[item]} - {own}
        needed = sources.union(*(before[stage] for stage in sources))
        if own < 0 or own in needed:
            own = last[group] = len(stages)
            stages.append([])
            before.append(set())
        stages[own].append(item)
        stage_of.append(own)
        before[own] |= needed
        for behind in before:
            if own in behind:
                behind |= needed
    order = sorted(range(len(stages)), key=lambda stage: (len(before[stage]), stage))
    return [stages[stage] for stage in order]


def _plan(
    judge: Judge, costs: ItemCosts, placement: Placement, edges: Sequence[tuple[int, int]]
) -> Iterator[Decisions]:
    """The placement with its fastest schedule; none where all items are on one group, or where the
    devices of those that have items are no part of the cluster: idle ones cannot be left out.
    """
    stages = stages_of(placement, edges)
    if len(stages) == 1:
        return
    used = sorted(set(placement))
    ordered = costs.ordered([item for stage in stages for item in stage])
    split = Split(
        tuple(accumulate(map(len, stages))),
        tuple(used.index(placement[stage[0]]) for stage in stages),
        (ordered,) * len(used),
        tuple(group * costs.num_devices for group in used),
    )

    def judged() -> Decisions | None:
        found = judge.judge(split)
        if found is None:
            return None
        used_cluster(judge.request.cluster, found.decisions)
        return found.decisions

    decisions = judge.refusals.tried(judged)
    if decisions is not None:
        yield decisions
