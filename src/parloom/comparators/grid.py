"""The best of a grid of plans that a good engineer would try by a rule of thumb.

For every layout of the rule: microbatches, levels of ZeRO, sequence parallelism, sharding within a
node, and recomputation of nothing, of what is cheap, or of whole blocks. More microbatches and more
recomputation hold less and take no less time. So of a layout the fewest microbatches that fit are
looked for, more is recomputed only where more microbatches were needed, and whatever takes longer
than the best plan so far even with the fewest microbatches is left.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from parloom.comparators.baselines import Rule, layouts
from parloom.comparators.configuration import (
    SELECTIVE,
    Configuration,
    LaidOut,
    laid_out,
)
from parloom.errors import InputError, LayoutError, ParloomError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call
from parloom.ir.plan import Decisions, Prediction
from parloom.rewrite.regions import regions
from parloom.search.request import Request

# Plans that are simulated where a rule is asked for by its name.
MOST = 20
LEVELS = ("none", SELECTIVE, "full")
# After so many degrees in a row that are no better, others are left.
IN_VAIN = 2
# Components of memory that are as large with any number of microbatches, and that are in proportion
# to their samples; what is received (`communication`) is of both kinds.
STORED = frozenset({"weights", "gradients", "optimizer"})
PER_SAMPLE = frozenset({"activations", "recomputation", "buffers"})


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of the grid with its simulated step."""

    chosen: Configuration
    decisions: Decisions
    prediction: Prediction

    @property
    def stored_bytes(self) -> int:
        """Of the peak, weights, their gradients and their states."""
        return sum(size for name, size in self.prediction.memory if name in STORED)

    @property
    def kept_bytes(self) -> int:
        """Of the peak, what is in proportion to the samples of a microbatch."""
        return sum(size for name, size in self.prediction.memory if name in PER_SAMPLE)


