"""The digit form of layouts: from full tensors to shards and back.

The digits of a dim, outermost first, multiply to its size. A digit is the name of the mesh axis
that owns it (its value is the rank's coordinate) or the size of a local one. So a shard is the full
tensor viewed with one dim per digit, indexed at the coordinates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.runtime.comm import Comm
from parloom.runtime.context import Context
from parloom.runtime.mesh import Mesh

Digit = int | str
Dims = tuple[tuple[Digit, ...], ...]
Run = tuple[int, int, int]


def axes_of(dims: Dims) -> tuple[str, ...]:
    """The axes that own digits, in order of appearance."""
    return tuple(digit for digits in dims for digit in digits if isinstance(digit, str))


def global_shape(dims: Dims, mesh: Mesh) -> tuple[int, ...]:
    """The full tensor's shape."""
    # Here and below lists, where generators would do: torch.compile traces `prod` of lists only.
    return tuple([prod([_size(digit, mesh) for digit in digits]) for digits in dims])


def local_shape(dims: Dims) -> tuple[int, ...]:
    """The shape of a shard."""
    return tuple([prod([d for d in digits if isinstance(d, int)]) for digits in dims])


def whole(shape: tuple[int, ...]) -> Dims:
    """Digits of a tensor that no axis shards."""
    return tuple((size,) for size in shape)


def without(dims: Dims, axes: tuple[str, ...]) -> Dims:
    """The digits with those of `axes` cut out: a shard seen as a tensor to be sharded further."""
    return tuple(tuple(d for d in digits if d not in axes) for digits in dims)


def _size(digit: Digit, mesh: Mesh) -> int:
    return digit if isinstance(digit, int) else mesh[digit].size


def _shard_view(full: Tensor, dims: Dims, mesh: Mesh, coordinates: Mapping[str, int]) -> Tensor:
    """A view of `full` with one dim per local digit."""
    digits = [digit for of_dim in dims for digit in of_dim]
    if len(full.shape) != len(dims) or tuple(full.shape) != global_shape(dims, mesh):
        raise InputError(
            f"a tensor of shape {tuple(full.shape)} does not have the digits {dims} of shape"
            f" {global_shape(dims, mesh)}"
        )
    view = full.view([_size(digit, mesh) for digit in digits])
    return view[tuple(coordinates[d] if isinstance(d, str) else slice(None) for d in digits)]


def take(full: Tensor, dims: Dims, mesh: Mesh, coordinates: Mapping[str, int]) -> Tensor:
    """The shard of `full` at `coordinates`; a view where that is possible."""
    if not axes_of(dims):
        return full
    return _shard_view(full, dims, mesh, coordinates).reshape(local_shape(dims))


def put(
    full: Tensor, local: Tensor, dims: Dims, mesh: Mesh, coordinates: Mapping[str, int]
) -> None:
    """Write the shard at `coordinates` into `full`."""
    view = _shard_view(full, dims, mesh, coordinates)
    view.copy_(local.reshape(view.shape))


def untake(local: Tensor, dims: Dims, comm: Comm) -> Tensor:
    """The full tensor from every rank's shard; `dims` have no axis in time."""
    axes, mesh = axes_of(dims), comm.mesh
    if not axes:
        return local
    group = comm.group(axes)
    stacked = local.new_empty(group.size, *local.shape)
    group.all_gather(stacked, local.contiguous()).wait()
    full = local.new_empty(global_shape(dims, mesh))
    for shard, rank in zip(stacked, mesh.group(axes, comm.rank), strict=True):
        put(full, shard, dims, mesh, mesh.coordinates(rank))
    return full


def indices(ctx: Context, digits: tuple[Digit, ...]) -> Tensor:
    """Global index of every local position along a dim of these digits, as int64 [local size]."""
    if torch.compiler.is_compiling():
        return _indices(ctx, digits)
    key = (digits, ctx.microbatch if ctx.mesh.time in digits else 0)
    if key not in ctx.cached_indices:
        ctx.cached_indices[key] = _indices(ctx, digits)
    return ctx.cached_indices[key]


def _indices(ctx: Context, digits: tuple[Digit, ...]) -> Tensor:
    everything = torch.arange(prod([_size(d, ctx.mesh) for d in digits]), device=ctx.device)
    return take(everything, (digits,), ctx.mesh, ctx.coordinates).contiguous()


# Boxes.


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous box of the full tensor, and where it lies in the local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    @property
    def local(self) -> tuple[slice, ...]:
        """Index of the box in the local tensor."""
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.local_offsets, self.sizes, strict=True)
        )

    @property
    def whole(self) -> tuple[slice, ...]:
        """Index of the box in the full tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)
        )


def boxes(
    dims: Dims,
    mesh: Mesh,
    coordinates: Mapping[str, int],
    chunk_dim: int = 0,
    chunk_range: tuple[int, int] | None = None,
    valid: tuple[int, ...] | None = None,
) -> tuple[Box, ...]:
    """The contiguous boxes that a rank holds, in storage order.

    `chunk_range` keeps rows [start, stop) of the shard along `chunk_dim`, and local offsets count
    from there. What lies beyond `valid` in the full tensor is left out.
    """
    per_dim: list[list[Run]] = []
    for dim, digits in enumerate(dims):
        runs = _runs(digits, mesh, coordinates)
        if chunk_range is not None and dim == chunk_dim:
            runs = _within(runs, *chunk_range)
        if valid is not None:
            runs = [(at, min(size, valid[dim] - at), here) for at, size, here in runs]
        per_dim.append([run for run in runs if run[1] > 0])
    return tuple(
        Box(tuple(r[0] for r in runs), tuple(r[1] for r in runs), tuple(r[2] for r in runs))
        for runs in product(*per_dim)
    )


def _runs(digits: tuple[Digit, ...], mesh: Mesh, coordinates: Mapping[str, int]) -> list[Run]:
    """(global offset, length, local offset) of each contiguous run of a dim."""
    inner = 1
    for position in reversed(range(len(digits))):
        digit = digits[position]
        if isinstance(digit, str):
            break
        inner *= digit
    else:
        return [(0, inner, 0)]
    starts, stride = [0], inner
    for digit in reversed(digits[: position + 1]):
        size = _size(digit, mesh)
        values = [coordinates[digit]] if isinstance(digit, str) else list(range(size))
        starts = [value * stride + start for value in values for start in starts]
        stride *= size
    return [(start, inner, index * inner) for index, start in enumerate(starts)]


def _within(runs: list[Run], first: int, last: int) -> list[Run]:
    """The runs cut to local rows [first, last), which become rows [0, last - first)."""
    kept: list[Run] = []
    for offset, length, local in runs:
        start, stop = max(local, first), min(local + length, last)
        kept.append((offset + start - local, stop - start, start - first))
    return kept
