"""Plans in which modules of models without repeated blocks recompute, against one device."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from parloom import answer, api, zoo
from parloom.capture import capture
from parloom.comparators.configuration import SELECTIVE, Configuration, laid_out
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.ir.expected import Prediction
from parloom.ir.plan import Decisions, Optimizer, Plan
from parloom.rewrite.rewrites import rewritten
from parloom.search.blocks import search_with_blocks, smallest_with_blocks
from parloom.search.request import Request, Wanted, base_of
from tests.dist.lowered import Model, of
from tests.equality import TOLERANCE
from tests.zoo_sizes import SMALL

TWO = DataSheets(load_cluster("1x2xH100"))
SGD = Optimizer("sgd", 0)
STACK = """
import torch
from torch import Tensor, nn

class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin().tanh())

class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(width) for width in (32, 64, 48, 32))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()

def make():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(4096, 16)}
"""


@cache
def model(name: str) -> Model:
    torch.manual_seed(0)
    module, batch = zoo.build(name, batch=16, **SMALL[name])
    return of(module, batch, capture(module, batch))


def error(name: str, decisions: Decisions) -> tuple[float, str]:
    """How far a plan is from one device, with its blocks."""
    found = model(name)
    return replace(found, graph=rewritten(found.graph, decisions.rewrites)).error(decisions)


def predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def recomputes(decisions: Decisions) -> bool:
    policies = [a.policy for a in decisions.activations]
    return bool(decisions.rewrites) and "recompute" in policies


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["alexnet", "candle_uno", "dlrm"])
def test_searched_plans_equal_one_device(name: str) -> None:
    """Under a limit that only plans with blocks obey, as they hold least."""
    request = Request(model(name).graph, TWO, SGD, TWO.cluster.device.memory_bytes, 1)
    least = smallest_with_blocks(request, base_of(request))
    assert least is not None
    tight = replace(request, limit_bytes=int(least.plan.peak_bytes * 1.03), wanted=Wanted.PRICE)
    plans = [least.plan, *search_with_blocks(tight, base_of(tight), lambda text: None).proposals]
    assert recomputes(plans[-1].decisions)
    for plan in (plans[0], plans[-1]):
        worst, where = error(name, plan.decisions)
        assert worst <= TOLERANCE, where


@pytest.mark.sample(2)
@pytest.mark.parametrize("level", [SELECTIVE, "full"])
@pytest.mark.parametrize("name", ["candle_uno", "unet", "wide_resnet"])
def test_rules_of_thumb_equal_one_device(name: str, level: str) -> None:
    chosen = Configuration(data=2, zero=3, recompute=level, microbatch=8, master_dtype=None)
    plan = laid_out(model(name).graph, chosen, TWO.cluster).decisions(chosen)
    assert recomputes(plan)
    worst, where = error(name, plan)
    assert worst <= TOLERANCE, where


@pytest.mark.slow
def test_a_model_without_repeated_blocks_under_half_and_a_quarter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: planned and proved on two ranks; what the limits cost is not asked."""
    monkeypatch.setattr(answer, "_constrained", lambda request, origin, found, *_: found)
    path = tmp_path / "stack.py"
    path.write_text(STACK, encoding="utf-8")
    captured = api.capture(f"{path}:make", optimizer="sgd")

    def planned(memory: float | None, microbatches: int | None = 1) -> Plan:
        given = None if memory is None else int(memory)
        return api.search(captured, cluster="1x2xcpu", microbatches=microbatches, memory=given)

    peak = predicted(planned(None)).peak_bytes
    plans = [planned(peak / 2, None), planned(peak / 4, None), planned(peak * 0.7)]
    for plan in plans:
        assert plan.bound_s is not None
        assert predicted(plan).step_s >= plan.bound_s
        assert api.verify(plan).passed
    assert recomputes(plans[-1].decisions)
