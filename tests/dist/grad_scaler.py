"""Half-precision training in plain PyTorch: float32 masters and torch.amp.GradScaler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from parloom import runtime as rt

Batches = Iterable[dict[str, Tensor]]
Optimizers = Callable[[Any], Optimizer]
DECAY = 0.9


@dataclass
class Run:
    """What each step did, and the weights and buffers in the end."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def by_torch(
    whole: nn.Module,
    batches: Batches,
    optimizer: Optimizers,
    scale: rt.LossScale,
    clip_norm: float | None = None,
) -> Run:
    """Train `whole`, a float16 model; the scheduler's turn is skipped with the optimizer's."""
    named = [(n, p) for n, p in whole.named_parameters() if p.requires_grad]
    masters = {n: nn.Parameter(p.detach().float()) for n, p in named}
    chosen = optimizer(list(masters.items()))
    scheduler = StepLR(chosen, 1, DECAY)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=scale.scale, growth_interval=scale.growth_interval
    )
    run = Run()
    for batch in batches:
        whole.zero_grad()
        output = whole(**batch)
        loss = output if isinstance(output, Tensor) else output[0]
        scaler.scale(loss).backward()
        for name, parameter in named:
            gradient = parameter.grad
            masters[name].grad = None if gradient is None else gradient.float()
        scaler.unscale_(chosen)
        if clip_norm is not None:
            run.norms.append(nn.utils.clip_grad_norm_(masters.values(), clip_norm).item())
        run.rates.append(chosen.param_groups[0]["lr"])
        run.scales.append(scaler.get_scale())
        scaler.step(chosen)
        scaler.update()
        run.skipped.append(scaler.get_scale() < run.scales[-1])
        if not run.skipped[-1]:
            scheduler.step()
        with torch.no_grad():
            for name, parameter in named:
                parameter.copy_(masters[name])
        run.losses.append(loss.item())
    run.state = {name: value.float() for name, value in whole.state_dict().items()}
    return run


def train(one: rt.Trainer, batches: Batches) -> Run:
    """The same by a trainer of ours."""
    run = Run()
    for batch in batches:
        run.rates.append(one.optimizer.param_groups[0]["lr"])
        result = one.step(batch)
        assert result.loss_scale is not None
        run.losses.append(result.loss.item())
        run.scales.append(result.loss_scale)
        run.skipped.append(result.skipped)
        if result.grad_norm is not None:
            run.norms.append(result.grad_norm.item())
    run.state = {name: value.float() for name, value in one.state_dict().items()}
    return run


def check(found: Run, expected: Run, tolerance: float = 4e-3) -> None:
    """The same scales, skipped steps and learning rates; the same numbers, but for rounding.

    Half precision rounds in another order on several ranks; weights are of size 1.
    """
    assert found.scales == expected.scales
    assert found.skipped == expected.skipped
    assert found.rates == expected.rates
    assert found.losses == pytest.approx(expected.losses, rel=tolerance, nan_ok=True)
    finite = [(a, b) for a, b in zip(found.norms, expected.norms, strict=True) if not isnan(b)]
    assert all(a == pytest.approx(b, rel=tolerance) for a, b in finite)
    for name, value in expected.state.items():
        assert torch.allclose(found.state[name], value, atol=tolerance), name
