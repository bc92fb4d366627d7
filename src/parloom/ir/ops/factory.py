"""Operators that make tensors from nothing: values depend on the global index only."""

from collections.abc import Callable

from parloom.ir.graph import Arg, Dtype
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import OFFSET, Rule, Site, build, no_flops


def _fresh(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.results[0].shape))]
    return build([[]] * len(site.operands), [names], site)


def _dtype(e: Emission) -> str:
    return e.code(Dtype(e.site.results[0].dtype))


def _filled(value: str | None) -> Callable[[Emission], str]:
    def emit(e: Emission) -> str:
        fill = value if value is not None else e.arg(1)
        shape = e.code(e.result_shape())
        return f"torch.full({shape}, {fill}, dtype={_dtype(e)}, device=ctx.device)"

    return emit


def _arange_rule(site: Site) -> Rule:
    return build([], [["d0"]], site, {"d0": OFFSET})


def _arange(e: Emission) -> str:
    args = [a for a in e.site.node.args if isinstance(a, int | float)]
    start: Arg = args[0] if len(args) > 1 else 0
    step: Arg = args[2] if len(args) > 2 else 1
    if not any(e.assignment.values()):
        end = args[1] if len(args) > 1 else args[0]
        bounds = ", ".join(e.code(v) for v in (start, end, step))
        return f"torch.arange({bounds}, dtype={_dtype(e)}, device=ctx.device)"
    index = f"rt.indices(ctx, {e.result_digits(0)})"
    if not isinstance(start, int) or not isinstance(step, int):
        index += ".double()"  # as torch's own arange computes; an integer times 0.1 is float32
    scaled = index if step == 1 else f"{index} * {e.code(step)}"
    shifted = scaled if start == 0 else f"{scaled} + {e.code(start)}"
    return f"({shifted}).to({_dtype(e)})"


def _table_rule(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.results[0].shape))]
    return build([], [names], site, dict.fromkeys(names, OFFSET))


def _table(e: Emission) -> str:
    """Every rank makes the whole, which is small or made only once, and keeps its shard."""
    kwargs = [k for k in e.keywords() if not k.startswith("dtype=")]
    args = [*(e.code(a) for a in e.site.node.args), *kwargs, f"dtype={_dtype(e)}"]
    function = e.site.node.op.replace("fft_", "fft.")
    code = f"torch.{function}({', '.join(args)}, device=ctx.device)"
    if not any(e.assignment.values()):
        return code
    return f"rt.mine({code}, ctx, {e.all_digits(e.site.results[0], e.result_layouts[0])})"


_TABLES = (
    "eye linspace logspace tril_indices triu_indices hann_window hamming_window blackman_window"
    " bartlett_window kaiser_window fft_fftfreq fft_rfftfreq"
)

OPS: tuple[OpDef, ...] = (
    *(OpDef(n, _table_rule, _table, no_flops, differentiable=False) for n in _TABLES.split()),
    OpDef("arange", _arange_rule, _arange, no_flops, differentiable=False),
    OpDef("full", _fresh, _filled(None), no_flops, differentiable=False),
    OpDef("zeros", _fresh, _filled("0"), no_flops, differentiable=False),
    OpDef("ones", _fresh, _filled("1"), no_flops, differentiable=False),
    OpDef("scalar_tensor", _fresh,
          lambda e: f"torch.full((), {e.arg(0)}, dtype={_dtype(e)}, device=ctx.device)",
          no_flops, differentiable=False),
)  # fmt: skip
