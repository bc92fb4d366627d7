"""Normal forms of symbolic tensors against the same programs in numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest

from parloom.ir.ops.algebra import Algebra, Window
from parloom.rewrite.lines import line_of
from parloom.rewrite.modular import PRIME, Ints, Numbers
from parloom.rewrite.normal_form import (
    FUNCTION,
    INPUT,
    INSIDE,
    INVERSE,
    ROWS,
    SIZE,
    Atom,
    Poly,
    Var,
    depth_of,
)
from parloom.rewrite.symbolic import (
    ONE,
    Dim,
    NormalForms,
    NotExpressed,
    Symbolic,
    dim,
    places,
    tensor,
)


class Extents(dict[str, int]):
    """Extents by their names, and how many windows there are over them."""

    def __missing__(self, name: str) -> int:
        return int(eval(name.replace("/", "//"), {"__builtins__": {}}, dict(self)))


EXTENTS = Extents({"m": 2, "k": 3, "n": 5, "p": 7, "h": 2, "d": 4})
# As many as there are places, fewer, and more.
WINDOWS = (
    Window(3, 1, 1, 1), Window(3, 1, 1, 1), Window(2), Window(2, 2), Window(3, 2, 1, 1),
    Window(2, 1, 1, 1), Window(1, 1, 0, 1), Window(2, 1, 0, 1), Window(3, 1, 2, 2, 2),
    Window(2, 3, 1, 3, 2),
)  # fmt: skip


def size_of(own: Dim) -> int:
    return sum(prod(EXTENTS[extent] for extent in block) for block in own)


@dataclass(frozen=True)
class Inputs:
    """Arrays of inputs, and their dims."""

    arrays: Mapping[str, Ints]
    shapes: Mapping[str, tuple[Dim, ...]]

    def at(self, name: str, cell: Sequence[int], digits: Sequence[int]) -> int:
        """An element of an input; zero outside of it."""
        index: list[int] = []
        left = list(digits)
        for own, block in zip(self.shapes[name], cell, strict=True):
            begin = sum(prod(EXTENTS[e] for e in b) for b in own[:block])
            place = 0
            for extent in own[block]:
                place = place * EXTENTS[extent] + left.pop(0)
            if not 0 <= begin + place < self.arrays[name].shape[len(index)]:
                return 0
            index.append(begin + place)
        return int(self.arrays[name][tuple(index)])


class Evaluation:
    """What normal forms are worth where extents and inputs are known."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.numbers = inputs, Numbers()

    def array(self, found: Symbolic) -> Ints:
        out = np.zeros([size_of(own) for own in found.shape], dtype=np.int64)
        begins = [
            np.cumsum([0, *(prod(EXTENTS[e] for e in b) for b in own)]) for own in found.shape
        ]
        for cell, poly in found.elements.items():
            blocks = [own[b] for own, b in zip(found.shape, cell, strict=True)]
            sizes = [[EXTENTS[e] for e in block] for block in blocks]
            for digits in product(*(range(n) for some in sizes for n in some)):
                env: dict[Var, int] = {}
                index, left = [], list(digits)
                for at, some in enumerate(sizes):
                    place = 0
                    for digit, n in enumerate(some):
                        env["free", at, digit] = left[0]
                        place = place * n + left.pop(0)
                    index.append(int(begins[at][cell[at]]) + place)
                out[tuple(index)] = self.poly(poly, env)
        return out

    def poly(self, poly: Poly, env: Mapping[Var, int]) -> int:
        total = 0
        for (bound, atoms), value in poly.items():
            number = value.numerator * pow(value.denominator, -1, PRIME)
            for digits in product(*(range(EXTENTS[extent]) for _, extent in bound)):
                own = {**env, **{var: d for (var, _), d in zip(bound, digits, strict=True)}}
                term = number
                for atom in atoms:
                    term = term * self.atom(atom, own) % PRIME
                total += term
        return total % PRIME

    def var(self, var: Var, env: Mapping[Var, int]) -> int:
        if var[0] == "window":
            moving = 0 if var[3] is None else int(var[1]) * self.var(var[3], env)
            return moving + sum(n * EXTENTS[e] if e else n for e, n in line_of(var[2]))
        if var[0] == "at":
            return self.atom(var[1], env)
        return env[var]

    def atom(self, atom: Atom, env: Mapping[Var, int]) -> int:
        kind, name, cell, digits, inside = atom
        at = [self.var(var, env) for var in digits]
        if kind == INPUT:
            return self.inputs.at(name, cell, at)
        if kind == INSIDE:
            return int(0 <= at[0] < EXTENTS[name])
        if kind == SIZE:
            return EXTENTS[name]
        if kind == INVERSE:
            return pow(EXTENTS[name], -1, PRIME)
        if kind == FUNCTION:
            values = [np.array(self.poly(dict(own), env)) for own in inside]
            return int(self.numbers.opaque(name, *values))
        assert kind == ROWS
        return self.row(atom, env, at)

    def row(self, atom: Atom, env: Mapping[Var, int], at: Sequence[int]) -> int:
        _, (name, along), (block,), _, inside = atom
        depth = max(depth_of(dict(own)) for own in inside)
        values: list[int] = []
        place = 0
        for index, own in enumerate(inside):
            for digits in product(*(range(EXTENTS[extent]) for extent in along[index])):
                rows = {("row", depth, d): n for d, n in enumerate(digits)}
                if index == block and list(digits) == list(at):
                    place = len(values)
                values.append(self.poly(dict(own), {**env, **rows}))
        return int(self.numbers.rows(name, np.array(values), 0)[place])


