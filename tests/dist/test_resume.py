"""Training that goes on from a checkpoint, under any plan, equals training without a break."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from parloom import runtime as rt
from parloom.errors import InputError
from parloom.execute import checkpoint, weights
from parloom.execute.ranks import fork_ranks
from tests.dist import mlp

TOLERANCE = 1e-9
CLIP_NORM = 0.5
STEPS = 4

PLANS: dict[str, tuple[dict[str, int], mlp.Layout]] = {
    "data_4": ({"x": 4}, mlp.Layout(("x",))),
    "zero1_tensor_4": ({"x": 2, "y": 2}, mlp.Layout(("x",), ("y",), "zero1")),
    "zero3_2": ({"x": 2}, mlp.Layout(("x",), storage="zero3")),
    "within_4": ({"x": 2, "y": 2}, mlp.Layout(("x", "y"), chunks=(("y",), ("y",), ("y", "x")))),
    "tensor_2": ({"x": 2}, mlp.Layout((), ("x",))),
}


def trainer(
    plan: str, seed: int = 0, rename: Mapping[str, str] | None = None, **changes: Any
) -> rt.Trainer:
    """This rank's trainer; weights of another seed than 0 are wrong, for a load to overwrite."""
    axes, layout = PLANS[plan]
    mesh, new = rt.grid(axes), rename or {}
    made = mlp.program(mesh, layout)
    parameters = [
        replace(spec, name=new.get(spec.name, spec.name), **changes) for spec in made.parameters
    ]
    step = [
        replace(node, parameters=tuple(new.get(n, n) for n in node.parameters))
        for node in made.step
    ]
    made = replace(made, parameters=tuple(parameters), step=tuple(step))
    start = {new.get(n, n): value + seed for n, value in mlp.model().state_dict().items()}
    return rt.Trainer(
        made,
        start,
        optimizer=mlp.adamw,
        comm=rt.DistributedComm(mesh, rt.required_groups(made)),
        clip_norm=CLIP_NORM,
        scheduler=lambda optimizer: StepLR(optimizer, 1, 0.5),
        seed=seed,
    )


def train(run: rt.Trainer, steps: range) -> mlp.Run:
    results = [run.step(mlp.batch(seed=step)) for step in steps]
    norms = [r.grad_norm.item() for r in results if r.grad_norm is not None]
    return mlp.Run([r.loss.item() for r in results], norms, run.state_dict())


def num_ranks(plan: str) -> int:
    return rt.grid(PLANS[plan][0]).num_ranks


def save_midway(plan: str, folder: Path, asynchronous: bool) -> mlp.Run:
    """Save after two steps and train on; what the uninterrupted run is from there."""
    run = trainer(plan)
    train(run, range(2))
    handle = checkpoint.save(run, folder, asynchronous=asynchronous, plan_hash=plan)
    rest = train(run, range(2, STEPS))
    handle.wait()
    return rest


def resume(plan: str, folder: Path) -> mlp.Run:
    run = trainer(plan, seed=7)
    loaded = checkpoint.load(run, folder)
    assert (loaded.step, run.steps_done, run.samples_seen) == (2, 2, 2 * mlp.BATCH)
    assert json.dumps(run.extra_state()["seed"]) == "0"
    return train(run, range(2, STEPS))


def resume_all(plan: str, folder: Path) -> dict[str, mlp.Run]:
    return {saved: resume(plan, folder / saved) for saved in PLANS}


def test_any_plan_goes_on_from_any_other(tmp_path: Path) -> None:
    whole = mlp.single_device(mlp.adamw, STEPS, CLIP_NORM, halve=True)
    expected = mlp.Run(whole.losses[2:], whole.norms[2:], whole.weights)
    uninterrupted = {
        plan: fork_ranks(num_ranks(plan), save_midway, plan, tmp_path / plan, "zero" in plan)
        for plan in PLANS
    }
    for plan in PLANS:
        for rank, runs in enumerate(fork_ranks(num_ranks(plan), resume_all, plan, tmp_path)):
            for saved, run in runs.items():
                assert mlp.difference(run, expected) < TOLERANCE, (saved, plan, rank)
            same = uninterrupted[plan][rank]
            assert mlp.difference(runs[plan], same) == 0.0, "to the bit under the same plan"


def load_wrong(folder: Path) -> str:
    run = trainer("data_4", rename={"unused": "unusual"})
    with pytest.raises(InputError) as refused:
        checkpoint.load(run, folder)
    return str(refused.value)


def test_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    fork_ranks(4, save_midway, "data_4", tmp_path / "a", False)
    said = fork_ranks(4, load_wrong, tmp_path / "a")
    assert len(said) == 4
    for line in said:
        assert re.search(r"rank 0: .* no tensor unusual \(nearest: unused\)", line)


