"""The best of a grid of plans that a good engineer would try by a rule of thumb.

For every layout of the rule: microbatches, levels of ZeRO, sequence parallelism, sharding within a
node, and recomputation of nothing, of what is cheap, or of whole blocks. More microbatches and more
recomputation hold less and take no less time. So of a layout the fewest microbatches that fit are
looked for, more is recomputed only where more microbatches were needed, and whatever takes longer
than the best plan so far even with the fewest microbatches is left. Mixtures of experts are tried
after that with their experts over all numbers of ranks, so that they are never worse for it.
Pipelines come last, by their estimates (`equal_stages`), as long as these are better than the best.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf

from parloom.comparators.baselines import Rule, layouts
from parloom.comparators.configuration import (
    SELECTIVE,
    Configuration,
    LaidOut,
    laid_out,
    num_experts,
)
from parloom.comparators.equal_stages import PER_SAMPLE, EqualStages
from parloom.errors import InputError, LayoutError, ParloomError
from parloom.ir.expected import Prediction
from parloom.ir.factors import factorize
from parloom.ir.graph import Call
from parloom.ir.plan import Decisions
from parloom.rewrite.pad import PADS
from parloom.rewrite.regions import regions
from parloom.search.pinned import Pinned
from parloom.search.request import Request

# Plans that are simulated where a rule is asked for by its name.
MOST = 20
LEVELS = ("none", SELECTIVE, "full")
# After so many degrees in a row that are no better, others are left.
IN_VAIN = 2
# Components of memory that are as large with any number of microbatches; what is received
# (`communication`) is so in part.
STORED = frozenset({"weights", "gradients", "optimizer"})
# Beside so many plans that are simulated, pipelines, and plans of which these are estimated.
PIPELINES, ESTIMATED = 1 / 4, 1 / 2


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
    simulated, and as many with experts over ranks.
    """

    def __init__(self, request: Request, rule: Rule, base: Decisions, most: int) -> None:
        self.request, self.rule, self.base = request, rule, base
        self.most = self.left = most
        self.factored = factorize(request.graph)
        self.counts = request.microbatch_counts(self.factored)
        blocks = any(isinstance(item, Call) for item in request.graph.main.body)
        self.levels = LEVELS if blocks or regions(request.graph) else LEVELS[:1]
        self.laid: dict[Configuration, LaidOut] = {}
        self.points: dict[Configuration, Point | None] = {}
        self.refused: ParloomError | None = None
        self.tried: list[Configuration] = []
        self.best: Point | None = None
        self.pipelines: EqualStages | None = None

    def run(self) -> Iterator[Point]:
        """Points that fit, each faster than those before; where none does, the smallest.

        Raises `LayoutError` or `InputError` where none can be lowered.
        """
        request, in_vain = self.request, 0
        like = _least(self.rule, self.counts[0], self.base, request.pinned)
        for chosen, laid in layouts(self.rule, request.graph, request.cluster, like, self.factored):
            self.tried.append(chosen)
            self.laid[_layout(chosen)] = laid
            found = self._fastest(chosen)
            if found is not None:
                yield found
            in_vain = in_vain + 1 if found is None and self.best is not None else 0
            if self.left <= 0 or in_vain == IN_VAIN:
                break
        plain = self.best or self._smallest(self.tried)
        yield from self._varied(plain)
        yield from self._with_experts(plain.chosen)
        if self.rule.stages:
            yield from _in_stages(self)
        if self.best is None:
            yield self._smallest(())

    def _varied(self, point: Point) -> Iterator[Point]:
        """Changes of a point, one after the other, that are better."""
        for change in self.rule.changes(point.chosen, self.request.cluster):
            varied = replace(point.chosen, **change)
            found = self._fewest(varied, self._counts(varied))
            if found is not None:
                point = found
                yield found

    def _with_experts(self, plain: Configuration) -> Iterator[Point]:
        """Experts over all numbers of ranks, in the layout of `plain` and in others."""
        found = sorted(self.tried, key=lambda chosen: chosen.tensor != plain.tensor)
        experts = num_experts(self.laid[_layout(found[0])].program)
        if not experts:
            return
        self.left += self.most
        known, in_vain = self.best, 0
        for layout in found:
            best = self.best
            for degree in _degrees(layout, experts):
                point = self._fastest(replace(layout, expert=degree))
                if point is not None:
                    yield point
            in_vain = in_vain + 1 if self.best is best is not None else 0
            if self.left <= 0 or in_vain == IN_VAIN:
                break
        if self.best is not None and self.best is not known:
            yield from self._varied(self.best)

    def _fastest(self, chosen: Configuration) -> Point | None:
        """The fastest plan of a layout that fits; None where it is no faster than the best."""
        found: Point | None = None
        counts = self._counts(chosen)
        for level in self.levels:
            found = self._fewest(replace(chosen, recompute=level), counts) or found
            plain = self.points.get(_divided(chosen, counts[0]))
            # More recomputation is in vain.
            if plain is None or self._fits(plain) or not self._is_better(plain):
                break
            if plain.stored_bytes > self.request.limit_bytes:
                break
        return found

    def _counts(self, chosen: Configuration) -> list[int]:
        """The numbers of microbatches that divide the samples of a rank, too."""
        samples = chosen.microbatch * chosen.num_microbatches
        return [n for n in self.counts if samples % n == 0 and n >= chosen.num_microbatches]

    def _is_better(self, point: Point) -> bool:
        return self.best is None or point.prediction.step_s < self.best.prediction.step_s

    def _fits(self, point: Point) -> bool:
        return point.prediction.peak_bytes <= self.request.limit_bytes

    def _fewest(self, chosen: Configuration, counts: list[int]) -> Point | None:
        """With the fewest microbatches that fit, as far as peaks tell: at least twice as many as do
        not; None where that is no faster than the best plan.
        """
        index = 0
        while index < len(counts):
            point = self._point(_divided(chosen, counts[index]))
            if point is None or not self._is_better(point):
                return None
            if self._fits(point):
                self.best = point
                return point
            others = point.prediction.peak_bytes - point.kept_bytes
            room = max(1, self.request.limit_bytes - others)
            needed = min(counts[-1], counts[index] * max(2.0, point.kept_bytes / room))
            index = max(index + 1, bisect_left(counts, needed))
        return None

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
        if chosen.pipeline > 1 and self.pipelines is not None:
            decisions = self.pipelines.decisions(chosen)
            return Point(chosen, decisions, request.predict(decisions, self.factored))
        if layout not in self.laid:
            self.laid[layout] = laid_out(request.graph, chosen, request.cluster, self.factored)
        decisions = self.laid[layout].decisions(chosen)
        decisions = replace(decisions, batch_semantics=self.base.batch_semantics)
        return Point(chosen, decisions, request.predict(decisions, self.factored))


