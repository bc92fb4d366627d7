"""Pooling: batch and channels are free; spatial dims exchange halos, or are cut between windows."""

from collections.abc import Callable
from math import prod

from parloom.ir.ops import exact
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, each_element
from parloom.ir.ops.rule import WHOLE, Rule, Site, build, products
from parloom.ir.ops.window import Halo, Slide, halo_of, slides_of, spatial, spread, windowed

_X: SavedTensors = (("operand", 0),)
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _is_max(site: Site) -> bool:
    return site.node.op.startswith("max")


def _geometry(site: Site, count: int) -> Geometry:
    """(kernel, stride, padding, dilation) per spatial dim."""
    kernel = spread(site.integers(1, "kernel_size"), count)
    stride = spread(site.integers(2, "stride") or kernel, count)
    padding = spread(site.integers(3, "padding", 0), count)
    dilation = (1,) * count
    if _is_max(site):
        dilation = spread(site.integers(4, "dilation", 1), count)
    return kernel, stride, padding, dilation


def _zeros_count(site: Site) -> bool:
    """Whether an average counts the zeros of the padding, or divides by a number of its own."""
    included = site.arg(5, "count_include_pad", True) is not False
    return included or site.arg(6, "divisor_override") is not None


def _slides(site: Site, count: int) -> list[Slide]:
    lead = len(site.operands[0].shape) - count
    shapes = []
    for i, (k, stride, pad, d) in enumerate(zip(*_geometry(site, count), strict=True)):
        reach = (k - 1) * d + 1
        before, after = site.operands[0].shape[lead + i], site.results[0].shape[lead + i]
        if _is_max(site):
            allowed = site.operands[0].is_float
        else:  # what `ceil_mode` adds beyond the padding never counts
            over = (after - 1) * stride + reach > before + 2 * pad
            own = site.arg(6, "divisor_override") is not None
            allowed = own or (not over and (pad == 0 or _zeros_count(site)))
        shapes.append((reach, stride, pad, allowed))
    return slides_of(site, shapes, lead)


def _rule(count: int) -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        sizes, before, after, kinds = spatial(_slides(site, count))
        lead = ["n", "c"][-(len(site.operands[0].shape) - count) :]
        sizes |= dict(zip(lead, site.operands[0].shape, strict=False))
        return products(sizes, [[*lead, *before]], [[*lead, *after]], kinds)

    return rule


def _emit(count: int) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        kernel, stride, padding, dilation = _geometry(e.site, count)
        largest = _is_max(e.site)
        x = windowed(e, _slides(e.site, count), e.arg(0), 'float("-inf")' if largest else "0")
        left = tuple(0 if e.axes_of(f"s{i}") else n for i, n in enumerate(padding))
        parts = [x, repr(kernel), repr(stride), repr(left)]
        if set(dilation) != {1}:
            parts.append(f"dilation={dilation!r}")
        if e.site.arg(5 if largest else 4, "ceil_mode", False):
            parts.append("ceil_mode=True")
        if not largest and e.site.arg(5, "count_include_pad", True) is False:
            parts.append("count_include_pad=False")
        if not largest and (divisor := e.site.arg(6, "divisor_override")) is not None:
            parts.append(f"divisor_override={e.code(divisor)}")
        return f"F.{e.site.node.op}({', '.join(parts)})"

    return emit


def _halo(count: int) -> Callable[[Site], Halo]:
    return lambda site: halo_of(_slides(site, count))


def _flops(count: int) -> Callable[[Site, Rule], float]:
    def flops(site: Site, rule: Rule) -> float:
        """One operation per element of every window."""
        return float(site.results[0].num_elements * prod(_geometry(site, count)[0]))

    return flops


def _whole(count: int) -> Callable[[Site], Rule]:
    """Where results or operands are indices into the whole image."""

    def rule(site: Site) -> Rule:
        lead = ["n", "c"][-(len(site.operands[0].shape) - count) :]
        image, pooled = ([f"{p}{i}" for i in range(count)] for p in "io")
        kinds = dict.fromkeys((*image, *pooled), WHOLE)
        operands = [[*lead, *image]] * len(site.operands)
        return build(operands, [[*lead, *pooled]] * len(site.results), site, kinds)

    return rule


