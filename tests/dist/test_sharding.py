"""The digit form: shards, full tensors, global indices, boxes and storage chunks."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parloom import runtime as rt
from parloom.errors import InputError
from parloom.runtime.chunks import Section, layout
from parloom.runtime.sharding import Dims, global_shape, local_shape

SIZES = {"x": 2, "y": 3, "z": 2}
MESH = rt.grid(SIZES)


@st.composite
def dims(draw: st.DrawFn) -> Dims:
    """Digits of a tensor of up to three dims; every axis owns at most one."""
    num_dims = draw(st.integers(1, 3))
    result: list[list[int | str]] = [
        draw(st.lists(st.integers(1, 3), max_size=2)) for _ in range(num_dims)
    ]
    for axis in draw(st.permutations(sorted(SIZES))):
        if draw(st.booleans()):
            of_dim = result[draw(st.integers(0, num_dims - 1))]
            of_dim.insert(draw(st.integers(0, len(of_dim))), axis)
    return tuple(tuple(digits) for digits in result)


def expected_indices(digits: tuple[int | str, ...], coordinates: dict[str, int]) -> list[int]:
    """Global indices of the local positions, by counting."""
    found = [0]
    for digit in digits:
        size = digit if isinstance(digit, int) else SIZES[digit]
        values = range(size) if isinstance(digit, int) else [coordinates[digit]]
        found = [index * size + value for index in found for value in values]
    return found


def counted(of: Dims) -> Tensor:
    shape = global_shape(of, MESH)
    return torch.arange(prod(shape)).view(shape)


@given(dims())
def test_take_indexes_every_dim(of: Dims) -> None:
    full = counted(of)
    for rank in range(MESH.num_ranks):
        coordinates = MESH.coordinates(rank)
        local = rt.take(full, of, MESH, coordinates)
        expected = full
        for dim, digits in enumerate(of):
            index = torch.tensor(expected_indices(digits, coordinates))
            expected = expected.index_select(dim, index)
        assert local.shape == local_shape(of)
        assert torch.equal(local, expected)


@given(dims())
def test_put_of_every_rank_is_the_full_tensor(of: Dims) -> None:
    full = counted(of)
    again = torch.full_like(full, -1)
    for rank in range(MESH.num_ranks):
        coordinates = MESH.coordinates(rank)
        rt.put(again, rt.take(full, of, MESH, coordinates), of, MESH, coordinates)
    assert torch.equal(again, full)


def test_untake_and_indices() -> None:
    of: Dims = ((2, "y", 2), ("z", 3, "x"))
    full = counted(of)

    def rank(comm: rt.Comm) -> None:
        ctx = rt.Context(comm)
        local = rt.take(full, of, MESH, ctx.coordinates)
        assert torch.equal(rt.untake(local, of, comm), full)
        for digits in of:
            expected = expected_indices(digits, ctx.coordinates)
            assert rt.indices(ctx, digits).tolist() == expected
            assert rt.indices(ctx, digits) is rt.indices(ctx, digits)

    rt.run_threads(MESH, rank)


def test_the_axis_in_time_is_a_coordinate() -> None:
    mesh = rt.Mesh((rt.Axis("micro", 2), rt.Axis("x", 2, ((2, 1),))))
    ctx = rt.Context(rt.SingleComm(mesh, rank=1))
    assert mesh.time == "micro"
    assert mesh.num_ranks == 2
    assert rt.indices(ctx, ("x", "micro", 2)).tolist() == [4, 5]
    ctx.microbatch = 1
    assert rt.indices(ctx, ("x", "micro", 2)).tolist() == [6, 7]


def test_a_shape_without_the_digits_is_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(5,\) does not have the digits"):
        rt.take(torch.zeros(5), (("x", 2),), MESH, MESH.coordinates(0))


@given(dims(), st.data())
def test_boxes_tile_the_full_tensor(of: Dims, data: st.DataObject) -> None:
    """Boxes of all ranks and chunks, written from the local tensors, give the full tensor back."""
    full = counted(of)
    shape = full.shape
    valid = tuple(data.draw(st.integers(max(1, size - 2), size)) for size in shape)
    dim = data.draw(st.integers(0, len(of) - 1))
    parts = data.draw(st.integers(1, 4))
    seen = torch.zeros(shape, dtype=torch.int64)
    again = torch.zeros_like(full)
    owners = [axis for digits in of for axis in digits if isinstance(axis, str)]
    for rank in range(MESH.num_ranks):
        coordinates = MESH.coordinates(rank)
        if any(coordinates[axis] for axis in SIZES if axis not in owners):
            continue
        local = rt.take(full, of, MESH, coordinates)
        for part in range(parts):
            first, last = rows(local.shape[dim], parts).range(part)
            mine = local.narrow(dim, first, last - first)
            for box in rt.boxes(of, MESH, coordinates, dim, (first, last), valid):
                where = tuple(
                    slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True)
                )
                assert mine[box.local].shape == box.sizes
                again[where] = mine[box.local]
                seen[where] += 1
    inside = tuple(slice(size) for size in valid)
    assert torch.equal(again[inside], full[inside])
    assert (seen[inside] == 1).all()
    assert seen.sum() == prod(valid)


def rows(size: int, parts: int) -> Section:
    """Ceil-chunks of so many rows."""
    return Section((size,), 0, parts, -(-size // parts))


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_sections_pack_and_unpack(shape: tuple[int, ...], parts: int, dim: int) -> None:
    dim %= len(shape)
    before = rows(3, parts)
    (_, section), total = layout([before, Section(shape, dim, parts, -(-shape[dim] // parts))])
    home = torch.randn(shape)
    buffer = torch.full((parts, total), float("nan"))
    section.pack(home, buffer, range(parts))
    again = torch.empty(shape)
    section.unpack(buffer, again)
    assert torch.equal(again, home)
    pieces = [section.part(buffer[index], index) for index in range(parts)]
    assert torch.equal(torch.cat(pieces, dim), home)
    assert all(torch.equal(section.rows(home, i), piece) for i, piece in enumerate(pieces))


@given(st.integers(0, 30), st.integers(1, 8))
def test_chunks_are_ceil_chunks(size: int, parts: int) -> None:
    ranges = [rows(size, parts).range(index) for index in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert all(last - first <= -(-size // parts) for first, last in ranges)


def test_a_group_lists_its_ranks_in_the_order_of_its_axes() -> None:
    mesh = rt.grid({"x": 2, "y": 2})
    assert mesh.group(("x", "y"), 3) == (0, 1, 2, 3)
    assert mesh.group(("y", "x"), 3) == (0, 2, 1, 3)
    assert mesh.group(("y",), 3) == (2, 3)
    split = rt.Mesh((rt.Axis("a", 4, ((2, 4), (2, 1))), rt.Axis("b", 2, ((2, 2),))))
    assert split.group(("a",), 2) == (2, 3, 6, 7)
    assert [split["a"].coordinate(rank) for rank in (2, 3, 6, 7)] == [0, 1, 2, 3]
