"""Example calls of reductions, scans and factories."""

from dataclasses import replace

import torch
from torch import Tensor

from parloom.ir.graph import Dtype
from tests.property.operator_cases import (
    Case,
    Operand,
    case,
    each,
    fixed,
    flag,
    index,
    pairs,
    positive,
    real,
    single,
)

TIES = Operand((4, 6), "ties")


def cases() -> list[Case]:
    return [*sums(), *spreads(), *extremes(), *scans(), *factories()]


def sums() -> list[Case]:
    x = real(4, 6, 12)
    zeros = Operand((4, 6), "rounded")
    return [
        case("sum", x),
        case("sum", x, (0, -1), label="dims"),
        case("sum", x, (1,), True, label="keep"),
        case("sum", flag(4, 6), (1,), label="count"),
        case("sum", real(), label="scalar"),
        case("sum", real(0, 6), (0,), label="empty"),
        case("sum", pairs(4, 6), (1,), label="complex"),
        case("nansum", x, (1,)),
        case("mean", x),
        case("mean", x, (1, 2), True, label="keep"),
        case("mean", x, (0,), label="dim"),
        case("mean", index(9, 4, 6), (0,), label="cast", dtype=Dtype("float64")),
        case("count_nonzero", zeros),
        case("count_nonzero", zeros, 1, label="dim"),
        case("count_nonzero", zeros, (0, 1), label="dims"),
        *each("any all", flag(4, 6), 1),
        *each("any all", flag(4, 6), label="whole"),
        *each("any all", flag(4, 6), (0,), True, label="keep"),
        *each("any all", flag(4, 6), (), label="of_no_dims"),
        case("prod", positive(4, 6), 1),
        case("logsumexp", x, (1,), True),
        case("logsumexp", x, (0, 2), label="dims"),
        *each("softmax log_softmax", x, -1),
        *each("softmax log_softmax", x, 1, label="middle"),
        *(
            replace(c, tolerance=1e-4)
            for c in each("softmax log_softmax", single(4, 6), -1, Dtype("float64"), label="cast")
        ),
    ]


def spreads() -> list[Case]:
    x = real(4, 6, 12)
    infinity = float("inf")
    return [
        *each("var std var_mean std_mean", x, (1,)),
        *each("var std", x, (0, 2), False, True, label="keep"),
        *each("var std var_mean std_mean", real(4, 6), label="all", correction=0),
        case("var", real(4, 6), False, label="biased"),
        case("std_mean", real(4, 6), (0,), label="named", correction=2, keepdim=True),
        *each("var std", pairs(4, 6), (1,), label="complex"),
        case("std", pairs(6, 4), (0, 1), label="complex_all", correction=0, keepdim=True),
        *each("linalg_vector_norm norm", real(4, 6), 2, (1,)),
        *each("linalg_vector_norm norm", real(4, 6), 3.0, (0,), True, label="three"),
        case("linalg_vector_norm", x, label="all"),
        case("linalg_vector_norm", x, 1, (0, 2), label="one"),
        case("linalg_vector_norm", TIES, infinity, (1,), label="largest"),
        case("linalg_vector_norm", TIES, -infinity, (1,), label="smallest"),
        case("linalg_vector_norm", real(4, 6), 0, (1,), label="count"),
        case("linalg_vector_norm", Operand((4, 6), "zeros"), 2, (1,), label="zero"),
        case("linalg_vector_norm", Operand((4, 6), "zeros"), 0.5, (1,), label="half"),
        case("linalg_vector_norm", Operand((6, 4), "zeros"), 0.5, (0,), label="half_across"),
        case("norm", real(4, 6), 2, label="all"),
        case("dist", real(4, 6), real(6)),
        case("dist", real(4, 6), real(4, 6), 1, label="one"),
        case("renorm", real(4, 6, 2), 2, 1, 0.5),
    ]


def _first_max(x: Tensor, top: Tensor, dim: int) -> Tensor:
    """The first index of an element that reaches `top`, or the number of elements."""
    where = torch.arange(x.shape[dim]).expand_as(x)
    return torch.where(x >= top, where, x.shape[dim]).amin(dim, True)


def _first_min(x: Tensor, top: Tensor, dim: int) -> Tensor:
    return _first_max(-x, -top, dim)


