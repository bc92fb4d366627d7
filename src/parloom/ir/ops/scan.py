"""Scans, sorts and searches along a dim: that dim is whole (but for running sums), others free."""

from collections.abc import Callable
from math import gcd, log2

from parloom.ir.graph import Function, Ref, TensorSpec, Value
from parloom.ir.ops.opdef import Emission, OpDef, Saved, SavedTensors
from parloom.ir.ops.program import Body, wide
from parloom.ir.ops.reduce import reduction
from parloom.ir.ops.rule import LOCAL, WHOLE, Rule, Site, along, build, elementwise_flops, products

_X: SavedTensors = (("operand", 0),)
_XY: SavedTensors = (("operand", 0), ("result", 0))
_INDEX: SavedTensors = (("result", 1),)
MAX_BLOCKS = 2**7 * 3**2  # of a running sum: as many shards as they can lie in


def _along(position: int, default: int = -1) -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        rank = len(site.operands[0].shape)
        return along(site, frozenset({site.dim(position, rank, default)}))

    return rule


def _blocks(length: int) -> int:
    """Into how many blocks a running sum over so many elements is cut."""
    return gcd(length, MAX_BLOCKS) if length else 1


def _sum_rule(site: Site) -> Rule:
    """The dim is blocks of elements: blocks may be in several shards, a block is whole."""
    shape = site.operands[0].shape
    if not shape:
        return along(site, frozenset())
    dim = site.dim(1, len(shape))
    sizes = {f"d{d}": n for d, n in enumerate(shape)} | {"b": _blocks(shape[dim])}
    sizes["c"] = shape[dim] // sizes["b"]
    dims = [f"d{d}" if d != dim else "b c" for d in range(len(shape))]
    return products(sizes, [dims], [dims], {"b": LOCAL, "c": WHOLE})


def expand_sum(site: Site, sharded: frozenset[str]) -> Function:
    """A running sum over several shards: within each block, plus the sums of all blocks before.

    Only the sums of blocks go round, which are few.
    """
    given, result = site.operands[0], site.results[0]
    spec = wide(result)
    shape, dim = spec.shape, site.dim(1, len(spec.shape))
    blocks = _blocks(shape[dim])
    cut = TensorSpec((*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]), spec.dtype)
    row = TensorSpec((*shape[:dim], blocks, *shape[dim + 1 :]), spec.dtype)
    column = TensorSpec((*shape[:dim], blocks, 1, *shape[dim + 1 :]), spec.dtype)
    body = Body(site.node.path)
    x = body.add("view", cut, body.cast("x", given, spec), cut.shape)
    inside = body.add("parloom.cumsum", cut, x, dim + 1)
    totals = body.add("sum", row, x, (dim + 1,), False)
    before = body.add("sub", row, body.add("parloom.cumsum", row, totals, dim), totals)
    out = body.add("add", cut, inside, body.add("view", column, before, column.shape))
    out = body.cast(body.add("view", spec, out, shape), spec, result)
    return body.function("cumsum", (Value("x", given),), out)


def _sort_rule(site: Site) -> Rule:
    """`sort(x, dim, descending)`, or with `stable` by name: then `dim` may be, too."""
    rank = len(site.operands[0].shape)
    given = [a for a in site.node.args[1:] if not isinstance(a, bool)]
    dim = given[0] if given else site.node.kwarg("dim", -1)
    return along(site, frozenset({dim % max(rank, 1)} if isinstance(dim, int) else ()))


def _sort_flops(site: Site, rule: Rule) -> float:
    """N log n comparisons along the dim."""
    shape = site.operands[0].shape
    length = max((rule.size(f) for f, kind in rule.kinds if kind == WHOLE), default=1)
    return elementwise_flops(site, rule) * max(1.0, log2(length)) if shape else 1.0


def _picking(position: int) -> Callable[[Site], Rule]:
    """One element along a dim and its index; of everything where there is no index."""

    def rule(site: Site) -> Rule:
        rank = len(site.operands[0].shape)
        if len(site.results) == 1 or not rank:
            return reduction("sum", WHOLE)(site)
        dim = site.dim(position, rank)
        names = [f"d{i}" for i in range(rank)]
        one = ["1"] if len(site.results[0].shape) == rank else []  # keepdim
        out = [*names[:dim], *one, *names[dim + 1 :]]
        return build([names], [out] * 2, site, {names[dim]: WHOLE})

    return rule


