"""Collectives that send int8 in blocks (`parloom.quantization`), and add up what they receive.

Addends of a sum are quantized once, by who sends them: an all_to_all brings every member the rows
that it adds up, in float32 (ZeRO++'s qgZ). An all_reduce quantizes the sums once more and gathers
them. What is gathered is quantized by its owner, and the owner, too, reads it as all others do.
Tensors that travel together begin at multiples of `BLOCK` elements, with zeros in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parloom.quantization import BLOCK, LARGEST
from parloom.runtime.comm import Group
from parloom.runtime.work import Then, Work


def encode(rows: Tensor) -> Tensor:
    """Rows [r, n] of whole blocks as int8 [r, n + bytes of scales].

    Blocks with a number that is not finite come back with none that is.
    """
    count, numel = rows.shape
    blocks = rows.reshape(count, numel // BLOCK, BLOCK).to(_wide(rows.dtype))
    scales = blocks.abs().amax(-1) / LARGEST
    units = (blocks / scales.masked_fill(scales == 0, 1).unsqueeze(-1)).round_()
    payload = torch.empty(
        count, numel + scales.shape[1] * scales.itemsize, dtype=torch.int8, device=rows.device
    )
    payload[:, :numel].copy_(units.view(count, numel))
    payload[:, numel:].view(scales.dtype).copy_(scales)
    return payload


def decode(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """A row of what `encode` makes of numbers of `dtype`, in float32 or float64."""
    scales = payload[numel:].view(_wide(dtype))
    return (payload[:numel].view(-1, BLOCK) * scales.unsqueeze(-1)).view(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Quantized:
    """A group whose members send each other quantized numbers; the axes that it joins are those of
    `group`.
    """

    group: Group

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output` [n] with the sum over members of row `index` of `tensor` [p, n]."""
        payload = encode(tensor)
        received = torch.empty_like(payload)
        work = self.group.all_to_all(received, payload)
        return Then(work, partial(_add_up, output, received))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output` [p, n] with every member's `tensor` [n]."""
        payload = encode(tensor.view(1, -1))[0]
        received = payload.new_empty(self.size, payload.numel())
        work = self.group.all_gather(received, payload)
        return Then(work, partial(_read, output, received))

    def all_reduce(self, tensor: Tensor) -> Work:
        """Add up flat tensors in place."""
        each = -(-tensor.numel() // (self.size * BLOCK)) * BLOCK
        rows = tensor.new_zeros(self.size * each)
        rows[: tensor.numel()] = tensor
        mine = tensor.new_empty(each)
        work = self.reduce_scatter(mine, rows.view(self.size, each))

        def publish() -> Work:
            gathered = self.all_gather(rows.view(self.size, each), mine)
            return Then(gathered, lambda: tensor.copy_(rows[: tensor.numel()]))

        return _Both(work, publish)


def over(group: Group, dtype: str) -> Group | Quantized:
    """`group`, or what sends numbers of `dtype` over it."""
    return Quantized(group) if dtype and group.size > 1 else group


@dataclass(frozen=True, slots=True)
class _Both:
    """A collective, and one that is launched when it is over."""

    work: Work
    launch: Callable[[], Work]

    def wait(self) -> None:
        self.work.wait()
        self.launch().wait()


def _add_up(output: Tensor, received: Tensor) -> None:
    total = decode(received[0], output.numel(), output.dtype)
    for payload in received[1:]:
        total += decode(payload, output.numel(), output.dtype)
    output.copy_(total)


def _read(output: Tensor, received: Tensor) -> None:
    for row, payload in zip(output, received, strict=True):
        row.copy_(decode(payload, row.numel(), row.dtype))
