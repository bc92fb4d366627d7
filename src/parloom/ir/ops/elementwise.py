"""Elementwise operators: factors are the dims of the result, size-1 dims broadcast."""

from parloom.ir.graph import Ref
from parloom.ir.ops import exact
from parloom.ir.ops.opdef import (
    Emission,
    OpDef,
    Saved,
    SavedTensors,
    all_operands,
    both_operands,
    each_other,
)
from parloom.ir.ops.rule import Rule, Site, broadcast, build

FIRST: SavedTensors = (("operand", 0),)
RESULT: SavedTensors = (("result", 0),)

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "__and__": "&", "__or__": "|", "__xor__": "^", "bitwise_and": "&",
    "bitwise_or": "|", "bitwise_xor": "^", "remainder": "%", "__lshift__": "<<",
    "__rshift__": ">>", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
}  # fmt: skip
# torch has no derivative of these.
_POLYNOMIALS = """
chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w
"""
_WAVES = """
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
spherical_bessel_j0
"""
_UNDERIVED = " ".join(f"special_{n}" for n in (*_POLYNOMIALS.split(), *_WAVES.split()))


def _quotient_saves(site: Site) -> SavedTensors:
    return (("other", 0), ("operand", 1)) if len(site.operands) > 1 else ()


_SAVED = {"mul": each_other, "div": _quotient_saves, "remainder": both_operands}
_EXACT = {
    "add": exact.combine(1), "sub": exact.combine(-1), "mul": exact.multiply, "div": exact.divide,
}  # fmt: skip
_LINEAR = {"mul": "either", "div": "first", "add": "joint", "sub": "joint"}


def _infix(symbol: str, function: str) -> OpDef:
    def emit(e: Emission) -> str:
        if e.site.node.kwargs or len(e.site.node.args) != 2:
            return e.call(f"torch.{function}")
        return f"{e.arg(0)} {symbol} {e.arg(1)}"

    return OpDef(
        function, broadcast, emit, saved=_SAVED.get(function, ()),
        differentiable=function in ("add", *_SAVED, *_LINEAR), linear=_LINEAR.get(function, ""),
        exact=_EXACT.get(function),
    )  # fmt: skip


def _to_copy(e: Emission) -> str:
    return f"{e.arg(0)}.to({e.code(e.site.node.kwarg('dtype'))})"


def _clone(e: Emission) -> str:
    contiguous = e.site.node.kwarg("memory_format") == "contiguous_format"
    return f"{e.arg(0)}.contiguous()" if contiguous else f"{e.arg(0)}.clone()"


def _power_saves(site: Site) -> SavedTensors:
    both = len(site.operands) > 1 or not isinstance(site.arg(0), Ref)
    return (*all_operands(site), *(RESULT if both else ()))


def _lerp_saves(site: Site) -> SavedTensors:
    return all_operands(site) if len(site.operands) > 2 else ()


def _elu(e: Emission) -> str:
    # torch's Python function lacks the two factors that a captured selu has
    return e.call("F.elu" if len(e.site.node.args) <= 2 else "torch.ops.aten.elu")


def _rsub(e: Emission) -> str:
    if e.site.node.kwargs or len(e.site.node.args) != 2:  # alpha
        return e.call("torch.rsub")
    return f"{e.arg(1)} - {e.arg(0)}"


def _prelu_rule(site: Site) -> Rule:
    """The slope is one number, or one per channel (dim 1)."""
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    slope = site.operands[1].shape
    return build([names, ["1" if slope == (1,) else "d1"] * len(slope)], [names], site)


def _each(
    names: str, saved: Saved = (), prefix: str = "torch.", *, differentiable: bool = True
) -> tuple[OpDef, ...]:
    """Entries whose torch function takes the call's own arguments."""
    return tuple(
        OpDef(n, broadcast, prefix + n, saved=saved, differentiable=differentiable)
        for n in names.split()
    )


OPS: tuple[OpDef, ...] = (
    *(_infix(symbol, name) for name, symbol in _INFIX.items()),
    OpDef("rsub", broadcast, _rsub, linear="joint"),
    *_each("exp exp2 rsqrt sqrt tan tanh sigmoid reciprocal expm1", RESULT),
    *_each("log log2 log10 log1p sin cos sinh cosh sinc asin acos atan asinh acosh atanh", FIRST),
    OpDef("square", broadcast, "torch.square", saved=FIRST, exact=exact.square),
    *_each("abs erf erfc erfinv logit lgamma digamma mvlgamma i0 nan_to_num", FIRST),
    *_each("clamp clamp_min clamp_max polygamma", FIRST),
    *_each("special_entr special_ndtri special_log_ndtr", FIRST, "torch.ops.aten."),
    *_each("special_i0e special_i1 special_i1e special_erfcx", (*FIRST, *RESULT),
           "torch.ops.aten."),
    *_each("maximum minimum fmax fmin atan2 logaddexp logaddexp2 xlogy fmod ldexp nextafter",
           both_operands),
    *_each("hypot", (("operand", 0), ("operand", 1), *RESULT)),
    *_each("copysign", (*FIRST, *RESULT)),
    *_each("special_xlog1py", each_other, "torch.ops.aten."),
    *_each("igamma igammac special_zeta", all_operands, "torch.ops.aten."),
    OpDef("frexp", broadcast, "torch.frexp", saved=(("result", 1),)),
    *_each(_UNDERIVED, (), "torch.ops.aten.", differentiable=False),
    *_each("pow", _power_saves),
    *_each("gelu silu softplus leaky_relu hardtanh hardswish hardsigmoid mish", FIRST, "F."),
    *_each("relu6 celu selu threshold hardshrink softshrink", FIRST, "F."),
    OpDef("elu", broadcast, _elu, saved=FIRST),
    OpDef("log_sigmoid", broadcast, "F.logsigmoid", saved=FIRST),
    OpDef("prelu", _prelu_rule, "F.prelu", saved=(("operand", 0), ("operand", 1))),
    *_each("relu", RESULT, "F."),
    OpDef("neg", broadcast, "torch.neg", linear="first", exact=exact.negate),
    *_each("floor ceil round trunc frac sign deg2rad rad2deg"),
    *_each("floor_divide heaviside gcd lcm", differentiable=False),
    *_each("logical_not logical_and logical_or logical_xor bitwise_not", differentiable=False),
    *_each("isnan isinf isfinite isneginf isposinf signbit isclose", differentiable=False),
    OpDef("where", broadcast, "torch.where", saved=FIRST),
    OpDef("masked_fill", broadcast, ".masked_fill", saved=(("operand", 1),)),
    OpDef("fill", broadcast, "torch.fill"),
    OpDef("_to_copy", broadcast, _to_copy, linear="first"),
    OpDef("clone", broadcast, _clone, linear="first", exact=exact.same),
    OpDef("detach", broadcast, ".detach", differentiable=False, view=True),
    OpDef("lerp", broadcast, "torch.lerp", saved=_lerp_saves),
    OpDef("addcmul", broadcast, "torch.addcmul", saved=(("operand", 1), ("operand", 2))),
    OpDef("addcdiv", broadcast, "torch.addcdiv", saved=(("operand", 1), ("operand", 2))),
)  # fmt: skip
