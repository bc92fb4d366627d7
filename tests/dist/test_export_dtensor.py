"""Placements for DTensor: plain torch computes with them what one device computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from parloom.capture import capture
from parloom.comparators.baselines import METHODS, data_parallel, fsdp, megatron
from parloom.cost.clusters import resolve_cluster
from parloom.execute.program import lowered
from parloom.execute.ranks import fork_ranks
from parloom.export import dtensor
from parloom.export.description import describe
from parloom.ir.graph import Graph
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan
from parloom.ir.text import print_graph
from parloom.zoo.mlp import build
from tests.exported import PLAIN, planned

CLUSTER = "2x2xcpu"
Batch = dict[str, Tensor]


def model_of() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = build(batch=8, features=8, hidden=16, depth=2, classes=4)
    return model.double(), {"x": batch["x"].double(), "labels": batch["labels"]}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*model_of())


def plan_of(graph: Graph, decisions: Decisions) -> Plan:
    source = ModelSource("zoo:mlp", dtype="float64")
    return Plan(source, CLUSTER, "0" * 16, Optimizer(), "test", decisions, print_graph(graph))


def placements(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The module that is written, and what it does not say."""
    found = dtensor.settings(describe(plan))
    module: dict[str, Any] = {}
    exec(compile(found.text, dtensor.FILE, "exec"), module)
    return module, found.missing


def grown(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss and all gradients, whole."""
    loss, _ = model(**batch)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(value is not None for value in found.values())
    known = {"loss": loss.detach(), **{name: v for name, v in found.items() if v is not None}}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in known.items()}


def on_rank(module: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a rank computes, and what it holds of every parameter."""
    model, batch = model_of()
    meshes = module["build_meshes"]("cpu")
    module["distribute_parameters"](model, meshes)
    parameters = dict(model.named_parameters())
    local = {n: p.to_local().detach() for n, p in parameters.items() if isinstance(p, DTensor)}
    assert local.keys() == parameters.keys()
    with implicit_replication():
        return grown(model, module["distribute_batch"](batch, meshes)), local


def part(value: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What a rank holds, by the definition of a layout."""
    coordinates = mesh.coordinates(rank)
    for dim, size in enumerate(value.shape):
        kept = [
            index for index in range(size)
            if all(index // s.stride % mesh[s.axis].size == coordinates[s.axis]
                   for s in layout.of_dim(dim))
        ]  # fmt: skip
        value = value.index_select(dim, torch.tensor(kept))
    return value


def run(module: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return fork_ranks(4, on_rank, module)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", [data_parallel, fsdp, megatron])
def test_plain_torch_computes_what_one_device_does(method: Any, graph: Graph) -> None:
    plan = plan_of(graph, next(method(graph, resolve_cluster(CLUSTER).cluster)))
    if method is megatron:  # of two and two ranks
        assert sorted(axis.size for axis in plan.decisions.mesh.axes) == [2, 2]
    module, missing = placements(plan)
    if method is not megatron:
        assert missing == ()
    wanted = grown(*model_of())
    for rank, (found, local) in enumerate(run(module)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
        if method is not fsdp:  # no chunks
            weights = dict(model_of()[0].named_parameters())
            (pcg,) = lowered(plan).pcgs
            for p in pcg.parameters:
                own = part(weights[p.input.target].detach(), p.layout, plan.decisions.mesh, rank)
                torch.testing.assert_close(local[p.input.target], own, rtol=0, atol=0)


def test_ranks_in_another_order_hold_other_parts(graph: Graph) -> None:
    plan = plan_of(graph, next(megatron(graph, resolve_cluster(CLUSTER).cluster)))
    module, _ = placements(plan)
    ((names, sizes, ranks),) = module["MESHES"]
    module["MESHES"] = ((names, sizes, tuple(ranks[i] for i in (0, 2, 1, 3))),)
    (pcg,) = lowered(plan).pcgs
    held = [local for _, local in run(module)]
    weights = dict(model_of()[0].named_parameters())
    split = next(p for p in pcg.parameters if p.layout.shards)
    own = part(weights[split.input.target].detach(), split.layout, plan.decisions.mesh, 1)
    assert not torch.equal(held[1][split.input.target], own)


def test_random_layouts_are_placed_or_listed(graph: Graph) -> None:
    cluster = resolve_cluster(CLUSTER).cluster
    for seed in range(8):
        plan = plan_of(graph, next(METHODS["random"](graph, cluster, 1, seed)))
        module, missing = placements(plan)
        listed = "; ".join(missing)
        (pcg,) = lowered(plan).pcgs
        ((names, _, _),) = module["MESHES"]
        for p in pcg.parameters:
            _, found = module["PARAMETERS"][p.input.target]
            said = {axis for axis, own in zip(names, found, strict=True) if own.is_shard()}
            decided = {*p.layout.axes, *p.decision.weight.axes}
            assert said == decided or p.input.target in listed


def test_digits_inside_of_a_dim_are_listed() -> None:
    module, missing = placements(planned(PLAIN))
    wanted = (
        "blocks.0-3.attention.qkv.weight: laid out as [3·2/tensor·8, 16], by digits inside of a"
        " dim (replicated over tensor there)"
    )
    assert wanted in missing
    assert module["PARAMETERS"]["head.weight"] == module["PARAMETERS"]["tokens.weight"]
    stored = [line for line in missing if "optimizer state stored over data" in line]
    assert len(stored) == 1
    folded = stored[0].partition("blocks.0-3.{")[2].partition("}")[0]
    assert "up.weight" in folded.split(", ")


def test_the_module_needs_only_torch(tmp_path: Path, graph: Graph) -> None:
    plan = plan_of(graph, next(fsdp(graph, resolve_cluster(CLUSTER).cluster)))
    text = dtensor.settings(describe(plan)).text
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert all(line.split()[1].partition(".")[0] == "torch" for line in imports)
    assert not dist.is_initialized()
