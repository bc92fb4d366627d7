"""Padding and resampling of images: batch and channels are free, spatial dims where that is exact.

Enlarging by a whole number reads a few rows around each shard, shrinking by one none; what would be
read beyond the image is its edge again.
"""

from collections.abc import Callable

from parloom.ir.ops import exact_moves
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import WHOLE, Rule, Site, build, products
from parloom.ir.ops.window import EDGE, Halo, Slide, halo_of, spatial, windowed

_X: SavedTensors = (("operand", 0),)
# Rows that an output may read beyond the input row it lies in.
_REACH = {"nearest": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}


def _pad_widths(site: Site) -> dict[int, tuple[int, int]]:
    """(rows before, rows after) of the padded dims."""
    rank = len(site.operands[0].shape)
    widths = site.integers(1, "pad")
    pairs = zip(widths[::2], widths[1::2], strict=True)
    return {rank - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}


def _pad_slides(site: Site) -> list[Slide]:
    """A padded dim as a window of one row; borders that repeat the image's own rows are not."""
    shapes = site.operands[0].shape, site.results[0].shape
    constant = site.arg(2, "mode", "constant") == "constant" or site.node.op == "constant_pad_nd"
    return [
        Slide(dim, shapes[0][dim], shapes[1][dim], 1, 1, widths[0], constant)
        for dim, widths in sorted(_pad_widths(site).items())
    ]


def _pad_rule(site: Site) -> Rule:
    slides = _pad_slides(site)
    sizes, before, after, kinds = spatial(slides)
    shape = site.operands[0].shape
    names = [f"d{d}" for d in range(len(shape))]
    sizes |= dict(zip(names, shape, strict=True))
    left, right = list(names), list(names)
    for slide, b, a in zip(slides, before, after, strict=True):
        left[slide.dim], right[slide.dim] = b, a
    return products(sizes, [left], [right], kinds)


def _pad(e: Emission) -> str:
    site, slides = e.site, _pad_slides(e.site)
    done = {slide.dim for i, slide in enumerate(slides) if e.axes_of(f"s{i}")}
    if not done:
        return e.call("F.pad" if site.node.op == "pad" else "torch.constant_pad_nd")
    value = e.arg(2 if site.node.op == "constant_pad_nd" else 3, "value")
    plain = value in ("None", "0", "0.0")
    x = windowed(e, slides, e.arg(0), "0" if plain else value)
    left = {d: pair for d, pair in _pad_widths(site).items() if d not in done}
    if not left:
        return x
    dims = range(len(site.operands[0].shape) - 1, min(left) - 1, -1)
    widths = tuple(n for d in dims for n in left.get(d, (0, 0)))
    return f"F.pad({x}, {widths!r}{'' if plain else f', value={value}'})"


def _pad_saves(site: Site) -> SavedTensors:
    mode = site.arg(2, "mode", "constant") if site.node.op == "pad" else "constant"
    return _X if mode in ("reflect", "replicate") else ()


def _kind(site: Site) -> str:
    """`nearest` of `_upsample_nearest_exact2d`, `bilinear` of `upsample_bilinear2d`, and so on."""
    name = site.node.op.strip("_").removeprefix("upsample_").removesuffix("_aa")
    return name.split("_")[0].rstrip("123d")


def _aligned(site: Site) -> bool:
    return _kind(site) != "nearest" and site.arg(2, "align_corners", False) is True


def _scales(site: Site) -> list[float | None]:
    """The scale of every spatial dim as given; None where sizes say it."""
    position = 2 if _kind(site) == "nearest" else 3
    count = len(site.operands[0].shape) - 2
    given = site.arg(position, "scale_factors")
    if not isinstance(given, tuple):
        given = tuple(
            site.arg(position + i, f"scales_{'dhw'[3 - count + i]}") for i in range(count)
        )
    return [float(s) if isinstance(s, int | float) else None for s in given]


def _resample_slides(site: Site) -> list[Slide]:
    """Per spatial dim the rows that one input row's outputs read, as a window of stride one."""
    x, out = site.operands[0].shape, site.results[0].shape
    reach = _REACH[_kind(site)]
    found = []
    for d, scale in zip(range(2, len(x)), _scales(site), strict=True):
        larger = out[d] % max(x[d], 1) == 0
        exact = not _aligned(site) and (larger or x[d] % max(out[d], 1) == 0)
        exact &= scale is None or scale * x[d] == out[d]
        smooth = (reach == 2 and not larger) or site.node.op.endswith("_aa")
        wide = 0 if out[d] == x[d] or not larger else reach
        found.append(Slide(d, x[d], x[d], 2 * wide + 1, 1, wide, exact and not smooth))
    return found


def _shards(site: Site, slide: Slide) -> int:
    return min(slide.shards, site.results[0].shape[slide.dim])


