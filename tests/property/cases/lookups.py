"""Example calls of lookups and writes by index."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.property.operator_cases import (
    Case,
    Operand,
    case,
    fixed,
    flag,
    index,
    positive,
    real,
)


def cases() -> list[Case]:
    return [*lookups(), *bags(), *writes(), *puts(), *caches()]


def _pick(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows.unsqueeze(1)).squeeze(1)


def _mask_tail(x: Tensor, valid: int) -> Tensor:
    return x.masked_fill(torch.arange(x.shape[-1]) >= valid, float("-inf"))


def distinct(high: int, count: int) -> Operand:
    """Different numbers below `high`."""
    return Operand((count,), "distinct", high, "batch", "int64")


def lookups() -> list[Case]:
    table = real(12, 6)
    rows = index(12, 4, 6)
    return [
        case("embedding", table, rows),
        case("embedding", table, rows, 3, label="padding"),
        case("embedding", table, rows, 0, label="padding_first"),
        case("embedding", Operand((12, 6), "infinite", role="batch"), rows, label="infinite"),
        case("index", real(6, 12), (index(6, 4),)),
        case("index", real(6, 4, 12), (None, index(4, 6, 2)), label="second"),
        case("index", real(6, 4, 12), (index(6, 4, 1), index(4, 6)), label="two"),
        case("index", real(6, 4, 12), (index(6, 4), None, index(12, 4)), label="apart"),
        case("index", real(2, 6, 4), (None, negative(6, 12)), label="negative"),
        case("index", flag(6, 4), (index(6, 4),), label="flags"),
        case("index", index(50, 6, 4), (index(6, 4),), label="integers"),
        case("index", real(6, 4), (index(6),), label="number"),
        case("_unsafe_index", real(6, 4), (None, index(4, 12))),
        *lookups_by_sample(),
        case("gather", real(4, 6), 1, index(6, 4, 12)),
        case("gather", real(4, 6, 12), -1, index(12, 4, 6, 12), label="same"),
        case("gather", real(6, 12), 0, index(6, 4, 6), label="smaller"),
        case("gather", flag(4, 6), 1, index(6, 4, 12), label="flags"),
        case("index_select", real(6, 4, 12), 1, index(4, 6)),
        case("index_select", real(6, 4), 0, index(6), label="number"),
        case("take", real(4, 6), index(24, 6, 2)),
        replace(case("parloom.pick", real(6, 12), index(12, 6)), oracle=_pick),
        replace(case("parloom.pick", real(2, 6, 4), index(6, 2, 4), label="image"), oracle=_pick),
        replace(case("parloom.mask_tail", real(4, 12), 7), oracle=_mask_tail),
        case("one_hot", index(6, 4, 2), 6),
    ]


def lookups_by_sample() -> list[Case]:
    op = "parloom.index_each"
    return [
        case(op, real(6, 12), (None, index(12, 6)), ((0, 0),)),
        case(op, real(6, 4, 12), (None, index(4, 6)), ((0, 0),), label="rows"),
        case(op, real(6, 4, 2), (None, index(4, 6, 12)), ((0, 1),), label="several"),
        case(op, real(6, 4), (None, index(4, 12)), ((0, 1),), label="the_same_for_all"),
        case(op, real(6, 4), (None, negative(4, 6)), ((0, 0),), label="negative"),
        case(op, real(4, 6, 12), (None, None, index(12, 4, 6)), ((0, 1), (1, 0)), label="two"),
        case(op, real(4, 6, 12), (None, index(6, 4, 1), None), ((0, 1), (2, 0)), label="around"),
        case(op, real(4, 6, 12), (index(4, 12), None, None), ((2, 0),), label="apart"),
        case(op, real(2, 4, 6), (None, index(4, 6), None), ((2, 0),), label="last"),
        case(op, real(6, 4, 4), (None, index(4, 6), index(4, 6)), ((0, 0),), label="elements"),
        case(op, flag(6, 4), (None, index(4, 6)), ((0, 0),), label="flags"),
    ]


def puts_by_sample() -> list[Case]:
    op = "parloom.put_each"
    order = Operand((6, 4), "order", 4, "batch", "int64")
    return [
        case(op, real(6, 12), (None, index(12, 6)), ((0, 0),), real(6), False),
        case(op, real(6, 4, 12), (None, index(4, 6)), ((0, 0),), real(6, 12), False, label="rows"),
        case(op, real(6, 4, 2), (None, order), ((0, 1),), real(6, 4, 2), False, label="several"),
        case(op, real(6, 12), (None, index(12, 6)), ((0, 0),), real(), False, label="number"),
        case(op, flag(6, 12), (None, index(12, 6)), ((0, 0),), flag(6), False, label="flags"),
        case(op, real(6, 4), (None, index(4, 6, 12)), ((0, 1),), real(6, 12), True, label="add"),
        case(op, real(6, 4), (None, index(4, 12)), ((0, 1),), real(12), True, label="add_shared"),
        case(op, real(4, 6, 12), (None, index(6, 4, 1), None), ((0, 1), (2, 0)), real(4, 12), True,
             label="add_around"),
    ]  # fmt: skip


def negative(size: int, count: int) -> Operand:
    """Indices of which some count from the end."""
    return Operand((count,), "negative", size, "batch", "int64")


def _bag(
    table: Tensor, rows: Tensor, mode: str = "sum", weights: Tensor | None = None, padding: int = -1
) -> Tensor:
    row = padding if padding >= 0 else None
    return F.embedding_bag(rows, table, mode=mode, per_sample_weights=weights, padding_idx=row)


def _ragged(
    table: Tensor, rows: Tensor, offsets: Tensor, mode: str, weights: Tensor | None, padding: int,
    last: bool,
) -> Tensor:  # fmt: skip
    return F.embedding_bag(
        rows, table, offsets, mode=mode, per_sample_weights=weights, include_last_offset=last,
        padding_idx=padding if padding >= 0 else None,
    )  # fmt: skip


def bags() -> list[Case]:
    table, rows, flat = real(12, 6), index(12, 4, 6), index(12, 12)
    offsets = Operand((4,), "starts", 12, "batch", "int64")
    ends = Operand((5,), "starts_and_end", 12, "batch", "int64")
    even, ragged = "parloom.embedding_bag", "parloom.ragged_bag"
    found = [
        case(even, table, rows),
        case(even, table, rows, "mean", label="mean"),
        case(even, table, rows, "max", label="max"),
        case(even, table, rows, "sum", real(4, 6), label="weights"),
        case(even, table, rows, "sum", None, 3, label="padding"),
        case(even, table, rows, "mean", None, 0, label="mean_padding"),
    ]
    found = [replace(c, oracle=_bag) for c in found]
    more = [
        case(ragged, table, flat, offsets, "sum", None, -1, False),
        case(ragged, table, flat, ends, "mean", None, -1, True, label="mean"),
        case(ragged, table, flat, offsets, "sum", real(12), 3, False, label="weights"),
    ]
    return [
        *found,
        *(replace(c, oracle=_ragged) for c in more),
    ]


def caches() -> list[Case]:
    cache, new = fixed(2, 6, 12, 4), fixed(2, 6, 3, 4)
    at, op = index(9), "parloom.write_cache"
    return [
        case(op, cache, 2, at, new),
        case(op, cache, 2, None, new, label="beginning"),
        case(op, cache, -2, index(12), fixed(2, 6, 1, 4), label="one"),
        case(op, fixed(6, 12), 1, None, fixed(6, 12), label="whole"),
    ]


def writes() -> list[Case]:
    x, same = real(4, 6, 12), index(6, 4, 6, 12)
    order = Operand((4, 6), "order", 6, "batch", "int64")
    rows = index(6, 12)
    return [
        case("scatter", real(4, 6), 1, order, real(4, 6)),
        case("scatter", x, 1, same, 2.5, label="value"),
        case("scatter", real(4, 12), 1, order, real(4, 6), label="wider"),
        case("scatter", real(6, 6), 1, order, real(4, 6), label="smaller"),
        case("scatter", fixed(4, 6), 1, order, 2.0, label="multiply", reduce="multiply"),
        case("scatter_add", x, 1, same, real(4, 6, 12)),
        case("scatter_add", real(4, 6), -1, index(6, 4, 12), real(4, 12), label="longer"),
        case("scatter_add", real(4, 6), 1, index(6, 4, 2), fixed(4, 6), label="source"),
        *(
            case("scatter_reduce", real(4, 6), 1, index(6, 4, 12), real(4, 12), how, label=how)
            for how in ("sum", "amax", "mean")
        ),
        case("scatter_reduce", positive(4, 6), 1, index(6, 4, 6), positive(4, 6), "prod"),
        case("scatter_reduce", real(4, 6), 1, index(6, 4, 6), real(4, 6), "sum", label="without",
             include_self=False),
        case("index_add", real(6, 4), 0, rows, real(12, 4)),
        case("index_add", real(4, 6), -1, rows, real(4, 12), label="alpha", alpha=2.0),
        case("index_copy", real(12, 4), 0, distinct(12, 6), real(6, 4)),
        case("index_fill", real(12, 4), 0, distinct(12, 6), 2.5),
        case("index_fill", real(4, 12), 1, distinct(12, 6), real(), label="tensor"),
        case("index_fill", real(4, 12), 1, negative(12, 6), 2.5, label="negative"),
        *(
            case("index_reduce", positive(6, 4), 0, rows, positive(12, 4), how, label=how)
            for how in ("amax", "mean")
        ),
    ]  # fmt: skip


def puts() -> list[Case]:
    x, rows = real(6, 4), index(6, 12)
    return [
        case("index_put", real(12, 4), (distinct(12, 6),), real(6, 4)),
        case("index_put", x, (rows,), real(12, 4), True, label="add"),
        *puts_by_sample(),
        case("put", real(4, 6), distinct(24, 6), real(6)),
        case("put", real(4, 6), index(24, 6, 2), real(6, 2), True, label="add"),
        case("index_put", x, (rows,), real(4), True, label="add_row"),
        case("index_put", x, (None, index(4, 12)), real(6, 12), True, label="add_second"),
        case("index_put", x, (rows, index(4, 12)), real(12), True, label="add_elements"),
        case("index_put", real(6, 2, 4), (index(6, 12), None, index(4, 12)), real(12, 2), True,
             label="add_apart"),
        case("index_put", x, (distinct(6, 6), index(4, 6)), real(), label="number"),
        case("index_put", x, (flag(6, 4),), real(), label="mask"),
        case("index_put", real(6, 4, 2), (flag(6, 4),), real(1), True, label="mask_add"),
        case("index_put", real(6, 4, 2), (flag(6, 4),), real(2), label="mask_rows"),
        case("index_put", fixed(6, 4), (flag(6),), real(1, 4), label="mask_line"),
    ]  # fmt: skip
