"""Gathered units: what is in memory when, and what autograd keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.runtime.units import Flat, Unit, Units
from tests.dist import steps

WIDTH, LAYERS = 16, 6
MESH = rt.grid({"x": 2})
SHARDED = rt.Storage(("x",), ("x",), ("x",))
Block = Callable[..., Tensor]


def linear(ctx: rt.Context, prefix: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out: Tensor = torch.tanh(torch.addmm(bias, x, weight.t()))
    return out


def stack(
    block: Block = linear, recompute: bool = False, frozen: tuple[str, ...] = (), **changes: Any
) -> rt.Program:
    """A tower of equal blocks, each a unit of its own."""

    def forward(
        ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
    ) -> rt.Result:
        x = batch["x"]
        for index in range(LAYERS):
            names = (f"{index}.weight", f"{index}.bias")
            x = ctx.call(block, f"{index}", (x,), names, recompute)
        return rt.Result(rt.reduce(x.square().sum(), ctx, ("x",)))

    def spec(name: str, *shape: int) -> rt.ParameterSpec:
        dims = tuple((size,) for size in shape)
        trainable = name not in frozen
        return rt.ParameterSpec(name, shape, "float64", dims, SHARDED, trainable)

    names = [f"{index}" for index in range(LAYERS)]
    parameters = [
        s for n in names for s in (spec(f"{n}.weight", WIDTH, WIDTH), spec(f"{n}.bias", WIDTH))
    ]
    units = {n: (f"{n}.weight", f"{n}.bias") for n in names}
    return rt.Program(
        "stack",
        MESH,
        (rt.TensorSpec("x", (4, WIDTH), "float64", (("x", 2), (WIDTH,))),),
        tuple(parameters),
        forward,
        step=steps.program(parameters, {s.name: ("x",) for s in parameters}, units),
        **changes,
    )


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).div(WIDTH**0.5)

    return {
        f"{index}.{kind}": draw(*shape)
        for index in range(LAYERS)
        for kind, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def train(made: rt.Program, steps: int = 2) -> list[dict[str, Tensor]]:
    def body(comm: rt.Comm) -> dict[str, Tensor]:
        one = rt.Trainer(made, tensors(), optimizer=sgd, comm=comm)
        for _ in range(steps):
            one.step(batch())
        return one.state_dict()

    return rt.run_threads(MESH, body)


def reference(frozen: tuple[str, ...] = (), steps: int = 2) -> dict[str, Tensor]:
    weights = {k: v.requires_grad_(k not in frozen) for k, v in tensors().items()}
    for _ in range(steps):
        x = batch()["x"]
        for index in range(LAYERS):
            x = torch.tanh(x @ weights[f"{index}.weight"].T + weights[f"{index}.bias"])
        x.square().sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight in weights.values():
                if weight.grad is not None:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    return {name: weight.detach() for name, weight in weights.items()}


def assert_equal(states: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for state in states:
        assert all(torch.allclose(state[name], expected[name], atol=1e-12) for name in expected)


def gathered(flats: list[Flat]) -> int:
    return sum(flat.memory is not None for flat in flats)


@pytest.mark.parametrize("recompute", [False, True])
def test_few_units_are_gathered_at_a_time(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the unit in use, its prefetched neighbor and the one being left, in both passes."""
    counts: list[int] = []
    arrive = Flat.arrive
    made: list[Unit] = []
    create = Unit.__init__

    def counting(flat: Flat) -> None:
        arrive(flat)
        mine = next(unit for unit in made if flat in unit.flats)
        rank = [unit for unit in made if unit.flats[0].group is mine.flats[0].group]
        counts.append(gathered([flat for unit in rank for flat in unit.flats]))

    def creating(unit: Unit, prefix: str, index: int, flats: list[Flat]) -> None:
        create(unit, prefix, index, flats)
        made.append(unit)

    monkeypatch.setattr(Flat, "arrive", counting)
    monkeypatch.setattr(Unit, "__init__", creating)
    assert_equal(train(stack(recompute=recompute)), reference())
    # Per rank and step: forward gathers all, backward all but the last, which stayed.
    assert len(counts) == 2 * 2 * (2 * LAYERS - 1)
    assert max(counts) <= 2
    assert gathered([flat for unit in made for flat in unit.flats]) == 0


def uses(tensor: Tensor) -> int:
    """How many tensors share this tensor's memory, those that autograd saved included."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def test_autograd_keeps_no_gathered_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is dropped has given all its memory back."""
    counts: list[int] = []
    drop = Units._drop

    def counting(units: Units, unit: Unit) -> None:
        counts.extend(uses(flat.memory) for flat in unit.flats if flat.memory is not None)
        drop(units, unit)

    monkeypatch.setattr(Units, "_drop", counting)
    train(stack(), steps=1)
    assert len(counts) >= 2 * LAYERS
    assert set(counts) == {uses(torch.empty(3))}


@pytest.mark.parametrize(
    "frozen",
    [
        tuple(f"{i}.weight" for i in range(LAYERS)),
        ("2.weight", "2.bias", "3.weight", "3.bias"),
        ("0.weight", "0.bias"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_weights_in_units(frozen: tuple[str, ...], recompute: bool) -> None:
    assert_equal(train(stack(recompute=recompute, frozen=frozen)), reference(frozen))


def test_a_result_that_is_a_view_of_a_weight_is_copied() -> None:
    """The gathered memory is used again for the next unit."""

    def leaking(ctx: rt.Context, prefix: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return weight[:2]

    def forward(
        ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
    ) -> rt.Result:
        views = [
            ctx.call(leaking, f"{i}", (batch["x"],), (f"{i}.weight", f"{i}.bias"))
            for i in range(LAYERS)
        ]
        expected = [tensors()[f"{i}.weight"][:2] for i in range(LAYERS)]
        assert all(torch.equal(v, e) for v, e in zip(views, expected, strict=True))
        return rt.Result(rt.reduce(torch.stack(views).sum(), ctx, ("x",)))

    made = stack()
    changed = rt.Program(made.name, MESH, made.inputs, made.parameters, forward, step=made.step)
    states = train(changed, steps=1)
    gradient = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    gradient[:2] = 2  # one from each rank
    assert torch.allclose(states[0]["0.weight"], tensors()["0.weight"] - 0.1 * gradient)
