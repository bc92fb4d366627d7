"""One rank on a GPU: it trains as one CPU rank does under every storage, and its steps overlap."""

from pathlib import Path

import pytest
import torch

from parloom import api, zoo
from parloom import runtime as rt
from tests.dist import mlp

pytestmark = pytest.mark.gpu


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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch raises where a step makes the host wait; the log follows one step behind."""
    factory = tmp_path / "model.py"
    factory.write_text("from parloom import zoo\ndef build():\n    return zoo.build('mlp')\n")
    plan = api.plan(f"{factory}:build", cluster="1xH100", method="data_parallel")
    torch.manual_seed(0)
    model, batch = zoo.build("mlp")
    pinned = {name: tensor.pin_memory() for name, tensor in batch.items()}
    trainer = api.parallelize(model, plan, optimizer=torch.optim.AdamW, clip_norm=1.0)
    losses = [trainer.step(pinned).loss]
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [trainer.step(pinned).loss for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(capsys.readouterr().out.splitlines()) == 3
    trainer.log.flush()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"step 4 loss {float(losses[-1]):.4g} | ")
