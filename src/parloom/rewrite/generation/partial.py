"""Programs that are equal on a part of their results, and what corrects the rest.

PET (Wang et al., OSDI'21) lets a program take the place of another one that it equals on some boxes
of the result only, and computes the others by the original program on what they read of its inputs.
Results of linear programs are equal on a box where they are at its corner and at one place further
along each dim (section 4, theorem 1), and where they are so for random numbers modulo a prime they
are with a probability of almost one (theorem 2): that finds candidates, which are then proved as
all rules are. Boxes are the blocks of the last dim; those that differ have to be single places.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, product
from typing import Any

import numpy as np

from parloom.rewrite.generate import Equal, Family, Generator, Operator, Program, Template, plain
from parloom.rewrite.modular import Ints, Numbers
from parloom.rewrite.shapes import ARGUMENTS
from parloom.rewrite.symbolic import Dim, NotExpressed
from parloom.rewrite.terms import (
    CAT,
    SPLIT,
    Arg,
    Extent,
    Input,
    Name,
    Term,
    calls_in,
    evaluate,
    names_in,
    size_text,
)

LAST = -1


@dataclass(frozen=True, slots=True)
class Pair:
    """A program, and one of fewer calls that equals it but for these blocks of the last dim."""

    original: Program
    mutant: Program
    wrong: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Some blocks of the last dim of a term: all those from one to another."""

    begin: int
    end: int

    def of(self, whole: Term | Name, blocks: Dim) -> Term | Name:
        """The part of a term whose last dim has these blocks, two parts at a time as rules have
        it.
        """
        before, own, after = blocks[: self.begin], blocks[self.begin : self.end], blocks[self.end :]
        if after:
            whole = Term(SPLIT, (whole, (Extent(before + own), Extent(after)), LAST), 0)
        if before:
            whole = Term(SPLIT, (whole, (Extent(before), Extent(own)), LAST), 1)
        return whole


class Partial:
    """The programs of a family that are equal on a part, corrected."""

    def __init__(self, family: Family) -> None:
        self.generator = Generator(family)
        self.equal = self.generator.run()
        self.blocks = {
            str(own.term): own.shape[LAST] for own in self.generator.by_calls[0] if own.shape
        }

    def candidates(self) -> Iterator[Equal]:
        """Programs with what takes their places: all of a program of fewer operators, or what is
        right of one of fewer calls beside what corrects the rest, where parts of inputs give that.
        """
        for own in self.equal:
            if {call.op for call in calls_in(own.right)} < {call.op for call in calls_in(own.left)}:
                yield own
        for pair in self.pairs():
            made = self.corrected(pair)
            if made is not None:
                yield Equal(self._inputs(pair.original.term), pair.original.term, made)

    def pairs(self) -> Iterator[Pair]:
        """Programs of equal shapes that are equal on each block with an extent; the second one is
        the first of the fewest calls of those that are equal there.
        """
        alike: dict[object, list[Program]] = {}
        for own in (own for some in self.generator.by_calls[1:] for own in some):
            blocks = own.shape[LAST]
            if any(blocks) and not all(blocks):
                boxes = (self._at(own, b) for b, block in enumerate(blocks) if block)
                alike.setdefault((own.shape, *boxes), []).append(own)
        for mutant, *others in alike.values():
            for own in (own for own in others if len(own.calls) > len(mutant.calls)):
                blocks = range(len(own.shape[LAST]))
                wrong = tuple(b for b in blocks if self._at(own, b) != self._at(mutant, b))
                yield Pair(own, mutant, wrong)

    def corrected(self, pair: Pair) -> Term | Name | None:
        """What is right of the mutant, and what is wrong of it made by the program itself of the
        least parts of its inputs; None where no parts give that.
        """
        blocks, parts = pair.original.shape[LAST], list[Term | Name]()
        for is_wrong, run in groupby(range(len(blocks)), lambda b: b in pair.wrong):
            places = list(run)
            cut = Cut(places[0], places[-1] + 1)
            part = self._correction(pair, cut) if is_wrong else cut.of(pair.mutant.term, blocks)
            if part is None:
                return None
            parts.append(part)
        return reduce(lambda made, part: Term(CAT, ((made, part), LAST)), parts)

    def _inputs(self, term: Term | Name) -> tuple[Input, ...]:
        """The inputs that a program reads."""
        return tuple(own for own in self.generator.inputs if own.name in set(names_in(term)))

    def _correction(self, pair: Pair, wrong: Cut) -> Term | Name | None:
        """The wrong blocks of the program, of the least parts of its inputs that give them."""
        original = pair.original.term
        wanted = [self._cut(pair.original, choice, wrong) for choice in (0, 1)]
        inputs = {own.name: self.blocks[own.name] for own in self._inputs(original)}
        named = [name for name, own in inputs.items() if any(own) and not all(own)]
        ranges = [list(_places(self.blocks[name])) for name in named]
        size = wrong.end - wrong.begin
        for some in sorted(product(*ranges), key=lambda own: sum(c.end - c.begin for c in own)):
            cuts = dict(zip(named, some, strict=True))
            both = (self._made(original, cuts, choice) for choice in (0, 1))
            made = [own for own in both if own is not None]
            width = made[0].shape[LAST] if len(made) == 2 else 0
            for at in range(width - size + 1):
                if all(
                    np.array_equal(own[..., at : at + size], values)
                    for own, values in zip(made, wanted, strict=True)
                ):
                    term = _with_parts(original, cuts, self.blocks)
                    return Cut(at, at + size).of(term, ((),) * width)
        return None

    def _made(self, term: Term | Name, cuts: Mapping[str, Cut], choice: int) -> Ints | None:
        """What a program is in numbers, of these parts of inputs; None where it is not made of
        them.
        """
        inputs = {}
        for own in self.generator.by_calls[0]:
            cut = cuts.get(str(own.term))
            inputs[str(own.term)] = (
                own.values[choice] if cut is None else self._cut(own, choice, cut)
            )
        try:
            (made,) = evaluate([term], Numbers(), inputs, self.generator.numbers[choice])
        except (NotExpressed, *ARGUMENTS):
            return None
        found: Ints = made
        return found

    def _cut(self, program: Program, choice: int, cut: Cut) -> Ints:
        """Blocks of what a program is."""
        sizes = [self._size(block, choice) for block in program.shape[LAST]]
        begin, size = sum(sizes[: cut.begin]), sum(sizes[cut.begin : cut.end])
        return program.values[choice][..., begin : begin + size]

    def _at(self, program: Program, block: int) -> bytes:
        """What a program is at the two ends of a block, in both choices of sizes."""
        ends = (self._cut(program, c, Cut(block, block + 1))[..., [0, -1]] for c in (0, 1))
        return b"".join(own.tobytes() for own in ends)

    def _size(self, block: tuple[str, ...], choice: int) -> int:
        sizes = self.generator.numbers[choice]
        return sizes[block[0]] if block else 1


