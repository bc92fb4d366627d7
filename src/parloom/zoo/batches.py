"""Batches that several models share. Always on the CPU, also where the model is built on meta."""

from torch import Generator, Tensor, arange, randint


def tokens(batch: int, seq: int, vocab: int) -> dict[str, Tensor]:
    """input_ids and labels [batch, seq]; rows end in padding (-100) of different lengths.

    The padding makes the loss a mean over tokens that is no mean of per-sample means, which is
    where averaging the losses of shards goes wrong.
    """
    g = Generator().manual_seed(0)
    input_ids = randint(0, vocab, (batch, seq), generator=g, device="cpu")
    padding = randint(0, max(1, seq // 4), (batch, 1), generator=g, device="cpu")
    labels = input_ids.masked_fill(arange(seq, device="cpu") >= seq - padding, -100)
    return {"input_ids": input_ids, "labels": labels}
