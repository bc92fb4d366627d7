"""Points of the grids of rules of thumb against one device: loss, all gradients, weights."""

from dataclasses import replace

import pytest
import torch

from parloom.cost.hardware import DataSheets
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import RULES
from parloom.comparators.configuration import Configuration, laid_out
from parloom.comparators.grid import Grid
from parloom.cost.clusters import load_cluster
from parloom.execute.verify import verify
from parloom.ir.graph import Graph
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan
from parloom.ir.text import print_graph
from parloom.search.request import Request
from tests.dist import lowered
from tests.equality import TOLERANCE
from tests.zoo_sizes import small

torch.set_num_threads(1)

CLUSTER = load_cluster("2x2xH100")
PLAIN = Configuration(master_dtype=None)
# A point of each rule that has all that it may have, and those of batches that do not divide.
POINTS = {
    "data_parallel": Configuration(data=4, zero=1, recompute="selective"),
    "fsdp within a node": Configuration(data=4, zero=3, shard=2, recompute="selective"),
    "zero 2": Configuration(data=4, zero=2, recompute="full"),
    "megatron": Configuration(
        tensor=2, data=2, zero=1, sequence_parallel=True, recompute="selective"
    ),
    "megatron, ZeRO-3": Configuration(
        tensor=2, data=2, zero=3, sequence_parallel=True, recompute="full"
    ),
    "context": Configuration(data=2, context=2, zero=3, recompute="selective"),
    "copies": Configuration(data=2, copies=2, zero=3),
}


def plan_of(graph: Graph, chosen: Configuration, num_microbatches: int) -> Decisions:
    (samples, *_) = graph.of_kind("batch")[0].value.spec.shape
    chosen = replace(
        chosen,
        master_dtype=None,
        num_microbatches=num_microbatches,
        microbatch=samples // chosen.data // num_microbatches,
    )
    return laid_out(graph, chosen, CLUSTER).decisions(chosen)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("point", POINTS)
def test_points_equal_one_device(point: str, name: str) -> None:
    model = lowered.model(name)
    error, where = model.error(plan_of(model.graph, POINTS[point], 3))
    assert error <= TOLERANCE, where


@pytest.mark.parametrize("rule", RULES)
def test_what_is_found_in_little_memory_equals_one_device(rule: str) -> None:
    model = lowered.model("gpt")
    asked = Request(model.graph, DataSheets(CLUSTER), Optimizer(), 2**40)
    (free, *_) = Grid(asked, RULES[rule], Decisions(), 1).run()
    tight = replace(asked, limit_bytes=int(0.9 * free.prediction.peak_bytes))
    found = list(Grid(tight, RULES[rule], Decisions(), 20).run())
    assert found[-1].prediction.peak_bytes <= tight.limit_bytes
    assert found[-1].decisions.num_microbatches > 1 or found[-1].decisions.activations
    error, where = model.error(found[-1].decisions)
    assert error <= TOLERANCE, where


def test_microbatches_recomputation_and_zero_1_are_verified() -> None:
    module, batch = small("gpt")
    graph = capture(module.train(), batch)
    decisions = plan_of(graph, POINTS["megatron"], 2)
    assert decisions.num_microbatches == 2
    assert any(activation.lists for activation in decisions.activations)
    assert any(p.optimizer.axes and not p.weight.axes for p in decisions.parameters)
    plan = Plan(
        ModelSource("test"), "2x2xH100", "", Optimizer("adamw", 2), "megatron", decisions,
        print_graph(graph),
    )  # fmt: skip
    report = verify(plan, parameters_of(module, graph), batch)
    assert report.passed
