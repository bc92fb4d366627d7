"""Fused kernels on a GPU give the parts of attention that the formula gives."""

import pytest
import torch
from torch import Tensor

from parloom.runtime import context_parallel
from parloom.runtime.comm import SingleGroup
from parloom.runtime.context_parallel import ALL, BEFORE, NOTHING, UP_TO, Blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seen", [[ALL, UP_TO], [UP_TO, NOTHING], [UP_TO, BEFORE]])
def test_kernels_and_formula_agree(
    seen: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of keys with fewer heads than queries, forward and backward."""
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, rows: int) -> Tensor:
        made = torch.randn(2, heads, rows, 64, generator=generator, device=device)
        return made.to(dtype)

    q, grad = draw(8, 128), draw(8, 128)
    k, v = draw(2, 256), draw(2, 256)
    places = torch.arange(256, device=device).view(2, 128)
    none = torch.empty(0, dtype=torch.int64, device=device)

    def both() -> list[Tensor]:
        blocks = Blocks(seen, none, none, places, 0.125)
        out, sums = context_parallel._forward(q, k, v, blocks, SingleGroup())
        found = context_parallel._backward(grad, q, k, v, out, sums, blocks, SingleGroup())
        return [x.float() for x in (out, sums, *found)]

    kernels = both()
    monkeypatch.setattr(context_parallel, "_has_kernel", lambda *_: False)
    for one, other in zip(kernels, both(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
