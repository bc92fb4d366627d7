"""Plans of other systems' methods compute what one device computes: loss and all gradients."""

from dataclasses import replace

import pytest
import torch

from parloom.candidates import ALGEBRA, COMPARATORS
from parloom.comparators import tensat
from parloom.comparators.baselines import data_parallel
from parloom.comparators.pipelines import item_costs
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.stages import PricedStages, StagePlayer
from parloom.execute.verify import reference_trace
from parloom.ir.lower import lower
from parloom.ir.lower_stages import lower_stages
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.schedules import stage_depths
from parloom.ir.stages import stage_items
from parloom.rewrite.rewrites import rewritten
from parloom.search.request import Request
from tests.dist import lowered, staged
from tests.equality import TOLERANCE, difference, parallel
from tests.zoo_sizes import small

torch.set_num_threads(1)

CLUSTER = "2x2xH100"


PIPELINES = ("alpa", "alpa_inter", "gpipe", "graphpipe", "pipedream", "whale")


def plans(method: str, name: str, cluster: str = CLUSTER) -> list[Decisions]:
    there = load_cluster(cluster)
    if method == "unity":  # it splits nothing where that takes longer
        slow = replace(there.device, flops_per_s=(("float64", 1e6),), memory_bytes_per_s=1e6)
        there = replace(there, device=slow)
    graph = lowered.model(name).graph
    # Batch norm looks at the whole batch.
    count = 3 if method in PIPELINES and name != "cnn" else None
    budget = 2 if method == "unity" else 150
    asked = Request(
        graph, DataSheets(there), Optimizer(), there.device.memory_bytes, count, budget=budget
    )
    return list(COMPARATORS[method](asked, Decisions(), lambda text: None))


def error_of(name: str, plan: Decisions) -> tuple[float, str]:
    """How far a plan is from one device; a pipeline after three steps."""
    model = lowered.model(name)
    if len(plan.stages) == 1:
        pcg = lower(rewritten(model.graph, plan.rewrites), plan)
        return difference(model.expected, parallel(pcg, model.tensors, model.batch))
    found = staged.report(model, plan, staged.reference(name))
    return found.worst_error, found.worst_tensor


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ["mlp", "dlrm", "cnn", "gpt"])
@pytest.mark.parametrize("method", COMPARATORS)
def test_plans_equal_one_device(method: str, name: str) -> None:
    split = 0
    for plan in plans(method, name):
        error, where = error_of(name, plan)
        assert error <= TOLERANCE, where
        split += len(plan.stages) > 1
        split += any(axes for node in plan.nodes for _, axes in node.factors)
    assert split, "nothing was split, so nothing was shown"


@pytest.mark.sample(7)
@pytest.mark.parametrize("method", COMPARATORS)
def test_plans_over_axes_of_other_primes_equal_one_device(method: str) -> None:
    for plan in plans(method, "mlp", "1x3xH100" if method == "gpipe" else "2x3xH100"):
        error, where = error_of("mlp", plan)
        assert error <= TOLERANCE, where


@pytest.mark.parametrize(
    ("name", "branches"), [("mmt", 3), ("candle_uno", 3), ("dlrm", 1), ("mlp_unify", 2)]
)
def test_branches_run_beside_each_other(name: str, branches: int) -> None:
    """Some of GraphPipe's stages wait for no other one; its lists, checked, predicted and run."""
    model = lowered.of(*small(name))
    there = load_cluster("4xH100")
    asked = Request(
        model.graph, DataSheets(there), Optimizer("adamw"), there.device.memory_bytes, 4
    )
    (plan,) = COMPARATORS["graphpipe"](asked, Decisions(), lambda text: None)
    parts = lower_stages(model.graph, plan).cut
    begin = set(range(len(plan.stages))) - {t for c in parts.crossings for t in c.targets}
    assert len(begin) == branches
    assert bool(plan.actions) == (branches > 1)
    assert asked.predict(plan).step_s > 0
    expected = reference_trace(model.graph, staged.PLANNED, model.tensors, model.batch)
    report = staged.report(model, plan, expected)
    assert report.passed, str(report)


@pytest.mark.parametrize("optimizer", [Optimizer("sgd", 0), Optimizer("adamw")])
def test_stages_hold_what_their_items_hold(optimizer: Optimizer) -> None:
    """The memory that a split into stages counts is that of the simulator."""
    graph, there = lowered.small_graph("mmt"), load_cluster("4xH100")
    asked = Request(graph, DataSheets(there), optimizer, there.device.memory_bytes, 4)
    base = Decisions(num_microbatches=4)
    (plan,) = COMPARATORS["graphpipe"](asked, base, lambda text: None)
    (costs,) = item_costs(asked, base)
    place = {key: index for index, key in enumerate(stage_items(graph))}
    edges = {(c.source, t) for c in lower_stages(graph, plan).cut.crossings for t in c.targets}
    depths = stage_depths(len(plan.stages), edges)
    player = StagePlayer(there, optimizer, asked.machine.kernels)
    played = PricedStages(lower_stages(graph, plan), plan.stages, player)
    found = []
    for index, (stage, depth) in enumerate(zip(plan.stages, depths, strict=True)):
        ahead = (sum(a(index, split=False).base) for a in (played.actions, played.alone))
        own, items = costs[stage.mesh.num_ranks], [place[key] for key in stage.items]
        held = own.stored_bytes[items].sum() + depth * own.kept_bytes[items].sum()
        held += own.buffer_bytes[items].max()
        # Splits do not count what is received ahead of need.
        found.append(held + own.passing_bytes[items].max() + next(ahead) - next(ahead))
    assert asked.predict(plan).peak_bytes == pytest.approx(max(found), rel=0.1)


@pytest.mark.parametrize("method", ALGEBRA)
def test_forms_equal_the_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split over four devices."""
    monkeypatch.setattr(tensat, "CALLS", 150)
    model, there = lowered.model("mlp"), load_cluster("4xcpu")
    asked = Request(model.graph, DataSheets(there), Optimizer(), there.device.memory_bytes)
    texts = ALGEBRA[method](asked, lambda text: None)
    form = rewritten(model.graph, texts)
    (plan,) = data_parallel(form, there)
    error, where = error_of("mlp", replace(plan, rewrites=texts))
    assert error <= TOLERANCE, where
