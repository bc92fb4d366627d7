"""Example calls of every operator in the registry, as data for `test_operators`.

Sizes are products of 2 and 3 so that axes of both sizes, alone and jointly, find a factor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parloom.ir.graph import Dtype

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor argument; `kind` says how values are drawn, `role` how it enters the program."""

    shape: Shape
    kind: str = "normal"
    high: int = 0
    role: str = "parameter"
    dtype: str = "float64"

    def draw(self, generator: torch.Generator) -> Tensor:
        if self.kind == "index":
            return torch.randint(0, self.high, self.shape, generator=generator)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=generator) < 0.6
        drawn = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "positive":
            drawn = drawn.abs() + 0.5
        elif self.kind == "unit":
            drawn = drawn.sigmoid() * 0.9 + 0.05
        elif self.kind == "far":  # a mean that a low precision cannot subtract
            drawn = drawn + 30.0
        elif self.kind == "ties":  # every value many times, none of them at a kink
            drawn = drawn.round() + 0.25
        return drawn.to(getattr(torch, self.dtype))


@dataclass(frozen=True, eq=False)
class Case:
    """One call: `args` and `kwargs` as in a graph node, with `Operand`s where tensors stand.

    `oracle` replaces ATen's operator as the reference; `parts` cut factors further; `updates` names
    the results that are new values of the buffers among the operands; `tolerance` is not the
    gate's where a case is about float32.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    oracle: Callable[..., Any] | None = None
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    updates: tuple[int, ...] = ()
    tolerance: float = 1e-9

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


def real(*shape: int) -> Operand:
    return Operand(shape)


def positive(*shape: int) -> Operand:
    return Operand(shape, "positive")


def unit(*shape: int) -> Operand:
    return Operand(shape, "unit")


def fixed(*shape: int) -> Operand:
    """A real tensor that is not trained."""
    return Operand(shape, role="batch")


def index(high: int, *shape: int) -> Operand:
    return Operand(shape, "index", high, "batch", "int64")


def flag(*shape: int) -> Operand:
    return Operand(shape, "bool", 0, "batch", "bool")


def buffer(*shape: int) -> Operand:
    return Operand(shape, "positive", role="buffer")


def single(*shape: int) -> Operand:
    return Operand(shape, dtype="float32")


def case(op: str, *args: Any, label: str = "", **kwargs: Any) -> Case:
    return Case(op, args, tuple(kwargs.items()), label)


def _each(names: str, *args: Any, label: str = "", **kwargs: Any) -> list[Case]:
    return [case(name, *args, label=label, **kwargs) for name in names.split()]


def elementwise() -> list[Case]:
    x, y = real(4, 1, 6), real(2, 6)
    n, m = index(7, 4, 6), index(7, 6)
    return [
        *_each("add sub mul maximum minimum atan2", x, y),
        *_each("add sub mul div", x, 2.5, label="scalar"),
        *_each("add sub", x, y, label="alpha", alpha=3),
        case("mul", same := real(4, 6), same, label="same"),
        case("div", x, positive(2, 6)),
        case("div", n, 2, label="floor", rounding_mode="floor"),
        case("div", x, positive(2, 6), label="trunc", rounding_mode="trunc"),
        *_each("eq ne lt le gt ge", n, m),
        *_each("eq gt", n, 3, label="scalar"),
        *_each("__and__ __or__ __xor__ bitwise_and bitwise_or", flag(4, 6), flag(6)),
        *_each("logical_and logical_or", flag(4, 6), flag(6)),
        *_each("logical_not bitwise_not", flag(4, 6)),
        case("remainder", n, 3),
        case("floor_divide", n, 3),
        case("remainder", real(4, 6), 1.5, label="real"),
        *_each("exp tanh sigmoid sin cos abs erf square expm1 relu neg sign", real(4, 6)),
        *_each("floor ceil round isnan", real(4, 6)),
        *_each("rsqrt sqrt reciprocal log log1p", positive(4, 6)),
        *_each("gelu silu softplus elu leaky_relu hardtanh hardswish mish", real(4, 6)),
        case("gelu", real(4, 6), label="tanh", approximate="tanh"),
        case("softplus", real(4, 6), 2.0, 1.5, label="arguments"),
        case("elu", real(4, 6), 0.7, label="arguments"),
        case("elu", real(4, 6), 0.7, 1.3, 0.9, label="selu"),
        case("leaky_relu", real(4, 6), 0.3, label="arguments"),
        case("hardtanh", real(4, 6), -0.5, 0.7, label="arguments"),
        case("pow", positive(4, 6), 3),
        case("pow", positive(4, 6), real(6), label="tensor"),
        case("pow", 2.0, real(4, 6), label="base"),
        case("clamp", real(4, 6), -0.5, 0.5),
        case("clamp", real(4, 6), None, 0.5, label="above"),
        case("clamp_min", real(4, 6), -0.5),
        case("clamp_max", real(4, 6), real(6), label="tensor"),
        case("hardsigmoid", real(4, 6)),
        case("rsub", x, y),
        case("rsub", x, 1, 2, label="alpha"),
        case("where", flag(4, 1, 6), x, y),
        case("where", flag(4, 6), real(4, 6), 0.0, label="scalar"),
        case("masked_fill", real(4, 6), flag(6), -3.0),
        case("_to_copy", n, dtype=Dtype("float64")),
        case("_to_copy", real(4, 6), label="float", dtype=Dtype("float64")),
        case("clone", real(4, 6)),
        case("clone", real(4, 6), label="contiguous", memory_format="contiguous_format"),
        case("detach", real(4, 6)),
        case("lerp", real(4, 6), real(4, 6), 0.3),
        case("lerp", real(4, 6), real(6), real(4, 1), label="tensor"),
        case("addcmul", real(4, 6), real(6), real(4, 1), value=0.5),
        case("dropout", real(4, 12), 0.4),
    ]  # fmt: skip


def products() -> list[Case]:
    return [
        case("linear", real(4, 6, 12), real(6, 12)),
        case("linear", real(4, 12), real(12, 12), real(12), label="bias"),
        case("linear", real(12), real(6, 12), real(6), label="vector"),
        case("addmm", real(6), real(4, 12), real(12, 6)),
        case("addmm", real(4, 6), real(4, 12), real(12, 6), label="full"),
        case("addmm", real(4, 1), real(4, 12), real(12, 6), label="scaled", beta=0.5, alpha=2.0),
        case("mm", real(4, 12), real(12, 6)),
        case("bmm", real(4, 6, 12), real(4, 12, 6)),
        case("matmul", real(4, 6, 12), real(12, 6)),
        case("matmul", real(2, 1, 6, 12), real(4, 12, 6), label="broadcast"),
        case("matmul", real(12), real(4, 12, 6), label="left_vector"),
        case("matmul", real(4, 6, 12), real(12), label="right_vector"),
        case("matmul", real(12), real(12), label="vectors"),
        case("dot", real(12), real(12)),
        case("einsum", "bij,bjk->bik", (real(4, 6, 12), real(4, 12, 6))),
        case("einsum", "bi,bj,ij->b", (real(4, 6), real(4, 12), real(6, 12)), label="three"),
        case("einsum", "bij->jb", (real(4, 6, 12),), label="one"),
        case("einsum", "kj,ik", (real(12, 6), real(4, 12)), label="implicit"),
        case("einsum", "...j,jk->...k", (real(2, 4, 12), real(12, 6)), label="dots"),
        case("einsum", "iij->ij", (real(4, 4, 6),), label="diagonal"),
    ]


def views() -> list[Case]:
    x = real(4, 6, 12)
    halves = (("c", (2, 6)),)
    return [
        case("view", real(4, 36), (4, 3, 2, 6)),
        case("view", real(4, 6, 12), (24, 12), label="merge"),
        case("view", real(4, 6), (6, 4), label="uneven"),
        case("view", real(4, 6, 1), (1, 24), label="ones"),
        case("view", real(), (1, 1), label="scalar"),
        case("view_dtype", real(4, 6), Dtype("int64")),
        case("repeat", real(4, 6), (3, 1, 2)),
        case("repeat", real(4, 6), (1, 1), label="once"),
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
        case("slice", real(4, 36), 1, 12, 24, 1),
        replace(case("slice", real(4, 36), 1, 12, 24, 1, label="inner"), parts=halves),
        case("slice", real(4, 12), 1, 1, 12, 1, label="odd"),
        case("slice", real(4, 12), -1, 0, 12, 2, label="step"),
        case("slice", real(4, 12), 1, -6, None, 1, label="negative"),
        case("split", real(4, 36), 12, 1),
        replace(case("split", real(4, 36), 12, -1, label="inner"), parts=halves),
        case("split", real(4, 10), 4, 1, label="uneven"),
        case("split_with_sizes", real(4, 24), (12, 12), 1),
        case("split_with_sizes", real(4, 12), (6, 4, 2), 1, label="uneven"),
        case("chunk", real(4, 24), 2, -1),
        case("chunk", real(4, 12), 1, 1, label="one"),
        case("cat", (real(4, 12), real(4, 12), real(4, 12)), 1),
        replace(case("cat", (real(4, 12), real(4, 12)), -1, label="inner"), parts=halves),
        case("cat", (real(4, 6), real(4, 12)), 1, label="uneven"),
        case("cat", (real(4, 6), real(4, 6)), label="default"),
        case("stack", (real(4, 6), real(4, 6)), 1),
        case("select", x, 1, -2),
        case("unbind", real(4, 3, 6), 1),
        case("flip", x, (1,)),
        case("roll", x, (2,), (1,)),
        case("roll", real(4, 6), (3,), label="flat"),
        case("diff", real(4, 6)),
        case("diff", real(4, 6), 2, 0, label="dim"),
        case("pad", real(4, 6, 12), (0, 0, 1, 2)),
        case("pad", real(4, 6, 12), (1, 1), "reflect", label="reflect"),
        case("constant_pad_nd", real(4, 6, 12), (1, 2), 0.5),
        case("tril", real(2, 4, 6)),
        case("triu", real(2, 4, 6), 1),
    ]


def reductions() -> list[Case]:
    x = real(4, 6, 12)
    ties = Operand((4, 6), "ties")
    return [
        case("sum", x),
        case("sum", x, (0, -1), label="dims"),
        case("sum", x, (1,), True, label="keep"),
        case("sum", flag(4, 6), (1,), label="count"),
        case("mean", x),
        case("mean", x, (1, 2), True, label="keep"),
        case("mean", x, (0,), label="dim"),
        case("mean", index(9, 4, 6), (0,), label="cast", dtype=Dtype("float64")),
        *_each("amax amin", x, (-1,), True),
        *_each("amax amin", ties, (1,), label="ties"),
        *_each("amax amin", real(4, 6), label="all"),
        *(
            replace(case(f"parloom.{n}", fixed(4, 6), (1,), True), oracle=getattr(torch, n))
            for n in ("amax", "amin")
        ),
        *_each("amax amin", index(9, 4, 6), (1,), label="integers"),
        *_each("any all", flag(4, 6), 1),
        *_each("any all", flag(4, 6), label="whole"),
        *_each("argmax argmin", x, 1),
        *_each("argmax argmin", real(4, 6), label="all"),
        *_each("argmax argmin", real(4, 6), -1, True, label="keep"),
        *_each("var std", x, (1,)),
        *_each("var std", x, (0, 2), False, True, label="keep"),
        *_each("var std", real(4, 6), label="all", correction=0),
        case("var", real(4, 6), False, label="biased"),
        case("var_mean", x, (1,), correction=0),
        case("prod", positive(4, 6), 1),
        case("logsumexp", x, (1,), True),
        case("cumsum", x, 1),
        case("sort", x, 1, True),
        case("sort", real(4, 6), label="default"),
        case("topk", x, 2, 1),
        *_each("softmax log_softmax", x, -1),
        *_each("softmax log_softmax", x, 1, label="middle"),
        *(
            replace(c, tolerance=1e-4)
            for c in _each("softmax log_softmax", single(4, 6), -1, Dtype("float64"), label="cast")
        ),
    ]


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
        case("ones", (4, 6), dtype=i64),
        case("scalar_tensor", 1.5, dtype=f64),
    ]


def _bag(table: Tensor, rows: Tensor, mode: str = "sum") -> Tensor:
    return F.embedding_bag(rows, table, mode=mode)


def _pick(x: Tensor, rows: Tensor) -> Tensor:
    return x[torch.arange(len(rows)), rows]


def _mask_tail(x: Tensor, valid: int) -> Tensor:
    return x.masked_fill(torch.arange(x.shape[-1]) >= valid, float("-inf"))


def lookups() -> list[Case]:
    table = real(12, 6)
    rows = index(12, 4, 6)
    return [
        case("embedding", table, rows),
        case("embedding", table, rows, 3, label="padding"),
        case("embedding", table, rows, 0, label="padding_first"),
        replace(case("parloom.embedding_bag", table, rows), oracle=_bag),
        replace(case("parloom.embedding_bag", table, rows, "mean", label="mean"), oracle=_bag),
        case("index", real(6, 12), (index(6, 4),)),
        case("index", real(6, 4, 12), (None, index(4, 6, 2)), label="second"),
        case("index", real(6, 4, 12), (index(6, 4, 1), index(4, 6)), label="two"),
        case("index", real(6, 4, 12), (index(6, 4), None, index(12, 4)), label="apart"),
        case("gather", real(4, 6), 1, index(6, 4, 12)),
        case("gather", real(4, 6, 12), -1, index(12, 4, 6, 12), label="same"),
        case("gather", real(6, 12), 0, index(6, 4, 6), label="smaller"),
        case("index_select", real(6, 4, 12), 1, index(4, 6)),
        replace(case("parloom.pick", real(6, 12), index(12, 6)), oracle=_pick),
        replace(case("parloom.mask_tail", real(4, 12), 7), oracle=_mask_tail),
    ]


def norms() -> list[Case]:
    x = real(4, 6, 12)
    image = real(6, 4, 2, 6)
    statistics = (buffer(4), buffer(4))
    training = case("batch_norm", image, real(4), real(4), *statistics, True, 0.1, 1e-5)
    return [
        case("layer_norm", x, (12,), real(12), real(12), 1e-5),
        case("layer_norm", x, (6, 12), real(6, 12), label="two_dims"),
        case("layer_norm", x, (12,), label="plain"),
        case("layer_norm", x, (12,), None, real(12), 1e-3, label="bias"),
        case("rms_norm", x, (12,), real(12), 1e-5),
        case("rms_norm", x, (12,), real(12), label="default_eps"),
        case("rms_norm", x, (6, 12), label="plain"),
        replace(training, updates=(1, 2)),
        case("batch_norm", image, real(4), real(4), None, None, True, 0.1, 1e-5, label="no_stats"),
        case("batch_norm", real(12, 4), None, None, *statistics, False, 0.1, 1e-5, label="eval"),
        replace(
            case("batch_norm", real(12, 4), None, None, buffer(4), buffer(4), True, 0.3, 1e-5,
                 label="plain"),
            updates=(1, 2),
        ),
        case("group_norm", real(4, 12, 6), 3, real(12), real(12), 1e-5),
        case("group_norm", real(4, 12, 6), 2, real(12), real(12), 1e-5, False, label="cudnn"),
    ]  # fmt: skip


def low_precision() -> list[Case]:
    """Norms far from zero: gradients and losses are rough, outputs are not (`test_operators`)."""

    def far(*shape: int) -> Operand:
        return Operand(shape, "far", dtype="bfloat16")

    def vector(n: int) -> Operand:
        return Operand((n,), "positive", dtype="bfloat16")

    label = "bfloat16"
    # with statistics in bfloat16 torch itself rounds the mean
    channels = [Operand((4,), "positive", role=r, dtype="float32") for r in ("parameter", "buffer")]
    norm = case(
        "batch_norm", far(6, 4, 6), channels[0], replace(channels[0]), channels[1],
        replace(channels[1]), True, 0.5, 1e-5, label=label,
    )  # fmt: skip
    found = [
        case("layer_norm", far(4, 12), (12,), vector(12), vector(12), 1e-5, label=label),
        case("rms_norm", far(4, 12), (12,), vector(12), label=label),
        replace(norm, updates=(1, 2)),
        case("softmax", far(4, 12), -1, label=label),
        case("log_softmax", far(4, 12), -1, label=label),
        case("cross_entropy_loss", far(4, 12), index(12, 4), label=label),
    ]
    return [replace(c, tolerance=0.2) for c in found]


def attention() -> list[Case]:
    op = "scaled_dot_product_attention"
    q, k, v = real(2, 4, 6, 4), real(2, 4, 6, 4), real(2, 4, 6, 4)
    wide = (real(2, 6, 4, 4), real(2, 3, 4, 4), real(2, 3, 4, 4))
    return [
        case(op, q, k, v),
        case(op, q, k, v, None, 0.0, True, label="causal"),
        case(op, q, real(2, 4, 12, 4), real(2, 4, 12, 6), None, 0.0, True, label="causal_longer"),
        case(op, q, k, v, None, 0.3, label="dropout"),
        case(op, q, k, v, None, 0.3, True, label="causal_dropout"),
        case(op, q, k, v, flag(6, 6), label="mask"),
        case(op, q, k, v, fixed(2, 1, 6, 6), label="bias_per_sample"),
        case(op, q, k, v, fixed(1, 4, 1, 6), 0.3, label="bias_per_head_dropout"),
        case(op, q, k, v, flag(2, 1, 1, 6), 0.3, label="padding_dropout"),
        case(op, q, k, v, label="scale", scale=0.3),
        case(op, *wide, label="grouped", enable_gqa=True),
        case(op, *wide, None, 0.0, True, label="grouped_causal", enable_gqa=True),
        case(op, *wide, flag(2, 6, 4, 4), 0.3, label="grouped_mask_dropout", enable_gqa=True),
        case(op, *wide, flag(2, 1, 4, 4), label="grouped_mask", enable_gqa=True),
        case(op, real(4, 6, 4), real(4, 6, 4), real(4, 6, 4), label="three_dims"),
        case(op, q, k, v, label="keyword_mask", attn_mask=flag(6, 6)),
    ]


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
        case("conv_transpose1d", real(4, 6, 12), real(6, 4, 3), real(4), (2,), (1,)),
        case("conv_transpose2d", x, real(6, 4, 2, 2), None, (2, 2)),
        case(
            "conv_transpose2d",
            x,
            real(6, 2, 3, 3),
            real(4),
            (1, 1),
            (1, 1),
            (0, 0),
            2,
            label="groups",
        ),
        case("conv_transpose3d", real(2, 2, 4, 6, 6), real(2, 4, 2, 2, 2), real(4)),
        case("max_pool1d", real(4, 6, 12), (2,), (2,)),
        case("max_pool2d", x, (2, 2)),
        case("max_pool2d", x, (3, 3), (2, 2), (1, 1), label="padding"),
        case("max_pool2d", real(2, 6, 7, 6), (2, 2), (2, 2), 0, 1, True, label="ceil"),
        case("max_pool3d", real(2, 2, 4, 6, 6), (2, 2, 2)),
        case("avg_pool1d", real(4, 6, 12), (2,)),
        case("avg_pool2d", x, (3, 3), (1, 1), (1, 1)),
        case("avg_pool2d", x, (2, 2), label="plain"),
        case("avg_pool2d", x, (3, 3), (1, 1), (1, 1), False, False, label="exclude"),
        case("avg_pool2d", x, (2, 2), (2, 2), 0, False, True, 3, label="divisor"),
        case("avg_pool3d", real(2, 2, 4, 6, 6), (2, 2, 2)),
        case("adaptive_avg_pool1d", real(4, 6, 12), (1,)),
        case("adaptive_avg_pool2d", x, (1, 1)),
        case("adaptive_avg_pool2d", x, (4, 3), label="some"),
        case("adaptive_avg_pool3d", real(2, 2, 4, 6, 6), (1, 1, 1)),
    ]


def losses() -> list[Case]:
    logits, target = real(6, 12), index(12, 6)
    prediction, wanted = real(4, 6), real(4, 6)
    found = [
        case("cross_entropy_loss", logits, target),
        case("cross_entropy_loss", logits, target, None, 2, label="sum"),
        case("cross_entropy_loss", logits, target, None, 0, label="none"),
        case("cross_entropy_loss", logits, index(3, 6), None, 1, 1, label="ignore"),
        case("cross_entropy_loss", logits, index(3, 6), None, 2, 1, label="ignore_sum"),
        case("cross_entropy_loss", logits, index(3, 6), None, 0, 1, label="ignore_none"),
        case("cross_entropy_loss", logits, index(3, 6), None, 1, 1, 0.2, label="smoothing"),
        case("cross_entropy_loss", logits, index(3, 6), None, 0, 1, 0.2, label="smoothing_none"),
        case(
            "cross_entropy_loss",
            logits,
            target,
            Operand((12,), "positive", role="batch"),
            label="weight",
        ),
        case("cross_entropy_loss", real(4, 6, 2), index(6, 4, 2), label="image"),
        case("cross_entropy_loss", real(4, 6), unit(4, 6), label="probabilities"),
    ]
    found += [
        *(case("nll_loss_nd", logits, target, None, n, label=f"reduction{n}") for n in range(3)),
        case("nll_loss_nd", logits, index(3, 6), None, 1, 1, label="ignore"),
        case("nll_loss_nd", logits, target, Operand((12,), "positive", role="batch"),
             label="weight"),
        case("nll_loss_nd", real(2, 6, 4), index(6, 2, 4), label="image"),
        case("smooth_l1_loss", prediction, wanted, 1, 0.7, label="beta"),
        case("huber_loss", prediction, wanted, 2, 0.7, label="delta"),
    ]  # fmt: skip
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        found += [case(name, prediction, wanted, n, label=f"reduction{n}") for n in range(3)]
    for n in range(3):
        found += [
            case("binary_cross_entropy", unit(4, 6), unit(4, 6), None, n, label=f"reduction{n}"),
            case("binary_cross_entropy_with_logits", prediction, unit(4, 6), None, None, n,
                 label=f"reduction{n}"),
        ]  # fmt: skip
    weight = fixed(4, 6)
    found += [
        case("binary_cross_entropy", unit(4, 6), unit(4, 6), weight, label="weight"),
        case("binary_cross_entropy_with_logits", prediction, unit(4, 6), weight, label="weight"),
        case("binary_cross_entropy_with_logits", prediction, unit(4, 6), None,
             Operand((6,), "positive", role="batch"), label="pos_weight"),
    ]  # fmt: skip
    return found


def all_cases() -> list[Case]:
    return [
        *elementwise(), *products(), *views(), *reductions(), *factories(), *lookups(), *norms(),
        *low_precision(),
        *attention(), *convolutions(), *losses(),
    ]  # fmt: skip
