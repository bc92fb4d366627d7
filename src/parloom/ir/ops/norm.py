"""Normalisations: normalised factors are local programs of means over all shards."""

from math import prod

from parloom.errors import LayoutError
from parloom.ir.graph import Arg, Function, Ref, TensorSpec, Value
from parloom.ir.ops import exact
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.program import Body, wide
from parloom.ir.ops.rule import LOCAL, Rule, Site, build, products


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
        assert isinstance(momentum, int | float)
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


def _groups(site: Site) -> int:
    """Groups of channels; with instance norm every channel is one."""
    return site.integer(1, "num_groups") if site.node.op == "group_norm" else _channels(site)


def _channels(site: Site) -> int:
    return site.operands[0].shape[1]


def _group_rule(site: Site) -> Rule:
    """Samples and whole groups (g) are free; channels of a group (q) and the image are local."""
    shape, groups = site.operands[0].shape, max(_groups(site), 1)
    image = [f"d{i}" for i in range(2, len(shape))]
    sizes = {"d0": shape[0], "g": groups, "q": shape[1] // groups}
    sizes |= dict(zip(image, shape[2:], strict=True))
    operands = [["d0", "g q", *image], *[["g q"]] * (len(site.operands) - 1)]
    return products(sizes, operands, operands[:1], dict.fromkeys(("q", *image), LOCAL))


def _group_norm(e: Emission) -> str:
    groups = _groups(e.site) // e.mesh.size(e.axes_of("g"))
    parts = [e.arg(0), str(groups), e.arg(2, "weight"), e.arg(3, "bias")]
    return f"F.group_norm({', '.join(parts)}, {e.arg(4, 'eps', 1e-5)})"


def _normalized_groups(body: Body, site: Site, given: dict[int, str], weight: int, eps: Arg) -> str:
    """X normalised over the channels of each group and over the image, times weight plus bias."""
    spec, groups = wide(site.operands[0]), max(_groups(site), 1)
    shape = spec.shape
    split = TensorSpec((shape[0], groups, shape[1] // groups, *shape[2:]), spec.dtype)
    dims = tuple(range(2, len(split.shape)))
    row = TensorSpec((*split.shape[:2], *(1,) * len(dims)), spec.dtype)
    x = body.add("view", split, body.cast("x", site.operands[0], spec), split.shape)
    centred = body.add("sub", split, x, body.add("mean", row, x, dims, True))
    variance = body.add("mean", row, body.add("mul", split, centred, centred), dims, True)
    scale = body.add("rsqrt", row, body.add("add", row, variance, eps))
    out = body.add("view", spec, body.add("mul", split, centred, scale), shape)
    column = TensorSpec((1, shape[1], *(1,) * len(shape[2:])), spec.dtype)
    columns = [_as_column(body, site, i, given, column) for i in (weight, weight + 1)]
    return body.cast(_affine(body, out, spec, *columns), spec, site.results[0])


def expand_group_norm(site: Site, sharded: frozenset[str]) -> Function:
    """Group norm over channels and images in several shards."""
    inputs, given = _inputs(site, ("x", "", "weight", "bias", "", ""))
    body = Body(site.node.path)
    out = _normalized_groups(body, site, given, 2, site.arg(4, "eps", 1e-5))
    return body.function("group_norm", inputs, out)


def _instance_norm_rule(site: Site) -> Rule:
    """`instance_norm(x, weight, bias, mean, var, use_input_stats, momentum, eps, cudnn)`.

    Raises: LayoutError where running statistics would be written, which torch's operator does
    without saying so.
    """
    running = site.arg(3) is not None
    if running and site.arg(5) is True:
        raise LayoutError(
            f"{site.node.key}: instance norm writes its running statistics in place; use"
            " track_running_stats=False, or a batch norm"
        )
    if not running:
        return _group_rule(site)
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names, *[["d1"]] * (len(site.operands) - 1)], [names], site)


def _instance_norm(e: Emission) -> str:
    x, weight, bias, mean, var = (e.arg(i) for i in range(5))
    use, momentum, eps = (e.arg(i) for i in range(5, 8))
    return f"F.instance_norm({x}, {mean}, {var}, {weight}, {bias}, {use}, {momentum}, {eps})"


def expand_instance_norm(site: Site, sharded: frozenset[str]) -> Function:
    """Instance norm over an image in several shards."""
    inputs, given = _inputs(site, ("x", "weight", "bias", "", "", "", "", "", ""))
    body = Body(site.node.path)
    out = _normalized_groups(body, site, given, 1, site.arg(7))
    return body.function("instance_norm", inputs, out)


def _weight_norm_rule(site: Site) -> Rule:
    """`_weight_norm_interface(v, g, dim)`: g times v over its norms over all dims but one."""
    rank = len(site.operands[0].shape)
    dim = site.dim(2, rank, 0)
    v, g = (spec.shape for spec in site.operands)
    if g != tuple(n if i == dim else 1 for i, n in enumerate(v)):  # torch reads beyond it
        raise LayoutError(f"{site.node.key}: norms {g} are none of weights {v} over dim {dim}")
    names = [f"d{i}" for i in range(rank)]
    row = [n if i == dim else "1" for i, n in enumerate(names)]
    kinds = {n: LOCAL for i, n in enumerate(names) if i != dim}
    return build([names, row], [names, row], site, kinds)


def expand_weight_norm(site: Site, sharded: frozenset[str]) -> Function:
    """Weights and their norms over sharded dims; torch lets no gradient through the latter."""
    (v, g), norms = site.operands, site.results[1]
    rank = len(v.shape)
    dims = tuple(d for d in range(rank) if d != site.dim(2, rank, 0))
    body = Body(site.node.path)
    norm = body.add("linalg_vector_norm", norms, "v", 2, dims, True)
    out = body.add("mul", v, "v", body.add("div", g, "g", body.cast(norm, norms, g)))
    norm = body.add("detach", norms, norm)
    return body.function("weight_norm", (Value("v", v), Value("g", g)), out, norm)


_SAVED = (("operand", 0),)

OPS: tuple[OpDef, ...] = (
    OpDef("layer_norm", _layer_norm_rule, _layer_norm, saved=_SAVED, expand=expand_layer_norm,
          exact=exact.normalize("layer_norm", 2)),
    OpDef("rms_norm", _layer_norm_rule, _rms_norm, saved=_SAVED, expand=expand_rms_norm,
          exact=exact.normalize("rms_norm", 2)),
    OpDef(
        "batch_norm",
        _batch_norm_rule,
        _batch_norm,
        saved=_SAVED,
        expand=expand_batch_norm,
        detached=(1, 2),
        returns_list=True,
        exact=exact.batch_norm,
    ),
    OpDef(
        "_weight_norm_interface",
        _weight_norm_rule,
        "torch.ops.aten._weight_norm_interface",
        saved=(("operand", 0), ("operand", 1), ("result", 1)),
        expand=expand_weight_norm,
    ),
    OpDef("group_norm", _group_rule, _group_norm, saved=_SAVED, expand=expand_group_norm),
    OpDef(
        "instance_norm",
        _instance_norm_rule,
        _instance_norm,
        saved=_SAVED,
        expand=expand_instance_norm,
    ),
)  # fmt: skip
