"""Branch and bound where a mixture of layouts costs less than any of them (with Lagrangian bounds:
Geoffrion, Mathematical Programming Study 2, 1974; Fisher, Management Science 27, 1981).

What one layout of a mixture sends too much, another one hides: half of the calls split the batch
over a slow link, half compute all of it twice. So the menu of an operator about which they differ
is divided: an axis is on the factor that most of the mixture has it on, or it is not. Each part has
multipliers of its own and a bound that is higher, and the least of these bounds the whole. Where
layouts are alike, a mixture may recompute a fraction of a call: fewer calls do, or more.
"""

from collections import defaultdict
from heapq import heappop, heappush
from math import inf

import numpy as np

from parloom.search.choices import Choice
from parloom.search.eliminate import Factor
from parloom.search.master import MeshSearch
from parloom.search.prices import BACKWARD, FORWARD

# So many parts are looked at, at most; and less than this of a mixture is none of it.
MOST, SLIGHT = 32, 1e-6


def branch(search: MeshSearch, best_ps: float, tolerance: float) -> float:
    """What no layout undercuts: at most `tolerance` below the better of `best_ps` and what `search`
    finds in parts, where that can be proved; the part with the least bound is divided next.
    """
    waiting, number = [(search.bound, 0, search)], 0
    while number < MOST:
        bound, _, part = waiting[0]
        enough = min(best_ps, search.best_ps) * (1 - tolerance)
        parts = _divided(part) if 0 < bound < enough < inf else ()
        if not parts:
            break
        heappop(waiting)
        for smaller in parts:
            number += 1
            smaller.run(enough=enough)
            heappush(waiting, (smaller.bound, number, smaller))
    return waiting[0][0]


def _divided(search: MeshSearch) -> tuple[MeshSearch, ...]:
    """Two parts; none where nothing tells the members of the mixture apart."""
    tables = _tables(search)
    if tables:
        return tuple(search.part(table) for table in tables)
    means = np.zeros(len(search.policies))
    for (values, _), share in search.shares.items():
        means += share * np.array(search.counts(values), dtype=float)
    below = np.abs(means - np.round(means))
    if not below.size or below.max() < SLIGHT:
        return ()
    position = int(below.argmax())
    policy, few = search.policies[position], int(means[position])
    return (
        search.recomputing(position, policy.least, few),
        search.recomputing(position, few + 1, policy.most),
    )


def _tables(search: MeshSearch) -> tuple[Factor, ...]:
    """What to leave out in each of two parts; nothing where layouts of the mixture are alike.

    Operators of one function mostly do alike: of the function that has the most to compute where
    the mixture differs, the operator that has the most is taken.
    """
    problem = search.problem
    mixture = [(key[0], share) for key, share in search.shares.items() if share > SLIGHT]
    apart: dict[tuple[int, str], float] = {}
    common: dict[tuple[int, str], str | None] = {}
    functions: defaultdict[str, float] = defaultdict(float)
    for index, operator in enumerate(problem.program.operators):
        most_ps = float(problem.operators[index][:, [FORWARD, BACKWARD]].sum(axis=1).max())
        for axis in problem.mesh.names:
            on: defaultdict[str | None, float] = defaultdict(float)
            for values, share in mixture:
                on[_factor(problem.menus[index].choices[values[index]], axis)] += share
            if len(on) > 1:
                common[index, axis] = max(on, key=on.__getitem__)
                apart[index, axis] = most_ps * (1 - max(on.values()))
                functions[operator.function] += apart[index, axis]
    if not apart:
        return ()
    function = max(functions, key=functions.__getitem__)
    some = (key for key in apart if problem.program.operators[key[0]].function == function)
    index, axis = max(some, key=apart.__getitem__)
    menu, factor = problem.menus[index], common[index, axis]
    alike = np.array([_factor(choice, axis) == factor for choice in menu.choices])
    return tuple(Factor((index,), np.where(part, 0.0, inf)) for part in (alike, ~alike))


def _factor(choice: Choice, axis: str) -> str | None:
    """The factor that an axis is on."""
    return next((factor for factor, axes in choice.assignment if axis in axes), None)
