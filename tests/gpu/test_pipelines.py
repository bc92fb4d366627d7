"""Several stages on one GPU train as the model does on a CPU, whatever the schedule."""

import pytest
import torch

from parloom import runtime as rt
from parloom.execute.optimizers import make
from parloom.execute.verify import EPS, LEARNING_RATE, SEED, STEPS
from tests.dist import lowered, staged
from tests.dist.staged import PLANNED, compiled, drawn, even

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("name", ["gpt", "dlrm"])
@pytest.mark.usefixtures("nccl")
def test_training_equals_one_device(name: str, schedule: str) -> None:
    model = lowered.model(name)
    chosen = drawn(
        model.graph, even(model.graph, 2), [1], schedule=schedule, num_microbatches=2, chunks=2
    )
    pipeline = compiled(model, chosen).pipeline
    trainer = rt.Trainer(
        pipeline,
        model.tensors,
        optimizer=lambda named: make(PLANNED, named, lr=LEARNING_RATE, eps=EPS),
        comm=rt.DistributedComm(pipeline.mesh),
        device=torch.device("cuda", 0),
        seed=SEED,
    )
    losses = [trainer.step(model.batch).loss.item() for _ in range(STEPS)]
    expected = staged.reference(name)
    assert losses == pytest.approx([float(loss) for loss in expected.losses], rel=1e-9)
    own = trainer.state_dict()
    for key, value in expected.state.items():
        torch.testing.assert_close(own[key].cpu(), value, rtol=1e-8, atol=1e-10)
