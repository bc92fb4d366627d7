"""Convolutions: batch, groups, channels are free; spatial dims exchange halos."""

from collections.abc import Callable
from math import prod

from parloom.ir.ops import exact
from parloom.ir.ops.joined import CONVS, JOINS, in_place, joined_biases, joined_rows, joined_saves
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import WHOLE, Rule, Site, products
from parloom.ir.ops.window import Halo, Slide, halo_of, slides_of, spatial, spread, windowed

_SAVED: SavedTensors = (("operand", 0), ("operand", 1))
_BIAS = (2,)  # the operand that is added
Pads = tuple[tuple[int, int], ...]


def _groups(site: Site) -> int:
    return site.integer(6, "groups", 1)


def _lead(site: Site) -> int:
    """Dims before the spatial ones: batch and channels, or channels of a single image."""
    return len(site.operands[0].shape) - (len(site.operands[1].shape) - 2)


def _geometry(site: Site) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(kernel, stride, dilation) per spatial dim."""
    kernel = site.operands[1].shape[2:]
    position = 7 if "transpose" in site.node.op else 5
    stride = spread(site.integers(3, "stride", 1), len(kernel))
    return kernel, stride, spread(site.integers(position, "dilation", 1), len(kernel))


def _pads(site: Site) -> Pads:
    """Zeros before and after each spatial dim."""
    kernel, _, dilation = _geometry(site)
    return exact.zeros(site.arg(4, "padding", 0), kernel, dilation)


def _slides(site: Site) -> list[Slide]:
    kernel, stride, dilation = _geometry(site)
    shapes = [
        ((k - 1) * d + 1, s, before, True)
        for k, s, d, (before, _) in zip(kernel, stride, dilation, _pads(site), strict=True)
    ]
    return slides_of(site, shapes, _lead(site))


def _rule(site: Site) -> Rule:
    """Channels in are (g, q), channels out (g, m); a kernel has all of (g, m), q."""
    groups, (out, width) = _groups(site), site.operands[1].shape[:2]
    sizes, before, after, kinds = spatial(_slides(site))
    kernel = [f"k{i}" for i in range(len(before))]
    sizes |= {"n": site.operands[0].shape[0], "g": groups, "q": width, "m": out // groups}
    sizes |= dict(zip(kernel, site.operands[1].shape[2:], strict=True))
    lead = ["n"] if _lead(site) == 2 else []
    operands = [[*lead, "g q", *before], ["g m", "q", *kernel], ["g m"]][: len(site.operands)]
    kinds |= dict.fromkeys(kernel, WHOLE)
    return products(sizes, operands, [[*lead, "g m", *after]], kinds, _BIAS)


def _joined_rule(site: Site) -> Rule:
    """Several kernels of one geometry: channels out are (n, r) of each."""
    rows = joined_rows(site)
    sizes, before, after, kinds = spatial(_slides(site))
    kernel = [f"k{i}" for i in range(len(before))]
    sizes |= {"b": site.operands[0].shape[0], "q": site.operands[1].shape[1]} | rows.sizes
    sizes |= dict(zip(kernel, site.operands[1].shape[2:], strict=True))
    lead = ["b"] if _lead(site) == 2 else []
    return products(
        sizes,
        [[*lead, "q", *before], *([part, "q", *kernel] for part in rows.parts), *rows.biases],
        [[*lead, part, *after] for part in rows.parts],
        kinds | dict.fromkeys(kernel, WHOLE) | rows.kinds,
        rows.added,
    )


def _emit_joined(e: Emission) -> str:
    _, stride, dilation = _geometry(e.site)
    x, padding = _padded(e)
    settings = f"stride={stride!r}, padding={padding}, dilation={dilation!r}"
    return f"rt.convs({x}, {e.arg(1)}, {joined_biases(e)}, {settings}{in_place(e)})"


def _joined_flops(site: Site, rule: Rule) -> float:
    """Those of all kernels."""
    made = sum(result.num_elements for result in site.results)
    return 2.0 * made * prod(site.operands[1].shape[1:])


def _padded(e: Emission) -> tuple[str, str]:
    """Code of the operand with its border rows, and of the padding that is left to do."""
    site = e.site
    x = windowed(e, _slides(site), e.arg(0))
    # the halo has brought the border rows of sharded dims
    pads = [(0, 0) if e.axes_of(f"s{i}") else pad for i, pad in enumerate(_pads(site))]
    if all(before == after for before, after in pads):
        return x, repr(tuple(before for before, _ in pads))
    x = f"F.pad({x}, {tuple(n for pad in reversed(pads) for n in pad)!r})"
    return x, repr((0,) * len(pads))


def _emit(e: Emission) -> str:
    site = e.site
    _, stride, dilation = _geometry(site)
    groups = _groups(site) // e.mesh.size(e.axes_of("g"))
    x, padding = _padded(e)
    parts = [x, e.arg(1), e.once(site.arg(2, "bias")), f"stride={stride!r}", f"padding={padding}"]
    if set(dilation) != {1}:
        parts.append(f"dilation={dilation!r}")
    if groups != 1:
        parts.append(f"groups={groups}")
    return f"F.{site.node.op}({', '.join(parts)})"


def _flops(site: Site, rule: Rule) -> float:
    return 2.0 * site.results[0].num_elements * prod(site.operands[1].shape[1:])


def _transposed_slides(site: Site) -> list[Slide]:
    """The windows over the input that the rows of the output read.

    Output row o sums inputs i with 0 <= o + padding - i stride < reach. Where the output is stride
    times as long, every shard needs as many rows of its neighbors; else dims are whole.
    """
    kernel, stride, dilation = _geometry(site)
    padding = spread(site.integers(4, "padding", 0), len(kernel))
    lead, x, out = _lead(site), site.operands[0].shape, site.results[0].shape
    found = []
    for i, (k, step, d, p) in enumerate(zip(kernel, stride, dilation, padding, strict=True)):
        reach, size = (k - 1) * d + 1, x[lead + i]
        below = max(0, (reach - 1 - p) // step)
        above = max(0, -(-p // step), -(-(p + step - reach) // step))
        even = out[lead + i] == size * step
        # seen from the input: one output "row" per input row, with this many rows around it
        found.append(Slide(lead + i, size, size, below + above + 1, 1, below, even))
    return found


def _transposed_rule(site: Site) -> Rule:
    groups, (width, out) = _groups(site), site.operands[1].shape[:2]
    slides = _transposed_slides(site)
    sizes, before, after, kinds = spatial(slides)
    for i, slide in enumerate(slides):
        sizes[f"t{i}"] = site.results[0].shape[slide.dim] // max(slide.shards, 1)
    kernel = [f"k{i}" for i in range(len(before))]
    sizes |= {"n": site.operands[0].shape[0], "g": groups, "q": width // groups, "m": out}
    sizes |= dict(zip(kernel, site.operands[1].shape[2:], strict=True))
    lead = ["n"] if _lead(site) == 2 else []
    operands = [[*lead, "g q", *before], ["g q", "m", *kernel], ["g m"]][: len(site.operands)]
    kinds |= dict.fromkeys(kernel, WHOLE)
    return products(sizes, operands, [[*lead, "g m", *after]], kinds, _BIAS)


def _emit_transposed(e: Emission) -> str:
    site = e.site
    _, stride, dilation = _geometry(site)
    count = len(stride)
    padding = list(spread(site.integers(4, "padding", 0), count))
    extra = list(spread(site.integers(5, "output_padding", 0), count))
    groups = _groups(site) // e.mesh.size(e.axes_of("g"))
    tail = ""
    for i, slide in enumerate(_transposed_slides(site)):
        if axes := e.axes_of(f"s{i}"):
            below, _ = slide.rows()
            rows = slide.before // e.mesh.size(axes) * stride[i]
            tail += f".narrow({slide.dim}, {below * stride[i] + padding[i]}, {rows})"
            padding[i] = extra[i] = 0
    parts = [e.arg(0), e.arg(1), e.once(site.arg(2, "bias")), f"stride={stride!r}",
             f"padding={tuple(padding)!r}"]  # fmt: skip
    if any(extra):
        parts.append(f"output_padding={tuple(extra)!r}")
    if groups != 1:
        parts.append(f"groups={groups}")
    if set(dilation) != {1}:
        parts.append(f"dilation={dilation!r}")
    return f"F.{site.node.op}({', '.join(parts)}){tail}"


def _transposed_flops(site: Site, rule: Rule) -> float:
    return 2.0 * site.operands[0].num_elements * prod(site.operands[1].shape[1:])


def _halo(slides: Callable[[Site], list[Slide]]) -> Callable[[Site], Halo]:
    return lambda site: halo_of(slides(site))


OPS: tuple[OpDef, ...] = (
    OpDef(CONVS, _joined_rule, _emit_joined, _joined_flops, 2.0, joined_saves, joins=JOINS,
          halo=_halo(_slides), exact=exact.convolutions),
    *(
        OpDef(f"conv{n}d", _rule, _emit, _flops, 2.0, _SAVED, halo=_halo(_slides),
              exact=exact.convolution(n))
        for n in (1, 2, 3)
    ),
    *(
        OpDef(f"conv_transpose{n}d", _transposed_rule, _emit_transposed, _transposed_flops, 2.0,
              _SAVED, halo=_halo(_transposed_slides))
        for n in (1, 2, 3)
    ),
)  # fmt: skip