def _resample_rule(site: Site) -> Rule:
    slides = _resample_slides(site)
    sizes, before, after, kinds = spatial(slides)
    for i, slide in enumerate(slides):
        out, shards = site.results[0].shape[slide.dim], _shards(site, slide)
        sizes |= {f"s{i}": shards, f"u{i}": slide.before // max(shards, 1),
                  f"t{i}": out // max(shards, 1)}  # fmt: skip
    sizes |= {"n": site.operands[0].shape[0], "c": site.operands[0].shape[1]}
    return products(sizes, [["n", "c", *before]], [["n", "c", *after]], kinds)


def _resample(e: Emission) -> str:
    site, slides = e.site, _resample_slides(e.site)
    if not any(e.axes_of(f"s{i}") for i in range(len(slides))):
        return e.call(f"torch.ops.aten.{site.node.op}")
    scales = _scales(site)
    sizes, tail = list(e.result_shape()[2:]), ""
    x = windowed(e, slides, e.arg(0), EDGE)
    for i, slide in enumerate(slides):
        if axes := e.axes_of(f"s{i}"):
            below, above = slide.rows()
            rows, made = slide.before // e.mesh.size(axes), sizes[i]
            sizes[i] = (below + rows + above) * made // rows
            scales[i] = None
            if below:
                tail += f".narrow({slide.dim}, {below * made // rows}, {made})"
    corners = "" if _kind(site) == "nearest" else "False, "
    given = f"{e.code(tuple(sizes))}, {corners}{', '.join(map(repr, scales))}"
    return f"torch.ops.aten.{site.node.op}({x}, {given}){tail}"


def _resample_flops(site: Site, rule: Rule) -> float:
    """A weighted sum of the rows around, dim by dim."""
    reach, dims = _REACH[_kind(site)], len(site.operands[0].shape) - 2
    return float(site.results[0].num_elements * (2 * (2 * reach) ** dims if reach else 1))


def _grid_rule(site: Site) -> Rule:
    """`grid_sampler(x[n, c, ..], grid[n, .., 2])`: where is read depends on values."""
    count = len(site.operands[0].shape) - 2
    image, out = ([f"{p}{i}" for i in range(count)] for p in "io")
    operands = [["n", "c", *image], ["n", *out, "xy"]]
    return build(operands, [["n", "c", *out]], site, dict.fromkeys((*image, "xy"), WHOLE))


def _grid_flops(site: Site, rule: Rule) -> float:
    """Two operations for each corner around a point."""
    return 2.0 ** (len(site.operands[0].shape) - 1) * site.results[0].num_elements


def _affine_rule(site: Site) -> Rule:
    """`affine_grid_generator(theta[n, d, d + 1], size, align_corners)`."""
    out = [f"o{i}" for i in range(len(site.results[0].shape) - 1)]
    kinds = dict.fromkeys(("a", "b", *out), WHOLE)
    return build([["n", "a", "b"]], [["n", *out]], site, kinds)


def _affine(e: Emission) -> str:
    size = e.site.integers(1, "size")
    local = (e.result_shape()[0], *size[1:])
    return f"torch.ops.aten.affine_grid_generator({e.arg(0)}, {e.code(local)}, {e.arg(2)})"


def _columns_rule(site: Site) -> Rule:
    """`im2col` and `col2im`: [n, c, h, w] and [n, c x kernel, windows]; the image is whole."""
    wide = site.node.op == "im2col"
    image, columns = (site.operands[0], site.results[0])[:: 1 if wide else -1]
    lead = ["n"] if len(image.shape) == 4 else []
    channels = image.shape[-3]
    sizes = {"n": image.shape[0], "c": channels, "k": columns.shape[-2] // channels,
             "h": image.shape[-2], "w": image.shape[-1], "l": columns.shape[-1]}  # fmt: skip
    sides = [[[*lead, "c", "h", "w"]], [[*lead, "c k", "l"]]][:: 1 if wide else -1]
    return products(sizes, sides[0], sides[1], dict.fromkeys("khwl", WHOLE))


def _halo(slides: Callable[[Site], list[Slide]]) -> Callable[[Site], Halo]:
    return lambda site: halo_of(slides(site))


_RESAMPLED = (
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)

OPS: tuple[OpDef, ...] = (
    OpDef("pad", _pad_rule, _pad, saved=_pad_saves, halo=_halo(_pad_slides), exact=exact_moves.pad),
    OpDef("constant_pad_nd", _pad_rule, _pad, halo=_halo(_pad_slides)),
    *(
        OpDef(n, _resample_rule, _resample, _resample_flops, halo=_halo(_resample_slides))
        for n in _RESAMPLED
    ),
    OpDef("grid_sampler", _grid_rule, "torch.grid_sampler", _grid_flops,
          saved=(("operand", 0), ("operand", 1))),
    OpDef("affine_grid_generator", _affine_rule, _affine),
    OpDef("im2col", _columns_rule, "torch.ops.aten.im2col"),
    OpDef("col2im", _columns_rule, "torch.ops.aten.col2im"),
)  # fmt: skip
