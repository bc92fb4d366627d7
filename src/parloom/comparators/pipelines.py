"""Pipelines as others plan them: GPipe's equal stages and PipeDream's dynamic program.

Each item of the model is priced as a stage of its own, so what a stage costs is the sum over its
items. Stages are ranges of items in execution order; a stage has one device, or several that
replicate it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from parloom.comparators.baselines import plain
from parloom.cost.actions import Stage as Actions
from parloom.cost.pipeline import play_stage
from parloom.cost.simulate import Simulator
from parloom.cost.stages import edges_of
from parloom.cost.step import priced
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh, part_of, part_sizes
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    Stage,
    one_stage,
)
from parloom.ir.stages import stage_items
from parloom.search.request import Request, Say

# Microbatches for each stage beyond which a pipeline's bubble is not worth smaller products.
MOST_FOR_EACH = 8


@dataclass(frozen=True, slots=True)
class Items:
    """What the items cost on so many devices that replicate them: picoseconds of a microbatch, and
    to reduce their gradients once a step; `after` is what the values take that cross behind an
    item, there and back.
    """

    decisions: Decisions
    passes_ps: tuple[int, ...]
    reduced_ps: tuple[int, ...]
    after_ps: tuple[int, ...]


def gpipe(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """A stage of equally many items for each device, all forward passes before all backward passes,
    and blocks recomputed (GPipe: Huang et al., NeurIPS'19, section 2).
    """
    items = stage_items(request.graph)
    count = request.cluster.num_devices
    if count > len(items):
        raise InputError(f"gpipe: {len(items)} items do not make {count} stages, one each device")
    ends = [round(index * len(items) / count) for index in range(count + 1)]
    calls = [item.prefix for item in request.graph.main.body if isinstance(item, Call)]
    again = tuple(ActivationDecision(prefix, "recompute") for prefix in calls)
    for microbatches in _counts(request, count):
        yield replace(
            base,
            stages=tuple(
                Stage(items[first:last], (range(index, index + 1),), Mesh(()))
                for index, (first, last) in enumerate(pairwise(ends))
            ),
            num_microbatches=microbatches,
            schedule="gpipe",
            activations=again,
        )


def pipedream(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The split into replicated stages whose slowest is the fastest, one forward and one backward
    pass in turns (PipeDream: Narayanan et al., SOSP'19, section 3.1; flushed as in PipeDream-2BW,
    ICML'21).
    """
    devices = request.cluster.num_devices
    sizes = sorted({1, devices, *part_sizes(request.cluster)})
    counts = _counts(request, devices)
    for microbatches in counts:
        costs = {}
        for size in sizes:
            found = _items(request, base, size, microbatches)
            if found is not None:
                costs[size] = found
        split = _split(costs, devices, microbatches)
        if split is not None:
            say(f"pipedream: {microbatches} microbatches, {len(split)} stages")
            yield _plan(request, base, costs, split, microbatches)


def _counts(request: Request, stages: int) -> tuple[int, ...]:
    """Numbers of microbatches to try."""
    counts = request.microbatch_counts(factorize(request.graph))
    if request.num_microbatches is not None:
        return counts
    return tuple(count for count in counts if count <= MOST_FOR_EACH * stages)


def _items(request: Request, base: Decisions, size: int, microbatches: int) -> Items | None:
    """Every item as a stage of its own, on `size` devices; None where samples do not divide."""
    cluster = part_of(request.cluster, size)
    try:
        (whole,) = plain("data_parallel", request.graph, cluster, microbatches)
    except (LayoutError, InputError, ValueError):
        return None
    keys = stage_items(request.graph)
    apart = replace(
        base,
        stages=tuple(Stage((key,), (range(size),), whole.mesh) for key in keys),
        nodes=whole.nodes,
        num_microbatches=microbatches,
    )
    try:
        lowered = lower_stages(request.graph, apart)
    except LayoutError:
        return None
    player = Simulator()
    passes, reduced = [], []
    for pcg in lowered.pcgs:
        kernels = request.machine.kernels
        found = priced(pcg, cluster, pcg.decisions, request.optimizer, kernels)
        actions = play_stage("", Actions(pcg, cluster, found), player).actions
        passes.append(actions["F"].ps + actions["B"].ps)
        reduced.append(round(1e12 * sum(t.total().comm_s for t in found.reductions)))
    level = len(request.cluster.levels) - 1
    after = [0] * len(keys)
    for edge in edges_of(lowered, [(0,)] * len(keys), request.cluster, level):
        back = edge.backward.ps if edge.backward else 0
        for between in range(edge.source, edge.target):
            after[between] += edge.forward.ps + back
    return Items(whole, tuple(passes), tuple(reduced), tuple(after))


def _split(
    costs: dict[int, Items], devices: int, microbatches: int
) -> list[tuple[int, int, int]] | None:
    """(first item, last item + 1, devices) of the stages whose slowest takes the least.

    A[j][m] = min over i, r of max(A[i][m - r], what crosses behind i, T(i, j, r)): the slowest
    stage of the first j items on m devices.
    """
    if not costs:
        return None
    count = len(next(iter(costs.values())).passes_ps)
    sums = {
        size: [list(_sums(found.passes_ps)), list(_sums(found.reduced_ps))]
        for size, found in costs.items()
    }
    best: dict[tuple[int, int], float] = {(0, 0): 0.0}
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for last in range(1, count + 1):
        for used in range(1, devices + 1):
            for size, (passes, reduced) in sums.items():
                for first in range(last):
                    before = best.get((first, used - size))
                    if before is None:
                        continue
                    own = passes[last] - passes[first]
                    own += (reduced[last] - reduced[first]) / microbatches
                    crossing = costs[size].after_ps[first - 1] if first else 0
                    slowest = max(before, own, crossing)
                    if slowest < best.get((last, used), inf):
                        best[last, used] = slowest
                        came[last, used] = first, size
    if (count, devices) not in best:
        return None
    split, at = [], (count, devices)
    while at != (0, 0):
        first, size = came[at]
        split.append((first, at[0], size))
        at = first, at[1] - size
    return split[::-1]


def _sums(values: Sequence[int]) -> Iterator[int]:
    total = 0
    yield total
    for value in values:
        total += value
        yield total


def _plan(
    request: Request,
    base: Decisions,
    costs: dict[int, Items],
    split: Sequence[tuple[int, int, int]],
    microbatches: int,
) -> Decisions:
    keys = stage_items(request.graph)
    stages: list[Stage] = []
    nodes: dict[str, NodeDecision] = {}
    begin = 0
    for first, last, size in split:
        whole = costs[size].decisions
        own = set(keys[first:last])
        stages.append(Stage(keys[first:last], (range(begin, begin + size),), whole.mesh))
        begin += size
        prefixes = {f.key: f.prefix or f.node.key for f in request.graph.flat()}
        nodes |= {n.key: n for n in whole.nodes if prefixes[n.key] in own}
    if len(stages) == 1:
        whole = costs[split[0][2]].decisions
        return replace(
            base, stages=one_stage(whole.mesh), nodes=whole.nodes, num_microbatches=microbatches
        )
    return replace(
        base,
        stages=tuple(stages),
        nodes=tuple(nodes.values()),
        num_microbatches=microbatches,
        schedule="1f1b",
    )
