"""Losses: means over all samples of all ranks, token counts and class sums included."""

from collections.abc import Callable
from math import prod

from parloom.errors import LayoutError
from parloom.ir.graph import Dtype, Function, Ref, TensorSpec, Value
from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, all_operands, first_bytes
from parloom.ir.ops.program import Body, wide
from parloom.ir.ops.reduce import exponentials
from parloom.ir.ops.rule import LOCAL, WHOLE, Rule, Site, build, opaque

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
IGNORED = -100  # torch's default for `ignore_index`


def _reduction(site: Site, position: int) -> str:
    """The name of a loss's reduction."""
    number = site.integer(position, "reduction", MEAN)
    if number not in range(3):
        raise LayoutError(f"{site.node.key}: no reduction {number}")
    return ("none", "mean", "sum")[number]


def _weighted(site: Site) -> bool:
    return site.arg(2, "weight") is not None


def _soft(site: Site) -> bool:
    """Whether targets are probabilities of all classes instead of the number of one."""
    return site.operands[1].is_float


def _class_rule(site: Site) -> Rule:
    """`loss(x[n, c, ..], target[n, ..] or [n, c, ..], weight[c], reduction, ..)`; n may be missing.

    Classes are local; so are samples in a mean, which divides by a count over all of them.
    """
    shape = site.operands[0].shape
    samples = ["n", *(f"s{i}" for i in range(len(shape) - 2))] if len(shape) > 1 else []
    logits = [*samples[:1], "c", *samples[1:]]
    reduction = site.integer(3, "reduction", MEAN)
    operands = [logits, logits if _soft(site) else samples, *([["c"]] if _weighted(site) else [])]
    kinds = {"c": LOCAL} | (dict.fromkeys(samples, LOCAL) if reduction == MEAN else {})
    return build(operands, [samples if reduction == NONE else []], site, kinds)


def _class_loss(function: str) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        reduction = _reduction(e.site, 3)
        # torch's gradient for an image wants it in one piece
        image = function == "nll_loss" and len(e.site.operands[0].shape) > 2
        parts = [f"{e.arg(0)}.contiguous()" if image else e.arg(0), e.arg(1)]
        if _weighted(e.site):
            parts.append(f"weight={e.arg(2, 'weight')}")
        if (ignored := e.site.integer(4, "ignore_index", IGNORED)) != IGNORED:
            parts.append(f"ignore_index={ignored}")
        if reduction != "mean":
            parts.append(f"reduction={e.code(reduction)}")
        if smoothing := e.site.arg(5, "label_smoothing", 0.0):
            parts.append(f"label_smoothing={e.code(smoothing)}")
        return f"F.{function}({', '.join(parts)})"

    return emit


