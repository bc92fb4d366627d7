"""Pipelines of equal stages, as Megatron-LM's users try them: estimated, and written as plans.

Tensor parallelism is inside of a node, data parallelism around it, and stages around both; each has
equally many blocks, with the embedding in the first one and the head in the last one. On the part
of the cluster that a stage has, the whole model is planned as one stage. A pipeline is estimated
from the simulated step of that plan, and its stages take their layouts from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import inf

from parloom.comparators.baselines import Rule, layouts
from parloom.comparators.configuration import Configuration, LaidOut
from parloom.comparators.handmade import divided
from parloom.comparators.layers import chain_of
from parloom.errors import InputError, LayoutError
from parloom.ir.expected import Prediction
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import DTYPE_BYTES, Call, Graph
from parloom.ir.mesh import part_sizes
from parloom.ir.plan import Decisions, Stage
from parloom.ir.schedules import round_of
from parloom.ir.stages import stage_items
from parloom.rewrite.rewrites import rewritten
from parloom.search.request import Request

# Chunks of the model on each rank.
CHUNKS = (1, 2, 4)
# Fewer microbatches are larger, and their products faster; a bubble that is longer by more than
# this factor for it is not worth it.
WORTH = 1.1
# After so many sizes of stages, or degrees of tensor parallelism, without a better estimate, others
# are left.
IN_VAIN = 2
# Components of memory that are in proportion to the samples in flight.
PER_SAMPLE = frozenset({"activations", "recomputation", "buffers"})


@dataclass(frozen=True, slots=True)
class Estimate:
    """A pipeline's step and largest peak by a closed form, and what is left of the peak where all
    is recomputed.
    """

    step_s: float
    peak_bytes: float
    least_bytes: float
    chosen: Configuration


def blocks_of(graph: Graph, stages: int) -> tuple[int, ...] | None:
    """How many blocks each of `stages` has: equally many, or one fewer at both ends; None where
    they do not divide so.
    """
    items = {item.prefix for item in graph.main.body if isinstance(item, Call)}
    blocks = len(items.intersection(stage_items(graph)))
    if blocks < stages or (blocks % stages and (blocks + 2) % stages):
        return None
    counts = tuple(divided(blocks, stages))
    return counts if min(counts) else None


def bubble(chosen: Configuration, share: float) -> float:
    """How many times as long as its passes the slowest rank of a pipeline takes for them, which has
    a `share` of the model: the others' are 1 / share - 1 times as long, as p - 1 of
    (n + (p - 1) / v) / n (Narayanan et al., SC'21, sections 2.2.1 and 2.2.2).
    """
    count = chosen.num_microbatches
    return (count + (1 / share - 1) / chosen.interleave) / count


def in_flight(chosen: Configuration) -> float:
    """How many microbatches' activations of the whole model, in parts of a rank's share of it, the
    first rank holds: those of its warm-up and of one pass more.
    """
    ranks, chunks, count = chosen.pipeline, chosen.interleave, chosen.num_microbatches
    warm = ranks - 1
    if chunks > 1:
        warm = 2 * (ranks - 1) + (chunks - 1) * round_of(ranks, count)
    return min(count * chunks, warm + 1) / (ranks * chunks)


def estimate(chosen: Configuration, whole: Prediction, share: float) -> Estimate:
    """The pipeline `chosen`, whose slowest rank has a `share` of the model, from the step of the
    whole model on the devices of one stage.
    """
    kept = sum(size for name, size in whole.memory if name in PER_SAMPLE)
    least = (whole.peak_bytes - kept) / chosen.pipeline
    return Estimate(
        whole.step_s * share * bubble(chosen, share),
        least + kept * in_flight(chosen),
        least,
        chosen,
    )


class Shares:
    """The largest share of a model's FLOPs that a rank of a pipeline has: the head makes the last
    one heavier. An equal share where nothing is known to take FLOPs.
    """

    def __init__(self, graph: Graph, factored: Factored) -> None:
        self.graph, self.flops = graph, chain_of(graph, factored).flops
        self.known: dict[tuple[int, int], float] = {}

    def of(self, chosen: Configuration) -> float:
        """That of the slowest rank."""
        key = ranks, chunks = chosen.pipeline, chosen.interleave
        if key not in self.known:
            ends = accumulate(map(len, _cut(self.graph, self.graph, ranks * chunks)), initial=0)
            stages = [sum(self.flops[a:b]) for a, b in pairwise(ends)]
            most, total = max(sum(stages[rank::ranks]) for rank in range(ranks)), sum(stages)
            self.known[key] = most / total if total else 1 / ranks
        return self.known[key]


class EqualStages:
    """The pipelines of a rule; `left` plans of the whole model on parts are simulated."""

    def __init__(
        self, request: Request, rule: Rule, like: Configuration, levels: Sequence[str], left: int
    ) -> None:
        self.request, self.rule, self.like, self.levels = request, rule, like, levels
        self.left = left
        self.factored: Factored = factorize(request.graph)
        self.counts = request.microbatch_counts(self.factored)[::-1]
        self.shares = Shares(request.graph, self.factored)
        self.laid: dict[tuple[int, int], LaidOut] = {}
        self.whole: dict[Configuration, Prediction | None] = {}
        specs = [entry.value.spec for entry in request.graph.of_kind("parameter")]
        width = DTYPE_BYTES[like.reduce_dtype] if like.reduce_dtype else 0
        # What all ranks that hold the model once hold at least: weights and gradients.
        self.held_bytes: float = sum(
            spec.num_bytes + max(spec.num_bytes, spec.num_bytes // DTYPE_BYTES[spec.dtype] * width)
            for spec in specs
        )

    def ranked(self, best_s: float) -> list[Estimate]:
        """Those that fit and take less than `best_s`, by their estimates, the fastest first."""
        found: list[Estimate] = []
        devices, limit = self.request.cluster.num_devices, self.request.limit_bytes
        fastest, in_vain = inf, 0
        for size in part_sizes(self.request.cluster):
            if blocks_of(self.request.graph, devices // size) is None:
                continue
            each = list(self._of_size(size, best_s))
            found += [e for e in each if e.step_s < best_s and e.peak_bytes <= limit]
            best_s = min([best_s, *(e.step_s for e in found)])
            least = min((e.step_s for e in each), default=inf)
            in_vain = in_vain + 1 if fastest <= least < inf else 0
            fastest = min(fastest, least)
            if self.left <= 0 or in_vain == IN_VAIN:
                break
        return sorted(found, key=lambda e: e.step_s)

    def deeper(self, chosen: Configuration) -> Estimate | None:
        """The same with more recomputation, where that may fit."""
        for level in self.levels[self.levels.index(chosen.recompute) + 1 :]:
            found = self._estimate(replace(chosen, recompute=level))
            if found is not None and found.peak_bytes <= self.request.limit_bytes:
                return found
        return None

    def decisions(self, chosen: Configuration) -> Decisions:
        """The plan of a pipeline."""
        size = chosen.ranks // chosen.pipeline
        whole = self._decisions(chosen)
        graph = rewritten(self.request.graph, whole.rewrites)
        count = chosen.pipeline * chosen.interleave
        stages = []
        for index, items in enumerate(_cut(self.request.graph, graph, count)):
            begin = index % chosen.pipeline * size
            stages.append(Stage(items, (range(begin, begin + size),), whole.mesh))
        return replace(whole, stages=tuple(stages), schedule=chosen.schedule_name)

    def _of_size(self, size: int, best_s: float) -> Iterator[Estimate]:
        """Estimates on stages of `size` devices: of each degree of tensor parallelism with as
        little recomputation as fits.
        """
        cluster, graph = self.request.on(size).cluster, self.request.graph
        count = self.request.cluster.num_devices // size
        in_vain = 0
        whole = Rule(self.rule.zeros)  # no weight is split
        for layout, laid in chain(
            layouts(whole, graph, cluster, self.like, self.factored),
            layouts(self.rule, graph, cluster, self.like, self.factored) if size > 1 else (),
        ):
            if layout.tensor > self.request.cluster.levels[0].size:
                return
            if self.held_bytes > self.request.limit_bytes * count * layout.tensor:
                continue
            self.laid[count, layout.tensor] = laid
            each = list(self._of_layout(replace(layout, pipeline=count), best_s))
            yield from each
            ranks = count * layout.tensor
            least = min((e.least_bytes * ranks for e in each), default=0.0)
            self.held_bytes = max(self.held_bytes, least)
            fitting = [e.step_s for e in each if e.peak_bytes <= self.request.limit_bytes]
            # Where only memory is in the way, more ranks may help.
            in_vain = in_vain + 1 if fitting and min(fitting) >= best_s else 0
            best_s = min([best_s, *fitting])
            if self.left <= 0 or in_vain == IN_VAIN:
                return

    def _of_layout(self, layout: Configuration, best_s: float) -> Iterator[Estimate]:
        chunks = [
            v for v in CHUNKS
            if v == 1 or blocks_of(self.request.graph, layout.pipeline * v) is not None
        ]  # fmt: skip
        limit = self.request.limit_bytes
        for level in self.levels:
            each = list(self._of_level(replace(layout, recompute=level), chunks, best_s))
            yield from each
            fits = any(e.peak_bytes <= limit for e in each)
            slow = not any(e.step_s < best_s for e in each)
            if fits or slow or min(e.least_bytes for e in each) > limit:
                return

    def _of_level(
        self, layout: Configuration, chunks: Sequence[int], best_s: float
    ) -> Iterator[Estimate]:
        """Estimates with ever fewer microbatches, as long as they fit and are faster for it."""
        samples = layout.microbatch * layout.num_microbatches
        least, before = best_s, inf
        for count in self.counts:
            if samples % count or count < layout.num_microbatches:
                continue
            chosen = replace(layout, num_microbatches=count, microbatch=samples // count)
            # Interleaving takes as many microbatches as ranks, or a multiple (Megatron-LM).
            legal = [v for v in chunks if v == 1 or count % layout.pipeline == 0]
            last = replace(chosen, interleave=legal[-1])
            longer = bubble(last, self.shares.of(last))
            if longer > WORTH * before:
                return
            tried = [self._estimate(replace(chosen, interleave=v)) for v in legal]
            each = [one for one in tried if one is not None]
            yield from each
            fits = any(e.peak_bytes <= self.request.limit_bytes for e in each)
            fastest = min((e.step_s for e in each), default=inf)
            if not fits or fastest >= least:
                return
            least, before = fastest, longer

    def _estimate(self, chosen: Configuration) -> Estimate | None:
        """None where the model cannot be lowered so, or enough was simulated."""
        key = replace(chosen, interleave=1)
        if key not in self.whole:
            if self.left <= 0:
                return None
            self.left -= 1
            part = self.request.on(chosen.ranks // chosen.pipeline)
            try:
                self.whole[key] = part.predict(self._decisions(chosen), self.factored)
            except (InputError, LayoutError):
                self.whole[key] = None
        whole = self.whole[key]
        return None if whole is None else estimate(chosen, whole, self.shares.of(chosen))

    def _decisions(self, chosen: Configuration) -> Decisions:
        """The plan of the whole model on the devices of one stage."""
        found = self.laid[chosen.pipeline, chosen.tensor].decisions(chosen)
        return replace(found, batch_semantics=self.request.batch_semantics)


def _cut(graph: Graph, own: Graph, count: int) -> Iterator[tuple[str, ...]]:
    """The items of `own`, which is `graph` rewritten, in stages of equally many blocks of `graph`;
    a stage begins with its first block.
    """
    counts = blocks_of(graph, count)
    assert counts is not None, "stages that the blocks divide over"
    calls = {item.prefix for item in graph.main.body if isinstance(item, Call)}
    keys = stage_items(own)
    begins = [index for index, key in enumerate(keys) if key in calls]
    ends = [*(begins[n] for n in accumulate(counts[:-1])), len(keys)]
    yield from (keys[a:b] for a, b in zip([0, *ends], ends, strict=False))
