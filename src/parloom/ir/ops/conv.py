"""Convolutions and pooling: groups, channels, batch are free; spatial dims exchange halos."""

from collections.abc import Callable, Mapping
from math import prod

from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import HALO, WHOLE, Rule, Site, build

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _spread(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    return values * count if len(values) == 1 else values


def _conv_window(site: Site) -> Window:
    """(kernel, stride, padding, dilation) per spatial dim."""
    count = len(site.operands[0].shape) - 2
    kernel = site.operands[1].shape[2:]
    stride = _spread(site.integers(3, "stride", 1), count)
    dilation = _spread(site.integers(5, "dilation", 1), count)
    padding = _spread(site.integers(4, "padding", 0), count)
    if site.arg(4, "padding", 0) == "same":  # the odd row, if any, is at the end
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    elif site.arg(4, "padding", 0) == "valid":
        padding = (0,) * count
    return kernel, stride, padding, dilation


def _uneven(site: Site) -> bool:
    """Whether `same` padding differs at the two ends of some dim."""
    kernel, _, _, dilation = _conv_window(site)
    same = site.arg(4, "padding", 0) == "same"
    return same and any(d * (k - 1) % 2 for d, k in zip(dilation, kernel, strict=True))


def _pool_window(site: Site) -> Window:
    count = len(site.operands[0].shape) - 2
    kernel = _spread(site.integers(1, "kernel_size"), count)
    stride = _spread(site.integers(2, "stride") or kernel, count)
    padding = _spread(site.integers(3, "padding", 0), count)
    dilation = (1,) * count
    if site.node.op.startswith("max"):
        dilation = _spread(site.integers(4, "dilation", 1), count)
    return kernel, stride, padding, dilation


def _halo_rows(window: Window, i: int) -> tuple[int, int]:
    kernel, stride, padding, dilation = (w[i] for w in window)
    return padding, max(0, (kernel - 1) * dilation + 1 - stride - padding)


def _spatial(
    site: Site, window: Window, fill_free: bool
) -> tuple[list[tuple[str, int, int]], bool]:
    """(factor, output size, stride) per spatial dim that shards evenly: in = out x stride."""
    found = []
    for i, (size_in, size_out) in enumerate(
        zip(site.operands[0].shape[2:], site.results[0].shape[2:], strict=True)
    ):
        kernel, stride, padding, dilation = (w[i] for w in window)
        # where zeros beyond the ends would count, no window may reach them (ceil_mode)
        reach = (size_out - 1) * stride + (kernel - 1) * dilation + 1
        inside = padding == 0 and reach <= size_in
        even = size_in == size_out * stride and (fill_free or inside)
        found.append((f"s{i}" if even else "", size_out, stride))
    return found, all(f for f, _, _ in found)


def _spatial_dims(rule: Rule, site: Site, spatial: list[tuple[str, int, int]]) -> Rule:
    """Replace the placeholder factors of spatial dims by (halo factor, whole stride)."""
    sizes = list(rule.sizes)
    kinds = list(rule.kinds)
    source = list(rule.operands[0])
    results = [list(r) for r in rule.results]
    for i, (factor, size_out, stride) in enumerate(spatial):
        if not factor or size_out == 1:
            continue
        sizes.append((factor, size_out))
        kinds.append((factor, HALO))
        inner: tuple[str, ...] = ()
        if stride > 1:
            sizes.append((f"t{i}", stride))
            kinds.append((f"t{i}", WHOLE))
            inner = (f"t{i}",)
        source[2 + i] = (factor, *inner)
        for result in results:
            result[2 + i] = (factor,)
    operands = (tuple(source), *rule.operands[1:])
    used = {f for dims in (*operands, *results) for dim in dims for f in dim}
    return Rule(
        tuple(p for p in sizes if p[0] in used),
        operands,
        tuple(tuple(r) for r in results),
        tuple(p for p in kinds if p[0] in used),
        rule.reduction,
    )


def _conv_rule(site: Site) -> Rule:
    count = len(site.operands[0].shape) - 2
    groups = site.integer(6, "groups", 1)
    spatial_in = [f"i{i}" for i in range(count)]
    spatial_out = [f"o{i}" for i in range(count)]
    kernel = [f"k{i}" for i in range(count)]
    kinds = {n: WHOLE for n in (*spatial_in, *spatial_out, *kernel)}
    operands = [["n", "c", *spatial_in], ["m", "q", *kernel], ["m"]][: len(site.operands)]
    if groups == 1:
        operands[1][1] = "c"
        rule = build(operands, [["n", "m", *spatial_out]], site, kinds)
    else:
        rule = _grouped(build(operands, [["n", "m", *spatial_out]], site, kinds), site, groups)
    if _uneven(site):
        return rule
    spatial, _ = _spatial(site, _conv_window(site), True)
    return _spatial_dims(rule, site, spatial)


def _grouped(rule: Rule, site: Site, groups: int) -> Rule:
    """Channels in are (g, q), channels out (g, m): only whole groups are sharded, or n."""
    per_in, per_out = site.operands[0].shape[1] // groups, site.operands[1].shape[0] // groups
    sizes = [p for p in rule.sizes if p[0] not in "cqm"]
    sizes += [("g", groups)] + [(n, s) for n, s in (("q", per_in), ("m", per_out)) if s > 1]
    have = {n for n, _ in sizes}
    names = {"c": ("g", "q"), "m": ("g", "m"), "q": ("q",)}

    def rename(dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(n for f in dim for n in names.get(f, (f,)) if n in have) for dim in dims)

    kinds = dict(rule.kinds) | {n: WHOLE for n in ("q", "m") if n in have}
    return Rule(
        tuple(sizes),
        tuple(rename(d) for d in rule.operands),
        tuple(rename(d) for d in rule.results),
        tuple(kinds.items()),
    )


def _halo(window: Callable[[Site], Window]) -> Callable[[Site], Mapping[str, tuple[int, int, int]]]:
    def halo(site: Site) -> Mapping[str, tuple[int, int, int]]:
        """Halo factor -> (tensor dim, rows from below, rows from above)."""
        seen = window(site)
        return {f"s{i}": (2 + i, *_halo_rows(seen, i)) for i in range(len(seen[0]))}

    return halo


def _padding(e: Emission, window: Window) -> tuple[int, ...]:
    """Padding left to the local call: none where the halo brought the border rows."""
    return tuple(0 if e.assignment.get(f"s{i}") else window[2][i] for i in range(len(window[2])))


def _conv(e: Emission) -> str:
    window = _conv_window(e.site)
    _, stride, _, dilation = window
    groups = e.site.integer(6, "groups", 1)
    groups //= e.mesh.size(e.axes_of("g"))
    count = len(stride)
    bias = e.once(e.site.arg(2, "bias"))
    padding = "'same'" if _uneven(e.site) else repr(_padding(e, window))
    parts = [e.arg(0), e.arg(1), bias, f"stride={stride!r}", f"padding={padding}"]
    if set(dilation) != {1}:
        parts.append(f"dilation={dilation!r}")
    if groups != 1:
        parts.append(f"groups={groups}")
    return f"F.conv{count}d({', '.join(parts)})"


def _conv_flops(site: Site, rule: Rule) -> float:
    return 2.0 * site.results[0].num_elements * prod(site.operands[1].shape[1:])


def _pool_rule(site: Site) -> Rule:
    count = len(site.operands[0].shape) - 2
    names_in = ["n", "c", *(f"i{i}" for i in range(count))]
    names_out = ["n", "c", *(f"o{i}" for i in range(count))]
    kinds = {n: WHOLE for n in (*names_in[2:], *names_out[2:])}
    rule = build([names_in], [names_out] * len(site.results), site, kinds)
    if len(site.results) > 1:  # indices into the whole image
        return rule
    # a zero halo is not the padding of a maximum, nor of an average over real elements only
    spatial, _ = _spatial(site, _pool_window(site), False)
    return _spatial_dims(rule, site, spatial)


def _pool(function: str) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        window = _pool_window(e.site)
        kernel, stride, _, dilation = window
        count = len(kernel)
        parts = [e.arg(0), repr(kernel), repr(stride), repr(_padding(e, window))]
        if function == "max_pool" and set(dilation) != {1}:
            parts.append(f"dilation={dilation!r}")
        if e.site.arg(5 if function == "max_pool" else 4, "ceil_mode", False):
            parts.append("ceil_mode=True")
        if function == "avg_pool" and e.site.arg(5, "count_include_pad", True) is False:
            parts.append("count_include_pad=False")
        if function == "avg_pool" and (divisor := e.site.arg(6, "divisor_override")) is not None:
            parts.append(f"divisor_override={divisor!r}")
        name = f"F.{function}{count}d"
        return f"{name}({', '.join(parts)})"

    return emit


def _adaptive_rule(site: Site) -> Rule:
    """Whole image to one value is a mean over contracted factors; else the image is whole."""
    count = len(site.operands[0].shape) - 2
    names_in = ["n", "c", *(f"i{i}" for i in range(count))]
    names_out = ["n", "c", *(f"o{i}" for i in range(count))]
    return build([names_in], [names_out], site,
                 {n: WHOLE for n in (*names_in[2:], *names_out[2:])})  # fmt: skip


def _adaptive_saves(site: Site) -> SavedTensors:
    """Nothing where the whole image becomes one value: torch takes a mean."""
    return () if set(site.results[0].shape[2:]) == {1} else (("operand", 0),)


_SAVED: SavedTensors = (("operand", 0), ("operand", 1))
_X: SavedTensors = (("operand", 0),)

OPS: tuple[OpDef, ...] = (
    *(
        OpDef(f"conv{n}d", _conv_rule, _conv, _conv_flops, 2.0, _SAVED, halo=_halo(_conv_window))
        for n in (1, 2, 3)
    ),
    *(
        OpDef(f"{kind}{n}d", _pool_rule, _pool(kind), saved=_X, halo=_halo(_pool_window))
        for kind in ("max_pool", "avg_pool")
        for n in (1, 2, 3)
    ),
    *(
        OpDef(
            f"adaptive_avg_pool{n}d",
            _adaptive_rule,
            f"F.adaptive_avg_pool{n}d",
            saved=_adaptive_saves,
        )
        for n in (1, 2, 3)
    ),
)
