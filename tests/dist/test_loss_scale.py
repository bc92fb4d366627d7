"""Loss scaling equals torch.amp.GradScaler over float32 masters on one device, under any plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from parloom import runtime as rt
from parloom.errors import InputError, VerifyError
from parloom.execute import checkpoint
from parloom.execute.ranks import fork_ranks
from parloom.runtime.step import Gradients
from tests.dist import mlp
from tests.dist.grad_scaler import DECAY, Optimizers, Run, by_torch, check, train

STEPS, SPIKE = 8, 3
adam = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)

PLANS: dict[str, tuple[dict[str, int], mlp.Layout, int]] = {
    "one": ({"x": 1}, mlp.Layout(("x",)), 1),
    "data_2": ({"x": 2}, mlp.Layout(("x",)), 1),
    "zero1_2": ({"x": 2}, mlp.Layout(("x",), storage="zero1"), 1),
    "zero2_2_micro_2": ({"x": 2}, mlp.Layout(("x",), storage="zero2"), 2),
    "zero3_2": ({"x": 2}, mlp.Layout(("x",), storage="zero3"), 1),
    "tensor_2": ({"x": 2}, mlp.Layout((), ("x",)), 1),
    "zero3_tensor_4_micro_2": ({"x": 2, "y": 2}, mlp.Layout(("x",), ("y",), "zero3"), 2),
    "within_4_micro_2": (
        {"x": 2, "y": 2},
        mlp.Layout(("x", "y"), chunks=(("y",), ("y",), ("y", "x"))),
        2,
    ),
    "late_loss_4": ({"x": 4}, mlp.Layout(("x",), late_loss=True), 1),
}


def program(name: str) -> rt.Program:
    """The MLP in float16 with float32 masters and reductions, and the node that unscales."""
    axes, layout, micro = PLANS[name]
    mesh = rt.grid(axes)
    mesh = mlp.with_time(mesh, micro) if micro > 1 else mesh
    made = mlp.program(mesh, layout, "float16")
    masters = tuple(replace(spec, master_dtype="float32") for spec in made.parameters)
    step: list[rt.StepNode] = []
    for node in made.step:
        if node.kind == "gradient_norm":
            step.append(replace(node, kind="unscale"))
        step.append(node)
    return replace(made, parameters=masters, step=tuple(step), reduce_dtype="float32")


def batch(step: int) -> dict[str, Tensor]:
    """In step SPIKE one sample, of one rank, is so large that gradients overflow."""
    made = mlp.batch(torch.float16, seed=step)
    if step == SPIKE:
        made["x"][0] *= 30
    return made


def batches(steps: range = range(STEPS)) -> list[dict[str, Tensor]]:
    return [batch(step) for step in steps]


def on_one_device(
    optimizer: Optimizers, scale: rt.LossScale, clip_norm: float | None = None
) -> Run:
    return by_torch(mlp.model(torch.float16), batches(), optimizer, scale, clip_norm)


def trainer(
    comm: rt.Comm,
    made: rt.Program,
    optimizer: Optimizers,
    scale: rt.LossScale,
    clip_norm: float | None = None,
) -> rt.Trainer:
    return rt.Trainer(
        made,
        mlp.model(torch.float16).state_dict(),
        optimizer=optimizer,
        comm=comm,
        clip_norm=clip_norm,
        scheduler=lambda o: StepLR(o, 1, DECAY),
        loss_scale=replace(scale),
    )


def on_ranks(
    name: str,
    optimizer: Optimizers,
    scale: rt.LossScale,
    clip_norm: float | None = None,
) -> list[Run]:
    made = program(name)

    def body(comm: rt.Comm) -> Run:
        return train(trainer(comm, made, optimizer, scale, clip_norm), batches())

    return rt.run_threads(made.mesh, body)


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", [mlp.sgd, adam], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_does_what_grad_scaler_does(
    name: str, optimizer: Any, clip_norm: float | None
) -> None:
    """Steps that are skipped, scales that fall and grow, norms, schedules and weights."""
    scale = rt.LossScale(scale=2.0**13, growth_interval=3)
    expected = on_one_device(optimizer, scale, clip_norm)
    assert expected.skipped == [step == SPIKE for step in range(STEPS)]
    assert expected.scales == [2.0**k for k in (13, 13, 13, 14, 13, 13, 13, 14)]
    for run in on_ranks(name, optimizer, scale, clip_norm):
        check(run, expected)


def test_with_torchs_defaults_a_float16_loss_overflows_once() -> None:
    """The gradient of a float16 loss is the scale itself, and 65536 is above 65504."""
    expected = on_one_device(mlp.sgd, rt.LossScale())
    assert expected.skipped[0]
    for run in on_ranks("zero3_2", mlp.sgd, rt.LossScale()):
        check(run, expected)


def test_the_constants_are_those_of_torch() -> None:
    ours, torchs = rt.LossScale(), torch.amp.GradScaler("cpu")
    assert (ours.scale, ours.growth_interval) == (
        torchs.get_scale(),
        torchs.get_growth_interval(),
    )
    for overflowed in (True, False, True, True, *[False] * 2000, True, *[False] * 4001):
        before = ours.scale
        ours.update(overflowed)
        found = torch.tensor(float(overflowed))
        tracker = torchs.__dict__.setdefault("tracker", torch.zeros((), dtype=torch.int32))
        scale = torch.tensor(before)
        torch._amp_update_scale_(
            scale,
            tracker,
            found,
            torchs.get_growth_factor(),
            torchs.get_backoff_factor(),
            torchs.get_growth_interval(),
        )
        assert (ours.scale, ours.num_good) == (scale.item(), tracker.item())


# Ranks agree.


def spoiled(one: rt.Trainer, rank: int, value: float) -> None:
    """One element of one gradient that this rank owns is not finite."""
    finish = one.parts[0].store.finish_gradients

    def spoil() -> None:
        finish()
        if one.comm.rank == rank:
            owned = [
                h.owned.grad for h in one.parts[0].store.helds.values() if h.owned.grad is not None
            ]
            next(g for g in owned if g.numel()).view(-1)[0] = value

    one.parts[0].store.finish_gradients = spoil  # type: ignore[method-assign]


def steps_with_spoiled(name: str, value: float, clip_norm: float | None) -> list[Any]:
    made = program(name)

    def body(comm: rt.Comm) -> Any:
        one = trainer(comm, made, adam, rt.LossScale(scale=1024.0), clip_norm)
        train(one, batches(range(2)))
        before = [h.owned.detach().clone() for h in one.parts[0].store.helds.values()]
        spoiled(one, comm.mesh.num_ranks - 1, value)
        result = one.step(batch(2))
        same = all(
            torch.equal(a, h.owned.detach())
            for a, h in zip(before, one.parts[0].store.helds.values(), strict=True)
        )
        times = {float(state["step"]) for state in one.optimizer.state.values()}
        assert one.scheduler is not None
        return result.skipped, same, times, one.scheduler.last_epoch, one.steps_done

    return rt.run_threads(made.mesh, body)


@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["data_2", "zero1_2", "zero3_2", "tensor_2", "late_loss_4"])
def test_one_rank_s_overflow_skips_the_step_on_all(
    name: str, value: float, clip_norm: float | None
) -> None:
    """No weight, no count of Adam and no learning rate moves on any rank; the batch is used up."""
    for found in steps_with_spoiled(name, value, clip_norm):
        assert found == (True, True, {2.0}, 2, 3)


def test_without_an_agreement_ranks_would_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees it."""
    monkeypatch.setattr(Gradients, "agree", lambda self, with_norm, spans=None: None)
    found = steps_with_spoiled("zero3_2", float("inf"), None)
    assert [skipped for skipped, *_ in found] == [False, True]


