"""Pipelines as others plan them: GPipe's and Whale's equal stages, PipeDream's dynamic program.

For PipeDream each item of the model is priced as a stage of its own, so what a stage costs is the
sum over its items. Stages are ranges of items in execution order; a stage has one device, or
several that replicate it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

from parloom.comparators.baselines import plain
from parloom.comparators.layers import chain_of
from parloom.cost.actions import Stage as Actions
from parloom.cost.pipeline import play_stage, send
from parloom.cost.simulate import Simulator
from parloom.cost.step import priced
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import staged
from parloom.ir.mesh import Cluster, Mesh, part_of, part_sizes
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.pcg import TIME
from parloom.ir.plan import (
    GLOBAL,
    ActivationDecision,
    Decisions,
    NodeDecision,
    Stage,
    one_stage,
)
from parloom.ir.regular_parts import RegularPart, regular_parts
from parloom.ir.stages import ARRIVING, Crossing, Cut, item_key, of_stage, stage_items
from parloom.search.request import Request, Say

# Microbatches for each stage beyond which a pipeline's bubble is not worth smaller products.
MOST_FOR_EACH = 8


@dataclass(frozen=True, slots=True)
class Items:
    """What the items cost on so many devices that replicate them: picoseconds of a microbatch, and
    to reduce their gradients once a step; on each device bytes that are held all the time, that are
    kept for a microbatch in flight, and that are there beside them while it runs.
    """

    decisions: Decisions
    passes_ps: tuple[int, ...]
    reduced_ps: tuple[int, ...]
    held_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    passing_bytes: tuple[int, ...]
    sent: tuple["Sent", ...]

    def after_ps(self) -> list[int]:
        """What the values take that cross behind each item where all are in a row."""
        found = [0] * len(self.passes_ps)
        for value in self.sent:
            for between in range(value.source, max(value.targets)):
                found[between] += value.ps
        return found


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that item `source` makes and others read: how long it takes to send a microbatch of
    it to another stage, and its gradient back.
    """

    source: int
    targets: tuple[int, ...]
    ps: int


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
    devices = request.cluster.num_devices
    for microbatches, costs in item_costs(request, base):
        chosen = split(costs, devices, microbatches)
        if chosen is not None:
            say(f"pipedream: {microbatches} microbatches, {len(chosen)} stages")
            wholes = {size: found.decisions for size, found in costs.items()}
            stages = [(*own, wholes[len(own[1])]) for own in _ranges(request, chosen)]
            yield replicated(request, base, stages, microbatches)


def item_costs(request: Request, base: Decisions) -> Iterator[tuple[int, dict[int, Items]]]:
    """What the items cost by numbers of microbatches and sizes of stages, as far as the samples
    divide so.
    """
    devices = request.cluster.num_devices
    sizes = sorted({1, devices, *part_sizes(request.cluster)})
    for microbatches in _counts(request, base, devices):
        costs = {size: _items(request, base, size, microbatches) for size in sizes}
        yield microbatches, {size: found for size, found in costs.items() if found is not None}


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
            try:
                wholes = [
                    next(plain("data_parallel", graph, own, microbatches), None)
                    for own in (part_of(part.cluster, len(devices)) for part, devices in groups)
                ]
            except (LayoutError, InputError):
                continue
            stages = [
                (keys[first:last], devices, whole)
                for (first, last), (_, devices), whole in zip(
                    pairwise(ends), groups, wholes, strict=True
                )
                if whole is not None
            ]
            if len(stages) == len(groups):
                yield replicated(request, base, stages, microbatches)


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


def _items(request: Request, base: Decisions, size: int, microbatches: int) -> Items | None:
    """Every item as a stage of its own, on `size` devices; None where samples do not divide."""
    graph, cluster = request.graph, part_of(request.cluster, size)
    try:
        whole = next(plain("data_parallel", graph, cluster, microbatches), None)
        if whole is None:
            return None
        keys = stage_items(graph)
        apart = replace(
            base,
            stages=tuple(Stage((key,), (range(size),), whole.mesh) for key in keys),
            nodes=whole.nodes,
            num_microbatches=microbatches,
        )
        parts = staged(factorize(graph), apart)
        costs = _Costs(request, cluster)
        each = [costs.of(own, of_stage(apart, parts, i)) for i, own in enumerate(parts.graphs)]
    except (LayoutError, InputError):
        return None
    sent = tuple(
        Sent(c.source, c.targets, _crossing_ps(parts, c, request.cluster, size, microbatches))
        for c in parts.crossings
    )
    passes, reduced, held, kept, passing = zip(*each, strict=True)
    return Items(whole, passes, reduced, held, kept, passing, sent)


