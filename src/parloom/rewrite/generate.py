"""All equal programs of a few operators: candidates for rules.

Programs are made of the inputs of a family, call by call, of the first program found of each class
of equal ones (TASO, SOSP'19, section 2, extends all). Programs are taken for equal where they
compute the same modulo a prime for two choices of shapes whose extents all differ.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from parloom.ir.ops.exact import Given
from parloom.rewrite.modular import PRIME, Ints, Numbers
from parloom.rewrite.parallel import computes_of
from parloom.rewrite.shapes import Dims, Shape, Shapes
from parloom.rewrite.symbolic import Dim, NotExpressed, dim
from parloom.rewrite.terms import (
    Arg,
    Extent,
    Input,
    Name,
    Size,
    Term,
    extents_of,
    names_in,
    parse_inputs,
    size_in,
)

CHOICES = ((2, 3, 5, 7, 4, 6, 8, 9, 10, 11), (7, 4, 3, 2, 9, 5, 6, 10, 8, 12))


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """The first program of a class: its calls, its shape in symbols, and what it computes; `below`
    is what the numbers of rows that it makes are below, where it makes any.
    """

    term: Term | Name
    calls: frozenset[Term]
    shape: Shape
    values: tuple[Ints, ...]
    below: Dim | None = None


Template = Callable[[Sequence[Program]], Iterator[tuple[Arg, ...]]]
"""The arguments of calls of an operator on so many programs."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as programs are made of it, of so many; in any order if it `commutes`. One that
    `looks` up reads a table and numbers of its rows; numbers of rows are only ever `moved`.
    """

    op: str
    operands: int
    template: Template
    commutes: bool = False
    looks: bool = False
    moves: bool = False
    results: int = 1

    def takes(self, programs: Sequence[Program]) -> bool:
        """Whether it can be of these as far as numbers of rows go."""
        below = [one.below for one in programs]
        if self.looks:
            return below[0] is None and below[1] == programs[0].shape[0]
        return set(below) == {None} or (self.moves and len(set(below)) == 1)


@dataclass(frozen=True, slots=True)
class Family:
    """What programs are made of, and of how many calls at most."""

    name: str
    inputs: str
    operators: tuple[Operator, ...]
    most_calls: int


@dataclass(frozen=True, slots=True)
class Equal:
    """Two programs that compute the same, the second one first found."""

    inputs: tuple[Input, ...]
    left: Term | Name
    right: Term | Name


class Generator:
    """Programs of a family, by their number of calls."""

    def __init__(self, family: Family, seed: int = 0) -> None:
        self.family, self.inputs = family, parse_inputs(family.inputs)
        names = extents_of(self.inputs)
        self.symbols: dict[str, Dim] = {name: dim(name) for name in names}
        self.numbers = [dict(zip(names, choice, strict=False)) for choice in CHOICES]
        self.classes: dict[bytes, Program] = {}
        self.by_calls: list[list[Program]] = [[]]
        self.equal: list[Equal] = []
        self.tried = 0
        rng = np.random.default_rng(seed)
        for own in self.inputs:
            self._add_input(own, rng)

    def run(self) -> list[Equal]:
        """All pairs of equal programs of at most so many calls."""
        for calls in range(1, self.family.most_calls + 1):
            self.by_calls.append([])
            for operator in self.family.operators:
                for operands in filter(operator.takes, self._operands(operator, calls)):
                    for args in operator.template(operands):
                        for result in range(operator.results):
                            self._try(operator, args, result, operands, calls)
        return self.equal

    def _add_input(self, own: Input, rng: np.random.Generator) -> None:
        sizes = [size for size in own.sizes if not isinstance(size, str)]
        shape = tuple(size_in(size, self.symbols, Shapes().one) for size in sizes)
        values = []
        for numbers in self.numbers:
            most = PRIME if own.below is None else size_in(own.below, numbers, 1)
            values.append(rng.integers(0, most, [size_in(s, numbers, 1) for s in sizes]))
        below = None if own.below is None else size_in(own.below, self.symbols, Shapes().one)
        found = Program(Name(own.name), frozenset(), shape, tuple(values), below)
        self.classes[_fingerprint(found)] = found
        self.by_calls[0].append(found)

    def _operands(self, operator: Operator, calls: int) -> Iterator[tuple[Program, ...]]:
        """Programs that together have one call less."""
        if operator.operands == 1:
            yield from ((one,) for one in self.by_calls[calls - 1])
            return
        for numbers in product(range(calls), repeat=operator.operands):
            if sum(numbers) < calls - 1:
                continue
            for some in product(*(self.by_calls[number] for number in numbers)):
                if len(frozenset[Term]().union(*(one.calls for one in some))) != calls - 1:
                    continue
                if not operator.commutes or str(some[0].term) <= str(some[1].term):
                    yield some

    def _try(
        self,
        operator: Operator,
        args: tuple[Arg, ...],
        result: int,
        operands: Sequence[Program],
        calls: int,
    ) -> None:
        computes = computes_of(operator.op)
        assert computes is not None
        by_term = {operand.term: operand for operand in operands}
        try:
            made = computes(
                Shapes(), Given(tuple(_filled(a, by_term, -1, self.symbols) for a in args))
            )
        except (NotExpressed, NotImplementedError):
            return
        self.tried += 1
        values = []
        try:
            for choice, numbers in enumerate(self.numbers):
                given = Given(tuple(_filled(arg, by_term, choice, numbers) for arg in args))
                values.append(computes(Numbers(), given)[result])
        except NotExpressed:  # a window that is larger than what there is
            return
        call = Term(operator.op, args)
        term = Term(operator.op, args, result if operator.results > 1 else None)
        own = frozenset({call}).union(*(operand.calls for operand in operands))
        below = None if operator.looks else operands[0].below
        found = Program(term, own, made[result].shape, tuple(values), below)
        known = self.classes.setdefault(_fingerprint(found), found)
        if known is found:
            self.by_calls[calls].append(found)
        elif known.shape == found.shape:
            used = {*names_in(found.term), *names_in(known.term)}
            inputs = tuple(own for own in self.inputs if own.name in used)
            self.equal.append(Equal(inputs, found.term, known.term))


def _fingerprint(program: Program) -> bytes:
    return b"".join(
        str(value.shape).encode() + np.ascontiguousarray(value).tobytes()
        for value in program.values
    )


def _filled(arg: Arg, programs: dict[Any, Program], choice: int, sizes: Any) -> Any:
    """An argument with what programs are in a choice of numbers, or their shapes."""
    if isinstance(arg, (Term, Name)):
        found = programs[arg]
        return Dims(found.shape) if choice < 0 else found.values[choice]
    if isinstance(arg, Extent):
        return size_in(arg.size, sizes, Shapes().one if choice < 0 else 1)
    return (
        tuple(_filled(a, programs, choice, sizes) for a in arg) if isinstance(arg, tuple) else arg
    )


# Operators.


def plain(*more: Arg) -> Template:
    """Programs, then the same arguments in every call."""
    return lambda programs: iter([(*(one.term for one in programs), *more)])


def with_a_row(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
    """The last one of one dim."""
    if len(programs[-1].shape) == 1:
        yield tuple(one.term for one in programs)


def of_matrices(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
    """Programs of two dims each."""
    if all(len(one.shape) == 2 for one in programs):
        yield tuple(one.term for one in programs)


def along(*, together: bool = False) -> Template:
    """The same along each dim, counted from the last; of several programs `together` in a tuple."""

    def template(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
        for at in range(1, len(programs[0].shape) + 1):
            terms = tuple(one.term for one in programs)
            yield (terms, -at) if together else (*terms, -at)

    return template


def splits(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
    """In two, at each place where something was put together."""
    (one,) = programs
    for at in range(1, len(one.shape) + 1):
        blocks: Size = one.shape[-at]
        named = all(extent.isidentifier() for block in blocks for extent in block)
        for cut in range(1, len(blocks)) if named else ():  # sizes of windows have no name
            yield one.term, (Extent(blocks[:cut]), Extent(blocks[cut:])), -at


def sums(programs: Sequence[Program]) -> Iterator[tuple[Arg, ...]]:
    """Over each dim."""
    (one,) = programs
    yield from ((one.term, (-at,)) for at in range(1, len(one.shape) + 1))
