"""Slices, splits and joins: a dim of several tensors is so many whole blocks of one size in each.

The size of a block is what divides all lengths and offsets, so `[q | k | v]` of equal or unequal
widths can be sharded inside of the blocks: every rank has a part of each.
"""

from collections.abc import Sequence
from math import gcd

from parloom.ir.ops import exact_moves
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import WHOLE, Rule, Site, along, build, no_flops, products

BLOCK = "c"


def in_blocks(site: Site, dim: int, offsets: Sequence[int] = ()) -> Rule:
    """All tensors are alike but in `dim`, which is (whole number of blocks) x (block)."""
    specs = (*site.operands, *site.results)
    block = gcd(*(s.shape[dim] for s in specs), *offsets)
    sizes = {f"d{d}": n for d, n in enumerate(specs[0].shape)} | {BLOCK: block}
    sizes |= {f"of{k}": s.shape[dim] // max(block, 1) for k, s in enumerate(specs)}
    dims = [[f"d{d}" for d in range(len(s.shape))] for s in specs]
    for k, spec in enumerate(specs):  # nothing is no block, not none of some size
        dims[k][dim] = f"of{k} {BLOCK}" if spec.shape[dim] else f"of{k}"
    count = len(site.operands)
    whole = {f"of{k}": WHOLE for k in range(len(specs))}
    return products(sizes, dims[:count], dims[count:], whole)


def _ratio(e: Emission, index: int, dim: int) -> tuple[int, int]:
    return e.operand_shape(index)[dim], e.site.operands[index].shape[dim]


def slice_bounds(site: Site, position: int = 1) -> tuple[int, int, int, int]:
    """(dim, first, end, step) of a slice whose dim is argument `position`."""
    shape = site.operands[0].shape
    dim = site.dim(position, len(shape), 0)
    size = shape[dim]
    start, end = (
        None if site.arg(at, name) is None else site.integer(at, name)
        for at, name in ((position + 1, "start"), (position + 2, "end"))
    )
    low, high, _ = slice(start, end).indices(size)
    return dim, low, max(high, low), site.integer(position + 3, "step", 1)


def _slice_rule(site: Site) -> Rule:
    dim, low, _, step = slice_bounds(site)
    return in_blocks(site, dim, (low,)) if step == 1 else along(site, frozenset({dim}))


def _slice(e: Emission) -> str:
    dim, low, high, step = slice_bounds(e.site)
    local, size = _ratio(e, 0, dim)
    low, high = low * local // max(size, 1), high * local // max(size, 1)
    if step != 1:
        index = ", ".join([*[":"] * dim, f"{low}:{high}:{step}"])
        return f"{e.arg(0)}[{index}]"
    return f"{e.arg(0)}.narrow({dim}, {low}, {high - low})"


def _slice_scatter_rule(site: Site) -> Rule:
    """`slice_scatter(x, source, dim, start, end, step)`."""
    dim, low, _, step = slice_bounds(site, 2)
    return in_blocks(site, dim, (low,)) if step == 1 else along(site, frozenset({dim}))


def _slice_scatter(e: Emission) -> str:
    dim, low, high, step = slice_bounds(e.site, 2)
    local, size = _ratio(e, 0, dim)
    low, high = low * local // max(size, 1), high * local // max(size, 1)
    return f"torch.slice_scatter({e.arg(0)}, {e.arg(1)}, {dim}, {low}, {high}, {step})"


def _select_scatter_rule(site: Site) -> Rule:
    """`select_scatter(x, source, dim, index)`."""
    rank = len(site.operands[0].shape)
    dim = site.dim(2, rank)
    names = [f"d{i}" for i in range(rank)]
    return build([names, names[:dim] + names[dim + 1 :]], [names], site, {names[dim]: WHOLE})


def _split_sizes(site: Site) -> tuple[int, tuple[int, ...]]:
    dim = site.dim(2, len(site.operands[0].shape), 0)
    return dim, tuple(r.shape[dim] for r in site.results)


def _split_rule(site: Site) -> Rule:
    return in_blocks(site, _split_sizes(site)[0])


def _split(e: Emission) -> str:
    dim, sizes = _split_sizes(e.site)
    local, size = _ratio(e, 0, dim)
    return f"{e.arg(0)}.split({[s * local // max(size, 1) for s in sizes]}, {dim})"


def _cat_dim(site: Site) -> int:
    return site.dim(1, len(site.results[0].shape), 0)


def _cat_rule(site: Site) -> Rule:
    dim = _cat_dim(site)
    rank = len(site.results[0].shape)
    if all(len(s.shape) == rank for s in site.operands):
        return in_blocks(site, dim)
    # torch lets empty vectors be joined with anything
    names = [f"d{i}" if i != dim else "w" for i in range(rank)]
    operands = [
        [f"w{k}" if i == dim else n for i, n in enumerate(names)] if len(s.shape) == rank else ["e"]
        for k, s in enumerate(site.operands)
    ]
    kinds = {n: WHOLE for dims in (*operands, names) for n in dims if n[0] != "d"}
    return build(operands, [names], site, kinds)


def _cat(e: Emission) -> str:
    return f"torch.cat({e.arg(0)}, {_cat_dim(e.site)})"


def _stack_rule(site: Site) -> Rule:
    rank = len(site.results[0].shape)
    at = site.dim(1, rank, 0)
    names = [f"d{i}" for i in range(rank)]
    return build([names[:at] + names[at + 1 :]] * len(site.operands), [names], site,
                 {names[at]: WHOLE})  # fmt: skip


def _select_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    at = site.dim(1, rank, 0)
    names = [f"d{i}" for i in range(rank)]
    kept = [names[:at] + names[at + 1 :]] * len(site.results)
    return build([names], kept, site, {names[at]: WHOLE})


def _glu_rule(site: Site) -> Rule:
    """Two halves of a dim, both sharded alike."""
    return in_blocks(site, site.dim(1, len(site.operands[0].shape)))


_X: SavedTensors = (("operand", 0),)

OPS: tuple[OpDef, ...] = (
    OpDef("slice", _slice_rule, _slice, no_flops, view=True),
    OpDef("slice_scatter", _slice_scatter_rule, _slice_scatter, no_flops),
    OpDef("select_scatter", _select_scatter_rule, "torch.select_scatter", no_flops),
    *(
        OpDef(n, _split_rule, _split, no_flops, view=True, returns_list=True,
              exact={"split_with_sizes": exact_moves.split, "chunk": exact_moves.chunk}.get(n))
        for n in ("split", "split_with_sizes", "chunk")
    ),
    *(
        OpDef(n, _split_rule, _split, no_flops, view=True, returns_list=True)
        for n in ("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
    ),
    OpDef("cat", _cat_rule, _cat, no_flops, exact=exact_moves.concat),
    OpDef("stack", _stack_rule, "torch.stack", no_flops, exact=exact_moves.stack),
    OpDef("select", _select_rule, ".select", no_flops, view=True),
    OpDef("unbind", _select_rule, ".unbind", no_flops, view=True, returns_list=True),
    OpDef("glu", _glu_rule, "F.glu", saved=_X),
)  # fmt: skip
