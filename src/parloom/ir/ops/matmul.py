"""Contractions: matrix products and einsum. Factors b, m, n are free, k is contracted."""

from collections.abc import Callable

from parloom.ir.ops import exact
from parloom.ir.ops.joined import (
    JOINS,
    LINEARS,
    in_place,
    joined_biases,
    joined_rows,
    joined_saves,
)
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, each_other
from parloom.ir.ops.rule import WHOLE, Rule, Site, build, contraction_flops, einsum, products

INPUTS: SavedTensors = (("operand", 0), ("operand", 1))
FACTORS: SavedTensors = (("operand", 1), ("operand", 2))


_LINEAR, _TO_NUMBERS = einsum("... k, n k, + n -> ... n"), einsum("... k, k, + -> ...")


def _linear_rule(site: Site) -> Rule:
    """A weight that is a vector makes a number of each row."""
    return (_LINEAR if len(site.operands[1].shape) == 2 else _TO_NUMBERS)(site)


def _linear(e: Emission) -> str:
    if e.site.arg(2, "bias") is None:
        return f"F.linear({e.arg(0)}, {e.arg(1)})"
    return f"F.linear({e.arg(0)}, {e.arg(1)}, {e.once(e.site.arg(2, 'bias'))})"


def _linears_rule(site: Site) -> Rule:
    rows = joined_rows(site)
    x = site.operands[0].shape
    lead = [f"d{i}" for i in range(len(x) - 1)]
    return products(
        dict(zip((*lead, "k"), x, strict=True)) | rows.sizes,
        [[*lead, "k"], *([part, "k"] for part in rows.parts), *rows.biases],
        [[*lead, part] for part in rows.parts],
        rows.kinds,
        rows.added,
    )


def _linears(e: Emission) -> str:
    return f"rt.linears({e.arg(0)}, {e.arg(1)}, {joined_biases(e)}{in_place(e)})"


def _linears_flops(site: Site, rule: Rule) -> float:
    """Those of all products."""
    rows = sum(result.shape[-1] for result in site.results)
    return 2.0 * site.operands[0].num_elements * rows


def _adding(left: str, right: str, out: str) -> Callable[[Site], Rule]:
    """A product plus an addend that broadcasts against it: `addmm(addend, left, right)`."""

    def rule(site: Site) -> Rule:
        dims = out.split()
        addend = dims[len(dims) - len(site.operands[0].shape) :]
        return build([addend, left.split(), right.split()], [dims], site, added=(0,))

    return rule


def _add_product(e: Emission) -> str:
    parts = [e.once(e.site.arg(0)), e.arg(1), e.arg(2), *e.keywords()]  # alpha, beta
    return f"torch.{e.site.node.op}({', '.join(parts)})"


def _bilinear(e: Emission) -> str:
    return f"F.bilinear({e.arg(0)}, {e.arg(1)}, {e.arg(2)}, {e.once(e.site.arg(3, 'bias'))})"


def _cross_rule(site: Site) -> Rule:
    """Vectors of three along a dim, which is whole; the others broadcast."""
    rank = len(site.results[0].shape)
    dim = site.dim(2, rank)
    names = [f"d{i}" for i in range(rank)]
    operands = [names[rank - len(s.shape) :] for s in site.operands]
    return build(operands, [names], site, {names[dim]: WHOLE})


def _distance_rule(site: Site) -> Rule:
    """`cdist(a[.., m, k], b[.., n, k])`: points are free, their coordinates whole."""
    rank = len(site.results[0].shape)
    lead = [f"d{i}" for i in range(rank - 2)]
    points = [
        [*lead[rank - len(s.shape) :], name, "k"]
        for s, name in zip(site.operands, "mn", strict=True)
    ]
    return build(points, [[*lead, "m", "n"]], site, {"k": WHOLE})


def _distance_flops(site: Site, rule: Rule) -> float:
    """Difference, power and sum per pair and coordinate."""
    return 3.0 * site.results[0].num_elements * site.operands[0].shape[-1]


def _grouped_rule(site: Site) -> Rule:
    """`x[t, k], matrices[g, k, n], ends[g]`: rows of x are sorted by their group.

    Where the rows of a group lie depends on values, so rows and groups are whole.
    """
    operands = [["t", "k"], ["g", "k", "n"], ["g"]]
    return build(operands, [["t", "n"]], site, {"t": WHOLE, "g": WHOLE})


def _grouped(e: Emission) -> str:
    return f"torch.ops.parloom.grouped_mm({e.arg(0)}, {e.arg(1)}, {e.arg(2)}.to(torch.int32))"


