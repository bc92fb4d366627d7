"""A model is captured again on draws in the ranges of the planned batch, not on zeros."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api
from parloom.capture import capture, program
from parloom.capture.ranges import drawn_batch, ranges_of
from parloom.errors import FingerprintError, InputError
from parloom.execute.same_model import on_the_host
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json

FACTORY = """
import torch
from torch import nn


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        n = x.norm(dim=1, keepdim=True)
        y = x / n
        ctx.save_for_backward(y, w)
        return y * w

    @staticmethod
    def backward(ctx, g):
        y, w = ctx.saved_tensors
        return None, (g * y).sum(0)


class Level(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, ids):
        ctx.save_for_backward(ids)
        return w[None, :] * (1.0 + ids[:, None] / 1000)

    @staticmethod
    def backward(ctx, g):
        ids, = ctx.saved_tensors
        scale = 1.0 + ids[:, None] / 1000
        EDIT
        return (g * scale).sum(0), None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.v = nn.Parameter(torch.ones(4))

    def forward(self, x, ids):
        return (Normed.apply(x, self.w).log() + Level.apply(self.v, ids)).square().mean()


def factory():
    return Model(), {"x": torch.rand(6, 4) + 0.5, "ids": torch.randint(400, 900, (6,))}
"""


def written(folder: Path, name: str, edit: str = "") -> str:
    path = folder / f"{name}.py"
    path.write_text(FACTORY.replace("EDIT", edit))
    return f"{path}:factory"


def script(spec: str) -> nn.Module:
    namespace: dict[str, Any] = {"__name__": "script_of_ranges"}
    exec(Path(spec.partition(":")[0]).read_text(), namespace)
    model: nn.Module = namespace["factory"]()[0]
    return model


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    spec = written(tmp_path_factory.mktemp("ranges"), "ranged_model")
    return api.plan(spec, cluster="1xcpu", method="data_parallel", optimizer="sgd")


def test_a_plan_records_the_ranges_of_its_batch(plan: Plan) -> None:
    found = {name: (low, high) for name, low, high in plan.ranges}
    assert 400 <= found["ids"][0] <= found["ids"][1] < 900
    assert 0.5 <= found["x"][0] <= found["x"][1] < 1.5
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


def test_a_function_that_has_no_value_at_zero_is_the_planned_one(plan: Plan) -> None:
    model = script(plan.source.spec)
    trainer = api.parallelize(model, plan, optimizer=lambda n: torch.optim.SGD(n, lr=0.1))
    assert trainer.steps_done == 0


def test_a_backward_that_is_wrong_in_the_range_alone_is_found(plan: Plan, tmp_path: Path) -> None:
    edit = "scale = torch.where(ids[:, None] > 300, 2 * scale, scale)"
    model = script(written(tmp_path, "edited_model", edit))
    with pytest.raises(FingerprintError, match="backward that is not the derivative"):
        api.parallelize(model, plan, optimizer=lambda n: torch.optim.SGD(n, lr=0.1))


def test_weights_without_values_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    monkeypatch.setattr(program, "deepcopy", lambda _: pytest.fail("it was called"))
    with on_the_host(model):
        assert not model.weight.is_meta
        wrapper = program.LossProgram(model, None, True, ["input"])
        assert program.called_for_real(wrapper, {"input": torch.ones(2, 4)}) == []


class Every(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        found: Tensor = self.a(x).mean()
        for other in others.values():
            found = found + other.double().mean()
        return found


BATCH = {
    "x": torch.rand(3, 4) - 2,
    "half": torch.full((3,), 7.0, dtype=torch.float16),
    "bytes": torch.tensor([3, 250, 4], dtype=torch.uint8),
    "long": torch.tensor([-(2**63), 2**63 - 1, 0]),
    "mask": torch.tensor([True, False, True]),
    "on": torch.tensor([True, True, True]),
    "infinite": torch.tensor([1.0, float("inf"), 2.0]),
}


def test_draws_are_in_range() -> None:
    graph = capture(Every(), BATCH)
    drawn = drawn_batch(graph, ranges_of(BATCH), torch.device("cpu"))
    assert {n: (t.shape, t.dtype) for n, t in drawn.items()} == {
        n: (t.shape, t.dtype) for n, t in BATCH.items()
    }
    for name, tensor in drawn.items():
        if name != "infinite":
            assert bool((tensor >= BATCH[name].min()).all())
            assert bool((tensor <= BATCH[name].max()).all())
    assert not drawn["infinite"].any()
    assert bool((drawn["x"] != drawn["x"][0, 0]).any())
    again = drawn_batch(graph, ranges_of(BATCH), torch.device("cpu"))
    assert all(torch.equal(again[name], tensor) for name, tensor in drawn.items())


@pytest.mark.parametrize("ends", ["[1]", "[1, 2, 3]", '["a", 1]', "[NaN, 1]", "[1e999, 2]"])
def test_ranges_of_a_plan_file_are_two_numbers(plan: Plan, ends: str) -> None:
    text = plan_to_json(plan)
    low, high = next((low, high) for name, low, high in plan.ranges if name == "ids")
    for old in (f"[{low}, {high}]", f"[\n      {low},\n      {high}\n    ]"):
        text = text.replace(old, ends)
    assert text != plan_to_json(plan)
    with pytest.raises(InputError):
        plan_from_json(text, "plan.json")


def test_ranges_that_make_no_sense_are_not_drawn_from(plan: Plan) -> None:
    graph = capture(Every(), BATCH)
    bad = (("x", 2.0, -2.0), ("bytes", -5, 10**12), ("mask", 5, 9), ("nobody", 0, 1))
    drawn = drawn_batch(graph, bad, torch.device("cpu"))
    assert not drawn["x"].any()
    assert drawn["bytes"].dtype == torch.uint8
    assert bool(drawn["mask"].all())
