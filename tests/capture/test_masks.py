"""Masks that depend on no input are evaluated as torch would, in the memory of one sample."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from parloom.capture import attention
from parloom.capture.attention import CAUSAL, NOTHING, FixedMasks

ROWS = 12


class Spelled(nn.Module):
    """A mask [batch, 1, query, key] by one of the ways in which libraries write it."""

    def __init__(self, spelling: str, batch: int) -> None:
        super().__init__()
        self.spelling, self.batch = spelling, batch

    def forward(self, x: Tensor) -> Tensor:
        key = torch.arange(ROWS).expand(self.batch, ROWS)
        segment = torch.zeros(self.batch, ROWS, dtype=torch.long).cumsum(1)
        rows, columns = key[:, None, :, None], key[:, None, None, :]
        causal = columns <= rows
        same = segment[:, None, :, None] == segment[:, None, None, :]
        sample = torch.arange(self.batch).view(-1, 1, 1, 1)
        place = torch.arange(ROWS)
        document = (key.diff(prepend=key[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        in_one = document[sample, place[:, None]] == document[sample, place]
        table = key + (torch.arange(self.batch)[:, None] == 3) * (key == 2)
        return {
            "causal": causal,
            "packed": (causal & same).expand(self.batch, 1, ROWS, ROWS),
            "copied": (causal & same).clone().view(self.batch, 1, ROWS, ROWS).to(torch.bool),
            "everything": causal | ~causal,
            "window": causal & (columns > rows - 4),
            "one sample": causal & ((sample != 3) | (columns > 0)),
            "one element": causal & ((sample != 3) | (columns != 2) | (rows != 7)),
            "transposed": rows <= columns,
            "looked up": in_one & (key[sample, place] <= key[sample, place[:, None]]),
            "looked up in another": causal & (table[sample, place] <= key[sample, place[:, None]]),
            "by rows": (rows > 3).expand(self.batch, 1, ROWS, ROWS),
        }[self.spelling]


MEANING = {
    "causal": CAUSAL, "packed": CAUSAL, "copied": CAUSAL, "everything": NOTHING, "window": None,
    "one sample": None, "one element": None, "transposed": None, "by rows": None,
    "looked up": CAUSAL, "looked up in another": None,
}  # fmt: skip


def masks_of(spelling: str, batch: int) -> tuple[FixedMasks, fx.Node, Tensor]:
    model, x = Spelled(spelling, batch), torch.zeros(1)
    traced = make_fx(model, tracing_mode="fake")(x)
    (mask,) = next(n for n in traced.graph.nodes if n.op == "output").all_input_nodes
    return FixedMasks(), mask, model(x)


@pytest.mark.parametrize("spelling", MEANING)
def test_masks_mean_what_they_are(spelling: str) -> None:
    masks, node, expected = masks_of(spelling, 5)
    assert masks.meaning(node) == MEANING[spelling]
    found = masks.values[node]
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spelling", ["causal", "packed", "copied", "window", "looked up"])
def test_equal_samples_take_the_memory_of_one(spelling: str) -> None:
    masks, node, _ = masks_of(spelling, 64)
    masks.meaning(node)
    kept = [v for v in masks.values.values() if isinstance(v, Tensor)]
    assert max(attention.distinct(v).numel() for v in kept) <= ROWS * ROWS


def test_a_mask_that_differs_between_samples_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_ELEMENTS", 2 * ROWS * ROWS)
    masks, node, _ = masks_of("one element", 5)
    assert masks.meaning(node) is None
    assert node not in masks.values
    masks, node, _ = masks_of("causal", 5)
    assert masks.meaning(node) == CAUSAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_zeros_of_both_signs_stay_apart(dtype: torch.dtype) -> None:
    value = torch.tensor([0.0, -0.0]).to(dtype)
    assert (attention.distinct(attention.repeated(value)).numel() == 1) == (dtype is torch.int64)
