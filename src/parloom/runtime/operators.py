"""Operators whose local code needs the global index of its elements, or counts once per group."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parloom.runtime.context import Context
from parloom.runtime.sharding import Digit, global_shape, indices, take

Digits = tuple[Digit, ...]


def local_positions(index: Tensor, ctx: Context, digits: Digits) -> tuple[Tensor, Tensor]:
    """Where global indices lie in this rank's shard of a dim, and which of them lie in it at all.

    Indices of other shards get position 0, those that the dim does not have one that no shard has,
    so that torch refuses them as it does on one device.
    """
    inside = torch.ones_like(index, dtype=torch.bool)
    position = torch.zeros_like(index)
    unit = 1
    local_unit = 1
    coordinates = ctx.coordinates
    for digit in reversed(digits):
        size = digit if isinstance(digit, int) else ctx.mesh[digit].size
        value = index.div(unit, rounding_mode="floor").remainder(size)
        if isinstance(digit, int):
            position = position + value * local_unit
            local_unit *= digit
        else:
            inside = inside & (value == coordinates[digit])
        unit *= size
    there = (index >= 0) & (index < unit)
    inside = inside & there
    return torch.where(inside, position, 0).masked_fill(~there, local_unit + 1), inside


def embedding(
    weight: Tensor, index: Tensor, ctx: Context, digits: Digits, padding: int = -1
) -> Tensor:
    """Rows of a table sharded by row: zero where another rank has the row (a partial sum)."""
    position, inside = local_positions(index, ctx, digits)
    rows = F.embedding(position, weight)
    if padding >= 0:  # the padding row is read but gets no gradient
        frozen = (index == padding).unsqueeze(-1)
        rows = torch.where(frozen, rows.detach(), rows)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)  # also where the row it found is infinite


def embedding_bag(
    weight: Tensor,
    rows: Tensor,
    ctx: Context,
    digits: Digits,
    mode: str,
    weights: Tensor | None = None,
    padding: int = -1,
) -> Tensor:
    """Sums or means of each line of `rows` [bag, row] of a table sharded by row (partial sums)."""
    found = embedding(weight, rows, ctx, digits)
    kept = rows != padding
    found = found * kept.unsqueeze(-1)
    if weights is not None:
        found = found * weights.unsqueeze(-1)
    total = found.sum(1)
    return total / kept.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


def ragged_bag(  # noqa: PLR0917 - torch's own arguments, and where the shard lies
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor,
    ctx: Context,
    digits: Digits,
    mode: str,
    weights: Tensor | None = None,
    padding: int = -1,
    last: bool = False,
) -> Tensor:
    """Sums or means of the rows from one offset to the next; with `last` the end is one, too."""
    starts = offsets[:-1] if last else offsets
    found = embedding(weight, rows, ctx, digits)
    bag = torch.searchsorted(starts, torch.arange(len(rows), device=rows.device), right=True) - 1
    kept = (rows != padding).to(found.dtype)
    scale = kept if weights is None else kept * weights
    total = found.new_zeros(len(starts), found.shape[1])
    total = total.index_add(0, bag, found * scale.unsqueeze(-1))
    if mode != "mean":
        return total
    count = kept.new_zeros(len(starts)).index_add(0, bag, kept)
    return total / count.clamp(min=1).unsqueeze(-1)


def pick(x: Tensor, index: Tensor, ctx: Context, digits: Digits, ignored: int = -100) -> Tensor:
    """x[n, index[n, ..], ..] where dim 1 is sharded: zero where another rank has the element.

    And where the index is `ignored`, which need not be one of the dim's.
    """
    unknown = index == ignored
    found = gather(x, 1, index.masked_fill(unknown, 0).unsqueeze(1), ctx, digits).squeeze(1)
    return found.masked_fill(unknown, 0)


def gather(x: Tensor, dim: int, index: Tensor, ctx: Context, digits: Digits) -> Tensor:
    """`torch.gather` along a sharded dim: zero where another rank has the element."""
    position, inside = local_positions(index, ctx, digits)
    found = x.gather(dim, position)
    return torch.where(inside, found, torch.zeros_like(found))


def _positions(
    indices: tuple[Tensor | None, ...], ctx: Context, digits: tuple[Digits, ...]
) -> tuple[list[Tensor | slice], Tensor]:
    """Local indices of advanced indexing, None becoming a slice, and which are all in the shard.

    `digits` are those of the indexed dims, in order. Negative indices count from the end.
    """
    places: list[Tensor | slice] = []
    inside = torch.ones((), dtype=torch.bool, device=ctx.device)
    of_dims = iter(digits)
    for index in indices:
        if index is None:
            places.append(slice(None))
            continue
        of_dim = next(of_dims)
        (size,) = global_shape((of_dim,), ctx.mesh)
        position, here = local_positions(torch.where(index < 0, index + size, index), ctx, of_dim)
        places.append(position)
        inside = inside & here
    return places, inside


def index(
    x: Tensor, indices: tuple[Tensor | None, ...], ctx: Context, digits: tuple[Digits, ...]
) -> Tensor:
    """`x[indices]` where indexed dims are sharded: zero where another rank has the element."""
    places, inside = _positions(indices, ctx, digits)
    found = x[tuple(places)]
    at = [i for i, place in enumerate(places) if isinstance(place, Tensor)]
    before = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    after = found.dim() - before - inside.dim()
    mask = inside.reshape(inside.shape + (1,) * after)
    return torch.where(mask, found, torch.zeros_like(found))


def index_each(
    x: Tensor,
    indices: tuple[Tensor | None, ...],
    each: tuple[tuple[int, int], ...],
    ctx: Context | None = None,
    digits: tuple[Digits, ...] = (),
) -> Tensor:
    """`x[indices]` with dims that are read in order, each along one dim of the indices.

    (dim, number of index dims after it) in `each`; `digits` where another indexed dim is sharded.
    """
    places = _in_order(x, indices, each)
    if ctx is not None:
        return index(x, places, ctx, digits)
    return x[tuple(slice(None) if place is None else place for place in places)]


def put_each(
    x: Tensor,
    indices: tuple[Tensor | None, ...],
    each: tuple[tuple[int, int], ...],
    values: Tensor,
    accumulate: bool,
    ctx: Context | None = None,
    digits: tuple[Digits, ...] = (),
) -> Tensor:
    """`torch.index_put` in the same way."""
    places = _in_order(x, indices, each)
    if ctx is not None:
        return index_put(x, places, values, ctx, digits, accumulate)
    written: Tensor = torch.ops.aten.index_put(x, list(places), values, accumulate)
    return written


def _in_order(
    x: Tensor, indices: tuple[Tensor | None, ...], each: tuple[tuple[int, int], ...]
) -> tuple[Tensor | None, ...]:
    """The indices with those of dims that are read in order."""
    places = [*indices, *(None for _ in range(x.dim() - len(indices)))]
    for dim, after in each:
        size = x.shape[dim]
        places[dim] = torch.arange(size, device=x.device).view(size, *[1] * after)
    return tuple(places)


def index_put(
    x: Tensor,
    indices: tuple[Tensor | None, ...],
    values: Tensor,
    ctx: Context,
    digits: tuple[Digits, ...],
    accumulate: bool = False,
) -> Tensor:
    """`torch.index_put` where indexed dims are sharded: what lies elsewhere is not written."""
    places, inside = _positions(indices, ctx, digits)
    dim = next(i for i, place in enumerate(places) if isinstance(place, Tensor))
    size = x.shape[dim]
    place = places[dim]
    assert isinstance(place, Tensor)
    places[dim] = torch.where(inside, place, place.clamp(min=size))
    given = [p if isinstance(p, Tensor) else None for p in places]
    written: Tensor = torch.ops.aten.index_put(_with_room(x, dim), given, values, accumulate)
    return written.narrow(dim, 0, size)


def write(
    op: str, x: Tensor, dim: int, index: Tensor, ctx: Context, digits: Digits, *given: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Torch's `scatter` or `index_add` and their like along a sharded dim of `x`.

    What lies in other shards goes to a row that is dropped. Torch lets the index of `index_fill`
    count from the end.
    """
    if op == "index_fill":
        (whole,) = global_shape((digits,), ctx.mesh)
        index = torch.where(index < 0, index + whole, index)
    position, inside = local_positions(index, ctx, digits)
    size = x.shape[dim]
    position = torch.where(inside, position, position.clamp(min=size))
    written: Tensor = getattr(torch, op)(_with_room(x, dim), dim, position, *given, **options)
    return written.narrow(dim, 0, size)


