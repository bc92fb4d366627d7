"""One NCCL rank on a GPU trains as one CPU rank does, under every storage."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parloom import runtime as rt
from tests.dist import mlp

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    rendezvous = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("storage", ["replicated", "zero1", "zero2", "zero3"])
@pytest.mark.usefixtures("nccl")
def test_training_equals_one_device(storage: str) -> None:
    mesh = mlp.with_time(rt.grid({"x": 1}), 2)
    made = mlp.program(mesh, mlp.Layout(("x",), storage=storage, recompute=True))
    run = mlp.parallel(
        rt.DistributedComm(mesh, rt.required_groups(made)),
        made,
        mlp.adamw,
        clip_norm=0.5,
        device=torch.device("cuda", 0),
    )
    assert mlp.difference(run, mlp.single_device(mlp.adamw, clip_norm=0.5)) < 1e-9
