"""Random legal plans of whole models equal the captured program on one device.

The adjoint gate is here: every row of the adjoint table is made wrong in turn, and some plan of
those that this file runs must then differ.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.comparators.baselines import random_plan
from parloom.errors import LayoutError
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.moves import ADJOINTS
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG, Movement
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from tests.dist import lowered
from tests.dist.lowered import MESHES, Model
from tests.equality import TOLERANCE

torch.set_num_threads(1)

Point = tuple[str, str, int, int]  # model, mesh, microbatches, seed
SEEDS = {
    "mlp": 3,
    "sums": 6,
    "dlrm": 3,
    "cnn": 3,
    "gpt": 2,
    "llama": 1,
    "hf_gpt2": 1,
    "hf_llama": 1,
}
POINTS: list[Point] = [
    (name, mesh, steps, seed)
    for name, count in SEEDS.items()
    for mesh in MESHES
    for steps in (1, 2)
    for seed in range(count)
    if (name, steps) != ("cnn", 2)  # batch statistics are not a sum over microbatches
]
FINER = {"2x2x2": grid(dict.fromkeys("xyz", 2)), "2x2x2x2": grid(dict.fromkeys("xyzw", 2))}
POINTS += [
    (name, mesh, 1, seed) for name in ("mlp", "cnn", "gpt") for mesh in FINER for seed in (0, 1)
]


def plan(point: Point) -> tuple[Model, Decisions]:
    name, mesh, steps, seed = point
    model = lowered.model(name)
    return model, random_plan(model.graph, model.factored, (MESHES | FINER)[mesh], seed, steps)


@pytest.mark.sample(32)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: "-".join(map(str, p)))
def test_a_random_plan_equals_one_device(point: Point) -> None:
    model, decisions = plan(point)
    error, where = model.error(decisions)
    assert error <= TOLERANCE, where


def test_batch_statistics_refuse_microbatches() -> None:
    model = lowered.model("cnn")
    decisions = random_plan(model.graph, model.factored, MESHES["2x2"], 0)
    with pytest.raises(LayoutError, match=r"norm:batch_norm#0.*use one microbatch"):
        model.error(replace(decisions, num_microbatches=2))


class Anything(nn.Module):
    """Products beside parameters, buffers, inputs and numbers of one element, which are added."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.bias, self.scalar = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(()))
        self.register_buffer("shift", torch.randn(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.bias - self.one(x) + self.scalar - self.shift
        total += torch.cat([self.other(x)[:, 6:], x[:, :6] + self.bias[:6]], 1).t().t()
        loss: Tensor = (total.tanh() + total).square().sum()
        return loss


def anything() -> Model:
    torch.manual_seed(0)
    return lowered.of(Anything(), {"x": torch.randn(12, 12)})


@pytest.mark.parametrize("name", ["anything", "sums", "gpt"])
def test_linear_operators_make_parts_of_parts(name: str) -> None:
    """Also where the search does not look for it: several readers, inputs of the graph, ends."""
    model = anything() if name == "anything" else lowered.model(name)
    for seed in range(4):
        rng = Random(seed)
        drawn = random_plan(model.graph, model.factored, MESHES["2x2"], seed)
        rules = {f.key: model.factored.rule(f.function, f.node) for f in model.graph.flat()}
        nodes = tuple(
            replace(node, factors=(("sums", tuple(rng.sample("xy", rng.choice((1, 2))))),))
            if rules[node.key].linear and rng.random() < 0.7
            else node
            for node in drawn.nodes
        )
        assert nodes != drawn.nodes
        # storage was drawn for other layouts of weights
        error, where = model.error(replace(drawn, nodes=nodes, parameters=()))
        assert error <= TOLERANCE, where


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "conv1d": lambda x: F.conv1d(x, torch.ones(4, 4, 3), padding=1),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, torch.ones(4, 4, 3), padding=1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
    "upsample_linear1d": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "conv1d": lambda x: F.conv1d(x, torch.ones(4, 4, 2), stride=2),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2, 2),
    "upsample_nearest1d": lambda x: F.interpolate(x, scale_factor=2.0),
}


