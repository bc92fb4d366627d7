"""Pipelines as others plan them: GPipe's and Whale's equal stages, PipeDream's dynamic program.

Stages are ranges of items in execution order; a stage has one device, or several that replicate it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np

from parloom.comparators.baselines import plain
from parloom.comparators.layers import chain_of
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call
from parloom.ir.mesh import Cluster, Mesh, part_of, part_sizes
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import (
    GLOBAL,
    ActivationDecision,
    Decisions,
    NodeDecision,
    Stage,
    one_stage,
)
from parloom.ir.regular_parts import RegularPart, crossed, regular_parts
from parloom.ir.stages import stage_items
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.request import Request, Say

# Microbatches for each stage beyond which a pipeline's bubble is not worth smaller products.
MOST_FOR_EACH = 8


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
    for microbatches in _counts(request, base, count):
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
    for costs in item_costs(request, base):
        chosen = split(costs, request.cluster)
        if chosen is not None:
            wholes = {size: found.whole for size, found in costs.items()}
            stages = [(*own, wholes[len(own[1])]) for own in _ranges(request, chosen)]
            plan = replicated(request, base, stages)
            say(f"pipedream: {plan.num_microbatches} microbatches, {len(chosen)} stages")
            yield plan


def item_costs(request: Request, base: Decisions) -> Iterator[dict[int, ItemCosts]]:
    """What the items cost by sizes of stages that replicate them, for each number of microbatches
    that the samples divide into; sizes over which they do not divide are left out.
    """
    graph = request.graph
    pricer = Pricer(request, factorize(graph), stage_items(graph), request.machine)
    for microbatches in _counts(request, base, request.cluster.num_devices):
        found = costs_by_size(request, base, pricer, microbatches)
        if found:
            yield found


def costs_by_size(
    request: Request, base: Decisions, pricer: Pricer, microbatches: int
) -> dict[int, ItemCosts]:
    """What the items cost on groups of devices of each size that replicate them."""
    cluster, found = request.cluster, {}
    for size in sorted({1, cluster.num_devices, *part_sizes(cluster)}):
        whole = _replicas(request, base, cluster, size, microbatches)
        if whole is not None:
            with suppress(LayoutError, InputError):
                found[size] = pricer.price(whole)
    return found


def whale(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """Stages that take equally long by the peak rates of their devices, one forward and one
    backward pass in turns, replicated inside (Whale: Jia et al., ATC'22): each type of devices in
    equally many groups, for every number of them. Devices of more memory come first, as first
    stages have most microbatches in flight.
    """
    graph, keys = request.graph, stage_items(request.graph)
    flops = chain_of(graph, factorize(graph)).flops
    (dtype, *_) = (entry.value.spec.dtype for entry in graph.of_kind("parameter"))
    for groups in _groups(request.cluster):
        if len(groups) > len(flops):
            continue
        rates = [len(devices) * part.cluster.device.rate(dtype) for part, devices in groups]
        ends = even(flops, rates)
        for microbatches in _counts(request, base, len(groups)):
            sizes = {part.first: (part.cluster, len(devices)) for part, devices in groups}
            wholes = {
                first: _replicas(request, base, *of_part, microbatches)
                for first, of_part in sizes.items()
            }
            stages = [
                (keys[first:last], devices, whole)
                for (first, last), (part, devices) in zip(pairwise(ends), groups, strict=True)
                if (whole := wholes[part.first]) is not None
            ]
            if len(stages) == len(groups):
                yield replicated(request, base, stages)


def _groups(cluster: Cluster) -> Iterator[list[tuple[RegularPart, range]]]:
    """Neighboring devices, as many groups of each regular part, the largest number first."""
    parts = sorted(regular_parts(cluster), key=lambda part: -part.cluster.device.memory_bytes)
    sizes = [[p.stride for p in part.cluster.prime_axes()] for part in parts]
    counts = [
        {1, *(len(p.devices) // size for size in own)} for p, own in zip(parts, sizes, strict=True)
    ]
    for count in sorted(set.intersection(*counts), reverse=True):
        found = []
        for part in parts:
            size = len(part.devices) // count
            begins = part.devices[::size]
            found += [(part, range(begin, begin + size)) for begin in begins]
        yield found


def even(flops: Sequence[float], rates: Sequence[float]) -> list[int]:
    """Where ranges of items begin and end that have FLOPs in proportion to `rates`, each at least
    one item: each ends where the sum is nearest to the share of those until then.
    """
    sums, ends, count = [0.0, *accumulate(flops)], [0], len(rates)
    shares = list(accumulate(rates))
    for index in range(1, count):
        wanted = sums[-1] * shares[index - 1] / shares[-1]
        among = range(ends[-1] + 1, len(flops) - count + index + 1)
        ends.append(min(among, key=lambda at: abs(sums[at] - wanted)))
    return [*ends, len(flops)]


def _ranges(
    request: Request, chosen: Sequence[tuple[int, int, int]]
) -> list[tuple[Sequence[str], range]]:
    """The items and the devices of stages (first item, last item + 1, devices) in a row."""
    keys = stage_items(request.graph)
    ends = accumulate(size for *_, size in chosen)
    return [
        (keys[first:last], range(end - size, end))
        for (first, last, size), end in zip(chosen, ends, strict=True)
    ]


def _counts(request: Request, base: Decisions, stages: int) -> tuple[int, ...]:
    """Numbers of microbatches to try: that of `base` where it has one.

    Raises `InputError` where samples cannot be cut so.
    """
    legal = request.microbatch_counts(factorize(request.graph))
    asked = base.num_microbatches
    if asked == 1:
        return tuple(count for count in legal if count <= MOST_FOR_EACH * stages)
    if request.batch_semantics == GLOBAL and asked not in (
        legal_microbatches(factorize(request.graph)).counts
    ):
        raise InputError(f"no plan of {asked} microbatches: the samples do not divide into them")
    return (asked,)


def _replicas(
    request: Request, base: Decisions, cluster: Cluster, size: int, microbatches: int
) -> Decisions | None:
    """The model on `size` devices that replicate it; None where samples do not divide."""
    try:
        part = part_of(cluster, size)
        found = next(plain("data_parallel", request.graph, part, microbatches), None)
    except (LayoutError, InputError):
        return None
    if found is None:
        return None
    return replace(base, stages=found.stages, nodes=found.nodes, num_microbatches=microbatches)


def split(costs: Mapping[int, ItemCosts], cluster: Cluster) -> list[tuple[int, int, int]] | None:
    """(first item, last item + 1, devices) of the stages whose slowest takes the least.

    A[m][j] = min over i, r of max(A[m - r][i], T(i, j, r)): the slowest stage of the first j items
    on m devices, where r divides m - r, so that no stage lies over more nodes than it needs. T is
    what a stage takes of a step, or what crosses at either end of it, over the links there.
    """
    devices, count = cluster.num_devices, len(next(iter(costs.values())).passes_ps)
    between, crossing = {}, {}
    for size, own in costs.items():
        sums = np.concatenate([[0], np.cumsum(own.adds_ps)])
        between[size] = (sums - sums[:, None] + own.stage_ps).astype(float)
        between[size][np.tril_indices(count + 1)] = np.inf
        crossing[size] = np.pad(own.num_microbatches * own.crossing_ps, ((0, 0), (1, 0)))
    best = np.full((devices + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for used, size in product(range(1, devices + 1), costs):
        stage, sent = range(used - size, used), crossing[size]
        if stage.start < 0 or stage.start % size:
            continue
        enters, leaves = (
            sent[min(len(sent) - 1, crossed((stage, [end]), cluster))]
            for end in (stage.start - 1, stage.stop)
        )
        before = np.maximum(best[stage.start], enters)
        slowest = np.maximum(before[:, None], between[size])
        first = slowest.argmin(axis=0)
        least = np.maximum(slowest[first, np.arange(count + 1)], leaves)
        for last in np.flatnonzero(least < best[used]):
            best[used, last] = least[last]
            came[used, int(last)] = int(first[last]), size
    at, found = (devices, count), []
    if not np.isfinite(best[at]):
        return None
    while at != (0, 0):
        first_item, size = came[at]
        found.append((first_item, at[1], size))
        at = at[0] - size, first_item
    return found[::-1]


def replicated(
    request: Request,
    base: Decisions,
    chosen: Sequence[tuple[Sequence[str], range, Decisions]],
) -> Decisions:
    """The plan of stages of these items that their devices replicate, as in a plan of all items on
    as many devices, by 1F1B.
    """
    microbatches = chosen[0][2].num_microbatches
    stages: list[Stage] = []
    nodes: dict[str, NodeDecision] = {}
    prefixes = {f.key: f.prefix or f.node.key for f in request.graph.flat()}
    for items, devices, whole in chosen:
        own = set(items)
        stages.append(Stage(tuple(items), (devices,), whole.mesh))
        nodes |= {n.key: n for n in whole.nodes if prefixes[n.key] in own}
    if len(stages) == 1:
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
