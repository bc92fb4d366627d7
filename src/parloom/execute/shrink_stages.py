"""The stages of a small copy of a plan: those of the plan that have items in the copy, on small
meshes, with the first of their microbatches, in the order in which the plan runs them.

A list without some of its actions has no new dependency, so that a schedule stays one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, zip_longest
from math import lcm, prod

from parloom.errors import InputError
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.lower_stages import group_lists, stage_groups
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.plan import Action, Decisions, Stage, one_stage
from parloom.ir.stages import placed

MAX_RANKS = 16
MAX_MICROBATCHES = 2
Devices = tuple[range, ...]


def small_mesh(mesh: Mesh, most: int = MAX_RANKS) -> Mesh:
    """Every axis with its smallest prime; axes become 2, the widest first, until `most` ranks do.

    Raises `InputError` where there are too many axes.
    """
    kept = {a.name: min(a.primes, key=lambda p: p.size) for a in mesh.axes if a.primes}
    sizes = {name: prime.size for name, prime in kept.items()}
    while prod(sizes.values()) > most:
        widest = max(sizes, key=lambda name: sizes[name])
        if sizes[widest] <= 2:
            raise InputError(f"a mesh of {len(sizes)} axes has no copy on {most} ranks")
        sizes[widest] = 2
    primes: dict[str, PrimeAxis] = {}
    stride = 1
    for name in sorted(kept, key=lambda name: kept[name].stride):
        primes[name] = PrimeAxis(sizes[name], stride, kept[name].level)
        stride *= sizes[name]
    return Mesh(tuple(MeshAxis(a.name, (primes[a.name],) if a.primes else ()) for a in mesh.axes))


@dataclass(frozen=True)
class SmallStages:
    """What a copy keeps of the stages that `decisions` have of operators `nodes`, by their keys."""

    decisions: Decisions
    nodes: Mapping[str, FlatNode]

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The small mesh of each stage: two groups of devices at least have room."""
        stages = self.decisions.stages
        most = MAX_RANKS if len(stages) == 1 else MAX_RANKS // 2
        return tuple(small_mesh(stage.mesh, most) for stage in stages)

    @cached_property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that have each item: one of each replica."""
        found: dict[str, tuple[int, ...]] = {}
        for index, stage in enumerate(self.decisions.stages):
            for item in stage.items:
                found[item] = (*found.get(item, ()), index)
        return found

    def stages_at(self, key: str) -> tuple[int, ...]:
        """The stages that compute an operator; none where all may."""
        flat = self.nodes[key]
        return self.stages_of.get(flat.prefix or flat.node.key, ())

    def size(self, key: str, axes: Sequence[str]) -> int:
        """Over how many ranks of the copy axes split an operator."""
        return self._size(key, axes, self.meshes)

    def planned_size(self, key: str, axes: Sequence[str]) -> int:
        """Over how many of the plan."""
        return self._size(key, axes, [stage.mesh for stage in self.decisions.stages])

    def _size(self, key: str, axes: Sequence[str], meshes: Sequence[Mesh]) -> int:
        own = self.stages_at(key) or range(len(meshes))
        found = 1
        for mesh in (meshes[index] for index in own):
            found = lcm(found, mesh.size(tuple(a for a in axes if a in mesh.names)))
        return found

    @cached_property
    def usable(self) -> frozenset[int]:
        """The stages that blocks of the copy may come from: those on groups of devices with items
        that are in no stack of blocks, then those on others, as long as there are ranks for them.
        """
        single = set(chain.from_iterable(self.stages_of[i] for i in self.stages_of if _single(i)))
        ranked = sorted(stage_groups(self.decisions), key=single.isdisjoint)
        found: list[int] = []
        ranks = 0
        for own in ranked:
            ranks += self.meshes[own[0]].num_ranks
            if found and ranks > MAX_RANKS and single.isdisjoint(own):
                break
            found += own
        return frozenset(found)

    @cached_property
    def num_usable_groups(self) -> int:
        return len({self.decisions.stages[index].devices for index in self.usable})

    @cached_property
    def microbatches(self) -> Mapping[int, int]:
        """The microbatches of the copy, by those of the plan: the first ones of each replica, of a
        pipeline more than it has groups of devices. They are a divisor of the plan's: a batch that
        cannot shrink divides by it.
        """
        decisions, each = self.decisions, MAX_MICROBATCHES
        count, unit = decisions.num_microbatches, lcm(*(s.at_once for s in decisions.stages))
        if len(decisions.stages) > 1:
            each = max(each, self.num_usable_groups + 1)
        run = [decisions.stages[own[0]].microbatches or range(count) for own in decisions.replicas]
        most = max(each, len(run))
        total = next(k for k in range(unit, count + 1, unit) if k >= most or k == count)
        while count % total:
            total += unit
        turns = (m for turn in zip_longest(*run) for m in turn if m is not None)
        kept = sorted(islice(turns, total))
        return {planned: small for small, planned in enumerate(kept)}

    def of_copy(self, graph: Graph, names: Mapping[str, str]) -> Decisions:
        """The decisions of the plan with the stages of its copy `graph`; `names` are the plan's
        items by the copy's.

        Raises `InputError` where they need too many ranks.
        """
        count = len(self.microbatches)
        if len(self.decisions.stages) == 1:
            return replace(self.decisions, stages=one_stage(self.meshes[0]), num_microbatches=count)
        kept = dict(self._items(graph, names))
        numbers = {index: number for number, index in enumerate(sorted(kept))}
        devices = self._devices(list(numbers))
        stages = tuple(self._stage(index, kept[index], devices) for index in numbers)
        if len(stages) == 1:
            only = replace(stages[0], items=(), microbatches=())
            alone = replace(self.decisions, schedule="one_stage", actions=())
            return replace(alone, stages=(only,), num_microbatches=count)
        lists = sorted(self._lists(numbers))
        actions = tuple(own for _, own in lists)
        return replace(self.decisions, stages=stages, num_microbatches=count, actions=actions)

    def _items(self, graph: Graph, names: Mapping[str, str]) -> Iterator[tuple[int, list[str]]]:
        """The stages with items of the copy: an item that the plan has is where that has it."""
        for members in self.decisions.replicas:
            own: list[list[str]] = [[] for _ in members]
            for small, planned in names.items():
                for stage in self.stages_of.get(planned, ()):
                    if stage in members:
                        own[members.index(stage)].append(small)
            for stage, items in zip(members, placed(graph, {}, own), strict=True):
                if items:
                    yield stage, list(items)

    def _devices(self, stages: Sequence[int]) -> Mapping[Devices, range]:
        """New devices for the groups that these stages have."""
        found: dict[Devices, range] = {}
        start = 0
        for index in stages:
            planned, ranks = self.decisions.stages[index].devices, self.meshes[index].num_ranks
            if planned not in found:
                found[planned] = range(start, start + ranks)
                start += ranks
            elif len(found[planned]) != ranks:
                raise InputError(
                    f"stage {index} has another mesh than stages on the same devices: their small"
                    " copies have no equal number of ranks"
                )
        if start > MAX_RANKS:
            raise InputError(
                f"{len(found)} groups of devices have parts of the model that no copy leaves out:"
                f" {start} ranks, at most {MAX_RANKS} are proved on this machine"
            )
        return found

    def _stage(self, index: int, items: Sequence[str], devices: Mapping[Devices, range]) -> Stage:
        stage = self.decisions.stages[index]
        own = tuple(self.microbatches[m] for m in stage.microbatches if m in self.microbatches)
        return replace(
            stage,
            items=tuple(items),
            devices=(devices[stage.devices],),
            mesh=self.meshes[index],
            microbatches=own,
        )

    def _lists(self, numbers: Mapping[int, int]) -> Iterator[tuple[int, tuple[Action, ...]]]:
        """The list of each group that is kept, with the number of its first stage."""
        for stages, own in group_lists(self.decisions):
            left = [numbers[stage] for stage in stages if stage in numbers]
            if left:
                yield min(left), tuple(self._kept(own, numbers))

    def _kept(self, listed: Sequence[Action], numbers: Mapping[int, int]) -> Iterator[Action]:
        for action in listed:
            if action.microbatch is None:
                yield action
            elif action.stage in numbers:
                at_once = self.decisions.stages[action.stage].at_once
                # Where a stage runs several at once, its own are numbered.
                small = self.microbatches.get(action.microbatch * at_once)
                if small is not None:
                    number = small // at_once
                    yield replace(action, stage=numbers[action.stage], microbatch=number)


def _single(item: str) -> bool:
    """Whether an item is no part of a stack of blocks."""
    path = item.partition(":")[0]
    return not any(part.partition("@")[0].isdigit() for part in path.split(".")[1:])
