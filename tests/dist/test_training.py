"""A hand-written program trained under every storage equals the same model on one device."""

import gc
import weakref
from dataclasses import replace

import pytest
from torch import Tensor

from parloom import runtime as rt
from tests.dist import mlp

TOLERANCE = 1e-9

LAYOUTS = {
    "data": mlp.Layout(("x",)),
    "data_joint": mlp.Layout(("y", "x")),
    "tensor": mlp.Layout((), ("x",)),
    "tensor_data": mlp.Layout(("x",), ("y",)),
    "zero1": mlp.Layout(("x", "y"), storage="zero1"),
    "zero2": mlp.Layout(("x", "y"), storage="zero2"),
    "zero3": mlp.Layout(("x", "y"), storage="zero3"),
    "zero1_tensor": mlp.Layout(("x",), ("y",), "zero1"),
    "zero2_hybrid": mlp.Layout(("x", "y"), storage="zero2", storage_axes=("y",)),
    "zero3_tensor": mlp.Layout(("y",), ("x",), "zero3"),
    "zero3_hybrid": mlp.Layout(("x", "y"), storage="zero3", storage_axes=("x",)),
    "zero3_replicas": mlp.Layout(("x",), storage="zero3", storage_axes=("y",)),
    "zero3_recompute": mlp.Layout(("x", "y"), storage="zero3", recompute=True),
    "recompute": mlp.Layout(("x",), recompute=True),
    "within": mlp.Layout(("x", "y"), chunks=(("x",), ("x",), ("x", "y"))),
    "weights_within": mlp.Layout(("x", "y"), chunks=(("y",), ("y", "x"), ("y", "x"))),
    "gradients_within": mlp.Layout(("x", "y"), chunks=((), ("y",), ("y", "x"))),
    "states_across_replicas": mlp.Layout(("x",), chunks=((), (), ("y", "x"))),
    "gradients_across_replicas": mlp.Layout(("x",), chunks=((), ("y",), ("y", "x"))),
    "within_replicas": mlp.Layout(("x",), chunks=(("y",), ("y",), ("y", "x"))),
    "within_tensor": mlp.Layout(("x",), ("y",), chunks=((), ("x",), ("x",))),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_equals_one_device(name: str, microbatches: int) -> None:
    mesh = mlp.with_time(rt.grid({"x": 2, "y": 2}), microbatches)
    made = mlp.program(mesh, LAYOUTS[name])
    expected = mlp.single_device(mlp.adamw, clip_norm=0.5, halve=True)
    runs = rt.run_threads(
        mesh, lambda comm: mlp.parallel(comm, made, mlp.adamw, clip_norm=0.5, halve=True)
    )
    for run in runs:
        assert mlp.difference(run, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "when"), [("within", "step"), ("within", "microbatch"), ("zero1", "step")]
)
def test_a_lost_reduction_is_caught(name: str, when: str) -> None:
    mesh = mlp.with_time(rt.grid({"x": 2, "y": 2}), 2)
    made = mlp.program(mesh, LAYOUTS[name])
    kept = tuple(n for n in made.step if (n.kind, n.when) != ("reduce_scatter", when))
    assert len(kept) < len(made.step)
    broken = replace(made, step=kept)
    expected = mlp.single_device(mlp.adamw, clip_norm=0.5, halve=True)
    runs = rt.run_threads(
        mesh, lambda comm: mlp.parallel(comm, broken, mlp.adamw, clip_norm=0.5, halve=True)
    )
    assert max(mlp.difference(run, expected) for run in runs) > 1e-3


@pytest.mark.parametrize("name", ["data", "zero1", "zero3", "tensor"])
def test_nothing_is_left_of_a_trainer_that_is_gone(name: str) -> None:
    """Hooks of weights do not keep them: Python's collector would not see such cycles."""
    mesh = rt.grid({"x": 2, "y": 2})
    made = mlp.program(mesh, LAYOUTS[name])

    def run(comm: rt.Comm) -> list[weakref.ref[Tensor]]:
        trainer = rt.Trainer(made, mlp.model().state_dict(), optimizer=mlp.adamw, comm=comm)
        trainer.step(mlp.batch())
        helds = trainer.parts[0].store.helds.values()
        return [weakref.ref(held.owned) for held in helds]

    refs = [ref for of_rank in rt.run_threads(mesh, run) for ref in of_rank]
    gc.collect()
    assert refs
    assert [ref for ref in refs if ref() is not None] == []