class _Classes:
    """The local program of a loss over classes, on [n, c, ..] in a dtype that does not round."""

    def __init__(self, site: Site, sharded: frozenset[str]) -> None:
        self.site = site
        self.split = any(f.startswith("c") for f in sharded)
        given = site.operands[0]
        shape = given.shape if len(given.shape) > 1 else (1, *given.shape)
        self.body = body = Body(site.node.path)
        self.full = wide(TensorSpec(shape, given.dtype))
        dtype = self.full.dtype
        self.row = TensorSpec((shape[0], *shape[2:]), dtype)
        self.scalar = TensorSpec((), dtype)
        names = ("x", "target", "weight")[: len(site.operands)]
        self.inputs = tuple(Value(n, s) for n, s in zip(names, site.operands, strict=True))
        self.x = body.cast(body.shaped("x", given, self.full), given, self.full)
        target = site.operands[1]
        self.target_spec = TensorSpec(
            self.full.shape if target.is_float else self.row.shape, target.dtype
        )
        self.target = body.shaped("target", target, self.target_spec)
        self.weight = None
        if _weighted(site):
            self.classes = TensorSpec((shape[1],), dtype)
            self.weight = body.cast("weight", site.operands[2], self.classes)
        smoothing = site.arg(5, "label_smoothing", 0.0)
        self.smoothing = float(smoothing) if isinstance(smoothing, int | float) else 0.0

    def add(self, op: str, *args: object) -> str:
        """A node whose result has one number per sample."""
        return self.body.add(op, self.row, *args)

    def picked(self, x: str) -> str:
        """The element of each sample's own class; zero for ignored samples."""
        ignored = self.site.integer(4, "ignore_index", IGNORED)
        return self.add("parloom.pick", x, self.target, *(() if ignored == IGNORED else (ignored,)))

    def over_classes(self, op: str, x: str) -> str:
        return self.body.add(op, self.row, x, (1,), False)

    def log_weights(self) -> tuple[str, str]:
        """(x - its maximum, the log of the sum of exponentials of that)."""
        _, shifted, _, total = exponentials(self.body, self.x, self.full, (1,))
        one = TensorSpec((self.row.shape[0], 1, *self.row.shape[1:]), self.row.dtype)
        return shifted, self.add("log", self.body.shaped(total, one, self.row))

    def by_class(self, x: str) -> str:
        """`x` times the class weights."""
        if self.weight is None:
            return x
        shape = tuple(n if d == 1 else 1 for d, n in enumerate(self.full.shape))
        column = self.body.shaped(self.weight, self.classes, TensorSpec(shape, self.full.dtype))
        return self.body.add("mul", self.full, x, column)

    def counted(self, ignored: int) -> str:
        """What each sample counts: its class's weight or 1, and 0 where it is ignored."""
        body = self.body
        known = body.add("ne", TensorSpec(self.row.shape, "bool"), self.target, ignored)
        count = body.add("_to_copy", self.row, known, dtype=Dtype(self.row.dtype))
        if self.weight is None:
            return count
        unknown = body.add("eq", TensorSpec(self.row.shape, "bool"), self.target, ignored)
        inside = body.add("masked_fill", self.target_spec, self.target, unknown, 0)
        weights = body.add("index", self.row, self.weight, (Ref(inside),))
        return self.add("mul", weights, count)

    def known(self, losses: str) -> str:
        """`losses` with 0 where the target is ignored, whatever the logits are there.

        Their loss may be infinite or NaN, as where a mask leaves a row no class.
        """
        ignored = self.site.integer(4, "ignore_index", IGNORED)
        spec = TensorSpec(self.row.shape, "bool")
        unknown = self.body.add("eq", spec, self.target, ignored)
        return self.add("masked_fill", losses, unknown, 0.0)

    def finish(self, losses: str, divisor: str | float | None) -> Function:
        """Sum the samples' losses, or not, and divide."""
        site, body = self.site, self.body
        result = site.results[0]
        out, spec = losses, self.row
        if site.integer(3, "reduction", MEAN) != NONE:
            out, spec = body.add("sum", self.scalar, losses), self.scalar
        if divisor is not None:
            out = body.add("div", spec, out, divisor)
        out = body.cast(body.shaped(out, spec, result), spec, result)
        return body.function(site.node.op, self.inputs, out)


def expand_cross_entropy(site: Site, sharded: frozenset[str]) -> Function:
    """Cross entropy where samples or classes are sharded.

    Per-sample losses first (by max and sum over the class shards where those are split), then their
    sum over the global number, or weight, of targets that are not `ignore_index`.
    """
    p = _Classes(site, sharded)
    mean = site.integer(3, "reduction", MEAN) == MEAN
    if _soft(site):
        return p.finish(_soft_losses(p), float(prod(p.row.shape)) if mean else None)
    ignored = site.integer(4, "ignore_index", IGNORED)
    count = p.counted(ignored)
    if p.split:
        losses = _hard_losses(p, count)
    else:
        losses = p.add("cross_entropy_loss", p.x, p.target, p.weight, NONE, ignored, p.smoothing)
    return p.finish(losses, p.body.add("sum", p.scalar, count) if mean else None)


def _hard_losses(p: _Classes, count: str) -> str:
    """Losses of targets that are class numbers, over classes in several shards."""
    body, classes = p.body, p.full.shape[1]
    shifted, log_total = p.log_weights()
    losses = p.add("sub", log_total, p.picked(shifted))
    if p.weight is not None:
        losses = p.add("mul", losses, count)
    if not p.smoothing:
        return p.known(losses)
    # all classes alike: the mean over classes of weight x (log of the total - x)
    if p.weight is None:
        every = p.add("sub", log_total, p.over_classes("mean", shifted))
    else:
        total = body.add("sum", p.scalar, p.weight)
        every = p.add("mul", log_total, total)
        every = p.add("sub", every, p.over_classes("sum", p.by_class(shifted)))
        every = p.add("div", every, float(classes))
    smooth = p.add("mul", every, p.smoothing)
    return p.known(p.add("add", p.add("mul", losses, 1.0 - p.smoothing), smooth))


def _soft_losses(p: _Classes) -> str:
    """Losses of targets that are probabilities: a sum over all classes."""
    body, classes = p.body, p.full.shape[1]
    shifted, log_total = p.log_weights()
    target = body.cast(p.target, p.target_spec, p.full)
    if p.smoothing:
        kept = body.add("mul", p.full, target, 1.0 - p.smoothing)
        target = body.add("add", p.full, kept, p.smoothing / classes)
    target = p.by_class(target)
    every = p.add("mul", log_total, p.over_classes("sum", target))
    mine = body.add("mul", p.full, target, shifted)
    return p.add("sub", every, p.over_classes("sum", mine))


