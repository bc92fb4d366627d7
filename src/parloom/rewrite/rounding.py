"""What kernels do with numbers of 16 bits: the errors of both sides of a rule against float64.

Each operator computes with wide numbers and rounds its results once, as kernels do that keep their
sums in float32; its gradients of operands likewise. Gradients of what several operators read are
added up in 16 bits, as autograd does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import inf, isfinite, pi, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parloom.ir.ops.algebra import Algebra
from parloom.ir.ops.exact import Exact, Given, Results
from parloom.rewrite.recorded import Floats, Recorded, Traced, gradients, same
from parloom.rewrite.rules import Rule, names_at, only_moves, shapes_at, with_room
from parloom.rewrite.shapes import Dims, Shapes
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.terms import evaluate, size_in

# How many times as large an error a rule may make.
MOST_TIMES = 2.0
# Extents of a draw: all alike, or one of them long and the others small. Of tensors of three dims
# at most, of four, and of more.
MIDDLE, SMALL, LONG = (20, 9, 6), (6, 5, 4), (256, 64, 32)
# Draws of each shape, of which every other one is of numbers of one sign.
DRAWS = 12
Round = Callable[[Floats], Floats]


def _bfloat16(wide: Floats) -> Floats:
    """To the nearest number of 8 digits, to an even one where there are two."""
    bits = wide.astype(np.float32).view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return nearest.astype(np.uint32).view(np.float32).astype(np.float64)


def _float16(wide: Floats) -> Floats:
    return wide.astype(np.float16).astype(np.float64)


NARROW: Mapping[str, Round] = MappingProxyType({"bfloat16": _bfloat16, "float16": _float16})
"""Floating dtypes of 16 bits, and how numbers are rounded to them."""


@cache
def may_round(rule: Rule, dtype: str) -> bool:
    """Whether a rule may be applied to numbers of this dtype: it only moves them, or makes errors
    that are about as large.
    """
    return only_moves(rule) or rounds_alike(rule, dtype)


def rounds_alike(rule: Rule, dtype: str) -> bool:
    """Whether neither side of a rule has more than twice the error of the other one in this dtype:
    in each output and in the gradient of each input, in each shape.
    """
    if dtype not in NARROW:
        return False
    try:
        return all(times <= MOST_TIMES for found in errors(rule, dtype) for times in found.times)
    except (NotExpressed, NotImplementedError):
        return False


@dataclass(frozen=True, slots=True)
class Errors:
    """The root mean squares of errors, relative to what is computed, over the draws of one shape:
    of the outputs of both sides, and of the gradients of the inputs.
    """

    sizes: Mapping[str, int]
    left: tuple[float, ...]
    right: tuple[float, ...]

    @property
    def times(self) -> Iterator[float]:
        """How many times as large the larger one is; infinity where one is not finite."""
        for pair in zip(self.left, self.right, strict=True):
            low, high = sorted(pair)
            if not isfinite(low + high):
                yield inf
            else:
                yield 1.0 if high == 0 else inf if low == 0 else high / low


def errors(rule: Rule, dtype: str) -> Iterator[Errors]:
    """The errors of both sides, shape by shape; raises `NotExpressed`."""
    for number, sizes in enumerate(shapes_of(rule)):
        squares = np.zeros(())
        for draw in range(DRAWS):
            given = drawn(rule, sizes, dtype, (number, draw))
            with np.errstate(over="ignore", invalid="ignore"):
                exact, *sides = _computed(rule, sizes, given, NARROW[dtype])
                found = [list(map(relative_square, side, exact)) for side in sides]
            squares = squares + np.array(found)
        left, right = np.sqrt(squares / DRAWS).tolist()
        yield Errors(sizes, tuple(left), tuple(right))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random inputs, and gradients of the outputs, in numbers of 16 bits."""

    inputs: Mapping[str, NDArray[Any]]
    upstream: tuple[Floats, ...]


