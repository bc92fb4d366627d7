"""Which device holds which part of a tensor, drawn; of a parameter also how it is stored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from parloom.errors import InputError
from parloom.ir.graph import FlatNode, TensorSpec
from parloom.ir.layout import Layout, describe, local_shape
from parloom.ir.plan_json import ranks_text
from parloom.ir.text import parse_graph
from parloom.report.case import Case, PipelineCase
from parloom.report.edges import values_of
from parloom.report.explain import storage_words
from parloom.report.grid import Grid, chunks, grid
from parloom.report.names import Below, Named, Names, Tensor
from parloom.rewrite.rewrites import rewritten

PARAMETER = "parameter"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A tensor's grid of devices, with what is said of it."""

    name: str
    words: str
    grid: Grid


def drawings(case: Case | PipelineCase, name: str) -> tuple[Drawing, ...]:
    """How the tensors of `name` lie: of a parameter, another input, a value, the results of an
    operator, or the parameters below a module path. In a pipeline, devices are those of a stage.

    Raises `InputError` for an unknown name.
    """
    if isinstance(case, Case):
        return tuple(_of(case, Names(case.pcg.graph).find(name)))
    found: list[Drawing] = []
    for index, stage in enumerate(case.decisions.stages):
        own = case.stage(index)
        try:
            named = Names(own.pcg.graph).find(name)
        except InputError:
            continue
        place = f"stage {index} on devices {ranks_text(stage.devices)}"
        found += [Drawing(d.name, f"{place}: {d.words}", d.grid) for d in _of(own, named)]
    if not found:  # what is near is known of the whole graph
        Names(rewritten(parse_graph(case.plan.graph), case.decisions.rewrites)).find(name)
        raise InputError(f"{name} is in no stage: no stage reads it")
    return tuple(found)


def sharding_screen(shown: Sequence[Drawing]) -> RenderableType:
    """Each drawing below its name."""
    parts: list[RenderableType] = []
    for one in shown:
        parts += [Text(""), Text(one.name, "bold"), Text(one.words), one.grid.table("  ")]
    return Group(*parts[1:])


def _of(case: Case, named: Named) -> Iterator[Drawing]:
    if isinstance(named, Below):
        for entry in named.inputs:
            if entry.kind == PARAMETER:
                yield from _of(case, Tensor(entry.target, input=entry))
    elif isinstance(named, FlatNode):
        for index, value in enumerate(named.node.results):
            yield from _of(case, Tensor(value.name, named, index))
    elif named.maker is not None:
        made = named.maker.node.results[named.result]
        layout = values_of(case, named.maker)[made.name].layout
        yield _drawing(case, named.name, made.spec, layout)
    else:
        assert named.input is not None, "a value is made or given"
        if named.input.kind == PARAMETER:
            yield from _parameter(case, named.input.target)
        else:
            given = next(v for v in case.pcg.main.inputs if v.name == named.input.value.name)
            yield _drawing(case, named.name, given.spec, given.layout)


def _parameter(case: Case, target: str) -> Iterator[Drawing]:
    """As it is computed with, and where each role is stored in chunks."""
    found = next(p for p in case.pcg.parameters if p.input.target == target)
    spec, decision = found.input.value.spec, found.decision
    yield _drawing(case, target, spec, found.layout)
    shape = local_shape(found.layout, spec.shape, case.mesh)
    roles = {
        "weight": decision.weight,
        "gradient": decision.gradient,
        "optimizer": decision.optimizer,
    }
    cut = {role: storage for role, storage in roles.items() if storage.axes}
    for storage in dict.fromkeys(cut.values()):
        who = ", ".join(role for role, own in cut.items() if own == storage)
        words = f"{who} stored {storage_words(storage)}: chunks of dim {storage.dim} of that part"
        yield Drawing(target, words, chunks(storage, shape[storage.dim], case.mesh))


def _drawing(case: Case, name: str, spec: TensorSpec, layout: Layout) -> Drawing:
    mesh = case.mesh
    whole, local = list(spec.shape), list(local_shape(layout, spec.shape, mesh))
    words = "whole on each device"
    if local != whole:
        words = f"as {describe(layout, spec.shape, mesh)}, {local} on each device"
    return Drawing(name, f"{spec.dtype}{whole}, {words}", grid(layout, spec.shape, mesh))
