"""Lookups by index: index values are always global, so a sharded table is offset-aware."""

from parloom.errors import LayoutError
from parloom.ir.graph import Ref
from parloom.ir.ops import exact_moves
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, all_operands
from parloom.ir.ops.rule import OFFSET, WHOLE, Rule, Site, build, no_flops, opaque

INDICES: SavedTensors = (("operand", 1),)
BOTH: SavedTensors = (("operand", 0), ("operand", 1))


def sums_up(site: Site) -> str:
    """The kind of a looked-up dim: what other ranks have comes as zeros, which bools cannot sum."""
    return WHOLE if site.operands[0].dtype == "bool" else OFFSET


def _embedding_rule(site: Site) -> Rule:
    lead = [f"d{i}" for i in range(len(site.operands[1].shape))]
    if site.arg(3, "scale_grad_by_freq", False):  # a row's gradient needs its count in the batch
        kinds = dict.fromkeys((*lead, "v"), WHOLE)
        return build([["v", "e"], lead], [[*lead, "e"]], site, kinds)
    return build([["v", "e"], lead], [[*lead, "e"]], site, {"v": OFFSET})


def _embedding(e: Emission) -> str:
    padding = e.site.integer(2, "padding_idx", -1)
    if e.axes_of("v"):
        return (
            f"rt.embedding({e.arg(0)}, {e.arg(1)}, ctx, {e.operand_digits(0)}, padding={padding})"
        )
    parts = [e.arg(1), e.arg(0)]
    if padding >= 0:
        parts.append(f"padding_idx={padding}")
    if e.site.arg(3, "scale_grad_by_freq", False):
        parts.append("scale_grad_by_freq=True")
    return f"F.embedding({', '.join(parts)})"


def _bag_rule(site: Site) -> Rule:
    """`parloom.embedding_bag(table, rows[b, l], mode, weights[b, l], padding_idx)`."""
    kinds = {"v": WHOLE if site.arg(2, "mode", "sum") == "max" else OFFSET, "l": WHOLE}
    rows = [["b", "l"]] * (len(site.operands) - 1)
    return build([["v", "e"], *rows], [["b", "e"]], site, kinds)


def _bag(e: Emission) -> str:
    mode, weights = e.site.arg(2, "mode", "sum"), e.site.arg(3, "weights")
    padding = e.site.integer(4, "padding_idx", -1)
    parts = [f"mode={e.code(mode)}"]
    if weights is not None:
        parts.append(f"{'weights' if e.axes_of('v') else 'per_sample_weights'}={e.code(weights)}")
    if padding >= 0:
        parts.append(f"padding{'' if e.axes_of('v') else '_idx'}={padding}")
    if e.axes_of("v"):
        where = f"ctx, {e.operand_digits(0)}"
        return f"rt.embedding_bag({e.arg(0)}, {e.arg(1)}, {where}, {', '.join(parts)})"
    return f"F.embedding_bag({e.arg(1)}, {e.arg(0)}, {', '.join(parts)})"


def _bag_saves(site: Site) -> SavedTensors:
    if site.arg(2, "mode", "sum") == "max":
        return (*INDICES, ("result", 0))
    return all_operands(site) if site.arg(3, "weights") is not None else INDICES


def _ragged_rule(site: Site) -> Rule:
    """`parloom.ragged_bag(table, rows, offsets, mode, weights, padding_idx, last_offset)`.

    Which rows make a bag depends on values; rows and columns of the table are free.
    """
    lines = [[f"w{k}"] for k in range(len(site.operands) - 1)]
    kinds = {"v": OFFSET} | {n: WHOLE for (n,) in (*lines, ("b",))}
    return build([["v", "e"], *lines], [["b", "e"]], site, kinds)


def _ragged_saves(site: Site) -> SavedTensors:
    weighted = site.arg(4) is not None
    return all_operands(site) if weighted else (*INDICES, ("operand", 2))


def _ragged(e: Emission) -> str:
    mode, weights, padding, last = (e.site.arg(i) for i in range(3, 7))
    if e.axes_of("v"):
        where = f"{e.arg(0)}, {e.arg(1)}, {e.arg(2)}, ctx, {e.operand_digits(0)}"
        return f"rt.ragged_bag({where}, {', '.join(map(e.code, (mode, weights, padding, last)))})"
    parts = [e.arg(1), e.arg(0), e.arg(2), f"mode={e.code(mode)}"]
    if weights is not None:
        parts.append(f"per_sample_weights={e.code(weights)}")
    if isinstance(padding, int) and padding >= 0:
        parts.append(f"padding_idx={padding}")
    if last:
        parts.append("include_last_offset=True")
    return f"F.embedding_bag({', '.join(parts)})"


def index_dims(site: Site) -> tuple[int, ...]:
    """The dims that advanced indexing names an index for; raises `LayoutError` for masks."""
    indices = site.arg(1)
    if not isinstance(indices, tuple):
        raise LayoutError(f"{site.node.key}: index needs a list of tensors")
    return tuple(i for i, ix in enumerate(indices) if isinstance(ix, Ref))