def write_cache(
    cache: Tensor,
    dim: int,
    position: Tensor | None,
    new: Tensor,
    ctx: Context | None = None,
    digits: Digits = (),
) -> Tensor:
    """`cache` with `new` from `position` on along `dim`, written into its memory; with `digits`
    that dim is sharded, and what belongs to other ranks is not written.
    """
    count = new.shape[dim]
    if ctx is None:
        if position is None:
            cache.narrow(dim, 0, count).copy_(new)
        else:
            cache.index_copy_(dim, position + torch.arange(count, device=cache.device), new)
        return cache
    if count == 1 and position is not None:
        place, inside = local_positions(position.reshape(1), ctx, digits)
        there = cache.index_select(dim, place)
        return cache.index_copy_(dim, place, torch.where(inside, new, there))
    # Row by row of the shard: which new row belongs there, if any does.
    source = indices(ctx, digits) - (0 if position is None else position)
    inside = (source >= 0) & (source < count)
    rows = new.index_select(dim, source.clamp(0, count - 1))
    shape = [-1 if d == dim else 1 for d in range(cache.dim())]
    cache.copy_(torch.where(inside.view(shape), rows, cache))
    return cache


def _with_room(x: Tensor, dim: int) -> Tensor:
    """`x` and one more row."""
    return torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)


