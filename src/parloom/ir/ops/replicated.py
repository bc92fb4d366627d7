"""Operators that every rank computes as a whole, each with the reason why nothing of it is split.

The reason is what plans and the support matrix say. Operators that are in no entry are replicated,
too; theirs is that they have none.
"""

from dataclasses import replace

from parloom.errors import LayoutError
from parloom.ir.graph import Arg
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import Rule, Site, no_flops, opaque


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


def _counts(arg: Arg) -> tuple[int, ...] | None:
    """A tuple of integers that are not negative, or None where it is none."""
    found = arg if isinstance(arg, tuple) else (arg,)
    counts = tuple(n for n in found if type(n) is int and n >= 0)
    return counts if len(counts) == len(found) else None


def _strided_rule(site: Site) -> Rule:
    """Nothing is sharded; raises `LayoutError` where the view reaches beyond its operand."""
    at = 1 if site.node.op == "as_strided" else 2
    given = [site.node.arg(at, "size"), site.node.arg(at + 1, "stride")]
    given.append(site.node.arg(at + 2, "storage_offset") or 0)
    sizes, strides, offset = map(_counts, given)
    if sizes is None or strides is None or offset is None:
        raise LayoutError(f"{site.node.key}: sizes, strides and offset must be counts: {given}")
    last = sum(offset) + sum((n - 1) * step for n, step in zip(sizes, strides, strict=False))
    there = site.operands[0].num_elements
    if len(sizes) != len(strides) or (0 not in sizes and last >= there):
        raise LayoutError(
            f"{site.node.key}: sizes {sizes}, strides {strides} and offset {sum(offset)} reach"
            f" element {last} of a tensor that has {there}"
        )
    return opaque(site)


def _runtime(e: Emission) -> str:
    return e.call(f"rt.{e.site.node.op}")


def _view_dtype(e: Emission) -> str:
    return f"{e.arg(0)}.contiguous().view({e.arg(1)})"


STRIDES = "strides of memory name no dims"


def _entry(name: str, why: str, *saved: tuple[str, int]) -> OpDef:
    return OpDef(name, opaque, call, saved=saved, why_whole=why)


OPS: tuple[OpDef, ...] = (
    OpDef("as_strided", _strided_rule, _runtime, why_whole=STRIDES),
    OpDef("as_strided_scatter", _strided_rule, _runtime, why_whole=STRIDES),
    _entry("block_diag", "every dim of the result joins dims of all operands"),
    _entry("embedding_bag", "what it returns besides the bags differs from kernel to kernel",
           ("operand", 1), ("operand", 2)),
    _entry("histogram", "its bins span all elements"),
    _entry("masked_scatter", "which element goes where depends on the whole mask", ("operand", 1)),
    OpDef("nonzero_static", opaque, call, differentiable=False,
          why_whole="which place an element goes to depends on all before it"),
    _entry("pdist", "the pairs of one set of points mix all of them", ("operand", 0),
           ("result", 0)),
    OpDef("segment_reduce", opaque, _runtime, saved=(("operand", 0), ("result", 0)),
          why_whole="which rows make a segment depends on values"),
    OpDef("view_dtype", opaque, _view_dtype, no_flops, view=True, differentiable=False,
          why_whole="elements of another size, or bits that no reduction may touch"),
)  # fmt: skip