def _picking_saves(site: Site) -> SavedTensors:
    return _INDEX if len(site.results) > 1 else _XY


def _search_rule(site: Site) -> Rule:
    """The sorted dim is whole; leading dims are those of the values, unless all share one row."""
    boundaries, *values = site.operands
    if not values:  # one number
        return build([["w"]], [[]], site, {"w": WHOLE})
    rank = len(values[0].shape)
    names = [f"d{i}" for i in range(rank)]
    own = len(boundaries.shape) == 1
    lead = [] if own else names[:-1]
    rest = [["w"]] * (len(values) - 1) if own else [[*lead, "w"]] * (len(values) - 1)
    return build([[*lead, "w"], names, *rest], [names], site, {"w": WHOLE})


def _bucket_rule(site: Site) -> Rule:
    if len(site.operands) == 1:
        return build([["w"]], [[]], site, {"w": WHOLE})
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names, ["w"]], [names], site, {"w": WHOLE})


def _isin_rule(site: Site) -> Rule:
    """`isin(elements, test_elements)`, either of which may be a number: each looks at all tests."""
    names = [f"d{i}" for i in range(len(site.results[0].shape))]
    specs = dict(zip(site.node.refs, site.operands, strict=True))
    tests = [f"w{i}" for i in range(len(site.operands[-1].shape))]
    tested = isinstance(site.arg(1, "test_elements"), Ref)
    operands = [names, tests] if len(specs) > 1 else [tests if tested else names]
    return build(operands, [names], site, dict.fromkeys(tests, WHOLE) if tested else None)


def _search(e: Emission) -> str:
    """Torch warns of operands that it must copy, or refuses them, so that is done here."""
    parts = [f"{e.code(a)}.contiguous()" if isinstance(a, Ref) else e.code(a)
             for a in e.site.node.args]  # fmt: skip
    return f"torch.{e.site.node.op}({', '.join((*parts, *e.keywords()))})"


def _search_flops(site: Site, rule: Rule) -> float:
    """Log n comparisons per value."""
    length = next((n for f, n in rule.sizes if f == "w"), 1)
    return site.results[0].num_elements * max(1.0, log2(length))


def _histogram_rule(site: Site) -> Rule:
    """Counts add up over shards if the range is given; else it is that of all elements."""
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    given = [site.arg(p, n, 0) for p, n in ((2, "min"), (3, "max"))]
    kinds = {"bins": WHOLE} | (dict.fromkeys(names, WHOLE) if given[0] == given[1] else {})
    return build([names], [["bins"]], site, kinds)


def _histogram_flops(site: Site, rule: Rule) -> float:
    return float(site.operands[0].num_elements)


def _renorm_rule(site: Site) -> Rule:
    """Slices along the dim are normalised as a whole."""
    rank = len(site.operands[0].shape)
    return along(site, frozenset(range(rank)) - {site.dim(2, rank)})


def _scan(name: str, saved: Saved, differentiable: bool = True) -> OpDef:
    return OpDef(name, _along(1), f"torch.{name}", saved=saved, differentiable=differentiable)


OPS: tuple[OpDef, ...] = (
    OpDef("cumsum", _sum_rule, "torch.cumsum", expand=expand_sum),
    # inside of that: over a whole dim
    OpDef("parloom.cumsum", _along(1), "torch.cumsum"),
    _scan("cumprod", _XY),
    _scan("logcumsumexp", _XY),
    _scan("cummax", _INDEX),
    _scan("cummin", _INDEX),
    OpDef("sort", _sort_rule, "torch.sort", _sort_flops, saved=_INDEX),
    OpDef("argsort", _sort_rule, "torch.argsort", _sort_flops, differentiable=False),
    OpDef("topk", _along(2), "torch.topk", saved=_INDEX),
    OpDef("kthvalue", _picking(2), "torch.kthvalue", saved=_INDEX),
    *(
        OpDef(n, _picking(1), f"torch.{n}", saved=_picking_saves)
        for n in ("median", "nanmedian", "mode")
    ),
    OpDef("searchsorted", _search_rule, _search, _search_flops, differentiable=False),
    OpDef("bucketize", _bucket_rule, _search, _search_flops, differentiable=False),
    OpDef("isin", _isin_rule, _search, _search_flops, differentiable=False),
    OpDef("histc", _histogram_rule, "torch.histc", _histogram_flops, differentiable=False),
    OpDef("renorm", _renorm_rule, "torch.renorm", saved=_X),
)  # fmt: skip
