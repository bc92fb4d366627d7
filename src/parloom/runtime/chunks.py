"""Storage chunks in flat memory: how many parameters travel in one collective.

A collective over p ranks moves a buffer [p, total]. Each parameter has a section of its columns;
row i of the section is ceil-chunk i of the home shard along its storage dim, padded to full length.
What lies in the padding is never read.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from parloom.runtime.sharding import chunk


@dataclass(frozen=True, slots=True)
class Section:
    """Columns [offset, offset + numel): home shards of `shape` cut in `parts` along `dim`."""

    shape: tuple[int, ...]
    dim: int
    parts: int
    offset: int = 0

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a full chunk."""
        step = -(-self.shape[self.dim] // self.parts)
        return (*self.shape[: self.dim], step, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        return prod(self.chunk_shape)

    def rows(self, home: Tensor, index: int) -> Tensor:
        """View of chunk `index` of a home shard."""
        first, last = chunk(self.shape[self.dim], self.parts, index)
        return home.narrow(self.dim, first, last - first)

    def part(self, flat: Tensor, index: int) -> Tensor:
        """View of chunk `index` in its row `flat` [total], without the padding."""
        first, last = chunk(self.shape[self.dim], self.parts, index)
        padded = flat.narrow(0, self.offset, self.numel).view(self.chunk_shape)
        return padded.narrow(self.dim, 0, last - first)

    def pack(self, home: Tensor, buffer: Tensor) -> None:
        """Write a home shard into `buffer` [parts, total]."""
        if self._even:
            self._columns(buffer).copy_(self._split(home))
            return
        for index in range(self.parts):
            self.part(buffer[index], index).copy_(self.rows(home, index))

    def unpack(self, buffer: Tensor, home: Tensor) -> None:
        """Read a home shard out of `buffer` [parts, total]."""
        if self._even:
            self._split(home).copy_(self._columns(buffer))
            return
        for index in range(self.parts):
            self.rows(home, index).copy_(self.part(buffer[index], index))

    @property
    def _even(self) -> bool:
        return self.shape[self.dim] % self.parts == 0

    def _columns(self, buffer: Tensor) -> Tensor:
        columns = buffer.narrow(1, self.offset, self.numel)
        return columns.view(self.parts, *self.chunk_shape)

    def _split(self, home: Tensor) -> Tensor:
        split = home.view(
            *self.shape[: self.dim],
            self.parts,
            self.shape[self.dim] // self.parts,
            *self.shape[self.dim + 1 :],
        )
        return split.movedim(self.dim, 0)


def layout(shapes: list[tuple[tuple[int, ...], int]], parts: int) -> tuple[list[Section], int]:
    """Sections one after the other for (home shape, storage dim) pairs, and their total."""
    sections: list[Section] = []
    offset = 0
    for shape, dim in shapes:
        sections.append(Section(shape, dim, parts, offset))
        offset += sections[-1].numel
    return sections, offset


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
