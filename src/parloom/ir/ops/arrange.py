"""Rearrangements that are no views: repeats, rolls, flips, triangles, diagonals, shuffles."""

from collections.abc import Callable
from math import gcd

from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import (
    OFFSET,
    WHOLE,
    Rule,
    Site,
    along,
    build,
    no_flops,
    opaque,
    products,
)
from parloom.ir.ops.window import Halo, Slide, halo_of, spatial, windowed


def _repeat_rule(site: Site) -> Rule:
    """Copies are outside of what they copy: each rank may make some of them."""
    times = site.integers(1, "repeats")
    shape = site.operands[0].shape
    first = len(times) - len(shape)
    sizes = {f"r{d}": n for d, n in enumerate(times)}
    sizes |= {f"d{d}": n for d, n in enumerate(shape)}
    source = [f"d{d}" for d in range(len(shape))]
    out = [f"r{d}" if d < first else f"r{d} d{d - first}" for d in range(len(times))]
    return products(sizes, [source], [out])


def _repeat(e: Emission) -> str:
    times = e.site.integers(1, "repeats")
    own = tuple(n // e.mesh.size(e.axes_of(f"r{d}")) for d, n in enumerate(times))
    return f"{e.arg(0)}.repeat({e.code(own)})"


def _interleave_rule(site: Site) -> Rule:
    """`repeat_interleave(x, number, dim)`: copies are inside of what they copy, and alike."""
    if len(site.operands) != 1 or not isinstance(site.arg(1, "repeats"), int):
        return opaque(site)  # a number for each element
    shape, times = site.operands[0].shape, site.integer(1, "repeats")
    names = [f"d{d}" for d in range(len(shape))]
    sizes = dict(zip(names, shape, strict=True)) | {"r": times}
    if site.arg(2, "dim") is None:
        return products(sizes, [names], [[" ".join((*names, "r"))]])
    dim = site.dim(2, len(shape))
    out = [f"{n} r" if d == dim else n for d, n in enumerate(names)]
    return products(sizes, [names], [out])


def _interleave(e: Emission) -> str:
    times = e.site.arg(1, "repeats")
    if isinstance(times, int):
        times //= e.mesh.size(e.axes_of("r"))
    parts = [e.arg(0), e.code(times), f"dim={e.arg(2, 'dim')}"]
    return f"torch.repeat_interleave({', '.join(parts)})"


def _along_dims(position: int, name: str = "dims") -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        rank = max(len(site.operands[0].shape), 1)
        return along(site, frozenset(d % rank for d in site.integers(position, name, -1)))

    return rule


def _roll_blocks(site: Site) -> dict[int, int]:
    """Rolled dim -> shift."""
    rank = max(len(site.operands[0].shape), 1)
    shifts: dict[int, int] = {}
    for dim, shift in zip(site.integers(2, "dims"), site.integers(1, "shifts"), strict=True):
        shifts[dim % rank] = shifts.get(dim % rank, 0) + shift
    return shifts


def _roll_rule(site: Site) -> Rule:
    """A rolled dim moves by whole blocks, inside of which it is free."""
    shape = site.operands[0].shape
    if not site.integers(2, "dims"):  # the flattened tensor is rolled
        return along(site, frozenset(range(len(shape))))
    shifts = _roll_blocks(site)
    blocks = {d: gcd(shift, shape[d]) for d, shift in shifts.items()}
    sizes = {f"d{d}": blocks.get(d, n) for d, n in enumerate(shape)}
    sizes |= {f"k{d}": shape[d] // max(block, 1) for d, block in blocks.items()}
    dims = [f"k{d} d{d}" if d in blocks else f"d{d}" for d in range(len(shape))]
    return products(sizes, [dims], [dims], {f"k{d}": WHOLE for d in blocks})


def _roll(e: Emission) -> str:
    if not e.site.integers(2, "dims"):
        return e.call("torch.roll")
    shape, local = e.site.operands[0].shape, e.operand_shape(0)
    shifts = _roll_blocks(e.site)
    moved = tuple(s * local[d] // max(shape[d], 1) for d, s in shifts.items())
    return f"torch.roll({e.arg(0)}, {e.code(moved)}, {e.code(tuple(shifts))})"


def _triangle_rule(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names], [names], site, dict.fromkeys(names[-2:], OFFSET))


def _triangle(e: Emission) -> str:
    rank = len(e.site.operands[0].shape)
    if not any(e.axes_of(f"d{d}") for d in (rank - 2, rank - 1)):
        return e.call(f"torch.{e.site.node.op}")
    where = f"{e.operand_digits(rank - 2)}, {e.operand_digits(rank - 1)}"
    upper = ", upper=True" if e.site.node.op == "triu" else ""
    return f"rt.triangle({e.arg(0)}, ctx, {where}, {e.arg(1, 'diagonal', 0)}{upper})"


def _rotate_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    dims = {d % rank for d in site.integers(2, "dims", (0, 1))}
    names = [f"{'w' if d in dims else 'd'}{d}" for d in range(rank)]
    out = [f"o{d}" if d in dims else n for d, n in enumerate(names)]
    return build([names], [out], site, {n: WHOLE for n in (*names, *out) if n[0] != "d"})


def _diagonal_rule(site: Site) -> Rule:
    """The diagonal of two dims, or (`diag_embed`) a dim as a diagonal: those are whole."""
    embeds = site.node.op == "diag_embed"
    matrix = site.results[0] if embeds else site.operands[0]
    rank = len(matrix.shape)
    defaults = (-2, -1) if embeds else (0, 1)
    pair = [site.dim(i + 2, rank, defaults[i], f"dim{i + 1}") for i in range(2)]
    names = [f"{'w' if d in pair else 'd'}{d}" for d in range(rank)]
    rest = [*(n for n in names if n[0] == "d"), "v"]
    kinds = {n: WHOLE for n in (*names, "v") if n[0] != "d"}
    return build([rest], [names], site, kinds) if embeds else build([names], [rest], site, kinds)


def _diagonal_scatter_rule(site: Site) -> Rule:
    """`diagonal_scatter(x, source, offset, dim1, dim2)`: the pair of dims is whole."""
    rank = len(site.operands[0].shape)
    pair = {site.dim(3 + i, rank, i, f"dim{i + 1}") for i in range(2)}
    names = [f"{'w' if d in pair else 'd'}{d}" for d in range(rank)]
    kept = [*(n for n in names if n[0] == "d"), "v"]
    kinds = {n: WHOLE for n in (*names, "v") if n[0] != "d"}
    return build([names, kept], [names], site, kinds)


def _trace_rule(site: Site) -> Rule:
    return build([["a", "b"]], [[]], site, {"a": WHOLE, "b": WHOLE})


def _pixel_rule(site: Site) -> Rule:
    """[.., c r r, h, w] -> [.., c, h r, w r], or back: the r are whole."""
    shuffle = site.node.op == "pixel_shuffle"
    r = site.integer(1, "upscale_factor" if shuffle else "downscale_factor")
    deep = site.operands[0] if shuffle else site.results[0]
    lead = [f"d{i}" for i in range(len(deep.shape) - 3)]
    sizes = dict(zip(lead, deep.shape, strict=False)) | {"p": r, "q": r}
    sizes |= {"c": deep.shape[-3] // (r * r), "h": deep.shape[-2], "w": deep.shape[-1]}
    sides = [[[*lead, "c p q", "h", "w"]], [[*lead, "c", "h p", "w q"]]]
    left, right = sides if shuffle else reversed(sides)
    return products(sizes, left, right, {"p": WHOLE, "q": WHOLE})


def _channel_rule(site: Site) -> Rule:
    """[n, g c, ..] -> [n, c g, ..]."""
    shape, groups = site.operands[0].shape, site.integer(1, "groups")
    names = [f"d{d}" for d in range(len(shape))]
    sizes = dict(zip(names, shape, strict=True)) | {"g": groups, "c": shape[1] // groups}
    dims = [[*names[:1], pair, *names[2:]] for pair in ("g c", "c g")]
    return products(sizes, dims[:1], dims[1:])


def _channel(e: Emission) -> str:
    groups = e.site.integer(1, "groups") // e.mesh.size(e.axes_of("g"))
    return f"torch.channel_shuffle({e.arg(0)}, {groups})"


def _unfold_slides(site: Site) -> list[Slide]:
    """`unfold(x, dim, size, step)`: one dim of windows, and their elements as a last dim."""
    dim = site.dim(1, len(site.operands[0].shape), name="dimension")
    before, after = site.operands[0].shape[dim], site.results[0].shape[dim]
    return [Slide(dim, before, after, site.integer(2, "size"), site.integer(3, "step"))]


def _unfold_rule(site: Site) -> Rule:
    (slide,) = slides = _unfold_slides(site)
    shape = site.operands[0].shape
    sizes, before, after, kinds = spatial(slides)
    names = [f"d{d}" for d in range(len(shape))]
    sizes |= dict(zip(names, shape, strict=True)) | {"k": site.integer(2, "size")}
    left, right = list(names), [*names, "k"]
    left[slide.dim], right[slide.dim] = before[0], after[0]
    return products(sizes, [left], [right], kinds | {"k": WHOLE})


def _unfold(e: Emission) -> str:
    (slide,) = slides = _unfold_slides(e.site)
    x = windowed(e, slides, e.arg(0))
    return f"{x}.unfold({slide.dim}, {slide.reach}, {slide.stride})"


def _unfold_halo(site: Site) -> Halo:
    return halo_of(_unfold_slides(site))


OPS: tuple[OpDef, ...] = (
    OpDef("repeat", _repeat_rule, _repeat, no_flops),
    OpDef("repeat_interleave", _interleave_rule, _interleave, no_flops),
    OpDef("flip", _along_dims(1), "torch.flip", no_flops),
    OpDef("roll", _roll_rule, _roll, no_flops),
    OpDef("rot90", _rotate_rule, "torch.rot90", no_flops),
    OpDef("diff", _along_dims(2, "dim"), "torch.diff"),
    OpDef("tril", _triangle_rule, _triangle),
    OpDef("triu", _triangle_rule, _triangle),
    OpDef("diagonal", _diagonal_rule, "torch.diagonal", no_flops, view=True),
    OpDef("diagonal_copy", _diagonal_rule, "torch.diagonal", no_flops, view=True),
    OpDef("diagonal_scatter", _diagonal_scatter_rule, "torch.diagonal_scatter", no_flops),
    OpDef("diag_embed", _diagonal_rule, "torch.diag_embed", no_flops),
    OpDef("trace", _trace_rule, "torch.trace"),
    OpDef("pixel_shuffle", _pixel_rule, "F.pixel_shuffle", no_flops),
    OpDef("pixel_unshuffle", _pixel_rule, "F.pixel_unshuffle", no_flops),
    OpDef("channel_shuffle", _channel_rule, _channel, no_flops),
    OpDef("unfold", _unfold_rule, _unfold, no_flops, view=True, halo=_unfold_halo),
)
