"""Transposed convolutions: batch and channels are free, groups and spatial dims whole."""

from math import prod

from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import WHOLE, Rule, Site, build, opaque

_SAVED: SavedTensors = (("operand", 0), ("operand", 1))


def _rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    if rank != len(site.operands[1].shape):  # a single image
        return opaque(site)
    one = site.integer(6, "groups", 1) == 1
    spatial = {p: [f"{p}{i}" for i in range(rank - 2)] for p in "iko"}
    operands = [["n", "c", *spatial["i"]], ["c", "m" if one else "q", *spatial["k"]], ["m"]]
    whole = [*spatial["i"], *spatial["k"], *spatial["o"], *([] if one else ["c", "q", "m"])]
    return build(operands[: len(site.operands)], [["n", "m", *spatial["o"]]], site,
                 dict.fromkeys(whole, WHOLE))  # fmt: skip


def _emit(e: Emission) -> str:
    node = e.site.node
    parts = [e.arg(0), e.arg(1)]
    if len(node.args) > 2:
        parts += [e.once(node.args[2]), *(e.code(a) for a in node.args[3:])]
    parts += [f"{k}={e.once(v) if k == 'bias' else e.code(v)}" for k, v in node.kwargs]
    return f"F.{node.op}({', '.join(parts)})"


def _flops(site: Site, rule: Rule) -> float:
    return 2.0 * site.operands[0].num_elements * prod(site.operands[1].shape[1:])


OPS: tuple[OpDef, ...] = tuple(
    OpDef(f"conv_transpose{n}d", _rule, _emit, _flops, 2.0, _SAVED) for n in (1, 2, 3)
)
