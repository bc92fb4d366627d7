"""Models that the caller holds: planned and proved as they are; plans and others draw
themselves.
"""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import parloom
from parloom.cost.clusters import LoadedCluster
from parloom.errors import FingerprintError, InputError
from parloom.ir.plan import Plan
from parloom.zoo import mlp


class Net(nn.Module):
    """Two products; the loss is made inside or outside."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


def loss_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def made(width: int = 16) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net(width), {"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,))}


@pytest.fixture(scope="module")
def held() -> tuple[Plan, Net, dict[str, Tensor]]:
    model, batch = made()
    plan = parloom.plan(
        model, batch, torch.optim.SGD, "2x2xcpu", loss=loss_of, method="megatron", devices=4
    )
    return plan, model, batch


def test_a_module_is_planned_and_proved_as_it_is(held: tuple[Plan, Net, dict[str, Tensor]]) -> None:
    plan, model, _ = held
    assert plan.optimizer.name == "sgd"
    assert parloom.verify(plan).passed
    assert all(p.grad is None for p in model.parameters())
    assert plan.command().startswith("parloom.plan(model, batch, cluster='2x2xcpu'")


def test_planning_changes_nothing_of_the_model() -> None:
    model, batch = made()
    model.eval()
    (model(batch["x"]).sum()).backward()
    before = {
        n: (p.clone(), p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None
    }
    state = torch.random.get_rng_state()
    parloom.plan(model, batch, torch.optim.SGD, "2xcpu", loss=loss_of, method="data_parallel")
    assert torch.equal(state, torch.random.get_rng_state())
    assert not model.training
    for name, parameter in model.named_parameters():
        value, gradient = before[name]
        assert torch.equal(parameter, value)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_it_trains_under_its_plan() -> None:
    model, batch = made()
    expected = loss_of(model(batch["x"]), batch).item()
    plan = parloom.plan(
        model, batch, torch.optim.SGD, "1xcpu", loss=loss_of, method="data_parallel"
    )
    trainer = parloom.parallelize(
        model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), loss=loss_of
    )
    assert float(trainer.step(batch).loss) == pytest.approx(expected, rel=1e-6)


def test_another_model_of_the_class_is_no_proof(held: tuple[Plan, Net, dict[str, Tensor]]) -> None:
    plan, *_ = held
    other, batch = made(width=32)
    parloom.plan(other, batch, torch.optim.SGD, "1xcpu", loss=loss_of, method="data_parallel")
    with pytest.raises(FingerprintError):
        parloom.verify(plan)


def test_a_model_that_is_gone_is_said() -> None:
    model, batch = made()
    plan = parloom.plan(
        model, batch, torch.optim.SGD, "1xcpu", loss=loss_of, method="data_parallel"
    )
    del model
    with pytest.raises(InputError, match="Net that lived in another process, or is gone"):
        parloom.verify(plan)


def test_a_function_that_can_be_imported_is_named() -> None:
    plan = parloom.plan(mlp.build, cluster="2xcpu", method="data_parallel")
    assert plan.source.spec == "parloom.zoo.mlp:build"
    assert "parloom plan parloom.zoo.mlp:build" in plan.command()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((lambda: made(), None), "cannot import: call it"),  # noqa: PLW0108
        ((3, None), "the model is a int"),
        ((made()[0], 8), "a dict of tensors, its keyword arguments; got 8"),
        ((made()[0], torch.ones(999)), "its keyword arguments; got Tensor"),
        ((type(made()[0]), made()[1]), "the model is the class"),
        ((made()[0], {"x": [1, 2]}), "batch\\['x'\\] is a list"),
        (("zoo:mlp", made()[1]), "go with a module"),
    ],
)
def test_what_is_refused(given: tuple[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parloom.plan(*given, cluster="2xcpu")


def test_an_optimizer_that_only_a_call_would_tell_is_refused() -> None:
    with pytest.raises(InputError, match="only a call would tell"):
        parloom.plan(*made(), lambda named: torch.optim.SGD(named), "2xcpu", loss=loss_of)  # noqa: PLW0108


def test_everything_draws_itself(held: tuple[Plan, Net, dict[str, Tensor]], tmp_path: Path) -> None:
    plan, model, _ = held
    cluster: LoadedCluster = parloom.load_cluster("2x8xH100")
    shown = {
        "Net on 2x2xcpu": plan,
        "at the peak": plan.prediction,
        "NVLink4": cluster,
        "InfiniBand": cluster.cluster,
        "first.weight": plan.show_sharding(model.first.weight, model),
        "difference": plan.explain(versus="fsdp"),
        "bound by": plan.explain("first"),
    }
    for word, value in shown.items():
        screen = io.StringIO()
        Console(file=screen, width=200).print(value)
        assert word in screen.getvalue(), word
        assert word in value._repr_html_(), word
    report = plan.report()
    assert report._repr_html_().startswith("<iframe title=")
    assert "Content-Security-Policy" in report.save(tmp_path / "r.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="no parameter or buffer"):
        plan.show_sharding(torch.ones(2), model)
    with pytest.raises(InputError, match="`model` says"):
        plan.show_sharding(model.first.weight)
