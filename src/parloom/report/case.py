"""A plan that is to be explained: its decisions, its lowered program and its played step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from parloom.cost.ledger import MAIN, Ledger, ledger
from parloom.cost.measured import Source
from parloom.cost.shares import Runs, Share, runs, shares
from parloom.cost.step import Priced
from parloom.cost.timeline import Timeline
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.pcg import PCG, PCall, PFunction
from parloom.ir.plan import Decisions, Plan
from parloom.report.words import memory_limit, named_ways, uncalibrated_words

Place = tuple[str, str]
"""Block kind, or MAIN, and an operator's key in it."""


@dataclass(frozen=True)
class Case:
    """`pcg` was lowered from the plan's decisions, `priced` and `timeline` made of it on `cluster`;
    `source` says where their numbers come from.
    """

    plan: Plan
    pcg: PCG
    cluster: Cluster
    priced: Priced
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
    def mesh(self) -> Mesh:
        """The mesh of devices, without the axis in time."""
        return self.plan.decisions.mesh

    @cached_property
    def limit(self) -> int:
        """Bytes that the plan may use on a device."""
        return memory_limit(self.plan, self.cluster.device.memory_bytes)

    @cached_property
    def ledger(self) -> Ledger:
        return ledger(self.timeline, self.pcg, self.cluster)

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
    def splits(self) -> Mapping[Place, Mapping[str, Counter[str]]]:
        """What each axis splits of an operator, in words, with the number of calls."""
        main = self.pcg.graph.main.name
        found: dict[Place, dict[str, Counter[str]]] = {}
        for flat, axis, what in named_ways(self.pcg.graph, self.decisions):
            kind = MAIN if flat.function == main else flat.function
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
        return joined("" if place == MAIN else next(prefixes, ""), key)


def joined(prefix: str, key: str) -> str:
    """A key below a prefix, as plans write it."""
    return f"{prefix}{'.' if prefix and not key.startswith(':') else ''}{key}"
