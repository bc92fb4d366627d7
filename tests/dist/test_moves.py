"""Every row of the adjoint table against a dense oracle, and against every wrong backward.

A move changes how a dense value is spread over ranks, not the value; its backward does the same to
the dense gradient. So a test lays out a dense value and a dense gradient in the states that the row
names, and checks that what arrives represents them: sharded, replicated, or as a partial sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parloom import runtime as rt
from parloom.errors import VerifyError
from parloom.ir.moves import ADJOINTS
from tests.examples import examples

AXES = [("x",), ("y",), ("x", "y"), ("y", "x")]
MESHES = [{"x": 2, "y": 2}, {"x": 2, "y": 3}]


@dataclass(frozen=True)
class Case:
    """A digit of the group `axes` between `outer` and `inner` in dim `dim` of a dense tensor."""

    sizes: dict[str, int]
    axes: tuple[str, ...]
    before: tuple[int, ...]
    outer: int
    inner: int
    after: tuple[int, ...]
    seed: int

    @property
    def mesh(self) -> rt.Mesh:
        return rt.grid(self.sizes)

    @property
    def size(self) -> int:
        return prod(self.sizes[axis] for axis in self.axes)

    @property
    def dim(self) -> int:
        return len(self.before)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.before, self.outer * self.size * self.inner, *self.after)

    def coordinate(self, rank: int) -> int:
        """Position of a rank in its group, written out for two axes."""
        x, y = divmod(rank, self.sizes["y"])
        of = {"x": x, "y": y}
        index = 0
        for axis in self.axes:
            index = index * self.sizes[axis] + of[axis]
        return index

    def dense(self, which: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 10 + which)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def shard(self, dense: Tensor, rank: int) -> Tensor:
        digits = dense.reshape(prod(self.before), self.outer, self.size, self.inner, -1)
        local = digits[:, :, self.coordinate(rank)]
        return local.reshape(*self.before, self.outer * self.inner, *self.after)

    def lay_out(self, dense: Tensor, state: str, rank: int) -> Tensor:
        """A rank's tensor when `dense` is in `state`: S sharded, R replicated, P partial sum."""
        if state == "S":
            return self.shard(dense, rank).clone()
        if state == "R":
            return dense.clone()
        # Partial sums: multiples of the dense value with weights that sum to one.
        weights = torch.arange(1.0, self.size + 1, dtype=torch.float64)
        return dense * (weights / weights.sum())[self.coordinate(rank)]

    def represents(self, tensors: list[Tensor], dense: Tensor, state: str) -> bool:
        """Whether the ranks' tensors are `dense` in `state`."""
        if state == "P":
            total = torch.stack(tensors).sum(0)
            return torch.allclose(total / (len(tensors) // self.size), dense)
        expected = [self.lay_out(dense, state, rank) for rank in range(len(tensors))]
        return all(
            t.shape == e.shape and torch.allclose(t, e)
            for t, e in zip(tensors, expected, strict=True)
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sides = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    return Case(
        draw(st.sampled_from(MESHES)),
        draw(st.sampled_from(AXES)),
        draw(sides),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(sides),
        draw(st.integers(0, 99)),
    )


Move = Callable[[Tensor, rt.Context, Case, str], Tensor]


def _partition(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.partition(x, ctx, case.axes, case.dim, case.inner, backward)


def _combine(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.combine(x, ctx, case.axes, case.dim, case.inner, backward)


def _reduce(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.reduce(x, ctx, case.axes, "sum", backward)


def _reduce_scatter(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.reduce_scatter(x, ctx, case.axes, case.dim, case.inner, backward)


def _replicate(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.replicate(x, ctx, case.axes, backward)


def _elect(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.elect(x, ctx, case.axes, backward)


def _mask(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.mask(x, ctx, case.axes, backward)


def _pad(x: Tensor, ctx: rt.Context, case: Case, backward: str) -> Tensor:
    return rt.pad(x, ctx, case.axes, case.dim, case.inner, backward)


MOVES: dict[str, Move] = {
    "partition": _partition,
    "partition_varying": _partition,
    "combine": _combine,
    "combine_varying": _combine,
    "reduce": _reduce,
    "reduce_varying": _reduce,
    "reduce_scatter": _reduce_scatter,
    "replicate": _replicate,
    "elect": _elect,
    "mask": _mask,
    "mask_varying": _mask,
    "pad": _pad,
}


def test_every_row_is_tested() -> None:
    assert set(ADJOINTS) == {*MOVES, "all_to_all", "halo_exchange"}


def run(name: str, case: Case, backward: str) -> tuple[bool, bool]:
    """Whether value and gradient arrive in the states that the row promises."""
    row = ADJOINTS[name]
    value, gradient = case.dense(0), case.dense(1)

    def rank(comm: rt.Comm) -> tuple[Tensor, Tensor]:
        x = case.lay_out(value, row.value[0], comm.rank).requires_grad_()
        y = MOVES[name](x, rt.Context(comm), case, backward)
        torch.autograd.backward(y, case.lay_out(gradient, row.cotangent[0], comm.rank))
        assert x.grad is not None
        return y.detach(), x.grad

    results = rt.run_threads(case.mesh, rank)
    return (
        case.represents([y for y, _ in results], value, row.value[1]),
        case.represents([g for _, g in results], gradient, row.cotangent[1]),
    )


@pytest.mark.parametrize("name", MOVES)
@given(case=cases())
@examples(25)
def test_value_and_gradient(name: str, case: Case) -> None:
    assert run(name, case, ADJOINTS[name].backward) == (True, True)


# Without rows to exchange they are identities.
HALO_PRIMITIVES = {"halo_exchange", "halo_add"}
CONTROL = Case({"x": 2, "y": 3}, ("y", "x"), (2,), 2, 3, (2,), 7)


@pytest.mark.parametrize("wrong", sorted(set(rt.PRIMITIVES) - HALO_PRIMITIVES))
@pytest.mark.parametrize("name", MOVES)
def test_any_other_backward_is_found_out(name: str, wrong: str) -> None:
    if wrong == ADJOINTS[name].backward:
        return
    try:
        passed = run(name, CONTROL, wrong)
    except (RuntimeError, IndexError, ZeroDivisionError):  # a shape that does not fit
        return
    assert passed != (True, True)


# all_to_all: two digits, of which one is sharded before and the other after.


@dataclass(frozen=True)
class Exchange:
    """Digits of both positions in a tensor `kept` that has neither: (dim, inner) each."""

    sizes: dict[str, int]
    axes: tuple[str, ...]
    kept: tuple[int, ...]
    gather: tuple[int, int]
    split: tuple[int, int]

    @property
    def size(self) -> int:
        return prod(self.sizes[axis] for axis in self.axes)

    def digits(self) -> list[tuple[int | str, ...]]:
        """Per dim its digits, outermost first; "g" and "s" are the two that move."""
        result: list[tuple[int | str, ...]] = []
        for dim, length in enumerate(self.kept):
            here = [(inner, tag) for (d, inner), tag in self.marks() if d == dim]
            digits: list[int | str] = []
            rest = length
            for inner, tag in sorted(here, reverse=True):
                digits += [rest // inner, tag]
                rest = inner
            result.append((*digits, rest))
        return result

    def marks(self) -> list[tuple[tuple[int, int], str]]:
        return [(self.gather, "g"), (self.split, "s")]

    def shape(self, tags: str) -> list[int]:
        return [
            prod(
                d if isinstance(d, int) else self.size
                for d in of_dim
                if d not in set("gs") - set(tags)
            )
            for of_dim in self.digits()
        ]

    def shard(self, dense: Tensor, tag: str, coordinate: int) -> Tensor:
        flat = [d for of_dim in self.digits() for d in of_dim]
        view = dense.reshape([d if isinstance(d, int) else self.size for d in flat])
        other = "s" if tag == "g" else "g"
        return view.select(flat.index(tag), coordinate).reshape(self.shape(other))


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    inners = draw(
        st.lists(
            st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2), (6, 3), (4, 2)]),
            min_size=2,
            max_size=3,
        )
    )
    kept = tuple(length for length, _ in inners)
    positions = st.integers(0, len(kept) - 1).flatmap(
        lambda dim: st.sampled_from(
            [(dim, i) for i in range(1, kept[dim] + 1) if kept[dim] % i == 0]
        )
    )
    return Exchange(
        draw(st.sampled_from(MESHES)),
        draw(st.sampled_from(AXES)),
        kept,
        draw(positions),
        draw(positions),
    )


def exchanged(case: Exchange, backward: str) -> bool:
    dense = torch.randn(case.shape("gs"), dtype=torch.float64)
    gradient = torch.randn(case.shape("gs"), dtype=torch.float64)

    def rank(comm: rt.Comm) -> bool:
        index = comm.group(case.axes).index
        x = case.shard(dense, "g", index).clone().requires_grad_()
        y = rt.all_to_all(x, rt.Context(comm), case.axes, case.gather, case.split, backward)
        torch.autograd.backward(y, case.shard(gradient, "s", index))
        assert x.grad is not None
        return torch.equal(y, case.shard(dense, "s", index)) and torch.equal(
            x.grad, case.shard(gradient, "g", index)
        )

    return all(rt.run_threads(rt.grid(case.sizes), rank))


@given(case=exchanges())
@examples(80)
def test_all_to_all(case: Exchange) -> None:
    assert exchanged(case, ADJOINTS["all_to_all"].backward)


@pytest.mark.parametrize("wrong", sorted(set(rt.PRIMITIVES) - {"all_to_all"}))
def test_all_to_all_with_another_backward_is_found_out(wrong: str) -> None:
    case = Exchange({"x": 2, "y": 2}, ("y", "x"), (8, 12), (0, 2), (1, 3))
    try:
        assert not exchanged(case, wrong)
    except (RuntimeError, IndexError, ZeroDivisionError):
        return


# halo_exchange: overlapping windows of a zero-padded tensor.


@dataclass(frozen=True)
class Halo:
    sizes: dict[str, int]
    axes: tuple[str, ...]
    lead: tuple[int, ...]
    rows: int
    before: int
    after: int


HALOS = st.builds(
    Halo,
    st.sampled_from([*MESHES, {"x": 1, "y": 1}]),
    st.sampled_from(AXES),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.integers(1, 4),
    st.integers(0, 7),
    st.integers(0, 7),
)


def haloed(case: Halo, backward: str) -> bool:
    mesh = rt.grid(case.sizes)
    parts, dim = mesh.size(case.axes), len(case.lead)
    dense = torch.randn(*case.lead, parts * case.rows, 2, dtype=torch.float64, requires_grad=True)
    pad = [*case.lead, 0, 2]
    pad[dim] = case.before
    tail = [*case.lead, case.after, 2]
    padded = torch.cat([dense.new_zeros(pad), dense, dense.new_zeros(tail)], dim)
    length = case.before + case.rows + case.after
    windows = [padded.narrow(dim, i * case.rows, length) for i in range(parts)]
    gradients = [torch.randn_like(window) for window in windows]
    torch.autograd.backward(windows, gradients)

    def rank(comm: rt.Comm) -> bool:
        index = comm.group(case.axes).index
        local = dense.detach().narrow(dim, index * case.rows, case.rows)
        x = local.clone().requires_grad_()
        y = rt.halo_exchange(x, rt.Context(comm), case.axes, dim, case.before, case.after, backward)
        torch.autograd.backward(y, gradients[index])
        assert x.grad is not None
        assert dense.grad is not None
        expected = dense.grad.narrow(dim, index * case.rows, case.rows)
        return torch.equal(y, windows[index]) and torch.allclose(x.grad, expected)

    return all(rt.run_threads(mesh, rank))


@given(case=HALOS)
@examples(80)
def test_halo_exchange(case: Halo) -> None:
    assert haloed(case, ADJOINTS["halo_exchange"].backward)


@pytest.mark.parametrize("wrong", sorted(set(rt.PRIMITIVES) - {"halo_add"}))
def test_halo_exchange_with_another_backward_is_found_out(wrong: str) -> None:
    try:
        assert not haloed(Halo({"x": 2, "y": 2}, ("x", "y"), (2,), 3, 1, 2), wrong)
    except (RuntimeError, IndexError, ZeroDivisionError):
        return


# Around the table.


def test_max_and_min_of_what_needs_no_gradient() -> None:
    def rank(comm: rt.Comm) -> tuple[float, float]:
        x = torch.tensor([float(comm.rank)])
        ctx = rt.Context(comm)
        return rt.reduce(x, ctx, ("x",), "max").item(), rt.reduce(x, ctx, ("y",), "min").item()

    assert rt.run_threads(rt.grid({"x": 2, "y": 2}), rank) == [(2, 0), (3, 0), (2, 2), (3, 2)]


def test_a_maximum_has_no_gradient_to_give() -> None:
    def rank(comm: rt.Comm) -> None:
        rt.reduce(torch.ones(1, requires_grad=True), rt.Context(comm), ("x",), "max")

    with pytest.raises(VerifyError, match="'max' has no gradient; detach"):
        rt.run_threads(rt.grid({"x": 2}), rank)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_integers_and_booleans_travel(dtype: torch.dtype) -> None:
    def rank(comm: rt.Comm) -> Tensor:
        x = torch.tensor([comm.rank, 0]).to(dtype)
        return rt.combine(x, rt.Context(comm), ("x",), 0, 1)

    expected = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert all(torch.equal(t, expected) for t in rt.run_threads(rt.grid({"x": 2}), rank))


def test_a_failing_rank_ends_the_others_at_once() -> None:
    def rank(comm: rt.Comm) -> None:
        if comm.rank == 3:
            raise ValueError("rank three is out")
        rt.reduce(torch.ones(1), rt.Context(comm), ("x", "y"))

    with pytest.raises(ValueError, match="rank three is out") as caught:
        rt.run_threads(rt.grid({"x": 2, "y": 2}), rank)
    assert caught.value.__notes__ == ["on rank 3 of 4"]
