"""The user's `optimizer=` function: settings by shape, by value, hooks and frozen parameters."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD, AdamW, Optimizer

from parloom import runtime as rt
from parloom.errors import InputError
from tests.dist import mlp

MESH = rt.grid({"x": 2, "y": 2})
Named = list[tuple[str, nn.Parameter]]

LAYOUTS = {
    "data_parallel": mlp.Layout(("x", "y")),
    "zero1": mlp.Layout(("x", "y"), storage="zero1"),
    "zero2": mlp.Layout(("x", "y"), storage="zero2"),
    "fsdp": mlp.Layout(("x", "y"), storage="zero3"),
    "tensor": mlp.Layout(("x",), ("y",)),
    "tensor and fsdp": mlp.Layout(("x",), ("y",), storage="zero3"),
}
SHARDED = [name for name in LAYOUTS if name != "data_parallel"]


def assert_equal_to_one_device(
    layout: str, maker: Callable[[Named], Optimizer], **options: Any
) -> None:
    """Four ranks end with the weights of one device."""
    made = mlp.program(MESH, LAYOUTS[layout])
    expected = mlp.single_device(maker)
    for run in rt.run_threads(MESH, lambda comm: mlp.parallel(comm, made, maker, **options)):
        assert mlp.difference(run, expected) < 1e-9


def trained(layout: str, maker: Callable[[Named], Optimizer], change: Any) -> None:
    """Two steps; `change(trainer)` before the second."""
    made = mlp.program(MESH, LAYOUTS[layout])

    def body(comm: rt.Comm) -> None:
        trainer = rt.Trainer(made, mlp.model().state_dict(), optimizer=maker, comm=comm)
        trainer.step(mlp.batch())
        change(trainer)
        trainer.step(mlp.batch())

    rt.run_threads(MESH, body)


# Settings by shape.


def by_size(named: Named) -> Optimizer:
    return SGD([{"params": [p], "lr": 1.0 / (1 + p.numel())} for _, p in named], lr=0.1)


def by_fan_out(named: Named) -> Optimizer:
    groups = [{"params": [p], "lr": 0.1 / (1 + p.shape[0]), "momentum": 0.9} for _, p in named]
    return SGD(groups, lr=0.1)


def by_one_size_in_all(named: Named) -> Optimizer:
    return AdamW([p for _, p in named], lr=0.1 / sum(p.numel() for _, p in named))


def by_a_tensor_of_the_size(named: Named) -> Optimizer:
    groups = [{"params": [p], "lr": torch.tensor(1.0 / (1 + p.numel()))} for _, p in named]
    return AdamW(groups, foreach=False)


def by_dim_with_names(named: Named) -> Optimizer:
    flat = [(n, p) for n, p in named if p.ndim < 2]
    other = [(n, p) for n, p in named if p.ndim >= 2]
    groups: list[dict[str, Any]] = [{"params": other, "weight_decay": 0.2}, {"params": flat}]
    return AdamW(groups, lr=1e-2)


@pytest.mark.parametrize(
    "maker", [by_size, by_fan_out, by_one_size_in_all, by_a_tensor_of_the_size, by_dim_with_names]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_are_those_of_whole_shapes(
    layout: str, maker: Callable[[Named], Optimizer]
) -> None:
    assert_equal_to_one_device(layout, maker)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_schedule_starts_from_the_whole_shapes(layout: str) -> None:
    made = mlp.program(MESH, LAYOUTS[layout])
    expected = mlp.single_device(by_size, halve=True)
    body = lambda comm: mlp.parallel(comm, made, by_size, halve=True)  # noqa: E731
    for run in rt.run_threads(MESH, body):
        assert mlp.difference(run, expected) < 1e-9


def large_first(named: Named) -> Optimizer:
    large = [p for _, p in named if p.numel() > 20]
    small = [p for _, p in named if p.numel() <= 20]
    groups: list[dict[str, Any]] = [{"params": large, "lr": 0.01}, {"params": small}]
    return SGD(groups)


def only_large(named: Named) -> Optimizer:
    return SGD([p for _, p in named if p.numel() > 10], lr=0.1)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "fsdp", "tensor and fsdp"])
def test_groups_by_the_size_of_parts(layout: str) -> None:
    with pytest.raises(
        InputError, match=r"group 0 by its whole shape \[12, 6\], and in group 1 by"
    ):
        assert_equal_to_one_device(layout, large_first)
    with pytest.raises(InputError, match=r"group 0 by its whole shape .* no group by this rank"):
        assert_equal_to_one_device(layout, only_large)


def test_groups_by_the_size_of_wholes() -> None:
    assert_equal_to_one_device("data_parallel", large_first)
    assert_equal_to_one_device("data_parallel", only_large)


def test_empty_parts() -> None:
    def maker(named: Named) -> Optimizer:
        return SGD([{"params": [p], "lr": 0.1 / p.numel()} for _, p in named], lr=0.1)

    assert_equal_to_one_device("data_parallel", maker)
    with pytest.raises(InputError, match=r"this rank's parts .* may be empty .ZeroDivisionError"):
        assert_equal_to_one_device("fsdp", maker)


def test_an_error_of_the_function_is_its_own() -> None:
    def maker(named: Named) -> Optimizer:
        raise KeyError("mine")

    for layout in LAYOUTS:
        with pytest.raises(KeyError, match="mine"):
            assert_equal_to_one_device(layout, maker)


def test_stand_ins_draw_from_the_generator_one_rank_at_a_time() -> None:
    """Two threads that read the generator's state at once may wait for each other forever."""
    inside: list[int] = []

    def maker(named: Named) -> Optimizer:
        if isinstance(named[0][1], FakeTensor):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.05)  # another rank would come here now
            inside.pop()
        return mlp.sgd(named)

    assert_equal_to_one_device("fsdp", maker)


