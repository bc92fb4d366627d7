"""Which device holds which slice of a tensor, drawn as a small grid."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rich.table import Table

from parloom.ir.layout import Layout, digits
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Storage

# Of a long row the beginning and the last are drawn.
MOST = 8
MOST_RANGES = 2
LEFT_OUT = "…"
Slice = tuple[str, Mapping[str, int]]
"""A slice in words, and the coordinates of the devices that hold it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Slices of the sharded dims down (`rows`) and, of the last of several, across (`columns`);
    `cells` are devices by number.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rows": list(self.rows),
            "columns": list(self.columns),
            "devices": [list(row) for row in self.cells],
        }

    def table(self, margin: str = "    ") -> Table:
        """Ready to print."""
        table = Table(box=None, pad_edge=False, show_header=bool(self.columns))
        table.add_column()
        for column in self.columns or ("",):
            table.add_column(column)
        for row, cells in zip(self.rows, self.cells, strict=True):
            table.add_row(f"{margin}{row}", *cells)
        return table


def grid(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Grid:
    """The grid of a tensor of global `shape`; axes in time are not drawn."""
    layout = layout.without(axis.name for axis in mesh.axes if axis.steps)
    slices = [
        list(_slices(layout, dim, size, mesh))
        for dim, size in enumerate(shape)
        if layout.of_dim(dim)
    ]
    if not slices:
        return Grid(("all of it",), (), ((devices(mesh, {}),),))
    across = slices.pop() if len(slices) > 1 else []
    down = [_joined(parts) for parts in product(*slices)]
    return _drawn(_some(down), _some(across), mesh)


def mesh_grid(mesh: Mesh) -> Grid:
    """All devices by their coordinates: the last axis across, the others down."""
    axes = [axis.name for axis in mesh.axes if not axis.steps]
    if not axes:
        return Grid(("one device",), (), (("0",),))
    sides = [axes[:-1], axes[-1:]] if len(axes) > 1 else [axes, []]
    down, across = (
        [
            (", ".join(f"{a} {i}" for a, i in zip(side, at, strict=True)),
             dict(zip(side, at, strict=True)))
            for at in product(*(range(mesh[a].size) for a in side))
        ]
        for side in sides
    )  # fmt: skip
    return _drawn(_some(down), _some(across) if sides[1] else [], mesh)


def chunks(storage: Storage, length: int, mesh: Mesh) -> Grid:
    """The grid of a dim of `length` elements of the local shard that `storage` cuts into chunks."""
    count = mesh.size(storage.axes)
    size = -(-length // count)
    down: list[Slice] = []
    for coordinates in product(*(range(mesh[a].size) for a in storage.axes)):
        at = dict(zip(storage.axes, coordinates, strict=True))
        low = min(length, len(down) * size)
        down.append((f"{low}:{min(length, low + size)}", at))
    return _drawn(_some(down), [], mesh)


def devices(mesh: Mesh, at: Mapping[str, int]) -> str:
    """The devices with these coordinates: `0-3`, `0,2`, `0,2,.. (16 devices)`."""
    found = sorted(
        device
        for rank, device in enumerate(mesh.devices)
        if all(mesh[axis].coordinate(rank) == index for axis, index in at.items())
    )
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    if len(found) <= MOST // 2:
        return ",".join(map(str, found))
    return f"{found[0]},{found[1]},.. ({len(found)} devices)"


def _slices(layout: Layout, dim: int, size: int, mesh: Mesh) -> Iterator[Slice]:
    """The slices of a dim in the order of their first elements."""
    axes = [shard.axis for shard in layout.of_dim(dim)]
    for coordinates in product(*(range(mesh[a].size) for a in axes)):
        at = dict(zip(axes, coordinates, strict=True))
        yield _ranges(layout, dim, size, mesh, at), at


def _ranges(layout: Layout, dim: int, size: int, mesh: Mesh, at: Mapping[str, int]) -> str:
    """`0:16`, or the first of several ranges."""
    starts, length = [0], size
    parts = list(digits(layout, dim, size, mesh))
    while any(isinstance(part, str) for part in parts):
        part = parts.pop(0)
        if isinstance(part, str):
            length //= mesh[part].size
            starts = [start + at[part] * length for start in starts]
        else:
            length //= part
            starts = [start + i * length for start in starts for i in range(part)]
    shown = [f"{start}:{start + length}" for start in starts[:MOST_RANGES]]
    return " ".join([*shown, LEFT_OUT] if len(starts) > len(shown) else shown)


def _joined(parts: Iterable[Slice]) -> Slice:
    texts: list[str] = []
    at: dict[str, int] = {}
    for text, coordinates in parts:
        texts.append(text)
        at.update(coordinates)
    return ", ".join(texts), at


def _some(slices: Sequence[Slice]) -> list[Slice | None]:
    """Of many the first and the last, with None for those between."""
    if len(slices) <= MOST:
        return [*slices]
    return [*slices[: MOST - 2], None, slices[-1]]


def _drawn(down: Sequence[Slice | None], across: Sequence[Slice | None], mesh: Mesh) -> Grid:
    cells = tuple(
        tuple(
            LEFT_OUT if row is None or column is None else devices(mesh, {**row[1], **column[1]})
            for column in across or [("", {})]
        )
        for row in down
    )
    return Grid(_texts(down), _texts(across), cells)


def _texts(slices: Sequence[Slice | None]) -> tuple[str, ...]:
    return tuple(LEFT_OUT if found is None else found[0] for found in slices)
