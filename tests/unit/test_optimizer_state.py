"""Restored optimizer state: on which device, and in which dtype."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom.runtime.optimizer import load_optimizer_state, optimizer_state

META = torch.device("meta")
CPU = torch.device("cpu")


def saved(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The state of AdamW after a step over a matrix and a 0-dim parameter."""
    parameters = {
        "matrix": nn.Parameter(torch.ones(2, 3, dtype=dtype)),
        "scale": nn.Parameter(torch.tensor(0.5, dtype=dtype)),
    }
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    return optimizer_state(optimizer, {id(p): name for name, p in parameters.items()})


def restored(state: dict[str, Any], dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """By parameter name, taken over by an optimizer of parameters on another device."""
    owned = {
        "matrix": nn.Parameter(torch.ones(2, 3, dtype=dtype, device=META)),
        "scale": nn.Parameter(torch.tensor(0.5, dtype=dtype, device=META)),
    }
    optimizer = torch.optim.AdamW(owned.values(), **options)
    load_optimizer_state(optimizer, owned, state)
    return {name: optimizer.state[parameter] for name, parameter in owned.items()}


@pytest.mark.parametrize(("options", "device"), [({}, CPU), ({"capturable": True}, META)])
def test_the_step_is_where_the_optimizer_wants_it(
    options: dict[str, Any], device: torch.device
) -> None:
    for state in restored(saved(), torch.float32, **options).values():
        step: Tensor = state["step"]
        assert (step.device, step.dtype, step.shape) == (device, torch.float32, ())


def test_the_state_of_a_number_is_beside_it() -> None:
    for state in restored(saved(torch.float64), torch.float32).values():
        assert state["exp_avg"].device == META
        assert state["exp_avg_sq"].device == META
    scale = restored(saved(torch.float64), torch.float32)["scale"]
    assert (scale["exp_avg"].dtype, scale["exp_avg"].shape) == (torch.float32, ())


def test_values_of_numbers_come_back() -> None:
    state = saved()
    owned = {
        "matrix": nn.Parameter(torch.ones(2, 3)),
        "scale": nn.Parameter(torch.tensor(0.5)),
    }
    optimizer = torch.optim.AdamW(owned.values())
    load_optimizer_state(optimizer, owned, state)
    found = optimizer.state[owned["scale"]]
    assert found["step"].item() == 1
    assert torch.allclose(found["exp_avg"], torch.tensor(0.2))
    assert torch.allclose(found["exp_avg_sq"], torch.tensor(0.004))


def test_other_numbers_move_to_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.ASGD([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    state = optimizer_state(optimizer, {id(parameter): "weight"})
    moved = nn.Parameter(torch.ones(4, device=META))
    target = torch.optim.ASGD([moved])
    load_optimizer_state(target, {"weight": moved}, state)
    assert {key: target.state[moved][key].device for key in ("eta", "mu", "step")} == {
        "eta": META,
        "mu": META,
        "step": CPU,
    }
