"""Meshes of three and four axes: which are looked at, and which choices on them.

There, an operator has hundreds of choices, too many for tables between all of them. But coarser
meshes say what the best plan costs at least that splits an operator so or so over an axis. Of the
choices on a finer mesh those are kept whose axes do what is cheap on coarser ones: as many as
tables of a bearable size hold. Where that is all of them, the search leaves out nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.search.choices import Menu, Menus
from parloom.search.eliminate import marginals
from parloom.search.finer import assignment_of, ranked_choices
from parloom.search.master import MeshSearch
from parloom.search.program import Program
from parloom.search.single import Single

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
    ranked = [
        ranked_choices(index, o.rule, mesh, tally) for index, o in enumerate(program.operators)
    ]
    largest = max((len(some) for some in ranked), default=0)
    most = tally.room([len(some) for some in ranked])
    known, menus = Menus(program, single), []
    for index, (operator, some) in enumerate(zip(program.operators, ranked, strict=True)):
        place = operator.function, operator.node.key
        allowed = program.pinned.allowed(place, operator.rule, mesh)
        chosen = (assignment_of(operator.rule, mesh, int(row)) for row in some)
        fitting = [c for c in chosen if allowed(c)] if allowed else list(chosen)
        menus.append(known.of(index, fitting[:most]))
    return Kept(tuple(menus), most, largest)
