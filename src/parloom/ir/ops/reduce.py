"""Reductions over dims: the reduced factors are contracted, the result is partial over them."""

from collections.abc import Callable
from math import prod

from parloom.ir.graph import Dtype, Function, TensorSpec, Value
from parloom.ir.ops import exact
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.program import Body, wide
from parloom.ir.ops.rule import LOCAL, WHOLE, Rule, Site, build

_X: SavedTensors = (("operand", 0),)
_Y: SavedTensors = (("result", 0),)


def reduced_dims(site: Site, position: int = 1) -> tuple[int, ...]:
    """Dims that a reduction removes: all of them where none are given.

    `any` and `all` of an empty list of dims remove none.
    """
    rank = len(site.operands[0].shape)
    given = site.arg(position, "dim")
    if given == () and site.node.op in ("any", "all"):
        return ()
    dims = () if isinstance(given, bool) else site.integers(position, "dim", None)
    return tuple(d % max(rank, 1) for d in dims) or tuple(range(rank))


def is_complex(site: Site) -> bool:
    """Whether an operand is of complex numbers."""
    return any(spec.dtype.startswith("complex") for spec in site.operands)


def kept_shape(site: Site, gone: tuple[int, ...]) -> tuple[int, ...]:
    """The operand's shape with reduced dims of size 1."""
    return tuple(1 if d in gone else n for d, n in enumerate(site.operands[0].shape))


def reduction(
    combine: str = "sum", kind: str = "plain", position: int = 1
) -> Callable[[Site], Rule]:
    """A rule where the dims given at `position` are contracted, of a kind, and combined so.

    Local programs are about real numbers: dims that are local are whole where numbers are complex.
    """

    def rule(site: Site) -> Rule:
        own = WHOLE if kind == LOCAL and is_complex(site) else kind
        rank = len(site.operands[0].shape)
        gone = reduced_dims(site, position)
        names = [f"d{i}" for i in range(rank)]
        if len(site.results[0].shape) == rank:  # keepdim
            out = ["1" if i in gone else n for i, n in enumerate(names)]
        else:
            out = [n for i, n in enumerate(names) if i not in gone]
        kinds = {names[d]: own for d in gone if d < rank} if own != "plain" else None
        return build([names], [out] * len(site.results), site, kinds, combine)

    return rule


def _mean(e: Emission) -> str:
    split = [f for f, axes in e.assignment.items() if axes]
    gone = reduced_dims(e.site)
    contracted = {f for d in gone for f in e.rule.operands[0][d]}
    if not contracted & set(split):
        return e.call("torch.mean")
    count = prod(e.site.operands[0].shape[d] for d in gone)
    keep = len(e.site.results[0].shape) == len(e.site.operands[0].shape)
    dtype = e.site.node.kwarg("dtype") or Dtype(e.site.operands[0].dtype)
    sums_in = Dtype("float32") if dtype == Dtype("float16") else dtype  # a mean may fit, not a sum
    extra = f", dtype={e.code(sums_in)}" if sums_in != Dtype(e.site.operands[0].dtype) else ""
    mean = f"{e.arg(0)}.sum({e.code(gone)}, keepdim={keep}{extra}) / {count}"
    return mean if sums_in == dtype else f"({mean}).to({e.code(dtype)})"


def _softmax_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    names = [f"d{i}" for i in range(rank)]
    return build([names], [names], site, {names[site.dim(1, rank)]: LOCAL} if names else None)


def exponentials(
    body: Body, x: str, spec: TensorSpec, dims: tuple[int, ...], *, finite: bool = False
) -> tuple[str, str, str, str]:
    """(maximum, x - maximum, its exp, their sum) over dims, which are kept with size 1.

    With `finite` an infinite maximum counts as zero, so that exp(-inf) sums to zero, not NaN.
    """
    row = tuple(1 if d in dims else n for d, n in enumerate(spec.shape))
    one = TensorSpec(row, spec.dtype)
    top = body.add("parloom.amax", one, body.add("detach", spec, x), dims, True)
    if finite:
        infinite = body.add("isinf", TensorSpec(one.shape, "bool"), top)
        top = body.add("masked_fill", one, top, infinite, 0.0)
    shifted = body.add("sub", spec, x, top)
    exps = body.add("exp", spec, shifted)
    return top, shifted, exps, body.add("sum", one, exps, dims, True)


