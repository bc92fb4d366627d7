"""Shapes alone, in symbols or in numbers: what a term makes, where nothing is computed.

Sizes add up and are multiplied; what is checked is that dims of a name are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from parloom.errors import InputError
from parloom.ir.ops.algebra import Names, Window, aligned
from parloom.ir.ops.exact import Given
from parloom.rewrite.parallel import computes_of
from parloom.rewrite.symbolic import ONE, NotExpressed, inner_of, moved_extent, places

Shape = tuple[Any, ...]
# What comes of arguments that an operator does not take: too few, of another kind, or no numbers.
ARGUMENTS = (
    NotImplementedError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dims:
    """A tensor of which only the shape is known."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class Shapes:
    """The algebra of shapes; sizes are dims of symbols, or numbers where `one` is 1. Raises
    `NotExpressed`.
    """

    one: Any = ONE

    def count(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        if any(size):
            raise NotExpressed(f"{size} is no number")
        return len(size)

    def number(self, count: int) -> Any:
        return count if isinstance(self.one, int) else places(count)

    def dims(self, part: Dims) -> Shape:
        return part.shape

    def product(self, names: Sequence[Names], result: Names, parts: Sequence[Dims]) -> Dims:
        found: dict[str, Any] = {}
        for own, part in zip(names, parts, strict=True):
            if len(own) != len(part.shape):
                raise NotExpressed(f"{part.shape} as {', '.join(own)}")
            for name, size in zip(own, part.shape, strict=True):
                known = found.get(name, self.one)
                if self.one not in (known, size) and known != size:
                    raise NotExpressed(f"{name} is {known} and {size}")
                found[name] = size if known == self.one else known
        return Dims(tuple(found[name] for name in result))

    def add(self, one: Dims, other: Dims) -> Dims:
        own, names = aligned(len(one.shape), len(other.shape))
        return self.product(own, names, [one, other])

    def scale(self, part: Dims, factor: Fraction) -> Dims:
        return part

    def divide(self, part: Dims, size: Any) -> Dims:
        return part

    def fill(self, value: Fraction, shape: Sequence[Any]) -> Dims:
        return Dims(tuple(shape))

    def opaque(self, name: str, *parts: Dims) -> Dims:
        if any(part != parts[0] for part in parts):
            raise NotExpressed(f"{name} of {', '.join(str(part.shape) for part in parts)}")
        return parts[0]

    def rows(self, name: str, part: Dims, dim: int) -> Dims:
        return part

    def concat(self, parts: Sequence[Dims], dim: int) -> Dims:
        first = parts[0].shape
        around = {(len(p.shape), *p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}
        if len(around) > 1:
            raise NotExpressed(" beside ".join(str(part.shape) for part in parts))
        whole = first[dim]
        for part in parts[1:]:
            whole += part.shape[dim]
        return Dims((*first[:dim], whole, *first[dim + 1 :]))

    def split(self, part: Dims, dim: int, sizes: Sequence[Any]) -> list[Dims]:
        whole, own = sizes[0], part.shape
        for size in sizes[1:]:
            whole += size
        if whole != own[dim]:
            raise NotExpressed(f"{own[dim]} in parts of {sizes}")
        return [Dims((*own[:dim], size, *own[dim + 1 :])) for size in sizes]

    def take(self, part: Dims, dim: int, at: Sequence[int]) -> Dims:
        own = part.shape[dim]
        number = own if isinstance(own, int) else len(own)
        if any(not -number <= place < number for place in at):
            raise NotExpressed(f"places {tuple(at)} of {own}")
        return Dims((*part.shape[:dim], self.number(len(at)), *part.shape[dim + 1 :]))

    def reshape(self, part: Dims, shape: Sequence[Any]) -> Dims:
        return Dims(tuple(shape))

    def apart(self, part: Dims, dim: int, outer: Any) -> Dims:
        own = part.shape[dim]
        if isinstance(own, int) and own % outer:
            raise NotExpressed(f"{own} is no multiple of {outer}")
        inner = own // outer if isinstance(own, int) else inner_of(own, outer)
        return Dims((*part.shape[:dim], outer, inner, *part.shape[dim + 1 :]))

    def lookup(self, table: Dims, places: Dims) -> Dims:
        return Dims((*places.shape, *table.shape[1:]))

    def windows(self, part: Dims, dim: int, window: Window) -> Dims:
        own, less = part.shape[dim], window.less
        numbers = isinstance(own, int)
        if numbers and own < less:
            raise NotExpressed(f"no windows over {own}")
        out = (own - less) // window.stride + 1 if numbers else moved_extent(own, window)
        return Dims((*part.shape[:dim], out, self.number(window.size), *part.shape[dim + 1 :]))


def results_of(op: str, algebra: Shapes, args: tuple[Any, ...]) -> tuple[Dims, ...]:
    """The shapes of the results of a call with these arguments, `Dims` in the place of tensors.

    Raises `NotExpressed` where it has none, as with arguments that the operator does not take;
    `InputError` for an operator that says not what it computes.
    """
    computes = computes_of(op)
    if computes is None:
        raise InputError(f"{op} says not what it computes")
    try:
        made = computes(algebra, Given(args))
    except ARGUMENTS as error:
        raise NotExpressed(str(error) or type(error).__name__) from None
    if not all(isinstance(dims, Dims) for dims in made):
        raise NotExpressed(f"{op} of no tensor")
    return made
