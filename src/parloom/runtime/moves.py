"""Moving activations between layouts: what a generated program calls, and how it is undone.

A move is a forward primitive and a backward primitive, both pure functions on local tensors.
Which pair is right follows from the layouts of the value and of its gradient (the adjoint table of
the compiler); generated code names the backward primitive, and nothing here infers it.

Where a digit sits: a group of p ranks owns, or is about to own, one digit of tensor dim `dim`, with
`inner` local elements to its right and `outer` to its left: a tensor that holds the digit is
outer * p * inner long there, one that does not, outer * inner.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from parloom.errors import VerifyError
from parloom.runtime.comm import DistributedGroup, Group
from parloom.runtime.context import Context


class Place(NamedTuple):
    """Where a primitive works: the digit's position; what else a few of them need."""

    dim: int = 0
    inner: int = 1
    split_dim: int = 0
    split_inner: int = 1
    before: int = 0
    after: int = 0
    op: str = "sum"


Primitive = Callable[[Tensor, Group, Place], Tensor]


def _cut(x: Tensor, dim: int, inner: int, size: int) -> Tensor:
    """View of `x` with its digit in front: [size, .., outer, inner, ..]."""
    outer = x.shape[dim] // (size * inner)
    digits = x.view(*x.shape[:dim], outer, size, inner, *x.shape[dim + 1 :])
    return digits.movedim(dim + 1, 0)


def _join(stacked: Tensor, dim: int, inner: int) -> Tensor:
    """The digit that dim 0 of `stacked` [size, *local] is, put at its place in `dim`."""
    size, *local = stacked.shape
    digits = stacked.view(size, *local[:dim], local[dim] // inner, inner, *local[dim + 1 :])
    local[dim] *= size
    return digits.movedim(0, dim + 1).reshape(local)


def _local(x: Tensor, dim: int, size: int) -> list[int]:
    """Shape of `x` without a digit of `size` in `dim`."""
    shape = list(x.shape)
    shape[dim] //= size
    return shape


# Primitives. Each returns contiguous memory of its own, except `identity` and `keep_first`.


def _identity(x: Tensor, group: Group, place: Place) -> Tensor:
    return x.view_as(x)


def _keep_first(x: Tensor, group: Group, place: Place) -> Tensor:
    return x.view_as(x) if group.index == 0 else torch.zeros_like(x)


def _slice(x: Tensor, group: Group, place: Place) -> Tensor:
    # A copy even where a view would do: the whole must not outlive its use for one shard.
    mine = _cut(x, place.dim, place.inner, group.size)[group.index]
    return mine.clone(memory_format=torch.contiguous_format).view(_local(x, place.dim, group.size))


def _pad(x: Tensor, group: Group, place: Place) -> Tensor:
    shape = list(x.shape)
    shape[place.dim] *= group.size
    whole = x.new_zeros(shape)
    mine = _cut(whole, place.dim, place.inner, group.size)[group.index]
    mine.copy_(x.reshape(mine.shape))
    return whole


def _all_gather(x: Tensor, group: Group, place: Place) -> Tensor:
    stacked = x.new_empty(group.size, *x.shape)
    group.all_gather(stacked, x.contiguous()).wait()
    return _join(stacked, place.dim, place.inner)


def _all_reduce(x: Tensor, group: Group, place: Place) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, place.op).wait()
    return total


def _reduce_scatter(x: Tensor, group: Group, place: Place) -> Tensor:
    local = x.new_empty(_local(x, place.dim, group.size))
    stacked = _cut(x, place.dim, place.inner, group.size).contiguous()
    group.reduce_scatter(local, stacked.view(group.size, *local.shape)).wait()
    return local


def _all_to_all(x: Tensor, group: Group, place: Place) -> Tensor:
    sent = _cut(x, place.split_dim, place.split_inner, group.size).contiguous()
    received = sent.new_empty(group.size, *_local(x, place.split_dim, group.size))
    group.all_to_all(received, sent.view(received.shape)).wait()
    return _join(received, place.dim, place.inner)


def _halo_rows(owner: int, reader: int, size: int, place: Place) -> range:
    """Rows of `owner`, counted in its own shard of `size` rows, that lie in `reader`'s halo."""
    if owner == reader:
        return range(0)
    if owner < reader:
        first = max(reader * size - place.before, owner * size)
        return range(min(first - owner * size, size), size)
    last = min((reader + 1) * size + place.after, (owner + 1) * size)
    return range(max(last - owner * size, 0))


