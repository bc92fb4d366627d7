"""Drawn layouts: every device stands where its shard is."""

from itertools import product

import pytest

from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.mesh import grid as mesh_of
from parloom.ir.plan import Storage
from parloom.report.grid import Grid, chunks, devices, grid

MESH = mesh_of({"x": 2, "y": 4})


def test_one_and_two_sharded_dims() -> None:
    assert grid(Layout(), (4, 8), MESH) == Grid(("all of it",), (), (("0-7",),))
    one = grid(Layout((Shard("y", 1, 2),)), (4, 8), MESH)
    assert one.rows == ("0:2", "2:4", "4:6", "6:8")
    assert one.cells == (("0,4",), ("1,5",), ("2,6",), ("3,7",))
    two = grid(Layout((Shard("x", 0, 2), Shard("y", 1, 2))), (4, 8), MESH)
    assert (two.rows, two.columns) == (("0:2", "2:4"), ("0:2", "2:4", "4:6", "6:8"))
    assert two.cells == (("0", "1", "2", "3"), ("4", "5", "6", "7"))


def test_inner_digits_are_several_ranges() -> None:
    heads = grid(Layout((Shard("x", 0, 12),)), (72,), MESH)  # 3 . 2/x . 12
    assert heads.rows == ("0:12 24:36 …", "12:24 36:48 …")
    assert heads.cells == (("0-3",), ("4-7",))


def test_both_axes_on_one_dim() -> None:
    outer = grid(Layout((Shard("x", 0, 4), Shard("y", 0, 1))), (8,), MESH)
    assert outer.cells == tuple((str(rank),) for rank in range(8))
    inner = grid(Layout((Shard("y", 0, 2), Shard("x", 0, 1))), (8,), MESH)
    assert [cell for (cell,) in inner.cells] == ["0", "4", "1", "5", "2", "6", "3", "7"]


def test_long_rows_are_cut_and_time_is_not_drawn() -> None:
    mesh = Mesh((*mesh_of({"x": 32}).axes, MeshAxis("micro", (), 2)))
    found = grid(Layout((Shard("micro", 0, 32), Shard("x", 0, 1))), (64,), mesh)
    assert len(found.rows) == 8
    assert found.rows[-2:] == ("…", "31:32 63:64")
    assert found.cells[-2:] == (("…",), ("31",))
    assert devices(mesh_of({"x": 2, "y": 16}), {"y": 1}) == "1,17"
    assert devices(mesh_of({"x": 16, "y": 2}), {"y": 1}) == "1,3,.. (16 devices)"


def test_chunks_are_cut_upwards() -> None:
    found = chunks(Storage(("y",), 0), 10, MESH)
    assert found.rows == ("0:3", "3:6", "6:9", "9:10")
    assert found.cells[3] == ("3,7",)
    assert chunks(Storage(("x", "y"), 0), 3, MESH).rows[-1] == "3:3"
    assert found.document()["devices"][0] == ["0,4"]


@pytest.mark.parametrize("dims", list(product((0, 1), repeat=2)))
def test_every_device_stands_once_where_all_axes_shard(dims: tuple[int, int]) -> None:
    """Negative control: a device in two cells, or in none, would hold what it has not."""
    shards = (Shard("x", dims[0], 8), Shard("y", dims[1], 2))
    found = grid(Layout(shards), (16, 16), MESH)
    assert sorted(cell for row in found.cells for cell in row) == [str(r) for r in range(8)]
    assert found.table().row_count == len(found.rows)
