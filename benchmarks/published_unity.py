"""Unity's generated rules: which of them hold at any degree, and which follow from factor rules.

    python benchmarks/published_unity.py --rules FOLDER/published_rules.csv [--out FILE.csv]

The 640 rules of `graph_subst_3_v2.json` (FlexFlow, branch of the OSDI'22 artifact) are of degree 2
and of tensors of three dims, counted from the outermost: dim 0 is the replica dim, dim 1 that of
samples or of a weight's outputs, dim 2 that of channels or of a weight's inputs. A rule is taken
at the degree `degree`, which is a symbol; where the number of tensors that are concatenated or
added is the degree, that of dim 0, or of all dims, is 2. Inputs lie on one device, so that sums
over a dim that was not partitioned are of chunks of the piece (`rewrite/parallel.py`). Rules that
are proved are checked once more, at degrees 2 and 3, by a reading of their own (`value`).
"""

import argparse
import csv
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from published_rules import RELU, Tree, Unfit, derived, ops_of, parse
from unity_values import value

from parloom.rewrite.generation.basis import basis
from parloom.rewrite.generation.factor_rules import (
    DEGREE,
    ONE,
    TWO,
    K,
    exchanged,
    inverse_rules,
    operation,
    parallel_rules,
)
from parloom.rewrite.known import known_rules
from parloom.rewrite.modular import PRIME
from parloom.rewrite.parallel import LINEAR, product_of, quotient
from parloom.rewrite.rules import Rule, counterexample, prove
from parloom.rewrite.symbolic import NotExpressed, inner_of
from parloom.rewrite.terms import Arg, Extent, Input, Name, Size, Term, size_in

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
                devices = inner_of(devices, degree)  # type: ignore[arg-type]
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
    left, right = (tuple(map(parse, side.split(" ; "))) for side in (source, target))
    return rule_of(identity, left, right, degrees)


def rule_of(
    identity: str, left: Sequence[Tree], right: Sequence[Tree], degrees: tuple[Size, ...]
) -> Rule:
    """A rule of trees with its most general shapes; raises `Unfit`."""
    reader = Reader(degrees)
    pairs = []
    for source, target in zip(left, right, strict=True):
        one, other = reader.read(source), reader.read(target)
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


# Verdicts.

DERIVED, PROVED, FALSE, OPEN = "derived from the basis", "proved only", "false", "open"
STRIDED = "false, true where each piece is every k-th element, not a chunk"
SQUARE = (1, 24, 24)  # fits all rules at degree 2
ALIKE = "false, true where tensors concatenated in dim 0 are the same, as copies are"


@dataclass(frozen=True)
class Verdict:
    """What is known of a published rule: where it holds, or a counterexample at degree 2."""

    found: str
    where: str = ""
    counterexample: str = ""


def verdict(row: Mapping[str, str], known: Sequence[Rule]) -> Verdict:
    """The first degrees at which a rule is proved, or why it is not."""
    reason, last = "", None
    for where, degrees in MODES:
        try:
            found = as_rule(row["id"], row["source"], row["target"], degrees)
        except Unfit as error:
            reason = str(error)
            continue
        last = found, degrees
        if not prove(found):
            check(row, found, degrees)
            return Verdict(DERIVED if derived(found, known) else PROVED, where)
    if last is None:
        return Verdict(OPEN, counterexample=reason)
    found, degrees = last
    differs = next(filter(None, (counterexample(found, seed) for seed in range(5))), "")
    if not differs:
        return Verdict(OPEN, counterexample="no counterexample is found")
    if all(equal(row, found, degrees, k, strided=True) for k in (2, 3)):
        return Verdict(STRIDED, counterexample=differs)
    return Verdict(ALIKE if true_of_copies(row) else FALSE, counterexample=differs)


def true_of_copies(row: Mapping[str, str]) -> bool:
    """Whether a rule holds at degree 2, of the numbers of one draw, where inputs or all terms that
    are concatenated in dim 0 are the same.
    """
    left, right = ([parse(t) for t in row[side].split(" ; ")] for side in ("source", "target"))
    numbers = np.random.default_rng(0)
    names = {name for tree in (*left, *right) for name in _names(tree)}
    inputs = {name: numbers.integers(0, PRIME, SQUARE) for name in sorted(names)}
    same: dict[str, str] = {}
    for tree in (*left, *right):
        _gather(tree, same)
    for terms in (False, True):
        sides = [[_alike(tree, same, terms=terms) for tree in side] for side in (left, right)]
        try:
            made = [[value(t, inputs, (2,) * RANK, strided=False).array for t in s] for s in sides]
        except ValueError:  # terms of other shapes
            continue
        if all(a.shape == b.shape and (a == b).all() for a, b in zip(*made, strict=True)):
            return True
    return False