class _Costs:
    """What items take; calls of one block with the same layouts are priced once."""

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self.request, self.cluster = request, cluster
        self.player = Simulator()
        self.known: dict[object, tuple[int, ...]] = {}

    def of(self, graph: Graph, decisions: Decisions) -> tuple[int, ...]:
        """The numbers of `Items`, in their order."""
        owned = stage_items(graph)
        (item,) = (i for i in graph.main.body if item_key(i) in owned)
        key: object = item_key(item)
        if isinstance(item, Call):
            start = len(item.prefix)
            chosen = tuple((n.key[start:], n.factors) for n in decisions.nodes)
            key = item.function, chosen, len(graph.leaving), len(graph.of_kind(ARRIVING))
        if key not in self.known:
            pcg = lower(graph, decisions)
            kernels = self.request.machine.kernels
            found = priced(pcg, self.cluster, decisions, self.request.optimizer, kernels)
            actions = play_stage("", Actions(pcg, self.cluster, found), self.player).actions
            forward, backward = actions["F"], actions["B"]
            reduced = round(1e12 * sum(t.total().comm_s for t in found.reductions))
            kept = max(0, sum(forward.memory.net))
            most = max(forward.memory.peak, sum(forward.memory.net) + backward.memory.peak)
            self.known[key] = (
                forward.ps + backward.ps,
                reduced,
                sum(found.parameters.stored_bytes().values()),
                kept,
                # Every stage has the whole batch among its buffers.
                max(0, most - kept) + found.parameters.held_bytes(),
            )
        return self.known[key]


def _crossing_ps(
    parts: Cut, crossing: Crossing, cluster: Cluster, size: int, microbatches: int
) -> int:
    """How long a value of a microbatch travels between stages, there and back."""
    boundary = parts.graphs[crossing.source].boundary
    assert boundary is not None
    name, spec = crossing.value.name, crossing.value.spec
    cut_in_time = boundary.in_time[name].shard(TIME) is not None
    num_bytes = spec.num_bytes / (microbatches if cut_in_time else 1) / size
    sent = send(num_bytes, len(cluster.levels) - 1, cluster).ps
    return sent * (2 if name in boundary.flowing else 1)


def split(
    costs: dict[int, Items], devices: int, microbatches: int
) -> list[tuple[int, int, int]] | None:
    """(first item, last item + 1, devices) of the stages whose slowest takes the least.

    A[j][m] = min over i, r of max(A[i][m - r], what crosses behind i, T(i, j, r)): the slowest
    stage of the first j items on m devices, where r divides m - r, so that no stage lies over more
    nodes than it needs.
    """
    if not costs:
        return None
    count = len(next(iter(costs.values())).passes_ps)
    sums = {
        size: [list(_sums(found.passes_ps)), list(_sums(found.reduced_ps)), found.after_ps()]
        for size, found in costs.items()
    }
    best: dict[tuple[int, int], float] = {(0, 0): 0.0}
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for last in range(1, count + 1):
        for used in range(1, devices + 1):
            for size, (passes, reduced, after) in sums.items():
                if (used - size) % size:
                    continue
                for first in range(last):
                    before = best.get((first, used - size))
                    if before is None:
                        continue
                    once = (reduced[last] - reduced[first]) / microbatches
                    own = passes[last] - passes[first] + once
                    crossing = after[first - 1] if first else 0
                    slowest = max(before, own, crossing)
                    if slowest < best.get((last, used), inf):
                        best[last, used] = slowest
                        came[last, used] = first, size
    if (count, devices) not in best:
        return None
    found, at = [], (count, devices)
    while at != (0, 0):
        first, size = came[at]
        found.append((first, at[0], size))
        at = first, at[1] - size
    return found[::-1]


def _sums(values: Sequence[int]) -> Iterator[int]:
    total = 0
    yield total
    for value in values:
        total += value
        yield total


def replicated(
    request: Request,
    base: Decisions,
    chosen: Sequence[tuple[Sequence[str], range, Decisions]],
    microbatches: int,
) -> Decisions:
    """The plan of stages of these items that their devices replicate, as in a plan of all items on
    as many devices, by 1F1B.
    """
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
