"""Unity's generated rules: which of them hold at any degree, and which follow from factor rules.

    python benchmarks/published_unity.py --rules FOLDER/published_rules.csv [--all] [--json FILE]

The 640 rules of `graph_subst_3_v2.json` (FlexFlow, branch of the OSDI'22 artifact) are of degree 2
and of tensors of three dims, counted from the outermost: dim 0 is the replica dim, dim 1 that of
samples or of a weight's outputs, dim 2 that of channels or of a weight's inputs. A rule is taken
at the degree `degree`, which is a symbol; where the number of tensors that are concatenated or
added is the degree, that of dim 0, or of all dims, is 2. Inputs lie on one device, so that sums
over a dim that was not partitioned are of chunks of the piece (`rewrite/parallel.py`).
"""

import argparse
import csv
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from published_rules import RELU, Tree, Unfit, parse

from parloom.rewrite.basis import basis, follows
from parloom.rewrite.factor_rules import (
    DEGREE,
    K,
    ONE,
    TWO,
    exchanged,
    inverse_rules,
    operation,
    parallel_rules,
)
from parloom.rewrite.known import known_rules
from parloom.rewrite.parallel import LINEAR, product_of, quotient
from parloom.rewrite.rules import Rule, counterexample, prove
from parloom.rewrite.symbolic import NotExpressed, inner_of
from parloom.rewrite.terms import Arg, Extent, Input, Name, Size, Term, calls_in

RANK = 3
# The first dim of the tensors of these is the replica dim, but for linear layers.
OPERATIONS = (
    ("x[a, b, c]", "relu(x)"),
    ("x[a, b, c], y[a, b, c]", "add(x, y)"),
    ("x[a, b, c], y[a, b, c]", "mul(x, y)"),
    ("x[b, c], w[n, c]", "linear(x, w)"),
    *(
        (f"x[{sizes}], y[{sizes.replace('p', 'q')}]", f"cat((x, y), {d})")
        for d, sizes in ((-3, "p, b, c"), (-2, "a, p, c"), (-1, "a, b, p"))
    ),
    *(
        (f"x[{sizes}]", f"split_with_sizes(x, (p, q), {d})")
        for d, sizes in ((-3, "p + q, b, c"), (-2, "a, p + q, c"), (-1, "a, b, p + q"))
    ),
)
ALGEBRA = frozenset({"add", "mul", "cat", "split_with_sizes"})
# The degree of each dim: a symbol, or 2 where that is the number of tensors.
MODES = (
    ("at any degree", (K, K, K)),
    ("at any degree but that of dim 0", (TWO, K, K)),
    ("at degree 2", (TWO, TWO, TWO)),
)
OP_OF = {"ew_add": "add", "ew_mul": "mul"}


@dataclass(eq=False)
class Unknown:
    """A size that is not known yet, or what it turned out to be."""

    known: "Sizes | None" = None


Block = tuple["Unknown | str", ...]
Sizes = tuple[Block, ...]
"""The blocks of a dim, one after the other, each a product."""


def settled(sizes: Sizes) -> Sizes:
    """The same with all that is known; raises `Unfit`."""
    found: list[Block] = []
    for block in sizes:
        blocks: list[Block] = [()]
        for digit in block:
            known = digit.known if isinstance(digit, Unknown) else None
            parts = ((digit,),) if known is None else settled(known)
            if len(parts) > 1 and blocks != [()]:
                raise Unfit("a chunk of a concatenation")
            blocks = [(*one, *other) for one in blocks for other in parts]
        found += blocks
    return tuple(found)


