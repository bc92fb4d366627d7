"""Movements between layouts, their adjoints, and the planner that chains them.

`ADJOINTS` is the one table of what a movement does forward and what its gradient does backward. It
follows from value and cotangent states per mesh axis: a sharded value (S) has a sharded cotangent,
a partial one (P) a replicated cotangent, and a replicated one (R) either a replicated cotangent or,
where the consumer shards the axis on something that the value lacks, a partial one: the value is
then called *varying*. (The states are those of Unity's parallel operators, OSDI'22 section 3, with
the replica dimension split by its cotangent.) A wrong row is silent and wrong by a factor, so every
row is gated by a gradient test.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parloom.errors import LayoutError
from parloom.ir.layout import Layout, Shape, Shard, fits, inner_size
from parloom.ir.mesh import Mesh

State = tuple[str, str]  # of one axis: that of the value, that of its cotangent
VARYING: State = ("R", "P")


@dataclass(frozen=True, slots=True)
class Adjoint:
    """One row: the forward and backward primitive, and the states that each leads from and to."""

    forward: str
    backward: str
    value: tuple[str, str]
    cotangent: tuple[str, str]

    @property
    def before(self) -> State:
        """State of a moved axis on the operand; the backward pass arrives here."""
        return self.value[0], self.cotangent[1]

    @property
    def after(self) -> State:
        """State of a moved axis on the result; the backward pass starts here."""
        return self.value[1], self.cotangent[0]


ADJOINTS: dict[str, Adjoint] = {
    "partition": Adjoint("slice", "all_gather", ("R", "S"), ("S", "R")),
    "partition_varying": Adjoint("slice", "pad", ("R", "S"), ("S", "P")),
    "combine": Adjoint("all_gather", "slice", ("S", "R"), ("R", "S")),
    "combine_varying": Adjoint("all_gather", "reduce_scatter", ("S", "R"), ("P", "S")),
    "reduce": Adjoint("all_reduce", "identity", ("P", "R"), ("R", "R")),
    "reduce_varying": Adjoint("all_reduce", "all_reduce", ("P", "R"), ("P", "R")),
    "reduce_scatter": Adjoint("reduce_scatter", "all_gather", ("P", "S"), ("S", "R")),
    "replicate": Adjoint("identity", "all_reduce", ("R", "R"), ("P", "R")),
    "elect": Adjoint("identity", "keep_first", ("R", "R"), ("R", "P")),
    "mask": Adjoint("keep_first", "identity", ("R", "P"), ("R", "R")),
    "mask_varying": Adjoint("keep_first", "keep_first", ("R", "P"), ("R", "P")),
    "pad": Adjoint("pad", "slice", ("S", "P"), ("R", "S")),
    "all_to_all": Adjoint("all_to_all", "all_to_all", ("S", "S"), ("S", "S")),
    "halo_exchange": Adjoint("halo_exchange", "halo_add", ("S", "S"), ("S", "S")),
}


def state(layout: Layout, axis: str, varying: Iterable[str]) -> State:
    """State of `axis` under `layout`, where the cotangents of the axes `varying` are partial."""
    if axis in layout.partial_axes:
        return "P", "R"
    if layout.shard(axis) is not None:
        return "S", "S"
    return VARYING if axis in varying else ("R", "R")


@dataclass(frozen=True, slots=True)
class Step:
    """One movement: a row of `ADJOINTS` over `axes` (first most significant).

    `dim` and `inner` place the digit on local tensors (`inner` = local elements to its right);
    `split` is the (dim, inner) of the digit that an all_to_all cuts off; `halo` the rows taken from
    the lower and upper neighbor; `result` the layout after the step.
    """

    row: str
    axes: tuple[str, ...]
    result: Layout
    dim: int = 0
    inner: int = 1
    split: tuple[int, int] = (0, 1)
    reduction: str = "sum"
    halo: tuple[int, int] = (0, 0)

    def varying(self, before: Iterable[str]) -> frozenset[str]:
        """The axes that vary after the step, where `before` did."""
        rest = frozenset(before) - set(self.axes)
        return rest.union(self.axes) if ADJOINTS[self.row].after == VARYING else rest


def plan_moves(
    source: Layout,
    target: Layout,
    shape: Shape,
    mesh: Mesh,
    *,
    source_varying: Iterable[str] = (),
    target_varying: Iterable[str] = (),
    differentiable: bool = True,
) -> tuple[Step, ...]:
    """The movements that turn `source` into `target` for a tensor of global `shape`.

    Volume shrinks first and grows last: slices, reduce_scatters and all_to_alls before reductions,
    gathers at the end, and behind them what is made partial. `*_varying` name the replicated axes
    whose cotangent is partial on either side. Raises `LayoutError` where the target asks for parts
    of a sum over microbatches, or of a maximum or minimum, that the source has not.
    """
    if not differentiable:
        source_varying = target_varying = ()
    return _Planner(source, target, shape, mesh, source_varying, target_varying).run()


class _Planner:
    """The state of one chain: the layout reached so far and which replicated axes vary."""

    def __init__(
        self,
        source: Layout,
        target: Layout,
        shape: Shape,
        mesh: Mesh,
        varying: Iterable[str],
        target_varying: Iterable[str],
    ) -> None:
        self.layout, self.target, self.shape, self.mesh = source, target, shape, mesh
        self.varying, self.target_varying = frozenset(varying), frozenset(target_varying)
        self.steps: list[Step] = []
        for axis, reduction in target.partial:
            there = (axis, reduction) in source.partial
            if not there and (reduction != "sum" or mesh[axis].steps):
                raise LayoutError(
                    f"a value that is whole over {axis!r} is no part of a {reduction} over it"
                )

    def run(self) -> tuple[Step, ...]:
        plans = self._shrink, self._reduce, self._replicate, self._gather, self._make_partial
        while any(plan() for plan in plans):
            pass
        return tuple(self.steps)

    def _misplaced(self, axis: str) -> bool:
        return self.layout.shard(axis) not in (None, self.target.shard(axis))

    def _emit(
        self, forward: str, axes: tuple[str, ...], layout: Layout, *, vary: bool = False,
        **place: Any,
    ) -> bool:  # fmt: skip
        """Append the row whose primitive is `forward` between the states of `axes`.

        `vary`: the axes vary afterwards, where they are replicated then.
        """
        before = state(self.layout, axes[0], self.varying)
        after = state(layout, axes[0], axes if vary else ())
        wanted = (forward, before, after)
        rows = [n for n, r in ADJOINTS.items() if (r.forward, r.before, r.after) == wanted]
        if not rows:
            raise LayoutError(
                f"no movement takes axis {axes[0]!r} from {before} to {after} by {forward}"
            )
        step = Step(rows[0], axes, layout, **place)
        self.steps.append(step)
        self.layout, self.varying = layout, step.varying(self.varying)
        return True

    def _shrink(self) -> bool:
        """One slice, reduce_scatter or all_to_all whose target digit is local now."""
        partial = self.layout.partial_axes
        for want in self.target.shards:
            if self.layout.shard(want.axis) == want or not self._fits(want):
                continue
            inner = inner_size(self.layout, want.dim, want.stride, self.mesh)
            have = self.layout.shard(want.axis)
            if have is not None:
                rest = self.layout.without((want.axis,))
                between = rest.place(want)
                gather = (have.dim, self._intermediate(rest, have, want))
                split = (want.dim, self._intermediate(rest, want, have))
                return self._emit(
                    "all_to_all", (want.axis,), between, dim=gather[0], inner=gather[1], split=split
                )
            place: dict[str, Any] = {"dim": want.dim, "inner": inner}
            if want.axis in partial:
                if dict(self.layout.partial)[want.axis] != "sum":
                    continue
                return self._emit("reduce_scatter", (want.axis,), self.layout.place(want), **place)
            return self._emit("slice", (want.axis,), self.layout.place(want), **place)
        return False

    def _fits(self, want: Shard) -> bool:
        return fits(self.layout, want, self.shape, self.mesh)

    def _intermediate(self, rest: Layout, shard: Shard, other: Shard) -> int:
        """Local elements right of `shard`'s digit where neither it nor `other`'s digit is local."""
        inner = inner_size(rest, shard.dim, shard.stride, self.mesh)
        if other.dim == shard.dim and other.stride < shard.stride:
            inner //= self.mesh[other.axis].size
        return inner

    def _reduce(self) -> bool:
        """All remaining reductions of one kind whose target is not a shard, in one all_reduce."""
        gathers_left = any(self._misplaced(s.axis) for s in self.layout.shards)
        wanted = []
        for axis, reduction in self.layout.partial:
            if (axis, reduction) in self.target.partial:
                continue
            scattered = self.target.shard(axis) is not None and reduction == "sum"
            if not (scattered and gathers_left):
                wanted.append((axis, reduction, axis in self.target_varying))
        if not wanted:
            return False
        _, reduction, varying = wanted[0]
        axes = tuple(a for a, r, v in wanted if (r, v) == (reduction, varying))
        axes = tuple(a for a in self.mesh.names if a in axes)
        left = self.layout.without(axes)
        return self._emit("all_reduce", axes, left, vary=varying, reduction=reduction)

    def _replicate(self) -> bool:
        """Adapt the cotangents of axes that are replicated on both sides."""
        whole = [
            a
            for a in self.mesh.names
            if self.layout.shard(a) is None and self.target.shard(a) is None
            and a not in (*self.layout.partial_axes, *self.target.partial_axes)
        ]  # fmt: skip
        wrong = [a for a in whole if (a in self.varying) != (a in self.target_varying)]
        if not wrong:
            return False
        vary = any(a in self.target_varying for a in wrong)
        axes = tuple(a for a in wrong if (a in self.target_varying) == vary)
        return self._emit("identity", axes, self.layout, vary=vary)

    def _gather(self) -> bool:
        """Gather one misplaced shard, with the adjacent outer ones that are misplaced alike."""
        summed = self.target.partial_axes
        wrong = [s for s in self.layout.shards if self._misplaced(s.axis) and s.axis not in summed]
        if not wrong:
            return False
        last = wrong[-1]
        varying = last.axis in self.target_varying
        run = [last]
        for shard in reversed(wrong[:-1]):
            unit = run[0].stride * self.mesh[run[0].axis].size
            if (shard.dim, shard.stride) != (last.dim, unit):
                break
            if (shard.axis in self.target_varying) != varying:
                break
            run.insert(0, shard)
        axes = tuple(s.axis for s in run)
        return self._emit(
            "all_gather",
            axes,
            self.layout.without(axes),
            vary=varying,
            dim=last.dim,
            inner=inner_size(self.layout, last.dim, last.stride, self.mesh),
        )

    def _make_partial(self) -> bool:
        """Make a value a partial sum over one axis: its shard between zeros, or what is whole on
        the first rank alone.
        """
        left = [a for a in self.target.partial_axes if a not in self.layout.partial_axes]
        if not left:
            return False
        axis, have = left[0], self.layout.shard(left[0])
        rest = self.layout.without((axis,))
        partial = Layout(rest.shards, (*rest.partial, (axis, "sum")))
        if have is None:
            return self._emit("keep_first", (axis,), partial)
        inner = inner_size(self.layout, have.dim, have.stride, self.mesh)
        return self._emit("pad", (axis,), partial, dim=have.dim, inner=inner)
