"""A hand-written program trained under every storage equals the same model on one device."""

import pytest

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