def expand_softmax(site: Site, sharded: frozenset[str]) -> Function:
    """Softmax (or its log) over a sharded dim: max and sum leave the shards as reductions."""
    given, result = site.operands[0], site.results[0]
    spec = wide(result)
    dim = site.dim(1, len(spec.shape))
    one = TensorSpec(tuple(1 if d == dim else n for d, n in enumerate(spec.shape)), spec.dtype)
    body = Body(site.node.path)
    _, shifted, exps, total = exponentials(body, body.cast("x", given, spec), spec, (dim,))
    if site.node.op == "softmax":
        out = body.add("div", spec, exps, total)
    else:
        out = body.add("sub", spec, shifted, body.add("log", one, total))
    return body.function("softmax", (Value("x", given),), body.cast(out, spec, result))


def expand_logsumexp(site: Site, sharded: frozenset[str]) -> Function:
    """The log of a sum of exponentials over sharded dims."""
    given, result = site.operands[0], site.results[0]
    spec, gone = wide(given), reduced_dims(site)
    one = TensorSpec(kept_shape(site, gone), spec.dtype)
    body = Body(site.node.path)
    x = body.cast("x", given, spec)
    top, _, _, total = exponentials(body, x, spec, gone, finite=True)
    out = body.add("add", one, body.add("log", one, total), top)
    out = body.cast(body.shaped(out, one, result), TensorSpec(result.shape, spec.dtype), result)
    return body.function("logsumexp", (Value("x", given),), out)


def _variance_arguments(site: Site) -> tuple[tuple[int, ...], float]:
    """(dims, correction) of the spellings of `var`, `std`, `var_mean` and `std_mean`."""
    correction = site.node.kwarg("correction")
    unbiased = site.node.kwarg("unbiased")
    positions = [a for a in site.node.args[1:] if isinstance(a, bool)]
    if positions:  # (x, unbiased) or (x, dim, unbiased, keepdim)
        unbiased = positions[0]
    if isinstance(correction, int | float):
        return reduced_dims(site), float(correction)
    return reduced_dims(site), 0.0 if unbiased is False else 1.0


def expand_variance(site: Site, sharded: frozenset[str]) -> Function:
    """Variance or standard deviation, perhaps with the mean, of elements in several shards."""
    given = site.operands[0]
    spec = wide(given)
    gone, correction = _variance_arguments(site)
    count = prod(given.shape[d] for d in gone)
    one = TensorSpec(kept_shape(site, gone), spec.dtype)
    body = Body(site.node.path)
    x = body.cast("x", given, spec)
    mean = body.add("mean", one, x, gone, True)
    centred = body.add("sub", spec, x, mean)
    total = body.add("sum", one, body.add("mul", spec, centred, centred), gone, True)
    out = body.add("div", one, total, max(count - correction, 0.0))
    if site.node.op.startswith("std"):
        out = body.root(out, one)
    outputs = [
        body.cast(body.shaped(made, one, result), TensorSpec(result.shape, spec.dtype), result)
        for made, result in zip((out, mean), site.results, strict=False)
    ]
    return body.function(site.node.op, (Value("x", given),), *outputs)


def _order(site: Site) -> float:
    """The order of a vector norm, 2 where none is given."""
    given = site.arg(1, "ord" if site.node.op != "norm" else "p")
    return float(given) if isinstance(given, int | float) else 2.0


def _norm_rule(site: Site) -> Rule:
    """Reduced dims are local, those of a norm in another dtype whole."""
    other = any(s.dtype != site.operands[0].dtype for s in site.results)
    return reduction("sum", WHOLE if other else LOCAL, 2)(site)


def _norm_saves(site: Site) -> SavedTensors:
    return (*_X, *_Y) if _order(site) not in (0, 1) else _X


