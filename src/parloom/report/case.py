"""A plan that is to be explained: its decisions, its lowered program and its played step."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from parloom.cost.clusters import resolve_cluster
from parloom.cost.ledger import MAIN, Ledger, Program, ledger, pipeline_ledger
from parloom.cost.measured import Source
from parloom.cost.shares import Runs, Share, runs, shares
from parloom.cost.stages import PricedStages, StagePlayer
from parloom.cost.step import Priced
from parloom.cost.timeline import Timeline
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import below
from parloom.ir.lower_stages import LoweredStages, group_lists
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.pcg import PCG, PCall, PFunction
from parloom.ir.plan import Decisions, Plan
from parloom.ir.regular_parts import memory_of
from parloom.ir.text import parse_graph
from parloom.report.naming import Names, named_ways, names_of
from parloom.report.words import memory_limit, uncalibrated_words
from parloom.rewrite.rewrites import rewritten

Place = tuple[str, str]
"""Block kind, or MAIN, and an operator's key in it."""


@dataclass(frozen=True)
class Step(ABC):
    """A plan with its played step on `cluster`; `source` says where the numbers come from."""

    plan: Plan
    cluster: Cluster
    timeline: Timeline
    source: Source

    @property
    def warning(self) -> str:
        """A line where the plan was predicted with a calibration and is explained without one."""
        return uncalibrated_words(self.plan, self.source)

    @property
    def decisions(self) -> Decisions:
        return self.plan.decisions

    @property
    def whole(self) -> Cluster:
        """The cluster that the plan was made for, of which it may use a part."""
        return resolve_cluster(self.plan.cluster).cluster

    @cached_property
    @abstractmethod
    def ledger(self) -> Ledger:
        """Where the time of the step goes."""

    def fits(self, timeline: Timeline) -> bool:
        """Whether a step holds no more than the plan may use, on any device."""
        peaks = timeline.peaks or ((self.cluster.device.name, timeline.peak_bytes),)
        return all(
            peak <= memory_limit(self.plan, memory_of(self.cluster, device))
            for device, peak in peaks
        )


@dataclass(frozen=True)
class PipelineCase(Step):
    """A plan of several stages: `stages` were lowered from its decisions, `player` prices them."""

    stages: LoweredStages
    player: StagePlayer

    @cached_property
    def names(self) -> Names:
        """What the factors of operators are called, in all stages."""
        return names_of(rewritten(parse_graph(self.plan.graph), self.decisions.rewrites))

    @cached_property
    def ledger(self) -> Ledger:
        return self.read(self.timeline, self.stages)

    def read(self, timeline: Timeline, stages: LoweredStages) -> Ledger:
        """Where the time of a step of other programs goes, with the plan's schedule."""
        planned = self.decisions.stages
        processes = [
            (
                planned[own[0]].mesh.num_ranks,
                [Program(stages.pcgs[i], self.player.own(planned[i]), i) for i in own],
            )
            for own, _ in group_lists(self.decisions)
        ]
        return pipeline_ledger(timeline, processes)

    def play(self, stages: LoweredStages) -> Timeline:
        """A step of other programs, with the plan's schedule."""
        lists = tuple(own for _, own in group_lists(self.decisions))
        return PricedStages(stages, self.decisions.stages, self.player).play(lists)

    def stage(self, index: int) -> "StageCase":
        """One of its stages."""
        stage, pcg = self.decisions.stages[index], self.stages.pcgs[index]
        return StageCase(
            replace(self.plan, decisions=pcg.decisions),
            self.player.own(stage),
            self.timeline,
            self.source,
            pcg,
            self.player.priced(pcg, stage),
            self,
            index,
        )