def _in_stages(grid: Grid) -> Iterator[Point]:
    """Pipelines that are faster than the best plan, those with the best estimates first."""
    like = replace(_least(grid.rule, grid.counts[0], grid.base, grid.request.pinned), zero=1)
    left = round(grid.most * ESTIMATED)
    grid.pipelines = EqualStages(grid.request, grid.rule, like, grid.levels, left)
    grid.left = max(1, round(grid.most * PIPELINES))
    queue = grid.pipelines.ranked(grid.best.prediction.step_s if grid.best else inf)
    while queue and grid.left > 0:
        one = queue.pop(0)
        if grid.best is not None and one.step_s >= grid.best.prediction.step_s:
            return
        point = grid._point(one.chosen)
        if point is None or not grid._is_better(point):
            continue
        if grid._fits(point):
            grid.best = point
            yield point
        elif (again := grid.pipelines.deeper(one.chosen)) is not None:
            insort(queue, again, key=lambda estimate: estimate.step_s)


def _least(rule: Rule, num_microbatches: int, base: Decisions, pinned: Pinned) -> Configuration:
    """What holds least of any layout: a level of ZeRO, and sequence parallelism."""
    return Configuration(
        zero=rule.zeros[0],
        num_microbatches=num_microbatches,
        sequence_parallel=True,
        master_dtype=base.master_dtype,
        reduce_dtype=base.reduce_dtype,
        pads=pinned.allows_rewrite((PADS,)),
    )


def _layout(chosen: Configuration) -> Configuration:
    """What the layout of a configuration depends on."""
    return replace(
        chosen, zero=0, recompute=LEVELS[0], num_microbatches=1,
        microbatch=chosen.microbatch * chosen.num_microbatches,
    )  # fmt: skip


def _degrees(chosen: Configuration, experts: int) -> Iterator[int]:
    """Over how many ranks experts divide, from many to few: all of those that share the samples
    with those that share weights, or some of those that share the samples.
    """
    every = chosen.data * chosen.tensor
    if chosen.tensor > 1 and experts % every == 0:
        yield every
    both = gcd(chosen.data, experts)
    yield from (degree for degree in range(both, 1, -1) if both % degree == 0)


def _divided(chosen: Configuration, num_microbatches: int) -> Configuration:
    """As many samples a rank in so many microbatches."""
    samples = chosen.microbatch * chosen.num_microbatches
    return replace(
        chosen, microbatch=samples // num_microbatches, num_microbatches=num_microbatches
    )
