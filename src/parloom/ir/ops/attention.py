"""Scaled dot-product attention: batch and head factors are free, queries know their position.

An axis on the positions of queries alone has keys and values whole (all-gathered); where it is on
those of keys, too, their blocks go around a ring (Liu et al., 2023). A query of one position, as of
a token that is generated, may have its keys sharded: each rank weighs its own.
"""

from dataclasses import replace
from math import prod

from parloom.ir.graph import Function, TensorSpec, Value
from parloom.ir.layout import digits
from parloom.ir.mesh import Mesh
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.program import Body, wide
from parloom.ir.ops.reduce import exponentials
from parloom.ir.ops.rule import LOCAL, OFFSET, RING, WHOLE, Assignment, Rule, Site, build


def _lead(site: Site) -> list[str]:
    return [f"d{i}" for i in range(len(site.results[0].shape) - 2)]


def _grouped(site: Site) -> bool:
    return bool(site.node.kwarg("enable_gqa", False))


def _dropout(site: Site) -> float:
    found = site.arg(4, "dropout_p", 0.0)
    return float(found) if isinstance(found, int | float) else 0.0


def _rings(site: Site) -> bool:
    """Whether keys may go around: without masks and dropout, which are not cut by keys."""
    q, k, v = (spec.shape for spec in site.operands[:3])
    alike = q[:-3] == k[:-3] == v[:-3] and k[-3:-2] == v[-3:-2]
    alike = alike and (_grouped(site) or q[-3:-2] == k[-3:-2])
    return alike and len(site.operands) == 3 and not _dropout(site) and min(q[-2], k[-2]) > 1


def _weighs_apart(site: Site) -> bool:
    """Whether keys may be sharded: of a query of one position, which moves instead of them."""
    q, k, v = (spec.shape for spec in site.operands[:3])
    alike = len(q) > 2 and q[:-3] == k[:-3] == v[:-3] and k[-3] == v[-3]
    alike = alike and (_grouped(site) or q[-3] == k[-3])
    return alike and q[-2] == 1 < k[-2] and not _dropout(site) and not _causal(site)


def _attention_rule(site: Site) -> Rule:
    """q[..., s, d] k[..., t, d] v[..., t, e] -> [..., s, e]; widths are whole, and keys where they
    cannot go around and have several queries.

    Sharding e would be legal without dropout, but every rank would compute all weights.
    """
    rule = _plain_rule(site)
    return replace(rule, routes=(("s", "t"),)) if _rings(site) else rule


def _plain_rule(site: Site) -> Rule:
    lead = _lead(site)
    q, k = site.operands[0], site.operands[1]
    keys = RING if _rings(site) else LOCAL if _weighs_apart(site) else WHOLE
    kinds = {"t": keys, "d": WHOLE, "e": WHOLE}
    kinds |= {"s": OFFSET} if _causal(site) else {}
    dims = ("s", "d"), ("t", "d"), ("t", "e"), ("s", "t")
    operands = [
        [*lead, *last][len(lead) + 2 - len(spec.shape) :]
        for spec, last in zip(site.operands, dims, strict=False)
    ]
    if not _grouped(site) or q.shape[-3] == k.shape[-3]:
        return build(operands, [[*lead, "s", "e"]], site, kinds)
    return _grouped_rule(site, operands, kinds)