def relative_square(one: Floats, exact: Floats) -> float:
    """The square of the error, for that of the whole."""
    whole, error = float((exact**2).sum()), float(((one - exact) ** 2).sum())
    return error / whole if whole else error


def shapes_of(rule: Rule) -> Iterator[Mapping[str, int]]:
    """Sizes of draws; `*` stands for one dim."""
    names, rank = names_at(rule, 1), max(len(own.sizes) for own in rule.inputs)
    at = min(max(rank - 3, 0), len(MIDDLE) - 1)
    yield with_room(rule, dict.fromkeys(names, MIDDLE[at]))
    for name in names:
        yield with_room(rule, {**dict.fromkeys(names, SMALL[at]), name: LONG[at]})


def drawn(rule: Rule, sizes: Mapping[str, int], dtype: str, seed: tuple[int, int]) -> Drawn:
    """Standard normal numbers; of the inputs of every other draw their absolute values."""
    rng, rounded, given = np.random.default_rng(seed), NARROW[dtype], dict[str, NDArray[Any]]()
    for own, shape in shapes_at(rule, sizes, 1):
        if own.below is not None:
            given[own.name] = rng.integers(0, size_in(own.below, sizes, 1), shape)
        else:
            numbers = rng.standard_normal(shape)
            given[own.name] = rounded(abs(numbers) if seed[1] % 2 else numbers)
    dims = {name: Dims(own.shape) for name, own in given.items()}
    made = evaluate(rule.left, Shapes(1), dims, sizes)
    return Drawn(given, tuple(rounded(rng.standard_normal(own.shape)) for own in made))


def _computed(
    rule: Rule, sizes: Mapping[str, int], given: Drawn, rounded: Round
) -> Iterator[list[Floats]]:
    """Outputs and gradients: of the first side in wide numbers, then of both in narrow ones."""
    for side, own in ((rule.left, same), (rule.left, rounded), (rule.right, rounded)):
        algebra = Recorded(FUNCTIONS, ROWS)
        inputs = {name: algebra.given(value, own) for name, value in given.inputs.items()}
        made = evaluate(side, algebra, inputs, sizes, partial(_kernel, rounded=own))
        found = gradients(algebra.tape, made, given.upstream)
        leaves = (own for own in inputs.values() if own.value.dtype.kind == "f")
        yield [
            *(out.value for out in made),
            *(found.get(leaf, np.zeros_like(leaf.value)) for leaf in leaves),
        ]


def _kernel(computes: Exact, rounded: Round) -> Exact:
    """An operator that rounds its results, and its gradients of operands."""

    def run(algebra: Algebra[Any], given: Given) -> Results:
        assert isinstance(algebra, Recorded)

        def read(arg: Any) -> Any:
            if isinstance(arg, tuple):
                return tuple(map(read, arg))
            return algebra.read(arg, rounded) if isinstance(arg, Traced) else arg

        made = computes(algebra, Given(read(given.args), given.kwargs))
        return tuple(algebra.stored(own, rounded) for own in made)

    return run


# Functions of which rules know no more than the name.


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(x / 2))


FUNCTIONS: Mapping[str, Callable[[Floats], Floats]] = MappingProxyType(
    {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x * _sigmoid(sqrt(8 / pi) * (x + 0.044715 * x**3)),
        "silu": lambda x: x * _sigmoid(x),
        "sigmoid": _sigmoid,
        "tanh": np.tanh,
        "exp": np.exp,
        "sin": np.sin,
        "cos": np.cos,
        "abs": np.abs,
        # Rules say of no input that it is not negative.
        "rsqrt": lambda x: 1 / np.sqrt(np.abs(x)),
        "softplus": lambda x: np.logaddexp(x, 0),
    }
)


def _softmax(x: Floats) -> Floats:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    found: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return found


def _softmax_back(y: Floats, g: Floats) -> Floats:
    found: Floats = y * (g - (y * g).sum(axis=-1, keepdims=True))
    return found


ROWS = MappingProxyType({"softmax": (_softmax, _softmax_back)})
