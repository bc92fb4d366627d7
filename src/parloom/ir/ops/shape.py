"""Views and rearrangements: they split, merge, reorder and drop factors, never compute."""

from collections.abc import Callable
from itertools import pairwise
from math import prod

from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import WHOLE, Dims, Rule, Site, along, broadcast, build, no_flops, opaque

Shape = tuple[int, ...]


def view_factors(
    source: Shape, target: Shape
) -> tuple[tuple[tuple[str, int], ...], Dims, Dims, set[str]]:
    """Common factors of two shapes of equal size: sizes, dims of each side, whole factors.

    Dims are grouped where the running products meet; inside a group the cuts of both sides must
    divide one another, otherwise its dims become whole factors of their own.
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[tuple[str, ...]] = [()] * len(source)
    right: list[tuple[str, ...]] = [()] * len(target)
    for a, b in _groups(source, target):
        cuts = sorted({1, *_strides(source, a), *_strides(target, b)})
        total = prod(source[d] for d in a)
        cuts = [c for c in cuts if c < total]
        chain = [*cuts, total]
        if all(y % x == 0 for x, y in pairwise(chain)):
            names = {}
            for low, high in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
                names[low] = f"f{len(sizes)}"
                sizes[names[low]] = high // low
            for shape, dims, out in ((source, a, left), (target, b, right)):
                for dim, low in zip(dims, _strides(shape, dims), strict=True):
                    out[dim] = tuple(n for c, n in names.items() if low <= c < low * shape[dim])
        else:
            for shape, dims, out in ((source, a, left), (target, b, right)):
                for dim in dims:
                    if shape[dim] > 1:
                        name = f"f{len(sizes)}"
                        sizes[name] = shape[dim]
                        whole.add(name)
                        out[dim] = (name,)
    return tuple(sizes.items()), tuple(left), tuple(right), whole


def _groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    if 0 in source:  # empty tensors have nothing to shard
        return [(list(range(len(source))), list(range(len(target))))]
    while i < len(source) or j < len(target):
        a, b = [], []
        left = right = 1
        if i < len(source):
            a.append(i)
            left *= source[i]
            i += 1
        if j < len(target):
            b.append(j)
            right *= target[j]
            j += 1
        while left != right:
            if (left < right and i < len(source)) or j >= len(target):
                a.append(i)
                left *= source[i]
                i += 1
            else:
                b.append(j)
                right *= target[j]
                j += 1
        groups.append((a, b))
    return groups


def _strides(shape: Shape, dims: list[int]) -> list[int]:
    return [prod(shape[d] for d in dims[k + 1 :]) for k in range(len(dims))]


def _view_rule(site: Site) -> Rule:
    sizes, left, right, whole = view_factors(site.operands[0].shape, site.results[0].shape)
    return Rule(sizes, (left,), (right,), tuple((f, WHOLE) for f in sorted(whole)))


def _view(e: Emission) -> str:
    return f"{e.arg(0)}.reshape({e.code(e.result_shape())})"


def _permuted(order: list[int], site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(order))]
    return build([names], [[names[i] for i in order]], site)


def _transpose_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    order = list(range(rank))
    a, b = site.dim(1, rank), site.dim(2, rank)
    order[a], order[b] = order[b], order[a]
    return _permuted(order, site)


def _permute_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    return _permuted([d % rank for d in site.integers(1)], site)


def _t_rule(site: Site) -> Rule:
    return _permuted(list(reversed(range(len(site.operands[0].shape)))), site)


def _unsqueeze_rule(site: Site) -> Rule:
    rank = len(site.results[0].shape)
    at = site.dim(1, rank)
    names = [f"d{i}" for i in range(rank)]
    return build([names[:at] + names[at + 1 :]], [names], site)


def _squeezed(site: Site) -> tuple[int, ...]:
    """The dims that go: of global size 1, whatever their local size is."""
    shape = site.operands[0].shape
    dims = site.integers(1) if len(site.node.args) > 1 else range(len(shape))
    return tuple(sorted({d % len(shape) for d in dims if shape[d] == 1}))


def _squeeze_rule(site: Site) -> Rule:
    gone = _squeezed(site)
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names], [[n for i, n in enumerate(names) if i not in gone]], site)


def _squeeze(e: Emission) -> str:
    return f"{e.arg(0)}.squeeze({e.code(_squeezed(e.site))})"


def _expand(e: Emission) -> str:
    return f"{e.arg(0)}.expand({e.code(e.result_shape())})"


def _repeat_rule(site: Site) -> Rule:
    """Dims that are repeated, and those that only the result has, are whole; the others free."""
    times = site.integers(1, "repeats")
    rank = len(times)
    first = rank - len(site.operands[0].shape)
    source = [f"d{d}" if times[d] == 1 else f"w{d}" for d in range(first, rank)]
    out = [f"d{d}" if times[d] == 1 and d >= first else f"r{d}" for d in range(rank)]
    return build([source], [out], site, {n: WHOLE for n in (*source, *out) if n[0] != "d"})


def _blocked(site: Site, dim: int, block: int, many: str) -> Rule:
    """A rule where `dim` of the operand (or result) is `k` whole blocks of factor `c`.

    `many` says which side has all blocks: operand (split, slice) or result (cat).
    """
    specs = site.operands if many == "result" else site.results
    names = [f"d{i}" for i in range(len(specs[0].shape))]
    names[dim] = "c"
    large = site.results[0] if many == "result" else site.operands[0]
    count = large.shape[dim] // block
    sizes = [("k", count)] if count > 1 else []
    sizes += [(n, s) for n, s in zip(names, specs[0].shape, strict=True) if s > 1]
    have = dict(sizes)

    def dims(outer: bool) -> Dims:
        found: list[tuple[str, ...]] = []
        for name in names:
            factors = (name,) if name in have else ()
            if name == "c" and outer and count > 1:
                factors = ("k", *factors)
            found.append(factors)
        return tuple(found)

    return Rule(
        tuple(sizes),
        tuple(dims(many == "operand") for _ in site.operands),
        tuple(dims(many == "result") for _ in site.results),
        (("k", WHOLE),) if count > 1 else (),
    )


def _ratio(e: Emission, index: int, dim: int) -> tuple[int, int]:
    return e.operand_shape(index)[dim], e.site.operands[index].shape[dim]


def _slice_bounds(site: Site) -> tuple[int, int, int, int]:
    shape = site.operands[0].shape
    dim = site.dim(1, len(shape), 0)
    size = shape[dim]
    start, end = (
        None if site.arg(position, name) is None else site.integer(position, name)
        for position, name in ((2, "start"), (3, "end"))
    )
    low, high, _ = slice(start, end).indices(size)
    return dim, low, max(high, low), site.integer(4, "step", 1)


def _slice_rule(site: Site) -> Rule:
    dim, low, high, step = _slice_bounds(site)
    size, length = site.operands[0].shape[dim], high - low
    if step == 1 and length and size % length == 0 and low % length == 0:
        return _blocked(site, dim, length, "operand")
    return along(site, frozenset({dim}))


def _slice(e: Emission) -> str:
    dim, low, high, step = _slice_bounds(e.site)
    local, size = _ratio(e, 0, dim)
    low, high = low * local // size, high * local // size
    if step != 1:
        index = ", ".join([*[":"] * dim, f"{low}:{high}:{step}"])
        return f"{e.arg(0)}[{index}]"
    return f"{e.arg(0)}.narrow({dim}, {low}, {high - low})"


def _split_sizes(site: Site) -> tuple[int, tuple[int, ...]]:
    dim = site.dim(2, len(site.operands[0].shape), 0)
    return dim, tuple(r.shape[dim] for r in site.results)


def _split_rule(site: Site) -> Rule:
    dim, sizes = _split_sizes(site)
    if len(set(sizes)) == 1:
        return _blocked(site, dim, sizes[0], "operand")
    return along(site, frozenset({dim}))


def _split(e: Emission) -> str:
    dim, sizes = _split_sizes(e.site)
    local, size = _ratio(e, 0, dim)
    return f"{e.arg(0)}.split({[s * local // size for s in sizes]}, {dim})"


def _cat_rule(site: Site) -> Rule:
    dim = site.dim(1, len(site.results[0].shape), 0)
    sizes = {s.shape[dim] for s in site.operands}
    if len(sizes) == 1:
        return _blocked(site, dim, sizes.pop(), "result")
    return along(site, frozenset({dim}))


def _cat(e: Emission) -> str:
    return f"torch.cat({e.arg(0)}, {e.site.dim(1, len(e.site.results[0].shape), 0)})"


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


def _along_dims(position: int) -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        rank = max(len(site.operands[0].shape), 1)
        return along(site, frozenset(d % rank for d in site.integers(position, "dims", -1)))

    return rule


def _roll_rule(site: Site) -> Rule:
    if not site.integers(2, "dims"):  # the flattened tensor is rolled
        return along(site, frozenset(range(len(site.operands[0].shape))))
    return _along_dims(2)(site)


def _pad_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    widths = site.integers(1)
    padded = {rank - 1 - i // 2 for i, w in enumerate(widths) if w}
    return along(site, frozenset(padded))


def _pad_saves(site: Site) -> SavedTensors:
    return () if site.arg(2, "mode", "constant") == "constant" else (("operand", 0),)


def _tri_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    return along(site, frozenset({rank - 2, rank - 1}))


OPS: tuple[OpDef, ...] = (
    OpDef("view", _view_rule, _view, no_flops, view=True, linear="first"),
    OpDef("view_dtype", opaque, ".view", no_flops, view=True, differentiable=False),
    OpDef("repeat", _repeat_rule, ".repeat", no_flops),
    OpDef("transpose", _transpose_rule, ".transpose", no_flops, view=True, linear="first"),
    OpDef("permute", _permute_rule, ".permute", no_flops, view=True, linear="first"),
    OpDef("t", _t_rule, ".t", no_flops, view=True, linear="first"),
    OpDef("unsqueeze", _unsqueeze_rule, ".unsqueeze", no_flops, view=True, linear="first"),
    OpDef("squeeze", _squeeze_rule, _squeeze, no_flops, view=True, linear="first"),
    OpDef("expand", broadcast, _expand, no_flops, view=True, linear="first"),
    OpDef("alias", broadcast, lambda e: e.arg(0), no_flops, view=True, linear="first"),
    OpDef("slice", _slice_rule, _slice, no_flops, view=True),
    OpDef("split", _split_rule, _split, no_flops, view=True, returns_list=True),
    OpDef("split_with_sizes", _split_rule, _split, no_flops, view=True, returns_list=True),
    OpDef("chunk", _split_rule, _split, no_flops, view=True, returns_list=True),
    OpDef("cat", _cat_rule, _cat, no_flops),
    OpDef("stack", _stack_rule, "torch.stack", no_flops),
    OpDef("select", _select_rule, ".select", no_flops, view=True),
    OpDef("unbind", _select_rule, ".unbind", no_flops, view=True, returns_list=True),
    OpDef("flip", _along_dims(1), "torch.flip", no_flops),
    OpDef("roll", _roll_rule, "torch.roll", no_flops),
    OpDef("diff", _along_dims(2), "torch.diff"),
    OpDef("pad", _pad_rule, "F.pad", no_flops, saved=_pad_saves),
    OpDef("constant_pad_nd", _pad_rule, "torch.constant_pad_nd", no_flops),
    OpDef("tril", _tri_rule, "torch.tril"),
    OpDef("triu", _tri_rule, "torch.triu"),
)