# What is saved, and what ends.


def save(name: str, folder: Path) -> Run:
    made = program(name)
    comm = rt.DistributedComm(made.mesh, rt.required_groups(made))
    one = trainer(comm, made, mlp.sgd, rt.LossScale(scale=2.0**13, growth_interval=3))
    train(one, batches(range(5)))
    checkpoint.save(one, folder).wait()
    return train(one, batches(range(5, STEPS)))


def resume(name: str, folder: Path) -> Run:
    made = program(name)
    comm = rt.DistributedComm(made.mesh, rt.required_groups(made))
    one = trainer(comm, made, mlp.sgd, rt.LossScale(growth_interval=3))
    checkpoint.load(one, folder)
    return train(one, batches(range(5, STEPS)))


@pytest.mark.parametrize(("saved", "loaded"), [("zero3_2", "tensor_2"), ("data_2", "late_loss_4")])
def test_scale_and_its_count_are_in_the_checkpoint(saved: str, loaded: str, tmp_path: Path) -> None:
    """One good step was counted when it was saved: the scale grows after two more."""

    def ranks(name: str) -> int:
        return program(name).mesh.num_ranks

    folder = tmp_path / "checkpoint"
    expected = fork_ranks(ranks(saved), save, saved, folder)[0]
    assert expected.scales == [2.0**13, 2.0**13, 2.0**14]
    for run in fork_ranks(ranks(loaded), resume, loaded, folder):
        check(run, expected)


def test_a_state_without_a_scale_leaves_the_scale_alone() -> None:
    """Checkpoints of other dtypes have none; a program that needs none ignores one."""
    made = program("one")
    one = trainer(rt.SingleComm(made.mesh), made, mlp.sgd, rt.LossScale(scale=8.0))
    state = one.extra_state()
    assert state["loss_scale"] == {"scale": 8.0, "num_good": 0, "num_skipped": 0}
    one.load_extra_state({**state, "loss_scale": None})
    assert one.loss_scale is not None
    assert one.loss_scale.scale == 8.0
    plain = mlp.program(made.mesh, mlp.Layout(("x",)))
    other = rt.Trainer(
        plain, mlp.model().state_dict(), optimizer=mlp.sgd, comm=rt.SingleComm(plain.mesh)
    )
    assert other.extra_state()["loss_scale"] is None
    assert other.step(mlp.batch()).loss_scale is None


def test_training_that_always_overflows_ends_with_an_error() -> None:
    made = program("data_2")

    def body(comm: rt.Comm) -> tuple[int, str]:
        one = trainer(comm, made, mlp.sgd, rt.LossScale())
        nan = batch(0)
        nan["x"][0, 0] = float("nan")
        for count in range(100):
            try:
                assert one.step(nan).skipped
            except InputError as error:
                return count + 1, str(error)
        return 0, ""

    for count, text in rt.run_threads(made.mesh, body):
        assert count == 31  # from 2**16 to 2**-14, and once more
        assert "step 31: the last 31 steps were skipped" in text
        assert "gain" in text
        assert "the loss of this step is nan" in text
        assert "--dtype bf16" in text


def test_float16_weights_without_masters_are_refused() -> None:
    made = program("one")
    bare = tuple(replace(spec, master_dtype=None) for spec in made.parameters)
    made = replace(made, parameters=bare)
    with pytest.raises(VerifyError, match="without a float32 master"):
        trainer(rt.SingleComm(made.mesh), made, mlp.sgd, rt.LossScale())