def unify(one: Sizes, other: Sizes) -> None:
    """Make two sizes the same; raises `Unfit`."""
    one, other = settled(one), settled(other)
    if one == other:
        return
    for first, second in ((one, other), (other, one)):
        if len(first) == 1 and len(first[0]) == 1 and isinstance(first[0][0], Unknown):
            if any(first[0][0] in block for block in second):
                raise Unfit("a size within itself")
            first[0][0].known = second
            return
    if len(one) != len(other):
        raise Unfit("sides of two shapes")
    if len(one) > 1:
        for a, b in zip(one, other, strict=True):
            unify((a,), (b,))
        return
    ((first_digit, *rest),) = one if one[0] else ((None,),)
    ((other_digit, *more),) = other if other[0] else ((None,),)
    if first_digit != other_digit or first_digit is None:
        raise Unfit("sides of two shapes")
    unify((tuple(rest),), (tuple(more),))


def cut(size: Sizes, degree: Sizes) -> Sizes:
    """A chunk of a size that is cut; raises `Unfit`."""
    if degree == ONE:
        return size
    size = settled(size)
    alone = len(size) == 1 and len(size[0]) == 1 and isinstance(size[0][0], Unknown)
    if degree == K:
        if alone:
            unify(size, ((DEGREE, Unknown()),))
        size = settled(size)
        if len(size) > 1:
            raise Unfit("a chunk of a concatenation")
        if size[0][:1] != (DEGREE,):
            raise Unfit("one element is cut")
        return (size[0][1:],)
    count = len(degree)
    if any(degree):
        raise Unfit("parts of parts")
    if alone:
        unify(size, ((Unknown(),),) * count)
        size = settled(size)
    if len(size) % count and not all(len(b) == 1 and isinstance(b[0], Unknown) for b in size):
        raise Unfit("one element is cut")
    if len(size) % count:
        for digit in {block[0]: None for block in size}:
            unify(((digit,),), ((Unknown(),),) * count)
        size = settled(size)
    step = len(size) // count
    for at in range(step, len(size), step):
        unify(size[:step], size[at : at + step])
    return settled(size[:step])


@dataclass(frozen=True)
class Made:
    """A term with the devices and the pieces of each of its dims."""

    term: Term | Name
    devices: tuple[Sizes, ...]
    pieces: tuple[Sizes, ...]


@dataclass(frozen=True, eq=False)
class _Later:
    """A size in a term that is known when all shapes are."""

    sizes: Sizes


