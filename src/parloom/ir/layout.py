"""Layouts: how the index space of a tensor is spread over mesh axes.

A tensor dim is a product of factors, and mesh axes attach to factors. Written out, an index along
a dim is a mixed-radix number; an axis that shards the dim *is* one of its digits. A `Shard` names
that digit by its stride: along `dim`, rank coordinate = index // stride % axis size. Digits that no
axis owns are local. This form is unique (no canonicalization), survives views (which only regroup
digits), and says `3 . heads . head_dim` sharded on heads as naturally as a contiguous chunk.

An axis that a layout does not name is replicated. `partial` holds axes over which the true value is
the sum, max or min of the ranks' values.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from parloom.errors import LayoutError
from parloom.ir.mesh import Mesh

Shape = tuple[int, ...]
REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Shard:
    """Mesh axis `axis` owns the digit of tensor dim `dim` whose unit is `stride` elements."""

    axis: str
    dim: int
    stride: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Shards sorted by (dim, outermost first) and `(axis, reduction)` pairs sorted by axis.

    Raises `LayoutError` where an axis is used twice.
    """

    shards: tuple[Shard, ...] = ()
    partial: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(self.shards) + len(self.partial) < 2:  # most are: in order, and no axis twice
            return
        object.__setattr__(
            self, "shards", tuple(sorted(self.shards, key=lambda s: (s.dim, -s.stride)))
        )
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        axes = [s.axis for s in self.shards] + [axis for axis, _ in self.partial]
        if len(set(axes)) != len(axes):
            raise LayoutError(f"a layout uses a mesh axis twice: {axes}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that shard some dim, in storage order."""
        return tuple(s.axis for s in self.shards)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.partial)

    def shard(self, axis: str) -> Shard | None:
        """The shard that `axis` makes, or None."""
        return next((s for s in self.shards if s.axis == axis), None)

    def of_dim(self, dim: int) -> tuple[Shard, ...]:
        """The shards of one dim, outermost first."""
        return tuple(s for s in self.shards if s.dim == dim)

    def place(self, *shards: Shard) -> "Layout":
        """This layout with more shards; their axes stop being partial."""
        added = {s.axis for s in shards}
        partial = tuple(p for p in self.partial if p[0] not in added)
        return Layout((*self.shards, *shards), partial)

    def without(self, axes: Iterable[str]) -> "Layout":
        """This layout with `axes` replicated."""
        gone = set(axes)
        return Layout(
            tuple(s for s in self.shards if s.axis not in gone),
            tuple(p for p in self.partial if p[0] not in gone),
        )


REPLICATED = Layout()


def inner_size(layout: Layout, dim: int, stride: int, mesh: Mesh) -> int:
    """Local elements to the right of the digit of unit `stride` in `dim`."""
    return stride // prod(mesh[s.axis].size for s in layout.of_dim(dim) if s.stride < stride)


def fits(layout: Layout, shard: Shard, shape: Shape, mesh: Mesh) -> bool:
    """Whether the digit of `shard` is wholly local in `layout` (and divides the dim)."""
    low, high = shard.stride, shard.stride * mesh[shard.axis].size
    gap_low, gap_high = 1, shape[shard.dim]
    for other in layout.of_dim(shard.dim):
        other_low, other_high = other.stride, other.stride * mesh[other.axis].size
        if other_low >= high:
            gap_high = min(gap_high, other_low)
        elif other_high <= low:
            gap_low = max(gap_low, other_high)
        else:
            return False
    return low % gap_low == 0 and gap_high % high == 0


def check(layout: Layout, shape: Shape, mesh: Mesh, where: str = "") -> None:
    """Raise `LayoutError` unless every shard's digit divides its dim and no two overlap."""
    done = Layout()
    for shard in layout.shards:
        suffix = f" ({where})" if where else ""
        if not 0 <= shard.dim < len(shape):
            raise LayoutError(f"no dim {shard.dim} in a tensor of shape {shape}{suffix}")
        if not fits(done, shard, shape, mesh):
            size = mesh[shard.axis].size
            raise LayoutError(
                f"dim {shard.dim} of {shape} does not divide by axis {shard.axis!r} of size {size}"
                f" at stride {shard.stride}{suffix}; use another factor or a smaller axis"
            )
        done = done.place(shard)
    for axis, reduction in layout.partial:
        if reduction not in REDUCTIONS or axis not in mesh.names:
            raise LayoutError(f"bad partial {axis!r}: {reduction!r}")


def spread(layout: Layout, shape: Shape, mesh: Mesh) -> Layout:
    """`layout` with the axes that replicate it on contiguous parts of some dim, the last one first,
    as far as they divide: the ranks of a group then hold no part twice.
    """
    for axis in mesh.axes:
        if axis.size == 1 or axis.steps or axis.name in (*layout.axes, *layout.partial_axes):
            continue
        for dim in reversed(range(len(shape))):
            inner = min((s.stride for s in layout.of_dim(dim)), default=shape[dim])
            if inner and inner % axis.size == 0:
                layout = layout.place(Shard(axis.name, dim, inner // axis.size))
                break
    return layout


def local_shape(layout: Layout, shape: Shape, mesh: Mesh) -> Shape:
    """The shape of one rank's shard (all ranks' are equal)."""
    if not layout.shards:
        return shape
    sizes = list(shape)
    for shard in layout.shards:
        sizes[shard.dim] //= mesh[shard.axis].size
    return tuple(sizes)


Digit = int | str


def digits(layout: Layout, dim: int, size: int, mesh: Mesh) -> tuple[Digit, ...]:
    """The mixed-radix digits of a dim, outermost first: an axis name, or a local size > 1."""
    result: list[Digit] = []
    high = size
    # An axis of size 1 has the stride of the one that it lies in.
    for shard in sorted(layout.of_dim(dim), key=lambda s: (-s.stride, -mesh[s.axis].size)):
        unit = shard.stride * mesh[shard.axis].size
        if high > unit:
            result.append(high // unit)
        result.append(shard.axis)
        high = shard.stride
    if high != 1:  # zero, too
        result.append(high)
    return tuple(result)


def describe(layout: Layout, shape: Shape, mesh: Mesh) -> str:
    """`[64/x, 3·16/y·24] partial(z)`: per dim its factors, `/` naming the axes of a factor."""
    dims = []
    for dim, size in enumerate(shape):
        parts: list[str] = []
        for digit in digits(layout, dim, size, mesh):
            if isinstance(digit, str):
                parts.append(f"{mesh[digit].size}/{digit}")
            else:
                parts.append(str(digit))
        dims.append("·".join(parts) or "1")
    text = "[" + ", ".join(dims) + "]"
    for axis, reduction in layout.partial:
        text += f" partial({axis}{'' if reduction == 'sum' else ', ' + reduction})"
    return text