def _grouped_rule(site: Site, operands: list[list[str]], kinds: dict[str, str]) -> Rule:
    """Grouped KV heads: the head dim of q and the result is (g, r), that of k and v is g."""
    q, k = site.operands[0], site.operands[1]
    *lead, heads = _lead(site)
    plain = [[n if n != heads else f"h{i}" for n in names] for i, names in enumerate(operands)]
    rule = build(plain, [[*lead, "hr", "s", "e"]], site, kinds)
    groups, repeat = k.shape[-3], q.shape[-3] // k.shape[-3]
    sizes = [p for p in rule.sizes if p[0][0] != "h"] + [("g", groups), ("r", repeat)]
    have = {n for n, size in sizes if size > 1}

    def head(index: int, dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        both = tuple(n for n in (("g",) if index in (1, 2) else ("g", "r")) if n in have)
        return tuple(both if any(n[0] == "h" for n in dim) else dim for dim in dims)

    return Rule(
        tuple(p for p in sizes if p[1] > 1),
        tuple(head(i, dims) for i, dims in enumerate(rule.operands)),
        tuple(head(0, dims) for dims in rule.results),
        tuple(kv for kv in rule.kinds if kv[0] in have),
    )


def _causal(site: Site) -> bool:
    return bool(site.arg(5, "is_causal", False))


def skips_hidden(site: Site) -> bool:
    """Whether sharded queries compute no block of scores that a causal mask hides as a whole."""
    same = site.operands[0].shape[-2] == site.operands[1].shape[-2]
    return _causal(site) and _rings(site) and same


def blocks_met(site: Site, rule: Rule, assignment: Assignment, mesh: Mesh) -> tuple[int, int, int]:
    """Blocks of keys that the queries of the slowest rank meet as a whole, blocks of which a causal
    mask hides the half above a diagonal, and how many blocks all keys are cut into.

    The rank with the last positions sees most. With chunks one after the other (contiguous) it
    meets c - 1 of c whole and the last by half: (2c - 1) / c times the mean. With stripes it meets
    c halves, as all ranks do (Brandon et al., 2023).
    """
    causal = _causal(site)
    queries, keys = (
        digits(rule.operand_layout(i, assignment, mesh), len(shape) - 2, shape[-2], mesh)
        for i, shape in enumerate(spec.shape for spec in site.operands[:2])
    )
    axes = rule.routed(assignment, mesh)
    if not axes:
        if not causal:
            return 1, 0, 1
        axes = tuple(digit for digit in queries if isinstance(digit, str))
        if axes and not skips_hidden(site):
            return 1, 0, 1
        keys = queries
    count = mesh.size(axes)
    if not causal or queries != keys:
        return count, 0, count
    whole, halves, left = 0, 1, count
    for position, digit in enumerate(queries):
        if isinstance(digit, int):
            continue
        # Blocks that differ from the rank's own in this digit first.
        left //= mesh[digit].size
        others = (mesh[digit].size - 1) * left
        outer = any(isinstance(d, int) for d in queries[:position])
        inner = any(isinstance(d, int) for d in queries[position + 1 :])
        if outer and not inner:
            halves += others
        else:
            whole += others
    return whole, halves, count


def _attention(e: Emission) -> str:
    q, k, v = (e.arg(i) for i in range(3))
    mask = e.arg(3, "attn_mask")
    dropout = _dropout(e.site)
    scale = e.site.node.kwarg("scale")
    causal = _causal(e.site)
    queries = e.operand_digits(len(e.site.operands[0].shape) - 2)
    if ring := e.rule.routed(e.assignment, e.mesh):
        keys = e.operand_digits(len(e.site.operands[1].shape) - 2, 1)
        rest = f", {causal}, {e.code(scale)}" if scale is not None else f", {causal}"
        return f"rt.ring_attention({q}, {k}, {v}, ctx, {queries}, {keys}, {ring!r}{rest})"
    if skips_hidden(e.site) and e.axes_of("s"):
        rest = "" if scale is None else f", {e.code(scale)}"
        return f"rt.causal_attention({q}, {k}, {v}, ctx, {queries}{rest})"
    if causal and e.axes_of("s"):
        mask = f"rt.causal_mask(ctx, {queries}, {e.site.operands[1].shape[-2]})"
        causal = False
    grouped = _grouped(e.site)
    parts = [q, k, v]
    if mask != "None":
        parts.append(f"attn_mask={mask}")
    if causal:
        parts.append("is_causal=True")
    if scale is not None:
        parts.append(f"scale={e.code(scale)}")
    if grouped:
        parts.append("enable_gqa=True")
    if not dropout:
        return f"F.scaled_dot_product_attention({', '.join(parts)})"
    spec = e.site.results[0]
    shape = (*spec.shape[:-1], e.site.operands[1].shape[-2])
    weights = e.all_digits(type(spec)(shape, spec.dtype), e.result_layouts[0])
    return (
        f"rt.attention({q}, {k}, {v}, ctx, {mask}, {e.code(dropout)}, {e.code(scale)}, {e.key},"
        f" {weights}, {causal})"
    )


def expand_attention(site: Site, sharded: frozenset[str]) -> Function:
    """Attention of one query to sharded keys: exp(q k^T - max) v and the sum of the weights are
    reduced over the shards (Dao et al., Flash-Decoding, 2023). Queries that share keys are rows.
    """
    q, k, v = site.operands[:3]
    result, width = site.results[0], wide(q).dtype
    groups = k.shape[-3]
    rows = q.shape[-3] // groups
    lead, inner = (*q.shape[:-3], groups, rows), (*k.shape[:-2], k.shape[-1], k.shape[-2])
    scores = TensorSpec((*lead, k.shape[-2]), width)
    body = Body(site.node.path)
    x = body.shaped("query", q, TensorSpec((*lead, q.shape[-1]), q.dtype))
    keys = body.add("transpose", TensorSpec(inner, k.dtype), "key", -2, -1)
    narrow = TensorSpec(scores.shape, q.dtype)
    found = body.cast(body.add("matmul", narrow, x, keys), narrow, scores)
    scale = site.node.kwarg("scale")
    found = body.add("mul", scores, found, q.shape[-1] ** -0.5 if scale is None else scale)
    inputs = [Value("query", q), Value("key", k), Value("value", v)]
    if len(site.operands) > len(inputs):
        found = _masked(body, found, scores, site.operands[3])
        inputs.append(Value("mask", site.operands[3]))
    last = len(scores.shape) - 1
    _, _, exps, total = exponentials(body, found, scores, (last,), finite=True)
    exps = body.cast(exps, scores, TensorSpec(scores.shape, v.dtype))
    summed = TensorSpec((*lead, v.shape[-1]), v.dtype)
    made = body.add("matmul", summed, exps, "value")
    made = body.cast(made, summed, replace(summed, dtype=width))
    one = TensorSpec((*lead, 1), width)
    unseeing = body.add("eq", replace(one, dtype="bool"), total, 0.0)  # such a query gets zeros
    total = body.add("masked_fill", one, total, unseeing, 1.0)
    made = body.add("div", replace(summed, dtype=width), made, total)
    made = body.cast(made, replace(summed, dtype=width), replace(summed, dtype=result.dtype))
    made = body.shaped(made, replace(summed, dtype=result.dtype), result)
    return body.function("attention", tuple(inputs), made)


def _masked(body: Body, scores: str, spec: TensorSpec, mask: TensorSpec) -> str:
    """Scores under a mask of heads, one query and keys: of booleans, or numbers to add."""
    name, shape, heads = "mask", mask.shape, spec.shape[-3] * spec.shape[-2]
    if len(shape) > 2 and shape[-3] == heads > 1 and spec.shape[-2] > 1:
        shape = (*shape[:-3], spec.shape[-3], spec.shape[-2], shape[-1])
        name = body.add("view", TensorSpec(shape, mask.dtype), name, shape)
    if mask.dtype != "bool":
        return body.add("add", spec, scores, name)
    hidden = body.add("logical_not", TensorSpec(shape, "bool"), name)
    return body.add("masked_fill", spec, scores, hidden, float("-inf"))


def _flops(site: Site, rule: Rule) -> float:
    """Two products over (lead, s, t): q k^T and the weighted sum of v."""
    q, v = site.operands[0].shape, site.operands[2].shape
    return 2.0 * prod(site.results[0].shape[:-1]) * v[-2] * (q[-1] + v[-1])


def _written_out(site: Site, fused: bool) -> bool:
    """Whether probabilities are tensors: with dropout on CPUs, so that its mask is keyed."""
    return not fused and bool(site.arg(4, "dropout_p", 0.0))


def _weights_bytes(site: Site) -> float:
    """Bytes of the probabilities [lead, s, t]."""
    width = site.results[0].num_bytes / max(1, site.results[0].num_elements)
    return width * prod(site.results[0].shape[:-1]) * site.operands[1].shape[-2]


def _saves(site: Site) -> SavedTensors:
    return (("operand", 0), ("operand", 1), ("operand", 2), ("result", 0))


def _own_bytes(site: Site, fused: bool) -> float:
    """Probabilities, what dropout leaves of them and its mask; otherwise a float32 per row."""
    if not _written_out(site, fused):
        return 4.0 * prod(site.results[0].shape[:-1])
    mask = prod(site.results[0].shape[:-1]) * site.operands[1].shape[-2]
    return 2 * _weights_bytes(site) + mask


def _undo_bytes(site: Site, fused: bool) -> float:
    """Gradients of the probabilities before and after the softmax."""
    return 2 * _weights_bytes(site) if _written_out(site, fused) else 0.0


OPS: tuple[OpDef, ...] = (
    OpDef(
        "scaled_dot_product_attention",
        _attention_rule,
        _attention,
        _flops,
        2.5,  # the backward pass recomputes q k^T: 5 products for 2 (FlashAttention, section 3)
        _saves,
        _own_bytes,
        _undo_bytes,
        expand=expand_attention,
    ),
)