def expand_nll(site: Site, sharded: frozenset[str]) -> Function:
    """Negative log likelihood where samples or classes are sharded."""
    p = _Classes(site, sharded)
    ignored = site.integer(4, "ignore_index", IGNORED)
    mean = site.integer(3, "reduction", MEAN) == MEAN
    count = p.counted(ignored)
    if p.split:
        losses = p.add("neg", p.add("mul", p.picked(p.x), count))
    else:
        losses = p.add("nll_loss_nd", p.x, p.target, p.weight, NONE, ignored)
    return p.finish(losses, p.body.add("sum", p.scalar, count) if mean else None)


def _full_shape(site: Site) -> tuple[int, ...]:
    """The shape that all operands broadcast to."""
    rank = max(len(s.shape) for s in site.operands)
    padded = [(1,) * (rank - len(s.shape)) + s.shape for s in site.operands]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _pointwise_rule(position: int) -> Callable[[Site], Rule]:
    def rule(site: Site) -> Rule:
        names = [f"d{i}" for i in range(len(_full_shape(site)))]
        operands = [names[len(names) - len(s.shape) :] for s in site.operands]
        out = names if site.integer(position, "reduction", MEAN) == NONE else []
        return build(operands, [out], site)

    return rule


def _pointwise(
    function: str, position: int, names: tuple[str, ...] = (), first: int = 2
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
        count = prod(_full_shape(e.site))
        return f'F.{function}({", ".join(parts)}, reduction="sum") / {count}'

    return emit


def _divergence(e: Emission) -> str:
    """Torch's Python function warns that a mean is over elements, which is what is meant here."""
    extra = ", log_target=True" if e.site.node.kwarg("log_target") else ""
    mean = _reduction(e.site, 2) == "mean" and any(e.assignment.values())
    number = SUM if mean else e.site.integer(2, "reduction", MEAN)
    share = f" / {prod(_full_shape(e.site))}" if mean else ""
    return f"torch.kl_div({e.arg(0)}, {e.arg(1)}, {number}{extra}){share}"


def _margin_rule(position: int) -> Callable[[Site], Rule]:
    """Classes of a sample are compared with one another: they are whole, samples free."""

    def rule(site: Site) -> Rule:
        if len(site.operands[0].shape) != 2:
            return opaque(site)
        target = ["n", "c"][: len(site.operands[1].shape)]
        operands = [["n", "c"], target, ["c"]][: len(site.operands)]
        none = site.integer(position, "reduction", MEAN) == NONE
        return build(operands, [["n"] if none else []], site, {"c": WHOLE})

    return rule


def _margin(position: int) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        function = e.site.node.op
        if _reduction(e.site, position) != "mean" or not any(e.assignment.values()):
            return e.call(f"torch.ops.aten.{function}")
        names = {"multi_margin_loss": ("p", "margin", "weight")}.get(function, ())
        given = [f"{n}={e.arg(2 + i, n)}" for i, n in enumerate(names)
                 if e.site.arg(2 + i, n) is not None]  # fmt: skip
        parts = ", ".join((e.arg(0), e.arg(1), *given))
        return f'F.{function}({parts}, reduction="sum") / {e.site.operands[0].shape[0]}'

    return emit


_SAVED: SavedTensors = (("operand", 0), ("operand", 1))


# Their sums and means lie at the beginning of memory in which all elements were (torch 2.13).
_ROOMY = ("mse_loss", "smooth_l1_loss")


def _plain(name: str, position: int, names: tuple[str, ...] = (), first: int = 2) -> OpDef:
    emit = _pointwise(name, position, names, first)
    lies_in = first_bytes if name in _ROOMY else None
    return OpDef(name, _pointwise_rule(position), emit, saved=_SAVED, lies_in=lies_in)


OPS: tuple[OpDef, ...] = (
    # log_softmax keeps its result, and its backward pass is given the gradient of that
    OpDef("cross_entropy_loss", _class_rule, _class_loss("cross_entropy"),
          saved=(("operand", 1),), own_bytes=first_bytes, undo_bytes=first_bytes,
          expand=expand_cross_entropy),
    OpDef("nll_loss_nd", _class_rule, _class_loss("nll_loss"), saved=_SAVED, expand=expand_nll),
    _plain("mse_loss", 2),
    _plain("l1_loss", 2),
    _plain("soft_margin_loss", 2),
    _plain("smooth_l1_loss", 2, ("beta",), 3),
    _plain("huber_loss", 2, ("delta",), 3),
    OpDef("kl_div", _pointwise_rule(2), _divergence, saved=_SAVED),
    _plain("binary_cross_entropy", 3, ("weight",)),
    _plain("binary_cross_entropy_with_logits", 4, ("weight", "pos_weight")),
    OpDef("multi_margin_loss", _margin_rule(5), _margin(5), saved=all_operands),
    OpDef("multilabel_margin_loss", _margin_rule(2), _margin(2), saved=all_operands),
)  # fmt: skip
