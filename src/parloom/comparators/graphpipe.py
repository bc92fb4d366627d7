"""GraphPipe: pipeline stages that form a graph, so that parallel branches run side by side
(Jeon et al., ASPLOS'25, arXiv:2406.17145).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from parloom.comparators.pipelines import item_costs, replicated
from parloom.comparators.tree_split import tree_split
from parloom.ir.plan import Decisions
from parloom.ir.schedules import schedule
from parloom.ir.series_parallel import decompose
from parloom.ir.stages import item_edges, stage_items
from parloom.search.request import Request, Say


def graphpipe(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The split into replicated stages along series and parallel parts whose slowest is the
    fastest and that fits, by 1F1B with each stage warmed up by its depth: the paper's defaults
    (section 6), one size of microbatches in all stages.
    """
    keys, edges = stage_items(request.graph), item_edges(request.graph)
    tree = decompose(len(keys), edges)
    for costs in item_costs(request, base):
        microbatches = next(iter(costs.values())).num_microbatches
        chosen = tree_split(tree, costs, request.cluster, request.limit_bytes)
        if chosen is None:
            say(f"graphpipe: {microbatches} microbatches: no stages fit")
            continue
        say(f"graphpipe: {microbatches} microbatches, {len(chosen)} stages")
        ends = accumulate(size for _, size in chosen)
        stages = [
            (tuple(keys[i] for i in sorted(items)), range(end - size, end), costs[size].whole)
            for (items, size), end in zip(chosen, ends, strict=True)
        ]
        plan = replicated(request, base, stages)
        yield _by_depth(plan, [items for items, _ in chosen], edges)


def _by_depth(
    plan: Decisions, stages: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]]
) -> Decisions:
    """The plan with action lists where its stages are no chain."""
    count = len(stages)
    if count == 1:
        return plan
    stage_of = {item: stage for stage, items in enumerate(stages) for item in items}
    between = {(stage_of[a], stage_of[b]) for a, b in edges if stage_of[a] != stage_of[b]}
    lists = schedule(plan.schedule, count, plan.num_microbatches, edges=between)
    chain = schedule(plan.schedule, count, plan.num_microbatches)
    return plan if lists == chain else replace(plan, actions=lists)
