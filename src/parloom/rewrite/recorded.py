"""Arrays of wide numbers that remember how they were made, and gradients through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from string import ascii_letters

import numpy as np
from numpy.typing import NDArray

from parloom.ir.ops.algebra import Names, Window, aligned
from parloom.rewrite.symbolic import NotExpressed

Floats = NDArray[np.float64]
Function = Callable[[Floats], Floats]
Adjoint = Callable[[Floats], Floats]
"""The gradient of an operand, of that of a result."""
# By how much an argument is moved for the derivative of a function of elements.
STEP = 1e-5


@dataclass(frozen=True, eq=False, slots=True)
class Traced:
    """An array, what it was made of, and what is done with its gradient whenever some is added."""

    value: Floats
    parents: tuple[tuple["Traced", Adjoint], ...]
    rounded: Function


def same(value: Floats) -> Floats:
    """An array as it is."""
    return value


def gradients(
    tape: Sequence[Traced], outputs: Sequence[Traced], upstream: Sequence[Floats]
) -> dict[Traced, Floats]:
    """The gradient of all arrays that those of outputs reach, of these; a tape has arrays in the
    order in which they were made.
    """
    found: dict[Traced, Floats] = {}

    def add(to: Traced, more: Floats) -> None:
        found[to] = to.rounded(found[to] + more if to in found else more)

    for out, given in zip(outputs, upstream, strict=True):
        add(out, given)
    for own in reversed(tape):
        for parent, adjoint in own.parents if own in found else ():
            add(parent, adjoint(found[own]))
    return found


class Recorded:
    """The algebra of such arrays, with functions of elements by their names, and of rows with how
    their gradients are made of results and theirs. Raises `NotExpressed` for others.
    """

    def __init__(
        self,
        elements: Mapping[str, Function],
        along: Mapping[str, tuple[Function, Callable[[Floats, Floats], Floats]]],
    ) -> None:
        self.tape: list[Traced] = []
        self._elements, self._along = elements, along

    def given(self, value: Floats, rounded: Function) -> Traced:
        """An input."""
        return self._made(value, rounded=rounded)

    def read(self, part: Traced, rounded: Function) -> Traced:
        """An operand as an operator reads it, whose share of the gradient is rounded."""
        return self._made(part.value, (part, rounded))

    def stored(self, part: Traced, rounded: Function) -> Traced:
        """A result, which is rounded, as is its gradient; places are not."""
        if part.value.dtype.kind != "f":
            return part
        return self._made(rounded(part.value), (part, same), rounded=rounded)

    @property
    def one(self) -> int:
        return 1

    def count(self, size: int) -> int:
        return size

    def number(self, count: int) -> int:
        return count

    def dims(self, part: Traced) -> tuple[int, ...]:
        return part.value.shape

    def product(self, names: Sequence[Names], result: Names, parts: Sequence[Traced]) -> Traced:
        extents: dict[str, int] = {}
        for own, part in zip(names, parts, strict=True):
            for name, size in zip(own, part.value.shape, strict=True):
                extents[name] = max(size, extents.get(name, 1))
        # Dims that are repeated along others of their name do not take part.
        kept = [
            [n for n, size in zip(own, part.value.shape, strict=True) if size == extents[n]]
            for own, part in zip(names, parts, strict=True)
        ]
        values = [
            part.value.reshape([extents[n] for n in own])
            for own, part in zip(kept, parts, strict=True)
        ]

        def adjoint(at: int) -> Adjoint:
            others = [i for i in range(len(parts)) if i != at]
            some = [list(result), *(kept[i] for i in others)]
            shape = parts[at].value.shape
            return lambda g: _einsum(
                some, kept[at], [g, *(values[i] for i in others)], extents
            ).reshape(shape)

        value = _einsum(kept, result, values, extents)
        return self._made(value, *((part, adjoint(i)) for i, part in enumerate(parts)))

    def add(self, one: Traced, other: Traced) -> Traced:
        return self._made(
            one.value + other.value,
            *((part, _summed_to(part.value.shape)) for part in (one, other)),
        )

    def scale(self, part: Traced, factor: Fraction) -> Traced:
        times = float(factor)
        return self._made(part.value * times, (part, lambda g: g * times))

    def divide(self, part: Traced, size: int) -> Traced:
        return self.scale(part, Fraction(1, size))

    def fill(self, value: Fraction, shape: Sequence[int]) -> Traced:
        return self._made(np.full(tuple(shape), float(value)))

    def opaque(self, name: str, *parts: Traced) -> Traced:
        op, _, others = name.partition("(")
        if op not in self._elements or others != "('',), ())":
            raise NotExpressed(f"{name} in numbers")
        (part,), function = parts, self._elements[op]
        slope = (function(part.value + STEP) - function(part.value - STEP)) / (2 * STEP)
        return self._made(function(part.value), (part, lambda g: g * slope))

    def rows(self, name: str, part: Traced, dim: int) -> Traced:
        if name not in self._along:
            raise NotExpressed(f"{name} in numbers")
        function, back = self._along[name]
        value = function(np.moveaxis(part.value, dim, -1))

        def adjoint(g: Floats) -> Floats:
            return np.moveaxis(back(value, np.moveaxis(g, dim, -1)), -1, dim)

        return self._made(np.moveaxis(value, -1, dim), (part, adjoint))

    def concat(self, parts: Sequence[Traced], dim: int) -> Traced:
        ends = np.cumsum([part.value.shape[dim] for part in parts])

        def adjoint(at: int) -> Adjoint:
            begin = ends[at] - parts[at].value.shape[dim]
            return lambda g: g[(slice(None),) * dim + (slice(begin, ends[at]),)]

        value = np.concatenate([part.value for part in parts], axis=dim)
        return self._made(value, *((part, adjoint(i)) for i, part in enumerate(parts)))

    def split(self, part: Traced, dim: int, sizes: Sequence[int]) -> list[Traced]:
        found = []
        for size, end in zip(sizes, np.cumsum(sizes), strict=True):
            places = (slice(None),) * dim + (slice(end - size, end),)
            found.append(self._made(part.value[places], (part, _placed(part, places))))
        return found

    def take(self, part: Traced, dim: int, at: Sequence[int]) -> Traced:
        def adjoint(g: Floats) -> Floats:
            whole = np.zeros_like(part.value)
            for place, one in zip(at, np.moveaxis(g, dim, 0), strict=True):
                np.moveaxis(whole, dim, 0)[place] += one
            return whole

        return self._made(np.take(part.value, at, axis=dim), (part, adjoint))

    def reshape(self, part: Traced, shape: Sequence[int]) -> Traced:
        own = part.value.shape
        return self._made(part.value.reshape(tuple(shape)), (part, lambda g: g.reshape(own)))

    def apart(self, part: Traced, dim: int, outer: int) -> Traced:
        own = part.value.shape
        return self.reshape(part, (*own[:dim], outer, own[dim] // outer, *own[dim + 1 :]))

    def lookup(self, table: Traced, places: Traced) -> Traced:
        rows = places.value.astype(np.int64)

        def adjoint(g: Floats) -> Floats:
            whole = np.zeros_like(table.value)
            np.add.at(whole, rows, g)
            return whole

        return self._made(table.value[rows], (table, adjoint))

    def windows(self, part: Traced, dim: int, window: Window) -> Traced:
        lead, own = (slice(None),) * dim, part.value.shape
        whole = (*own[:dim], own[dim] + window.before + window.after, *own[dim + 1 :])
        inner = (*lead, slice(window.before, window.before + own[dim]))
        width = window.stride * len(range(0, own[dim] - window.less + 1, window.stride))
        first = (at * window.dilation for at in range(window.size))
        seen = [(*lead, slice(at, at + width, window.stride)) for at in first]
        wide = np.zeros(whole)
        wide[inner] = part.value

        def adjoint(g: Floats) -> Floats:
            found = np.zeros(whole)
            for places, one in zip(seen, np.moveaxis(g, dim + 1, 0), strict=True):
                found[places] += one
            return found[inner]

        value = np.stack([wide[places] for places in seen], axis=dim + 1)
        return self._made(value, (part, adjoint))

    def _made(
        self, value: Floats, *parents: tuple[Traced, Adjoint], rounded: Function = same
    ) -> Traced:
        found = Traced(value, parents, rounded)
        self.tape.append(found)
        return found


def _placed(part: Traced, places: tuple[slice, ...]) -> Adjoint:
    """Zeros but for some places."""

    def adjoint(g: Floats) -> Floats:
        whole = np.zeros_like(part.value)
        whole[places] = g
        return whole

    return adjoint


def _summed_to(shape: tuple[int, ...]) -> Adjoint:
    """Sums over the dims along which an array of this shape was repeated."""

    def summed(g: Floats) -> Floats:
        (own, _), _ = aligned(len(shape), g.ndim)
        gone = g.ndim - len(own)
        repeated = [gone + i for i, n in enumerate(shape) if n == 1]
        found: Floats = g.sum(axis=(*range(gone), *repeated)).reshape(shape)
        return found

    return summed


def _einsum(
    names: Sequence[Names], to: Names, parts: Sequence[Floats], extents: Mapping[str, int]
) -> Floats:
    """A product of arrays, repeated along the names that only the result has."""
    letters = dict(zip(extents, ascii_letters, strict=False))
    missing = [n for n in to if not any(n in own for own in names)]
    every = [*names, *([n] for n in missing)]
    ones = (np.ones(extents[n]) for n in missing)
    text = ",".join("".join(letters[n] for n in own) for own in every)
    asked = f"{text}->{''.join(letters[n] for n in to)}"
    found: Floats = np.einsum(asked, *parts, *ones, optimize=True)
    return found
