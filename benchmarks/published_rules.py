"""Published substitution rules: which of them both proofs hold for, and which follow from a basis.

    python benchmarks/published_rules.py --rules FOLDER/published_rules.csv [--basis FILE.json]

Tensat's rules are TASO's. They state no shapes: inputs get the most general ones that fit both
sides, where products are of matrices, kernels 3 x 3 and padding "same" or none. A convolution whose
kernels have fewer channels than its input is one in groups. Unity's rules, which speak of parallel
operators, are for `published_unity.py`.

The basis are the rules of `--basis`, of relu in the place of gelu, and those that factors say of
operators of matrices and of images (`rewrite/generation/factor_rules.py`).
"""

import argparse
import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parloom.rewrite.generation.axioms import prove_by_axioms
from parloom.rewrite.generation.basis import follows
from parloom.rewrite.generation.factor_rules import joined_rules, operation
from parloom.rewrite.rules import Rule, counterexample, prove, rule
from parloom.rewrite.terms import Arg, Extent, Input, Name, Size, Term, calls_in

TOKEN = re.compile(r"\s*([A-Za-z_]\w*|\[[^\]]*\]|\(|\)|,|\.\d+)")
KERNEL = 3
RELU = 2
Tree = str | tuple[str, tuple[int, ...], tuple["Tree", ...], int]
"""An input, or operator, attributes, operands and result."""


class Unfit(Exception):
    """Shapes that fit no inputs."""


def parse(text: str) -> Tree:
    """An expression of the file."""
    tokens, at = TOKEN.findall(text), 0

    def tree() -> Tree:
        nonlocal at
        name, attributes, result = str(tokens[at]), "", 0
        operands: list[Tree] = []
        at += 1
        if at < len(tokens) and tokens[at].startswith("["):
            attributes = tokens[at][1:-1]
            at += 1
        if at >= len(tokens) or tokens[at] != "(":
            return name
        while tokens[at] != ")":
            at += 1
            operands.append(tree())
        at += 1
        if at < len(tokens) and tokens[at].startswith("."):
            result = int(tokens[at][1:])
            at += 1
        numbers = tuple(int(own.rpartition("=")[2]) for own in attributes.split(",") if own)
        return name, numbers, tuple(operands), result

    return tree()


@dataclass(eq=False)
class Unknown:
    """A size that is not known yet, or what it turned out to be."""

    known: "Sizes | None" = None


Sizes = tuple["Unknown | int", ...]
"""The sizes of a dim's blocks, one after the other."""


def settled(sizes: Sizes) -> Sizes:
    """The same with all that is known."""
    found: list[Unknown | int] = []
    for own in sizes:
        known = own.known if isinstance(own, Unknown) else None
        found += [own] if known is None else settled(known)
    return tuple(found)


def unify(one: Sizes, other: Sizes) -> None:
    """Make two sizes the same; raises `Unfit`."""
    one, other = settled(one), settled(other)
    if one == other:
        return
    for first, second in ((one, other), (other, one)):
        (*_, last) = first
        if len(first) == 1 and isinstance(last, Unknown):
            if last in second:
                raise Unfit("a size within itself")
            last.known = second
            return
    if len(one) != len(other):
        raise Unfit("parts that do not meet")
    for a, b in zip(one, other, strict=True):
        unify((a,), (b,))


