"""What can be chosen for an operator on a mesh: every assignment of axes to its factors.

An axis goes to one factor that it divides, to both factors of a route, or to none; of several axes
on one factor the first of the mesh is outermost. `docs/explanation/search.md` says what this leaves
out.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule, op_of
from parloom.ir.plan import NodeDecision
from parloom.search.program import ABSENT, Axes, Operator, Program, Reader, State
from parloom.search.single import Single, is_local_program

T = TypeVar("T", bound=Hashable)
Place = tuple[str, ...]  # the factors that an axis is on
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Choice:
    """Factor -> axes, with the states that operands must have and results come out with.

    `passed` are the axes over which it leaves the gradients of weights as partial as they come;
    `taken` the position of the operand that it takes, of one that takes one of several.
    """

    assignment: tuple[tuple[str, Axes], ...]
    passed: Axes
    operands: tuple[State, ...]
    results: tuple[State, ...]
    taken: int = -1

    @property
    def absent(self) -> bool:
        """Whether the operator is left out."""
        return self.results[0].absent

    @property
    def used(self) -> Axes:
        """The axes that it splits something over."""
        return tuple(dict.fromkeys(a for _, axes in self.assignment for a in axes))

    @property
    def places(self) -> dict[str, Place]:
        """The factors that each of these axes is on."""
        return places_of(self.assignment)


@dataclass(frozen=True)
class Distinct(Generic[T]):
    """Values without repeats, and for each choice the index of its value."""

    values: tuple[T, ...]
    index: Indices

    @classmethod
    def of(cls, values: Iterable[T]) -> "Distinct[T]":
        """Number `values` in the order in which they come."""
        known: dict[T, int] = {}
        index = np.array([known.setdefault(v, len(known)) for v in values], dtype=np.intp)
        return cls(tuple(known), index)


@dataclass(frozen=True)
class Menu:
    """All choices of an operator, and per operand and result the distinct states among them."""

    choices: tuple[Choice, ...]
    operands: tuple[Distinct[State], ...]
    results: tuple[Distinct[State], ...]

    def __len__(self) -> int:
        return len(self.choices)

    @classmethod
    def of(cls, choices: Iterable[Choice], operands: int, results: int) -> "Menu":
        """The menu of `choices` of an operator with so many operands and results."""
        every = tuple(choices)
        return cls(
            every,
            tuple(Distinct.of(c.operands[i] for c in every) for i in range(operands)),
            tuple(Distinct.of(c.results[i] for c in every) for i in range(results)),
        )

    def with_absent(self) -> "Menu":
        """The same of an operator that may be left out."""
        operands, results = len(self.operands), len(self.results)
        absent = Choice((), (), (ABSENT,) * operands, (ABSENT,) * results)
        return Menu.of((*self.choices, absent), operands, results)


Among = Callable[[int], Iterable[Mapping[str, Axes]] | None]


class Menus:
    """Menus of the operators of `program`; those of operators made alike are made once, and may be
    known from another program on the same mesh.
    """

    def __init__(
        self, program: Program, single: Single, known: dict[object, Menu] | None = None
    ) -> None:
        self.program, self.single = program, single
        self.known = {} if known is None else known

    def all(self, among: Among = lambda index: None) -> tuple[Menu, ...]:
        """All choices of all operators, or those with an assignment `among` these."""
        found: list[Menu] = []
        for index, operator in enumerate(self.program.operators):
            menu = self._taking(index, found) if operator.takes else self.of(index, among(index))
            found.append(menu.with_absent() if operator.optional else menu)
        return tuple(found)

    def _taking(self, index: int, menus: Sequence[Menu]) -> Menu:
        """Each operand in each state that it may have, as it is."""
        positions = range(len(self.program.operators[index].operands))
        choices = []
        for at in positions:
            operator, result = self.program.sources[Reader(index, at)]
            for state in menus[operator].results[result].values:
                if not state.absent:
                    operands = tuple(state if i == at else ABSENT for i in positions)
                    choices.append(Choice((), state.varying, operands, (state,), at))
        return Menu.of(choices, len(positions), 1)

    def of(self, index: int, among: Iterable[Mapping[str, Axes]] | None = None) -> Menu:
        """All choices of operator `index` where it is there, or those with an assignment of
        `among`.
        """
        operator = self.program.operators[index]
        flags = tuple(some for some, _ in operator.flows)
        given = None if among is None else tuple(tuple(sorted(one.items())) for one in among)
        key = self.program.kinds[index], flags, given
        if key not in self.known:
            every = None if given is None else map(dict, given)
            self.known[key] = menu_of(operator, self.single, every)
        return self.known[key]


def menu_of(
    operator: Operator, single: Single, among: Iterable[Mapping[str, Axes]] | None = None
) -> Menu:
    """All choices of `operator` on the mesh of `single`, or those with an assignment of `among`."""
    found = assignments(operator.rule, single.mesh) if among is None else among
    return Menu.of(
        _choices(operator, single, found), len(operator.operands), len(operator.node.results)
    )


def assignments(rule: Rule, mesh: Mesh) -> Iterator[dict[str, Axes]]:
    """Every legal assignment of the axes of `mesh` to factors of `rule`."""
    sizes = dict(rule.size_of)
    for places in product(rule.places, repeat=len(mesh.axes)):
        left = dict(sizes)
        for axis, place in zip(mesh.axes, places, strict=True):
            if any(left[factor] % axis.size for factor in place):
                break
            left |= {factor: left[factor] // axis.size for factor in place}
        else:
            yield assigned(mesh, places)


def assigned(mesh: Mesh, places: Sequence[Place]) -> dict[str, Axes]:
    """The assignment that puts each axis of `mesh` on the factors of its place."""
    chosen: dict[str, Axes] = {}
    for axis, place in zip(mesh.axes, places, strict=True):
        chosen |= {factor: (*chosen.get(factor, ()), axis.name) for factor in place}
    return chosen


def places_of(assignment: Iterable[tuple[str, Axes]]) -> dict[str, Place]:
    """The factors that each axis of an assignment is on, sorted by name."""
    found: dict[str, Place] = {}
    for factor, axes in sorted(assignment):
        found |= {axis: (*found.get(axis, ()), factor) for axis in axes}
    return found


def subsets(axes: Sequence[str]) -> Iterator[Axes]:
    """All subsets of `axes`, each in their order."""
    return chain.from_iterable(combinations(axes, n) for n in range(len(axes) + 1))


def _choices(
    operator: Operator, single: Single, among: Iterable[Mapping[str, Axes]]
) -> Iterator[Choice]:
    rule, op, mesh = operator.rule, op_of(operator.node), single.mesh
    flowing = [any(flags) for flags in zip(*(f for f, _ in operator.flows), strict=True)]
    flowing = [op.differentiable and flows for flows in flowing]
    layouts = _Layouts(rule, mesh)
    for some in among:
        ordered = NodeDecision("", tuple(some.items())).factors  # as a plan has it
        chosen = dict(ordered)
        used = {a for axes in chosen.values() for a in axes}
        wanted = [layouts.operand(i, chosen) for i in range(len(rule.operands))]
        varying = [rule.varying(i, chosen) if flows else () for i, flows in enumerate(flowing)]
        made = [layouts.result(i, chosen) for i in range(len(rule.results))]
        free = [a for a in mesh.names if a not in used] if operator.derived else []
        for passed in subsets(free):
            operands = tuple(
                State(layout, _ordered((*axes, *passed), mesh) if flows else ())
                for layout, axes, flows in zip(wanted, varying, flowing, strict=True)
            )
            if is_local_program(operator, chosen):
                made = list(single.result_layouts(operator, chosen, operands))
            results = tuple(State(layout, passed) for layout in made)
            yield Choice(ordered, passed, operands, results)


def _ordered(axes: Iterable[str], mesh: Mesh) -> Axes:
    wanted = set(axes)
    return tuple(sorted(a for a in mesh.names if a in wanted))


class _Layouts:
    """Layouts by what an assignment says of the factors that a tensor has."""

    def __init__(self, rule: Rule, mesh: Mesh) -> None:
        self.rule, self.mesh = rule, mesh
        self.factors = [[*(f for dim in dims for f in dim), *rule.sums] for dims in rule.operands]
        self.known: dict[tuple[int, tuple[Axes, ...]], Layout] = {}

    def operand(self, index: int, chosen: dict[str, Axes]) -> Layout:
        key = index, tuple(chosen.get(f, ()) for f in self.factors[index])
        if key not in self.known:
            self.known[key] = self.rule.operand_layout(index, chosen, self.mesh)
        return self.known[key]

    def result(self, index: int, chosen: dict[str, Axes]) -> Layout:
        key = -1 - index, tuple(chosen.get(f, ()) for f in self.rule.size_of)
        if key not in self.known:
            self.known[key] = self.rule.result_layout(index, chosen, self.mesh)
        return self.known[key]
