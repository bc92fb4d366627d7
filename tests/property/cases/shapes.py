"""Example calls of views, joins and rearrangements."""

from dataclasses import replace

from parloom.ir.graph import Dtype
from tests.property.operator_cases import Case, Operand, case, each, fixed, flag, index, real


def cases() -> list[Case]:
    return [*views(), *joins(), *arranged(), *diagonals(), *replicated()]


def views() -> list[Case]:
    x = real(4, 6, 12)
    return [
        case("view", real(4, 36), (4, 3, 2, 6)),
        case("view", real(4, 6, 12), (24, 12), label="merge"),
        case("view", real(4, 6), (6, 4), label="uneven"),
        case("view", real(4, 6, 1), (1, 24), label="ones"),
        case("view", real(), (1, 1), label="scalar"),
        case("view", real(0, 4, 6), (0, 24), label="empty"),
        case("view_dtype", real(4, 6), Dtype("int64")),
        case("transpose", x, 0, -1),
        case("permute", x, (2, 0, -2)),
        case("t", real(4, 6)),
        case("unsqueeze", real(4, 6), -1),
        case("unsqueeze", real(4, 6), 1, label="middle"),
        case("squeeze", real(4, 1, 6)),
        case("squeeze", real(4, 1, 6), 1, label="dim"),
        case("squeeze", real(4, 1, 6, 1), (1, 0, -1), label="dims"),
        case("expand", real(4, 1, 6), (2, 4, 12, 6)),
        case("alias", real(4, 6)),
        replace(case("parloom.either", real(4, 6), real(4, 6)), oracle=lambda x, _: x),
        case("select", x, 1, -2),
        case("unbind", real(4, 3, 6), 1),
        case("unfold", real(4, 12), 1, 3, 3),
        case("unfold", real(4, 6, 14), -1, 4, 2, label="overlap"),
        case("unfold", real(12, 4), 0, 3, 1, label="drift"),
    ]


def joins() -> list[Case]:
    halves = (("c", (2, 6)),)
    return [
        case("slice", real(4, 36), 1, 12, 24, 1),
        replace(case("slice", real(4, 36), 1, 12, 24, 1, label="inner"), parts=halves),
        case("slice", real(4, 24), 1, 12, 24, 1, label="half"),
        case("slice", real(4, 24), 1, 6, 18, 1, label="middle"),
        case("slice", real(4, 12), 1, 1, 12, 1, label="odd"),
        case("slice", real(4, 12), -1, 0, 12, 2, label="step"),
        case("slice", real(4, 12), 1, -6, None, 1, label="negative"),
        case("slice", real(4, 12), 1, 6, 6, 1, label="empty"),
        case("slice_scatter", real(4, 24), real(4, 12), 1, 12, 24),
        case("slice_scatter", real(4, 24), real(4, 6), -1, 6, 12, label="quarter"),
        case("slice_scatter", real(6, 12), real(2, 12), 0, 1, 5, 2, label="step"),
        case("select_scatter", real(4, 6, 12), real(4, 12), 1, -2),
        case("split", real(4, 36), 12, 1),
        replace(case("split", real(4, 36), 12, -1, label="inner"), parts=halves),
        case("split", real(4, 10), 4, 1, label="uneven"),
        case("split_with_sizes", real(4, 24), (12, 12), 1),
        case("split_with_sizes", real(4, 12), (6, 4, 2), 1, label="uneven"),
        case("split_with_sizes", real(4, 36), (24, 6, 6), 1, label="grouped"),
        case("chunk", real(4, 24), 2, -1),
        case("chunk", real(4, 12), 1, 1, label="one"),
        case("unsafe_split", real(4, 24), 12, 1),
        case("unsafe_split_with_sizes", real(4, 24), (12, 12), 1),
        case("unsafe_chunk", real(4, 24), 2, -1),
        case("cat", (real(4, 12), real(4, 12), real(4, 12)), 1),
        replace(case("cat", (real(4, 12), real(4, 12)), -1, label="inner"), parts=halves),
        case("cat", (real(4, 6), real(4, 12)), 1, label="uneven"),
        case("cat", (real(4, 6), real(4, 6)), label="default"),
        case("cat", (real(0), real(4, 6), real(4, 6)), 1, label="empty"),
        case("cat", (index(9, 4, 6), index(9, 4, 6)), label="integers"),
        case("stack", (real(4, 6), real(4, 6)), 1),
        case("glu", real(4, 24)),
        case("glu", real(12, 6), 0, label="first"),
    ]


def arranged() -> list[Case]:
    x = real(4, 6, 12)
    return [
        case("repeat", real(4, 6), (3, 1, 2)),
        case("repeat", real(4, 6), (1, 1), label="once"),
        case("repeat_interleave", real(4, 6), 2, 0),
        case("repeat_interleave", real(4, 6), 3, -1, label="last"),
        case("repeat_interleave", real(4, 6), 2, label="flat"),
        case("repeat_interleave", real(4, 6), index(4, 4), 0, label="tensor"),
        case("flip", x, (1,)),
        case("flip", x, (0, -1), label="two"),
        case("roll", x, (2,), (1,)),
        case("roll", x, (3, -1), (2, 0), label="two"),
        case("roll", real(4, 12), (6,), (1,), label="half"),
        case("roll", real(4, 6), (3,), label="flat"),
        case("rot90", x, 1, (1, 2)),
        case("rot90", real(4, 6), 2, label="half", dims=(0, 1)),
        case("diff", real(4, 6)),
        case("diff", real(4, 6), 2, 0, label="dim"),
        case("diff", real(4, 6), 1, -1, real(4, 2), label="prepend"),
        *each("tril triu", real(2, 4, 6)),
        *each("tril triu", real(6, 12), -1, label="below"),
        case("triu", real(2, 6, 6), 1, label="above"),
        case("tril", flag(6, 6), label="mask"),
        case("pixel_shuffle", real(2, 24, 4, 6), 2),
        case("pixel_unshuffle", real(2, 4, 8, 12), 2),
        case("channel_shuffle", real(2, 12, 4, 6), 2),
    ]


def diagonals() -> list[Case]:
    return [
        *each("diagonal diagonal_copy", real(4, 6)),
        case("diagonal", real(4, 6, 6), 1, -1, 1, label="offset"),
        case("diag_embed", real(4, 6)),
        case("diagonal_scatter", real(4, 6, 4), real(4, 4)),
        case("diagonal_scatter", real(4, 6, 6), real(4, 5), 1, -1, 1, label="offset"),
        case("diag_embed", real(4, 6), 1, 0, 2, label="offset"),
        case("trace", real(4, 6)),
    ]


def replicated() -> list[Case]:
    starts = Operand((3,), "starts", 6, "batch", "int64")
    ends = Operand((3,), "starts_and_end", 4, "batch", "int64")
    return [
        case("as_strided", real(4, 6), (2, 3), (6, 1), 1),
        case("as_strided_scatter", real(4, 6), real(2, 3), (2, 3), (6, 1), 1),
        case("block_diag", (real(4, 6), real(2, 2))),
        case("histogram", fixed(4, 6), 3),
        case("segment_reduce", real(4, 6), "mean", offsets=ends),
        case("masked_scatter", real(4, 6), flag(4, 6), real(4, 6)),
        case("nonzero_static", flag(4, 6), size=5),
        case("pdist", real(4, 6)),
        case("embedding_bag", real(12, 6), index(12, 6), starts, False, 2),
    ]
