"""An enumeration of pipelines that shares nothing with the search but the simulator: every cut of
the items, every placement of stages on groups of devices, every layout, schedule and number of
microbatches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from parloom.cost.pipeline import pass_times
from parloom.cost.stages import PricedStages
from parloom.errors import InputError, LayoutError
from parloom.ir.list_schedule import Link, list_schedule
from parloom.ir.schedules import Lists, schedule
from parloom.ir.stages import item_edges
from parloom.search.pipelines.costs import ItemCosts
from parloom.search.pipelines.every import Layouts
from parloom.search.pipelines.judge import Judge
from parloom.search.pipelines.split import Split

NAMED = ("gpipe", "1f1b", "zb_h1", "zb_h2")


@dataclass(slots=True)
class Least:
    """The fastest pipeline that fits, and of how many."""

    step_ps: float = inf
    number: int = 0
    split: Split | None = None
    lists: Lists = ()


def least_of_all(judge: Judge, layouts: Layouts, devices: int) -> Least:
    """The fastest of all pipelines on so many devices that keep to the request's limit."""
    found = Least()
    edges = item_edges(judge.request.graph)
    for count, by_size in layouts.items():
        some = next(iter(by_size.values()))[0]
        for stage_of in _numbered(len(some.items), edges):
            for split in _placed(stage_of, by_size, devices):
                _play(judge, split, count, found)
    return found


def _numbered(count: int, edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """The stage of each item in all ways in which values go to later stages, two stages or more."""
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        before[target].append(source)

    def visit(own: tuple[int, ...], num_stages: int) -> Iterator[tuple[int, ...]]:
        if len(own) == count:
            if len(set(own)) == num_stages:
                yield own
            return
        first = max((own[item] for item in before[len(own)]), default=0)
        for stage in range(first, num_stages):
            yield from visit((*own, stage), num_stages)

    for num_stages in range(2, count + 1):
        yield from visit((), num_stages)


def _placed(
    stage_of: tuple[int, ...], by_size: Mapping[int, Sequence[ItemCosts]], devices: int
) -> Iterator[Split]:
    num_stages = max(stage_of) + 1
    order = sorted(range(len(stage_of)), key=lambda item: (stage_of[item], item))
    ends = tuple(sum(own <= stage for own in stage_of) for stage in range(num_stages))
    for groups in product(range(devices), repeat=num_stages):
        num_groups = len(set(groups))
        if num_groups < 2 or list(dict.fromkeys(groups)) != list(range(num_groups)):
            continue
        for sizes in product(by_size, repeat=num_groups):
            begins = [sum(sizes[:group]) for group in range(num_groups)]
            if sum(sizes) != devices or any(b % s for b, s in zip(begins, sizes, strict=True)):
                continue
            for chosen in product(*(by_size[size] for size in sizes)):
                ordered = {id(costs): costs.ordered(order) for costs in chosen}
                yield Split(ends, groups, tuple(ordered[id(costs)] for costs in chosen))


def _play(judge: Judge, split: Split, count: int, found: Least) -> None:
    """Take a split in where it is the fastest so far."""
    decisions = judge.decisions(split)
    try:
        lowered = judge.alike.lower(judge.stager.cut(decisions), decisions)
    except (LayoutError, InputError):
        return
    stages = PricedStages(lowered, decisions.stages, judge.player)
    for lists in _schedules(stages, split.groups, count, judge.request.limit_bytes):
        played = stages.play(lists)
        found.number += 1
        fits = played.peak_bytes <= judge.request.limit_bytes
        if fits and played.step_ps < found.step_ps:
            found.step_ps, found.split, found.lists = played.step_ps, split, lists


def _schedules(
    stages: PricedStages, groups: Sequence[int], count: int, limit: int
) -> Iterator[Lists]:
    num_stages = len(groups)
    links = [Link(e.source, e.target, e.forward.ps, 0 if e.backward is None else e.backward.ps)
             for e in stages.edges]  # fmt: skip
    if len(set(groups)) == num_stages:
        pairs = [(link.source, link.target) for link in links]
        yield from (schedule(name, num_stages, count, edges=pairs) for name in NAMED)
    elif groups == tuple(s % (max(groups) + 1) for s in range(num_stages)):
        chunks, left = divmod(num_stages, max(groups) + 1)
        if not left and all(link.target == link.source + 1 for link in links):
            yield schedule("interleaved_1f1b", num_stages, count, chunks)
    for split in (False, True):
        own = [stages.actions(index, split=split) for index in range(num_stages)]
        times = [pass_times(actions, index) for index, actions in enumerate(own)]
        room = [limit] * (max(groups) + 1)
        for actions, group in zip(own, groups, strict=True):
            room[group] -= sum(actions.base)
        if min(room) > 0:
            listed = list_schedule(times, links, groups, count, split=split, limits_bytes=room)
            if listed is not None:
                yield listed.lists
