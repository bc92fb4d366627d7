"""Towers of convolutions with the same weights as one: equal to the model as it was."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import api
from parloom.comparators.baselines import random_plan
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.plan import Plan
from parloom.ir.verify import verify_graph
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.rewrites import derived, rewritten, takes_of
from parloom.rewrite.take import Take
from parloom.rewrite.terms import calls_in
from parloom.search.rewritten import made_together
from tests.dist import lowered
from tests.dist.lowered import MESHES, Model
from tests.equality import TOLERANCE, difference, parallel

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


class Random2d(nn.Module):
    """Images of two batches through the same random layers, and of one through others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = Random(seed)
        self.tower, self.other = self.layers(rng), self.layers(rng)
        self.head = nn.LazyLinear(3)

    @staticmethod
    def layers(rng: Random) -> nn.Sequential:
        width, found = 4, list[nn.Module]()
        for _ in range(rng.randint(2, 3)):
            kernel, groups = (rng.randint(1, 3), rng.randint(1, 3)), rng.choice((1, 1, 2, 4))
            dilation = (rng.randint(1, 2), rng.randint(1, 2))
            padding: Any = rng.choice(("same", "valid", (rng.randint(0, 2), rng.randint(0, 3))))
            stride = 1 if found or padding == "same" else (1, rng.randint(1, 2))
            found.append(
                nn.Conv2d(
                    width, 8, kernel, stride, padding, dilation, groups, bias=rng.random() < 0.5
                )
            )
            found.append(rng.choice((nn.ReLU(), nn.Tanh(), nn.GELU())))
            if rng.random() < 0.5:
                pools = (nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2, 1), nn.MaxPool2d(2, 1, dilation=2))
                found.append(rng.choice(pools))
            width = 8
        found.append(rng.choice((nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(2))))
        return nn.Sequential(*found, nn.Flatten())

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        one, other = self.head(self.tower(x)), self.head(self.tower(y))
        loss: Tensor = one.square().mean() + other.tanh().sum() + self.other(z).sigmoid().sum()
        return loss


@cache
def towers(seed: int) -> Model:
    torch.manual_seed(seed)
    module = Random2d(seed)
    batch = {name: torch.randn(n, 4, 32, 32) for name, n in (("x", 4), ("y", 8), ("z", 4))}
    module(**batch)
    return lowered.of(module, batch)


def takes(graph: Graph) -> list[Take]:
    return [take for take in fusions(graph, graph.main) if made_together(graph, [take])]


def error(model: Model, graph: Graph) -> float:
    """How far a rewritten graph is from the model on one device, in values and gradients."""
    verify_graph(graph)
    one, other = model.expected, replace(model, graph=graph).expected
    pairs = [(one.loss, other.loss)]
    for kind in ("gradients", "buffers"):
        own, found = getattr(one, kind), getattr(other, kind)
        assert own.keys() == found.keys()
        pairs += [(own[name], found[name]) for name in own]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-2)) for a, b in pairs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_towers_of_random_windows_are_one(seed: int) -> None:
    model = towers(seed)
    found = takes(model.graph)
    whole = [take for take in found if take.call.args[0] and "linear_along_d0" in take.rules]
    assert whole
    (name,) = {rule for take in whole for rule in take.rules if rule.startswith("conv")}
    assert name == "conv2d_along_n"
    before = sum(node.op.startswith("conv") for _, node in model.graph.unfolded())
    for take in found:
        assert error(model, derived(model.graph, [str(take)])) <= TOLERANCE
    after = derived(model.graph, [str(whole[0])])
    num_layers = sum(call.op.startswith("conv") for call in calls_in(whole[0].call))
    assert sum(n.op.startswith("conv") for _, n in after.unfolded()) == before - num_layers


@pytest.mark.parametrize("seed", range(4))
def test_towers_as_one_are_split_in_any_way(seed: int) -> None:
    model = towers(seed)
    whole = next(take for take in takes(model.graph) if "linear_along_d0" in take.rules)
    graph = derived(model.graph, [str(whole)])
    plan = random_plan(graph, factorize(graph), MESHES["2x2"], seed, 1)
    found = parallel(lower(graph, plan), model.tensors, model.batch)
    assert difference(model.expected, found)[0] <= TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_parts_in_another_order_would_be_seen(seed: int) -> None:
    model = towers(seed)
    whole = next(take for take in takes(model.graph) if "linear_along_d0" in take.rules)
    wrong = str(whole).replace("cat((x, y)", "cat((y, x)")
    assert wrong != str(whole)
    with pytest.raises(InputError, match="does not follow from"):
        derived(model.graph, [wrong])
    assert error(model, rewritten(model.graph, [wrong])) > 1e-3


