"""`lower` for pipelines: the parallel computation graph of every stage.

A stage is lowered as any graph, on a mesh of its own. What crosses between stages leaves as shards
that no two ranks of the sending stage have twice, and arrives so on the receiving one: each part
goes once over the links between them, and movements inside of the stages do the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parloom.action_text import stages_text
from parloom.errors import CutError, InputError, LayoutError, NotYetError
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Boundary, Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.pcg import PCG, TIME, PValue, Transfer, results_of
from parloom.ir.plan import OF_ONE_STAGE, Action, Decisions, one_stage
from parloom.ir.samples import sample_dims
from parloom.ir.schedules import schedule
from parloom.ir.stages import Crossing, Cut, StageDecisions, cut_plan, like, operands

ActionList = tuple[Action, ...]


@dataclass(frozen=True)
class LoweredStages:
    """The stages of a graph, and the parallel computation graph of each."""

    cut: Cut
    pcgs: tuple[PCG, ...]

    @property
    def only(self) -> PCG:
        """The program of the only stage; raises `NotYetError` where there are several."""
        if len(self.pcgs) > 1:
            raise NotYetError(OF_ONE_STAGE)
        return self.pcgs[0]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All that goes from stage to stage, in the order of the cut's crossings."""
        # By position: equal stages have one program, in which values have the names of one of them.
        arriving = [
            {e.value.name: own.value.name for e, own in zip(g.inputs, p.graph.inputs, strict=True)}
            for g, p in zip(self.cut.graphs, self.pcgs, strict=True)
        ]
        inputs = [{value.name: value for value in pcg.main.inputs} for pcg in self.pcgs]
        found = []
        for crossing in self.cut.crossings:
            name, source = crossing.value.name, crossing.source
            sent = self.pcgs[source].leaving[self.cut.graphs[source].leaving.index(name)]
            for target in crossing.targets:
                received = inputs[target][arriving[target][name]]
                found.append(Transfer(source, target, sent, received))
        return tuple(found)


def lower_stages(
    graph: Graph,
    decisions: Decisions,
    *,
    factored: Factored | None = None,
) -> LoweredStages:
    """Derive every layout and movement of all stages.

    Raises `LayoutError` for stages that are none of `graph`, and for an illegal decision.
    """
    if len(decisions.stages) == 1:
        pcg = lower(graph, decisions, factored=factored)
        return LoweredStages(Cut((graph,), (), {}), (pcg,))
    parts = staged(factored or factorize(graph), decisions)
    own = StageDecisions(decisions, parts)
    chosen = map(own.of, range(len(parts.graphs)))
    return LoweredStages(parts, tuple(map(lower, parts.graphs, chosen)))


def lower_beside(
    graph: Graph, decisions: Decisions, first: LoweredStages, *, factored: Factored | None = None
) -> LoweredStages:
    """The stages of another program of a plan, with weights and caches where `first` has them.

    Its items are in stages like those of `first`. Raises `LayoutError` as `lower_stages` does.
    """
    if len(decisions.stages) == 1:
        pcg = lower(graph, decisions, factored=factored, homes=first.only.homes)
        return LoweredStages(Cut((graph,), (), {}), (pcg,))
    parts, chosen = stages_beside(graph, decisions, first, factored)
    _check_homes(parts, first.cut)
    pcgs = (
        lower(own, decided, homes=pcg.homes)
        for own, decided, pcg in zip(parts.graphs, chosen, first.pcgs, strict=True)
    )
    return LoweredStages(parts, tuple(pcgs))


def not_held(own: Graph, first: Graph) -> Iterator[str]:
    """The parameters and buffers that the items of one program of a stage read, and that the first
    one has not.
    """
    there = {entry.target for entry in first.inputs}
    read = {name for item in own.main.body for name in operands(item)}
    for entry in own.inputs:
        lies = entry.kind in ("parameter", "buffer") and entry.value.name in read
        if lies and entry.target not in there:
            yield entry.target


def _check_homes(parts: Cut, first: Cut) -> None:
    """Raise `LayoutError` where a stage reads a parameter or buffer that only another one has."""
    for stage, (own, other) in enumerate(zip(parts.graphs, first.graphs, strict=True)):
        for target in not_held(own, other):
            raise LayoutError(
                f"stage {stage} of another program of the plan reads {target}, which lies"
                " elsewhere; put all that reads it into one stage"
            )


def stages_beside(
    graph: Graph, decisions: Decisions, first: LoweredStages, factored: Factored | None = None
) -> tuple[Cut, tuple[Decisions, ...]]:
    """The graphs of these stages, and what is decided of each."""
    placed = like(graph, first.cut, decisions)
    stages = (replace(s, items=i) for s, i in zip(decisions.stages, placed, strict=True))
    own = replace(decisions, stages=tuple(stages))
    parts = staged(factored or factorize(graph), own, placed)
    chosen = StageDecisions(own, parts)
    return parts, tuple(map(chosen.of, range(len(parts.graphs))))


