"""Movements on simulated ranks: every rank's local tensor is a numpy array in one process."""

import itertools
from math import prod

import numpy as np
import numpy.typing as npt

from parloom.ir.layout import Layout, Shape, digits
from parloom.ir.mesh import Mesh
from parloom.ir.moves import Step

Array = npt.NDArray[np.int64]
Coordinates = tuple[int, ...]
Shards = dict[Coordinates, Array]


def all_coordinates(mesh: Mesh) -> list[Coordinates]:
    return list(itertools.product(*(range(axis.size) for axis in mesh.axes)))


def take(full: Array, layout: Layout, mesh: Mesh, at: Coordinates) -> Array:
    """One rank's shard, by indexing each dim's digits: the dense oracle."""
    for dim in range(full.ndim):
        parts = digits(layout, dim, full.shape[dim], mesh)
        sizes = [mesh[d].size if isinstance(d, str) else d for d in parts]
        index: list[slice | int] = [
            at[mesh.names.index(d)] if isinstance(d, str) else slice(None) for d in parts
        ]
        shape = full.shape
        full = full.reshape((*shape[:dim], *sizes, *shape[dim + 1 :]))
        full = full[(slice(None),) * dim + tuple(index)]
        full = full.reshape((*shape[:dim], -1, *shape[dim + 1 :]))
    return full


def scatter(full: Array, layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Shards:
    """Shards of `full` on all ranks; partial axes get random addends (or extremes) of it."""
    shards = {}
    splits: dict[tuple[str, int], Array] = {}
    for at in all_coordinates(mesh):
        value = full
        for axis, reduction in layout.partial:
            last = mesh[axis].size - 1
            here = at[mesh.names.index(axis)]
            rest = tuple(
                c
                for n, c in zip(mesh.names, at, strict=True)
                if n in layout.partial_axes and n < axis
            )
            noise = [
                splits.setdefault((f"{axis}{rest}", i), rng.integers(1, 50, full.shape))
                for i in range(last)
            ]
            if reduction == "sum":
                value = noise[here] if here < last else value - sum(noise)
            elif here < last:
                value = value - noise[here] if reduction == "max" else value + noise[here]
        shards[at] = take(value, layout, mesh, at)
    return shards


def group(mesh: Mesh, axes: tuple[str, ...], at: Coordinates) -> list[Coordinates]:
    """The ranks that differ from `at` along `axes` only, in group order."""
    members = []
    for index in itertools.product(*(range(mesh[a].size) for a in axes)):
        other = list(at)
        for axis, i in zip(axes, index, strict=True):
            other[mesh.names.index(axis)] = i
        members.append(tuple(other))
    return members


def split_digit(x: Array, dim: int, inner: int, size: int) -> Array:
    """`x` with the digit of `size` at (dim, inner) moved to the front."""
    shape = x.shape
    x = x.reshape(*shape[:dim], shape[dim] // size // inner, size, inner, *shape[dim + 1 :])
    x = np.moveaxis(x, dim + 1, 0)
    return x.reshape(size, *shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def merge_digit(stack: Array, dim: int, inner: int) -> Array:
    """The inverse of `split_digit`."""
    size, shape = stack.shape[0], stack.shape[1:]
    x = stack.reshape(size, *shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
    x = np.moveaxis(x, 0, dim + 1)
    return x.reshape(*shape[:dim], shape[dim] * size, *shape[dim + 1 :])


def apply(step: Step, forward: str, shards: Shards, mesh: Mesh) -> Shards:
    """All ranks' values after the primitive `forward` of one step."""
    size = prod(mesh[a].size for a in step.axes)
    fold = {"sum": np.add, "max": np.maximum, "min": np.minimum}[step.reduction].reduce
    result = {}
    for at, mine in shards.items():
        members = group(mesh, step.axes, at)
        here = members.index(at)
        values = [shards[m] for m in members]
        if forward == "identity":
            result[at] = mine
        elif forward == "all_reduce":
            result[at] = fold(values)
        elif forward == "slice":
            result[at] = split_digit(mine, step.dim, step.inner, size)[here]
        elif forward == "reduce_scatter":
            result[at] = split_digit(fold(values), step.dim, step.inner, size)[here]
        elif forward == "all_gather":
            result[at] = merge_digit(np.stack(values), step.dim, step.inner)
        elif forward == "keep_first":
            result[at] = mine if here == 0 else np.zeros_like(mine)
        elif forward == "pad":
            stack = np.zeros((size, *mine.shape), mine.dtype)
            stack[here] = mine
            result[at] = merge_digit(stack, step.dim, step.inner)
        else:
            assert forward == "all_to_all"
            got = [split_digit(v, *step.split, size)[here] for v in values]
            result[at] = merge_digit(np.stack(got), step.dim, step.inner)
    return result


def shape_of(values: Array) -> Shape:
    return tuple(values.shape)
