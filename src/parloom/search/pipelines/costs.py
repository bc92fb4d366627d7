"""What the items of a model cost as stages of their own, in the layouts of one plan."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parloom.cost.stages import PricedStages
from parloom.cost.tasks import SHARES
from parloom.cost.timeline import Played
from parloom.ir.factors import Factored
from parloom.ir.lower_stages import staged
from parloom.ir.plan import Decisions, Stage
from parloom.ir.stages import Cut
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.request import Request

Ints = NDArray[np.int64]
UPDATE = ("REDUCE", "STEP", "GATHER")


@dataclass(frozen=True, eq=False)
class ItemCosts:
    """A plan of one stage, `whole`, and what each item costs in it, [item].

    `passes_ps` are of a microbatch, there and back, `once_ps` of a step; `kept_bytes` of a
    microbatch in flight, `stored_bytes` all along. `sent_ps` is what a microbatch's values take
    that cross the place behind an item, there and back. `edges` are pairs of items of which the
    second reads what the first makes. `shared_ps`, of pairs of items with one weight (first, last,
    ps): summing its gradients where they are in different stages.
    """

    whole: Decisions
    passes_ps: Ints
    once_ps: Ints
    kept_bytes: Ints
    stored_bytes: Ints
    sent_ps: Ints
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
    """Prices the items of one request; calls of one block with equal layouts are priced once."""

    def __init__(self, request: Request, factored: Factored, items: tuple[str, ...]) -> None:
        self.request, self.factored, self.items = request, factored, items
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
        outermost = len(cluster.levels) - 1
        priced = PricedStages(
            lowered, stages, cluster, request.optimizer, kernels, lambda *_: outermost
        )
        found = [self._costs(priced, index) for index in range(len(stages))]
        sent = np.zeros(len(stages), dtype=np.int64)
        for edge in priced.edges:
            back = edge.backward.ps if edge.backward else 0
            sent[edge.source : edge.target] += edge.forward.ps + back
        shared = tuple((s.stages[0], s.stages[-1], s.sent.ps) for s in priced.shared)
        passes, once, kept, stored = np.array(found, dtype=np.int64).T
        edges = tuple((edge.source, edge.target) for edge in priced.edges)
        return ItemCosts(whole, passes, once, kept, stored, sent, edges, shared)

    def _costs(self, priced: PricedStages, index: int) -> tuple[int, int, int, int]:
        stage = priced.actions(index, split=False)
        forward, backward = stage.actions["F"], stage.actions["B"]
        once = sum(stage.actions[kind].ps for kind in UPDATE)
        once += _left_ps(stage.actions["B last"]) + stage.actions["B last"].ps - backward.ps
        held = max(0, sum(forward.memory.net))
        return forward.ps + backward.ps, max(0, once), held, sum(stage.base)


def _left_ps(played: Played) -> int:
    """How long the transfers take that an action leaves under way."""
    moves = (max((f.size // SHARES for f in left.flows), default=0) for left in played.state)
    return sum(left.ps for left in played.state) + sum(moves)
