"""Example calls of elementwise operators."""

from dataclasses import replace

from parloom.ir.graph import Dtype
from parloom.ir.ops.elementwise import _POLYNOMIALS, _WAVES
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
    unit,
)


def cases() -> list[Case]:
    return [*arithmetic(), *functions(), *activations(), *choices(), *complex_numbers()]


def arithmetic() -> list[Case]:
    x, y = real(4, 1, 6), real(2, 6)
    n, m = index(7, 4, 6), index(7, 6)
    counts = Operand((4, 6), "index", 5, "batch", "int64")
    return [
        *each("add sub mul maximum minimum atan2 fmax fmin hypot logaddexp logaddexp2", x, y),
        *each("add sub mul div", x, 2.5, label="scalar"),
        *each("add sub", x, y, label="alpha", alpha=3),
        case("mul", same := real(4, 6), same, label="same"),
        case("div", x, positive(2, 6)),
        case("div", n, 2, label="floor", rounding_mode="floor"),
        case("div", x, positive(2, 6), label="trunc", rounding_mode="trunc"),
        *each("eq ne lt le gt ge", n, m),
        *each("eq gt", n, 3, label="scalar"),
        *each("eq lt isclose", x, y, label="real"),
        *each("__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor", flag(4, 6), flag(6)),
        *each("bitwise_and bitwise_or bitwise_xor", n, m, label="integers"),
        *each("__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift", n, counts),
        *each("__lshift__ __rshift__", n, 2, label="scalar"),
        *each("logical_and logical_or logical_xor", flag(4, 6), flag(6)),
        *each("logical_not bitwise_not", flag(4, 6)),
        *each("remainder floor_divide", n, 3),
        *each("gcd lcm", n, m),
        *each("remainder fmod", real(4, 6), 1.5, label="real"),
        *each("remainder fmod", real(4, 6), positive(6), label="tensor"),
        case("fmod", n, 3),
        *each("copysign nextafter", x, y),
        case("ldexp", real(4, 6), real(6)),
        case("heaviside", fixed(4, 6), fixed(6)),
        *each("xlogy special_xlog1py", real(4, 6), positive(6)),
        *each("igamma igammac", replace(positive(4, 1), role="batch"), positive(6)),
        case("special_zeta", replace(positive(6), kind="far", role="batch"), positive(4, 6)),
        *each(f"special_{' special_'.join(_POLYNOMIALS.split())}", fixed(4, 6), counts),
        case("pow", positive(4, 6), 3),
        case("pow", positive(4, 6), real(6), label="tensor"),
        case("pow", 2.0, real(4, 6), label="base"),
        case("rsub", x, y),
        case("rsub", x, 1, 2, label="alpha"),
        case("lerp", real(4, 6), real(4, 6), 0.3),
        case("lerp", real(4, 6), real(6), real(4, 1), label="tensor"),
        case("addcmul", real(4, 6), real(6), real(4, 1), value=0.5),
        case("addcdiv", real(4, 6), real(6), positive(4, 1), value=0.5),
    ]  # fmt: skip


def functions() -> list[Case]:
    x, p, u = real(4, 6), positive(4, 6), unit(4, 6)
    return [
        *each("exp exp2 tanh sigmoid sin cos abs erf erfc square expm1 relu neg sign", x),
        *each("sinh cosh sinc atan asinh i0 frac trunc deg2rad rad2deg nan_to_num", x),
        *each("floor ceil round isnan isinf isfinite isneginf isposinf signbit", x),
        *each("rsqrt sqrt reciprocal log log1p log2 log10 lgamma digamma special_entr", p),
        *each("asin acos atanh tan logit erfinv special_ndtri special_log_ndtr", u),
        case("acosh", Operand((4, 6), "far")),
        *each("special_i0e special_i1 special_i1e special_erfcx", p),
        *each(f"special_{' special_'.join(_WAVES.split())}", replace(p, role="batch")),
        case("frexp", x),
        case("mvlgamma", Operand((4, 6), "far"), 2),
        case("polygamma", 1, p),
        case("logit", u, 0.1, label="eps"),
        case("nan_to_num", x, 0.5, label="value"),
        case("relu", real(), label="scalar"),
        case("exp", real(0, 6), label="empty"),
    ]


def activations() -> list[Case]:
    x = real(4, 6)
    return [
        *each("gelu silu softplus elu celu selu leaky_relu hardtanh relu6 hardswish mish", x),
        *each("hardsigmoid hardshrink softshrink log_sigmoid", x),
        case("gelu", x, label="tanh", approximate="tanh"),
        case("softplus", x, 2.0, 1.5, label="arguments"),
        case("elu", x, 0.7, label="arguments"),
        case("elu", x, 0.7, 1.3, 0.9, label="selu"),
        case("celu", x, 0.7, label="arguments"),
        case("leaky_relu", x, 0.3, label="arguments"),
        case("hardtanh", x, -0.5, 0.7, label="arguments"),
        case("threshold", x, 0.3, -1.0),
        case("prelu", real(2, 6, 4), real(6)),
        case("prelu", real(4, 6), real(1), label="single"),
        case("dropout", real(4, 12), 0.4),
        *each("rand randn", (4, 12), dtype=Dtype("float64")),
    ]


def choices() -> list[Case]:
    x, y = real(4, 1, 6), real(2, 6)
    n = index(7, 4, 6)
    return [
        case("clamp", real(4, 6), -0.5, 0.5),
        case("clamp", real(4, 6), None, 0.5, label="above"),
        case("clamp_min", real(4, 6), -0.5),
        case("clamp_max", real(4, 6), real(6), label="tensor"),
        case("where", flag(4, 1, 6), x, y),
        case("where", flag(4, 6), real(4, 6), 0.0, label="scalar"),
        case("masked_fill", real(4, 6), flag(6), -3.0),
        case("fill", real(4, 6), real()),
        case("fill", real(4, 6), 2.5, label="scalar"),
        case("_to_copy", n, dtype=Dtype("float64")),
        case("_to_copy", real(4, 6), label="float", dtype=Dtype("float64")),
        case("clone", real(4, 6)),
        case("clone", real(4, 6), label="contiguous", memory_format="contiguous_format"),
        case("detach", real(4, 6)),
    ]


def complex_numbers() -> list[Case]:
    z, w = pairs(4, 6), pairs(6)
    return [
        case("view_as_complex", real(4, 6, 2)),
        case("view_as_real", z),
        *each("complex polar", real(4, 6), real(4, 6)),
        *each("_conj _conj_physical conj_physical resolve_conj resolve_neg real imag", z),
        *each("angle sgn", z),
        *each("angle sgn", real(4, 6), label="real"),
        *each("add mul", z, w, label="complex"),
        *each("mul", z, real(6), label="mixed"),
        *each("exp abs neg clone", z, label="complex"),
    ]
