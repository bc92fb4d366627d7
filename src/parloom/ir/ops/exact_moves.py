"""What entries compute that only move elements, in any algebra; see `exact.py`."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from parloom.ir.ops.algebra import Algebra, Size
from parloom.ir.ops.exact import (
    Given,
    Results,
    dim_of,
    dims_of,
    has_rank,
    multiply,
    names_of,
    number,
    size_of,
)

MOST_PADDED = 1 << 16
"""Places that a pad adds at one end of a dim, where it repeats others."""


def concat(algebra: Algebra[Any], given: Given) -> Results:
    """One after the other."""
    parts = _parts(given)
    return (algebra.concat(parts, dim_of(given.arg(1, "dim", 0), len(algebra.dims(parts[0])))),)


def _parts(given: Given) -> tuple[Any, ...]:
    parts = given.arg(0)
    if not isinstance(parts, tuple) or not parts:
        raise NotImplementedError("no tensors to be joined")
    return parts


def split(algebra: Algebra[Any], given: Given) -> Results:
    """Parts of sizes that are told."""
    x = given.arg(0)
    dim = dim_of(given.arg(2, "dim", 0), len(algebra.dims(x)))
    return tuple(algebra.split(x, dim, _sizes(algebra, given.arg(1))))


def _sizes(algebra: Algebra[Any], given: Any) -> list[Size]:
    """Sizes that are told; raises `NotImplementedError` where one is for torch to find out."""
    if not isinstance(given, tuple) or any(isinstance(own, int) and own < 0 for own in given):
        raise NotImplementedError(f"sizes {given}")
    return [size_of(algebra, own) for own in given]


MODES = ("constant", "reflect", "replicate", "circular")


def pad(algebra: Algebra[Any], given: Given) -> Results:
    """Places before and behind the last dims: a number, the outermost place, or those further in as
    in a mirror or around a circle.
    """
    x, mode = given.arg(0), given.arg(2, "mode", "constant")
    value, every = given.arg(3, "value"), pairwise_of(given.arg(1, "pad"))
    if len(every) > len(algebra.dims(x)) or mode not in MODES or (mode != MODES[0] and value):
        raise NotImplementedError(f"padding {mode} of {len(every)} dims by {value}")
    for i, widths in enumerate(every):
        dim = len(algebra.dims(x)) - 1 - i
        if widths != (0, 0):
            ends = _ends(algebra, x, dim, widths, mode, number(value or 0))
            x = algebra.concat([own for own in (ends[0], x, ends[1]) if own is not None], dim)
    return (x,)


def pairwise_of(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers two by two."""
    return list(zip(widths[::2], widths[1::2], strict=True))


def _ends(
    algebra: Algebra[Any], x: Any, dim: int, widths: tuple[int, int], mode: str, value: Fraction
) -> list[Any]:
    """What is before and behind a dim, None where nothing is. Raises `NotImplementedError` for
    places that are cut off.
    """
    before, after = widths
    if min(widths) < 0:
        raise NotImplementedError("places that are cut off")
    if mode != "constant" and max(widths) > MOST_PADDED:
        raise NotImplementedError(f"{max(widths)} places beside a dim")
    if mode == "constant":
        sizes = algebra.dims(x)
        wide = ([*sizes[:dim], algebra.number(n), *sizes[dim + 1 :]] for n in widths)
        made = [algebra.fill(value, shape) for shape in wide]
    else:
        places = {
            "reflect": (range(before, 0, -1), range(-2, -2 - after, -1)),
            "replicate": ((0,) * before, (-1,) * after),
            "circular": (range(-before, 0), range(after)),
        }
        made = [algebra.take(x, dim, list(own)) for own in places[mode]]
    return [own if n else None for own, n in zip(made, widths, strict=True)]