class Stager:
    """Cuts one graph as plans say; what is derived from the whole graph is derived once."""

    def __init__(self, factored: Factored) -> None:
        self.factored = factored
        self._alone: dict[tuple[int, str], dict[str, PValue]] = {}

    def cut(self, decisions: Decisions, stages: Sequence[Sequence[str]] | None = None) -> Cut:
        """The stages as `decisions` cut the graph or as `stages`, which may be empty ones; each
        knows how what crosses lies in time: the whole graph is lowered on one device.
        """
        parts = cut_plan(self.factored.graph, decisions, stages)
        names = [crossing.value.name for crossing in parts.crossings]
        counts = [decisions.num_microbatches // stage.at_once for stage in decisions.stages]
        boundaries = {count: self._boundary(names, decisions, count) for count in set(counts)}
        for crossing in parts.crossings:
            several = {counts[stage] for stage in (crossing.source, *crossing.targets)}
            if len(several) > 1:
                _check_samples(crossing, boundaries[max(several)])
        graphs = (
            replace(graph, boundary=boundaries[count])
            for graph, count in zip(parts.graphs, counts, strict=True)
        )
        return replace(parts, graphs=tuple(graphs))

    def _boundary(self, names: Sequence[str], decisions: Decisions, count: int) -> Boundary:
        """How values that cross lie in time with so many microbatches."""
        made = self._on_one_device(replace(decisions, num_microbatches=count))
        for name in names:
            if name not in made:
                raise CutError(
                    f"{name!r} is summed over all microbatches before the first one runs, which no"
                    " stage receives from another; put what makes it and what reads it into one"
                )
        values = {name: made[name] for name in names}
        boundary = Boundary(
            self._sample_dims,
            {name: value.layout for name, value in values.items()},
            frozenset(name for name, value in values.items() if value.differentiable),
        )
        assert all({*v.axes, *v.partial_axes} <= {TIME} for v in boundary.in_time.values())
        return boundary

    @cached_property
    def _sample_dims(self) -> dict[str, int]:
        return dict(sample_dims(self.factored))

    def _on_one_device(self, decisions: Decisions) -> dict[str, PValue]:
        """All values of the graph, lowered with the microbatches of a plan on one device."""
        key = decisions.num_microbatches, decisions.batch_semantics
        if key not in self._alone:
            alone = Decisions(
                stages=one_stage(Mesh(())),
                num_microbatches=decisions.num_microbatches,
                batch_semantics=decisions.batch_semantics,
            )
            pcg = lower(self.factored.graph, alone, factored=self.factored)
            values = (value for item in pcg.main.body for value in results_of(item))
            self._alone[key] = {value.name: value for value in values}
        return self._alone[key]


def _check_samples(crossing: Crossing, boundary: Boundary) -> None:
    """What goes between microbatches of unequal sizes is cut and put together along its samples."""
    name = crossing.value.name
    if boundary.in_time[name].shard(TIME) is None:
        raise CutError(
            f"{name} has no dim of samples and goes from stage {crossing.source} to stages with"
            " microbatches of another size; give these stages the same at_once"
        )


def staged(
    factored: Factored, decisions: Decisions, stages: Sequence[Sequence[str]] | None = None
) -> Cut:
    """The stages of a graph; see `Stager.cut`."""
    return Stager(factored).cut(decisions, stages)


def stage_ranks(decisions: Decisions) -> tuple[tuple[int, ...], ...]:
    """The ranks of every stage, in the order of its mesh: the devices that some stage has, numbered
    in their order.
    """
    devices = [[d for part in stage.devices for d in part] for stage in decisions.stages]
    rank_of = {d: rank for rank, d in enumerate(sorted({d for own in devices for d in own}))}
    return tuple(tuple(rank_of[d] for d in own) for own in devices)


def rank_devices(decisions: Decisions) -> tuple[int, ...]:
    """The device of every rank."""
    found: dict[int, int] = {}
    for stage, ranks in zip(decisions.stages, stage_ranks(decisions), strict=True):
        found.update(zip(ranks, stage.rank_devices, strict=True))
    return tuple(found[rank] for rank in sorted(found))


def action_lists(decisions: Decisions, ranks: Sequence[Sequence[int]]) -> tuple[ActionList, ...]:
    """The action list of every rank; see `group_lists`."""
    by_stage = {stages[0]: own for stages, own in group_lists(decisions)}
    first: dict[int, int] = {}
    for stage, members in enumerate(ranks):
        for rank in members:
            first.setdefault(rank, stage)
    return tuple(by_stage[first[rank]] for rank in sorted(first))


def stage_groups(decisions: Decisions) -> tuple[tuple[int, ...], ...]:
    """The stages of every group of devices."""
    groups: dict[tuple[range, ...], list[int]] = {}
    for index, stage in enumerate(decisions.stages):
        groups.setdefault(stage.devices, []).append(index)
    return tuple(map(tuple, groups.values()))


def group_lists(decisions: Decisions) -> list[tuple[tuple[int, ...], ActionList]]:
    """The stages of every group of devices, and its action list.

    Raises `InputError` for a schedule that does not take the stages as they are placed.
    """
    own = stage_groups(decisions)
    if decisions.actions:
        return list(zip(own, decisions.actions, strict=True))
    count, size = len(decisions.stages), len(own)
    if len(decisions.replicas) > 1 or any(stage.at_once > 1 for stage in decisions.stages):
        raise InputError(
            f"{decisions.schedule} runs the same microbatches in every stage, and stages of the"
            " plan run others; list the actions of each"
        )
    if count % size:
        raise InputError(f"{count} stages on {size} groups of devices do not go around")
    lists = schedule(decisions.schedule, count, decisions.num_microbatches, count // size)
    for stages, listed in zip(own, lists, strict=True):
        placed = {action.stage for action in listed if action.microbatch is not None}
        if placed != set(stages):
            raise InputError(
                f"{decisions.schedule} has {stages_text(placed)} on a group of the devices; in the"
                f" plan {stages_text(stages)} {'share' if len(stages) > 1 else 'has'} one"
            )
    return list(zip(own, lists, strict=True))
