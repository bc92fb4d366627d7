"""Prices of redistributions: from every state in which a value is made to every one that reads it.

`ir.moves` plans the chain of movements of one redistribution. Here its rules are followed for all
pairs of states of all tensors of a mesh at once, on arrays, one movement of each chain at a time.
Tests hold both equal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from parloom.ir.graph import TensorSpec
from parloom.ir.layout import REDUCTIONS
from parloom.ir.mesh import Mesh
from parloom.ir.moves import ADJOINTS, VARYING
from parloom.search.prices import PARTS, Prices
from parloom.search.program import State

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Of one axis: the value is whole on each rank, partial or split.
WHOLE, PARTIAL, SPLIT = range(3)
SUM = REDUCTIONS.index("sum")
# Indices of rows of `ADJOINTS`, and which of them leave their axes varying.
ROWS: Mapping[str, int] = MappingProxyType({name: i for i, name in enumerate(ADJOINTS)})
VARIES = np.array([row.after == VARYING for row in ADJOINTS.values()])
KINDS = np.array(["RPS".index(row.after[0]) for row in ADJOINTS.values()])
# Pairs whose chains are followed at once: arrays of some megabytes each.
AT_ONCE = 200_000
DIM = np.int64(1) << 40  # above every stride


@dataclass(frozen=True, slots=True)
class Transitions:
    """A tensor and the states that it may be in before and after; `flows`: gradients come back."""

    spec: TensorSpec
    flows: bool
    sources: tuple[State, ...]
    targets: tuple[State, ...]

    def __len__(self) -> int:
        return len(self.sources) * len(self.targets)


@dataclass(frozen=True, slots=True)
class Redistribution:
    """Prices (`search.prices`) from each source to each target: `parts[:, source, target]`.

    `legal` is False where no chain of movements leads there.
    """

    transitions: Transitions
    parts: Ints
    legal: Bools


def redistributions(prices: Prices, asked: Sequence[Transitions]) -> tuple[Redistribution, ...]:
    """The prices of all that is `asked` on the mesh of `prices`."""
    return tuple(found for some in _batches(asked) for found in _together(prices, some))


def _batches(asked: Sequence[Transitions]) -> Iterator[Sequence[Transitions]]:
    start, pairs = 0, 0
    for index, one in enumerate(asked):
        if pairs and pairs + len(one) > AT_ONCE:
            yield asked[start:index]
            start, pairs = index, 0
        pairs += len(one)
    if asked:
        yield asked[start:]


def _together(prices: Prices, asked: Sequence[Transitions]) -> Iterator[Redistribution]:
    chains = _Chains(prices.mesh, asked)
    parts = _priced(prices, chains.moved(), chains.flows)
    start = 0
    for one in asked:
        shape = len(one.sources), len(one.targets)
        mine = slice(start, start + len(one))
        start += len(one)
        yield Redistribution(
            one,
            np.ascontiguousarray(parts[mine].T).reshape(PARTS, *shape),
            chains.legal[mine].reshape(shape),
        )


@dataclass(frozen=True, slots=True)
class _States:
    """States axis by axis, each array [pair, axis]: `dim` and `stride` of the digit where the axis
    splits, `reduction` where the value is partial, whether the cotangent of a whole value is.
    """

    kind: Ints
    dim: Ints
    stride: Ints
    reduction: Ints
    varies: Bools

    @classmethod
    def of(cls, codes: Ints) -> "_States":
        """From codes [pair, axis, field]."""
        kind, dim, stride, reduction, varies = (codes[..., i].copy() for i in range(5))
        return cls(kind, dim, stride, reduction, varies.astype(bool))

    def take(self, pairs: Ints) -> "_States":
        """Those of some pairs."""
        return _States(
            self.kind[pairs], self.dim[pairs], self.stride[pairs], self.reduction[pairs],
            self.varies[pairs],
        )  # fmt: skip

    def place(self) -> Ints:
        """What shards are ordered by, outermost first: [pair, axis]; others last."""
        return np.where(self.kind == SPLIT, self.dim * DIM - self.stride, np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class _Movements:
    """One movement for each of some pairs: its row, the axes moved (as bits), and the bytes of one
    rank's shard before and after.
    """

    pair: Ints
    row: Ints
    axes: Ints
    before: Ints
    after: Ints


class _Codes:
    """States as rows of numbers, each state once."""

    def __init__(self, mesh: Mesh) -> None:
        self.position = {name: i for i, name in enumerate(mesh.names)}
        self.known: dict[tuple[State, bool], Ints] = {}

    def of(self, states: Iterable[State], flows: bool) -> Ints:
        """Codes of states: [state, axis, field]."""
        return np.stack([self._one(state, flows) for state in states])

    def _one(self, state: State, flows: bool) -> Ints:
        key = state, flows
        if key not in self.known:
            code = np.zeros((len(self.position), 5), dtype=np.int64)
            for shard in state.layout.shards:
                code[self.position[shard.axis], :3] = SPLIT, shard.dim, shard.stride
            for axis, reduction in state.layout.partial:
                code[self.position[axis], 0] = PARTIAL
                code[self.position[axis], 3] = REDUCTIONS.index(reduction)
            for axis in state.varying if flows else ():
                code[self.position[axis], 4] = 1
            self.known[key] = code
        return self.known[key]


class _Chains:
    """The chains of movements of all pairs of `asked`, followed as `ir.moves` plans them."""

    def __init__(self, mesh: Mesh, asked: Sequence[Transitions]) -> None:
        self.sizes = np.array([axis.size for axis in mesh.axes], dtype=np.int64)
        self.by_name = np.array(sorted(range(len(mesh.names)), key=mesh.names.__getitem__))
        codes = _Codes(mesh)
        dims = max([1, *(len(one.spec.shape) for one in asked)])
        ends, shapes = [], []
        for one in asked:
            both = (codes.of(some, one.flows) for some in (one.sources, one.targets))
            index = np.indices((len(one.sources), len(one.targets))).reshape(2, -1)
            ends.append([states[i] for states, i in zip(both, index, strict=True)])
            shape = (*one.spec.shape, *[1] * (dims - len(one.spec.shape)))
            shapes.append(np.broadcast_to(np.array(shape, dtype=np.int64), (len(one), dims)))
        lengths = [len(one) for one in asked]
        whole = np.repeat([one.spec.num_bytes for one in asked], lengths)
        self.flows = np.repeat([one.flows for one in asked], lengths)
        # Scalars are not counted: see `prices`.
        self.counts = np.repeat([bool(one.spec.shape) for one in asked], lengths)
        self.now, self.target = (_States.of(np.concatenate(end)) for end in zip(*ends, strict=True))
        self.shape = np.concatenate(shapes)
        now, target = self.now, self.target
        stays = (now.kind == PARTIAL) & (now.reduction == target.reduction)
        summed = stays | (target.reduction == SUM)
        self.legal = ~((target.kind == PARTIAL) & ~summed).any(axis=1)
        self.bytes = whole // np.where(now.kind == SPLIT, self.sizes, 1).prod(axis=1)

    def moved(self) -> Iterator[_Movements]:
        """The next movement of every chain that is not at its end, again and again."""
        left = np.flatnonzero(self.legal & self.counts)
        while True:
            step = _Step(self, left)
            for plan in (step.shrink, step.reduce, step.replicate, step.gather, step.make_partial):
                plan()
            left = left[step.row >= 0]
            if not len(left):
                return
            yield self._move(left, step)

    def _move(self, pairs: Ints, step: "_Step") -> _Movements:
        """Make one movement of each of `pairs`."""
        moves = step.row >= 0
        row, moved, after = step.row[moves], step.moved[moves], step.after[moves]
        before = self.bytes[pairs]
        shrinks = moved & step.places[moves][:, None]
        now, target = self.now, self.target
        kinds = KINDS[row][:, None]
        now.kind[pairs] = np.where(moved, kinds, now.kind[pairs])
        now.reduction[pairs] = np.where(moved & (kinds == PARTIAL), SUM, now.reduction[pairs])
        now.dim[pairs] = np.where(shrinks, target.dim[pairs], now.dim[pairs])
        now.stride[pairs] = np.where(shrinks, target.stride[pairs], now.stride[pairs])
        now.varies[pairs] = np.where(moved, VARIES[row][:, None], now.varies[pairs])
        self.bytes[pairs] = after
        axes = moved @ (1 << np.arange(len(self.sizes)))
        return _Movements(pairs, row, axes, before, after)


class _Step:
    """The next movement of some chains: `row` is -1 where none was found yet.

    Each method decides for chains of which those before it left open, as `ir.moves._Planner` does.
    """

    def __init__(self, chains: _Chains, pairs: Ints) -> None:
        self.sizes, self.by_name = chains.sizes, chains.by_name
        self.now, self.target = chains.now.take(pairs), chains.target.take(pairs)
        self.shape, self.before = chains.shape[pairs], chains.bytes[pairs]
        self.every = np.arange(len(pairs))
        self.row = np.full(len(pairs), -1)
        self.moved = np.zeros((len(pairs), len(self.sizes)), dtype=bool)
        self.places = np.zeros(len(pairs), dtype=bool)  # where the axis gets its digit
        self.after = self.before.copy()
        now, target = self.now, self.target
        there = (now.dim == target.dim) & (now.stride == target.stride) & (target.kind == SPLIT)
        self.misplaced = (now.kind == SPLIT) & ~there

    @property
    def open(self) -> Bools:
        """The chains without a movement."""
        return self.row < 0

    def shrink(self) -> None:
        """One slice, reduce_scatter or all_to_all whose target digit is local now."""
        now, target = self.now, self.target
        wanted = (target.kind == SPLIT) & ((now.kind != SPLIT) | self.misplaced)
        wanted &= (now.kind != PARTIAL) | (now.reduction == SUM)
        for axis in np.argsort(target.place(), axis=1, kind="stable").T:
            (chains,) = np.nonzero(self.open & wanted[self.every, axis])
            chains = chains[self._fits(chains, axis[chains])]
            mine = chains, axis[chains]
            split, partial = now.kind[mine] == SPLIT, now.kind[mine] == PARTIAL
            slices = np.where(now.varies[mine], ROWS["partition_varying"], ROWS["partition"])
            others = np.where(partial, ROWS["reduce_scatter"], slices)
            self.row[chains] = np.where(split, ROWS["all_to_all"], others)
            self.moved[mine] = True
            self.places[chains] = True
            self.after[chains] //= np.where(split, 1, self.sizes[axis[chains]])

    def _fits(self, chains: Ints, axis: Ints) -> Bools:
        """Whether the target digit of one axis of each chain is local (`ir.layout.fits`)."""
        dim, low = self.target.dim[chains, axis], self.target.stride[chains, axis]
        high = low * self.sizes[axis]
        gap_low, gap_high = np.ones_like(low), self.shape[chains, dim]
        free = np.ones(len(chains), dtype=bool)
        for other, size in enumerate(self.sizes):
            on = (self.now.kind[chains, other] == SPLIT) & (self.now.dim[chains, other] == dim)
            other_low = self.now.stride[chains, other]
            other_high = other_low * size
            above, below = on & (other_low >= high), on & (other_high <= low)
            gap_high = np.where(above, np.minimum(gap_high, other_low), gap_high)
            gap_low = np.where(below, np.maximum(gap_low, other_high), gap_low)
            free &= ~on | above | below
        free &= (low % gap_low == 0) & (gap_high % high == 0)
        return free

    def reduce(self) -> None:
        """All reductions of one kind whose target is not a shard, in one all_reduce."""
        now, target = self.now, self.target
        stays = (target.kind == PARTIAL) & (now.reduction == target.reduction)
        scattered = (target.kind == SPLIT) & (now.reduction == SUM)
        scattered &= self.misplaced.any(axis=1)[:, None]
        wanted = (now.kind == PARTIAL) & ~stays & ~scattered & self.open[:, None]
        first = self.every, self.by_name[np.argmax(wanted[:, self.by_name], axis=1)]
        wanted &= now.reduction == now.reduction[first][:, None]
        wanted &= target.varies == target.varies[first][:, None]
        row = np.where(target.varies[first], ROWS["reduce_varying"], ROWS["reduce"])
        self._take(wanted, row)

    def replicate(self) -> None:
        """Adapt the cotangents of axes that are whole on both sides."""
        now, target = self.now, self.target
        wrong = (now.kind == WHOLE) & (target.kind == WHOLE) & (now.varies != target.varies)
        wrong &= self.open[:, None]
        vary = (wrong & target.varies).any(axis=1)
        wrong &= target.varies == vary[:, None]
        self._take(wrong, np.where(vary, ROWS["replicate"], ROWS["elect"]))

    def gather(self) -> None:
        """Gather the innermost misplaced shard, with the adjacent outer ones misplaced alike."""
        now, target = self.now, self.target
        wrong = self.misplaced & (target.kind != PARTIAL) & self.open[:, None]
        place = np.where(wrong, now.place(), -np.inf)
        order = np.argsort(-place, axis=1, kind="stable").T
        last = self.every, order[0]
        unit = now.stride[last] * self.sizes[order[0]]
        run = wrong[last]
        moved = np.zeros_like(wrong)
        moved[last] = run
        for axis in order[1:]:
            mine = self.every, axis
            run = run & wrong[mine] & (now.dim[mine] == now.dim[last]) & (now.stride[mine] == unit)
            run &= target.varies[mine] == target.varies[last]
            moved[mine] |= run
            unit = np.where(run, now.stride[mine] * self.sizes[axis], unit)
        row = np.where(target.varies[last], ROWS["combine_varying"], ROWS["combine"])
        self._take(moved, row)
        self.after *= np.where(moved, self.sizes, 1).prod(axis=1)

    def make_partial(self) -> None:
        """Make one axis partial: its shard between zeros, or what is whole on the first rank."""
        now, target = self.now, self.target
        wanted = (target.kind == PARTIAL) & (now.kind != PARTIAL) & self.open[:, None]
        first = self.every, self.by_name[np.argmax(wanted[:, self.by_name], axis=1)]
        split = now.kind[first] == SPLIT
        masks = np.where(now.varies[first], ROWS["mask_varying"], ROWS["mask"])
        moved = np.zeros_like(wanted)
        moved[first] = wanted[first]
        self._take(moved, np.where(split, ROWS["pad"], masks))
        self.after *= np.where(moved & (now.kind == SPLIT), self.sizes, 1).prod(axis=1)

    def _take(self, moved: Bools, row: Ints) -> None:
        """These axes move by these rows, where any moves."""
        chains = moved.any(axis=1)
        self.row = np.where(chains, row, self.row)
        self.moved |= moved


def _priced(prices: Prices, movements: Iterable[_Movements], flows: Bools) -> Ints:
    """What all movements of each chain cost: [pair, part]."""
    found = np.zeros((len(flows), PARTS), dtype=np.int64)
    rows, names = tuple(ADJOINTS.values()), prices.mesh.names
    for some in movements:
        keys = np.stack([some.row, some.axes, some.before, some.after, flows[some.pair]], axis=1)
        distinct, which = _distinct(keys)
        each = np.zeros((len(distinct), PARTS), dtype=np.int64)
        for index, (row, bits, before, after, back) in enumerate(distinct.tolist()):
            axes = tuple(name for i, name in enumerate(names) if bits >> i & 1)
            each[index] = prices.primitive(rows[row].forward, axes, before, after, backward=False)
            if back:
                each[index] += prices.primitive(
                    rows[row].backward, axes, after, before, backward=True
                )
        found[some.pair] += each[which]
    return found


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The rows without repeats, and which of these each is."""
    order = np.lexsort(rows.T)
    ordered = rows[order]
    fresh = np.ones(len(rows), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(rows), dtype=np.int64)
    which[order] = np.cumsum(fresh) - 1
    return ordered[fresh], which
