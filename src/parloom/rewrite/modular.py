"""Tensors of integers modulo a prime: what programs compute at one choice of shapes and inputs.

Programs that differ anywhere agree on random inputs with a probability of at most the degree over
the prime (Schwartz and Zippel). Opaque functions are hashes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from parloom.ir.ops.algebra import Names, Window
from parloom.rewrite.symbolic import NotExpressed

Ints = NDArray[np.int64]
PRIME = 2**31 - 1  # products fit 64 bits


@dataclass(frozen=True, slots=True)
class Numbers:
    """The algebra of arrays of integers modulo `prime`."""

    prime: int = PRIME

    @property
    def one(self) -> int:
        return 1

    def count(self, size: int) -> int:
        return size

    def number(self, count: int) -> int:
        return count

    def dims(self, part: Ints) -> tuple[int, ...]:
        return part.shape

    def product(self, names: Sequence[Names], result: Names, parts: Sequence[Ints]) -> Ints:
        own = dict.fromkeys(name for some in names for name in some)
        every = [*result, *(name for name in own if name not in result)]
        spread = []
        for some, part in zip(names, parts, strict=True):
            order = sorted(range(len(some)), key=lambda i: every.index(some[i]))
            shape = [part.shape[some.index(n)] if n in some else 1 for n in every]
            spread.append(np.transpose(part, order).reshape(shape))
        whole = reduce(lambda a, b: a * b % self.prime, spread)
        for _ in range(len(every) - len(result)):
            whole = whole.sum(axis=-1) % self.prime
        return whole

    def add(self, one: Ints, other: Ints) -> Ints:
        return (one + other) % self.prime

    def scale(self, part: Ints, factor: Fraction) -> Ints:
        return part * self._number(factor) % self.prime

    def divide(self, part: Ints, size: int) -> Ints:
        return self.scale(part, Fraction(1, size))

    def fill(self, value: Fraction, shape: Sequence[int]) -> Ints:
        return np.full(shape, self._number(value), dtype=np.int64)

    def opaque(self, name: str, *parts: Ints) -> Ints:
        return self._mixed(name, np.broadcast_arrays(*parts))

    def rows(self, name: str, part: Ints, dim: int) -> Ints:
        along = np.moveaxis(part, dim, -1)
        whole = self._mixed(name, [along[..., i] for i in range(along.shape[-1])])
        places = np.arange(1, along.shape[-1] + 1, dtype=np.int64)
        mixed = self._mixed(name, np.broadcast_arrays(places, whole[..., None]))
        return np.moveaxis(mixed, -1, dim)

    def concat(self, parts: Sequence[Ints], dim: int) -> Ints:
        return np.concatenate(list(parts), axis=dim)

    def split(self, part: Ints, dim: int, sizes: Sequence[int]) -> list[Ints]:
        if sum(sizes) != part.shape[dim]:  # numpy would have the last part take the rest
            raise NotExpressed(f"{part.shape[dim]} in parts of {sizes}")
        return np.split(part, np.cumsum(sizes)[:-1], axis=dim)

    def take(self, part: Ints, dim: int, at: Sequence[int]) -> Ints:
        return np.take(part, at, axis=dim)

    def reshape(self, part: Ints, shape: Sequence[int]) -> Ints:
        return part.reshape(shape)

    def apart(self, part: Ints, dim: int, outer: int) -> Ints:
        shape = part.shape
        return part.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])

    def lookup(self, table: Ints, places: Ints) -> Ints:
        found: Ints = table[places]
        return found

    def windows(self, part: Ints, dim: int, window: Window) -> Ints:
        pads = [(window.before, window.after) if d == dim else (0, 0) for d in range(part.ndim)]
        if part.shape[dim] < window.less:
            raise NotExpressed(f"no windows over {part.shape[dim]}")
        firsts = np.arange(0, part.shape[dim] - window.less + 1, window.stride)
        places = firsts[:, None] + np.arange(window.size) * window.dilation
        return np.take(np.pad(part, pads), places, axis=dim)

    def _number(self, value: Fraction) -> int:
        return value.numerator * pow(value.denominator, -1, self.prime) % self.prime

    def _mixed(self, name: str, parts: Sequence[Ints]) -> Ints:
        """A hash of several numbers in their order: cubes of sums, with constants of the name."""
        digest = blake2b(name.encode(), digest_size=24).digest()
        first, factor, last = (
            int.from_bytes(digest[i : i + 8]) % (self.prime - 1) + 1 for i in (0, 8, 16)
        )
        found = np.full(parts[0].shape, first, dtype=np.int64)
        for part in parts:
            mixed = (found * factor + part + last) % self.prime
            square = mixed * mixed % self.prime
            found = (square * mixed + factor * square) % self.prime
        return found
