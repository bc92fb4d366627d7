"""Where weights that several operators read are at home, and what that asks of their readers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.search.choices import Distinct, Menu, subsets
from parloom.search.model import Bools, Indices
from parloom.search.program import Axes, Flow, Operator, Program, Reader, State, Weight


@dataclass(frozen=True, slots=True)
class Home:
    """Where a weight that several operators read is at home: the layout that reader `star` wants,
    and the axes over which its gradient is partial.
    """

    layout: Layout
    reduce: Axes
    star: int


@dataclass(frozen=True, eq=False)
class Agreement:
    """Which homes or choices of two variables (`scope`) go together."""

    scope: tuple[int, int]
    legal: Bools


def homes(weight: Weight, menus: Sequence[Menu], mesh: Mesh) -> Iterator[Home]:
    """Every layout that a reader wants, with what readers leave partial together."""
    wanted = [menus[r.operator].operands[r.operand].values for r in weight.readers]
    together: set[frozenset[str]] = {frozenset()}
    for states in wanted:
        needed = {frozenset((*s.varying, *s.layout.axes)) for s in states}
        together = {some | more for some in together for more in needed}
    for star, states in enumerate(wanted):
        for layout in dict.fromkeys(state.layout for state in states if not state.absent):
            free = [a for a in mesh.names if a not in layout.axes]
            left = {some.intersection(free) for some in together}
            for reduce in subsets(free) if weight.trainable else ((),):
                if frozenset(reduce) in left or not weight.trainable:
                    yield Home(layout, tuple(sorted(reduce)), star)


def agreements(
    program: Program,
    mesh: Mesh,
    menus: Sequence[Menu],
    places: Mapping[int, Sequence[Home]],
    variable: Mapping[int, int],
) -> Iterator[Agreement]:
    """What readers allow of the homes of weights, and of what is made of weights; and operators
    that take operands together.

    `places` and `variable`: the homes of a weight and the variable that chooses one, by its index.
    """
    for index, found in places.items():
        for position, reader in enumerate(program.weights[index].readers):
            operator, (wanted, which) = program.operators[reader.operator], _wanted(menus, reader)
            table = [
                [
                    home.star != position
                    if state.absent
                    else _is_home(home, position, state, mesh)
                    and _passes(operator, home.reduce, used, passed)
                    for state, used, passed in wanted
                ]
                for home in found
            ]
            yield Agreement((variable[index], reader.operator), np.array(table)[:, which])
    for flow in program.flows:
        if flow.operator >= 0 and program.operators[flow.operator].derived:
            yield from _of_derived(program, menus, flow)
    for pair, linked in program.together.items():
        one, other = (np.array([choice.taken for choice in menus[i].choices]) for i in pair)
        same = [(one[:, None] == at) == (other == to) for at, to in linked]
        # One that is left out takes none.
        yield Agreement(pair, np.all(same, axis=0) | (one[:, None] < 0) | (other < 0))


def _of_derived(program: Program, menus: Sequence[Menu], flow: Flow) -> Iterator[Agreement]:
    """Whether what weights make passes on what its readers leave partial."""
    source = Distinct.of((c.passed, c.used) for c in menus[flow.operator].choices)
    for reader in flow.readers:
        operator, (wanted, which) = program.operators[reader.operator], _wanted(menus, reader)
        table = [
            [
                state.absent
                or (
                    {*state.varying, *state.layout.axes} - set(split) <= set(varying)
                    and _passes(operator, varying, used, passed)
                )
                for state, used, passed in wanted
            ]
            for varying, split in source.values
        ]
        legal = np.array(table)[np.ix_(source.index, which)]
        yield Agreement((flow.operator, reader.operator), legal)


def _wanted(
    menus: Sequence[Menu], reader: Reader
) -> tuple[tuple[tuple[State, Axes, Axes], ...], Indices]:
    """What choices of a reader differ in here, and which of these each choice has."""
    choices = menus[reader.operator].choices
    found = Distinct.of((c.operands[reader.operand], c.used, c.passed) for c in choices)
    return found.values, found.index


def _is_home(home: Home, position: int, state: State, mesh: Mesh) -> bool:
    """Whether a home is what `ir.lower` takes beside a reader: the layout that is split most, its
    gradient partial over all that any reader leaves partial.
    """
    mine, theirs = mesh.size(home.layout.axes), mesh.size(state.layout.axes)
    if position == home.star and state.layout != home.layout:
        return False
    if theirs > mine or (position < home.star and theirs == mine):
        return False
    return {*state.varying, *state.layout.axes} - set(home.layout.axes) <= set(home.reduce)


def _passes(operator: Operator, varying: Axes, used: Axes, passed: Axes) -> bool:
    """Whether a reader passes on what varies as its choice says (docs/explanation/search.md)."""
    left = set(varying) - set(used)
    if operator.derived:
        return left == set(passed)
    return not (operator.exposed and left)