SHAPES: dict[str, tuple[Dim, ...]] = {
    "A": (dim("m"), dim("k")), "B": (dim("k"), dim("n")), "B2": (dim("k"), dim("n")),
    "C": (dim("k"), dim("p")), "D": (dim("n"), dim("p")), "Q": (dim("k"), dim("k")),
    "R": (dim("k"), dim("k")), "S": (dim("m"), dim("p")), "s": (dim("n"),),
    "W": (dim("h d"), dim("k")), "X": (dim("m"), dim("n"), dim("p")),
    "V": (dim("h"), dim("n"), places(3)), "U": (dim("d"), dim("n"), places(3)),
    "P": (dim("h"), dim("n"), places(1)), "E": (dim("p"), dim("k")), "I": (dim("m"), dim("n")),
}  # fmt: skip
FORMS, NUMBERS = NormalForms(), Numbers()
INPUTS = {name: tensor(name, *shape) for name, shape in SHAPES.items()}


def arrays(seed: int) -> dict[str, Ints]:
    rng = np.random.default_rng(seed)
    found = {
        name: rng.integers(0, PRIME, [size_of(own) for own in shape])
        for name, shape in SHAPES.items()
    }
    return found | {"I": found["I"] % EXTENTS["p"]}


def sizes(shape: Sequence[Dim]) -> list[int]:
    return [size_of(own) for own in shape]


def matmul(g: Algebra[Any], a: Any, b: Any) -> Any:
    return g.product([["m", "k"], ["k", "n"]], ["m", "n"], [a, b])


def swapped(g: Algebra[Any], a: Any) -> Any:
    return g.product([["0", "1"]], ["1", "0"], [a])


def total(g: Algebra[Any], a: Any, at: int) -> Any:
    names = [str(i) for i in range(len(g.dims(a)))]
    return g.product([names], [n for i, n in enumerate(names) if i != at], [a])


def looked_up(g: Algebra[Any], x: Any, rows: Dim) -> Any:
    if rows != dim("p"):
        raise NotExpressed("numbers of other rows")
    return g.lookup(x, (INPUTS if isinstance(g, NormalForms) else NUMBER_OF)["I"])


Both = tuple[Any, Any]
"""A tensor in symbols and in numbers."""


def binary(rng: Random, a: Any, at: int) -> list[Callable[..., Any]]:
    """Operations of two tensors; the first one's symbols are `a`."""
    return [
        lambda g, size, x, y: matmul(g, x, y),
        lambda g, size, x, y: g.add(x, y),
        lambda g, size, x, y: g.concat([x, y], at),
        lambda g, size, x, y: g.opaque("pair", x, y),
    ]


def unary(rng: Random, a: Any, at: int) -> list[Callable[..., Any]]:
    """Operations of one tensor, whose symbols are `a`, along dim `at`."""
    names = [str(i) for i in range(len(a.shape))]
    cut, which = rng.randint(1, max(1, len(a.shape[at]) - 1)), rng.randrange(2)
    parts = [a.shape[at][:cut], a.shape[at][cut:]]
    by = rng.choice(WINDOWS)
    merged = [tuple((*o, *i) for o in a.shape[0] for i in a.shape[1]), *a.shape[2:]]
    outer = tuple(block[:1] for block in a.shape[at])
    inner = (a.shape[at][0][1:],)
    apart = [*a.shape[:at], outer, inner, *a.shape[at + 1 :]]
    return [
        lambda g, size, x: g.scale(x, Fraction(-2, 3)),
        lambda g, size, x: g.product([names] * 2, names, [x, x]),
        lambda g, size, x: g.opaque("relu", x),
        lambda g, size, x: g.rows("softmax", x, at),
        lambda g, size, x: g.split(x, at, [size(part) for part in parts])[which],
        lambda g, size, x: swapped(g, x),
        lambda g, size, x: total(g, x, at),
        lambda g, size, x: g.divide(x, size(dim("k"))),
        lambda g, size, x: g.reshape(x, [size(own) for own in merged]),
        lambda g, size, x: g.reshape(x, [size(own) for own in apart]),
        lambda g, size, x: g.reshape(x, [size(own) for own in (ONE, *a.shape, ONE)]),
        lambda g, size, x: g.windows(x, at, by),
        lambda g, size, x: looked_up(g, x, a.shape[0]),
        lambda g, size, x: g.fill(Fraction(3), [size(own) for own in a.shape]),
    ]


def grown(rng: Random, known: Sequence[Both]) -> Both | None:
    """One more operation in both algebras, of what is known; None where shapes do not allow it."""
    one, other = rng.choice(known), rng.choice(known)
    if len(one[0].shape) < 2 or () in one[0].shape:
        return None
    at = rng.randrange(len(one[0].shape))
    two = rng.random() < 0.4
    made = rng.choice((binary if two else unary)(rng, one[0], at))
    symbols, numbers = zip(*([one, other] if two else [one]), strict=True)
    try:
        return made(FORMS, lambda own: own, *symbols), made(NUMBERS, size_of, *numbers)
    except NotExpressed:
        return None


NUMBER_OF = arrays(0)


@pytest.mark.parametrize("seed", range(60))
def test_normal_forms_are_worth_what_programs_compute(seed: int) -> None:
    rng = Random(seed)
    known = [(INPUTS[name], NUMBER_OF[name]) for name in SHAPES if name != "I"]
    start = len(known)
    while len(known) < start + 6:
        more = grown(rng, known[rng.choice((0, start)) :] or known)
        if more is not None and prod(sizes(more[0].shape)) <= 400:
            known.append(more)
    evaluation = Evaluation(Inputs(NUMBER_OF, SHAPES))
    for form, numbers in known[start:]:
        assert (evaluation.array(form) == numbers).all()