def first_extreme(
    x: Tensor, top: Tensor, ctx: Context, dim: int, digits: Digits, smallest: bool = False
) -> Tensor:
    """The first global index along `dim` of an element that is no worse than `top`, kept as a dim.

    Where this rank has none it is the size of the dim, which is the largest: a minimum over ranks.
    """
    worse = x > top if smallest else x < top
    (size,) = global_shape((digits,), ctx.mesh)
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    where = indices(ctx, digits).view(shape)
    return torch.where(worse, size, where).amin(dim, True)


def triangle(
    x: Tensor, ctx: Context, rows: Digits, columns: Digits, diagonal: int, upper: bool = False
) -> Tensor:
    """`torch.tril` or `torch.triu` of the last two dims by global index."""
    offset = indices(ctx, columns) - indices(ctx, rows).unsqueeze(1)
    kept = offset >= diagonal if upper else offset <= diagonal
    return torch.where(kept, x, torch.zeros_like(x))


def as_strided(
    x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int | None = None
) -> Tensor:
    """`torch.as_strided` of memory that is all the tensor's own: one row after another, from 0 on.

    Shards and weights lie in the memory of others.
    """
    own = x.clone(memory_format=torch.contiguous_format)
    return torch.as_strided(own, size, stride, storage_offset or 0)


def as_strided_scatter(
    x: Tensor,
    src: Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    storage_offset: int | None = None,
) -> Tensor:
    """`torch.as_strided_scatter` in the same way."""
    own = x.clone(memory_format=torch.contiguous_format)
    return torch.as_strided_scatter(own, src, size, stride, storage_offset or 0)


def segment_reduce(data: Tensor, reduction: str, **options: Any) -> Tensor:
    """`torch.segment_reduce`, which reads beyond its data where offsets descend.

    Raises: RuntimeError there.
    """
    offsets = options.get("offsets")
    if offsets is not None:
        torch._assert_async((offsets.diff(dim=-1) >= 0).all(), "offsets of segments descend")
        options["offsets"] = offsets.contiguous()
    made: Tensor = torch.ops.aten.segment_reduce(data.contiguous(), reduction, **options)
    return made


def mine(whole: Tensor, ctx: Context, dims: tuple[Digits, ...]) -> Tensor:
    """This rank's shard of what every rank makes as a whole."""
    return take(whole, dims, ctx.mesh, ctx.coordinates)


def _place(ctx: Context, axes: tuple[str, ...]) -> tuple[int, int]:
    """(this rank's index, number of ranks) along joint axes, the first most significant."""
    index, count = 0, 1
    for axis in axes:
        index = index * ctx.mesh[axis].size + ctx.coordinates[axis]
        count *= ctx.mesh[axis].size
    return index, count