class Grid:
    """The points of a rule for a question, with the dtypes of `base`; at most `most` of them are
    simulated.
    """

    def __init__(self, request: Request, rule: Rule, base: Decisions, most: int) -> None:
        self.request, self.rule, self.base, self.left = request, rule, base, most
        self.factored = factorize(request.graph)
        self.counts = request.microbatch_counts(self.factored)
        blocks = any(isinstance(item, Call) for item in request.graph.main.body)
        self.levels = LEVELS if blocks or regions(request.graph) else LEVELS[:1]
        self.laid: dict[Configuration, LaidOut] = {}
        self.points: dict[Configuration, Point | None] = {}
        self.refused: ParloomError | None = None
        self.best_s = inf

    def run(self) -> Iterator[Point]:
        """Points that fit, each faster than those before; where none does, the smallest.

        Raises `LayoutError` or `InputError` where none can be lowered.
        """
        tried: list[Configuration] = []
        best: Point | None = None
        in_vain = 0
        for chosen, laid in self._layouts():
            tried.append(chosen)
            self.laid[_layout(chosen)] = laid
            found = self._fastest(chosen)
            if found is not None:
                best, in_vain = found, 0
                yield found
            elif best is not None:
                in_vain += 1
            if self.left <= 0 or in_vain == IN_VAIN:
                break
        point = best or self._smallest(tried)
        for change in self._changes(point.chosen):
            varied = replace(point.chosen, **change)
            found = self._fewest(varied, self._counts(varied))
            if found is not None:
                point = best = found
                yield found
        if best is None:
            yield self._smallest(())

    def _layouts(self) -> Iterator[tuple[Configuration, LaidOut]]:
        """With what holds least of a layout: a level of ZeRO, and sequence parallelism."""
        request, base = self.request, self.base
        for chosen, laid in layouts(
            self.rule,
            request.graph,
            request.cluster,
            self.counts[0],
            self.factored,
            sequence_parallel=True,
        ):
            yield (
                replace(
                    chosen,
                    zero=self.rule.zeros[0],
                    master_dtype=base.master_dtype,
                    reduce_dtype=base.reduce_dtype,
                ),
                laid,
            )

    def _fastest(self, chosen: Configuration) -> Point | None:
        """The fastest plan of a layout that fits; None where it is no faster than the best."""
        found: Point | None = None
        counts = self._counts(chosen)
        for level in self.levels:
            found = self._fewest(replace(chosen, recompute=level), counts) or found
            plain = self.points.get(_divided(chosen, counts[0]))
            # More recomputation is in vain.
            if plain is None or self._fits(plain) or plain.prediction.step_s >= self.best_s:
                break
            if plain.stored_bytes > self.request.limit_bytes:
                break
        return found

    def _counts(self, chosen: Configuration) -> list[int]:
        """The numbers of microbatches that divide the samples of a rank, too."""
        samples = chosen.microbatch * chosen.num_microbatches
        return [n for n in self.counts if samples % n == 0 and n >= chosen.num_microbatches]

    def _fits(self, point: Point) -> bool:
        return point.prediction.peak_bytes <= self.request.limit_bytes

    def _fewest(self, chosen: Configuration, counts: list[int]) -> Point | None:
        """With the fewest microbatches that fit, as far as peaks tell: at least twice as many as do
        not; None where that is no faster than the best plan.
        """
        index = 0
        while index < len(counts):
            point = self._point(_divided(chosen, counts[index]))
            if point is None or point.prediction.step_s >= self.best_s:
                return None
            if self._fits(point):
                self.best_s = point.prediction.step_s
                return point
            others = point.prediction.peak_bytes - point.kept_bytes
            room = max(1, self.request.limit_bytes - others)
            needed = min(counts[-1], counts[index] * max(2.0, point.kept_bytes / room))
            index = max(index + 1, bisect_left(counts, needed))
        return None

    def _changes(self, chosen: Configuration) -> Iterator[Mapping[str, Any]]:
        """What is tried, one after the other, of the best plan only."""
        if chosen.sequence_parallel:
            yield {"sequence_parallel": False}
        inner = chosen.tensor * chosen.context * chosen.copies
        shard, rest = divmod(self.request.cluster.levels[0].size, inner)
        if not rest and 1 < shard < chosen.data:
            yield {"shard": shard}
        for zero in self.rule.zeros[1:]:
            yield {"zero": zero}

    def _smallest(self, plain: Sequence[Configuration]) -> Point:
        """Of the plans that hold least of each layout, and of all that were simulated."""
        self.left = max(self.left, len(plain))
        for chosen in plain:
            least = replace(chosen, recompute=self.levels[-1])
            self._point(_divided(least, self._counts(chosen)[-1]))
        points = [point for point in self.points.values() if point is not None]
        if not points:
            assert self.refused is not None, "a rule has a layout"
            raise self.refused
        return min(points, key=lambda p: (p.prediction.peak_bytes, p.prediction.step_s))

    def _point(self, chosen: Configuration) -> Point | None:
        """A point, simulated; None where it cannot be lowered, or enough were simulated."""
        if chosen in self.points:
            return self.points[chosen]
        if self.left <= 0:
            return None
        try:
            self.points[chosen] = self._simulated(chosen)
            self.left -= 1
        except (InputError, LayoutError) as error:
            self.refused, self.points[chosen] = error, None
        return self.points[chosen]

    def _simulated(self, chosen: Configuration) -> Point:
        request, layout = self.request, _layout(chosen)
        if layout not in self.laid:
            self.laid[layout] = laid_out(request.graph, chosen, request.cluster, self.factored)
        decisions = self.laid[layout].decisions(chosen)
        decisions = replace(decisions, batch_semantics=self.base.batch_semantics)
        return Point(chosen, decisions, request.predict(decisions, self.factored))


def _layout(chosen: Configuration) -> Configuration:
    """What the layout of a configuration depends on."""
    return replace(
        chosen, zero=0, recompute=LEVELS[0], num_microbatches=1,
        microbatch=chosen.microbatch * chosen.num_microbatches,
    )  # fmt: skip


def _divided(chosen: Configuration, num_microbatches: int) -> Configuration:
    """As many samples a rank in so many microbatches."""
    samples = chosen.microbatch * chosen.num_microbatches
    return replace(
        chosen, microbatch=samples // num_microbatches, num_microbatches=num_microbatches
    )
