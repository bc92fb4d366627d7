"""Trains a byte-level language model on the sources of Python's own standard library.

    parloom run PLAN -- examples/train_bytes.py --out FOLDER

Under another launcher say which plan: torchrun ... examples/train_bytes.py --plan PLAN. It was made
for `examples/gpt2_bytes/config.json`. Every rank runs this file with the same arguments and hands
the same global batch to the trainer, which takes this rank's part of it. Exit code 0 where the
held-out loss reached the target, 1 where it did not.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from parloom.api import parallelize

FOLDER = Path(__file__).parent / "gpt2_bytes"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and bytes held out, as one-dimensional uint8 tensors."""

    train: Tensor
    held_out: Tensor

    @staticmethod
    def of_the_standard_library() -> "Corpus":
        """Every tenth source file, in sorted order, is held out."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(f for f in root.rglob("*.py") if "-packages" not in str(f.relative_to(root)))
        if len(files) < 10:
            raise SystemExit(f"{root} has {len(files)} Python sources; at least 10 are needed")
        texts = [f.read_bytes() for f in files]
        held_out = b"\n".join(texts[::10])
        train = b"\n".join(t for i, t in enumerate(texts) if i % 10)
        return Corpus(_bytes(train), _bytes(held_out))


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(source: Tensor, batch: int, seq: int, seed: int) -> dict[str, Tensor]:
    """`batch` windows of `seq` bytes, the same on every rank; the seed is the data's position."""
    g = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(source) - seq, (batch,), generator=g)
    windows = torch.stack([source[i : i + seq] for i in starts.tolist()]).long()
    return {"input_ids": windows, "labels": windows}


def held_out_batches(
    corpus: Corpus, batch: int, seq: int, count: int
) -> Iterator[dict[str, Tensor]]:
    for i in range(count):
        # Far from the seeds of the training steps.
        yield draw(corpus.held_out, batch, seq, seed=1_000_000 + i)


def build_model() -> GPT2LMHeadModel:
    """The same weights on every rank: the seed is set first."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config.from_pretrained(FOLDER))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    planned = os.environ.get("PARLOOM_PLAN")  # set by `parloom run`
    parser.add_argument("--plan", type=Path, default=planned, required=planned is None)
    parser.add_argument("--out", type=Path, required=True, help="folder of log and checkpoint")
    parser.add_argument("--batch", type=int, default=8, help="global batch, as planned")
    parser.add_argument("--seq", type=int, default=128, help="bytes per window, as planned")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--steps", type=int, default=200, help="give up after so many")
    parser.add_argument("--target", type=float, default=2.9, help="held-out nats per byte")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    corpus = Corpus.of_the_standard_library()
    trainer = parallelize(
        build_model(),
        args.plan,
        optimizer=lambda named: torch.optim.AdamW(named, lr=args.lr),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / args.warmup)
        ),
        clip_norm=1.0,
        log_path=args.out / "train.jsonl",
    )

    def say(text: str) -> None:
        if trainer.comm.rank == 0:
            print(text, flush=True)

    def held_out_loss() -> float:
        batches = held_out_batches(corpus, args.batch, args.seq, count=16)
        return sum(float(trainer.evaluate(batch).loss) for batch in batches) / 16

    say(f"training on {len(corpus.train):,} bytes, {len(corpus.held_out):,} held out")
    start, loss = time.perf_counter(), float("inf")
    for step in range(1, args.steps + 1):
        trainer.step(draw(corpus.train, args.batch, args.seq, seed=step))
        if step % args.evaluate_every == 0:
            loss = held_out_loss()
            elapsed_s = time.perf_counter() - start
            say(f"step {step}: held-out loss {loss:.3f} nats/byte after {elapsed_s:.0f} s")
            if loss <= args.target:
                break
    trainer.save(args.out / "checkpoint")
    if loss > args.target:
        say(f"held-out loss {loss:.3f} after {args.steps} steps; wanted {args.target}")
    return int(loss > args.target)


if __name__ == "__main__":
    raise SystemExit(main())
