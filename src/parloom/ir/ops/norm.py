"""Normalisations: normalised factors are local programs of means over all shards."""

from math import prod

from parloom.ir.graph import Function, Ref, TensorSpec, Value
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.reduce import Body, wide
from parloom.ir.ops.rule import LOCAL, Rule, Site, build


def _normalized(site: Site) -> int:
    """How many trailing dims are normalised."""
    return len(site.integers(1, "normalized_shape"))


def _layer_norm_rule(site: Site) -> Rule:
    rank, count = len(site.operands[0].shape), _normalized(site)
    names = [f"d{i}" for i in range(rank)]
    tail = names[rank - count :]
    operands = [names, *[tail] * (len(site.operands) - 1)]
    return build(operands, [names] * len(site.results), site, dict.fromkeys(tail, LOCAL))


def _layer_norm(e: Emission) -> str:
    shape = e.site.integers(1, "normalized_shape")
    parts = [e.arg(0), e.code(shape), e.arg(2, "weight"), e.arg(3, "bias")]
    return f"F.layer_norm({', '.join(parts)}, {e.arg(4, 'eps', 1e-5)})"


def _rms_norm(e: Emission) -> str:
    shape = e.site.integers(1, "normalized_shape")
    return f"F.rms_norm({e.arg(0)}, {e.code(shape)}, {e.arg(2, 'weight')}, {e.arg(3, 'eps')})"


def _inputs(site: Site, names: tuple[str, ...]) -> tuple[tuple[Value, ...], dict[int, str]]:
    """Formal inputs of an expansion: one per tensor operand, named by argument position."""
    values, by_position = [], {}
    for position, arg in enumerate(site.node.args):
        if isinstance(arg, Ref):
            by_position[position] = names[position]
            values.append(Value(names[position], site.spec(arg)))
    return tuple(values), by_position


def _affine(body: Body, out: str, spec: TensorSpec, weight: str | None, bias: str | None) -> str:
    if weight is not None:
        out = body.add("mul", spec, out, weight)
    if bias is not None:
        out = body.add("add", spec, out, bias)
    return out


def expand_layer_norm(site: Site, sharded: frozenset[str]) -> Function:
    """Layer norm over sharded dims: two means, each reduced over the shards."""
    spec, count = wide(site.operands[0]), _normalized(site)
    rank = len(spec.shape)
    dims = tuple(range(rank - count, rank))
    row = TensorSpec((*spec.shape[: rank - count], *(1,) * count), spec.dtype)
    inputs, given = _inputs(site, ("x", "", "weight", "bias", ""))
    body = Body(site.node.path)
    x = body.cast("x", site.operands[0], spec)
    centred = body.add("sub", spec, x, body.add("mean", row, x, dims, True))
    variance = body.add("mean", row, body.add("mul", spec, centred, centred), dims, True)
    scale = body.add("rsqrt", row, body.add("add", row, variance, site.arg(4, "eps", 1e-5)))
    out = body.add("mul", spec, centred, scale)
    out = _affine(body, out, spec, given.get(2), given.get(3))
    out = body.cast(out, spec, site.results[0])
    return Function("layer_norm", inputs, tuple(body.nodes), (out,))


def expand_rms_norm(site: Site, sharded: frozenset[str]) -> Function:
    """Root-mean-square norm over sharded dims."""
    spec, count = wide(site.operands[0]), _normalized(site)
    rank = len(spec.shape)
    dims = tuple(range(rank - count, rank))
    row = TensorSpec((*spec.shape[: rank - count], *(1,) * count), spec.dtype)
    inputs, given = _inputs(site, ("x", "", "weight", ""))
    eps = site.arg(3, "eps")
    if eps is None:  # torch's default is the machine epsilon of the dtype that it computes in
        eps = 2.0**-52 if spec.dtype == "float64" else 2.0**-23
    body = Body(site.node.path)
    x = body.cast("x", site.operands[0], spec)
    square = body.add("mean", row, body.add("mul", spec, x, x), dims, True)
    out = body.add("mul", spec, x, body.add("rsqrt", row, body.add("add", row, square, eps)))
    out = _affine(body, out, spec, given.get(2), None)
    out = body.cast(out, spec, site.results[0])
    return Function("rms_norm", inputs, tuple(body.nodes), (out,))


