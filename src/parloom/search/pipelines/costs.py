"""What the items of a model cost as stages of their own, in the layouts of one plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from parloom.cost.actions import StageWriter
from parloom.cost.hardware import Hardware
from parloom.cost.kernels import Kernels
from parloom.cost.ledger import UPDATE
from parloom.cost.pipeline import StageActions, play_stage, send
from parloom.cost.simulate import Simulator
from parloom.cost.stages import PricedStages, StagePlayer, transfer_bytes
from parloom.cost.step import priced
from parloom.cost.tasks import COMMUNICATION, SHARES
from parloom.cost.timeline import Played
from parloom.ir.factors import Factored
from parloom.ir.generation import feeds_itself
from parloom.ir.lower import lower
from parloom.ir.lower_stages import LoweredStages, Stager
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.plan import Decisions, Stage
from parloom.ir.regular_parts import Join, slowest_join
from parloom.ir.stages import Cut
from parloom.search.least import batch_bytes
from parloom.search.pipelines.alike import AlikeStages
from parloom.search.request import Request

Ints = NDArray[np.int64]
# Operators of models whose items are scaled to the whole: of larger ones what each stage has of its
# own is little, and the whole takes long to play.
FEW_OPERATORS = 2_000


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that item `source` makes and others read: how long it takes to send a microbatch of
    it to another stage, and its gradient back (None where there is none), by level of links.
    """

    source: int
    targets: tuple[int, ...]
    forward_ps: tuple[int, ...]
    backward_ps: tuple[int, ...] | None

    @property
    def ps(self) -> tuple[int, ...]:
        """There and back."""
        if self.backward_ps is None:
            return self.forward_ps
        return tuple(map(sum, zip(self.forward_ps, self.backward_ps, strict=True)))


