"""Example calls of convolutions, pooling and resampling."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.property.operator_cases import (
    Case,
    Operand,
    case,
    each,
    index,
    real,
)


def cases() -> list[Case]:
    return [*convolutions(), *joined(), *transposed(), *pooling(), *padding(), *resampling()]


def convolutions() -> list[Case]:
    x = real(2, 6, 12, 6)
    return [
        case("conv1d", real(4, 6, 12), real(12, 6, 3), real(12), (1,), (1,)),
        case("conv2d", x, real(4, 6, 3, 3), None, (1, 1), (1, 1)),
        case("conv2d", x, real(4, 6, 3, 3), real(4), (2, 2), (1, 1), label="stride"),
        case("conv2d", x, real(4, 6, 1, 1), real(4), (2, 2), label="skip"),
        case("conv2d", x, real(4, 6, 5, 3), real(4), (1, 1), (2, 0), label="tall"),
        case("conv2d", x, real(4, 6, 3, 3), None, (1, 1), (2, 2), (2, 2), label="dilation"),
        case("conv2d", x, real(12, 2, 3, 3), real(12), (1, 1), (1, 1), (1, 1), 3, label="groups"),
        case("conv2d", x, real(6, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 6, label="depthwise"),
        case("conv2d", real(4, 3, 8, 12), real(4, 3, 4, 4), None, (4, 4), label="patches"),
        case("conv2d", x, real(4, 6, 3, 3), real(4), label="default"),
        case("conv3d", real(2, 2, 4, 6, 6), real(4, 2, 3, 3, 3), None, (1, 1, 1), (1, 1, 1)),
        case("conv1d", real(4, 6, 12), real(12, 6, 3), label="valid"),
        case("conv1d", real(2, 4, 16), real(6, 4, 5), label="drift"),
        case("conv1d", real(2, 4, 12), real(6, 4, 4), None, (1,), "same", label="same_even"),
        case("conv2d", x, real(4, 6, 2, 4), None, (1, 1), "same", label="same"),
        case("conv1d", real(2, 4, 12), real(6, 4, 9), None, (1,), (4,), label="reaching_far"),
        case("conv1d", real(2, 4, 12), real(6, 4, 2), None, (1,), (3,), label="wide_padding"),
        case("conv1d", real(2, 4, 16), real(6, 4, 3), None, (3,), (1,), label="long_steps"),
        case("conv2d", real(6, 12, 6), real(4, 6, 3, 3), real(4), (1, 1), (1, 1), label="single"),
    ]


def joined() -> list[Case]:
    """Kernels of equally many rows, of rows with a common divisor, and of one spatial dim."""
    x, pair = real(2, 6, 12, 6), (real(4, 6, 3, 3), real(4, 6, 3, 3))
    wide, biases = (real(8, 6, 1, 1), real(4, 6, 1, 1)), (real(8), real(4))
    line = (real(6, 4, 3), real(3, 4, 3))
    return [
        replace(own, oracle=_convolutions)
        for own in (
            case("parloom.convs", x, pair, None, (1, 1), (1, 1), (1, 1)),
            case("parloom.convs", x, wide, biases, (2, 2), (0, 0), (1, 1), label="biases"),
            case("parloom.convs", real(4, 4, 12), line, None, (1,), "same", (1,), label="line"),
        )
    ]


def _convolutions(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...] | None, *settings: Any
) -> tuple[Tensor, ...]:
    """Each convolution alone."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[weights[0].dim() - 3]
    each = biases or (None,) * len(weights)
    return tuple(convolve(x, w, b, *settings) for w, b in zip(weights, each, strict=True))


def transposed() -> list[Case]:
    x = real(2, 6, 12, 6)
    op = "conv_transpose1d"
    y = real(2, 4, 12)
    return [
        case(op, y, real(4, 6, 3), real(6), (2,), (1,)),
        case(op, y, real(4, 6, 3), real(6), (2,), (1,), (1,), label="double"),
        case(op, y, real(4, 6, 4), None, (2,), (1,), label="even"),
        case(op, y, real(4, 6, 3), None, (1,), (1,), label="same"),
        case(op, y, real(4, 6, 2), None, (3,), (0,), (1,), label="gaps"),
        case(op, y, real(4, 6, 7), None, (1,), (3,), label="reaching_far"),
        case(op, y, real(4, 6, 3), None, (1,), (2,), (0,), 1, (2,), label="dilation"),
        case(op, real(4, 12), real(4, 6, 2), None, (2,), label="single"),
        case("conv_transpose2d", x, real(6, 4, 2, 2), real(4), (2, 2)),
        case("conv_transpose2d", x, real(6, 2, 3, 3), real(4), (1, 1), (1, 1), (0, 0), 2,
             label="groups"),
        case("conv_transpose3d", real(2, 2, 4, 6, 6), real(2, 4, 2, 2, 2), real(4)),
    ]  # fmt: skip


