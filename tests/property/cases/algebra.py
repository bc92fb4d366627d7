"""Example calls of products, matrix functions and transforms."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.property.operator_cases import (
    Case,
    Operand,
    case,
    each,
    fixed,
    index,
    matrices,
    pairs,
    real,
)


def _linears(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Each product alone."""
    each = biases or (None,) * len(weights)
    return tuple(F.linear(x, w, b) for w, b in zip(weights, each, strict=True))


def cases() -> list[Case]:
    return [*products(), *linears(), *sums_of_products(), *decompositions(), *transforms()]


def linears() -> list[Case]:
    """Of equal rows, of rows with a common divisor, and of none."""
    x, equal = real(4, 6, 12), (real(6, 12), real(6, 12))
    weights, biases = (real(24, 12), real(12, 12), real(12, 12)), (real(24), real(12), real(12))
    return [
        replace(own, oracle=_linears)
        for own in (
            case("parloom.linears", x, equal),
            case("parloom.linears", x, weights, biases, label="biases"),
            case("parloom.linears", real(4, 12), (real(2, 12), real(3, 12)), label="apart"),
        )
    ]


def products() -> list[Case]:
    return [
        case("linear", real(4, 6, 12), real(6, 12)),
        case("linear", real(4, 12), real(12, 12), real(12), label="bias"),
        case("linear", real(12), real(6, 12), real(6), label="vector"),
        case("linear", real(4, 6, 12), real(12), label="weight_vector"),
        case("linear", real(4, 6, 12), real(12), real(), label="weight_vector_bias"),
        case("mm", real(4, 12), real(12, 6)),
        case("mm", pairs(4, 6), pairs(6, 2), label="complex"),
        case("bmm", real(4, 6, 12), real(4, 12, 6)),
        case("mv", real(4, 12), real(12)),
        case("matmul", real(4, 6, 12), real(12, 6)),
        case("matmul", real(2, 1, 6, 12), real(4, 12, 6), label="broadcast"),
        case("matmul", real(12), real(4, 12, 6), label="left_vector"),
        case("matmul", real(4, 6, 12), real(12), label="right_vector"),
        case("matmul", real(12), real(12), label="vectors"),
        case("dot", real(12), real(12)),
        case("vdot", pairs(12), pairs(12)),
        case("einsum", "bij,bjk->bik", (real(4, 6, 12), real(4, 12, 6))),
        case("einsum", "bi,bj,ij->b", (real(4, 6), real(4, 12), real(6, 12)), label="three"),
        case("einsum", "bij->jb", (real(4, 6, 12),), label="one"),
        case("einsum", "kj,ik", (real(12, 6), real(4, 12)), label="implicit"),
        case("einsum", "...j,jk->...k", (real(2, 4, 12), real(12, 6)), label="dots"),
        case("einsum", "...ij,...jk", (real(2, 4, 6), real(6, 1, 6, 4)), label="dots_broadcast"),
        case("einsum", "iij->ij", (real(4, 4, 6),), label="diagonal"),
    ]


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    group = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    return torch.einsum("tk,tkn->tn", x, weights[group])


def sums_of_products() -> list[Case]:
    grouped = case(
        "transformers.grouped_mm_fallback", real(12, 6), real(3, 6, 4),
        replace(index(12, 3), kind="ends", high=12),
    )  # fmt: skip
    return [
        case("addmm", real(6), real(4, 12), real(12, 6)),
        case("addmm", real(4, 6), real(4, 12), real(12, 6), label="full"),
        case("addmm", real(4, 1), real(4, 12), real(12, 6), label="scaled", beta=0.5, alpha=2.0),
        case("addmv", real(4), real(4, 12), real(12), alpha=2.0),
        case("addr", real(4, 6), real(4), real(6), beta=0.5),
        case("baddbmm", real(4, 6, 6), real(4, 6, 12), real(4, 12, 6)),
        case("baddbmm", real(4, 1, 6), real(4, 6, 12), real(4, 12, 6), label="rows", beta=0.5),
        case("addbmm", real(6, 6), real(4, 6, 12), real(4, 12, 6), beta=0.5),
        case("bilinear", real(4, 6), real(4, 12), real(6, 6, 12), real(6)),
        case("bilinear", real(2, 4, 6), real(2, 4, 3), real(6, 6, 3), None, label="plain"),
        case("linalg_cross", real(4, 3, 6), real(4, 3, 6), dim=1),
        case("linalg_cross", real(4, 3), real(1, 3), label="broadcast"),
        case("cdist", real(2, 4, 6), real(2, 6, 6)),
        case("cdist", real(4, 6), real(6, 6), 1.0, label="one"),
        case("cdist", real(4, 6), real(6, 6), 2.0, 2, label="mode"),
        replace(grouped, oracle=_grouped),
    ]


