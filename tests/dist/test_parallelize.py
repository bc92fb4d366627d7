"""`parallelize` on the captured main path: weights in and out, evaluation, resume, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parloom import answer, api, complete, zoo
from parloom.errors import (
    CaptureError,
    FingerprintError,
    InfeasibleError,
    InputError,
    LaunchError,
)
from parloom.execute.ranks import fork_ranks
from parloom.ir.plan import Plan

SIZES: dict[str, Any] = {"batch": 8, "features": 8, "hidden": 16, "depth": 2, "classes": 4}
FACTORY = """
from parloom import zoo
def build():
    return zoo.build("mlp", batch=8, features=8, hidden=16, depth=2, classes=4)
"""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FACTORY)
    return f"{path}:build"


def planned(factory: str, cluster: str, method: str) -> Plan:
    devices = int(cluster.removesuffix("xcpu"))
    return api.plan(
        factory, cluster=cluster, devices=devices, method=method, dtype="float64", optimizer="adamw"
    )


def build(seed: int = 0) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model, batch = zoo.build("mlp", **SIZES)
    return model.double(), {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def _train(plan: Plan, folder: Path, weights: Path | None, steps: int) -> dict[str, torch.Tensor]:
    model, batch = build()
    trainer = api.parallelize(model, plan, optimizer=adamw, weights_path=weights)
    for _ in range(steps):
        trainer.step(batch)
    trainer.export(folder / "weights")
    loss = float(trainer.evaluate(batch).loss)
    state = trainer.state_dict()
    assert loss == pytest.approx(float(_eager_loss(state, batch)), rel=1e-12)
    return state


def _eager_loss(state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model, _ = build()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        loss: torch.Tensor = model(**batch)[0]
    return loss


@pytest.mark.parametrize("method", ["fsdp", "megatron"])
def test_weights_go_in_and_out(factory: str, tmp_path: Path, method: str) -> None:
    """Trained weights equal eager training that started from the same file."""
    start, batch = build(seed=7)
    save_file(dict(start.state_dict()), tmp_path / "start.safetensors")
    plan = planned(factory, "4xcpu", method)
    states = fork_ranks(4, _train, plan, tmp_path, tmp_path / "start.safetensors", 2)
    optimizer = adamw(list(start.named_parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        start(**batch)[0].backward()
        optimizer.step()
    for name, tensor in start.state_dict().items():
        assert torch.allclose(states[0][name], tensor, rtol=1e-9, atol=1e-12), name
    _, batch = build()
    again = fork_ranks(4, _train, plan, tmp_path, tmp_path / "weights", 0)
    for name, tensor in states[0].items():
        assert torch.equal(again[0][name], tensor), name


def test_one_rank_needs_no_launcher(factory: str) -> None:
    plan = planned(factory, "1xcpu", "data_parallel")
    model, batch = build()
    reference, _ = build()
    trainer = api.parallelize(model, plan, optimizer=adamw)
    assert torch.equal(trainer.step(batch).loss, reference(**batch)[0].detach())


def test_objects_in_place_of_functions_are_refused(factory: str) -> None:
    plan = planned(factory, "1xcpu", "data_parallel")
    model, batch = build()
    made = adamw(list(model.named_parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(made, 1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": made}, "optimizer is an AdamW, made before .*=lambda named: torch.optim.Ad"),
        ({"optimizer": None}, "optimizer is a NoneType; give a function"),
        ({"optimizer": "adamw"}, "optimizer is a str; give a function"),
        ({"optimizer": lambda named: named}, "`optimizer` made a list, not an optimizer"),
        ({"scheduler": schedule}, "scheduler is a StepLR, made before .*lambda optimizer: "),
        ({"loss": batch["labels"]}, "loss is a Tensor; give a function: loss=lambda output"),
    ]
    for given, message in wrong:
        with pytest.raises(InputError, match=message):
            api.parallelize(model, plan, **({"optimizer": adamw} | given))


def test_refusals(factory: str) -> None:
    plan = planned(factory, "1xcpu", "data_parallel")
    model, _ = build()
    again = r"script made a SGD .* plan again: parloom plan .*--dtype fp64 --optimizer sgd"
    with pytest.raises(FingerprintError, match=again):
        api.parallelize(model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    other, _ = zoo.build("mlp", **(SIZES | {"hidden": 32}))
    with pytest.raises(FingerprintError, match=r"4 of 6 parameters differ|parameters differ"):
        api.parallelize(other.double(), plan, optimizer=adamw)
    with torch.device("meta"):
        empty, _ = zoo.build("mlp", **SIZES)
    with pytest.raises(InputError, match="weights_path"):
        api.parallelize(empty.double(), plan, optimizer=adamw)
    four = planned(factory, "4xcpu", "data_parallel")
    with pytest.raises(LaunchError, match="parloom run"):
        api.parallelize(model, four, optimizer=adamw)


def test_another_model_is_told_from_the_planned_one(factory: str) -> None:
    plan = planned(factory, "1xcpu", "data_parallel")

    def told(model: torch.nn.Module) -> str:
        with pytest.raises(FingerprintError) as caught:
            api.parallelize(model, plan, optimizer=adamw)
        return str(caught.value)

    model, _ = build()
    name = next(n for n, _ in model.named_parameters())
    model.get_parameter(name).requires_grad_(False)
    text = told(model)
    assert f": 1 of 6 parameters differ: {name} (frozen, planned trainable);" in text
    assert text.endswith(f"plan again: {plan.command()}")
    assert "--dtype fp64" in text
    assert "(float32, planned float64)" in told(build()[0].float())
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
    text = told(other)
    assert "6 of 6 parameters differ: " in text
    assert "(missing)" in text
    assert "4 parameters are not in the plan: 0.weight, 0.bias, 1.weight, ..." in text
    api.parallelize(build()[0], replace(plan, fingerprint="other"), optimizer=adamw)


def test_a_loss_function_that_is_left_out_is_told(tmp_path: Path) -> None:
    path = tmp_path / "with_loss.py"
    path.write_text(
        "import torch\n"
        "def build():\n"
        "    batch = {'input': torch.randn(4, 3), 'y': torch.randn(4, 2)}\n"
        "    loss = lambda out, batch: (out - batch['y']).square().mean()\n"
        "    return torch.nn.Linear(3, 2), batch, loss\n"
    )
    plan = api.plan(f"{path}:build", cluster="1xcpu", method="data_parallel")
    with pytest.raises(FingerprintError, match=r"'y'.* loss .*parallelize\(\.\.\., loss=\.\.\.\)"):
        api.parallelize(torch.nn.Linear(3, 2), plan, optimizer=adamw)


@pytest.mark.slow
def test_where_nothing_fits_the_error_has_the_facts(
    factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = api.capture(factory, dtype="float64", optimizer="adamw")

    def limited(memory: int) -> Plan:
        return api.search(captured, cluster="2xcpu", memory=memory)

    with pytest.raises(InfeasibleError, match=r"(?s)no plan fits in .*what would fit, ") as caught:
        limited(1000)
    document = dict(caught.value.document)
    assert document["limit_bytes"] == 1000
    smallest = document["smallest"]
    assert isinstance(smallest, dict)
    assert str(smallest["name"]) in str(caught.value)
    sizes = list(smallest["memory"].values())
    assert sizes == sorted(sizes, reverse=True)
    assert document["changes"]

    fits = limited(smallest["peak_bytes"])
    assert fits.prediction is not None
    assert fits.prediction.peak_bytes == smallest["peak_bytes"]
    monkeypatch.setattr(answer, "priced_changes", lambda *_: iter(()))
    with pytest.raises(InfeasibleError) as below:
        limited(smallest["peak_bytes"] - 1)
    assert dict(below.value.document)["smallest"] == smallest


def test_a_model_that_cannot_be_evaluated_can_be_trained(
    factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise CaptureError("operator 'odd' in module 'head' has no rule")

    monkeypatch.setattr(complete, "evaluation_program", refused)
    plan = planned(factory, "1xcpu", "data_parallel")
    assert plan.notes == ("no evaluation program: operator 'odd' in module 'head' has no rule",)
    model, batch = build()
    trainer = api.parallelize(model, plan, optimizer=adamw)
    trainer.step(batch)
    with pytest.raises(
        InputError, match="plan has no evaluation program: operator 'odd' in module 'head'"
    ):
        trainer.evaluate(batch)


def test_a_plan_that_splits_nothing_says_so_and_why(factory: str) -> None:
    said: list[str] = []
    plan = api.plan(factory, cluster="3xcpu", devices=3, memory=2**50, progress=said.append)
    (warning,) = plan.notes
    assert warning.startswith("warning: nothing is split: all 3 devices do all the work")
    assert warning.endswith("; 8 samples do not divide over them: ask for a batch of 9")
    assert warning in said
    assert any("1 PiB per device (--memory), more than the 4 GiB" in a for a in plan.assumptions)
    assert any("megatron (tensor=3): " in line and line.endswith(" KiB") for line in said)


def test_splitting_that_is_only_slower_is_not_blamed_on_the_batch(
    factory: str, tmp_path: Path
) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(
        "device: {name: c, memory: 4GiB, memory_bandwidth: 10GB/s, rates: {fp32: 200GFLOP/s}}\n"
        "levels: [{name: modem, size: 2, bandwidth: 1kB/s}]\n"
    )
    assert "one device will do" in api.plan(factory, cluster=str(path)).notes[0]
    warning = api.plan(factory, cluster=str(path), devices=2).notes[0]
    assert "nothing is split" in warning
    assert "the fastest plan that splits something, " in warning
    assert " per device" in warning
    assert "batch" not in warning


def test_a_plan_that_splits_something_warns_of_nothing(factory: str) -> None:
    plan = planned(factory, "4xcpu", "data_parallel")
    assert plan.notes == ()
    assert not any("--memory" in line for line in plan.assumptions)


def test_decisions_of_a_plan_take_other_microbatches(factory: str, tmp_path: Path) -> None:
    first = api.save(planned(factory, "2xcpu", "fsdp"), tmp_path / "first plan")["plan"]
    plan = api.plan(
        factory,
        cluster="2xcpu",
        method=str(first),
        microbatches=2,
        dtype="float64",
        optimizer="adamw",
    )
    assert plan.decisions.num_microbatches == 2
    assert plan.method == str(first)
