"""Ways between states: what it costs to bring a value from where it is made to where it is read.

There are many pairs of states and few that a good plan uses. So every pair has an optimistic price
first, made axis by axis, and its price only when a search asks for it. Optimistic: each axis moves
as if all others were split throughout, and of movements that may be one collective the cheapest
counts.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from parloom.errors import LayoutError
from parloom.ir.graph import TensorSpec
from parloom.ir.layout import Layout, Shard
from parloom.ir.moves import ADJOINTS, plan_moves
from parloom.search.choices import Distinct
from parloom.search.prices import KEPT, PARTS, Prices
from parloom.search.program import State

# Movements over several axes that the planner may join into one.
JOINED = (("reduce", "reduce_varying"), ("replicate", "elect"), ("combine", "combine_varying"))
Code = tuple[str, str | tuple[int, int]]
Parts = NDArray[np.int64]


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
        """Put the price in place of an optimistic one; whether that changed anything."""
        if self.exact[source, target]:
            return False
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
        return bool((before != price[:KEPT]).any())


def _optimistic(ways: Ways) -> tuple[Parts, NDArray[np.bool_]]:
    """Prices that are never too high, and where a way leads."""
    mesh = ways.prices.mesh
    ends = ways.sources, ways.targets
    split = [
        np.array([[s.layout.shard(a) is not None for a in mesh.names] for s in states])
        for states in ends
    ]
    either = split[0][:, None, :] | split[1][None, :, :]
    shape = len(ways.sources), len(ways.targets)
    parts = np.zeros((PARTS, *shape), dtype=np.int64)
    joined: list[Parts | None] = [None] * len(JOINED)
    legal = np.ones(shape, dtype=bool)
    for position, axis in enumerate(mesh.axes):
        others = np.ones(shape, dtype=np.int64)
        for other, size in enumerate(a.size for a in mesh.axes):
            if other != position:
                others *= np.where(either[:, :, other], size, 1)
        shares, share = np.unique(others, return_inverse=True)
        sources, targets = (Distinct.of(_code(s, axis.name) for s in states) for states in ends)
        table, allowed = _axis_table(ways, axis.name, sources.values, targets.values, shares)
        rows, columns = sources.index[:, None], targets.index[None, :]
        picked = table[:, :, rows, columns, share.reshape(shape)]
        parts += picked[-1]
        for group, found in enumerate(picked[:-1]):
            joined[group] = _cheapest(joined[group], found)
        legal &= allowed[rows, columns]
    return sum((group for group in joined if group is not None), parts), legal


def _axis_table(
    ways: Ways,
    axis: str,
    sources: Sequence[Code],
    targets: Sequence[Code],
    shares: NDArray[np.int64],
) -> tuple[Parts, NDArray[np.bool_]]:
    """Prices of moving one axis, [group, part, source, target, share of the others]."""
    shape = len(sources), len(targets)
    table = np.zeros((len(JOINED) + 1, PARTS, *shape, len(shares)), dtype=np.int64)
    allowed = np.ones(shape, dtype=bool)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            for k, among in enumerate(shares):
                found = _single_axis(ways, axis, source, target, int(among))
                allowed[i, j] = found is not None
                if found is not None:
                    table[:, :, i, j, k] = found
    return table, allowed


def _cheapest(before: Parts | None, found: Parts) -> Parts | None:
    """The smaller of two, where both move something."""
    if not found.any():
        return before
    if before is None:
        return found
    return np.where(
        before.any(axis=0), np.where(found.any(axis=0), np.minimum(before, found), before), found
    )


def _code(state: State, axis: str) -> Code:
    """The state of one axis."""
    shard = state.layout.shard(axis)
    if shard is not None:
        return "S", (shard.dim, shard.stride)
    reduction = dict(state.layout.partial).get(axis)
    if reduction is not None:
        return "P", reduction
    return ("V", "") if axis in state.varying else ("R", "")


def _layout(axis: str, code: Code) -> Layout:
    kind, what = code
    if isinstance(what, tuple):
        return Layout((Shard(axis, *what),))
    return Layout((), ((axis, what),)) if kind == "P" else Layout()


def _single_axis(ways: Ways, axis: str, source: Code, target: Code, among: int) -> Parts | None:
    """What moving one axis costs where the others hold a share of 1 / `among`: per group of
    `JOINED`, and for all other movements last. None where no way leads.
    """
    known = ways.prices.shared.axes
    size = ways.spec.num_bytes // among
    key = ways.prices.mesh[axis].primes, ways.spec.shape, source, target, size, ways.flows
    if key not in known:
        known[key] = _price_axis(ways, axis, source, target, among)
    return known[key]


def _price_axis(ways: Ways, axis: str, source: Code, target: Code, among: int) -> Parts | None:
    mesh, spec = ways.prices.mesh, ways.spec
    found = np.zeros((len(JOINED) + 1, PARTS), dtype=np.int64)
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
        group = next((i for i, rows in enumerate(JOINED) if step.row in rows), len(JOINED))
        found[group] += price
        before = step.result
    return found
