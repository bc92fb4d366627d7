"""Trains a byte-level language model on the sources of Python's own standard library.

    parloom run PLAN -- examples/train_bytes.py --plan PLAN --out FOLDER

PLAN was made for `examples/gpt2_bytes/config.json`. Every rank runs this file with the same
arguments and hands the same global batch to the trainer, which takes this rank's part of it.
Exit code 0 where the held-out loss reached the target, 1 where it did not.
"""

import argparse
import logging
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
LOG = logging.getLogger("parloom.example")


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
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of log and checkpoint")
    parser.add_argument("--batch", type=int, default=8, help="global batch, as planned")
    parser.add_argument("--seq", type=int, default=128, help="bytes per window, as planned")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--steps", type=int, default=200, help="give up after so many")
    parser.add_argument("--target", type=float, default=2.9, help="held-out nats per byte")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps")
    return parser.parse_args()


def log_to(out: Path) -> None:
    """Rank 0 writes the trainer's lines to the terminal and to train.log, the others nothing."""
    if os.environ.get("RANK", "0") != "0":
        return
    out.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [
        logging.StreamHandler(),
        logging.FileHandler(out / "train.log", mode="w"),
    ]
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers)


def main() -> int:
    args = arguments()
    log_to(args.out)
    corpus = Corpus.of_the_standard_library()
    LOG.info("training on %d bytes, %d held out", len(corpus.train), len(corpus.held_out))
    trainer = parallelize(
        build_model(),
        args.plan,
        optimizer=lambda named: torch.optim.AdamW(named, lr=args.lr),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / args.warmup)
        ),
        clip_norm=1.0,
        log_path=args.out / "steps.jsonl",
    )
    start, loss = time.perf_counter(), float("inf")
    for step in range(1, args.steps + 1):
        trainer.step(draw(corpus.train, args.batch, args.seq, seed=step))
        if step % args.evaluate_every == 0:
            batches = list(held_out_batches(corpus, args.batch, args.seq, count=16))
            loss = sum(float(trainer.evaluate(batch).loss) for batch in batches) / len(batches)
            elapsed = time.perf_counter() - start
            LOG.info("step %d: held-out loss %.3f nats/byte, %.0f s", step, loss, elapsed)
            if loss <= args.target:
                break
    trainer.save(args.out / "checkpoint")
    if loss > args.target:
        LOG.error("held-out loss %.3f after %d steps; wanted %.2f", loss, args.steps, args.target)
    return int(loss > args.target)


if __name__ == "__main__":
    raise SystemExit(main())
