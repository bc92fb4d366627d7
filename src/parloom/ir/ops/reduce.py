"""Reductions over dims: the reduced factors are contracted, the result is partial over them."""

from collections.abc import Callable
from math import prod

from parloom.ir.graph import Dtype, Function, Node, Ref, TensorSpec, Value
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import LOCAL, WHOLE, Rule, Site, along, build, opaque


def reduced_dims(site: Site) -> tuple[int, ...]:
    """Dims that a reduction removes: all of them where none are given."""
    rank = len(site.operands[0].shape)
    dims = site.integers(1, "dim") if len(site.node.args) > 1 else ()
    return tuple(d % max(rank, 1) for d in dims) or tuple(range(rank))


def _reduction(reduction: str, kind: str = "plain") -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        rank = len(site.operands[0].shape)
        gone = reduced_dims(site)
        names = [f"d{i}" for i in range(rank)]
        if len(site.results[0].shape) == rank:  # keepdim
            out = ["1" if i in gone else n for i, n in enumerate(names)]
        else:
            out = [n for i, n in enumerate(names) if i not in gone]
        kinds = {names[d]: kind for d in gone} if kind != "plain" else None
        return build([names], [out] * len(site.results), site, kinds, reduction)

    return rule


def _mean(e: Emission) -> str:
    split = [f for f, axes in e.assignment.items() if axes]
    gone = reduced_dims(e.site)
    contracted = {f for d in gone for f in e.rule.operands[0][d]}
    if not contracted & set(split):
        return e.call("torch.mean")
    count = prod(e.site.operands[0].shape[d] for d in gone)
    keep = len(e.site.results[0].shape) == len(e.site.operands[0].shape)
    dtype = e.site.node.kwarg("dtype")
    extra = f", dtype={e.code(dtype)}" if dtype else ""
    return f"{e.arg(0)}.sum({e.code(gone)}, keepdim={keep}{extra}) / {count}"


def _softmax_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    names = [f"d{i}" for i in range(rank)]
    return build([names], [names], site, {names[site.dim(1, rank)]: LOCAL})


def expand_softmax(site: Site, sharded: frozenset[str]) -> Function:
    """Softmax (or its log) over a sharded dim: max and sum leave the shards as reductions."""
    given, result = site.operands[0], site.results[0]
    spec = wide(result)
    dim = site.dim(1, len(spec.shape))
    one = TensorSpec(tuple(1 if d == dim else n for d, n in enumerate(spec.shape)), spec.dtype)
    body = Body(site.node.path)
    x = body.cast("x", given, spec)
    top = body.add("parloom.amax", one, body.add("detach", spec, x), (dim,), True)
    shifted = body.add("sub", spec, x, top)
    exps = body.add("exp", spec, shifted)
    total = body.add("sum", one, exps, (dim,), True)
    if site.node.op in ("softmax", "_softmax"):
        out = body.add("div", spec, exps, total)
    else:
        out = body.add("sub", spec, shifted, body.add("log", one, total))
    out = body.cast(out, spec, result)
    return Function("softmax", (Value("x", given),), tuple(body.nodes), (out,))


def expand_extreme(site: Site, sharded: frozenset[str]) -> Function:
    """Largest or smallest elements over sharded dims, as the mean of all elements equal to them.

    So the gradient is shared among equal elements, as torch does it.
    """
    spec, out_spec = site.operands[0], site.results[0]
    gone = reduced_dims(site)
    row = tuple(1 if d in gone else n for d, n in enumerate(spec.shape))
    one, mask = TensorSpec(row, spec.dtype), TensorSpec(spec.shape, "bool")
    body = Body(site.node.path)
    out = body.add(f"parloom.{site.node.op}", one, body.add("detach", spec, "x"), gone, True)
    if spec.is_float:
        equal = body.add("eq", mask, "x", out)
        chosen = body.add("where", spec, equal, "x", 0.0)
        count = body.add("_to_copy", spec, equal, dtype=Dtype(spec.dtype))
        total = body.add("sum", one, chosen, gone, True)
        out = body.add("div", one, total, body.add("sum", one, count, gone, True))
    if out_spec.shape != row:
        out = body.add("view", out_spec, out, out_spec.shape)
    return Function(site.node.op, (Value("x", spec),), tuple(body.nodes), (out,))


