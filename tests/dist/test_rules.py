"""Points of the grids of rules of thumb against one device: loss, all gradients, weights."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import RULES
from parloom.comparators.configuration import Configuration, laid_out
from parloom.comparators.equal_stages import EqualStages
from parloom.comparators.grid import Grid
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.execute.verify import verify
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan
from parloom.ir.text import print_graph
from parloom.ir.verify import verify_pcg
from parloom.search.request import Request
from tests.dist import lowered, staged
from tests.equality import TOLERANCE
from tests.zoo_sizes import small

torch.set_num_threads(1)

CLUSTER = load_cluster("2x2xH100")
# Matrices of experts.
EXPERTS = re.compile(r"experts\.(up|down|gate_up_proj|down_proj)$")
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


# Points of mixtures of experts.
ROUTED = {
    "data_parallel": Configuration(data=4, expert=2, zero=1),
    "fsdp": Configuration(data=4, expert=4, zero=3, recompute="selective"),
    "tensor": Configuration(tensor=2, data=2, expert=2, zero=1),
    "tensor, whole tokens": Configuration(tensor=2, data=2, expert=4, zero=3),
    "positions": Configuration(
        tensor=2, data=2, expert=4, zero=1, sequence_parallel=True, recompute="full"
    ),
    "positions of some": Configuration(tensor=2, data=2, expert=2, sequence_parallel=True),
}


@cache
def gshard() -> lowered.Model:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"seq": 8, "vocab": 24, "width": 12, "heads": 2, "head_width": 6}
    return lowered.of(*zoo.build("gshard", batch=12, depth=2, inner=24, experts=4, **sizes))


MIXTURES: dict[str, Callable[[], lowered.Model]] = {
    "mixtral": lambda: lowered.model("hf_mixtral"),
    "gshard": gshard,
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


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("point", ROUTED)
def test_experts_over_ranks_equal_one_device(point: str, name: str) -> None:
    """Their matrices lie on the expert axes, and gradients are whole over these."""
    model, chosen = MIXTURES[name](), ROUTED[point]
    plan = plan_of(model.graph, chosen, 1)
    pcg = verify_pcg(lower(model.graph, plan, factored=model.factored))
    stored = [p for p in pcg.parameters if EXPERTS.search(p.input.target)]
    assert stored
    for parameter in stored:
        assert {*parameter.layout.axes} >= {*chosen.expert_axes}
        assert not {*parameter.reduce} & {*chosen.expert_axes}
    error, where = model.error(plan)
    assert error <= TOLERANCE, where


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_grid_of_experts_is_no_slower_and_its_points_equal_one_device(
    name: str, rule: str
) -> None:
    model = MIXTURES[name]()
    asked = Request(model.graph, DataSheets(CLUSTER), Optimizer(), 2**40)
    grid = Grid(asked, RULES[rule], Decisions(), 20)
    best = list(grid.run())[-1]
    points = [point for point in grid.points.values() if point is not None]
    routed = [point for point in points if point.chosen.expert > 1]
    plain = [point for point in points if point.chosen.expert == 1]
    assert {point.chosen.expert for point in routed} >= {2}
    assert best.prediction.step_s == min(point.prediction.step_s for point in points)
    assert plain
    for point in min(routed, key=lambda p: p.prediction.step_s), best:
        error, where = model.error(point.decisions)
        assert error <= TOLERANCE, where


@pytest.mark.parametrize("rule", RULES)
def test_what_is_found_in_little_memory_equals_one_device(rule: str) -> None:
    model = lowered.model("gpt")
    asked = Request(model.graph, DataSheets(CLUSTER), Optimizer(), 2**40)
    (free, *_) = Grid(asked, RULES[rule], Decisions(), 1).run()
    tight = replace(asked, limit_bytes=int(0.92 * free.prediction.peak_bytes))
    found = list(Grid(tight, RULES[rule], Decisions(), 20).run())
    assert found[-1].prediction.peak_bytes <= tight.limit_bytes
    assert found[-1].decisions.num_microbatches > 1 or found[-1].decisions.activations
    error, where = model.error(found[-1].decisions)
    assert error <= TOLERANCE, where


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_pipelines_of_megatron_equal_one_device(name: str) -> None:
    """Tied embeddings, padded vocabularies, tensor parallelism inside of a stage, ZeRO-1."""
    model = lowered.model(name)
    asked = Request(model.graph, DataSheets(load_cluster("2x2xcpu")), Optimizer(), 2**40)
    like = Configuration(zero=1, master_dtype=None, sequence_parallel=True)
    levels = ("none", "selective", "full")
    looked = EqualStages(asked, RULES["megatron"], like, levels, 100)
    found = looked.ranked(float("inf"))
    stages = {(e.chosen.pipeline, e.chosen.tensor): e.chosen for e in reversed(found)}
    assert {(2, 1), (2, 2)} <= stages.keys()
    for chosen in stages.values():
        plan = looked.decisions(replace(chosen, recompute="selective"))
        assert len(plan.stages) == chosen.pipeline * chosen.interleave
        report = staged.report(model, plan, staged.reference(name))
        assert report.passed, str(report)


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
