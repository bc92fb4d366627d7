"""What entries compute that only move elements, in any algebra; see `exact.py`."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from parloom.ir.ops.algebra import Algebra, Size
from parloom.ir.ops.exact import Given, Results, multiply, names_of, number, size_of


def concat(algebra: Algebra[Any], given: Given) -> Results:
    """One after the other."""
    parts = given.arg(0)
    return (algebra.concat(parts, given.arg(1, "dim", 0) % len(algebra.dims(parts[0]))),)


def split(algebra: Algebra[Any], given: Given) -> Results:
    """Parts of sizes that are told."""
    x = given.arg(0)
    dim = given.arg(2, "dim", 0) % len(algebra.dims(x))
    return tuple(algebra.split(x, dim, [size_of(algebra, own) for own in given.arg(1)]))


def pad(algebra: Algebra[Any], given: Given) -> Results:
    """Places before and behind the last dims: a number, the outermost place, or those further in as
    in a mirror or around a circle.
    """
    x, mode = given.arg(0), given.arg(2, "mode", "constant")
    value = given.arg(3, "value")
    for i, widths in enumerate(pairwise_of(given.arg(1, "pad"))):
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
    to, (one, other) = list(names), (given.arg(1) % len(names), given.arg(2) % len(names))
    to[one], to[other] = names[other], names[one]
    return (algebra.product([names], to, [given.arg(0)]),)


def permute(algebra: Algebra[Any], given: Given) -> Results:
    """The dims in another order."""
    names = names_of(algebra, given.arg(0))
    order = [names[dim % len(names)] for dim in given.arg(1)]
    return (algebra.product([names], order, [given.arg(0)]),)


def swap(algebra: Algebra[Any], given: Given) -> Results:
    """A matrix transposed; vectors and numbers stay."""
    names = names_of(algebra, given.arg(0))
    return (algebra.product([names], names[::-1], [given.arg(0)]),)


def view(algebra: Algebra[Any], given: Given) -> Results:
    """The elements in another shape."""
    return (algebra.reshape(given.arg(0), [size_of(algebra, own) for own in given.arg(1)]),)


def unsqueeze(algebra: Algebra[Any], given: Given) -> Results:
    """A dim of one element more."""
    sizes: list[Size] = list(algebra.dims(given.arg(0)))
    sizes.insert(given.arg(1) % (len(sizes) + 1), algebra.one)
    return (algebra.reshape(given.arg(0), sizes),)


def squeeze(algebra: Algebra[Any], given: Given) -> Results:
    """Without a dim of one element, where it is one."""
    sizes, dims = algebra.dims(given.arg(0)), given.arg(1, "dim")
    asked = dims if isinstance(dims, tuple) else (dims,)
    gone = range(len(sizes)) if dims is None else [dim % len(sizes) for dim in asked]
    kept = [s for i, s in enumerate(sizes) if i not in gone or s != algebra.one]
    return (algebra.reshape(given.arg(0), kept),)


def expand(algebra: Algebra[Any], given: Given) -> Results:
    """Dims of one element repeated, and more dims before."""
    own, sizes = algebra.dims(given.arg(0)), list(given.arg(1))
    for place, size in enumerate(reversed(own), 1):
        if sizes[-place] == -1:
            sizes[-place] = size
    return multiply(algebra, Given((given.arg(0), algebra.fill(Fraction(1), sizes))))


def stack(algebra: Algebra[Any], given: Given) -> Results:
    """Beside each other in a dim of their own."""
    parts = given.arg(0)
    at = given.arg(1, "dim", 0) % (len(algebra.dims(parts[0])) + 1)
    wide = [unsqueeze(algebra, Given((part, at)))[0] for part in parts]
    return (algebra.concat(wide, at),)


def chunk(algebra: Algebra[Any], given: Given) -> Results:
    """So many equal parts."""
    x, count = given.arg(0), given.arg(1)
    at = given.arg(2, "dim", 0) % len(algebra.dims(x))
    wide = algebra.apart(x, at, algebra.number(count))
    kept = [size for i, size in enumerate(algebra.dims(wide)) if i != at]
    parts = algebra.split(wide, at, [algebra.number(1)] * count)
    return tuple(algebra.reshape(part, kept) for part in parts)


def embedding(algebra: Algebra[Any], given: Given) -> Results:
    """Rows of a table."""
    return (algebra.lookup(given.arg(0), given.arg(1)),)