@dataclass(frozen=True)
class Case(Step):
    """`pcg` was lowered from the plan's decisions, `priced` and `timeline` made of it."""

    pcg: PCG
    priced: Priced

    @cached_property
    def names(self) -> Names:
        """What the factors of operators are called."""
        return names_of(self.pcg.graph)

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices, without the axis in time."""
        return self.plan.decisions.mesh

    @cached_property
    def limit(self) -> int:
        """Bytes that the plan may use on a device."""
        return memory_limit(self.plan, self.cluster.device.memory_bytes)

    @cached_property
    def ledger(self) -> Ledger:
        return self.read(self.timeline, self.pcg)

    def read(self, timeline: Timeline, pcg: PCG) -> Ledger:
        """Where the time of a step of another program goes."""
        return ledger(timeline, pcg, self.cluster)

    @cached_property
    def shares(self) -> Mapping[str, tuple[Share, ...]]:
        """Items by variant."""
        return shares(self.pcg, self.priced.walker)

    @cached_property
    def runs(self) -> Mapping[str, Runs]:
        """How often a step runs each variant."""
        return runs(self.pcg)

    @cached_property
    def calls(self) -> Mapping[str, PCall]:
        """Block calls by prefix."""
        return {item.prefix: item for item in self.pcg.main.body if isinstance(item, PCall)}

    @cached_property
    def variants(self) -> Mapping[str, tuple[PFunction, ...]]:
        """The variants of each block kind, and main as a kind of its own."""
        found: dict[str, tuple[PFunction, ...]] = {MAIN: (self.pcg.main,)}
        for function in self.pcg.functions:
            found[function.kind] = (*found.get(function.kind, ()), function)
        return found

    @cached_property
    def factored(self) -> Factored:
        return factorize(self.pcg.graph)

    @cached_property
    def assigned(self) -> Mapping[str, Mapping[str, str]]:
        """By operator what each axis splits of it, in words."""
        found: dict[str, dict[str, str]] = {}
        for flat, axis, what in named_ways(self.pcg.graph, self.decisions, self.names):
            found.setdefault(flat.key, {})[axis] = what
        return found

    @cached_property
    def makers(self) -> Mapping[str, str]:
        """The operator that makes a value, by the value's name in the whole program."""
        return {r: flat.key for flat in self.pcg.graph.flat() for r in flat.results}

    @cached_property
    def splits(self) -> Mapping[Place, Mapping[str, Counter[str]]]:
        """What each axis splits of an operator, in words, with the number of calls."""
        main = self.pcg.graph.main.name
        found: dict[Place, dict[str, Counter[str]]] = {}
        for flat in self.pcg.graph.flat():
            kind = MAIN if flat.function == main else flat.function
            for axis, what in self.assigned.get(flat.key, {}).items():
                axes = found.setdefault((kind, flat.node.key), {})
                axes.setdefault(axis, Counter())[what] += 1
        return found

    def place_of(self, name: str) -> str:
        """The block kind of the call whose prefix `name` is below, or MAIN."""
        for prefix, call in self.calls.items():
            if name.startswith((f"{prefix}.", f"{prefix}:")) or name == prefix:
                return self.pcg.by_name[call.function].kind
        return MAIN

    def first_name(self, place: str, key: str) -> str:
        """An operator of a block kind as in the kind's first call; empty for no operator."""
        if ":" not in key:
            return ""
        prefixes = (p for p in self.calls if self.place_of(p) == place)
        return below("" if place == MAIN else next(prefixes, ""), key)


@dataclass(frozen=True)
class StageCase(Case):
    """Stage `index` of a `pipeline`, whose step all of it is."""

    pipeline: PipelineCase
    index: int

    @cached_property
    def names(self) -> Names:
        return self.pipeline.names

    def read(self, timeline: Timeline, pcg: PCG) -> Ledger:
        """Where the time of the pipeline goes with another program of the stage."""
        return self.pipeline.read(timeline, self._with(pcg))

    def play(self, pcg: PCG, _: Decisions) -> Timeline:
        """A step of the pipeline with another program of the stage."""
        return self.pipeline.play(self._with(pcg))

    def fits(self, timeline: Timeline) -> bool:
        """See `Step.fits`."""
        return self.pipeline.fits(timeline)

    def _with(self, pcg: PCG) -> LoweredStages:
        stages = self.pipeline.stages
        pcgs = (pcg if i == self.index else own for i, own in enumerate(stages.pcgs))
        return replace(stages, pcgs=tuple(pcgs))