def rows(
    x: Tensor, ctx: Context, axes: tuple[str, ...], dim: int, start: int, drift: int, length: int
) -> Tensor:
    """The `length` rows that this rank's windows read, from `start` + rank x `drift` on."""
    place, _ = _place(ctx, axes)
    return x.narrow(dim, start + place * drift, length)


def border(
    x: Tensor,
    ctx: Context,
    axes: tuple[str, ...],
    dim: int,
    below: int,
    above: int,
    value: float | None = None,
) -> Tensor:
    """`x` with border rows; those beyond the ends of the whole tensor get `value`.

    With None they repeat its first and last rows.
    """
    place, count = _place(ctx, axes)
    size = x.shape[dim] - below - above
    low = min(max(below - place * size, 0), below)
    high = min(max(above - (count - 1 - place) * size, 0), above)
    if not low and not high:
        return x
    inner = x.narrow(dim, low, x.shape[dim] - low - high)
    ends = []
    for at, number in ((0, low), (inner.shape[dim] - 1, high)):
        edge = inner.narrow(dim, at, 1)
        edge = edge if value is None else torch.full_like(edge, value)
        ends.append(edge.expand([number if d == dim else n for d, n in enumerate(edge.shape)]))
    return torch.cat([ends[0], inner, ends[1]], dim)


def mask_tail(x: Tensor, ctx: Context, digits: Digits, valid: int) -> Tensor:
    """`x` with -inf in the last dim from global index `valid` on (padded classes)."""
    padding = indices(ctx, digits) >= valid
    return x.masked_fill(padding, float("-inf"))


def causal_mask(ctx: Context, queries: Digits, num_keys: int) -> Tensor:
    """Which keys each of this rank's queries may see, as bool [queries, keys]."""
    rows = indices(ctx, queries)
    columns = torch.arange(num_keys, device=ctx.device)
    return rows.unsqueeze(1) >= columns


class _Joined(torch.autograd.Function):
    """Rows of several tensors as one, of which some are trained."""

    @staticmethod
    def forward(ctx: Any, in_place: bool, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        return _rows_of(parts, in_place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.split(gradients[0], ctx.rows)


def _rows_of(parts: tuple[Tensor, ...], in_place: bool) -> Tensor:
    """Rows of several tensors as one: a view of them `in_place`, or a copy."""
    if not in_place:
        return torch.cat(parts)
    first = parts[0]
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _joined(parts: tuple[Tensor, ...], in_place: bool) -> Tensor:
    """Rows of several tensors as one; `in_place` where the store has laid them so."""
    # A function of autograd is traced without its context where there are no gradients.
    if not (torch.is_grad_enabled() and any(part.requires_grad for part in parts)):
        return _rows_of(parts, in_place)
    whole: Tensor = _Joined.apply(in_place, *parts)  # type: ignore[no-untyped-call]
    return whole


def linears(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] | None = None,
    *,
    in_place: tuple[str, ...] = (),
) -> tuple[Tensor, ...]:
    """`linear(x, w, b)` of each weight and bias, in one product; `in_place` names which of them lie
    one after the other in memory.
    """
    whole = _joined(weights, "weights" in in_place)
    bias = None if biases is None else _joined(biases, "biases" in in_place)
    return torch.split(F.linear(x, whole, bias), [len(weight) for weight in weights], -1)


def convs(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] | None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    in_place: tuple[str, ...] = (),
) -> tuple[Tensor, ...]:
    """Convolutions of one operand with several kernels and biases, as one; see `linears`."""
    whole = _joined(weights, "weights" in in_place)
    bias = None if biases is None else _joined(biases, "biases" in in_place)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1]
    made = convolve(x, whole, bias, stride, padding, dilation)
    return torch.split(made, [len(weight) for weight in weights], -1 - len(stride))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Batch norm that returns the new running statistics instead of writing them."""
    if not training:
        return (F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps),)
    if running_mean is None or running_var is None:
        return (F.batch_norm(x, None, None, weight, bias, True, momentum, eps),)
    out, _, _, mean, var = torch.ops.aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return out, mean, var
