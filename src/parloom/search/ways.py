"""Ways between states: what it costs to bring a value from where it is made to where it is read.

There are many pairs of states and few that a good plan uses. So every pair has an optimistic price
first, made axis by axis, and its price only when a search asks for it. Optimistic: an axis moves
as if others that are split at one end were so throughout, but for those that move as it does: one
of them is the first, or the last, and finds the others whole. Of axes that may be gathered in one
collective the cheapest counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from parloom.errors import LayoutError
from parloom.ir.graph import TensorSpec
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import MeshAxis
from parloom.ir.moves import ADJOINTS, plan_moves
from parloom.search.choices import Distinct
from parloom.search.prices import KEPT, LINKS, PARTS, Prices
from parloom.search.program import State

Code = tuple[str, str | tuple[int, int]]
Parts = NDArray[np.int64]
# From which state of an axis to which (S split, P partial, R replicated, V varying). These axes are
# split one after the other: the first finds the others whole.
IN_TURN = (("R", "S"), ("V", "S"), ("P", "S"))
# All axes at once.
AT_ONCE = (("P", "R"), ("P", "V"), ("R", "V"), ("V", "R"))
# Some at once, where they are neighbours: what comes last leaves all of them whole.
GATHERED = (("S", "R"), ("S", "V"))
ROWS: Mapping[tuple[str, str], str] = MappingProxyType(
    dict(
        zip(
            (*AT_ONCE, *GATHERED),
            ("reduce", "reduce_varying", "replicate", "elect", "combine", "combine_varying"),
            strict=True,
        )
    )
)
NEVER = np.iinfo(np.int64).max


class Ways:
    """Prices from every source to every target of one kind of tensor: `parts[:, source, target]`.

    `flows`: gradients come back. Where no way leads, `legal` is False.
    """

    def __init__(
        self,
        prices: Prices,
        spec: TensorSpec,
        flows: bool,
        sources: Sequence[State],
        targets: Sequence[State],
    ) -> None:
        self.prices, self.spec, self.flows = prices, spec, flows
        self.sources, self.targets = tuple(sources), tuple(targets)
        shape = len(sources), len(targets)
        self.exact = np.zeros(shape, dtype=bool)
        self.parts, self.legal = _optimistic(self)

    def sharpen(self, source: int, target: int) -> bool:
        """Put the price in place of an optimistic one; whether that changed anything.

        What seems cheaper now from this source or to this target would be asked for next.
        """
        if self.exact[source, target] or not self._sharpen(source, target):
            return False
        costs = np.where(self.exact | ~self.legal, np.inf, self.parts[:KEPT].sum(axis=0))
        cost = self.parts[:KEPT, source, target].sum() if self.legal[source, target] else np.inf
        for other in np.flatnonzero(costs[:, target] < cost):
            self._sharpen(int(other), target)
        for other in np.flatnonzero(costs[source] < cost):
            self._sharpen(source, int(other))
        return True

    def _sharpen(self, source: int, target: int) -> bool:
        self.exact[source, target] = True
        price = self.prices.movement(
            self.spec, self.flows, self.sources[source], self.targets[target]
        )
        before = self.parts[:KEPT, source, target].copy()
        if price is None:
            changed = bool(self.legal[source, target])
            self.legal[source, target] = False
            return changed
        self.parts[:KEPT, source, target] = price[:KEPT]
        self.parts[LINKS, source, target] = price[LINKS]
        return bool((before != price[:KEPT]).any())


class _Ends:
    """The states at both ends of all ways, axis by axis."""

    def __init__(self, ways: Ways) -> None:
        self.ways, self.axes = ways, ways.prices.mesh.axes
        self.shape = len(ways.sources), len(ways.targets)
        self.codes = [
            [Distinct.of(_code(state, axis.name, ways.flows) for state in states)
             for states in (ways.sources, ways.targets)]
            for axis in self.axes
        ]  # fmt: skip
        self.split = [
            np.logical_or.outer(
                *(np.array([c[0] == "S" for c in end.values])[end.index] for end in ends)
            )
            for ends in self.codes
        ]

    def moves(self, position: int, kinds: tuple[str, str]) -> NDArray[np.bool_]:
        """Where an axis goes from one kind of state to another."""
        source, target = (
            np.array([code[0] == kind for code in end.values])[end.index]
            for end, kind in zip(self.codes[position], kinds, strict=True)
        )
        found: NDArray[np.bool_] = np.logical_and.outer(source, target)
        return found

    def changed(self) -> NDArray[np.int64]:
        """How many axes are not in the same state at both ends."""
        found = np.zeros(self.shape, dtype=np.int64)
        for sources, targets in self.codes:
            differ = np.array([[s != t for t in targets.values] for s in sources.values])
            found += differ[np.ix_(sources.index, targets.index)]
        return found

    def replaced(self, position: int) -> NDArray[np.bool_]:
        """Where an axis splits one dim at both ends."""
        source, target = (
            np.array([code[1][0] if isinstance(code[1], tuple) else -1 for code in end.values])
            for end in self.codes[position]
        )
        rows, columns = (end.index for end in self.codes[position])
        found: NDArray[np.bool_] = np.equal.outer(source, target) & (source >= 0)[:, None]
        return found[np.ix_(rows, columns)]

    def others(self, position: int, whole: Sequence[NDArray[np.bool_]] = ()) -> NDArray[np.int64]:
        """Among how many ranks the axes other than one share what is moved; those that are `whole`
        do not.
        """
        found = np.ones(self.shape, dtype=np.int64)
        for other, axis in enumerate(self.axes):
            if other != position:
                split = self.split[other] & ~whole[other] if whole else self.split[other]
                found *= np.where(split, axis.size, 1)
        return found


def _optimistic(ways: Ways) -> tuple[Parts, NDArray[np.bool_]]:
    """Prices that are never too high, and where a way leads."""
    ends = _Ends(ways)
    parts = np.zeros((PARTS, *ends.shape), dtype=np.int64)
    legal = np.ones(ends.shape, dtype=bool)
    gathered = np.any(
        [ends.moves(i, kinds) for kinds in GATHERED for i in range(len(ends.axes))], axis=0
    )
    for position in range(len(ends.axes)):
        found, allowed = _moved(ends, position, ends.others(position))
        # What has another place on its dim may get there as others of the dim are gathered.
        parts += np.where(gathered & ends.replaced(position), 0, found)
        legal &= allowed
    for kinds in IN_TURN:
        parts += _first(ends, kinds)
    for kinds in AT_ONCE:
        parts += _together(ends, (kinds,), _all)
    parts += _together(ends, GATHERED, _any)
    # Which links axes keep busy that move together, nobody knows but the planner.
    parts[LINKS] = np.where(ends.changed() > 1, 0, parts[LINKS])
    return parts, legal


def _first(ends: _Ends, kinds: tuple[str, str]) -> Parts:
    """What it costs more that one axis, of those that move so, finds the others whole."""
    least = np.full((PARTS, *ends.shape), NEVER)
    moving = [ends.moves(position, kinds) for position in range(len(ends.axes))]
    several = np.sum(moving, axis=0) > 1
    for position, mine in enumerate(moving):
        if (mine & several).any():
            late, _ = _moved(ends, position, ends.others(position))
            first, _ = _moved(ends, position, ends.others(position, moving))
            least = np.minimum(least, np.where(mine & several, first - late, NEVER))
    return np.where(several, least, 0)


def _moved(
    ends: _Ends, position: int, others: NDArray[np.int64]
) -> tuple[Parts, NDArray[np.bool_]]:
    """What moving one axis by itself costs, where `others` share what is moved; where it can."""
    axis, (sources, targets) = ends.axes[position], ends.codes[position]
    shares, share = np.unique(others, return_inverse=True)
    size = len(sources.values), len(targets.values)
    table = np.zeros((PARTS, *size, len(shares)), dtype=np.int64)
    allowed = np.ones(size, dtype=bool)
    rows, columns = sources.index[:, None], targets.index[None, :]
    found = rows, columns, share.reshape(ends.shape)
    used = np.zeros(table.shape[1:], dtype=bool)
    used[found] = True
    for i, j, k in zip(*np.nonzero(used), strict=True):
        price = _single_axis(ends.ways, axis, sources.values[i], targets.values[j], int(shares[k]))
        allowed[i, j] = price is not None
        if price is not None:
            table[:, i, j, k] = price
    return table[:, *found], allowed[rows, columns]


def _together(
    ends: _Ends, several: Sequence[tuple[str, str]], price: Callable[["_Group"], Parts]
) -> Parts:
    """What it costs to move all axes that move in one of `several` ways."""
    moving = np.zeros((len(several), *ends.shape), dtype=np.int64)
    for index, kinds in enumerate(several):
        for position in range(len(ends.axes)):
            moving[index] |= ends.moves(position, kinds).astype(np.int64) << position
    if not moving.any():
        return np.zeros((PARTS, *ends.shape), dtype=np.int64)
    whole = moving.sum(axis=0)
    others = ends.others(-1, [whole >> position & 1 == 1 for position in range(len(ends.axes))])
    rows = np.stack([*moving, others]).reshape(len(several) + 1, -1)
    some, which = np.unique(rows, axis=1, return_inverse=True)
    prices = np.zeros((PARTS, some.shape[1]), dtype=np.int64)
    for index, (*bits, among) in enumerate(some.T.tolist()):
        moved = tuple(
            tuple(axis for i, axis in enumerate(ends.axes) if some_bits >> i & 1)
            for some_bits in bits
        )
        if any(moved):
            prices[:, index] = price(_Group(ends.ways, tuple(several), moved, among))
    return prices[:, which.reshape(ends.shape)]


@dataclass(frozen=True)
class _Group:
    """Axes that move alike, for each of several kinds, where others share what is moved."""

    ways: Ways
    kinds: tuple[tuple[str, str], ...]
    moved: tuple[tuple[MeshAxis, ...], ...]
    among: int

    def price(self, index: int, axes: tuple[MeshAxis, ...]) -> Parts:
        """What moving these at once costs."""
        known = self.ways.prices.shared.axes
        size = self.ways.spec.num_bytes // self.among
        key = tuple(axis.primes for axis in axes), self.kinds[index], size, self.ways.flows
        if key not in known:
            known[key] = self._price(self.kinds[index], axes)
        found = known[key]
        assert found is not None, "such a movement always leads there"
        return found

    def _price(self, kinds: tuple[str, str], axes: tuple[MeshAxis, ...]) -> Parts:
        row = next(r for name, r in ADJOINTS.items() if name == ROWS[kinds])
        names, size = tuple(axis.name for axis in axes), self.ways.spec.num_bytes // self.among
        sizes = size // prod(axis.size for axis in axes) if kinds[0] == "S" else size, size
        prices = self.ways.prices
        found = prices.primitive(row.forward, names, *sizes, backward=False)
        if not self.ways.flows:
            return found
        return found + prices.primitive(row.backward, names, *sizes[::-1], backward=True)


def _all(group: _Group) -> Parts:
    """The price of one movement over all axes."""
    return group.price(0, group.moved[0])


def _any(group: _Group) -> Parts:
    """The least price of a movement over some of the axes: the last may be any of these."""
    prices = [
        group.price(index, axes)
        for index, moved in enumerate(group.moved)
        for count in range(1, len(moved) + 1)
        for axes in combinations(moved, count)
    ]
    least: Parts = np.minimum.reduce(prices)
    return least


def _code(state: State, axis: str, flows: bool) -> Code:
    """The state of one axis."""
    shard = state.layout.shard(axis)
    if shard is not None:
        return "S", (shard.dim, shard.stride)
    reduction = dict(state.layout.partial).get(axis)
    if reduction is not None:
        return "P", reduction
    return ("V", "") if flows and axis in state.varying else ("R", "")


def _layout(axis: str, code: Code) -> Layout:
    kind, what = code
    if isinstance(what, tuple):
        return Layout((Shard(axis, *what),))
    return Layout((), ((axis, what),)) if kind == "P" else Layout()


def _single_axis(
    ways: Ways, axis: MeshAxis, source: Code, target: Code, among: int
) -> Parts | None:
    """What moving one axis costs where the others hold a share of 1 / `among`, but for what moves
    together with others. None where no way leads.
    """
    known = ways.prices.shared.axes
    size = ways.spec.num_bytes // among
    key = axis.primes, ways.spec.shape, source, target, size, ways.flows
    if key not in known:
        price = _price_axis(ways, axis.name, source, target, among)
        together = (source[0], target[0]) in ROWS
        known[key] = np.zeros_like(price) if together and price is not None else price
    return known[key]


def _price_axis(ways: Ways, axis: str, source: Code, target: Code, among: int) -> Parts | None:
    mesh, spec = ways.prices.mesh, ways.spec
    found = np.zeros(PARTS, dtype=np.int64)
    if source == target:
        return found
    before = _layout(axis, source)
    try:
        steps = plan_moves(
            before,
            _layout(axis, target),
            spec.shape,
            mesh,
            source_varying=(axis,) if source[0] == "V" else (),
            target_varying=(axis,) if target[0] == "V" else (),
            differentiable=ways.flows,
        )
    except LayoutError:
        return None
    for step in steps:
        sizes = [
            spec.num_bytes // (among * prod(mesh[a].size for a in layout.axes))
            for layout in (before, step.result)
        ]
        row = ADJOINTS[step.row]
        price = ways.prices.primitive(row.forward, step.axes, *sizes, backward=False)
        if ways.flows:
            price = price + ways.prices.primitive(
                row.backward, step.axes, *sizes[::-1], backward=True
            )
        found += price
        before = step.result
    return found