def _names(tree: Tree) -> set[str]:
    return {tree} if isinstance(tree, str) else {n for own in tree[2] for n in _names(own)}


def _gather(tree: Tree, same: dict[str, str]) -> None:
    """Which input stands for which, where they are concatenated in dim 0."""
    if isinstance(tree, str):
        return
    name, numbers, operands, _ = tree
    first, *others = operands
    if name == "concat" and numbers[0] == 0 and isinstance(first, str):
        same.update({own: first for own in others if isinstance(own, str) and own != first})
    for own in operands:
        _gather(own, same)


def _alike(tree: Tree, same: Mapping[str, str], *, terms: bool) -> Tree:
    """A tree in which inputs, or also `terms`, that are concatenated in dim 0 are the first one."""
    if isinstance(tree, str):
        return _alike(same[tree], same, terms=terms) if tree in same else tree
    name, numbers, operands, result = tree
    found = tuple(_alike(own, same, terms=terms) for own in operands)
    if terms and name == "concat" and numbers[0] == 0:
        found = (found[0],) * len(found)
    return name, numbers, found, result


def check(row: Mapping[str, str], found: Rule, degrees: tuple[Size, ...]) -> None:
    """Raise unless a rule that is proved holds in the second reading, at degrees 2 and 3."""
    for k in (2, 3):
        if not equal(row, found, degrees, k):
            raise AssertionError(f"{row} is proved and differs at degree {k}")


def equal(
    row: Mapping[str, str],
    found: Rule,
    degrees: tuple[Size, ...],
    k: int,
    *,
    strided: bool = False,
) -> bool:
    """Whether both sides have one value modulo a prime, of inputs whose extents all differ."""
    numbers, extents = np.random.default_rng(k), iter((5, 3, 7, 4, 9, 11, 8))
    sizes = {DEGREE: k, **{name: next(extents) for name in found.extents if name != DEGREE}}
    inputs = {
        own.name: numbers.integers(0, PRIME, [size_in(s, sizes, 1) for s in own.sizes[RANK:]])  # type: ignore[arg-type]
        for own in found.inputs
    }
    counts = [size_in(own, sizes, 1) for own in degrees]
    pairs = zip(row["source"].split(" ; "), row["target"].split(" ; "), strict=True)
    for pair in pairs:
        one, other = (value(parse(side), inputs, counts, strided=strided) for side in pair)
        if one.array.shape != other.array.shape or (one.array != other.array).any():
            return False
    return True


def known_basis() -> tuple[list[Rule], list[Rule], list[Rule]]:
    """The parallel rules, those of them from which the others follow, and the generated rules of
    sums, products and parts.
    """
    found = [rule for own in OPERATIONS for rule in parallel_rules(operation(*own))]
    found += [*inverse_rules(RANK), *exchanged(RANK)]
    for rule in found:
        if prove(rule):
            raise AssertionError(f"{rule.id} is not proved")
    algebra = [own.rule for own in known_rules().values() if ops_of(own.rule) <= ALGEBRA]
    return found, basis(found, algebra), algebra


def main() -> int:
    """Print counts, and each rule that is refused; `--out` writes a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rules", type=Path, required=True, help="published_rules.csv")
    parser.add_argument("--out", type=Path, help="write the verdict of each rule as CSV")
    args = parser.parse_args()
    began = time.monotonic()
    parallel, chosen, algebra = known_basis()
    print(f"parallel rules: {len(parallel)} proved at any degree, {len(chosen)} of them a basis")
    print(f"rules of sums, products and parts from rules.json: {len(algebra)}")
    with args.rules.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == "unity"]
    found = {row["id"]: verdict(row, [*parallel, *algebra]) for row in rows}
    counts = Counter((own.found, own.where) for own in found.values())
    for (name, where), number in sorted(counts.items()):
        print(f"{number}: {name}{', ' + where if where else ''}")
    for row in rows:
        own = found[row["id"]]
        if own.found not in (DERIVED, ALIKE):
            print(f"{row['id']}: {own.found}: {row['source']} => {row['target']}")
    if args.out is not None:
        _write(args.out, rows, found)
    print(f"{len(rows)} rules in {time.monotonic() - began:.0f} s")
    return 0


def _write(path: Path, rows: Sequence[Mapping[str, str]], found: Mapping[str, Verdict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: Any = csv.writer(file)
        writer.writerow(("id", "verdict", "where", "counterexample", "source", "target"))
        for row in rows:
            own = found[row["id"]]
            writer.writerow(
                (row["id"], own.found, own.where, own.counterexample, row["source"], row["target"])
            )


if __name__ == "__main__":
    raise SystemExit(main())