@dataclass
class Inference:
    """The shapes of inputs, as far as both sides say."""

    inputs: dict[str, tuple[Sizes, ...]] = field(default_factory=dict)

    def term(self, tree: Tree, rank: int | None) -> tuple[Term | Name, tuple[Sizes, ...]]:
        """A tree as a term, and its shape; raises `Unfit`."""
        if isinstance(tree, str):
            if tree not in self.inputs:
                if rank is None:
                    raise Unfit("no rank")
                self.inputs[tree] = tuple((Unknown(),) for _ in range(rank))
            if rank is not None and len(self.inputs[tree]) != rank:
                raise Unfit("two ranks")
            return Name(tree), self.inputs[tree]
        name, numbers, operands, result = tree
        read = getattr(self, f"_{name}", None)
        if read is None:
            raise Unfit(f"no operator {name}")
        found: tuple[Term | Name, tuple[Sizes, ...]] = read(numbers, operands, result, rank)
        return found

    def rank(self, tree: Tree) -> int | None:
        """What a tree itself says of its dims."""
        if isinstance(tree, str):
            return len(self.inputs[tree]) if tree in self.inputs else None
        name, numbers, operands, _ = tree
        known = {"matmul": 2, "conv2d": 4}.get(name)
        if name == "concat" and len(numbers) == 2:
            known = numbers[1]
        return known or next(filter(None, map(self.rank, operands)), None)

    def _matmul(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        (one, a), (other, b) = (self.term(own, 2) for own in operands)
        unify(a[1], b[0])
        return _activated(Term("mm", (one, other)), numbers[:1]), (a[0], b[1])

    def _pair(
        self, op: str, operands: tuple[Tree, ...], rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        known = next(filter(None, map(self.rank, operands)), rank)
        (one, a), (other, b) = (self.term(own, known) for own in operands)
        for x, y in zip(a, b, strict=True):
            unify(x, y)
        return Term(op, (one, other)), a

    def _ewadd(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        return self._pair("add", operands, rank)

    def _ewmul(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        return self._pair("mul", operands, rank)

    def _relu(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        term, shape = self.term(operands[0], rank)
        return Term("relu", (term,)), shape

    def _concat(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        axis, *ranks = numbers
        found = [self.term(own, ranks[0] if ranks else rank) for own in operands]
        shapes = [shape for _, shape in found]
        for at in range(len(shapes[0])):
            for shape in shapes[1:] if at != axis else ():
                unify(shapes[0][at], shape[at])
        whole = tuple(own for shape in shapes for own in shape[axis])
        made = (*shapes[0][:axis], whole, *shapes[0][axis + 1 :])
        return Term("cat", (tuple(term for term, _ in found), axis - len(made))), made

    def _split(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        (axis,) = numbers
        term, shape = self.term(operands[0], rank)
        if len(settled(shape[axis])) == 1:
            unify(shape[axis], (Unknown(), Unknown()))
        parts = settled(shape[axis])
        if len(parts) != 2:
            raise Unfit(f"{len(parts)} parts")
        sizes: Any = tuple(_Later((own,)) for own in parts)
        own = (*shape[:axis], (parts[result],), *shape[axis + 1 :])
        return Term("split_with_sizes", (term, sizes, axis - len(shape)), result), own

    def _conv2d(
        self, numbers: tuple[int, ...], operands: tuple[Tree, ...], result: int, rank: int | None
    ) -> tuple[Term, tuple[Sizes, ...]]:
        stride, padding, activation = numbers[0], KERNEL // 2 * (numbers[2] == 0), numbers[3:]
        (x, shape), (w, kernel) = (self.term(own, 4) for own in operands)
        for at in (2, 3):
            unify(kernel[at], (KERNEL,))
        channels, groups = settled(shape[1]), 1
        try:
            unify(channels, kernel[1])
        except Unfit:
            groups = len(channels)
            for own in channels:
                unify((own,), kernel[1])
            first, *others = settled(kernel[0])
            for own in others:
                unify((first,), (own,))
        given = (x, w, None, (stride,) * 2, (padding,) * 2, (1, 1), groups)
        out = (shape[0], kernel[0], shape[2], shape[3])  # of "valid" padding another one, unread
        return _activated(Term("conv2d", given), activation), out


@dataclass(frozen=True, eq=False)
class _Later:
    """A size in a term that is known when all shapes are."""

    sizes: Sizes


def _activated(term: Term, activation: tuple[int, ...]) -> Term:
    return Term("relu", (term,)) if activation == (RELU,) else term


def as_rule(identity: str, outputs: list[tuple[str, str]]) -> Rule:
    """The rule of several outputs with its most general shapes; raises `Unfit`."""
    for rank in (2, 4):
        try:
            return _as_rule(identity, outputs, rank)
        except Unfit:
            if rank == 4:
                raise
    raise AssertionError


def _as_rule(identity: str, outputs: list[tuple[str, str]], rank: int) -> Rule:
    inference, sides = Inference(), []
    for left, right in outputs:
        one, a = inference.term(parse(left), rank)
        other, b = inference.term(parse(right), len(a))
        for x, y in zip(a, b, strict=True):
            unify(x, y)
        sides.append((one, other))
    names: dict[Unknown, str] = {}

    def size(sizes: Sizes) -> Size:
        blocks: list[tuple[str, ...]] = []
        for own in settled(sizes):
            known = isinstance(own, Unknown)
            blocks += [(names.setdefault(own, f"s{len(names)}"),)] if known else [()] * own  # type: ignore[arg-type, operator]
        return tuple(blocks)

    def read(arg: Arg | _Later) -> Arg:
        if isinstance(arg, _Later):
            return Extent(size(arg.sizes))
        if isinstance(arg, Term):
            return Term(arg.op, tuple(map(read, arg.args)), arg.result)
        return tuple(map(read, arg)) if isinstance(arg, tuple) else arg

    inputs = tuple(Input(n, tuple(map(size, s))) for n, s in inference.inputs.items())
    first, second = (tuple(read(pair[i]) for pair in sides) for i in (0, 1))
    return Rule(identity, inputs, first, second)  # type: ignore[arg-type]


def published(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Tensat's rules: (id, outputs)."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["set"] == "tensat single":
            yield f"single {row['id']}", [(row["source"], row["target"])]
    double = [row for row in rows if row["set"] == "tensat multi"]
    for one, other in zip(double[::2], double[1::2], strict=True):
        yield f"double {one['id']}", [(r["source"], r["target"]) for r in (one, other)]


# Bounds of derivations that take more than `follows` spends on a rule: rounds, and calls.
FAR = (6, 8000)
CONVOLUTION = "conv2d({x}, {w}, None, (1, 1), (1, 1), (1, 1), {groups})"
IMAGES = "x[b, c, h, v], y[b, c, h, v]"
KERNELS = "w[o, c, 1 + 1 + 1, 1 + 1 + 1], u[o, c, 1 + 1 + 1, 1 + 1 + 1]"


def derived(found: Rule, known: Sequence[Rule]) -> bool:
    """Whether a rule follows from those of its own operators, or from all."""
    ops = ops_of(found)
    own = [rule for rule in known if ops_of(rule) <= ops]
    return any(follows(found, rules, *bounds) for bounds in ((), FAR) for rules in (own, known))


def ops_of(found: Rule) -> set[str]:
    """The operators of a rule."""
    return {c.op for side in (found.left, found.right) for term in side for c in calls_in(term)}


def of_factors() -> Iterator[Rule]:
    """Rules of matrices and images that factors say, of parts, and of convolutions in groups."""
    yield from joined_rules(operation("x[m, k], y[k, n]", "mm(x, y)"))
    one_each = ", ".join(own.partition("], ")[0] + "]" for own in (IMAGES, KERNELS))
    yield from joined_rules(operation(one_each, CONVOLUTION.format(x="x", w="w", groups=1)))
    for dims in (["m", "n"], ["b", "c", "h", "v"]):
        sizes = ", ".join(dims)
        yield from joined_rules(operation(f"x[{sizes}]", "relu(x)"))
        for op in ("add", "mul"):
            yield from joined_rules(operation(f"x[{sizes}], y[{sizes}]", f"{op}(x, y)"))
        for at in range(len(dims)):
            one, other = (", ".join([*dims[:at], own, *dims[at + 1 :]]) for own in "pq")
            inputs, d = f"x[{one}], y[{other}]", at - len(dims)
            yield from joined_rules(operation(inputs, f"cat((x, y), {d})"))
            for part, name in enumerate("xy"):
                text = f"split_with_sizes(cat((x, y), {d}), (p, q), {d})[{part}]"
                yield rule(f"part {part} of {inputs}", inputs, [text], [name])
    each = [CONVOLUTION.format(x=x, w=w, groups=1) for x, w in ("xw", "yu")]
    whole = CONVOLUTION.format(x="cat((x, y), -3)", w="cat((w, u), -4)", groups=2)
    joined = f"cat(({each[0]}, {each[1]}), -3)"
    yield rule("groups", f"{IMAGES}, {KERNELS}", [joined], [whole])


def main() -> int:
    """Print a line for each rule that is not proved, and counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rules", type=Path, required=True, help="published_rules.csv")
    parser.add_argument("--basis", type=Path, help="what `regenerate --out` wrote")
    args = parser.parse_args()
    basis: list[Rule] = []
    if args.basis:
        document = json.loads(args.basis.read_text(encoding="utf-8").replace("gelu(", "relu("))
        basis = [
            rule(own["id"], own["inputs"], own["left"], own["right"]) for own in document["rules"]
        ]
        basis += of_factors()
        unproved = [own.id for own in basis if prove(own)]
        if unproved:
            raise AssertionError(f"{unproved} are not proved")
    counts = Counter[str]()
    for identity, outputs in published(args.rules):
        counts["all"] += 1
        try:
            found = as_rule(identity, outputs)
        except Unfit as error:
            counts[f"unfit: {error}"] += 1
            print(f"{identity}: {error}: {outputs}")
            continue
        reason = prove(found)
        counts["proved by normal forms"] += not reason
        counts["proved by axioms"] += not prove_by_axioms(found)
        counts["false somewhere"] += any(counterexample(found, seed) for seed in range(5))
        is_derived = bool(basis) and derived(found, basis)
        counts["derived from the basis"] += is_derived
        if reason or (basis and not is_derived):
            print(f"{identity}: {reason or 'not derived'}: {outputs}")
    for name, number in counts.items():
        print(f"{name}: {number}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
