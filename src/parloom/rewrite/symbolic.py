"""Tensors of symbolic shapes, for proofs.

A dim is a row of *blocks*, each a product of extents (its *digits*, the outermost first): what was
concatenated has several blocks, what was merged several digits, and a kernel's dim a block of one
element for each place. For each combination of blocks there is one element as a normal form, at the
place whose digits are variables.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from parloom.ir.ops.algebra import Names, Window, aligned
from parloom.rewrite.lines import (
    begins,
    extent_of,
    is_negative,
    is_no_less,
    line_of,
    offset_of,
    plus_lines,
)
from parloom.rewrite.normal_form import (
    FUNCTION,
    INPUT,
    INSIDE,
    INVERSE,
    ROWS,
    Element,
    Frozen,
    Poly,
    Var,
    canonical,
    changed,
    constant,
    depth_of,
    free,
    fresh,
    frozen,
    one_of,
    plus,
    summed,
    times,
    window,
)

Block = tuple[str, ...]
Dim = tuple[Block, ...]
Cell = tuple[int, ...]
ONE: Dim = ((),)


class NotExpressed(Exception):
    """What normal forms do not express, or what shapes do not allow."""


@dataclass(frozen=True, eq=False, slots=True)
class Symbolic:
    """A tensor: its dims, and its elements by combination of blocks."""

    shape: tuple[Dim, ...]
    elements: Mapping[Cell, Poly]

    @property
    def form(self) -> tuple[tuple[Dim, ...], tuple[tuple[Cell, Frozen], ...]]:
        """What tensors share that are equal for all shapes."""
        return self.shape, tuple((c, frozen(p)) for c, p in sorted(self.elements.items()))


def dim(*blocks: str) -> Dim:
    """A dim of so many blocks, digits of each apart by spaces: `dim("a", "h d")`."""
    return tuple(tuple(block.split()) for block in blocks)


def places(size: int) -> Dim:
    """A dim of so many single places."""
    return ((),) * size


def tensor(name: str, *shape: Dim) -> Symbolic:
    """An input."""
    return _made(shape, lambda c: one_of((INPUT, name, c, tuple(_digits(shape, c)), ())))


def _made(shape: Sequence[Dim], element: Element) -> Symbolic:
    cells = product(*(range(len(own)) for own in shape))
    return Symbolic(tuple(shape), {cell: canonical(element(cell)) for cell in cells})


def _digits(shape: Sequence[Dim], cell: Cell) -> Iterator[Var]:
    """The digits of a place in a combination of blocks."""
    for at, (own, block) in enumerate(zip(shape, cell, strict=True)):
        yield from (free(at, digit) for digit in range(len(own[block])))


def _moved(shape: Sequence[Dim], cell: Cell, first: int, by: int) -> dict[Var, Var]:
    """Digits of the dims from `first` on, as those of dims `by` further."""
    found = {}
    for at in range(first, len(shape)):
        for digit in range(len(shape[at][cell[at]])):
            found[free(at, digit)] = free(at + by, digit)
    return found


class NormalForms:
    """The algebra of tensors of symbolic shapes; raises `NotExpressed`."""

    @property
    def one(self) -> Dim:
        return ONE

    def count(self, size: Dim) -> int:
        if any(size):
            raise NotExpressed(f"{size} is no number")
        return len(size)

    def number(self, count: int) -> Dim:
        return places(count)

    def dims(self, part: Symbolic) -> tuple[Dim, ...]:
        return part.shape

    def product(self, names: Sequence[Names], result: Names, parts: Sequence[Symbolic]) -> Symbolic:
        dims = _named(names, parts)
        inner = [name for name in dims if name not in result]
        shape = [dims[name] for name in result]

        def element(cell: Cell) -> Poly:
            found: Poly = {}
            for blocks in product(*(range(len(dims[name])) for name in inner)):
                at = dict(zip((*result, *inner), (*cell, *blocks), strict=True))
                bound = {
                    (name, digit): (fresh(), extent)
                    for name in inner
                    for digit, extent in enumerate(dims[name][at[name]])
                }
                whole = constant(Fraction(1))
                for own, part in zip(names, parts, strict=True):
                    whole = times(whole, _placed(part, own, result, at, bound))
                found = plus(found, summed(whole, list(bound.values())))
            return found

        return _made(shape, element)

    def add(self, one: Symbolic, other: Symbolic) -> Symbolic:
        names, result = aligned(len(one.shape), len(other.shape))
        dims = _named(names, (one, other))
        ones = self.fill(Fraction(1), [dims[name] for name in result])
        left, right = (
            self.product([own, result], result, [part, ones])
            for own, part in zip(names, (one, other), strict=True)
        )
        return _made(left.shape, lambda c: plus(left.elements[c], right.elements[c]))

    def scale(self, part: Symbolic, factor: Fraction) -> Symbolic:
        return _made(part.shape, lambda c: times(part.elements[c], constant(factor)))

    def divide(self, part: Symbolic, size: Dim) -> Symbolic:
        """A size of equal blocks is so many times their extents, any other an extent of its own."""
        alike = len(set(size)) == 1
        extents = size[0] if alike else (repr(size),)
        inverse = constant(Fraction(1, len(size) if alike else 1))
        for extent in extents:
            inverse = times(inverse, one_of((INVERSE, extent, (), (), ())))
        return _made(part.shape, lambda c: times(part.elements[c], inverse))

    def fill(self, value: Fraction, shape: Sequence[Dim]) -> Symbolic:
        return _made(shape, lambda c: constant(value))

    def opaque(self, name: str, *parts: Symbolic) -> Symbolic:
        shape = parts[0].shape
        if any(part.shape != shape for part in parts):
            raise NotExpressed(f"{name} of {', '.join(str(part.shape) for part in parts)}")

        def element(cell: Cell) -> Poly:
            inside = tuple(frozen(part.elements[cell]) for part in parts)
            return one_of((FUNCTION, name, (), (), inside))

        return _made(shape, element)

    def rows(self, name: str, part: Symbolic, dim: int) -> Symbolic:
        along = part.shape[dim]

        def element(cell: Cell) -> Poly:
            row = [part.elements[*cell[:dim], b, *cell[dim + 1 :]] for b in range(len(along))]
            depth = max(map(depth_of, row))
            inside = (
                changed(
                    poly, {free(dim, digit): ("row", depth, digit) for digit in range(len(block))}
                )
                for poly, block in zip(row, along, strict=True)
            )
            digits = tuple(free(dim, digit) for digit in range(len(along[cell[dim]])))
            return one_of((ROWS, (name, along), (cell[dim],), digits, tuple(map(frozen, inside))))

        return _made(part.shape, element)

    def concat(self, parts: Sequence[Symbolic], dim: int) -> Symbolic:
        around = {(len(p.shape), *p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}
        if len(around) > 1:
            raise NotExpressed(" beside ".join(str(part.shape) for part in parts))
        blocks = [(part, block) for part in parts for block in range(len(part.shape[dim]))]
        whole = tuple(part.shape[dim][block] for part, block in blocks)
        first = parts[0].shape

        def element(cell: Cell) -> Poly:
            part, block = blocks[cell[dim]]
            return part.elements[*cell[:dim], block, *cell[dim + 1 :]]

        return _made((*first[:dim], whole, *first[dim + 1 :]), element)

    def split(self, part: Symbolic, dim: int, sizes: Sequence[Dim]) -> list[Symbolic]:
        if tuple(block for size in sizes for block in size) != part.shape[dim]:
            raise NotExpressed(f"{part.shape[dim]} in parts of {sizes}")
        found, begin = [], 0
        for size in sizes:
            found.append(_blocks(part, dim, begin, begin + len(size)))
            begin += len(size)
        return found

    def reshape(self, part: Symbolic, shape: Sequence[Dim]) -> Symbolic:
        at = 0
        while part.shape != tuple(shape):
            own, wanted = (dims[at] if at < len(dims) else None for dims in (part.shape, shape))
            if own is not None and own == wanted:
                at += 1
            elif wanted is None:
                part = _merged(part, at - 1)
            elif own is None or wanted == ONE or _is_outer(wanted, own):
                part = _cut(part, at, wanted)
            else:
                part = _merged(part, at)
        return part

    def apart(self, part: Symbolic, dim: int, outer: Dim) -> Symbolic:
        return _cut(part, dim, outer)

    def lookup(self, table: Symbolic, places: Symbolic) -> Symbolic:
        (rows, *others), lead = table.shape[0], len(places.shape)
        if others or len(rows) != 1:
            raise NotExpressed(f"a table of {table.shape[0]} rows")

        def element(cell: Cell) -> Poly:
            (monomial, value), *more = places.elements[cell[:lead]].items()
            bound, atoms = monomial
            if more or bound or value != 1 or len(atoms) != 1:
                raise NotExpressed("places that are computed")
            own = (0, *cell[lead:])
            change = {free(0, 0): ("at", atoms[0]), **_moved(table.shape, own, 1, lead - 1)}
            return changed(table.elements[own], change)

        return _made((*places.shape, *table.shape[1:]), element)

    def take(self, part: Symbolic, dim: int, at: Sequence[int]) -> Symbolic:
        over = part.shape[dim]
        for place in at:
            before = over[: place + 1] if place >= 0 else over[place:]
            if any(before) or not -len(over) <= place < len(over):
                raise NotExpressed(f"place {place} of {over}")

        def element(cell: Cell) -> Poly:
            return part.elements[*cell[:dim], at[cell[dim]] % len(over), *cell[dim + 1 :]]

        return _made((*part.shape[:dim], places(len(at)), *part.shape[dim + 1 :]), element)

    def windows(self, part: Symbolic, dim: int, by: Window) -> Symbolic:
        over = part.shape[dim]
        if len(over) > 1 and any(over):
            return _across(part, dim, by)
        shape = (*part.shape[:dim], moved_extent(over, by), places(by.size), *part.shape[dim + 1 :])

        def element(cell: Cell) -> Poly:
            offset = cell[dim + 1] * by.dilation - by.before
            if not any(over):  # a dim of single places
                place = by.stride * cell[dim] + offset
                if not 0 <= place < len(over):
                    return {}
                own = (*cell[:dim], place, *cell[dim + 2 :])
                return changed(part.elements[own], _moved(part.shape, own, dim + 1, 1))
            own = (*cell[: dim + 1], *cell[dim + 2 :])
            at = window(by.stride, offset, free(dim, 0))
            change = {free(dim, 0): at, **_moved(part.shape, own, dim + 1, 1)}
            found = changed(part.elements[own], change)
            if at == free(dim, 0) and by.less > 0:  # no more places than there were
                return found
            return times(found, one_of((INSIDE, over[0][0], (), (at,), ())))

        return _made(shape, element)


def _named(names: Sequence[Names], parts: Sequence[Symbolic]) -> dict[str, Dim]:
    """The dim of each name, of one element only where all are."""
    found: dict[str, Dim] = {}
    for own, part in zip(names, parts, strict=True):
        if len(own) != len(part.shape):
            raise NotExpressed(f"{part.shape} as {', '.join(own)}")
        for name, dim in zip(own, part.shape, strict=True):
            known = found.get(name, ONE)
            if ONE not in (known, dim) and dim != known:
                raise NotExpressed(f"{name} is {known} and {dim}")
            found[name] = dim if known == ONE else known
    return found


def moved_extent(size: Dim, by: Window) -> Dim:
    """How many windows there are over a dim of one digit, of single places, or of several such
    blocks; raises `NotExpressed`.
    """
    stride, less = by.stride, by.less
    if not any(size):
        if len(size) < less:
            raise NotExpressed(f"no windows over {size}")
        return places((len(size) - less) // stride + 1)
    if len(size) > 1:
        return _fewer(size, by)
    if len(size) != 1 or len(size[0]) != 1:
        raise NotExpressed(f"windows over {size}")
    if (stride, less) == (1, 1):
        return size
    return ((f"({size[0][0]}-{less})/{stride}+1",),)


def _fewer(size: Dim, by: Window) -> Dim:
    """The places of windows at each place of several blocks: so many single ones less, or more, at
    both ends.
    """
    if by.stride != 1 or any(len(b) > 1 or not b[0].isidentifier() for b in size if b):
        raise NotExpressed(f"windows over {size}")
    reach = (by.size - 1) * by.dilation
    first, last = reach // 2 - by.before, reach - reach // 2 - by.after
    if any(size[: max(first, 0)]) or any(size[len(size) - max(last, 0) :]):
        raise NotExpressed(f"{first} and {last} places less than {size}")
    if max(first, 0) + max(last, 0) > len(size):
        raise NotExpressed(f"no windows over {size}")
    kept = size[max(first, 0) : len(size) - max(last, 0)]
    return (*places(max(-first, 0)), *kept, *places(max(-last, 0)))


def _across(part: Symbolic, dim: int, by: Window) -> Symbolic:
    """Windows over several blocks. Each of their places is in one of the blocks or in none, so that
    its element is a sum over blocks: without those in which the place is for no extents, and with a
    factor that says so where it is for some.
    """
    over = part.shape[dim]
    out = _fewer(over, by)
    shape = (*part.shape[:dim], out, places(by.size), *part.shape[dim + 1 :])
    befores, ends = begins(out), begins(over)

    def element(cell: Cell) -> Poly:
        block = out[cell[dim]]
        offset = cell[dim + 1] * by.dilation - by.before
        at = plus_lines(befores[cell[dim]], line_of(offset))
        digit = free(dim, 0) if block else None
        rest, found = plus_lines(extent_of(block), line_of(-1)), Poly()
        for number, own in enumerate(over):
            first = plus_lines(at, ends[number], -1)
            last = plus_lines(first, rest)
            beyond = plus_lines(last, extent_of(own), -1)
            if is_negative(last) or is_no_less(plus_lines(first, extent_of(own), -1)):
                continue
            place = window(1, offset_of(first), digit)
            before = (*cell[:dim], number, *cell[dim + 2 :])
            change = {free(dim, 0): place, **_moved(part.shape, before, dim + 1, 1)}
            there = changed(part.elements[before], change)
            if not (is_no_less(first) and is_negative(beyond)):
                there = times(there, one_of((INSIDE, own[0] if own else "1", (), (place,), ())))
            found = plus(found, there)
        return found

    return _made(shape, element)


def _placed(
    part: Symbolic,
    own: Names,
    result: Names,
    at: Mapping[str, int],
    bound: Mapping[tuple[str, int], tuple[Var, str]],
) -> Poly:
    """The element of a factor of a product: in the blocks `at` of names, with digits of the result,
    or bound ones.
    """
    cell = tuple(0 if d == ONE else at[n] for n, d in zip(own, part.shape, strict=True))
    change: dict[Var, Var] = {}
    for place, (name, dim) in enumerate(zip(own, part.shape, strict=True)):
        for digit in range(len(dim[cell[place]])):
            is_bound = (name, digit) in bound
            to = bound[name, digit][0] if is_bound else free(list(result).index(name), digit)
            change[free(place, digit)] = to
    return changed(part.elements[cell], change)


def _blocks(part: Symbolic, dim: int, begin: int, end: int) -> Symbolic:
    """Some blocks of a dim."""
    shape = (*part.shape[:dim], part.shape[dim][begin:end], *part.shape[dim + 1 :])
    return _made(shape, lambda c: part.elements[*c[:dim], c[dim] + begin, *c[dim + 1 :]])


def _is_outer(wanted: Dim, own: Dim) -> bool:
    """Whether a dim is `wanted` with further digits behind."""
    return len(wanted) == len(own) and all(
        block[: len(outer)] == outer for outer, block in zip(wanted, own, strict=True)
    )


def inner_of(own: Dim, outer: Dim) -> Dim:
    """What a dim is behind `outer`: a chunk of it behind single places; raises `NotExpressed`."""
    if not any(outer):
        chunk = own[: len(own) // len(outer)]
        if chunk * len(outer) == own:
            return chunk
    inner = {b[len(o) :] for o, b in zip(outer, own, strict=False)}
    if not _is_outer(outer, own) or len(inner) > 1:
        raise NotExpressed(f"{own} as {outer} times one dim")
    return (inner.pop(),)


def _cut(part: Symbolic, dim: int, outer: Dim) -> Symbolic:
    """A dim as two: `outer`, and what is left of its digits. Behind the last dim, one of one
    element.
    """
    if dim == len(part.shape) and outer == ONE:
        return _made((*part.shape, ONE), lambda c: part.elements[c[:-1]])
    if dim == len(part.shape):
        raise NotExpressed(f"{outer} behind {part.shape}")
    inner = inner_of(part.shape[dim], outer)
    shape = (*part.shape[:dim], outer, inner, *part.shape[dim + 1 :])

    def element(cell: Cell) -> Poly:
        block = cell[dim] if any(outer) else cell[dim] * len(inner) + cell[dim + 1]
        before = (*cell[:dim], block, *cell[dim + 2 :])
        begin = len(outer[cell[dim]])
        digits = range(len(inner[cell[dim + 1]]))
        change = {free(dim, begin + digit): free(dim + 1, digit) for digit in digits}
        return changed(part.elements[before], {**change, **_moved(part.shape, before, dim + 1, 1)})

    return _made(shape, element)


def _merged(part: Symbolic, dim: int) -> Symbolic:
    """A dim and the next one as one; the next one has one block, or the first one is of one
    element.
    """
    if dim < 0 or dim + 1 >= len(part.shape):
        raise NotExpressed(f"no two dims at {dim} of {part.shape}")
    outer, inner = part.shape[dim : dim + 2]
    if outer != ONE and len(inner) > 1:
        raise NotExpressed(f"dims {dim} and {dim + 1} of {part.shape} as one")
    whole = tuple((*block, *digits) for block in outer for digits in inner)
    shape = (*part.shape[:dim], whole, *part.shape[dim + 2 :])

    def element(cell: Cell) -> Poly:
        at, within = divmod(cell[dim], len(inner))
        before = (*cell[:dim], at, within, *cell[dim + 1 :])
        begin = len(outer[at])
        digits = range(len(inner[within]))
        change = {free(dim + 1, digit): free(dim, begin + digit) for digit in digits}
        return changed(part.elements[before], {**change, **_moved(part.shape, before, dim + 2, -1)})

    return _made(shape, element)