def test_whole_parameters_need_one_call() -> None:
    calls = []

    def maker(named: Named) -> Optimizer:
        calls.append(1)
        return mlp.sgd(named)

    assert_equal_to_one_device("data_parallel", maker)
    assert len(calls) == 4 + 1


# Settings by value.


def by_norm(named: Named) -> Optimizer:
    groups = [{"params": [p], "lr": 0.1 * float(p.detach().norm())} for _, p in named]
    return SGD(groups, lr=0.1)


def by_norm_as_tensor(named: Named) -> Optimizer:
    groups = [{"params": [p], "lr": 0.1 * p.detach().norm()} for _, p in named]
    return AdamW(groups, foreach=False)


def by_sign(named: Named) -> Optimizer:
    return SGD([p for _, p in named if p.sum() > 0], lr=0.1)


def by_list(named: Named) -> Optimizer:
    return SGD([p for _, p in named], lr=abs(sum(named[0][1].flatten().tolist())) + 0.1)


@pytest.mark.parametrize("maker", [by_norm, by_norm_as_tensor, by_sign, by_list])
@pytest.mark.parametrize("layout", SHARDED)
def test_values_of_parts_are_not_read(layout: str, maker: Callable[[Named], Optimizer]) -> None:
    with pytest.raises(InputError, match="optimizer= reads values of gain; ranks hold parts"):
        assert_equal_to_one_device(layout, maker)


@pytest.mark.parametrize("maker", [by_norm, by_sign, by_list])
def test_values_of_wholes_are(maker: Callable[[Named], Optimizer]) -> None:
    assert_equal_to_one_device("data_parallel", maker)


@pytest.mark.parametrize("layout", SHARDED)
def test_parts_are_not_written(layout: str) -> None:
    def maker(named: Named) -> Optimizer:
        nn.init.xavier_uniform_(dict(named)["up.weight"])
        return mlp.sgd(named)

    with pytest.raises(InputError, match=r"optimizer= writes to up\.weight"):
        assert_equal_to_one_device(layout, maker)


def halved(named: Named) -> Optimizer:
    with torch.no_grad():
        for _, parameter in named:
            parameter.mul_(0.5)
    return mlp.sgd(named)


def test_wholes_may_be_written() -> None:
    assert_equal_to_one_device("data_parallel", halved)


# Hooks.


def with_hook(named: Named) -> Optimizer:
    weight: Any = dict(named)["up.weight"]
    weight.register_hook(lambda gradient: gradient * 3)
    return mlp.sgd(named)


def with_hook_after(named: Named) -> Optimizer:
    def triple(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    weight: Any = dict(named)["up.weight"]
    weight.register_post_accumulate_grad_hook(triple)
    return mlp.sgd(named)


def frozen(named: Named) -> Optimizer:
    dict(named)["up.weight"].requires_grad_(False)
    return mlp.sgd(named)


def thawed(named: Named) -> Optimizer:
    dict(named)["frozen"].requires_grad_(True)
    return mlp.sgd(named)


@pytest.mark.parametrize(
    ("maker", "why"),
    [
        (with_hook, r"up\.weight was given a hook"),
        (with_hook_after, r"up\.weight was given a hook"),
        (frozen, r"requires_grad of up\.weight was set to False"),
        (thawed, "requires_grad of frozen was set to True"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_stay_as_they_were(
    layout: str, maker: Callable[[Named], Optimizer], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        assert_equal_to_one_device(layout, maker)

    def change(trainer: rt.Trainer) -> None:
        maker([(held.name, held.owned) for held in trainer.parts[0].store.helds.values()])

    with pytest.raises(InputError, match=why):
        trained(layout, mlp.sgd, change)


def clip(optimizer: Optimizer, *given: Any) -> None:
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)


def clipped(named: Named) -> Optimizer:
    optimizer = mlp.sgd(named)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def clamped(named: Named) -> Optimizer:
    optimizer = mlp.sgd(named)
    optimizer.register_step_post_hook(lambda *given: None)
    return optimizer


@pytest.mark.parametrize("maker", [clipped, clamped])
@pytest.mark.parametrize("layout", SHARDED)
def test_step_hooks_of_parts(layout: str, maker: Callable[[Named], Optimizer]) -> None:
    with pytest.raises(InputError, match=r"SGD has a hook of its step.*clip_norm"):
        assert_equal_to_one_device(layout, maker)

    def change(trainer: rt.Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(clip)

    with pytest.raises(InputError, match=r"SGD has a hook of its step"):
        trained(layout, mlp.sgd, change)


@pytest.mark.parametrize("maker", [clipped, clamped])
def test_step_hooks_of_wholes(maker: Callable[[Named], Optimizer]) -> None:
    assert_equal_to_one_device("data_parallel", maker)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_left_out_is_left_alone(layout: str) -> None:
    assert_equal_to_one_device(
        layout, lambda named: SGD([p for n, p in named if n != "up.weight"], lr=0.1)
    )