def transpose(algebra: Algebra[Any], given: Given) -> Results:
    """Two dims in each other's place."""
    names = names_of(algebra, given.arg(0))
    to, (one, other) = list(names), (dim_of(given.arg(at), len(names)) for at in (1, 2))
    to[one], to[other] = names[other], names[one]
    return (algebra.product([names], to, [given.arg(0)]),)


def permute(algebra: Algebra[Any], given: Given) -> Results:
    """The dims in another order."""
    names = names_of(algebra, given.arg(0))
    order = [names[dim] for dim in dims_of(given.arg(1), len(names))]
    if len(order) < len(names):
        raise NotImplementedError(f"{len(names)} dims in an order of {len(order)}")
    return (algebra.product([names], order, [given.arg(0)]),)


def swap(algebra: Algebra[Any], given: Given) -> Results:
    """A matrix transposed; vectors and numbers stay."""
    names = names_of(algebra, has_rank(algebra, given.arg(0), 0, 1, 2))
    return (algebra.product([names], names[::-1], [given.arg(0)]),)


def view(algebra: Algebra[Any], given: Given) -> Results:
    """The elements in another shape."""
    return (algebra.reshape(given.arg(0), _sizes(algebra, given.arg(1))),)


def unsqueeze(algebra: Algebra[Any], given: Given) -> Results:
    """A dim of one element more."""
    sizes: list[Size] = list(algebra.dims(given.arg(0)))
    sizes.insert(dim_of(given.arg(1), len(sizes) + 1), algebra.one)
    return (algebra.reshape(given.arg(0), sizes),)


def squeeze(algebra: Algebra[Any], given: Given) -> Results:
    """Without a dim of one element, where it is one: its size has to be a number."""
    sizes, dims = algebra.dims(given.arg(0)), given.arg(1, "dim")
    gone = range(len(sizes)) if dims is None else dims_of(dims, len(sizes))
    kept = [s for i, s in enumerate(sizes) if i not in gone or algebra.count(s) != 1]
    return (algebra.reshape(given.arg(0), kept),)


def expand(algebra: Algebra[Any], given: Given) -> Results:
    """Dims of one element repeated, and more dims before."""
    own, told = algebra.dims(given.arg(0)), given.arg(1)
    if not isinstance(told, tuple) or len(told) < len(own):
        raise NotImplementedError(f"{len(own)} dims as {told}")
    before = _sizes(algebra, told[: len(told) - len(own)])
    known = [
        size if wanted == -1 else size_of(algebra, wanted)
        for size, wanted in zip(own, told[len(before) :], strict=True)
    ]
    if any(size not in (algebra.one, to) for size, to in zip(own, known, strict=True)):
        raise NotImplementedError(f"{own} as {told}")
    ones = algebra.fill(Fraction(1), [*before, *known])
    return multiply(algebra, Given((given.arg(0), ones)))


def stack(algebra: Algebra[Any], given: Given) -> Results:
    """Beside each other in a dim of their own."""
    parts = _parts(given)
    at = dim_of(given.arg(1, "dim", 0), len(algebra.dims(parts[0])) + 1)
    wide = [unsqueeze(algebra, Given((part, at)))[0] for part in parts]
    return (algebra.concat(wide, at),)


def chunk(algebra: Algebra[Any], given: Given) -> Results:
    """So many equal parts."""
    x, count = given.arg(0), given.arg(1)
    at = dim_of(given.arg(2, "dim", 0), len(algebra.dims(x)))
    if type(count) is not int or count < 1:
        raise NotImplementedError(f"{count} parts")
    wide = algebra.apart(x, at, algebra.number(count))
    kept = [size for i, size in enumerate(algebra.dims(wide)) if i != at]
    parts = algebra.split(wide, at, [algebra.number(1)] * count)
    return tuple(algebra.reshape(part, kept) for part in parts)


def embedding(algebra: Algebra[Any], given: Given) -> Results:
    """Rows of a table."""
    return (algebra.lookup(has_rank(algebra, given.arg(0), 2), given.arg(1)),)
