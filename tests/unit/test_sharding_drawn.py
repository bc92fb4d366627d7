"""Drawings of tensors: slices by device as the layout has them, for every kind of name."""

import pytest

from parloom.comparators.baselines import fsdp, megatron
from parloom.errors import InputError
from parloom.report.case import Case
from parloom.report.grid import grid
from parloom.report.sharding import drawings
from tests.dist.test_explain_pipelines import case_of as pipeline_of
from tests.unit.explained import case_of
from tests.unit.graphs import stack
from tests.unit.pages import CLUSTER

GRAPH = stack(3)


@pytest.fixture(scope="module")
def split() -> Case:
    tensor = next(p for p in megatron(GRAPH, CLUSTER) if p.mesh["tensor"].size == 4)
    return case_of(GRAPH, CLUSTER, tensor, "megatron")


def test_a_parameter_is_drawn_as_it_is_computed_with(split: Case) -> None:
    found = {p.input.target: p for p in split.pcg.parameters}
    cut = next(t for t, p in found.items() if p.layout.shards)
    first, *_ = drawings(split, cut)
    spec = found[cut].input.value.spec
    assert first.grid == grid(found[cut].layout, spec.shape, split.mesh)
    assert f"{spec.dtype}{list(spec.shape)}, as " in first.words
    assert len({cell for row in first.grid.cells for cell in row}) == 4  # each part somewhere else


def test_chunks_are_drawn_where_storage_is_cut() -> None:
    zero = case_of(GRAPH, CLUSTER, next(fsdp(GRAPH, CLUSTER)), "fsdp")
    target = zero.pcg.parameters[0].input.target
    whole, stored = drawings(zero, target)
    assert whole.words.endswith("whole on each device")
    assert stored.words.startswith("weight, gradient, optimizer stored in parts")


def test_operators_values_inputs_and_modules(split: Case) -> None:
    flat = next(iter(split.pcg.graph.flat()))
    assert len(drawings(split, flat.key)) == len(flat.node.results)
    entry = split.pcg.graph.of_kind("batch")[0]
    (drawn,) = drawings(split, entry.target)
    assert drawn.name == entry.target
    assert {d.name for d in drawings(split, "head")} == {"head.weight", "head.bias"} or drawn
    with pytest.raises(InputError, match="no operator, parameter, tensor or module 'haed'"):
        drawings(split, "haed")


def test_in_a_pipeline_devices_are_those_of_a_stage() -> None:
    pipeline = pipeline_of("dlrm", seed=3)
    target = pipeline.stages.pcgs[0].parameters[0].input.target
    found = drawings(pipeline, target)
    assert all("stage " in one.words for one in found)
    with pytest.raises(InputError, match=r"did you mean|at the top are"):
        drawings(pipeline, "nothing.of.it")
