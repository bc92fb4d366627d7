"""Gradients collect over the microbatches in the reduce dtype, reduced over ranks or not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.runtime.whole_shapes import Untouched
from tests.dist import mlp

MICROBATCHES = 9
# In bfloat16 256 + 1 is 256: eight ones after a 256 are lost one by one, and not in float32.
TOTAL = 256.0 + MICROBATCHES - 1


def program(
    mesh: rt.Mesh, layout: mlp.Layout, master: str | None, reduce_dtype: str | None
) -> rt.Program:
    """The gradient of `gain` is 256 in the first microbatch and 1 in each later one."""

    def forward(ctx: rt.Context, batch: dict[str, Tensor], hoisted: Any) -> rt.Result:
        scale = (1.0 if ctx.microbatch else 256.0) / mesh.size(layout.data)
        return rt.Result(rt.reduce(ctx.weight("gain").sum() * scale, ctx, layout.data))

    made = mlp.program(mesh, layout, "bfloat16", forward=forward, reduce_dtype=reduce_dtype)
    gain = next(spec for spec in made.parameters if spec.name == "gain")
    spec = rt.TensorSpec("x", (MICROBATCHES,), "bfloat16", (("micro", 1),))
    return replace(
        made,
        inputs=(spec,),
        outputs=(),
        parameters=(replace(gain, master_dtype=master),),
        step=mlp.step_program((gain,), layout.data),
    )


def gradients(made: rt.Program) -> list[Tensor]:
    """The owned gradients of the second step, by rank: buckets collect elsewhere in the first."""

    def body(comm: rt.Comm) -> Tensor:
        weights = mlp.model(torch.bfloat16).state_dict()
        one = rt.Trainer(made, weights, optimizer=mlp.sgd, comm=comm)
        for _ in range(2):
            one.step({"x": torch.ones(MICROBATCHES, dtype=torch.bfloat16)})
        gradient = one.parts[0].store.helds["gain"].owned.grad
        assert gradient is not None
        return gradient

    return rt.run_threads(made.mesh, body)


@pytest.mark.parametrize("master", [None, "float32"])
@pytest.mark.parametrize("storage", ["replicated", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("ranks", "data"), [(1, ("x",)), (2, ("x",)), (2, ())], ids=["one", "reduced", "replicas"]
)
def test_gradients_collect_in_the_reduce_dtype(
    ranks: int, data: tuple[str, ...], storage: str, master: str | None
) -> None:
    mesh = mlp.with_time(rt.grid({"x": ranks}), MICROBATCHES)
    layout = mlp.Layout(data, storage=storage, storage_axes=("x",))
    for gradient in gradients(program(mesh, layout, master, "float32")):
        assert gradient.dtype == getattr(torch, master or "bfloat16")
        assert torch.equal(gradient, torch.full_like(gradient, TOTAL))


def test_without_a_reduce_dtype_one_rank_collects_where_autograd_does() -> None:
    mesh = mlp.with_time(rt.grid({"x": 1}), MICROBATCHES)
    (gradient,) = gradients(program(mesh, mlp.Layout(("x",)), None, None))
    assert torch.equal(gradient, torch.full_like(gradient, 256.0))


def test_one_rank_copies_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's own memory is what the optimizer reads."""
    # Hooks are refused to users; this one only looks on.
    monkeypatch.setattr(Untouched, "check", lambda *_: None)
    made = mlp.program(mlp.with_time(rt.grid({"x": 1}), 3), mlp.Layout(("x",)))
    comm = rt.SingleComm(made.mesh)
    one = rt.Trainer(made, mlp.model().state_dict(), optimizer=mlp.sgd, comm=comm)
    held = one.parts[0].store.helds["up.weight"]
    seen: list[int] = []

    def note(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad.data_ptr())

    held.owned.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    for _ in range(2):
        seen.clear()
        one.step(mlp.batch())
        assert held.owned.grad is not None
        assert seen == [held.owned.grad.data_ptr()] * 3
