"""Meshes of three and four axes: which are looked at, and which choices on them.

There, an operator has hundreds of choices, too many for tables between all of them. But coarser
meshes say what the best plan costs at least that splits an operator so or so over an axis. Of the
choices on a finer mesh those are kept whose axes do what is cheap on coarser ones: as many as
tables of a bearable size hold. Where that is all of them, the search leaves out nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.ops import Rule
from parloom.search.choices import Menu, Menus
from parloom.search.eliminate import marginals
from parloom.search.master import MeshSearch
from parloom.search.meshes import NAMES, across
from parloom.search.program import Axes, Program
from parloom.search.single import Single

# How many meshes are made of one by cutting an axis in two: all that 8 x 8 has.
CUTS = 4
# Choices of each operator, and cells of all tables of an elimination (16 MB): the most that fit are
# kept; twice as many choices make a table of three operators eight times as large.
KEPT_CHOICES, CELLS = (64, 48, 32, 24), 2e6
# By how much plans are above the best of a mesh that are told apart: the fewer, the smaller are the
# tables that tell, and all that are dearer rank alike.
BEYOND = 0.25
# In place of a variable that says whether calls recompute.
POLICY = -1
Costs = NDArray[np.float64]
Where = tuple[int, PrimeAxis, str | None]
"""An operator, a prime axis of the cluster, and the factor that it is on (None: on none)."""


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


@dataclass
class Tally:
    """What plans cost at least that do this or that with a prime axis in an operator."""

    least: dict[Where, float] = field(default_factory=dict)
    scopes: tuple[tuple[int, ...], ...] = ()

    def add(self, search: MeshSearch) -> None:
        """Take down what each choice of each operator costs on a mesh that was searched."""
        problem, worth = search.problem, search.worth
        held, limit = worth.held * search.limit_bytes, search.best_ps * (1 + BEYOND)
        counted = search.multipliers(worth)
        there = problem.narrowed(counted, limit + held)
        if there is None or not all(map(len, there)):
            return
        least, tables = problem.regrets(counted, there)
        last = len(problem.sizes)
        self.scopes = tuple(
            tuple(v if v < last else POLICY for v in (table.variable, *table.rest))
            for table in tables
        )
        known = marginals(least - held, tables)
        for index, menu in enumerate(problem.menus):
            costs = np.full(len(menu), limit)
            costs[there[index]] = known[index]
            self._note(index, menu, problem.mesh, costs)

    def _note(self, index: int, menu: Menu, mesh: Mesh, costs: Costs) -> None:
        for choice, cost in zip(menu.choices, costs.tolist(), strict=True):
            on = {axis: factor for factor, axes in choice.assignment for axis in axes}
            for axis in mesh.axes:
                factor = on.get(axis.name)
                for prime in axis.primes:
                    where = index, prime, factor
                    self.least[where] = min(self.least.get(where, inf), cost)

    def cost(self, index: int, axis: MeshAxis, factor: str | None) -> float:
        """What plans cost at least with `axis` on `factor`, as far as anything is known of it."""
        known = (self.least.get((index, prime, factor), -inf) for prime in axis.primes)
        return max(known)

    def room(self, counts: Sequence[int]) -> int:
        """How many choices of each operator tables can hold, where there are so many."""
        for most in KEPT_CHOICES:
            sizes = [min(most, count) for count in counts]
            known = dict(enumerate(sizes)) | {POLICY: 2}
            cells = sum(prod(known.get(v, most) for v in scope) for scope in self.scopes)
            if cells <= CELLS:
                return most
        return KEPT_CHOICES[-1]


@dataclass(frozen=True)
class Kept:
    """Menus of all operators on a finer mesh: at most `most` choices of the `largest` number."""

    menus: tuple[Menu, ...]
    most: int
    largest: int


def kept(program: Program, single: Single, tally: Tally) -> Kept:
    """The choices on the mesh of `single` that `tally` says are cheap."""
    mesh = single.mesh
    ranked = [_ranked(index, o.rule, mesh, tally) for index, o in enumerate(program.operators)]
    largest = max((len(some) for some in ranked), default=0)
    most = tally.room([len(some) for some in ranked])
    known, menus = Menus(program, single), []
    for index, (operator, some) in enumerate(zip(program.operators, ranked, strict=True)):
        place = operator.function, operator.node.key
        allowed = program.pinned.allowed(place, operator.rule, mesh)
        chosen = (_assignment(operator.rule, mesh, int(row)) for row in some)
        fitting = [c for c in chosen if allowed(c)] if allowed else list(chosen)
        menus.append(known.of(index, fitting[:most]))
    return Kept(tuple(menus), most, largest)


def _ranked(index: int, rule: Rule, mesh: Mesh, tally: Tally) -> NDArray[np.intp]:
    """All legal assignments of an operator, the most promising first, as numbers with a digit for
    each axis: what all axes cost above their best counts together.
    """
    factors = (None, *rule.shardable)
    shape = (len(factors),) * len(mesh.axes)
    total, legal = np.zeros(shape), np.ones(shape, dtype=bool)
    left = {factor: np.full(shape, rule.size(factor)) for factor in rule.shardable}
    for axis, on in zip(mesh.axes, np.indices(shape), strict=True):
        costs = np.array([tally.cost(index, axis, factor) for factor in factors])
        best = min((cost for cost in costs if abs(cost) < inf), default=0.0)
        total += np.maximum(costs - best, 0.0)[on]
        for position, factor in enumerate(rule.shardable, start=1):
            here = on == position
            legal &= ~here | (left[factor] % axis.size == 0)
            left[factor] = np.where(here, left[factor] // axis.size, left[factor])
    costs = np.where(legal, total, inf).ravel()
    return np.argsort(costs, kind="stable")[: int(legal.sum())]


def _assignment(rule: Rule, mesh: Mesh, number: int) -> dict[str, Axes]:
    factors = (None, *rule.shardable)
    chosen: dict[str, Axes] = {}
    digits = np.unravel_index(number, (len(factors),) * len(mesh.axes))
    for axis, digit in zip(mesh.axes, digits, strict=True):
        factor = factors[int(digit)]
        if factor is not None:
            chosen[factor] = (*chosen.get(factor, ()), axis.name)
    return chosen