def extremes() -> list[Case]:
    x = real(4, 6, 12)
    return [
        *each("amax amin", x, (-1,), True),
        *each("amax amin", TIES, (1,), label="ties"),
        *each("amax amin", real(4, 6), label="all"),
        *each("amax amin", index(9, 4, 6), (1,), label="integers"),
        *(
            replace(case(f"parloom.{n}", fixed(4, 6), (1,), True), oracle=getattr(torch, n))
            for n in ("amax", "amin")
        ),
        replace(case("parloom.first_max", fixed(4, 6), fixed(4, 1), 1), oracle=_first_max),
        replace(case("parloom.first_min", fixed(4, 6), fixed(4, 1), 1), oracle=_first_min),
        *each("argmax argmin", x, 1),
        *each("argmax argmin", TIES, 1, label="ties"),
        *each("argmax argmin", real(4, 6), label="all"),
        *each("argmax argmin", real(4, 6), -1, True, label="keep"),
        *each("max min", x, 1),
        *each("max min", TIES, -1, True, label="ties"),
        *each("max min", TIES, label="all"),
        *each("max min", real(4, 6), real(6), label="two"),
        *each("max min", index(9, 4, 6), 0, label="integers"),
        case("max", flag(4, 6), 1, label="flags"),
        case("aminmax", TIES, dim=1),
        case("aminmax", real(4, 6), label="keep", dim=0, keepdim=True),
        case("aminmax", real(4, 6), label="all"),
    ]


def scans() -> list[Case]:
    x, ordered = real(4, 6, 12), Operand((4, 6), "sorted", role="batch")
    row = Operand((6,), "sorted", role="batch")
    return [
        *each("cumsum logcumsumexp cummax cummin", x, 1),
        case("cumprod", positive(4, 6), 1),
        case("cumsum", index(9, 4, 6), 0, label="integers"),
        case("cumsum", real(2, 30), 1, label="blocks"),
        case("cumsum", flag(12, 2), 0, label="count"),
        replace(
            case("cumsum", single(4, 6), 0, label="cast", dtype=Dtype("float64")), tolerance=1e-4
        ),
        replace(case("parloom.cumsum", real(4, 6), 1), oracle=torch.cumsum),
        case("cumsum", real(), 0, label="scalar"),
        case("cumsum", real(0, 6), 0, label="empty"),
        case("cumsum", pairs(6, 4), 0, label="complex"),
        case("sort", x, 1, True),
        case("sort", real(4, 6), label="default"),
        case("sort", TIES, label="stable", stable=True, dim=0),
        case("argsort", x, 1),
        case("argsort", TIES, label="stable", stable=True, dim=0, descending=True),
        case("topk", x, 2, 1),
        *each("kthvalue", x, 2, 1),
        case("kthvalue", x, 2, -1, True, label="keep"),
        *each("median nanmedian mode", x, 1),
        *each("median nanmedian", real(4, 7), label="all"),
        case("mode", real(4, 6), label="default"),
        case("searchsorted", row, fixed(4, 6)),
        case("searchsorted", ordered, fixed(4, 12), label="rows"),
        case("searchsorted", row, 0.3, label="number"),
        case("bucketize", fixed(4, 6), row),
        case("isin", index(9, 4, 6), index(9, 2, 2)),
        case("isin", index(9, 4, 6), 3, label="number"),
        case("isin", 3, index(9, 4), label="in", invert=True),
        case("histc", fixed(4, 6), 6, -1, 1),
        case("histc", fixed(4, 6), 6, label="free"),
    ]  # fmt: skip


def factories() -> list[Case]:
    f64, i64 = Dtype("float64"), Dtype("int64")
    return [
        case("arange", 12, dtype=i64),
        case("arange", 3, 15, label="start", dtype=f64),
        case("arange", 2, 26, 2, label="step", dtype=i64),
        case("arange", 0.3, 1.5, 0.1, label="real", dtype=f64),
        case("full", (4, 6), 2.5, dtype=f64),
        case("full", (), 2.5, label="scalar", dtype=f64),
        case("zeros", (4, 6), dtype=f64),
        case("zeros", (0, 6), label="empty", dtype=f64),
        case("ones", (4, 6), dtype=i64),
        case("scalar_tensor", 1.5, dtype=f64),
        *each("linspace logspace", 0, 1, 12, dtype=f64),
        case("eye", 6, dtype=f64),
        case("eye", 4, 6, label="wide", dtype=f64),
        *each("tril_indices triu_indices", 4, 3, dtype=i64),
        *each("hann_window hamming_window blackman_window bartlett_window kaiser_window", 12,
              dtype=f64),
        case("hann_window", 12, False, label="symmetric", dtype=f64),
        case("fft_fftfreq", 12, 0.5, dtype=f64),
        case("fft_rfftfreq", 10, dtype=f64),
    ]  # fmt: skip
