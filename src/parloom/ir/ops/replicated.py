"""Operators that every rank computes as a whole, each with the reason why nothing of it is split.

The reason is what plans and the support matrix say. Operators that are in no entry are replicated,
too; theirs is that they have none.
"""

from dataclasses import replace

from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import no_flops, opaque


def call(e: Emission) -> str:
    """The ATen call as captured; what makes tensors from nothing is told where to make them.

    Operands come in one piece: some operators read memory as it lies, or refuse other strides.
    """
    names = {name: f"{code}.contiguous()" for name, code in e.names.items()}
    whole = replace(e, names=names)
    code = whole.call(f"torch.ops.{'' if '.' in e.site.node.op else 'aten.'}{e.site.node.op}")
    if e.site.operands:
        return code
    joint = "" if code.endswith("()") else ", "
    return f"{code[:-1]}{joint}device=ctx.device)"


def _view_dtype(e: Emission) -> str:
    return f"{e.arg(0)}.contiguous().view({e.arg(1)})"


def _entry(name: str, why: str, *saved: tuple[str, int]) -> OpDef:
    return OpDef(name, opaque, call, saved=saved, why_whole=why)


OPS: tuple[OpDef, ...] = (
    _entry("as_strided", "strides of memory name no dims"),
    _entry("as_strided_scatter", "strides of memory name no dims"),
    _entry("block_diag", "every dim of the result joins dims of all operands"),
    _entry("embedding_bag", "what it returns besides the bags differs from kernel to kernel",
           ("operand", 1), ("operand", 2)),
    _entry("histogram", "its bins span all elements"),
    _entry("masked_scatter", "which element goes where depends on the whole mask", ("operand", 1)),
    OpDef("nonzero_static", opaque, call, differentiable=False,
          why_whole="which place an element goes to depends on all before it"),
    _entry("pdist", "the pairs of one set of points mix all of them", ("operand", 0),
           ("result", 0)),
    _entry("segment_reduce", "which rows make a segment depends on values", ("operand", 0),
           ("result", 0)),
    OpDef("view_dtype", opaque, _view_dtype, no_flops, view=True, differentiable=False,
          why_whole="elements of another size, or bits that no reduction may touch"),
)  # fmt: skip