def indexed(site: Site, indices: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Names of the source's dims, of the `indices` index tensors' dims, and of what they pick.

    Indexed dims are named w*, index dims i*, others d*.
    """
    at = index_dims(site)
    shapes = [s.shape for s in site.operands[1 : 1 + indices]]
    lead = max(len(shape) for shape in shapes)
    free = [f"i{k}" for k in range(lead)]
    source = [f"{'w' if d in at else 'd'}{d}" for d in range(len(site.operands[0].shape))]
    rest = [n for n in source if n[0] == "d"]
    adjacent = at == tuple(range(at[0], at[-1] + 1))
    before = at[0] if adjacent else 0
    picked = [*rest[:before], *free, *rest[before:]]
    return source, [free[lead - len(shape) :] for shape in shapes], picked


def _index_rule(site: Site) -> Rule:
    """Advanced indexing: indexed dims know their offset, index dims and other dims are free."""
    if any(s.dtype in ("bool", "uint8") for s in site.operands[1:]):
        raise LayoutError(f"{site.node.key}: indexing by a mask has a data-dependent shape")
    source, indices, picked = indexed(site, len(site.operands) - 1)
    kinds = {n: sums_up(site) for n in source if n[0] == "w"}
    return build([source, *indices], [picked], site, kinds)


def _index(e: Emission) -> str:
    indices = e.site.arg(1)
    assert isinstance(indices, tuple)
    at = index_dims(e.site)
    if any(e.axes_of(f"w{d}") for d in at):
        digits = ", ".join(e.operand_digits(d) for d in at)
        return f"rt.index({e.arg(0)}, {e.code(indices)}, ctx, ({digits},))"
    parts = [":" if i is None else e.code(i) for i in indices]
    return f"{e.arg(0)}[{', '.join(parts)}]"


def each_dims(site: Site) -> tuple[tuple[int, int], ...]:
    """(dim of the source, number of index dims after it) of the dims that are read in order."""
    pairs: list[tuple[int, int]] = []
    given = site.arg(2)
    for pair in given if isinstance(given, tuple) else ():
        match pair:
            case (int(dim), int(after)):
                pairs.append((dim, after))
            case _:
                raise LayoutError(f"{site.node.key}: {pair!r} is no (dim, index dims after it)")
    return tuple(pairs)


def each_names(
    site: Site, indices: int
) -> tuple[list[str], list[list[str]], list[str], frozenset[str]]:
    """Names of the source's dims, of the `indices` index tensors' dims, and of what they pick.

    As `indexed` has them, but that dims read in order are the index dims that they are read along,
    which are also given.
    """
    each = dict(each_dims(site))
    shapes = [s.shape for s in site.operands[1 : 1 + indices]]
    lead = max(*(len(shape) for shape in shapes), *(k + 1 for k in each.values()))
    free = [f"i{k}" for k in range(lead)]
    at = sorted((*index_dims(site), *each))
    source = [f"{'w' if d in at else 'd'}{d}" for d in range(len(site.operands[0].shape))]
    rest = [n for n in source if n[0] == "d"]
    for d, after in each.items():
        source[d] = free[lead - 1 - after]
    before = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    picked = [*rest[:before], *free, *rest[before:]]
    shared = frozenset(free[lead - 1 - after] for after in each.values())
    return source, [free[lead - len(shape) :] for shape in shapes], picked, shared


def each_digits(e: Emission) -> str:
    """Code of the digits of all indexed dims, if one that is looked up is sharded."""
    each = dict(each_dims(e.site))
    looked_up = index_dims(e.site)
    if not any(e.axes_of(f"w{d}") for d in looked_up):
        return ""
    local = e.operand_shape(0)
    at = sorted((*looked_up, *each))
    digits = (e.operand_digits(d) if d in looked_up else f"({local[d]},)" for d in at)
    return f"ctx, ({', '.join(digits)})"


def _each_rule(site: Site) -> Rule:
    """`parloom.index_each(x, indices, each)`: `x[arange(n), index]` is `x[n, index[n]]`.

    `indices` is as in advanced indexing; a pair (d, k) in `each` says that dim d is read in order
    along the index dim that has k others after it, so it is one factor with that.
    """
    source, indices, picked, _ = each_names(site, len(site.operands) - 1)
    kinds = {n: sums_up(site) for n in source if n[0] == "w"}
    return build([source, *indices], [picked], site, kinds)


def _each(e: Emission) -> str:
    parts = [e.arg(0), e.arg(1), e.arg(2)]
    where = each_digits(e)
    return f"rt.index_each({', '.join((*parts, where) if where else parts)})"


def _index_saves(site: Site) -> SavedTensors:
    return tuple(("operand", i) for i in range(1, len(site.operands)))


def _gather_rule(site: Site) -> Rule:
    """The gathered dim knows its offset; other dims are free where the index has all of them."""
    rank = len(site.operands[0].shape)
    if not rank:
        return opaque(site)
    dim = site.dim(1, rank)
    source, index = site.operands[0].shape, site.operands[1].shape
    names = [
        f"d{i}" if d != dim and source[d] == index[d] else f"i{i}"
        for i, d in enumerate(range(rank))
    ]
    table = [n if n[0] == "d" else f"w{n[1:]}" for n in names]
    kinds = {n: WHOLE for n in table if n[0] == "w"} | {f"w{dim}": sums_up(site)}
    kinds |= {n: WHOLE for i, n in enumerate(names) if n[0] == "i" and i != dim}
    return build([table, names], [names], site, kinds)


def _gather(e: Emission) -> str:
    dim = e.site.dim(1, len(e.site.operands[0].shape))
    if e.axes_of(f"w{dim}"):
        return f"rt.gather({e.arg(0)}, {dim}, {e.arg(2)}, ctx, {e.operand_digits(dim)})"
    return e.call("torch.gather")


def _index_select_rule(site: Site) -> Rule:
    """The indexed dim knows its offset, the index and the other dims are free."""
    rank = len(site.operands[0].shape)
    if not rank:
        return opaque(site)
    dim = site.dim(1, rank)
    source = [f"w{d}" if d == dim else f"d{d}" for d in range(rank)]
    out = ["i" if d == dim else n for d, n in enumerate(source)]
    index = ["i"] * len(site.operands[1].shape)
    return build([source, index], [out], site, {f"w{dim}": sums_up(site)})


def _index_select(e: Emission) -> str:
    dim = e.site.dim(1, len(e.site.operands[0].shape))
    if not e.axes_of(f"w{dim}"):
        return e.call("torch.index_select")
    indices = ", ".join(["None"] * dim + [f"{e.arg(2)}.reshape(-1)"])
    return f"rt.index({e.arg(0)}, ({indices},), ctx, ({e.operand_digits(dim)},))"


def _take_rule(site: Site) -> Rule:
    """The source counts as one dim, which is whole; the index is free."""
    source = [f"w{d}" for d in range(len(site.operands[0].shape))]
    index = [f"i{d}" for d in range(len(site.operands[1].shape))]
    return build([source, index], [index], site, dict.fromkeys(source, WHOLE))


def _pick_rule(site: Site) -> Rule:
    tail = [f"s{i}" for i in range(len(site.operands[0].shape) - 2)]
    lead = ["n", *tail]
    return build([["n", "c", *tail], lead], [lead], site, {"c": OFFSET})


def _pick(e: Emission) -> str:
    ignored = e.site.arg(2, "ignored")
    extra = "" if ignored is None else f", ignored={e.code(ignored)}"
    return f"rt.pick({e.arg(0)}, {e.arg(1)}, ctx, {e.operand_digits(1)}{extra})"


def _tail_rule(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names], [names], site, {names[-1]: OFFSET} if names else None)


def _tail(e: Emission) -> str:
    rank = len(e.site.operands[0].shape)
    return f"rt.mask_tail({e.arg(0)}, ctx, {e.operand_digits(rank - 1)}, valid={e.arg(1)})"


def _one_hot_rule(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names], [[*names, "c"]], site, {"c": OFFSET})


def _one_hot(e: Emission) -> str:
    rank = len(e.site.operands[0].shape)
    if e.axes_of("c"):
        classes = f"rt.indices(ctx, {e.result_digits(rank)})"
        return f"({e.arg(0)}.unsqueeze(-1) == {classes}).long()"
    return f"F.one_hot({e.arg(0)}, {e.site.results[0].shape[-1]})"


OPS: tuple[OpDef, ...] = (
    OpDef("embedding", _embedding_rule, _embedding, no_flops, saved=INDICES,
          exact=exact_moves.embedding),
    OpDef("parloom.embedding_bag", _bag_rule, _bag, no_flops, saved=_bag_saves),
    OpDef("parloom.ragged_bag", _ragged_rule, _ragged, no_flops, saved=_ragged_saves),
    *(
        OpDef(n, _index_rule, _index, no_flops, saved=_index_saves)
        for n in ("index", "_unsafe_index")
    ),
    OpDef("parloom.index_each", _each_rule, _each, no_flops, saved=_index_saves),
    OpDef("gather", _gather_rule, _gather, no_flops, saved=BOTH),
    OpDef("index_select", _index_select_rule, _index_select, no_flops, saved=INDICES),
    OpDef("take", _take_rule, "torch.take", no_flops, saved=BOTH),
    OpDef("parloom.pick", _pick_rule, _pick, no_flops, saved=BOTH),
    OpDef("parloom.mask_tail", _tail_rule, _tail, no_flops),
    OpDef("one_hot", _one_hot_rule, _one_hot, no_flops, differentiable=False),
)  # fmt: skip