def decompositions() -> list[Case]:
    spd, x = matrices(6, 4, 4), real(6, 4, 4)
    lower = replace(matrices(6, 4, 4))
    pivots = Operand((6, 4), "pivots", 4, "batch", "int32")
    return [
        *each("linalg_cholesky linalg_inv inverse linalg_pinv", spd),
        *each("linalg_cholesky_ex linalg_inv_ex", spd),
        *each("det linalg_det logdet slogdet linalg_slogdet", spd),
        *each("linalg_svdvals linalg_eigvalsh", spd),
        *each("linalg_qr linalg_eigh linalg_lu_factor", fixed(6, 4, 4)),
        *each("cholesky linalg_lu_factor_ex linalg_lu linalg_eigvals", spd),
        case("cholesky_inverse", spd),
        *each("linalg_eig geqrf linalg_ldl_factor_ex", fixed(6, 4, 4)),
        case("linalg_lu_solve", spd, pivots, real(6, 4, 2)),
        case("lu_unpack", x, pivots),
        case("linalg_ldl_solve", replace(spd, role="batch"), pivots, fixed(6, 4, 2)),
        case("triangular_solve", real(6, 4, 2), lower),
        case("linalg_householder_product", real(6, 4, 3), real(6, 3)),
        case("ormqr", real(6, 4, 3), real(6, 3), real(6, 4, 2)),
        case("linalg_svd", fixed(6, 4, 3), False),
        case("linalg_solve", spd, real(6, 4, 2)),
        case("linalg_solve", spd, real(6, 4), label="vectors"),
        case("linalg_solve_triangular", lower, real(6, 4, 2), upper=False),
        case("cholesky_solve", real(6, 4, 2), lower),
        case("linalg_matrix_exp", x),
        *each("matrix_power linalg_matrix_power", x, 3),
        case("inverse", matrices(4, 4), label="single"),
    ]


def transforms() -> list[Case]:
    x, z, image = real(4, 6), pairs(4, 6), real(2, 4, 6)
    half = pairs(2, 4, 4)
    signal, window = real(6, 24), fixed(8)
    return [
        *each("fft_fft fft_ifft fft_hfft", z),
        *each("fft_fft fft_rfft fft_ihfft", x, label="real"),
        case("fft_rfft", x, 8, 0, "ortho"),
        case("fft_irfft", z, 6, 1),
        case("fft_ihfft", x, None, 0),
        *each("fft_fft2 fft_ifft2", pairs(2, 4, 6)),
        case("fft_rfft2", image),
        case("fft_irfft2", half, (4, 6)),
        *each("fft_fftn fft_ifftn", pairs(2, 4, 6), None, (0, 2)),
        case("fft_rfftn", image, None, (1, 2)),
        case("fft_rfftn", image, (4, 4), label="sizes"),
        case("fft_irfftn", half, None, (1, 2)),
        case("fft_fftn", real(2, 6), label="all"),
        case("stft", signal, 8, 4, 8, window, False, None, True),
        case("stft", real(24), 8, None, None, window, False, None, True, label="single"),
        case("istft", pairs(6, 5, 6), 8, 4, 8, Operand((8,), "positive", role="batch")),
    ]