def _batch_norm_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    names = [f"d{i}" for i in range(rank)]
    channel = ["d1"]
    kinds = {n: LOCAL for n in names if n != "d1"} if site.arg(5) else {}
    operands = [names, *[channel] * (len(site.operands) - 1)]
    results = [names, *[channel] * (len(site.results) - 1)]
    return build(operands, results, site, kinds)


def _batch_norm(e: Emission) -> str:
    return f"rt.batch_norm({', '.join(e.code(a) for a in e.site.node.args)})"


def expand_batch_norm(site: Site, sharded: frozenset[str]) -> Function:
    """Training batch norm over a sharded batch or image: global mean and variance.

    The running variance takes the unbiased estimate, as torch does.
    """
    spec = wide(site.operands[0])
    rank, channels = len(spec.shape), spec.shape[1]
    dims = tuple(d for d in range(rank) if d != 1)
    count = prod(spec.shape[d] for d in dims)
    column = TensorSpec(tuple(channels if d == 1 else 1 for d in range(rank)), spec.dtype)
    flat = TensorSpec((channels,), spec.dtype)
    inputs, given = _inputs(site, ("x", "weight", "bias", "running_mean", "running_var"))
    momentum, eps = site.arg(6), site.arg(7)
    body = Body(site.node.path)
    x = body.cast("x", site.operands[0], spec)
    mean = body.add("mean", column, x, dims, True)
    centred = body.add("sub", spec, x, mean)
    variance = body.add("mean", column, body.add("mul", spec, centred, centred), dims, True)
    scale = body.add("rsqrt", column, body.add("add", column, variance, eps))
    out = body.add("mul", spec, centred, scale)
    weight, bias = (_as_column(body, site, i, given, column) for i in (1, 2))
    outputs = [body.cast(_affine(body, out, spec, weight, bias), spec, site.results[0])]
    unbias = count / max(count - 1, 1)
    for position, statistic, factor in ((3, mean, 1.0), (4, variance, unbias)):
        if position not in given:
            continue
        fresh = body.add("view", flat, body.add("detach", column, statistic), (channels,))
        assert isinstance(momentum, float)
        old = body.cast(given[position], site.spec(site.arg(position)), flat)
        kept = body.add("mul", flat, old, 1.0 - momentum)
        new = body.add("add", flat, kept, body.add("mul", flat, fresh, momentum * factor))
        outputs.append(body.cast(new, flat, site.results[len(outputs)]))
    return Function("batch_norm", inputs, tuple(body.nodes), tuple(outputs))


def _as_column(
    body: Body, site: Site, position: int, given: dict[int, str], column: TensorSpec
) -> str | None:
    """A vector of channels as [1, c, 1, ..]; None where the call has none."""
    if position not in given:
        return None
    dtype = site.spec(site.arg(position)).dtype
    return body.add("view", TensorSpec(column.shape, dtype), given[position], column.shape)


def _group_norm_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    names = [f"d{i}" for i in range(rank)]
    kinds = {n: "whole" for n in names[1:]}
    operands = [names, *[["d1"]] * (len(site.operands) - 1)]
    return build(operands, [names], site, kinds)


def _group_norm(e: Emission) -> str:
    parts = [e.arg(0), e.arg(1), e.arg(2, "weight"), e.arg(3, "bias")]
    return f"F.group_norm({', '.join(parts)}, {e.arg(4, 'eps', 1e-5)})"


_SAVED = (("operand", 0),)

OPS: tuple[OpDef, ...] = (
    OpDef("layer_norm", _layer_norm_rule, _layer_norm, saved=_SAVED, expand=expand_layer_norm),
    OpDef("rms_norm", _layer_norm_rule, _rms_norm, saved=_SAVED, expand=expand_rms_norm),
    OpDef(
        "batch_norm",
        _batch_norm_rule,
        _batch_norm,
        saved=_SAVED,
        expand=expand_batch_norm,
        returns_list=True,
    ),
    OpDef("group_norm", _group_norm_rule, _group_norm, saved=_SAVED),
)
