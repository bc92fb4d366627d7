"""The script whose ranks `faults.py` kills: a small GPT in float64, other samples in every step.

    parloom run PLAN -- benchmarks/faults_train.py FOLDER STEPS SAVE_EVERY

Below `parloom run --resume` it goes on after the step of the checkpoint.
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import parloom
from parloom.zoo.gpt import build

BATCH, SEQ, VOCAB = 12, 16, 64


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Three blocks; the batch divides over two to four devices."""
    torch.manual_seed(0)
    model, batch = build(batch=BATCH, seq=SEQ, width=32, heads=4, depth=3, vocab=VOCAB)
    return model.double(), batch


def samples(step: int) -> dict[str, Tensor]:
    """The batch of a step, whatever came before it."""
    drawn = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    return {"input_ids": drawn, "labels": drawn}


def main(folder: Path, steps: int, save_every: int) -> None:
    """Train, and save now and then; a rank's process id is in a file of its own."""
    (folder / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()), encoding="ascii")
    trainer = parloom.parallelize(
        small()[0],
        os.environ["PARLOOM_PLAN"],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.3, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10),
        clip_norm=1.0,
        log_path=folder / "log.jsonl",
    )
    for step in range(trainer.steps_done, steps):
        if step % save_every == 0:
            trainer.save(folder / "checkpoints" / f"step-{step}")
        trainer.step(samples(step))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
