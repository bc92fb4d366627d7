"""Elementwise operators: factors are the dims of the result, size-1 dims broadcast."""

from parloom.ir.graph import Ref
from parloom.ir.ops.opdef import Emission, OpDef, Saved, SavedTensors, all_operands, each_other
from parloom.ir.ops.rule import Site, broadcast

FIRST: SavedTensors = (("operand", 0),)
RESULT: SavedTensors = (("result", 0),)

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "__and__": "&", "__or__": "|", "__xor__": "^", "bitwise_and": "&",
    "bitwise_or": "|", "remainder": "%",
}  # fmt: skip
_SAVED = {"mul": each_other, "div": each_other}
_LINEAR = {"mul": "either", "div": "first", "add": "joint", "sub": "joint"}
_NOT_DIFFERENTIABLE = {"eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "__xor__",
                       "bitwise_and", "bitwise_or"}  # fmt: skip


def _infix(symbol: str, function: str) -> OpDef:
    def emit(e: Emission) -> str:
        if e.site.node.kwargs or len(e.site.node.args) != 2:
            return e.call(f"torch.{function}")
        return f"{e.arg(0)} {symbol} {e.arg(1)}"

    return OpDef(
        function, broadcast, emit, saved=_SAVED.get(function, ()),
        differentiable=function not in _NOT_DIFFERENTIABLE, linear=_LINEAR.get(function, ""),
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


def _unary(names: str, saved: Saved, prefix: str = "torch.") -> tuple[OpDef, ...]:
    return tuple(OpDef(name, broadcast, prefix + name, saved=saved) for name in names.split())


OPS: tuple[OpDef, ...] = (
    *(_infix(symbol, name) for name, symbol in _INFIX.items()),
    *_unary("exp rsqrt sqrt tanh sigmoid reciprocal expm1", RESULT),
    *_unary("log sin cos abs erf square log1p clamp", FIRST),
    *_unary("maximum minimum atan2", each_other),
    *_unary("pow", _power_saves),
    *_unary("gelu silu softplus leaky_relu hardtanh hardswish mish", FIRST, "F."),
    OpDef("elu", broadcast, _elu, saved=FIRST),
    *_unary("relu", RESULT, "F."),
    OpDef("neg", broadcast, "torch.neg", linear="first"),
    *_unary("floor ceil round sign floor_divide logical_not logical_and logical_or isnan", ()),
    *_unary("bitwise_not", (), "torch."),
    OpDef("where", broadcast, "torch.where", saved=FIRST),
    OpDef("masked_fill", broadcast, ".masked_fill", saved=(("operand", 1),)),
    OpDef("_to_copy", broadcast, _to_copy, linear="first"),
    OpDef("clone", broadcast, _clone, linear="first"),
    OpDef("detach", broadcast, ".detach", differentiable=False, view=True),
    OpDef("lerp", broadcast, "torch.lerp", saved=_lerp_saves),
    OpDef("addcmul", broadcast, "torch.addcmul", saved=(("operand", 1), ("operand", 2))),
)
