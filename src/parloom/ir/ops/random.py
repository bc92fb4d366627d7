"""Random operators: keyed by seed, operator path, step and global index, never by call order."""

from parloom.ir.graph import Dtype
from parloom.ir.ops.opdef import Emission, OpDef, each_element
from parloom.ir.ops.rule import Rule, Site, broadcast, build


def _dropout(e: Emission) -> str:
    dims = e.all_digits(e.site.operands[0], e.operand_layouts[0])
    return f"rt.dropout({e.arg(0)}, ctx, {e.arg(1)}, {e.key}, {dims})"


def _draw_rule(site: Site) -> Rule:
    return build([], [[f"d{i}" for i in range(len(site.results[0].shape))]], site)


def _draw(e: Emission) -> str:
    spec = e.site.results[0]
    dims = e.all_digits(spec, e.result_layouts[0])
    return f'rt.draw(ctx, {e.key}, {dims}, "{e.site.node.op}", {e.code(Dtype(spec.dtype))})'


OPS: tuple[OpDef, ...] = (
    OpDef("dropout", broadcast, _dropout, own_bytes=each_element(1), random=True),
    *(OpDef(n, _draw_rule, _draw, random=True, differentiable=False) for n in ("rand", "randn")),
)

# Random operators without an entry: their draws depend on call order, so no split is equal.
UNKEYED = frozenset({
    "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli",
    "multinomial", "normal", "uniform", "native_dropout", "poisson", "exponential", "rrelu",
    "alpha_dropout", "feature_dropout",
})  # fmt: skip