def expand_norm(site: Site, sharded: frozenset[str]) -> Function:
    """A vector norm over sharded dims: the sum of powers, or the largest size, of all shards."""
    given, result = site.operands[0], site.results[0]
    spec, gone, order = wide(given), reduced_dims(site, 2), _order(site)
    one = TensorSpec(kept_shape(site, gone), spec.dtype)
    body = Body(site.node.path)
    x = body.cast("x", given, spec)
    if order == 2:
        out = body.root(body.add("sum", one, body.add("mul", spec, x, x), gone, True), one)
    elif order in (float("inf"), float("-inf")):
        sizes = body.add("abs", spec, x)
        out = body.add("amax" if order > 0 else "amin", one, sizes, gone, True)
    elif order == 0:
        there = body.add("ne", TensorSpec(spec.shape, "bool"), x, 0.0)
        out = body.add("sum", one, body.add("_to_copy", spec, there, dtype=Dtype(spec.dtype)),
                       gone, True)  # fmt: skip
    else:
        powers = body.add("abs", spec, x)
        if 0 < order < 1:
            powers = body.root(powers, spec, 1 / order)
        elif order != 1:
            powers = body.add("pow", spec, powers, order)
        out = body.add("sum", one, powers, gone, True)
        if order != 1:
            out = body.root(out, one, order)
    out = body.cast(body.shaped(out, one, result), TensorSpec(result.shape, spec.dtype), result)
    return body.function("norm", (Value("x", given),), out)


def _distance_rule(site: Site) -> Rule:
    """`dist(a, b, p)`: a norm of the difference."""
    rank = max(len(s.shape) for s in site.operands)
    names = [f"d{i}" for i in range(rank)]
    operands = [names[rank - len(s.shape) :] for s in site.operands]
    return build(operands, [[]], site, dict.fromkeys(names, WHOLE if is_complex(site) else LOCAL))


def expand_distance(site: Site, sharded: frozenset[str]) -> Function:
    """The norm of a difference whose elements are in several shards."""
    left, right = (s.shape for s in site.operands)
    rank = max(len(left), len(right))
    sizes = zip(*((1,) * (rank - len(s)) + s for s in (left, right)), strict=True)
    result = site.results[0]
    body = Body(site.node.path)
    difference = body.add("sub", TensorSpec(tuple(map(max, sizes)), result.dtype), "a", "b")
    out = body.add("linalg_vector_norm", result, difference, site.arg(2, "p", 2))
    inputs = tuple(Value(n, s) for n, s in zip("ab", site.operands, strict=True))
    return body.function("dist", inputs, out)


OPS: tuple[OpDef, ...] = (
    OpDef("sum", reduction(), "torch.sum", linear="first", exact=exact.total(mean=False)),
    OpDef("nansum", reduction(), "torch.nansum", saved=_X),
    OpDef("mean", reduction(), _mean, linear="first", exact=exact.total(mean=True)),
    OpDef("count_nonzero", reduction(), "torch.count_nonzero", differentiable=False),
    OpDef("any", reduction("max"), "torch.any", differentiable=False),
    OpDef("all", reduction("min"), "torch.all", differentiable=False),
    OpDef("prod", reduction("sum", WHOLE), "torch.prod", saved=(*_X, *_Y)),
    OpDef("logsumexp", reduction("sum", LOCAL), "torch.logsumexp", saved=(*_X, *_Y),
          expand=expand_logsumexp),
    *(
        OpDef(n, reduction("sum", LOCAL), f"torch.{n}", saved=_X if n[0] == "v" else (*_X, *_Y),
              expand=expand_variance)
        for n in ("var", "std", "var_mean", "std_mean")
    ),
    OpDef("linalg_vector_norm", _norm_rule, "torch.linalg.vector_norm", saved=_norm_saves,
          expand=expand_norm),
    OpDef("norm", _norm_rule, "torch.norm", saved=_norm_saves, expand=expand_norm),
    OpDef("dist", _distance_rule, "torch.dist", saved=(*_X, ("operand", 1), *_Y),
          expand=expand_distance),
    *(
        OpDef(n, _softmax_rule, f"torch.{n}", saved=_Y, expand=expand_softmax,
              exact=exact.along(n))
        for n in ("softmax", "log_softmax")
    ),
)  # fmt: skip
