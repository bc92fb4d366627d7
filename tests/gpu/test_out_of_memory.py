"""A step that a GPU has no memory for ends with the words of `out_of_memory`."""

import pytest
import torch

import parloom
from parloom.errors import LaunchError
from parloom.zoo import mlp

pytestmark = pytest.mark.gpu


def test_a_small_share_of_a_gpu_does_not_do() -> None:
    torch.manual_seed(0)
    model, batch = mlp.build(batch=4096, features=1024, hidden=4096, depth=4, classes=8)
    plan = parloom.plan(model, batch, torch.optim.AdamW, "1xH100", method="data_parallel")
    trainer = parloom.parallelize(
        model, plan, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3)
    )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() * 1.1 / total)
    try:
        with pytest.raises(LaunchError, match="ran out of GPU memory in step 1"):
            trainer.step(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
