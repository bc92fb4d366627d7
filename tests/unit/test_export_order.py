"""The mesh of JAX on parts of a slice, and on several slices."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parloom.export.order import order_file
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.plan import Plan, one_stage
from tests.unit.test_plan_json import example

Coords = tuple[int, ...]


def _plan(cluster: str, *primes: PrimeAxis) -> Plan:
    axes = tuple(MeshAxis(f"a{index}", (prime,)) for index, prime in enumerate(primes))
    plan = example()
    return replace(
        plan, cluster=cluster, decisions=replace(plan.decisions, stages=one_stage(Mesh(axes)))
    )


def _made(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Any:
    jax, sharding = ModuleType("jax"), ModuleType("jax.sharding")
    sharding.Mesh = lambda devices, axes: devices  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.sharding", sharding)
    there: dict[str, Any] = {}
    name, text = order_file("jax", plan)
    exec(compile(text, name, "exec"), there)
    return there["make_mesh"]


def _chips(*sides: int, slices: int = 1) -> list[SimpleNamespace]:
    places = [tuple(map(int, place)) for place in np.ndindex(*sides)]
    return [
        SimpleNamespace(coords=place, slice_index=index)
        for index in range(slices)
        for place in places
    ][::-1]


@pytest.mark.parametrize(
    ("sides", "long"), [((4, 2, 1), 0), ((2, 4, 1), 1)], ids=["along x", "along y"]
)
def test_a_part_of_a_slice(sides: Coords, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of sixteen chips: two rows of four, whichever way they lie."""
    make = _made(_plan("TPU-v5e:4x4", PrimeAxis(2, 4, 1), PrimeAxis(4, 1, 0)), monkeypatch)
    found = make(_chips(*sides))
    assert found.shape == (2, 4)
    for row in found:
        assert [chip.coords[long] for chip in row] == [0, 1, 2, 3]
        assert len({chip.coords[1 - long] for chip in row}) == 1
    with pytest.raises(ValueError, match=r"a slice of \[4, 2\], and this is one of \[8, 1\]"):
        make(_chips(8, 1))


def test_several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    primes = PrimeAxis(2, 4, 2), PrimeAxis(2, 2, 1), PrimeAxis(2, 1, 0)
    make = _made(_plan("2x4xTPU-v5e", *primes), monkeypatch)
    found = make(_chips(2, 2, slices=2))
    for index, own in enumerate(found):
        assert {chip.slice_index for chip in own.flat} == {index}
    with pytest.raises(ValueError, match="the plan is for 2 slices, and there are 1"):
        make(_chips(2, 4))
