"""What the items of a model cost as stages of their own, in the layouts of one plan."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parloom.cost.actions import Stage as Actions
from parloom.cost.pipeline import StageActions, play_stage
from parloom.cost.simulate import Simulator
from parloom.cost.stages import PricedStages
from parloom.cost.step import priced
from parloom.cost.tasks import SHARES
from parloom.cost.timeline import Played
from parloom.ir.factors import Factored
from parloom.ir.lower import lower
from parloom.ir.lower_stages import staged
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.plan import Decisions, Stage
from parloom.ir.regular_parts import slowest_join
from parloom.ir.stages import Cut
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.request import Request

Ints = NDArray[np.int64]
# Operators of models whose items are scaled to the whole: of larger ones what each stage has of its
# own is little, and the whole takes long to play.
FEW_OPERATORS = 2_000
UPDATE = ("REDUCE", "STEP", "GATHER")


@dataclass(frozen=True, eq=False)
class ItemCosts:
    """A plan of one stage, `whole`, and what each item costs in it, [item].

    `passes_ps` are of a microbatch, there and back, `once_ps` of a step; `kept_bytes` of a
    microbatch in flight, `stored_bytes` all along. `sent_ps` is what a microbatch's values take
    that cross the place behind an item, there and back; `stage_ps` what each stage takes of a step
    beyond its items. `edges` are pairs of items of which the
    second reads what the first makes. `shared_ps`, of pairs of items with one weight (first, last,
    ps): summing its gradients where they are in different stages.
    """

    whole: Decisions
    passes_ps: Ints
    once_ps: Ints
    kept_bytes: Ints
    stored_bytes: Ints
    sent_ps: Ints
    stage_ps: int
    edges: tuple[tuple[int, int], ...]
    shared_ps: tuple[tuple[int, int, int], ...]

    @cached_property
    def loads_ps(self) -> Ints:
        """What each item takes of a step."""
        found: Ints = self.num_microbatches * self.passes_ps + self.once_ps
        return found

    @property
    def num_devices(self) -> int:
        return self.whole.num_ranks

    @property
    def num_microbatches(self) -> int:
        return self.whole.num_microbatches


class Pricer:
    """Prices the items of one request; calls of one block with equal layouts are priced once.

    Values between stages cross the outermost links of `whole`, of which the devices are a part.
    """

    def __init__(
        self, request: Request, factored: Factored, items: tuple[str, ...], whole: Cluster
    ) -> None:
        self.request, self.factored, self.items = request, factored, items
        self.join = slowest_join(whole)
        self._cuts: dict[int, Cut] = {}

    def price(self, whole: Decisions) -> ItemCosts:
        """All items in the layouts of `whole`; raises `LayoutError` where they are no stages."""
        request, size = self.request, whole.num_ranks
        stages = tuple(Stage((key,), (range(size),), whole.mesh) for key in self.items)
        apart = replace(whole, stages=stages)
        count = whole.num_microbatches
        if count not in self._cuts:
            self._cuts[count] = staged(self.factored, apart)
        lowered = AlikeStages().lower(self._cuts[count], apart)
        cluster, kernels = request.cluster, request.machine.kernels
        apart_priced = PricedStages(
            lowered, stages, cluster, request.optimizer, kernels, lambda *_: self.join
        )
        found = [self._costs(apart_priced, index) for index in range(len(stages))]
        sent = np.zeros(len(stages), dtype=np.int64)
        for edge in apart_priced.edges:
            back = edge.backward.ps if edge.backward else 0
            sent[edge.source : edge.target] += edge.forward.ps + back
        shared = tuple((s.stages[0], s.stages[-1], s.sent.ps) for s in apart_priced.shared)
        passes, once, kept, stored = np.array(found, dtype=np.int64).T
        apart_ps, stage_ps = int((count * passes + once).sum()), 0
        if sum(1 for _ in request.graph.flat()) <= FEW_OPERATORS:
            passes, once = self._scaled(whole, passes, once)
            together_ps = int((count * passes + once).sum())
            stage_ps = max(0, apart_ps - together_ps) // max(1, len(stages) - 1)
        edges = tuple((edge.source, edge.target) for edge in apart_priced.edges)
        return ItemCosts(whole, passes, once, kept, stored, sent, stage_ps, edges, shared)

    def _scaled(self, whole: Decisions, passes: Ints, once: Ints) -> tuple[Ints, Ints]:
        """Passes and steps that add up to those of the whole model: each stage of one item has an
        update and communication of its own.
        """
        request, kernels = self.request, self.request.machine.kernels
        part = part_of(request.cluster, whole.num_ranks)
        pcg = lower(request.graph, whole, factored=self.factored)
        alone = priced(pcg, part, whole, request.optimizer, kernels)
        stage = play_stage("", Actions(pcg, part, alone), Simulator())
        all_passes, all_once = _times(stage)
        return _shares(all_passes, passes), _shares(all_once, once)

    def _costs(self, stages: PricedStages, index: int) -> tuple[int, int, int, int]:
        stage = stages.actions(index, split=False)
        held = max(0, sum(stage.actions["F"].memory.net))
        return *_times(stage), held, sum(stage.base)


def _times(stage: StageActions) -> tuple[int, int]:
    """What the passes of a microbatch take, and what comes once a step."""
    backward, last = stage.actions["B"], stage.actions["B last"]
    once = sum(stage.actions[kind].ps for kind in UPDATE)
    once += _left_ps(last) + last.ps - backward.ps
    return stage.actions["F"].ps + backward.ps, max(0, once)


def _shares(total_ps: int, parts: Ints) -> Ints:
    """Parts in the same ratios whose sum is `total_ps`, each rounded up."""
    found: Ints = np.ceil(parts * (total_ps / max(1, parts.sum()))).astype(np.int64)
    return found


def _left_ps(played: Played) -> int:
    """How long the transfers take that an action leaves under way."""
    moves = (max((f.size // SHARES for f in left.flows), default=0) for left in played.state)
    return sum(left.ps for left in played.state) + sum(moves)
