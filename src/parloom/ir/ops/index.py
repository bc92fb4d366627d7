"""Lookups by index: index values are always global, so a sharded table is offset-aware."""

from parloom.errors import LayoutError
from parloom.ir.graph import Ref
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import OFFSET, WHOLE, Rule, Site, build, no_flops, opaque

INDICES: SavedTensors = (("operand", 1),)
BOTH: SavedTensors = (("operand", 0), ("operand", 1))


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
    return build([["v", "e"], ["b", "l"]], [["b", "e"]], site, {"v": OFFSET, "l": WHOLE})


def _bag(e: Emission) -> str:
    mode = e.site.arg(2, "mode", "sum")
    if e.axes_of("v"):
        count = e.site.operands[1].shape[1] if mode == "mean" else 1
        scale = f" / {count}" if count != 1 else ""
        looked = f"rt.embedding({e.arg(0)}, {e.arg(1)}, ctx, {e.operand_digits(0)})"
        return f"{looked}.sum(1){scale}"
    return f"F.embedding_bag({e.arg(1)}, {e.arg(0)}, mode={e.code(mode)})"


def _index_rule(site: Site) -> Rule:
    """Advanced indexing: indexed dims are whole, index dims and the other dims are free."""
    indices = site.arg(1)
    if not isinstance(indices, tuple):
        raise LayoutError(f"{site.node.key}: index needs a list of tensors")
    rank = len(site.operands[0].shape)
    at = [i for i, ix in enumerate(indices) if isinstance(ix, Ref)]
    if any(s.dtype in ("bool", "uint8") for s in site.operands[1:]):
        raise LayoutError(f"{site.node.key}: indexing by a mask has a data-dependent shape")
    lead = max(len(s.shape) for s in site.operands[1:])
    free = [f"i{k}" for k in range(lead)]
    source = [f"w{d}" if d in at else f"d{d}" for d in range(rank)]
    rest = [n for n in source if n[0] == "d"]
    adjacent = at == list(range(at[0], at[-1] + 1))
    before = at[0] if adjacent else 0
    out = [*rest[:before], *free, *rest[before:]]
    operands = [source, *(free[lead - len(s.shape) :] for s in site.operands[1:])]
    return build(operands, [out], site, {f"w{d}": WHOLE for d in at})


def _index(e: Emission) -> str:
    indices = e.site.arg(1)
    parts = [
        ":" if i is None else e.code(i) for i in (indices if isinstance(indices, tuple) else ())
    ]
    return f"{e.arg(0)}[{', '.join(parts)}]"


def _index_saves(site: Site) -> SavedTensors:
    return tuple(("operand", i) for i in range(1, len(site.operands)))


def _gather_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    dim = site.dim(1, rank)
    source, index = site.operands[0].shape, site.operands[1].shape
    names = [
        f"d{i}" if d != dim and source[d] == index[d] else f"i{i}"
        for i, d in enumerate(range(rank))
    ]
    table = [n if n[0] == "d" else f"w{n[1:]}" for n in names]
    kinds = {n: WHOLE for n in table if n[0] == "w"}
    kinds |= {n: WHOLE for i, n in enumerate(names) if n[0] == "i" and i != dim}
    return build([table, names], [names], site, kinds)


def _index_select_rule(site: Site) -> Rule:
    """The indexed dim is whole, the index and the other dims are free."""
    rank = len(site.operands[0].shape)
    if not rank:
        return opaque(site)
    dim = site.dim(1, rank)
    source = [f"w{d}" if d == dim else f"d{d}" for d in range(rank)]
    out = ["i" if d == dim else n for d, n in enumerate(source)]
    index = ["i"] * len(site.operands[1].shape)
    return build([source, index], [out], site, {f"w{dim}": WHOLE})


def _pick_rule(site: Site) -> Rule:
    return build([["n", "c"], ["n"]], [["n"]], site, {"c": OFFSET})


def _pick(e: Emission) -> str:
    return f"rt.pick({e.arg(0)}, {e.arg(1)}, ctx, {e.operand_digits(1)})"


def _tail_rule(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names], [names], site, {names[-1]: OFFSET} if names else None)


def _tail(e: Emission) -> str:
    rank = len(e.site.operands[0].shape)
    return f"rt.mask_tail({e.arg(0)}, ctx, {e.operand_digits(rank - 1)}, valid={e.arg(1)})"


OPS: tuple[OpDef, ...] = (
    OpDef("embedding", _embedding_rule, _embedding, no_flops, saved=INDICES),
    OpDef("parloom.embedding_bag", _bag_rule, _bag, no_flops, saved=INDICES),
    OpDef("index", _index_rule, _index, no_flops, saved=_index_saves),
    OpDef("gather", _gather_rule, "torch.gather", no_flops, saved=BOTH),
    OpDef("index_select", _index_select_rule, "torch.index_select", no_flops, saved=INDICES),
    OpDef("parloom.pick", _pick_rule, _pick, no_flops, saved=BOTH),
    OpDef("parloom.mask_tail", _tail_rule, _tail, no_flops),
)
