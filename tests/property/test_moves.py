"""Every transition between random layouts, on simulated ranks, against the dense tensor."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.errors import LayoutError
from parloom.ir.layout import Layout, Shard, check, describe, digits, fits, local_shape
from parloom.ir.mesh import Mesh, MeshAxis, grid
from parloom.ir.moves import ADJOINTS, Step, plan_moves
from parloom.ir.pcg import TIME
from tests.examples import examples
from tests.property.simulated import (
    Array,
    Shards,
    apply,
    scatter,
    take,
)

MESHES = [{"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 3}]

Transition = tuple[tuple[int, ...], Mesh, Layout, Layout, tuple[str, ...], tuple[str, ...]]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, partial: bool) -> Layout:
    """A random layout: each axis replicated, partial, or on any digit that fits."""
    layout = Layout()
    for axis in draw(st.permutations(mesh.names)):
        choices: list[Shard | str] = ["replicated"]
        if partial:
            choices.append("partial")
        for dim, size in enumerate(shape):
            for stride in (s for s in range(1, size + 1) if size % s == 0):
                shard = Shard(axis, dim, stride)
                if fits(layout, shard, shape, mesh):
                    choices.append(shard)
        choice = draw(st.sampled_from(choices))
        if isinstance(choice, Shard):
            layout = layout.place(choice)
        elif choice == "partial":
            layout = Layout(layout.shards, (*layout.partial, (axis, "sum")))
    return layout


@st.composite
def transitions(
    draw: st.DrawFn,
) -> Transition:
    mesh = grid(draw(st.sampled_from(MESHES)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 12, 24]), min_size=1, max_size=3)))
    source = draw(layouts(shape, mesh, partial=True))
    target = draw(layouts(shape, mesh, partial=True))
    free = [a for a in mesh.names if a not in source.axes + source.partial_axes]
    varying = tuple(draw(st.lists(st.sampled_from(free), unique=True))) if free else ()
    free = [a for a in mesh.names if a not in target.axes + target.partial_axes]
    target_varying = tuple(draw(st.lists(st.sampled_from(free), unique=True))) if free else ()
    return shape, mesh, source, target, varying, target_varying


@examples(400)
@given(transitions(), st.integers(0, 2**32 - 1))
def test_moves_reach_the_target(transition: Transition, seed: int) -> None:
    shape, mesh, source, target, varying, target_varying = transition
    rng = np.random.default_rng(seed)
    full: Array = rng.integers(-1000, 1000, shape)
    steps = plan_moves(
        source, target, shape, mesh, source_varying=varying, target_varying=target_varying
    )
    shards = scatter(full, source, mesh, rng)
    for step in steps:
        shards = apply(step, ADJOINTS[step.row].forward, shards, mesh)
        check(step.result, shape, mesh)
        for at, value in shards.items():
            assert value.shape == local_shape(step.result, shape, mesh)
            if not step.result.partial:
                assert np.array_equal(value, take(full, step.result, mesh, at))
    assert (steps[-1].result if steps else source) == target
    for at, value in _summed(shards, target, shape, mesh).items():
        assert np.array_equal(value, take(full, target, mesh, at))


@examples(400)
@given(transitions(), st.integers(0, 2**32 - 1))
def test_adjoints_reach_the_source_cotangent(transition: Transition, seed: int) -> None:
    """Backward primitives, in reverse, turn the target's cotangent states into the source's."""
    shape, mesh, source, target, varying, target_varying = transition
    rng = np.random.default_rng(seed)
    full: Array = rng.integers(-1000, 1000, shape)
    steps = plan_moves(
        source, target, shape, mesh, source_varying=varying, target_varying=target_varying
    )
    cotangent = Layout(target.shards, tuple((a, "sum") for a in target_varying))
    shards = scatter(full, cotangent, mesh, rng)
    before = {0: source} | {i + 1: s.result for i, s in enumerate(steps)}
    for index in reversed(range(len(steps))):
        step = steps[index]
        shards = _backward(step, ADJOINTS[step.row].backward, shards, mesh)
        assert all(v.shape == local_shape(before[index], shape, mesh) for v in shards.values())
    wanted = Layout(source.shards, tuple((a, "sum") for a in varying))
    for at, value in _summed(shards, wanted, shape, mesh).items():
        assert np.array_equal(value, take(full, wanted, mesh, at))


def _summed(shards: Shards, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Shards:
    """What partial sums come to."""
    whole = layout.without(layout.partial_axes)
    for step in plan_moves(layout, whole, shape, mesh, differentiable=False):
        shards = apply(step, ADJOINTS[step.row].forward, shards, mesh)
    return shards


def _backward(step: Step, primitive: str, shards: Shards, mesh: Mesh) -> Shards:
    if primitive == "all_to_all":
        swapped = replace(
            step, dim=step.split[0], inner=step.split[1], split=(step.dim, step.inner)
        )
        return apply(swapped, "all_to_all", shards, mesh)
    return apply(replace(step, reduction="sum"), primitive, shards, mesh)


@pytest.mark.parametrize("row", sorted(ADJOINTS.keys() - {"halo_exchange"}))
def test_every_row_is_reached(row: str) -> None:
    """The planner emits each row for some transition, so that the properties above cover it."""
    mesh = grid({"x": 2})
    split, other, part, whole = (
        Layout((Shard("x", 0, 2),)),
        Layout((Shard("x", 1, 2),)),
        Layout((), (("x", "sum"),)),
        Layout(),
    )
    cases = {
        "partition": (whole, split, (), ()), "partition_varying": (whole, split, ("x",), ()),
        "combine": (split, whole, (), ()), "combine_varying": (split, whole, (), ("x",)),
        "reduce": (part, whole, (), ()), "reduce_varying": (part, whole, (), ("x",)),
        "reduce_scatter": (part, split, (), ()), "replicate": (whole, whole, (), ("x",)),
        "elect": (whole, whole, ("x",), ()), "all_to_all": (split, other, (), ()),
        "mask": (whole, part, (), ()), "mask_varying": (whole, part, ("x",), ()),
        "pad": (split, part, (), ()),
    }  # fmt: skip
    source, target, varying, target_varying = cases[row]
    steps = plan_moves(
        source, target, (4, 4), mesh, source_varying=varying, target_varying=target_varying
    )
    assert [s.row for s in steps] == [row]


def test_a_whole_value_is_no_part_of_a_maximum_or_of_microbatches() -> None:
    timed = Mesh((MeshAxis(TIME, (), 2),))
    for mesh, partial in ((grid({"x": 2}), ("x", "max")), (timed, (TIME, "sum"))):
        with pytest.raises(LayoutError, match="is no part of a "):
            plan_moves(Layout(), Layout((), (partial,)), (4,), mesh)


def test_digits_and_description() -> None:
    mesh = grid({"x": 2, "y": 4})
    layout = Layout((Shard("x", 0, 24), Shard("y", 1, 2)), ())
    assert digits(layout, 0, 144, mesh) == (3, "x", 24)
    assert local_shape(layout, (144, 8), mesh) == (72, 2)
    assert describe(layout, (144, 8), mesh) == "[3·2/x·24, 4/y·2]"
    with pytest.raises(LayoutError, match="twice"):
        Layout((Shard("x", 0, 1), Shard("x", 1, 1)))
