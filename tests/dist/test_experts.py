"""Products by groups on one rank: torch's kernel, where it is taken, and a loop agree."""

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.runtime import experts

PAIRS = 100
SIZES = (7, 0, 5, 4)  # rows per expert


def product(dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    """The product and both gradients; the second expert has no rows."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 24, 16) if transposed else (4, 16, 24)
    given = (
        torch.randn((16, 16), generator=generator),
        torch.randn(shape, generator=generator),
        torch.randn((16, 24), generator=generator),
    )
    rows, matrices, grad = (t.to(dtype) for t in given)
    leaves = rows.requires_grad_(), matrices.requires_grad_()
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    places = index * PAIRS + torch.arange(16)
    seen = leaves[1].transpose(1, 2) if transposed else leaves[1]
    made = rt.grouped_mm(leaves[0], seen, places, torch.arange(4), PAIRS)
    torch.autograd.backward(made, grad)
    found = [made.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert len(found) == 3
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_and_loop_agree(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = product(torch.float32, transposed)
    exact = product(torch.float64, transposed)
    monkeypatch.setattr(experts, "_kernel_takes", lambda rows, matrices: True)
    kernel = product(torch.float32, transposed)
    for a, b, c in zip(loop, kernel, exact, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c.float())
    assert not kernel[2][1].any(), "an expert without rows has no gradient"


def test_places_tell_everything() -> None:
    """Local experts 1 and 3 of four, tokens 2 and 3 of four on the second rank of an axis."""
    mesh = rt.grid({"x": 2})

    def rank(comm: rt.Comm) -> tuple[Tensor, Tensor, Tensor]:
        ctx = rt.Context(comm)
        tokens = torch.arange(2.0).unsqueeze(1) + 10 * comm.rank
        index = torch.tensor([[3, 0], [1, 3]])
        rows, places = rt.dispatch(tokens, index, torch.tensor([1, 3]), 4, ctx, ("x", 2))
        total = rt.collect(rows, places, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), ctx, ("x", 2))
        return rows, places, total

    rows, places, total = rt.run_threads(mesh, rank)[1]
    assert rows.flatten().tolist() == [11, 10, 11]
    assert places.tolist() == [1 * 8 + 6, 3 * 8 + 4, 3 * 8 + 7]  # expert x 8 pairs + pair
    assert total.flatten().tolist() == [10 * 1, 11 * 3 + 11 * 4]


def test_rows_of_no_expert_are_zero() -> None:
    """As those that a model drops by an expert's number that there is not."""
    rows = torch.ones(3, 4, requires_grad=True)
    places = torch.tensor([0, PAIRS + 1, 2 * PAIRS + 2])
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    try:
        made = rt.grouped_mm(rows, torch.ones(2, 4, 5), places, torch.arange(2), PAIRS)
        torch.autograd.backward(made, torch.ones(3, 5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert made.tolist() == [[4.0] * 5, [4.0] * 5, [0.0] * 5]
    assert rows.grad is not None
    assert rows.grad.tolist() == [[5.0] * 4, [5.0] * 4, [0.0] * 4]
