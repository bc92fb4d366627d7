"""Writes by index. A rank with a shard of the written dim takes what belongs there, so that dim is
offset-aware; sums may be written from shards of the index too, the result is then partial.
"""

from collections.abc import Callable

from parloom.ir.graph import Ref
from parloom.ir.ops.index import each_digits, each_names, index_dims, indexed
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, all_operands
from parloom.ir.ops.rule import OFFSET, WHOLE, Rule, Site, build, no_flops, opaque

_INDEX: SavedTensors = (("operand", 1),)
_SUMS = ("sum", "add")
_WRITTEN = (0,)  # the operand that is written to, which sums are added to


def _reduce(site: Site) -> str:
    """How a call combines what it writes: `sum`, another name, or nothing for assignment."""
    if site.node.op in ("scatter_add", "index_add"):
        return "sum"
    position = {"scatter_reduce": 4, "index_reduce": 4}.get(site.node.op, 99)
    given = site.arg(position, "reduce")
    return given if isinstance(given, str) else ""


def _adds(site: Site) -> bool:
    """Whether what several ranks write adds up: then each may write a part."""
    kept = site.arg(5, "include_self", True) is True
    return _reduce(site) in _SUMS and kept and site.operands[0].dtype != "bool"


def _scatter_rule(site: Site) -> Rule:
    """`scatter(x, dim, index, source)`: dims where the index is as long as `x` are free."""
    x, index = site.operands[0].shape, site.operands[1].shape
    if not x:
        return opaque(site)
    dim = site.dim(1, len(x))
    source = site.operands[2].shape if len(site.operands) > 2 else ()
    kinds: dict[str, str] = {}
    names: list[list[str]] = [[], [], []]
    for d, size in enumerate(x):
        length, given = index[d], (source[d] if source else index[d])
        if d != dim and size == length == given:
            mine = (f"d{d}",) * 3
        else:
            own = f"s{d}" if given != length else f"i{d}"
            mine = (f"w{d}", f"i{d}", own)
            free = d == dim and given == length and _adds(site)
            kinds |= {n: WHOLE for n in mine[1:] if not free}
            kinds[f"w{d}"] = OFFSET if d == dim else WHOLE
        for dims, name in zip(names, mine, strict=True):
            dims.append(name)
    return build(names[: 3 if source else 2], [names[0]], site, kinds, added=_WRITTEN)


def _rows_rule(site: Site) -> Rule:
    """`index_add(x, dim, index, source)`: the index is a vector."""
    rank = len(site.operands[0].shape)
    if not rank or (len(site.operands) > 2 and len(site.operands[2].shape) not in (0, rank)):
        return opaque(site)
    dim = site.dim(1, rank)
    x = [f"w{d}" if d == dim else f"d{d}" for d in range(rank)]
    source = ["i" if d == dim else n for d, n in enumerate(x)]
    kinds = {f"w{dim}": OFFSET} | ({} if _adds(site) else {"i": WHOLE})
    operands = [x, ["i"] * len(site.operands[1].shape)]
    operands += [source if spec.shape else [] for spec in site.operands[2:]]
    return build(operands, [x], site, kinds, added=_WRITTEN)


def _emit(e: Emission) -> str:
    site = e.site
    dim = site.dim(1, len(site.operands[0].shape))
    first = e.once(site.arg(0))
    given = [e.code(a) for a in site.node.args[3:]] + e.keywords()
    if not e.axes_of(f"w{dim}"):
        return f"torch.{site.node.op}({', '.join((first, str(dim), e.arg(2), *given))})"
    where = f"ctx, {e.operand_digits(dim)}"
    parts = (f'"{site.node.op}"', first, str(dim), e.arg(2), where, *given)
    return f"rt.write({', '.join(parts)})"


def _saves(site: Site) -> SavedTensors:
    """The index, for rows the source too; for other combinations all that decides what is kept."""
    if site.node.op.endswith("reduce"):
        return (*all_operands(site), ("result", 0))
    rows = site.node.op in ("index_add", "index_copy")
    return (*_INDEX, ("operand", 2)) if rows else _INDEX


def _masked(site: Site) -> bool:
    """Whether the only index is a mask of the leading dims."""
    indices = site.arg(1)
    given = [s.dtype in ("bool", "uint8") for s in site.operands[1:-1]]
    return isinstance(indices, tuple) and isinstance(indices[0], Ref) and given == [True]


def _accumulates(site: Site) -> bool:
    return site.arg(3, "accumulate", False) is True


