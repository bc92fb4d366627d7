"""What the errors of `parallelize` say to do is what makes it accept the script's model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom import api
from parloom.capture import Loaded, load_model
from parloom.errors import FingerprintError, InputError
from parloom.ir.plan import Plan

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.linspace(0, 1, 3), persistent=TABLE)

    def forward(self, x):
        return F.gelu(self.layer(self.norm(x)) + self.table.to(x.dtype))

def loss(output, batch):
    return F.cross_entropy(output, batch["y"], weight=torch.tensor([1.0, 2.0, 0.5]).to(output))

def factory():
    return Net(), {"x": torch.randn(8, 4), "y": torch.randint(0, 3, (8,))}, loss
"""


def written(folder: Path, table: bool = True) -> str:
    path = folder / "net.py"
    path.write_text(MODEL.replace("TABLE", str(table)))
    return f"{path}:factory"


def planned(spec: str, **asked: Any) -> Plan:
    return api.plan(spec, cluster="1xcpu", method="data_parallel", **asked)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plan(spec: str) -> Plan:
    return planned(spec)


def parallelized(made: Loaded, plan: Plan, loss: Any) -> Any:
    return api.parallelize(made.model, plan, optimizer=torch.optim.AdamW, loss=loss)


def refused(made: Loaded, plan: Plan, loss: Any) -> str:
    with pytest.raises(FingerprintError) as caught:
        parallelized(made, plan, loss)
    return str(caught.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp64"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_model_of_another_dtype_is_cast_as_told(tmp_path: Path, dtype: str, saved: bool) -> None:
    spec = written(tmp_path, saved)
    plan = planned(spec, dtype=dtype)
    made = load_model(spec)
    told = refused(made, plan, made.loss)
    line = re.split(r"; cast .*?: ", told)[1]
    assert line.startswith("model.to(torch.") is (saved or dtype == "fp64"), told
    exec(line, {"model": made.model, "torch": torch})
    planned_batch = load_model(spec, dtype=dtype).batch
    parallelized(made, plan, made.loss).step(planned_batch)
    if line.startswith("for "):  # the table is narrow now, and cannot be made wide again
        narrow = Loaded(load_model(spec).model.to(getattr(torch, plan.source.dtype or "")), {})
        assert "; build it again, and cast all but computed tables (table)" in refused(
            narrow, plan, made.loss
        )


class Turned(nn.Module):
    """A complex table, or a complex weight, beside real weights."""

    turns: Tensor

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        turns = torch.polar(torch.ones(4), torch.arange(4.0))
        if trained:
            self.turns = nn.Parameter(turns)
        else:
            self.register_buffer("turns", turns)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x).float() * self.turns).real.square().mean()
        return loss


def turned_table() -> tuple[nn.Module, dict[str, Tensor]]:
    return Turned(False), {"x": torch.randn(8, 4)}


def turned_weight() -> tuple[nn.Module, dict[str, Tensor]]:
    return Turned(True), {"x": torch.randn(8, 4)}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_complex_tables_stay_complex_and_the_cast_that_is_told_keeps_them(dtype: str) -> None:
    spec = f"{__name__}:turned_table"
    plan = planned(spec, dtype=dtype)
    assert "turns: complex64[4]" in plan.graph
    made = load_model(spec)
    line = re.split(r"; cast .*?: ", refused(made, plan, None))[1]
    exec(line, {"model": made.model, "torch": torch})
    parallelized(made, plan, None).step(load_model(spec, dtype=dtype).batch)


def test_complex_weights_beside_halves_are_refused_by_name() -> None:
    spec = f"{__name__}:turned_weight"
    with pytest.raises(InputError, match=r"turns is complex64 beside weights in half precision"):
        planned(spec, dtype="bf16")
    assert "turns: complex64[4]" in planned(spec, dtype="fp32").graph


def test_another_model_of_another_dtype_is_not_only_cast(tmp_path: Path) -> None:
    spec = written(tmp_path)
    plan = planned(spec, dtype="fp16")
    made = load_model(spec)
    made.model.layer = nn.Linear(5, 3)
    assert "cast" not in refused(made, plan, made.loss)
    made.model.layer = nn.Linear(4, 3, bias=False)
    assert "cast" not in refused(made, plan, made.loss)


def smoothed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5])
    return F.cross_entropy(output, batch["y"], weight=weight, label_smoothing=0.1)


HINT = "parallelize(..., loss=...)"
LOSSES: list[tuple[Any, str]] = [
    (None, r"forward takes x"),
    (lambda output, batch: F.cross_entropy(output, batch["y"]), r"weight constant .* None here"),
    (smoothed, r"label_smoothing 0\.0 in the plan, 0\.1 here"),
    (lambda output, batch: output.mean(), r"mean here"),
    (lambda output, batch: smoothed(output * 2, batch), r": mul is not in the plan"),
]


@pytest.mark.parametrize(("loss", "told"), LOSSES, ids=lambda value: str(value)[:20])
def test_another_loss_function_is_told(spec: str, plan: Plan, loss: Any, told: str) -> None:
    text = refused(load_model(spec), plan, loss)
    assert re.search(told, text), text
    assert HINT in text


def test_nothing_is_said_of_the_loss_where_the_model_differs(spec: str, plan: Plan) -> None:
    made = load_model(spec)
    made.model.norm.eps = 1e-3  # type: ignore[union-attr]
    text = refused(made, plan, made.loss)
    assert "norm: " in text
    assert HINT not in text


def test_nothing_is_said_of_the_loss_of_a_model_that_computes_it(tmp_path: Path) -> None:
    text = MODEL.replace("forward(self, x)", "forward(self, x, y)").replace("TABLE", "True")
    text = text.replace("return F.gelu(", "return loss(F.gelu(").replace(
        "to(x.dtype))", "to(x.dtype)), {'y': y})"
    )
    path = tmp_path / "own.py"
    path.write_text(text.replace(", loss\n", "\n"))
    spec = f"{path}:factory"
    plan, made = planned(spec), load_model(spec)
    made.model.norm.eps = 1e-3  # type: ignore[union-attr]
    assert HINT not in refused(made, plan, None)