def _grouped_flops(site: Site, rule: Rule) -> float:
    """Every row is multiplied by the weights of one group."""
    return 2.0 * site.operands[0].num_elements * site.operands[1].shape[2]


def _matmul_rule(site: Site) -> Rule:
    left, right = (len(s.shape) for s in site.operands)
    lead = max(left, right, 2) - 2
    batch = [f"d{i}" for i in range(lead)]
    a = ["k"] if left == 1 else [*batch[lead - left + 2 :], "m", "k"]
    b = ["k"] if right == 1 else [*batch[lead - right + 2 :], "k", "n"]
    out = [*batch, *(["m"] if left > 1 else []), *(["n"] if right > 1 else [])]
    return build([a, b], [out], site)


def _einsum_rule(site: Site) -> Rule:
    """Letters are factors; those that stand twice in an operand (diagonals) are whole."""
    operands, result = _letters(site)
    given = zip(operands, site.operands, strict=True)
    dotted = [len(s.shape) - len(p.replace("...", "")) for p, s in given if "." in p]
    lead = max(dotted, default=0)

    def names(part: str, rank: int) -> list[str]:
        before, dots, after = part.partition("...")
        dims = [f"e{i}" for i in range(lead)]
        count = rank - len(before) - len(after) if dots else 0
        return [*before, *dims[lead - count :], *after]

    parts = [names(p, len(s.shape)) for p, s in zip(operands, site.operands, strict=True)]
    twice = {c for part in parts for c in part if part.count(c) > 1}
    out = names(result, len(site.results[0].shape))
    return build(parts, [out], site, dict.fromkeys(twice, WHOLE))


def _letters(site: Site) -> tuple[list[str], str]:
    """Subscripts of operands and result; those of an unsaid result are the letters used once."""
    left, arrow, right = str(site.arg(0)).replace(" ", "").partition("->")
    once = "".join(sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1))
    dots = "..." if "..." in left else ""
    return left.split(","), right if arrow else dots + once


OPS: tuple[OpDef, ...] = (
    OpDef(
        "linear", _linear_rule, _linear, contraction_flops, 2.0, INPUTS, exact=exact.linear
    ),
    *(
        OpDef(n, _adding(left, right, out), _add_product, contraction_flops, 2.0, FACTORS,
              exact=exact.add_product(exact.product(left, right, to=out)))
        for n, left, right, out in (
            ("addmm", "m k", "k n", "m n"), ("addmv", "m k", "k", "m"), ("addr", "m", "n", "m n"),
            ("baddbmm", "b m k", "b k n", "b m n"), ("addbmm", "b m k", "b k n", "m n"),
        )
    ),
    OpDef(LINEARS, _linears_rule, _linears, _linears_flops, 2.0, joined_saves, joins=JOINS,
          exact=exact.linears),
    OpDef("mm", einsum("m k, k n -> m n"), "torch.mm", contraction_flops, 2.0, INPUTS,
          exact=exact.product("m k", "k n", to="m n")),
    OpDef("bmm", einsum("b m k, b k n -> b m n"), "torch.bmm", contraction_flops, 2.0, INPUTS,
          exact=exact.product("b m k", "b k n", to="b m n")),
    OpDef("matmul", _matmul_rule, "torch.matmul", contraction_flops, 2.0, INPUTS,
          exact=exact.matmul),
    OpDef("mv", einsum("m k, k -> m"), "torch.mv", contraction_flops, 2.0, INPUTS,
          exact=exact.product("m k", "k", to="m")),
    OpDef("dot", einsum("k, k -> "), "torch.dot", contraction_flops, 2.0, INPUTS,
          exact=exact.product("k", "k", to="")),
    OpDef("vdot", einsum("k, k -> "), "torch.vdot", contraction_flops, 2.0, INPUTS),
    OpDef("bilinear", einsum("... i, ... j, n i j, + n -> ... n"), _bilinear, contraction_flops,
          2.0, (*INPUTS, ("operand", 2))),
    OpDef("linalg_cross", _cross_rule, "torch.linalg.cross", saved=INPUTS),
    OpDef("cdist", _distance_rule, "torch.ops.aten.cdist", _distance_flops, 2.0,
          (*INPUTS, ("result", 0))),
    OpDef("transformers.grouped_mm_fallback", _grouped_rule, _grouped, _grouped_flops, 2.0,
          (*INPUTS, ("operand", 2))),
    OpDef("einsum", _einsum_rule, lambda e: f"torch.einsum({e.arg(0)}, {e.arg(1)})",
          contraction_flops, 2.0, each_other, exact=exact.einsum),
)  # fmt: skip
