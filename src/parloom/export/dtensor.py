"""DTensor: a plan's layouts of parameters, batch and outputs as a module that plain torch reads.

A placement says along which tensor dim a mesh axis cuts, the outer axes of a mesh first. So each
dim must have its axes outermost, and all tensors of a mesh in one order of its axes; where a layout
cuts another digit of a dim, or wants another order, the axis is left replicated and listed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import ceil

from parloom.execute.program import lowered
from parloom.export.description import Description, Kind
from parloom.export.rendered import rendered
from parloom.export.settings import (
    Settings,
    loss_words,
    paddings,
    pipeline_words,
    recompute_words,
)
from parloom.ir.layout import Layout, describe, digits
from parloom.ir.mesh import Mesh
from parloom.ir.pcg import PCG, TIME, PParameter, PValue
from parloom.ir.plan import Stage
from parloom.ir.regular_parts import devices_of
from parloom.report.folded import names_text

FILE = "dtensor_placements.py"

Cuts = Mapping[int, tuple[str, ...]]
"""By tensor dim the axes that cut it, outermost first."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of stage `stage`: placements by axis as DTensor writes them."""

    name: str
    stage: int
    placements: tuple[str, ...]


@dataclass
class MeshOrder:
    """The order of a mesh's axes that all tensors agree on, so far."""

    mesh: Mesh
    before: dict[str, set[str]] = field(default_factory=dict)

    def takes(self, axes: Sequence[str]) -> bool:
        """Whether these axes may follow each other; then they do."""
        trial = {axis: set(some) for axis, some in self.before.items()}
        for outer, inner in pairwise(axes):
            trial.setdefault(inner, set()).add(outer)
        try:
            TopologicalSorter(trial).prepare()
        except CycleError:
            return False
        self.before = trial
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """All axes in order; those that no tensor needs in another one as the mesh has them."""
        sorter = TopologicalSorter({axis.name: self.before.get(axis.name, set())
                                    for axis in self.mesh.axes if not axis.steps})  # fmt: skip
        sorter.prepare()
        found: list[str] = []
        ready: list[str] = []
        while sorter.is_active():
            ready += sorter.get_ready()
            ready.sort(key=self.mesh.names.index)
            found.append(ready.pop(0))
            sorter.done(found[-1])
        return tuple(found)

    def ranks(self, stage: Stage) -> tuple[int, ...]:
        """The devices of a stage, the last axis fastest."""
        devices = devices_of(stage)
        axes = [self.mesh[name] for name in self.names]
        order = sorted(range(self.mesh.num_ranks), key=lambda r: [a.coordinate(r) for a in axes])
        return tuple(devices[rank] for rank in order)


class _Placer:
    """Turns layouts of one stage into cuts, and notes what cannot be said."""

    def __init__(self, pcg: PCG, padded: Mapping[str, int]) -> None:
        self.pcg, self.mesh, self.padded = pcg, pcg.decisions.mesh, padded
        self.order = MeshOrder(self.mesh)
        self.missing: dict[str, list[str]] = {}

    def cuts(self, layout: Layout, value: PValue | PParameter, name: str) -> Cuts:
        """The axes that cut each dim; others of the layout are noted as missing."""
        spec = value.spec if isinstance(value, PValue) else value.input.value.spec
        found: dict[int, tuple[str, ...]] = {}
        for dim, size in enumerate(spec.shape):
            own = digits(layout.without({TIME}), dim, size, self.pcg.mesh)
            axes = [digit for digit in own if isinstance(digit, str)]
            stored = _stored_axes(value, dim)
            outermost = own[: len(axes)] == tuple(axes)
            if outermost and self._same_rows(name, dim, size, [*axes, *stored]):
                if self.order.takes([*axes, *stored]):
                    found[dim] = (*axes, *stored)
                    continue
                why = "its dims want another order of the mesh's axes"
            else:
                why = "by digits inside of a dim"
            text = describe(layout, spec.shape, self.pcg.mesh)
            over = ", ".join(axes or stored)
            words = f"laid out as {text}, {why} (replicated over {over} there)"
            self.missing.setdefault(words, []).append(name)
            if axes and self.order.takes(stored):
                found[dim] = stored
        return found

    def _same_rows(self, name: str, dim: int, size: int, axes: Sequence[str]) -> bool:
        """Whether ranks have the rows of a padded parameter that they have without the padding."""
        ranks = self.mesh.size(tuple(axes))
        return dim > 0 or name not in self.padded or (
            ceil(self.padded[name] / ranks) * ranks == size
        )  # fmt: skip

    def placed(self, stage: int, last: bool) -> Iterator[tuple[str, str, Placed]]:
        """Table, name and placements of all tensors, when the order of axes is known."""
        cuts: list[tuple[str, str, Cuts, dict[str, str]]] = []
        for p in self.pcg.parameters:
            own = self.cuts(p.layout, p, p.input.target)
            cuts += [("parameters", name, own, {}) for name in (p.input.target, *p.input.aliases)]
        for name, value in _batch(self.pcg):
            cuts.append(("inputs", name, self.cuts(value.layout, value, name), {}))
        for name, value in _outputs(self.pcg) if last else ():
            partial = {axis: op for axis, op in value.layout.partial if axis != TIME}
            cuts.append(("outputs", name, self.cuts(value.layout, value, name), partial))
        for table, name, own, sums in cuts:
            yield table, name, Placed(name, stage, self.placements(own, sums))

    def placements(self, cuts: Cuts, partial: Mapping[str, str]) -> tuple[str, ...]:
        """By axis in the order of the mesh."""
        by_axis = {axis: f"Shard({dim})" for dim, axes in cuts.items() for axis in axes}
        by_axis |= {axis: f"Partial({op!r})" for axis, op in partial.items()}
        return tuple(by_axis.get(axis, "Replicate()") for axis in self.order.names)