def _put_rule(site: Site) -> Rule:
    """`index_put(x, indices, values, accumulate)`.

    By a mask it is a choice between the elements and values that fit all of them.
    """
    x, values = site.operands[0], site.operands[-1]
    if _masked(site):
        mask = site.operands[1]
        names = [f"d{i}" for i in range(len(x.shape))]
        rest = names[len(mask.shape) :]
        if len(values.shape) > len(rest) and values.num_elements != 1:
            return opaque(site)  # values in the order of the mask
        shown = ["1"] * (len(values.shape) - len(rest)) + rest[
            max(0, len(rest) - len(values.shape)) :
        ]
        return build([names, names[: len(mask.shape)], shown], [names], site)
    if any(s.dtype in ("bool", "uint8") for s in site.operands[1:-1]):
        return opaque(site)
    source, indices, picked = indexed(site, len(site.operands) - 2)
    free = _accumulates(site) and x.dtype != "bool"
    kinds = {n: OFFSET for n in source if n[0] == "w"}
    kinds |= {n: WHOLE for n in picked if n[0] == "i" and not free}
    missing = len(picked) - len(values.shape)
    operands = [source, *indices, picked[missing:]]
    return build(operands, [source], site, kinds, added=_WRITTEN)


def _put_each_rule(site: Site) -> Rule:
    """`parloom.put_each(x, indices, each, values, accumulate)`, as `parloom.index_each` reads."""
    x, values = site.operands[0], site.operands[-1]
    source, indices, picked, shared = each_names(site, len(site.operands) - 2)
    free = site.arg(4, "accumulate", False) is True and x.dtype != "bool"
    kinds = {n: OFFSET for n in source if n[0] == "w"}
    kinds |= {n: WHOLE for n in picked if n[0] == "i" and not free and n not in shared}
    missing = len(picked) - len(values.shape)
    operands = [source, *indices, picked[missing:]]
    return build(operands, [source], site, kinds, added=_WRITTEN)


def _put_each(e: Emission) -> str:
    accumulate = e.arg(4, "accumulate", False)
    parts = [e.once(e.site.arg(0)), e.arg(1), e.arg(2), e.arg(3), accumulate]
    where = each_digits(e)
    return f"rt.put_each({', '.join((*parts, where) if where else parts)})"


def _put(e: Emission) -> str:
    site = e.site
    x, values = site.operands[0], site.operands[-1]
    indices = site.arg(1)
    assert isinstance(indices, tuple)
    tail = ", accumulate=True" if _accumulates(site) else ""
    if _masked(site) and any(e.assignment.values()):
        rank = len(x.shape) - len(site.operands[1].shape)
        mask = e.code(indices[0])
        mask = f"{mask}.reshape({e.code((*e.operand_shape(1), *(1,) * rank))})" if rank else mask
        value = e.arg(2) if values.num_elements != 1 else f"{e.arg(2)}.reshape(())"
        if _accumulates(site):
            return f"{e.arg(0)} + torch.where({mask}, {value}, 0)"
        return f"torch.where({mask}, {value}, {e.arg(0)})"
    first = e.once(site.arg(0))
    at = () if _masked(site) else index_dims(site)
    if any(e.axes_of(f"w{d}") for d in at):
        digits = ", ".join(e.operand_digits(d) for d in at)
        where = f"{e.code(indices)}, {e.arg(2)}, ctx, ({digits},)"
        return f"rt.index_put({first}, {where}{tail})"
    function = "torch.ops.aten.index_put" if None in indices else "torch.index_put"
    return f"{function}({first}, {e.code(indices)}, {e.arg(2)}{tail})"


def _put_saves(site: Site) -> SavedTensors:
    return tuple(("operand", i) for i in range(1, len(site.operands) - 1))


def _flat_rule(site: Site) -> Rule:
    """`put(x, index, source, accumulate)`: `x` counts as one dim, which is whole."""
    names = [f"w{d}" for d in range(len(site.operands[0].shape))]
    index = [f"i{d}" for d in range(len(site.operands[1].shape))]
    free = _accumulates(site) and site.operands[0].dtype != "bool"
    kinds = dict.fromkeys(names if free else (*names, *index), WHOLE)
    return build([names, index, index], [names], site, kinds, added=_WRITTEN)


def _flat(e: Emission) -> str:
    parts = (e.once(e.site.arg(0)), e.arg(1), e.arg(2), e.arg(3, "accumulate", False))
    return f"torch.ops.aten.put({', '.join(parts)})"


def _entry(name: str, rule: Callable[[Site], Rule]) -> OpDef:
    return OpDef(name, rule, _emit, no_flops, saved=_saves)


OPS: tuple[OpDef, ...] = (
    *(_entry(name, _scatter_rule) for name in ("scatter", "scatter_add", "scatter_reduce")),
    *(
        _entry(name, _rows_rule)
        for name in ("index_add", "index_copy", "index_fill", "index_reduce")
    ),
    OpDef("put", _flat_rule, _flat, no_flops, saved=_INDEX),
    OpDef("parloom.put_each", _put_each_rule, _put_each, no_flops, saved=_put_saves),
    OpDef("index_put", _put_rule, _put, no_flops, saved=_put_saves),
)