@dataclass(frozen=True, eq=False)
class ItemCosts:
    """A plan of one stage, `whole`, and what each of its `items` costs in it, [item].

    `passes_ps` are of a microbatch, there and back, `once_ps` of a step; `kept_bytes` of a
    microbatch in flight, `stored_bytes` all along, and of `buffer_bytes`, in which weights are
    gathered and gradients reduced, the largest of a stage; `passing_bytes` beside them while it
    runs, the batch among them, which all stages have; `updating_bytes` while it updates, when
    nothing is in flight. `stage_ps` is what each stage takes of a step beyond its items.
    `shared_ps`, of pairs of items with one weight (first, last, ps): summing its gradients where
    they are in different stages. `repeats`: passes follow each other at once, as of tokens.
    """

    whole: Decisions
    items: tuple[str, ...]
    passes_ps: Ints
    once_ps: Ints
    kept_bytes: Ints
    stored_bytes: Ints
    buffer_bytes: Ints
    passing_bytes: Ints
    stage_ps: int
    sent: tuple[Sent, ...]
    shared_ps: tuple[tuple[int, int, int], ...]
    updating_bytes: Ints
    repeats: bool = False

    def ordered(self, order: Sequence[int]) -> "ItemCosts":
        """The same items in another order, in which each comes after those that it reads."""
        places = list(order)
        if places == list(range(len(self.items))):
            return self
        at = {item: place for place, item in enumerate(places)}
        return replace(
            self,
            items=tuple(self.items[item] for item in places),
            passes_ps=self.passes_ps[places],
            once_ps=self.once_ps[places],
            kept_bytes=self.kept_bytes[places],
            stored_bytes=self.stored_bytes[places],
            buffer_bytes=self.buffer_bytes[places],
            passing_bytes=self.passing_bytes[places],
            sent=tuple(
                replace(v, source=at[v.source], targets=tuple(sorted(at[t] for t in v.targets)))
                for v in self.sent
            ),
            shared_ps=tuple((at[one], at[other], ps) for one, other, ps in self.shared_ps),
            updating_bytes=self.updating_bytes[places],
        )

    @cached_property
    def loads_ps(self) -> Ints:
        """What each item takes of a step."""
        found: Ints = self.num_microbatches * self.passes_ps + self.once_ps
        return found

    def buffers_between(self, places: Ints) -> Ints:
        """The buffers of a stage that has the items from one of these places to another one, of
        which the last is the end, [from, to].
        """
        most = np.maximum.reduceat(self.buffer_bytes, places[:-1])
        found = np.zeros((len(places),) * 2, dtype=np.int64)
        for begin in range(len(most)):
            found[begin, begin + 1 :] = np.maximum.accumulate(most[begin:])
        return found

    @cached_property
    def adds_ps(self) -> Ints:
        """What each item adds to a stage beside `stage_ps`: a stage that has all items takes what
        they do.
        """
        found: Ints = self.loads_ps - self.stage_ps // len(self.loads_ps)
        return found

    @cached_property
    def crossing_ps(self) -> Ints:
        """What a microbatch's values take that cross the place behind an item where all are in a
        row, there and back, [level of links, item].
        """
        levels = max((len(value.ps) for value in self.sent), default=1)
        found = np.zeros((levels, len(self.passes_ps)), dtype=np.int64)
        for value in self.sent:
            found[:, value.source : max(value.targets)] += np.array(value.ps)[:, None]
        return found

    @property
    def sent_ps(self) -> Ints:
        """The same over the outermost links."""
        found: Ints = self.crossing_ps[-1]
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
        self, request: Request, factored: Factored, items: tuple[str, ...], whole: Hardware
    ) -> None:
        self.request, self.factored, self.items = request, factored, items
        self.join, self.kernels = slowest_join(whole.cluster), whole.kernels
        self._stager = Stager(factored)
        self._cuts: dict[int, Cut] = {}
        self._alike = AlikeStages()

    def price(self, whole: Decisions) -> ItemCosts:
        """All items in the layouts of `whole`; raises `LayoutError` where they are no stages."""
        request, size = self.request, whole.num_ranks
        stages = tuple(Stage((key,), (range(size),), whole.mesh) for key in self.items)
        apart = replace(whole, stages=stages)
        count = whole.num_microbatches
        if count not in self._cuts:
            self._cuts[count] = self._stager.cut(apart)
        lowered = self._alike.lower(self._cuts[count], apart)
        cluster, kernels = request.cluster, self.kernels
        player = StagePlayer(cluster, request.optimizer, kernels)
        apart_priced = PricedStages(lowered, stages, player, lambda *_: self.join)
        found = [self._costs(apart_priced, index) for index in range(len(stages))]
        sent = tuple(_sent(lowered, cluster, self.join, kernels))
        shared = tuple((s.stages[0], s.stages[-1], s.sent.ps) for s in apart_priced.shared)
        passes, once, *memory = np.array(found, dtype=np.int64).T
        kept, stored, buffers, passing, updating = memory
        apart_ps, stage_ps = int((count * passes + once).sum()), 0
        if sum(1 for _ in request.graph.flat()) <= FEW_OPERATORS:
            passes, once = self._scaled(whole, passes, once)
            together_ps = int((count * passes + once).sum())
            stage_ps = max(0, apart_ps - together_ps) // max(1, len(stages) - 1)
        return ItemCosts(
            whole, self.items, passes, once, kept, stored, buffers, passing, stage_ps, sent, shared,
            updating, feeds_itself(self.request.graph),
        )  # fmt: skip

    def _scaled(self, whole: Decisions, passes: Ints, once: Ints) -> tuple[Ints, Ints]:
        """Passes and steps that add up to those of the whole model: each stage of one item has an
        update and communication of its own.
        """
        request, kernels = self.request, self.request.machine.kernels
        part = part_of(request.cluster, whole.num_ranks)
        pcg = lower(request.graph, whole, factored=self.factored)
        alone = priced(pcg, part, whole, request.optimizer, kernels)
        stage = play_stage("", StageWriter(pcg, part, alone), Simulator())
        all_passes, all_once = _times(stage)
        return _shares(all_passes, passes), _shares(all_once, once)

    def _costs(self, stages: PricedStages, index: int) -> tuple[int, ...]:
        stage, batch = stages.alone(index, split=False), batch_bytes(self.request.graph)
        forward, backward, first = (stage.actions[k].memory for k in ("F", "B", "B first"))
        kept = max(0, sum(forward.net))
        passing = max(0, max(forward.peak, sum(forward.net) + backward.peak) - kept)
        # Gradients come with the first backward pass, and stay until the update.
        gradients = max(0, sum(forward.net) + sum(first.net))
        buffers = stage.base[COMMUNICATION]
        stored = sum(stage.base) - buffers - batch + gradients
        updating = stage.actions["STEP"].memory.peak
        return *_times(stage), kept, stored, buffers, passing + batch, updating


def _sent(
    lowered: LoweredStages, cluster: Cluster, join: Join, kernels: Kernels | None
) -> Iterator[Sent]:
    """All crossings over each level of links, of which `join` is the outermost."""
    ways = (*(Join(cluster, level) for level in range(len(cluster.levels) - 1)), join)
    transfers = iter(lowered.transfers)
    for crossing in lowered.cut.crossings:
        first, *_ = islice(transfers, len(crossing.targets))
        there, again = (
            tuple(send(*moved, way, kernels).ps for way in ways) if moved else None
            for moved in transfer_bytes(first, lowered.pcgs)
        )
        assert there is not None
        yield Sent(crossing.source, crossing.targets, there, again)


def _times(stage: StageActions) -> tuple[int, int]:
    """What the passes of a microbatch take, not split, and what comes once a step."""
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
