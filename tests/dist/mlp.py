"""A hand-written program: a small MLP under any mix of data and tensor parallelism and storage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from parloom import runtime as rt
from tests.dist import steps

IN, HIDDEN, OUT, BATCH = 6, 12, 5, 24


class Model(nn.Module):
    """The single-device model: a root gain, two blocks, a frozen scale and an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # ranks may be threads: no shared generator
        self.gain = nn.Parameter(torch.full((IN,), 0.9))
        self.unused = nn.Parameter(torch.ones(3))
        self.up = nn.Linear(IN, HIDDEN)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN), requires_grad=False)
        self.down = nn.Linear(HIDDEN, OUT)
        for linear in (self.up, self.down):
            for parameter in linear.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x * self.gain)) * self.frozen
        predicted: Tensor = self.down(hidden)
        return (predicted - y).square().sum() / (BATCH * OUT)


@dataclass(frozen=True)
class Layout:
    """`data` and `tensor` axes; `storage` of every parameter over the data axes, or in `chunks`:
    the axes of weights, gradients and states.
    """

    data: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    storage: str = "replicated"
    storage_axes: tuple[str, ...] | None = None
    chunks: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | None = None
    recompute: bool = False
    late_loss: bool = False


def model(dtype: torch.dtype = torch.float64) -> Model:
    return Model().to(dtype)


def batch(dtype: torch.dtype = torch.float64, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(BATCH, IN, generator=generator, dtype=torch.float64).to(dtype),
        "y": torch.randn(BATCH, OUT, generator=generator, dtype=torch.float64).to(dtype),
    }


UNITS = {
    "": ("gain", "unused"),
    "up": ("up.weight", "up.bias"),
    "down": ("frozen", "down.weight", "down.bias"),
}


def step_program(
    parameters: Sequence[rt.ParameterSpec],
    data: tuple[str, ...],
    other: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[rt.StepNode, ...]:
    """Gradients are partial over `data`, or over `other` by name."""
    names = {spec.name for spec in parameters}
    units = {unit: tuple(n for n in own if n in names) for unit, own in UNITS.items()}
    return steps.program(parameters, dict.fromkeys(names, data) | dict(other or {}), units)


def program(mesh: rt.Mesh, layout: Layout, dtype: str = "float64", **changes: Any) -> rt.Program:
    data, tensor = layout.data, layout.tensor
    time = (mesh.time,) if mesh.time is not None else ()
    width = HIDDEN // mesh.size(tensor)
    rows = BATCH // mesh.size((*data, *time))

    def up(ctx: rt.Context, prefix: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(rt.replicate(x, ctx, tensor), weight, bias))

    def down(
        ctx: rt.Context, prefix: str, h: Tensor, scale: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor]:
        partial = nn.functional.linear(h * scale, weight)
        return (rt.reduce(partial, ctx, tensor) + bias,)

    def forward(
        ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
    ) -> rt.Result:
        x = batch["x"] * ctx.weight("gain")
        h = ctx.call(up, "up", (x,), ("up.weight", "up.bias"), layout.recompute)
        names = ("frozen", "down.weight", "down.bias")
        (predicted,) = ctx.call(down, "down", (h,), names, layout.recompute)
        loss = (predicted - batch["y"]).square().sum() / (BATCH * OUT)
        outputs = {"predicted": predicted}
        if layout.late_loss:
            return rt.Result(loss, outputs=outputs, partial=data)
        return rt.Result(rt.reduce(loss, ctx, data), outputs=outputs)

    def spec(name: str, shape: tuple[int, ...], *dims: Any, trainable: bool = True) -> Any:
        axes = data if layout.storage_axes is None else layout.storage_axes
        triple = {
            "replicated": rt.Storage(),
            "zero1": rt.Storage((), (), axes),
            "zero2": rt.Storage((), axes, axes),
            "zero3": rt.Storage(axes, axes, axes),
        }[layout.storage]
        if layout.chunks is not None:
            triple = rt.Storage(*layout.chunks)
        # Some along dim 1, some uneven.
        if name == "down.weight":
            triple = replace(triple, dim=1)
        return rt.ParameterSpec(name, shape, dtype, dims, storage=triple, trainable=trainable)

    inputs = tuple(
        rt.TensorSpec(name, (BATCH, size), dtype, ((*data, *time, rows), (size,)))
        for name, size in (("x", IN), ("y", OUT))
    )
    parameters = (
        spec("gain", (IN,), (IN,)),
        spec("unused", (3,), (3,)),
        spec("up.weight", (HIDDEN, IN), (*tensor, width), (IN,)),
        spec("up.bias", (HIDDEN,), (*tensor, width)),
        spec("frozen", (HIDDEN,), (*tensor, width), trainable=False),
        spec("down.weight", (OUT, HIDDEN), (OUT,), (*tensor, width)),
        spec("down.bias", (OUT,), (OUT,)),
    )
    micro = mesh[mesh.time].size if mesh.time is not None else 1
    passes = [f"{kind}{index}" for index in range(micro) for kind in "FB"]
    made = rt.Program(
        name="MLP",
        mesh=mesh,
        inputs=inputs,
        parameters=parameters,
        forward=forward,
        outputs=(rt.TensorSpec("predicted", (BATCH, OUT), dtype, ((*data, *time, rows), (OUT,))),),
        step=step_program(parameters, data),
        num_microbatches=micro,
        actions=(*passes, "REDUCE", "STEP", "GATHER"),
    )
    return replace(made, **changes)


def with_time(mesh: rt.Mesh, microbatches: int) -> rt.Mesh:
    return rt.Mesh((*mesh.axes, rt.Axis("micro", microbatches)))


Optimizers = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two parameter groups: no weight decay on vectors."""
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
    )


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Run:
    """What is compared: per step the loss and gradient norm, then the weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def single_device(
    optimizer: Optimizers, steps: int = 3, clip_norm: float | None = None, halve: bool = False
) -> Run:
    whole = model()
    chosen = optimizer(list(whole.named_parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(chosen, 1, 0.5) if halve else None
    losses, norms = [], []
    for step in range(steps):
        chosen.zero_grad()
        loss = whole(**batch(seed=step))
        loss.backward()
        if clip_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), clip_norm).item())
        chosen.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return Run(losses, norms, {k: v.detach().clone() for k, v in whole.state_dict().items()})


def parallel(
    comm: rt.Comm,
    made: rt.Program,
    optimizer: Optimizers,
    steps: int = 3,
    clip_norm: float | None = None,
    halve: bool = False,
    device: torch.device | None = None,
) -> Run:
    trainer = rt.Trainer(
        made,
        model().state_dict(),
        optimizer=optimizer,
        comm=comm,
        clip_norm=clip_norm,
        scheduler=(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) if halve else None,
        evaluation=made,
        device=device,
    )
    losses, norms = [], []
    for step in range(steps):
        result = trainer.step(batch(seed=step))
        losses.append(result.loss.item())
        if result.grad_norm is not None:
            norms.append(result.grad_norm.item())
    state = {name: value.cpu() for name, value in trainer.state_dict().items()}
    return Run(losses, norms, state)


def difference(left: Run, right: Run) -> float:
    """The largest absolute difference."""
    pairs = [
        *zip(left.losses, right.losses, strict=True),
        *zip(left.norms, right.norms, strict=True),
    ]
    worst = max(abs(a - b) for a, b in pairs)
    assert left.weights.keys() == right.weights.keys()
    for name, value in left.weights.items():
        worst = max(worst, (value - right.weights[name]).abs().max().item())
    return worst