def export(plan: str, folder: Path) -> dict[str, torch.Tensor]:
    run = trainer(plan)
    train(run, range(1))
    weights.export_safetensors(run, folder)
    return run.state_dict()


def start_from(plan: str, folder: Path) -> dict[str, torch.Tensor]:
    axes, layout = PLANS[plan]
    made = mlp.program(rt.grid(axes), layout)
    run = rt.Trainer(
        made,
        weights.import_safetensors(folder),
        optimizer=mlp.sgd,
        comm=rt.DistributedComm(rt.grid(axes), rt.required_groups(made)),
    )
    assert dist.get_world_size() == num_ranks(plan)
    return run.state_dict()


def test_exported_weights_start_another_plan_and_the_users_model(tmp_path: Path) -> None:
    exported = fork_ranks(4, export, "zero1_tensor_4", tmp_path)[0]
    for state in fork_ranks(2, start_from, "zero3_2", tmp_path):
        assert state.keys() == exported.keys()
        assert all(torch.equal(state[name], exported[name]) for name in state)
    model: nn.Module = mlp.model()
    read = weights.import_safetensors(tmp_path)
    model.load_state_dict({name: read(name) for name in read.names})
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "multi_step": lambda o: MultiStepLR(o, [3, 5], 0.5),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=2), MultiStepLR(o, [1, 3], 0.5)], [2]
    ),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
    "one_cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_go_on_as_if_uninterrupted(name: str, tmp_path: Path) -> None:
    mesh = rt.grid({})
    made = mlp.program(mesh, mlp.Layout())

    def fresh() -> rt.Trainer:
        return rt.Trainer(
            made,
            mlp.model().state_dict(),
            optimizer=mlp.adamw,
            comm=rt.SingleComm(mesh),
            scheduler=SCHEDULERS[name],
        )

    def rates(run: rt.Trainer) -> list[list[float]]:
        found = []
        for step in range(6):
            run.step(mlp.batch(seed=step))
            found.append([group["lr"] for group in run.optimizer.param_groups])
        return found

    first, second = fresh(), fresh()
    for step in range(2):
        first.step(mlp.batch(seed=step))
    checkpoint.save(first, tmp_path / "a")
    checkpoint.load(second, tmp_path / "a")
    assert rates(second) == rates(first)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    mesh = rt.grid({})
    made = mlp.program(mesh, mlp.Layout())
    runs = [
        rt.Trainer(made, mlp.model().state_dict(), optimizer=chosen, comm=rt.SingleComm(mesh))
        for chosen in (mlp.adamw, mlp.sgd)
    ]
    runs[0].step(mlp.batch())
    checkpoint.save(runs[0], tmp_path / "a")
    with pytest.raises(InputError, match="state of AdamW, this run has SGD"):
        checkpoint.load(runs[1], tmp_path / "a")


def save_mixed(folder: Path) -> mlp.Run:
    run = mixed()
    train_mixed(run, range(2))
    checkpoint.save(run, folder)
    weights.export_safetensors(run, folder.parent / "model")
    return train_mixed(run, range(2, STEPS))


def resume_mixed(folder: Path) -> mlp.Run:
    run = mixed()
    checkpoint.load(run, folder)
    return train_mixed(run, range(2, STEPS))


def mixed() -> rt.Trainer:
    axes, layout = PLANS["zero1_tensor_4"]
    mesh = rt.grid(axes)
    made = mlp.program(mesh, layout, "bfloat16")
    masters = tuple(replace(spec, master_dtype="float32") for spec in made.parameters)
    return rt.Trainer(
        replace(made, parameters=masters),
        mlp.model(torch.float32).state_dict(),
        optimizer=mlp.adamw,
        comm=rt.DistributedComm(mesh, rt.required_groups(made)),
    )


def train_mixed(run: rt.Trainer, steps: range) -> mlp.Run:
    losses = [run.step(mlp.batch(torch.bfloat16, step)).loss.item() for step in steps]
    masters = {name: held.owned.detach().clone() for name, held in run.parts[0].store.helds.items()}
    return mlp.Run(losses, [], masters)


def test_master_weights_resume_to_the_bit_and_export_in_the_models_dtype(tmp_path: Path) -> None:
    uninterrupted = fork_ranks(4, save_mixed, tmp_path / "a")
    for run, expected in zip(
        fork_ranks(4, resume_mixed, tmp_path / "a"), uninterrupted, strict=True
    ):
        assert run.losses == expected.losses
        assert all(torch.equal(run.weights[name], expected.weights[name]) for name in run.weights)
    read = weights.import_safetensors(tmp_path / "model")
    assert {read(name).dtype for name in read.names} == {torch.bfloat16}