@dataclass
class Reader:
    """Rules as terms; the shapes of inputs are as far known as both sides say."""

    degrees: tuple[Size, ...]
    inputs: dict[str, Made] = field(default_factory=dict)

    def read(self, tree: Tree) -> Made:
        """A tree with its shape; raises `Unfit`."""
        if isinstance(tree, str):
            shape: tuple[Sizes, ...] = (ONE, ((Unknown(),),), ((Unknown(),),))
            return self.inputs.setdefault(tree, Made(Name(tree), (ONE,) * RANK, shape))
        name, numbers, operands, result = tree
        found = [self.read(own) for own in operands]
        if name in ("partition", "combine", "replicate", "reduce"):
            return self._parallel(name, numbers[0], found[0])
        if name == "linear":
            made = self._linear(*found)
            return _relu(made) if numbers == (RELU,) else made
        if name == "relu":
            return _relu(found[0])
        if name == "concat":
            return self._concat(numbers[0], found)
        if name == "split":
            return self._split(numbers[0], found[0], result)
        one, other = found
        _same_devices(found)
        for a, b in zip(one.pieces, other.pieces, strict=True):
            unify(a, b)
        return replace(one, term=Term(OP_OF[name], (one.term, other.term)))

    def _parallel(self, op: str, d: int, x: Made) -> Made:
        degree, devices, pieces = self.degrees[d], x.devices[d], x.pieces[d]
        try:
            if op == "partition":
                devices, pieces = product_of(devices, degree), cut(pieces, degree)
            elif op == "combine":
                devices, pieces = quotient(devices, degree), product_of(degree, pieces)
            elif op == "replicate":
                devices = product_of(degree, devices)
            elif devices == ONE:
                pieces = cut(pieces, degree)
            else:
                devices = inner_of(devices, degree)
        except NotExpressed as error:
            raise Unfit(str(error)) from None
        term = Term(op, (x.term, d, Extent(degree)))
        return Made(term, _with(x.devices, d, devices), _with(x.pieces, d, pieces))

    def _linear(self, x: Made, weight: Made) -> Made:
        one, other = x.devices, weight.devices
        if one != (other[1], other[0], other[2]):
            raise Unfit("devices that do not meet")
        unify(x.pieces[2], weight.pieces[2])
        cut(weight.pieces[1], settled(x.pieces[0]))
        cut(x.pieces[1], settled(weight.pieces[0]))
        pieces = (ONE, x.pieces[1], weight.pieces[1])
        return Made(Term(LINEAR, (x.term, weight.term)), (one[2], one[1], one[0]), pieces)

    def _concat(self, axis: int, parts: Sequence[Made]) -> Made:
        _same_devices(parts)
        first = parts[0]
        if first.devices[axis] != ONE:
            raise Unfit("a concatenation along a dim that is on several devices")
        for part in parts[1:]:
            for d in range(RANK):
                if d != axis:
                    unify(first.pieces[d], part.pieces[d])
        whole = tuple(block for part in parts for block in part.pieces[axis])
        term = Term("cat", (tuple(part.term for part in parts), axis - RANK))
        return Made(term, first.devices, _with(first.pieces, axis, whole))

    def _split(self, axis: int, x: Made, result: int) -> Made:
        if len(settled(x.pieces[axis])) == 1:
            unify(x.pieces[axis], ((Unknown(),), (Unknown(),)))
        blocks = settled(x.pieces[axis])
        if len(blocks) != 2 or x.devices[axis] != ONE:
            raise Unfit(f"{len(blocks)} parts")
        sizes = tuple(_Later((block,)) for block in blocks)
        term = Term("split_with_sizes", (x.term, sizes, axis - RANK), result)  # type: ignore[arg-type]
        return Made(term, x.devices, _with(x.pieces, axis, (blocks[result],)))


def as_rule(identity: str, source: str, target: str, degrees: tuple[Size, ...]) -> Rule:
    """A published rule with its most general shapes; raises `Unfit`."""
    reader = Reader(degrees)
    pairs = []
    for left, right in zip(source.split(" ; "), target.split(" ; "), strict=True):
        one, other = reader.read(parse(left)), reader.read(parse(right))
        for a, b in zip(one.pieces, other.pieces, strict=True):
            unify(a, b)
        if one.devices != other.devices:
            raise Unfit("sides on other devices")
        pairs.append((one.term, other.term))
    names: dict[Unknown, str] = {}

    def size(sizes: Sizes) -> Size:
        return tuple(
            tuple(d if isinstance(d, str) else names.setdefault(d, f"s{len(names)}") for d in block)
            for block in settled(sizes)
        )

    def read(arg: Arg | _Later) -> Arg:
        if isinstance(arg, _Later):
            return Extent(size(arg.sizes))
        if isinstance(arg, Term):
            return Term(arg.op, tuple(map(read, arg.args)), arg.result)
        return tuple(map(read, arg)) if isinstance(arg, tuple) else arg

    inputs = tuple(
        Input(name, (*made.devices, *map(size, made.pieces)))  # type: ignore[arg-type]
        for name, made in reader.inputs.items()
    )
    left_side, right_side = (tuple(read(pair[i]) for pair in pairs) for i in (0, 1))
    return Rule(identity, inputs, left_side, right_side)  # type: ignore[arg-type]


def _relu(x: Made) -> Made:
    return replace(x, term=Term("relu", (x.term,)))


def _with(sizes: tuple[Sizes, ...], d: int, size: Sizes) -> tuple[Sizes, ...]:
    return (*sizes[:d], size, *sizes[d + 1 :])


def _same_devices(parts: Sequence[Made]) -> None:
    if any(part.devices != parts[0].devices for part in parts):
        raise Unfit("operands on other devices")
