"""Contractions: matrix products and einsum. Factors b, m, n are free, k is contracted."""

from math import prod

from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, each_other
from parloom.ir.ops.rule import Rule, Site, build, contraction_flops, einsum, opaque

INPUTS: SavedTensors = (("operand", 0), ("operand", 1))


def _linear(e: Emission) -> str:
    if e.site.arg(2, "bias") is None:
        return f"F.linear({e.arg(0)}, {e.arg(1)})"
    return f"F.linear({e.arg(0)}, {e.arg(1)}, {e.once(e.site.arg(2, 'bias'))})"


def _addmm_rule(site: Site) -> Rule:
    bias = ["m", "n"][-len(site.operands[0].shape) :] if site.operands[0].shape else []
    return build([bias, ["m", "k"], ["k", "n"]], [["m", "n"]], site)


def _addmm(e: Emission) -> str:
    if e.site.node.kwargs:  # alpha, beta
        extra = ", ".join(f"{k}={e.code(v)}" for k, v in e.site.node.kwargs)
        return f"torch.addmm({e.once(e.site.arg(0))}, {e.arg(1)}, {e.arg(2)}, {extra})"
    return f"torch.addmm({e.once(e.site.arg(0))}, {e.arg(1)}, {e.arg(2)})"


def _matmul_rule(site: Site) -> Rule:
    left, right = (len(s.shape) for s in site.operands)
    lead = max(left, right, 2) - 2
    batch = [f"d{i}" for i in range(lead)]
    a = ["k"] if left == 1 else [*batch[lead - left + 2 :], "m", "k"]
    b = ["k"] if right == 1 else [*batch[lead - right + 2 :], "k", "n"]
    out = [*batch, *(["m"] if left > 1 else []), *(["n"] if right > 1 else [])]
    return build([a, b], [out], site)


def _einsum_rule(site: Site) -> Rule:
    operands, result = _letters(site)
    if any("." in part or len(set(part)) < len(part) for part in operands):
        return opaque(site)  # broadcast dims and diagonals
    return build([list(part) for part in operands], [list(result)], site)


def _letters(site: Site) -> tuple[list[str], str]:
    """Subscripts of operands and result; those of an unsaid result are the letters used once."""
    left, arrow, right = str(site.arg(0)).replace(" ", "").partition("->")
    once = "".join(sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1))
    return left.split(","), right if arrow else once


def _einsum_flops(site: Site, rule: Rule) -> float:
    """2 x the size of the iteration space, broadcast dims included."""
    sizes: dict[str, int] = {}
    lead = 1
    for part, spec in zip(_letters(site)[0], site.operands, strict=True):
        before, dots, after = part.partition("...")
        shape, end = spec.shape, len(spec.shape) - len(after)
        if dots:
            lead = max(lead, prod(shape[len(before) : end]))
        outer = shape[: len(before)] + (shape[end:] if dots else ())
        for letter, size in zip(before + after, outer, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return 2.0 * lead * prod(sizes.values())


OPS: tuple[OpDef, ...] = (
    OpDef(
        "linear", einsum("... k, n k, n -> ... n"), _linear, contraction_flops, 2.0, INPUTS
    ),
    OpDef("addmm", _addmm_rule, _addmm, contraction_flops, 2.0, (("operand", 1), ("operand", 2))),
    OpDef("mm", einsum("m k, k n -> m n"), "torch.mm", contraction_flops, 2.0, INPUTS),
    OpDef("bmm", einsum("b m k, b k n -> b m n"), "torch.bmm", contraction_flops, 2.0, INPUTS),
    OpDef("matmul", _matmul_rule, "torch.matmul", contraction_flops, 2.0, INPUTS),
    OpDef("dot", einsum("k, k -> "), "torch.dot", contraction_flops, 2.0, INPUTS),
    OpDef("einsum", _einsum_rule, lambda e: f"torch.einsum({e.arg(0)}, {e.arg(1)})",
          _einsum_flops, 2.0, each_other),
)  # fmt: skip
