"""Buffers written in forward: with a weight, with the batch, two with one value; against torch."""

import torch
from torch import Tensor, nn

from parloom import runtime as rt
from parloom.capture import capture, parameters_of
from parloom.execute.program import compile_pcg
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import Decisions, one_stage

STEPS = 4


class Remembers(nn.Module):
    """Remembers its weight and its input of the step before, the latter twice."""

    weight_before: Tensor
    x_before: Tensor
    x_again: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("weight_before", torch.zeros(4, 4))
        self.register_buffer("x_before", torch.zeros(8, 4))
        self.register_buffer("x_again", torch.zeros(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        drift = (self.layer.weight - self.weight_before).square().mean()
        loss = (self.layer(x) - self.x_before - self.x_again).square().mean() + drift
        self.weight_before.copy_(self.layer.weight.detach())
        self.x_before.copy_(x)
        self.x_again.copy_(x)
        return (loss,)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def trainer(model: nn.Module) -> rt.Trainer:
    graph = capture(model, {"x": batch(0)})
    program = compile_pcg(lower(graph, Decisions(one_stage(grid({"x": 1})))), "buffers").program
    tensors = {n: t.detach().clone() for n, t in parameters_of(model, graph).items()}
    return rt.Trainer(program, tensors, optimizer=sgd, comm=rt.SingleComm(program.mesh))


def test_training_is_that_of_the_module() -> None:
    """The loader's tensor is filled anew for every step, as some loaders do."""
    torch.manual_seed(0)
    model = Remembers()
    parallel, optimizer = trainer(model), sgd(list(model.named_parameters()))
    x = torch.empty(8, 4)
    for step in range(STEPS):
        x.copy_(batch(step))
        optimizer.zero_grad()
        (loss,) = model(x)
        loss.backward()
        optimizer.step()
        assert torch.allclose(parallel.step({"x": x}).loss, loss, rtol=1e-6)
    for name, buffer in model.named_buffers():
        assert torch.equal(parallel.parts[0].store.buffers[name], buffer)


def test_no_two_buffers_share_memory() -> None:
    parallel = trainer(Remembers())
    parallel.step({"x": batch(0)})
    places = [buffer.data_ptr() for buffer in parallel.parts[0].store.buffers.values()]
    assert len(set(places)) == len(places)


class Weighs(nn.Module):
    """Has constants: one of numbers, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        weights = torch.tensor([0.5, 1.0, 2.0, float("inf")])
        scale = torch.cat([1 / weights, torch.zeros(0, 4).sum(1)])
        return ((self.layer(x) * scale).square().mean(),)


def test_constants_are_made_once() -> None:
    """Making one anew copies it to the device in every pass."""
    torch.manual_seed(0)
    model = Weighs()
    parallel = trainer(model)
    assert torch.equal(parallel.step({"x": batch(0)}).loss, model(batch(0))[0].detach())
    made = dict(parallel.parts[0].ctx.constants)
    assert made
    parallel.step({"x": batch(1)})
    assert parallel.parts[0].ctx.constants.keys() == made.keys()
    assert all(parallel.parts[0].ctx.constants[key] is tensor for key, tensor in made.items())