def _places(blocks: Dim) -> Iterator[Cut]:
    """All parts of a dim that are single places."""
    for begin in range(len(blocks)):
        for end in range(begin + 1, len(blocks) + 1):
            if not any(blocks[begin:end]):
                yield Cut(begin, end)


def _with_parts(arg: Any, cuts: Mapping[str, Cut], blocks: Mapping[str, Dim]) -> Any:
    """A program of parts of its inputs."""
    if isinstance(arg, Name):
        return cuts[arg.name].of(arg, blocks[arg.name]) if arg.name in cuts else arg
    if isinstance(arg, Term):
        inner = tuple(_with_parts(own, cuts, blocks) for own in arg.args)
        return Term(arg.op, inner, arg.result)
    return tuple(_with_parts(own, cuts, blocks) for own in arg) if isinstance(arg, tuple) else arg


# Families.


def _of_rows(*more: Arg) -> Template:
    """Of programs whose last dim has an extent."""

    def template(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
        if any(programs[0].shape[LAST]):
            yield (programs[0].term, *more)

    return template


def _beside(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
    """One behind the other in the last dim."""
    if all(any(own.shape[LAST]) for own in programs):
        yield tuple(own.term for own in programs), LAST


def _between(extent: str, reach: int) -> str:
    """An extent between as many places as windows reach."""
    places = size_text(((),) * reach)
    return f"{places} + {extent} + {places}"


def _convolution(biased: bool, *rest: Arg) -> Operator:
    """A convolution as captured programs have it: without a bias that none follows."""
    bias: tuple[Arg, ...] = (None,) if rest and not biased else ()
    return Operator("conv1d", 3 if biased else 2, plain(*bias, *rest))


def _weights(kernel: int, biased: bool) -> str:
    return f"w[o, k, {size_text(((),) * kernel)}]{', c[o]' * biased}"


def _padded(kernel: int, biased: bool) -> Family:
    """Convolutions of padded rows."""
    half = kernel // 2
    modes: tuple[tuple[Arg, ...], ...] = ((), ("reflect",), ("replicate",), ("circular",))
    return Family(
        f"padded_{kernel}{'_biased' * biased}",
        f"x[b, k, {_between('p', kernel - 1)}], {_weights(kernel, biased)}",
        (
            *(Operator("pad", 1, _of_rows((half, half), *mode)) for mode in modes),
            _convolution(biased),
            _convolution(biased, (1,), (half,)),
        ),
        2,
    )


def _seams(kernel: int, biased: bool) -> Family:
    """Convolutions of two operands with one kernel, and of both beside each other."""
    x, y = (f"{n}[b, k, {_between(e, kernel - 1)}]" for n, e in (("x", "p"), ("y", "q")))
    return Family(
        f"seams_{kernel}{'_biased' * biased}",
        f"{x}, {y}, {_weights(kernel, biased)}",
        (_convolution(biased, (1,), (kernel // 2,)), Operator(CAT, 2, _beside)),
        3,
    )


FAMILIES = (
    *(_padded(kernel, biased) for kernel in (3, 5, 7) for biased in (False, True)),
    *(_seams(kernel, biased) for kernel in (3, 5) for biased in (False, True)),
)