def _adaptive_rule(count: int) -> Callable[[Site], Rule]:
    """A dim that becomes one is a mean over shards; one that is cut evenly, is so in shards."""

    def rule(site: Site) -> Rule:
        rank = len(site.operands[0].shape)
        lead = ["n", "c"][-(rank - count) :]
        sizes = dict(zip(lead, site.operands[0].shape, strict=False))
        before, after, kinds = [], [], dict[str, str]()
        for i in range(count):
            size, out = (t.shape[rank - count + i] for t in (site.operands[0], site.results[0]))
            even = out > 0 and size % out == 0
            sizes |= {f"s{i}": out if even else 1, f"u{i}": size // out if even else size,
                      f"t{i}": 1 if even else out}  # fmt: skip
            kinds |= {f"t{i}": WHOLE} | ({} if out == 1 else {f"u{i}": WHOLE})
            before.append(f"s{i} u{i}")
            after.append(f"s{i} t{i}")
        return products(sizes, [[*lead, *before]], [[*lead, *after]], kinds)

    return rule


def _adaptive(count: int) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        ranks = e.mesh.size(tuple(a for i in range(count) for a in e.axes_of(f"u{i}")))
        share = f" / {ranks}" if ranks > 1 else ""  # a mean of means of equal shards
        return f"F.{e.site.node.op}({e.arg(0)}, {e.code(e.result_shape()[-count:])}){share}"

    return emit


def _adaptive_saves(site: Site) -> SavedTensors:
    """Nothing where the whole image becomes one value: torch takes a mean."""
    return () if set(site.results[0].shape[2:]) == {1} else _X


def _fractional_rule(site: Site) -> Rule:
    """`fractional_max_pool2d(x, kernel, size, samples[n, c, ..])`: windows depend on values."""
    count = len(site.results[0].shape) - 2
    image, pooled = ([f"{p}{i}" for i in range(count)] for p in "io")
    kinds = dict.fromkeys((*image, *pooled, "r"), WHOLE)
    operands = [["n", "c", *image], ["n", "c", "r"]]
    return build(operands, [["n", "c", *pooled]] * len(site.results), site, kinds)


def _unpool(e: Emission) -> str:
    """Torch's gradient of it wants indices in one piece."""
    given = [e.code(a) for a in e.site.node.args]
    parts = ", ".join((given[0], f"{given[1]}.contiguous()", *given[2:]))
    return f"torch.ops.aten.{e.site.node.op}({parts})"


def _entries(n: int) -> tuple[OpDef, ...]:
    windows = (_rule(n), _emit(n), _flops(n), 1.0)
    return (
        OpDef(f"max_pool{n}d", *windows, _X, each_element(8), halo=_halo(n),
              exact=exact.pool("max", n, mean=False)),
        OpDef(f"avg_pool{n}d", *windows, _X, halo=_halo(n),
              exact=exact.pool("mean", n, mean=True)),
        OpDef(f"adaptive_avg_pool{n}d", _adaptive_rule(n), _adaptive(n), saved=_adaptive_saves,
              exact=exact.pool_to_one(n)),
        OpDef(f"adaptive_max_pool{n}d", _whole(n), f"torch.ops.aten.adaptive_max_pool{n}d",
              saved=(*_X, ("result", 1))),
    )  # fmt: skip


OPS: tuple[OpDef, ...] = (
    *(op for n in (1, 2, 3) for op in _entries(n)),
    *(
        OpDef(f"max_pool{n}d_with_indices", _whole(n), f"torch.ops.aten.max_pool{n}d_with_indices",
              _flops(n), saved=(*_X, ("result", 1)))
        for n in (2, 3)
    ),
    *(
        OpDef(f"fractional_max_pool{n}d", _fractional_rule,
              f"torch.ops.aten.fractional_max_pool{n}d", saved=(*_X, ("result", 1)))
        for n in (2, 3)
    ),
    *(
        OpDef(f"max_unpool{n}d", _whole(n), _unpool, saved=(("operand", 1),))
        for n in (2, 3)
    ),
)  # fmt: skip