class OverSamples(nn.Module):
    """Windows over samples, which lie where positions do."""

    def __init__(self, window: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.window, self.weight = window, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.window((x @ self.weight).t().unsqueeze(0))).square().mean()


def in_two_microbatches(window: Callable[[Tensor], Tensor]) -> float:
    torch.manual_seed(0)
    model = lowered.of(OverSamples(window), {"x": torch.randn(16, 4)})
    return model.error(Decisions(one_stage(grid({"x": 1})), (), num_microbatches=2))[0]


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_samples_refuse_microbatches(name: str) -> None:
    """The borders of one microbatch lie in another."""
    with pytest.raises(LayoutError, match=f"operator '{name}' mixes samples"):
        in_two_microbatches(WINDOWS[name])


@pytest.mark.parametrize("name", APART)
def test_windows_that_meet_no_other_sample_are_cut(name: str) -> None:
    assert in_two_microbatches(APART[name]) <= TOLERANCE


class Twice(nn.Module):
    """One weight in three products, each of which may be sharded its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(F.linear(x, self.weight))
        return x.square().sum()


def twice() -> tuple[Model, Decisions]:
    """The weight's home is sharded over y and varies over x, where the second product shards it;
    the third is redundant on all ranks.
    """
    torch.manual_seed(0)
    model = lowered.of(Twice(), {"x": torch.randn(12, 12)})
    factors = ((("d0", ("x",)), ("n", ("y",))), (("n", ("x",)),), ())
    nodes = tuple(NodeDecision(f":linear#{i}", f) for i, f in enumerate(factors))
    return model, Decisions(one_stage(grid({"x": 2, "y": 2})), nodes)


def test_one_weight_used_sharded_shared_and_redundantly() -> None:
    model, decisions = twice()
    error, where = model.error(decisions)
    assert error <= TOLERANCE, where
    assert {"partition_varying", "elect"} <= set(rows(model, decisions))


# The adjoint gate.

WRONG = {
    "partition": "pad",
    "partition_varying": "all_gather",
    "combine": "reduce_scatter",
    "combine_varying": "slice",
    "reduce": "all_reduce",
    "reduce_varying": "identity",
    "reduce_scatter": "pad",
    "replicate": "identity",
    "elect": "identity",
    "mask": "all_reduce",
    "mask_varying": "identity",
    "pad": "reduce_scatter",
    "all_to_all": "identity",
    "halo_exchange": "identity",
}
CHEAP = ("mlp", "sums", "dlrm", "cnn")


def rows(model: Model, decisions: Decisions) -> list[str]:
    """Rows of the adjoint table that the plan uses where gradients flow."""
    pcg: PCG = lower(model.graph, decisions, factored=model.factored)
    return [
        item.step.row
        for function in (pcg.main, *pcg.functions)
        for item in function.body
        if isinstance(item, Movement) and item.operand.differentiable
    ]


@cache
def used() -> list[tuple[Model, Decisions, list[str]]]:
    """Plans that the tests above run, with the rows that each uses."""
    found = [twice(), *(plan(p) for p in POINTS if p[0] in CHEAP)]
    return [(model, decisions, rows(model, decisions)) for model, decisions in found]


def test_the_gate_knows_every_row() -> None:
    assert WRONG.keys() == ADJOINTS.keys()
    assert all(wrong != ADJOINTS[row].backward for row, wrong in WRONG.items())


@pytest.mark.parametrize("row", ADJOINTS)
def test_a_wrong_adjoint_is_caught(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [(model, decisions) for model, decisions, rows in used() if row in rows]
    assert plans, f"no plan of this file uses {row}"
    monkeypatch.setitem(ADJOINTS, row, replace(ADJOINTS[row], backward=WRONG[row]))
    for model, decisions in plans:
        try:
            error, _ = model.error(decisions)
        except RuntimeError:  # a gradient of another shape is caught, too
            return
        if error > 1e-3:
            return
    pytest.fail(f"no plan noticed that the adjoint of {row} is {WRONG[row]}")


def test_a_lost_varying_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no gradient would be summed over the ranks that share a value."""
    model, decisions = plan(("mlp", "2x2", 1, 0))
    monkeypatch.setattr(Rule, "varying", lambda rule, index, assignment: ())
    assert model.error(decisions)[0] > 1e-3