class Grouped(nn.Module):
    """Convolutions of different operands and weights, in groups of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(8, 12, 3, groups=4)
        self.c = nn.Conv2d(6, 18, 3, groups=3)  # of another number of channels out

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        made: Tensor = (
            self.a(x).tanh().sum() + self.b(y).square().mean() + self.c(z).sigmoid().sum()
        )
        return made


def test_groups_of_channels_are_one_after_the_other() -> None:
    torch.manual_seed(0)
    batch = {name: torch.randn(3, n, 6, 6) for name, n in (("x", 4), ("y", 8), ("z", 6))}
    model = lowered.of(Grouped(), batch)
    (take,) = takes(model.graph)
    assert take.rules == ("conv2d_along_g",)
    call = next(call for call in calls_in(take.call) if call.op == "conv2d")
    assert call.args[-1] == 2 + 4
    assert error(model, derived(model.graph, [str(take)])) <= TOLERANCE
    text = str(take)
    for wrong in (text.replace(", 6), (6, 12)", ", 3), (6, 12)"), text.replace("(x, y)", "(y, x)")):
        assert wrong != text
        with pytest.raises(InputError):
            derived(model.graph, [wrong])


class Normalized(nn.Module):
    """Towers with statistics of a batch, by the operator or written out."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.norm = None if written else nn.BatchNorm2d(4)

    def tower(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.norm(x) if self.norm else x - x.mean(0)
        found: Tensor = self.b(F.relu(x))
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.tower(x).square().mean() + self.tower(y).tanh().sum()
        return loss


@cache
def normalized(written: bool) -> Model:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 3, 6, 6), "y": 2 + torch.randn(4, 3, 6, 6)}
    return lowered.of(Normalized(written), batch)


def convolutions(graph: Graph) -> list[str]:
    return [n.results[0].name for _, n in graph.unfolded() if n.op == "conv2d"]


@pytest.mark.parametrize("written", [False, True])
def test_statistics_of_samples_keep_towers_apart(written: bool) -> None:
    """What is before them is one, and what is behind them, but not across them."""
    model = normalized(written)
    a, b, c, d = convolutions(model.graph)
    found = [take for take in takes(model.graph) if "conv2d_along_n" in take.rules]
    assert {take.values for take in found} == {(a, c), (b, d)}
    for take in found:
        ops = [call.op for call in calls_in(take.call)]
        assert ops.count("conv2d") == 1
        assert {"batch_norm", "mean", "sub"}.isdisjoint(ops)
        assert error(model, derived(model.graph, [str(take)])) <= TOLERANCE


def test_batch_norm_of_samples_that_are_joined_would_be_seen() -> None:
    model = normalized(False)
    one, other = (n for _, n in model.graph.unfolded() if n.op == "batch_norm")
    names = [own.results[0].name for own in (one, other)]
    whole = f"batch_norm(cat(({one.refs[0]}, {other.refs[0]}), -4), {', '.join(one.refs[1:])}"
    wrong = (
        f"take {', '.join(names)} in main by batch_norm_along_d0: split_with_sizes({whole}, True,"
        " 0.1, 1e-05), (4, 4), -4)"
    )
    with pytest.raises(InputError, match="batch_norm"):
        derived(model.graph, [wrong])
    joined = torch.cat([model.batch[name] for name in "xy"])
    apart = [F.batch_norm(model.batch[name], None, None, training=True) for name in "xy"]
    as_one = F.batch_norm(joined, None, None, training=True)
    assert (as_one - torch.cat(apart)).abs().max() > 0.1


class Images(nn.Module):
    """Two images through one tower, and a third one through another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding="same"), nn.Conv2d(16, 32, 3, 2, 1)
        self.c, self.d = nn.Conv2d(1, 8, 3, padding=2, dilation=2), nn.Linear(8 * 4 * 4, 16)
        self.last = nn.Linear(32 * 4 * 4, 16)

    def tower(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(F.relu(self.a(x))))
        found: Tensor = self.last(F.max_pool2d(x, 3, 2, 1).flatten(1))
        return found

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        other = self.d(F.avg_pool2d(F.relu(self.c(z)), 4).flatten(1))
        loss: Tensor = ((self.tower(x) - self.tower(y)) * other).square().mean()
        return loss


def images(batch: int = 8) -> lowered.Built:
    made = {name: torch.randn(batch, 1 if name == "z" else 3, 16, 16) for name in "xyz"}
    return Images(), made


def some_images() -> lowered.Built:
    return images(24)


def many_images() -> lowered.Built:
    return images(64)


def planned(cluster: str, model: str = "images", **asked: Any) -> Plan:
    return api.plan(f"{__file__}:{model}", cluster=cluster, optimizer="sgd", **asked)


def rules_of(plan: Plan) -> Sequence[str]:
    (take,) = takes_of(plan.decisions.rewrites)
    return take.rules


WHOLE = (
    "conv2d_along_n", "linear_along_d0", "max_pool2d_along_n", "relu_along_d0", "view_along_f0",
)  # fmt: skip


@pytest.mark.slow
def test_a_whole_tower_is_chosen_where_it_pays() -> None:
    plan, without = planned("1x1xcpu"), planned("1x1xcpu", forbid=["rewrite=*"])
    assert rules_of(plan) == WHOLE
    assert api.verify(plan).passed
    assert plan.prediction is not None
    assert without.prediction is not None
    assert plan.prediction.step_s < without.prediction.step_s


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "ranks", "asked"),
    [
        ("some_images", 2, {}),
        ("many_images", 4, {"devices": 4, "pin": ["rewrite=conv2d_along_n", "stages=1"]}),
    ],
)
def test_a_whole_tower_is_split_by_samples(model: str, ranks: int, asked: dict[str, Any]) -> None:
    """Where it is chosen, and where it is asked for."""
    plan = planned("1x4xcpu", model, **asked)
    assert rules_of(plan) == WHOLE
    assert plan.decisions.num_ranks == ranks
    assert {n.key: n.factors for n in plan.decisions.nodes}[":conv2d#1"] == (("n1", ("x",)),)
    assert api.verify(plan).passed
