"""The next best ways of one operator or parameter, with everything else as the plan has it.

Each way is a whole plan: lowered, and played as any other. What an operator does is decided for all
calls of its block kind that do the same now, and so is how their parameters are stored; storage
gives way where a new layout of a parameter needs its axes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from parloom.cost.timeline import Timeline
from parloom.cost.walk import Walker
from parloom.errors import LayoutError, NotYetError, VerifyError
from parloom.ir.factors import Factored
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG, TIME, PParameter
from parloom.ir.plan import Decisions, NodeDecision, Optimizer, ParameterDecision, Storage
from parloom.ir.step_program import as_sent
from parloom.ir.verify import verify_pcg
from parloom.search.choices import assignments
from parloom.search.nearby import Nearby
from parloom.search.program import Axes
from parloom.search.storage import Level, StoragePrices, StoredWeight, level_of

Play = Callable[[PCG, Decisions], Timeline]
Fits = Callable[[Timeline], bool]
Factors = tuple[tuple[str, Axes], ...]
# Ways that are played, and those that are kept.
MOST, KEPT = 64, 3
T = TypeVar("T", Factors, Level)


@dataclass(frozen=True, slots=True)
class Way:
    """A way with its plan and step: another assignment of an operator, or level of storage."""

    chosen: Factors | Level
    decisions: Decisions
    pcg: PCG
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Ways:
    """The `best` ways but the plan's own, the fastest first, and of those that fit the fastest;
    `keys` are what was decided alike and changed together. Of `total` ways, `tried` are legal in
    this plan and were played.
    """

    keys: tuple[str, ...]
    best: tuple[Way, ...]
    fitting: Way | None
    total: int
    tried: int


def assignment_of(decisions: Decisions, key: str) -> Factors:
    """Factor -> axes of an operator, without factors that have none."""
    found = decisions.node(key)
    return tuple((f, axes) for f, axes in found.factors if axes) if found else ()


def operator_ways(
    factored: Factored,
    pcg: PCG,
    walker: Walker,
    flat: FlatNode,
    fits: Fits,
    play: Play,
    most: int = MOST,
) -> Ways:
    """The ways of an operator of `pcg`; `factored` is of its graph.

    Where there are more than `most`, the cheapest beside their neighbors as they are are played.
    """
    decisions = pcg.decisions
    keys = tuple(other.key for other in alike(factored.graph, decisions, flat))
    others = _other_ways(factored, decisions, flat)
    if len(others) > most > 0:
        nearby = Nearby(factored, pcg, walker, flat)
        others.sort(key=lambda way: nearby.ps(dict(way)))

    def change(way: Factors) -> Decisions:
        kept = tuple(node for node in decisions.nodes if node.key not in set(keys))
        return replace(decisions, nodes=(*kept, *(NodeDecision(key, way) for key in keys)))

    return _played(factored, keys, others, change, fits, play, most)


def cheaper_ways(factored: Factored, pcg: PCG, walker: Walker, flat: FlatNode) -> list[Factors]:
    """The ways of an operator of `pcg` that cost less than its own beside their neighbors as they
    are, the cheapest first; nothing is played.
    """
    nearby = Nearby(factored, pcg, walker, flat)
    now = nearby.ps(dict(assignment_of(pcg.decisions, flat.key)))
    ways = _other_ways(factored, pcg.decisions, flat)
    priced = sorted((nearby.ps(dict(way)), way) for way in ways)
    return [way for ps, way in priced if ps < now]


def alike(graph: Graph, decisions: Decisions, flat: FlatNode) -> Iterator[FlatNode]:
    """An operator in all calls of its block kind in which it does the same now."""
    now = assignment_of(decisions, flat.key)
    for other in graph.flat():
        same = (other.function, other.node.key) == (flat.function, flat.node.key)
        if same and assignment_of(decisions, other.key) == now:
            yield other


def _other_ways(factored: Factored, decisions: Decisions, flat: FlatNode) -> list[Factors]:
    """All ways of an operator but its own."""
    now = assignment_of(decisions, flat.key)
    found = assignments(factored.rule(flat.function, flat.node), decisions.mesh)
    alone = {axis.name for axis in decisions.mesh.axes if axis.size == 1}  # these split nothing
    ways = (way for way in map(_ordered, found) if alone.isdisjoint(a for _, s in way for a in s))
    return [way for way in ways if way != now]


def parameter_ways(  # noqa: PLR0917 - of a plan, and how others are played
    factored: Factored,
    pcg: PCG,
    walker: Walker,
    optimizer: Optimizer,
    parameter: PParameter,
    alike: Iterable[str],
    fits: Fits,
    play: Play,
    most: int = MOST,
) -> Ways:
    """The ways to store a parameter and those `alike`, by name: a ZeRO level over some axes; the
    first `most` are played.
    """
    decisions, keys = pcg.decisions, tuple(alike)
    reduce = tuple(axis for axis in parameter.reduce if axis != TIME)
    spec, trainable = parameter.input.value.spec, parameter.input.trainable
    sends = bool(decisions.sent_dtypes)
    prices = StoragePrices(walker, decisions, optimizer, quantizes=sends)
    levels, _ = prices.options(StoredWeight(spec, trainable, False, parameter.layout, reduce))
    now = level_of(parameter.decision)
    others = [level for level in levels if level != now]

    def change(level: Level) -> Decisions:
        kept = tuple(found for found in decisions.parameters if found.name not in set(keys))
        return replace(decisions, parameters=(*kept, *(level.decision(key) for key in keys)))

    return _played(factored, keys, others, change, fits, play, most)


def _ordered(found: Mapping[str, Axes]) -> Factors:
    return NodeDecision("", tuple(found.items())).factors


def _played(
    factored: Factored,
    keys: tuple[str, ...],
    others: Sequence[T],
    change: Callable[[T], Decisions],
    fits: Fits,
    play: Play,
    most: int = MOST,
) -> Ways:
    found: list[Way] = []
    fitting: Way | None = None
    tried = 0
    for chosen in others[:most]:
        way = _way(factored, chosen, change(chosen), play)
        if way is None:
            continue
        tried += 1
        found = sorted([*found, way], key=_cost)[:KEPT]
        if fits(way.timeline) and (fitting is None or _cost(way) < _cost(fitting)):
            fitting = way
    return Ways(keys, tuple(found), fitting, len(others), tried)


def _cost(way: Way) -> tuple[int, int]:
    return way.timeline.step_ps, way.timeline.peak_bytes


def _way(
    factored: Factored, chosen: Factors | Level, decisions: Decisions, play: Play
) -> Way | None:
    """None where the program cannot be run like that, as where microbatches do not divide."""
    try:
        pcg = lower(factored.graph, decisions, factored=factored)
        agreed = _agreed(pcg)
        if agreed != decisions:
            pcg = lower(factored.graph, agreed, factored=factored)
        if agreed.sent_dtypes:
            agreed = as_sent(pcg)
        return Way(chosen, agreed, verify_pcg(pcg), play(pcg, agreed))
    except (LayoutError, NotYetError, VerifyError):
        return None


def _agreed(pcg: PCG) -> Decisions:
    """The decisions with storage over those axes only that the new layouts of weights leave."""
    return replace(
        pcg.decisions,
        parameters=tuple(
            left_by(p.decision, p.layout.axes)
            for p in pcg.parameters
            if p.decision != ParameterDecision(p.decision.name)
        ),
    )


def left_by(decision: ParameterDecision, taken: Axes) -> ParameterDecision:
    """Storage over those axes only that the layout of a weight, over `taken` ones, leaves."""

    def left(storage: Storage) -> Storage:
        axes = tuple(axis for axis in storage.axes if axis not in taken)
        return replace(storage, axes=axes, dim=storage.dim if axes else 0)

    if not {*decision.weight.axes, *decision.optimizer.axes} & set(taken):
        return decision
    stored = left(decision.weight), left(decision.gradient), left(decision.optimizer)
    weight, gradient, optimizer = stored
    weight_sent = decision.weight_sent if weight.axes else ""
    return replace(
        decision, weight=weight, gradient=gradient, optimizer=optimizer, weight_sent=weight_sent
    )
