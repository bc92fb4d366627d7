"""Random operators: keyed by seed, operator path, step and global index, never by call order."""

from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import broadcast


def _dropout(e: Emission) -> str:
    dims = e.all_digits(e.site.operands[0], e.operand_layouts[0])
    return f"rt.dropout({e.arg(0)}, ctx, {e.arg(1)}, {e.key}, {dims})"


OPS: tuple[OpDef, ...] = (OpDef("dropout", broadcast, _dropout, saved=(("mask", 0),), random=True),)

# Random operators without an entry: their draws depend on call order, so no split is equal.
UNKEYED = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli",
    "multinomial", "normal", "uniform", "native_dropout", "poisson", "exponential", "rrelu",
    "alpha_dropout", "feature_dropout",
})  # fmt: skip