def pooling() -> list[Case]:
    x = real(2, 6, 12, 6)
    return [
        case("max_pool1d", real(4, 6, 12), (2,), (2,)),
        case("max_pool2d", x, (2, 2)),
        case("max_pool2d", x, (3, 3), (2, 2), (1, 1), label="padding"),
        case("max_pool2d", real(2, 6, 7, 6), (2, 2), (2, 2), 0, 1, True, label="ceil"),
        case("max_pool1d", real(2, 4, 11), (3,), (2,), (1,), 1, True, label="ceil_even"),
        case("max_pool1d", real(2, 4, 12), (3,), (1,), (1,), 2, label="dilation"),
        case("max_pool1d", real(4, 14), (3,), (1,), label="drift"),
        case("max_pool3d", real(2, 2, 4, 6, 6), (2, 2, 2)),
        case("max_pool2d_with_indices", real(2, 4, 6, 4), (2, 2)),
        case("max_pool3d_with_indices", real(2, 2, 2, 4, 4), (2, 2, 2)),
        case("fractional_max_pool2d", real(2, 4, 6, 6), (2, 2), (3, 3),
             Operand((2, 4, 2), "unit", role="batch")),
        case("fractional_max_pool3d", real(2, 4, 4, 4, 4), (2, 2, 2), (2, 2, 2),
             Operand((2, 4, 3), "unit", role="batch")),
        case("max_unpool2d", real(2, 4, 2, 2), index(16, 2, 4, 2, 2), (4, 4)),
        case("max_unpool3d", real(2, 4, 1, 2, 2), index(16, 2, 4, 1, 2, 2), (2, 4, 4), (2, 2, 2),
             (0, 0, 0)),
        case("avg_pool1d", real(4, 6, 12), (2,)),
        case("avg_pool1d", real(2, 4, 14), (3,), (1,), label="drift"),
        case("avg_pool2d", x, (3, 3), (1, 1), (1, 1)),
        case("avg_pool2d", x, (2, 2), label="plain"),
        case("avg_pool2d", x, (3, 3), (1, 1), (1, 1), False, False, label="exclude"),
        case("avg_pool2d", x, (2, 2), (2, 2), 0, False, True, 3, label="divisor"),
        case("avg_pool2d", real(2, 4, 11, 6), (3, 3), (2, 2), (1, 1), True, label="ceil"),
        case("avg_pool3d", real(2, 2, 4, 6, 6), (2, 2, 2)),
        case("adaptive_avg_pool1d", real(4, 6, 12), (1,)),
        case("adaptive_avg_pool2d", x, (1, 1)),
        case("adaptive_avg_pool2d", x, (4, 3), label="some"),
        case("adaptive_avg_pool2d", x, (5, 6), label="uneven"),
        case("adaptive_avg_pool2d", x, (1, 3), label="mixed"),
        case("adaptive_avg_pool3d", real(2, 2, 4, 6, 6), (1, 1, 1)),
        case("adaptive_max_pool1d", real(2, 4, 6), (3,)),
        case("adaptive_max_pool2d", real(2, 4, 6, 4), (2, 2)),
        case("adaptive_max_pool3d", real(2, 2, 2, 4, 4), (1, 2, 2)),
    ]  # fmt: skip


def padding() -> list[Case]:
    x = real(4, 6, 12)
    return [
        case("pad", x, (0, 0, 1, 2)),
        case("pad", x, (1, 2, 1, 1), label="uneven"),
        case("pad", x, (2, 2, 3, 3), "constant", 1.5, label="value"),
        case("pad", x, (-2, -2), label="crop"),
        case("pad", x, (-1, 4), label="shift"),
        case("pad", x, (0, 12), label="double"),
        case("pad", x, (1, 1), "reflect", label="reflect"),
        case("pad", x, (1, 2), "replicate", label="replicate"),
        case("pad", x, (1, 2), "circular", label="circular"),
        case("constant_pad_nd", x, (1, 2), 0.5),
    ]


def resampling() -> list[Case]:
    line, x, cube = real(2, 4, 6), real(2, 4, 4, 6), real(2, 2, 2, 4, 6)
    sizes = {"1d": (12,), "2d": (8, 9), "3d": (4, 4, 3)}
    images = {"1d": line, "2d": x, "3d": cube}
    found = [
        case(f"{name}{n}", images[n], sizes[n], *(None,) * len(sizes[n]))
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in images
    ]
    smooth = (("upsample_linear1d", "1d"), ("upsample_bilinear2d", "2d"),
              ("upsample_trilinear3d", "3d"), ("upsample_bicubic2d", "2d"))  # fmt: skip
    found += [
        case(name, images[n], sizes[n], False, *(None,) * len(sizes[n])) for name, n in smooth
    ]
    grid = Operand((2, 6, 4, 2), "unit")
    return [
        *found,
        case("upsample_nearest2d", x, None, (2.0, 1.5), label="scales"),
        case("upsample_nearest1d", real(2, 4, 12), None, (0.5,), label="half"),
        case("upsample_nearest1d", real(2, 4, 9), None, (0.34,), label="inexact"),
        case("upsample_bilinear2d", x, None, False, (2.0, 3.0), label="scales"),
        case("upsample_bilinear2d", x, (8, 12), True, label="corners"),
        case("upsample_bilinear2d", real(2, 4, 12, 6), (4, 3), False, label="smaller"),
        case("upsample_bicubic2d", x, (8, 12), False, label="double"),
        *each("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", x, (2, 3), False),
        case("grid_sampler", x, grid, 0, 0, False),
        case("grid_sampler", x, grid, 1, 1, True, label="nearest"),
        case("affine_grid_generator", real(4, 2, 3), (4, 2, 3, 6), False),
        case("im2col", x, (3, 3), (1, 1), (1, 1), (1, 1)),
        case("col2im", real(2, 16, 6), (4, 6), (2, 2), (1, 1), (0, 0), (2, 2)),
    ]