def _halo_exchange(x: Tensor, group: Group, place: Place) -> Tensor:
    size, me, members = x.shape[place.dim], group.index, range(group.size)
    rows = x.movedim(place.dim, 0)
    sent = [rows[r.start : r.stop] for r in (_halo_rows(me, m, size, place) for m in members)]
    incoming = [len(_halo_rows(m, me, size, place)) for m in members]
    whole = rows.new_zeros(place.before + size + place.after, *rows.shape[1:])
    received = rows.new_empty(sum(incoming), *rows.shape[1:])
    group.all_to_all(received, torch.cat(sent), incoming, [len(s) for s in sent]).wait()
    lower = sum(incoming[:me])
    whole[place.before - lower : place.before] = received[:lower]
    whole[place.before : place.before + size] = rows
    whole[place.before + size : place.before + size + sum(incoming[me:])] = received[lower:]
    return whole.movedim(0, place.dim).contiguous()


def _halo_add(x: Tensor, group: Group, place: Place) -> Tensor:
    rows = x.movedim(place.dim, 0)
    size, me, members = len(rows) - place.before - place.after, group.index, range(group.size)
    borrowed = [len(_halo_rows(m, me, size, place)) for m in members]
    lent = [_halo_rows(me, m, size, place) for m in members]
    lower, upper = sum(borrowed[:me]), sum(borrowed[me:])
    end = place.before + size
    sent = torch.cat([rows[place.before - lower : place.before], rows[end : end + upper]])
    received = rows.new_empty(sum(map(len, lent)), *rows.shape[1:])
    group.all_to_all(received, sent, [len(r) for r in lent], borrowed).wait()
    local = rows[place.before : end].clone(memory_format=torch.contiguous_format)
    for owned, piece in zip(lent, torch.split(received, [len(r) for r in lent]), strict=True):
        local[owned.start : owned.stop] += piece
    return local.movedim(0, place.dim).contiguous()


PRIMITIVES: dict[str, Primitive] = {
    "identity": _identity,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "keep_first": _keep_first,
    "all_to_all": _all_to_all,
    "halo_exchange": _halo_exchange,
    "halo_add": _halo_add,
}


# Under torch.compile a primitive that communicates is one operator: its group travels as the name
# of a process group and the members in order, and its result's shape is all that tracing needs.


def _place(numbers: list[int], op: str) -> Place:
    dim, inner, split_dim, split_inner, before, after = numbers
    return Place(dim, inner, split_dim, split_inner, before, after, op)


def named_group(name: str, members: list[int], rank: int) -> DistributedGroup:
    """The group that an operator was given by the name of its process group."""
    # Private, and what torch's own traceable collectives call: there is no public way.
    named = distributed_c10d._resolve_process_group(  # type: ignore[attr-defined]
        distributed_c10d.GroupName(name)
    )
    return DistributedGroup(named, tuple(members), rank)


@torch.library.custom_op("parloom::communicate", mutates_args=())
def communicate(
    x: Tensor, primitive: str, group: str, members: list[int], rank: int, place: list[int], op: str
) -> Tensor:
    """A communicating primitive for torch.compile."""
    return PRIMITIVES[primitive](x, named_group(group, members, rank), _place(place, op))


@communicate.register_fake
def _(
    x: Tensor, primitive: str, group: str, members: list[int], rank: int, place: list[int], op: str
) -> Tensor:
    where, size = _place(place, op), len(members)
    shape = list(x.shape)
    if primitive == "all_gather":
        shape[where.dim] *= size
    elif primitive == "reduce_scatter":
        shape[where.dim] //= size
    elif primitive == "all_to_all":
        shape[where.split_dim] //= size
        shape[where.dim] *= size
    elif primitive == "halo_exchange":
        shape[where.dim] += where.before + where.after
    elif primitive == "halo_add":
        shape[where.dim] -= where.before + where.after
    return x.new_empty(shape)


def _operator(primitive: str) -> Primitive:
    def call(x: Tensor, group: Group, place: Place) -> Tensor:
        assert isinstance(group, DistributedGroup)
        *numbers, op = place
        made: Tensor = communicate(
            x, primitive, group.name, list(group.members), group.rank, numbers, op
        )
        return made

    return call


LOCAL = ("identity", "slice", "pad", "keep_first")
COMPILED: dict[str, Primitive] = {
    name: primitive if name in LOCAL else _operator(name) for name, primitive in PRIMITIVES.items()
}


def primitive_of(name: str) -> Primitive:
    """A primitive, as torch.compile can trace it where it does."""
    return (COMPILED if torch.compiler.is_compiling() else PRIMITIVES)[name]


