"""Storage chunks in flat memory: how many parameters travel in one collective.

A collective over p ranks moves a buffer [p, total]. Each parameter has a section of its columns;
row i of the section is a chunk of a tensor along its storage dim, padded to full length: of a home
shard, or of a chunk that is cut further. What lies in the padding is never read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Section:
    """Columns [offset, offset + numel): tensors of `shape` cut into `parts` chunks of `step` rows
    along `dim`; the last chunks may have fewer rows, or none.
    """

    shape: tuple[int, ...]
    dim: int
    parts: int
    step: int
    offset: int = 0

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a full chunk."""
        return (*self.shape[: self.dim], self.step, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        return prod(self.chunk_shape)

    def range(self, index: int) -> tuple[int, int]:
        """Rows [first, last) of chunk `index`."""
        size = self.shape[self.dim]
        return min(index * self.step, size), min((index + 1) * self.step, size)

    def rows(self, tensor: Tensor, index: int) -> Tensor:
        """View of chunk `index` of a tensor."""
        first, last = self.range(index)
        return tensor.narrow(self.dim, first, last - first)

    def part(self, flat: Tensor, index: int) -> Tensor:
        """View of chunk `index` in its row `flat` [total], without the padding."""
        first, last = self.range(index)
        padded = flat.narrow(0, self.offset, self.numel).view(self.chunk_shape)
        return padded.narrow(self.dim, 0, last - first)

    def pack(self, tensor: Tensor, buffer: Tensor, indices: Sequence[int]) -> None:
        """Write the chunks `indices` of a tensor into the rows of `buffer` [indices, total]."""
        if self._even and len(indices) == self.parts:
            self._columns(buffer).copy_(self._split(tensor))
            return
        for row, index in zip(buffer, indices, strict=True):
            self.part(row, index).copy_(self.rows(tensor, index))

    def unpack(self, buffer: Tensor, tensor: Tensor) -> None:
        """Read a tensor out of `buffer` [parts, total]."""
        if self._even:
            self._split(tensor).copy_(self._columns(buffer))
            return
        for index in range(self.parts):
            self.rows(tensor, index).copy_(self.part(buffer[index], index))

    @property
    def _even(self) -> bool:
        return self.shape[self.dim] == self.parts * self.step

    def _columns(self, buffer: Tensor) -> Tensor:
        columns = buffer.narrow(1, self.offset, self.numel)
        return columns.view(self.parts, *self.chunk_shape)

    def _split(self, tensor: Tensor) -> Tensor:
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return tensor.view(*before, self.parts, self.step, *after).movedim(self.dim, 0)


def layout(sections: Iterable[Section], align: int = 1) -> tuple[list[Section], int]:
    """The sections one after the other, each at a multiple of `align`, and their total."""
    found: list[Section] = []
    offset = 0
    for section in sections:
        found.append(replace(section, offset=offset))
        offset += -(-section.numel // align) * align
    return found, offset


class Pool:
    """Flat buffers to use again: fresh pages cost more than the copies that fill them."""

    __slots__ = ("_free", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor with arbitrary contents."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, buffer: Tensor) -> None:
        """Take back a tensor whose contents nobody reads any more."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
