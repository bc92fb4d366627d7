"""Losses: means over all samples of all ranks, token counts and class sums included."""

from collections.abc import Callable

from parloom.errors import LayoutError
from parloom.ir.graph import Dtype, Function, TensorSpec, Value
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.reduce import Body
from parloom.ir.ops.reduce import wide as wide_spec
from parloom.ir.ops.rule import LOCAL, WHOLE, Rule, Site, along, build, opaque

MEAN, SUM = 1, 2  # at::Reduction


def _reduction(site: Site, position: int) -> str:
    """The name of a loss's reduction."""
    number = site.integer(position, "reduction", MEAN)
    if number not in range(3):
        raise LayoutError(f"{site.node.key}: no reduction {number}")
    return ("none", "mean", "sum")[number]


def _cross_entropy_rule(site: Site) -> Rule:
    logits, target = site.operands[0], site.operands[1]
    reduction = site.integer(3, "reduction", MEAN)
    weighted = site.arg(2, "weight") is not None
    if len(logits.shape) != 2 or target.dtype != "int64" or weighted:
        return along(site, frozenset(range(len(logits.shape))), shared=False)
    out = ["n"] if reduction == 0 else []
    kinds = {"c": LOCAL} | ({"n": LOCAL} if reduction == MEAN else {})
    return build([["n", "c"], ["n"]], [out], site, kinds)


def _cross_entropy(e: Emission) -> str:
    reduction = _reduction(e.site, 3)
    parts = [e.arg(0), e.arg(1)]
    if e.site.arg(2, "weight") is not None:
        parts.append(f"weight={e.arg(2, 'weight')}")
    if (ignored := e.site.integer(4, "ignore_index", -100)) != -100:
        parts.append(f"ignore_index={ignored}")
    if reduction != "mean":
        parts.append(f"reduction={e.code(reduction)}")
    if smoothing := e.site.arg(5, "label_smoothing", 0.0):
        parts.append(f"label_smoothing={e.code(smoothing)}")
    return f"F.cross_entropy({', '.join(parts)})"


def expand_cross_entropy(site: Site, sharded: frozenset[str]) -> Function:
    """Cross entropy where samples or classes are sharded.

    Per-sample losses first (by max and sum over the class shards where those are split), then their
    sum over the global number of targets that are not `ignore_index`.
    """
    logits, target = site.operands[0], site.operands[1]
    samples = logits.shape[0]
    reduction = site.integer(3, "reduction", MEAN)
    ignored = site.integer(4, "ignore_index", -100)
    given = site.arg(5, "label_smoothing", 0.0)
    smoothing = given if isinstance(given, float) else 0.0
    wide = "float32" if logits.dtype in ("bfloat16", "float16") else logits.dtype
    row, scalar = TensorSpec((samples,), wide), TensorSpec((), wide)
    body = Body(site.node.path)
    valid = body.add("ne", TensorSpec((samples,), "bool"), "target", ignored)
    weight = body.add("_to_copy", row, valid, dtype=Dtype(wide))
    x = "logits"
    if wide != logits.dtype:
        x = body.add("_to_copy", TensorSpec(logits.shape, wide), "logits", dtype=Dtype(wide))
    if any(f.startswith("c") for f in sharded):
        losses = _class_losses(body, x, logits.shape, wide, smoothing)
    else:
        losses = body.add("cross_entropy_loss", row, x, "target", None, 0, ignored, smoothing)
    losses = body.add("mul", row, losses, weight)
    if reduction == 0:
        out = losses
    else:
        out = body.add("sum", scalar, losses)
        if reduction == MEAN:
            out = body.add("div", scalar, out, body.add("sum", scalar, weight))
        if wide != logits.dtype:
            out = body.add("_to_copy", site.results[0], out, dtype=Dtype(logits.dtype))
    inputs = (Value("logits", logits), Value("target", target))
    return Function("cross_entropy", inputs, tuple(body.nodes), (out,))


def _class_losses(body: Body, x: str, shape: tuple[int, ...], dtype: str, smoothing: float) -> str:
    samples = shape[0]
    full, row = TensorSpec(shape, dtype), TensorSpec((samples,), dtype)
    column = TensorSpec((samples, 1), dtype)
    top = body.add("parloom.amax", column, body.add("detach", full, x), (1,), True)
    shifted = body.add("sub", full, x, top)
    total = body.add("sum", row, body.add("exp", full, shifted), (1,), False)
    log_total = body.add("log", row, total)
    picked = body.add("parloom.pick", row, shifted, "target")
    losses = body.add("sub", row, log_total, picked)
    if smoothing:
        mean = body.add("mean", row, shifted, (1,), False)
        smooth = body.add("sub", row, log_total, mean)
        kept = body.add("mul", row, losses, 1.0 - smoothing)
        losses = body.add("add", row, kept, body.add("mul", row, smooth, smoothing))
    return losses