def _stored_axes(value: PValue | PParameter, dim: int) -> tuple[str, ...]:
    """The axes over which a weight is stored in chunks of a dim."""
    if isinstance(value, PValue) or value.decision.weight.dim != dim:
        return ()
    return value.decision.weight.axes


def settings(found: Description) -> Settings:
    """The module for torch."""
    stages = lowered(found.plan).pcgs
    padded = {padding.name: padding.size for padding in paddings(found)}
    placers = [_Placer(pcg, padded) for pcg in stages]
    tables: dict[str, dict[str, Placed]] = {"parameters": {}, "inputs": {}, "outputs": {}}
    for stage, placer in enumerate(placers):
        last = stage == len(stages) - 1
        for table, name, placed in placer.placed(stage, last):
            tables[table].setdefault(name, placed)  # that of the first stage
    meshes = [
        (names := placer.order.names, tuple(placer.mesh[name].size for name in names),
         placer.order.ranks(stage))
        for placer, stage in zip(placers, found.plan.decisions.stages, strict=True)
    ]  # fmt: skip
    missing = tuple(_missing(found, placers))
    rows = {name: tuple(table.values()) for name, table in tables.items()}
    return Settings(FILE, rendered(FILE, meshes=meshes, missing=missing, **rows), missing)


def _batch(pcg: PCG) -> Iterator[tuple[str, PValue]]:
    values = {value.name: value for value in pcg.main.inputs}
    for entry in pcg.graph.of_kind("batch"):
        if entry.value.name in values and entry.value.spec.shape:
            yield entry.target, values[entry.value.name]


def _outputs(pcg: PCG) -> Iterator[tuple[str, PValue]]:
    """The loss and what else the model returns."""
    if pcg.loss is not None:
        yield "loss", pcg.loss
    yield from ((name, value) for name, value in pcg.outputs if name != "loss")


def _missing(found: Description, placers: Sequence[_Placer]) -> Iterator[str]:
    """Layouts that placements cannot say, and what of a step is no placement at all."""
    for placer in placers:
        for axis in placer.mesh.axes:
            strides = [prime.stride for prime in axis.primes]
            if strides != sorted(strides, reverse=True):  # groups of ranks are sorted
                yield f"axis {axis.name}, whose ranks are not in ascending order"
    lines: dict[str, list[str]] = {}
    for placer in placers:
        for words, names in placer.missing.items():
            lines.setdefault(words, []).extend(names)
    for words, names in lines.items():
        yield f"{names_text(names)}: {words}"
    yield from _stored_words(placers)
    if _splits_activations(found):
        yield "layouts between operators (DTensor's own rules lay out what they make)"
    yield from found.are(Kind.REWRITE)
    yield from pipeline_words(found)
    count = found.plan.decisions.num_microbatches
    if count > 1:
        yield f"{count} microbatches"
    yield from loss_words(found)
    if any(found.recompute.whole) or found.recompute.some:
        yield recompute_words(found, "torch.utils.checkpoint does so")
    sent = [("messages", dtype) for dtype in found.plan.decisions.sent_dtypes]
    for what, dtype in (("copies of weights", found.chosen.master_dtype),
                        ("sums of gradients", found.chosen.reduce_dtype), *sent):  # fmt: skip
        if dtype not in (None, found.dtype):
            yield f"{what} in {dtype}"


def _stored_words(placers: Sequence[_Placer]) -> Iterator[str]:
    """Gradients and optimizer states in smaller parts than their weights."""
    found: dict[str, list[str]] = {}
    for placer in placers:
        for parameter in placer.pcg.parameters:
            own = parameter.decision
            stored = (("gradient", own.gradient), ("optimizer state", own.optimizer))
            for what, storage in stored:
                if storage.axes != own.weight.axes:
                    words = f"{what} stored over {', '.join(storage.axes)}"
                    found.setdefault(words, []).append(parameter.input.target)
    for words, names in found.items():
        yield f"{names_text(names)}: {words} (as the weight there)"


def _splits_activations(found: Description) -> bool:
    """Whether anything but samples is split: then DTensor's rules choose between operators."""
    own = found.chosen
    return any(size > 1 for size in (own.tensor, own.context, own.expert))
