"""Meshes of three and four axes: which are looked at, and which choices on them.

There, an operator has hundreds of choices. Coarser meshes say what a plan costs at least that
splits an operator so or so over an axis; of the choices on a finer mesh those are kept whose axes
do what is cheap on coarser ones.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.ops import Rule
from parloom.search.choices import Menu, Menus, Place, assigned
from parloom.search.contexts import ContextSearch
from parloom.search.meshes import NAMES, across
from parloom.search.program import Axes, Program
from parloom.search.single import Single

# How many meshes are made of one by cutting an axis in two: all that 8 x 8 has.
CUTS = 4
# Choices of each operator that are kept on meshes of three axes and more.
CHOICES = 32
Where = tuple[int, PrimeAxis, Place]
"""An operator, a prime axis of the cluster, and the factors that it is on."""


def refinements(mesh: Mesh, at_most: int = CUTS) -> tuple[Mesh, ...]:
    """`mesh` with one axis cut in two: first between levels of the topology, then by how small the
    part with the faster links is.
    """
    found: list[tuple[tuple[int, int], Mesh]] = []
    if len(mesh.axes) < len(NAMES):
        for position, axis in enumerate(mesh.axes):
            for cut in range(1, len(axis.primes)):
                halves = MeshAxis("", axis.primes[:cut]), MeshAxis("", axis.primes[cut:])
                axes = (*mesh.axes[:position], *halves, *mesh.axes[position + 1 :])
                named = tuple(replace(a, name=n) for a, n in zip(axes, NAMES, strict=False))
                found.append(((across(axis.primes, (cut,)), halves[1].size), Mesh(named)))
    found.sort(key=lambda entry: entry[0])
    return tuple(mesh for _, mesh in found[:at_most])


class LeastCosts:
    """Bounds on plans that do this or that with a prime axis in an operator."""

    def __init__(self) -> None:
        self.least: dict[Where, float] = {}
        self._added: set[ContextSearch] = set()

    def add(self, context: ContextSearch) -> None:
        """Record the least cost of each choice of each operator in a context that was searched."""
        if context in self._added:
            return
        self._added.add(context)
        columns, layouts = context.columns, context.layouts
        least = columns.least_within(context.limit)
        for index, options in enumerate(layouts.options):
            costs = least[index].reshape(len(options.menu), -1).min(axis=1)
            taking = layouts.program.operators[index].takes
            for choice, cost in zip(options.menu.choices, costs.tolist(), strict=True):
                if taking or choice.absent:
                    continue
                places = choice.places
                for axis in layouts.mesh.axes:
                    for prime in axis.primes:
                        where = index, prime, places.get(axis.name, ())
                        self.least[where] = min(self.least.get(where, inf), cost)

    def cost(self, index: int, axis: MeshAxis, place: Place) -> float:
        """What plans cost at least with `axis` on `place`, as far as anything is known of it."""
        return max(self.least.get((index, prime, place), -inf) for prime in axis.primes)


class FinerMenus:
    """The menus of meshes of three axes and more; `left_out` says whether choices are missing."""

    def __init__(self) -> None:
        self.left_out = ""
        # By the numbers of microbatches and of devices.
        self._known: dict[tuple[int, int], LeastCosts] = {}

    def of(self, program: Program, mesh: Mesh, costs: LeastCosts) -> tuple[Menu, ...]:
        """The most promising choices of each operator."""
        menus, some = promising(program, mesh, costs, CHOICES)
        if some:
            self.left_out = (
                f"on meshes of three axes and more, an operator had its {CHOICES} most promising"
                " choices; bounds are of these"
            )
        return menus

    def refinements(
        self,
        program: Program,
        parent: ContextSearch,
        looked: Sequence[ContextSearch],
        known: Collection[Mesh],
    ) -> Iterator[tuple[Mesh, tuple[Menu, ...]]]:
        """Meshes, none of them `known`, that cut one axis of that of `parent`, with their menus, as
        far as all operators have a choice there.
        """
        kind = parent.num_microbatches, parent.mesh.num_ranks
        costs = self._known.setdefault(kind, LeastCosts())
        for context in looked:
            if (context.num_microbatches, context.mesh.num_ranks) == kind:
                costs.add(context)
        for mesh in refinements(parent.mesh):
            if mesh not in known and program.pinned.allows_mesh(mesh):
                menus = self.of(program, mesh, costs)
                if all(menus):
                    yield mesh, menus


def promising(
    program: Program, mesh: Mesh, costs: LeastCosts, at_most: int
) -> tuple[tuple[Menu, ...], bool]:
    """Menus on `mesh` of the choices that `costs` say are cheap, at most so many of each operator;
    and whether others are left out.
    """
    menus = Menus(program, Single(program.graph, program.factored, mesh))
    left_out = False

    def among(index: int) -> list[dict[str, Axes]]:
        nonlocal left_out
        operator = program.operators[index]
        allowed = program.pinned.allowed(operator.place, operator.rule, mesh)
        ranked = ranked_choices(index, operator.rule, mesh, costs)
        chosen = [assignment_of(operator.rule, mesh, int(row)) for row in ranked]
        fitting = [c for c in chosen if allowed is None or allowed(c)]
        left_out |= len(fitting) > at_most
        return fitting[:at_most]

    return menus.all(among), left_out


class Costs(Protocol):
    """What plans cost at least with an axis on factors of an operator."""

    def cost(self, index: int, axis: MeshAxis, place: Place) -> float: ...


def ranked_choices(index: int, rule: Rule, mesh: Mesh, costs: Costs) -> NDArray[np.intp]:
    """All legal assignments of an operator, the most promising first, as numbers with a digit for
    each axis: what all axes cost above their best counts together.
    """
    places = rule.places
    shape = (len(places),) * len(mesh.axes)
    total, legal = np.zeros(shape), np.ones(shape, dtype=bool)
    left = {factor: np.full(shape, size) for factor, size in rule.size_of.items()}
    for axis, on in zip(mesh.axes, np.indices(shape), strict=True):
        known = np.array([costs.cost(index, axis, place) for place in places])
        best = min((cost for cost in known if abs(cost) < inf), default=0.0)
        total += np.maximum(known - best, 0.0)[on]
        for position, place in enumerate(places):
            here = on == position
            for factor in place:
                legal &= ~here | (left[factor] % axis.size == 0)
                left[factor] = np.where(here, left[factor] // axis.size, left[factor])
    every = np.where(legal, total, inf).ravel()
    return np.argsort(every, kind="stable")[: int(legal.sum())]


def assignment_of(rule: Rule, mesh: Mesh, number: int) -> dict[str, Axes]:
    """The assignment that a number of `ranked_choices` stands for."""
    digits = np.unravel_index(number, (len(rule.places),) * len(mesh.axes))
    return assigned(mesh, [rule.places[int(digit)] for digit in digits])