def wide(spec: TensorSpec) -> TensorSpec:
    """The dtype in which local programs compute: torch's own kernels do not round in between."""
    low = spec.dtype in ("bfloat16", "float16")
    return TensorSpec(spec.shape, "float32") if low else spec


class Body:
    """Collects the nodes of an expansion; string arguments that name values become references."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nodes: list[Node] = []

    def add(self, op: str, spec: TensorSpec, *args: object, **kwargs: object) -> str:
        """Append a node with one result; returns the result's name."""
        name = f"{op.strip('_').replace('.', '_')}_{len(self.nodes)}"
        self.nodes.append(
            Node(
                op,
                tuple(Ref(a) if isinstance(a, str) else a for a in args),  # type: ignore[misc]
                tuple(kwargs.items()),  # type: ignore[arg-type]
                (Value(name, spec),),
                self.path,
                len(self.nodes),
            )
        )
        return name

    def cast(self, name: str, given: TensorSpec, wanted: TensorSpec) -> str:
        """The value in another dtype; itself where it has that already."""
        if given.dtype == wanted.dtype:
            return name
        return self.add("_to_copy", wanted, name, dtype=Dtype(wanted.dtype))


def _arg_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    return _reduction("sum", WHOLE)(site) if rank else along(site, frozenset())


def _scan_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    return along(site, frozenset({site.dim(1, rank)}))


def _topk_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    position = 2 if site.node.op == "topk" else 1
    return along(site, frozenset({site.dim(position, rank)}))


def _variance_rule(site: Site) -> Rule:
    """Reduced dims are whole; where `unbiased` stands in their place, all are."""
    if isinstance(site.arg(1, "dim"), bool) or not site.operands[0].shape:
        return opaque(site)
    return _reduction("sum", WHOLE)(site)


_X = (("operand", 0),)
_Y = (("result", 0),)

OPS: tuple[OpDef, ...] = (
    OpDef("sum", _reduction("sum"), "torch.sum", linear="first"),
    OpDef("mean", _reduction("sum"), _mean, linear="first"),
    OpDef("amax", _reduction("sum", LOCAL), "torch.amax", saved=(*_X, *_Y), expand=expand_extreme),
    OpDef("amin", _reduction("sum", LOCAL), "torch.amin", saved=(*_X, *_Y), expand=expand_extreme),
    # inside of local programs: the extremes of all shards, through which no gradient flows
    OpDef("parloom.amax", _reduction("max"), "torch.amax", differentiable=False),
    OpDef("parloom.amin", _reduction("min"), "torch.amin", differentiable=False),
    OpDef("any", _arg_rule, "torch.any", differentiable=False),
    OpDef("all", _arg_rule, "torch.all", differentiable=False),
    OpDef("argmax", _arg_rule, "torch.argmax", differentiable=False),
    OpDef("argmin", _arg_rule, "torch.argmin", differentiable=False),
    OpDef("prod", _arg_rule, "torch.prod", saved=(*_X, *_Y)),
    OpDef("logsumexp", _arg_rule, "torch.logsumexp", saved=(*_X, *_Y)),
    OpDef("cumsum", _scan_rule, "torch.cumsum"),
    OpDef("sort", _topk_rule, "torch.sort", saved=(("result", 1),)),
    OpDef("topk", _topk_rule, "torch.topk", saved=(("result", 1),)),
    OpDef("var", _variance_rule, "torch.var", saved=_X),
    OpDef("std", _variance_rule, "torch.std", saved=(*_X, *_Y)),
    OpDef("var_mean", _variance_rule, "torch.var_mean", saved=_X),
    *(
        OpDef(n, _softmax_rule, f"torch.{n.strip('_')}", saved=_Y, expand=expand_softmax)
        for n in ("softmax", "log_softmax")
    ),
)