def _nll_rule(site: Site) -> Rule:
    """Samples are free, classes whole; with class weights, or spatial dims, all is whole."""
    if len(site.operands[0].shape) != 2 or site.arg(2, "weight") is not None:
        return opaque(site)
    reduction = site.integer(3, "reduction", MEAN)
    kinds = {"c": WHOLE} | ({"n": LOCAL} if reduction == MEAN else {})
    return build([["n", "c"], ["n"]], [["n"] if reduction == 0 else []], site, kinds)


def _nll(e: Emission) -> str:
    reduction = ("none", "mean", "sum")[e.site.integer(3, "reduction", MEAN)]
    parts = [e.arg(0), e.arg(1)]
    if e.site.arg(2, "weight") is not None:
        parts.append(f"weight={e.arg(2, 'weight')}")
    if (ignored := e.site.integer(4, "ignore_index", -100)) != -100:
        parts.append(f"ignore_index={ignored}")
    return f"F.nll_loss({', '.join(parts)}, reduction={reduction!r})"


def expand_nll(site: Site, sharded: frozenset[str]) -> Function:
    """The mean over sharded samples: their sum over the global number that is not ignored."""
    scores, target = site.operands
    ignored = site.integer(4, "ignore_index", -100)
    rows = scores.shape[:1]
    narrow, out = TensorSpec(rows, scores.dtype), site.results[0]
    row, scalar = wide_spec(narrow), wide_spec(out)
    body = Body(site.node.path)
    losses = body.add("nll_loss_nd", narrow, "scores", "target", None, 0, ignored)
    total = body.add("sum", scalar, body.cast(losses, narrow, row))
    valid = body.add("ne", TensorSpec(rows, "bool"), "target", ignored)
    count = body.add("sum", scalar, body.add("_to_copy", row, valid, dtype=Dtype(row.dtype)))
    mean = body.cast(body.add("div", scalar, total, count), scalar, out)
    inputs = (Value("scores", scores), Value("target", target))
    return Function("nll_loss", inputs, tuple(body.nodes), (mean,))


def _pointwise_rule(position: int) -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        shape = site.operands[0].shape
        names = [f"d{i}" for i in range(len(shape))]
        if any(s.shape != shape for s in site.operands):
            return along(site, frozenset(range(len(shape))), shared=False)
        out = names if site.integer(position, "reduction", MEAN) == 0 else []
        return build([names] * len(site.operands), [out], site)

    return rule


def _pointwise(
    function: str, position: int, names: tuple[str, ...], first: int = 2
) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        reduction = _reduction(e.site, position)
        parts = [e.arg(0), e.arg(1)]
        parts += [
            f"{name}={e.arg(first + i, name)}"
            for i, name in enumerate(names)
            if e.site.arg(first + i, name) is not None
        ]
        if reduction != "mean":
            return f"F.{function}({', '.join(parts)}, reduction={e.code(reduction)})"
        if not any(e.assignment.values()):
            return f"F.{function}({', '.join(parts)})"
        count = e.site.operands[0].num_elements
        return f'F.{function}({", ".join(parts)}, reduction="sum") / {count}'

    return emit


_SAVED = (("operand", 0), ("operand", 1))

OPS: tuple[OpDef, ...] = (
    OpDef("cross_entropy_loss", _cross_entropy_rule, _cross_entropy,
          saved=_SAVED, expand=expand_cross_entropy),
    OpDef("mse_loss", _pointwise_rule(2), _pointwise("mse_loss", 2, ()), saved=_SAVED),
    OpDef("l1_loss", _pointwise_rule(2), _pointwise("l1_loss", 2, ()), saved=_SAVED),
    OpDef("smooth_l1_loss", _pointwise_rule(2), _pointwise("smooth_l1_loss", 2, ("beta",), 3),
          saved=_SAVED),
    OpDef("huber_loss", _pointwise_rule(2), _pointwise("huber_loss", 2, ("delta",), 3),
          saved=_SAVED),
    OpDef("nll_loss_nd", _nll_rule, _nll, saved=_SAVED, expand=expand_nll),
    OpDef("binary_cross_entropy", _pointwise_rule(3),
          _pointwise("binary_cross_entropy", 3, ("weight",)), saved=_SAVED),
    OpDef("binary_cross_entropy_with_logits", _pointwise_rule(4),
          _pointwise("binary_cross_entropy_with_logits", 4, ("weight", "pos_weight")),
          saved=_SAVED),
)  # fmt: skip