class _Move(torch.autograd.Function):
    """A primitive whose gradient is another primitive."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        primitive: Primitive,
        place: Place,
        backward: Primitive,
        backward_place: Place,
    ) -> Tensor:
        ctx.undo = (backward, group, backward_place)
        return primitive(x, group, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        primitive, group, place = ctx.undo
        return (primitive(gradients[0], group, place), None, None, None, None, None)


def _move(
    x: Tensor,
    group: Group,
    forward: str,
    place: Place,
    backward: str,
    backward_place: Place | None = None,
) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return primitive_of(forward)(x, group, place)
    undo = place if backward_place is None else backward_place
    moved: Tensor = _Move.apply(  # type: ignore[no-untyped-call]
        x, group, primitive_of(forward), place, primitive_of(backward), undo
    )
    return moved


# Moves, one per row of the adjoint table up to the choice of `backward`.


def partition(
    x: Tensor,
    ctx: Context,
    axes: tuple[str, ...],
    dim: int,
    inner: int,
    backward: str = "all_gather",
) -> Tensor:
    """Replicated -> sharded: keep this rank's digit. Backward: `all_gather` or `pad`."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "slice", Place(dim, inner), backward)


def combine(
    x: Tensor, ctx: Context, axes: tuple[str, ...], dim: int, inner: int, backward: str = "slice"
) -> Tensor:
    """Sharded -> replicated: insert the digit. Backward: `slice` or `reduce_scatter`."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "all_gather", Place(dim, inner), backward)


def reduce(
    x: Tensor, ctx: Context, axes: tuple[str, ...], op: str = "sum", backward: str = "identity"
) -> Tensor:
    """Partial -> replicated by `sum`, `max` or `min`. Backward: `identity` or `all_reduce`.

    Raises `VerifyError` for a max or min of something that needs a gradient: detach it first.
    """
    group = ctx.group(axes)
    if group.size == 1:
        return x
    if op != "sum" and x.requires_grad and torch.is_grad_enabled():
        raise VerifyError(f"reduce over {axes} with {op!r} has no gradient; detach its operand")
    return _move(x, group, "all_reduce", Place(op=op), backward, Place())


def reduce_scatter(
    x: Tensor,
    ctx: Context,
    axes: tuple[str, ...],
    dim: int,
    inner: int,
    backward: str = "all_gather",
) -> Tensor:
    """Partial -> sharded: sum over ranks and keep this rank's digit."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "reduce_scatter", Place(dim, inner), backward)


def replicate(
    x: Tensor, ctx: Context, axes: tuple[str, ...], backward: str = "all_reduce"
) -> Tensor:
    """Replicated value whose gradient arrives partial: identity, backward `all_reduce`."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "identity", Place(), backward)


def elect(x: Tensor, ctx: Context, axes: tuple[str, ...], backward: str = "keep_first") -> Tensor:
    """Replicated value whose gradient must leave partial: identity, backward `keep_first`."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "identity", Place(), backward)


def mask(x: Tensor, ctx: Context, axes: tuple[str, ...], backward: str = "identity") -> Tensor:
    """Replicated -> partial: zeros but on the first rank. Backward: `identity` or `keep_first`."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "keep_first", Place(), backward)


def pad(
    x: Tensor, ctx: Context, axes: tuple[str, ...], dim: int, inner: int, backward: str = "slice"
) -> Tensor:
    """Sharded -> partial: this rank's digit between zeros."""
    group = ctx.group(axes)
    return x if group.size == 1 else _move(x, group, "pad", Place(dim, inner), backward)


def all_to_all(
    x: Tensor,
    ctx: Context,
    axes: tuple[str, ...],
    gather: tuple[int, int],
    split: tuple[int, int],
    backward: str = "all_to_all",
) -> Tensor:
    """Sharded -> sharded elsewhere: the digit at `split` leaves, the one at `gather` arrives.

    Both are (dim, inner) in the tensor that has neither digit.
    """
    group = ctx.group(axes)
    if group.size == 1:
        return x
    return _move(x, group, "all_to_all", Place(*gather, *split), backward, Place(*split, *gather))


def halo_exchange(
    x: Tensor,
    ctx: Context,
    axes: tuple[str, ...],
    dim: int,
    before: int,
    after: int,
    backward: str = "halo_add",
) -> Tensor:
    """Add `before` rows of the lower neighbors and `after` of the upper ones along `dim`.

    Rows beyond the ends of the whole tensor are zero, also on a group of one rank.
    """
    place = Place(dim, before=before, after=after)
    return _move(x, ctx.group(axes), "halo_exchange", place, backward)
