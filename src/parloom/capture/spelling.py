"""One spelling for everything that means the same, as decompositions that torch traces.

Each is what its operator computes, in operators that have an entry (the same bits, but for draws,
which are in `draws`).
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._export import utils as export_utils
from torch._export.utils import (
    _collect_all_valid_cia_ops_for_aten_namespace,
    _get_decomp_for_cia,
)
from torch.export import ExportedProgram, exported_program
from torch.export.exported_program import _override_composite_implicit_decomp

from parloom.capture.draws import DRAWS
from parloom.capture.replace import replaced
from parloom.ir.ops import OPS

aten = torch.ops.aten
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})  # thousands of operators otherwise
Number = bool | int | float


def like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What makes a tensor, told the shape and dtype by another one and nothing of its pattern."""

    def made(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return make(x.shape, dtype=dtype or x.dtype, device=x.device)

    return made


def new(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same for a shape that is given."""

    def made(
        x: Tensor, shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
    ) -> Tensor:
        return make(shape, dtype=dtype or x.dtype, device=x.device)

    return made


def full_like(x: Tensor, value: Number, **options: Any) -> Tensor:
    """One value; `fill` too."""
    return like(partial(full, value))(x, **options)


def new_full(x: Tensor, shape: Sequence[int], value: Number, **options: Any) -> Tensor:
    """One value in a shape that is given."""
    return new(partial(full, value))(x, shape, **options)


def full(value: Number, shape: Sequence[int], **options: Any) -> Tensor:
    """`torch.full` with the value first."""
    return torch.full(shape, value, **options)


def empty(
    shape: Sequence[int],
    strides: Sequence[int] = (),
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Memory that nothing has written to: zero here."""
    return torch.zeros(shape, dtype=dtype, device=device)


def new_strided(x: Tensor, shape: Sequence[int], strides: Sequence[int], **options: Any) -> Tensor:
    """`new_empty_strided`: zero, and nothing of its pattern."""
    return new(torch.zeros)(x, shape, **options)


def fill(x: Tensor, value: Tensor) -> Tensor:
    """A 0-dim tensor everywhere."""
    return value.to(x.dtype).expand(x.shape)


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy` has no derivative; what it gives is the source."""
    return source.to(x.dtype).expand(x.shape)


def type_as(x: Tensor, other: Tensor) -> Tensor:
    """A cast."""
    return x.to(other.dtype)


def broadcast_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In every mse_loss."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return [t if t.shape == shape else t.expand(shape) for t in tensors]


def repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each index of a dim several times, as a view that is then copied."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim %= x.dim()
    shape = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    return x.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)


def slice_scatter(
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """`x` with the source in place of a slice."""
    if step != 1:
        return NotImplemented  # type: ignore[no-any-return]  # torch then keeps the operator
    dim %= x.dim()
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    stop = max(begin, stop)
    before, after = x.narrow(dim, 0, begin), x.narrow(dim, stop, x.shape[dim] - stop)
    parts = [part for part in (before, source.to(x.dtype), after) if part.shape[dim]]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """`x` with the source in place of one index of a dim."""
    dim %= x.dim()
    index %= x.shape[dim]
    return slice_scatter(x, source.unsqueeze(dim), dim, index, index + 1)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of the source, in order, where the mask is true.

    Dims that the mask is the same along, as where image features replace placeholder tokens, are
    rows of the source that stay whole.
    """
    mask = mask.expand(x.shape)
    whole = 0
    for size, found, stride in zip(x.shape[::-1], source.shape[::-1], mask.stride()[::-1],
                                   strict=False):  # fmt: skip
        if stride or size != found:
            break
        mask, whole = mask.select(-1, 0), whole + 1
    return rows_where(x, mask, source.reshape(-1, *x.shape[x.dim() - whole :]))


def rows_where(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """`x` with the rows, in order, where a mask of its leading dims is true."""
    if not rows.shape[0]:
        return x
    order = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    rest = x.shape[mask.dim() :]
    found = aten.index.Tensor(rows, [order]).reshape(x.shape)
    result: Tensor = torch.where(mask.reshape(*mask.shape, *[1] * len(rest)), found, x)
    return result


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """By a mask, with a value for each place where it is true."""
    mask = indices[0]
    ordered = mask is not None and mask.dtype == torch.bool and len(indices) == 1
    if mask is None or not ordered or accumulate or values.dim() != x.dim() - mask.dim() + 1:
        return NotImplemented  # type: ignore[no-any-return]
    if values.shape[0] == 1:  # one row for all places
        return NotImplemented  # type: ignore[no-any-return]
    return rows_where(x, mask, values.expand(-1, *x.shape[mask.dim() :]))


def histc(x: Tensor, bins: int = 100, low: Number = 0, high: Number = 0) -> Tensor:
    """Of whole numbers, which CPUs do not count, through exact floating-point ones."""
    if x.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    counts: Tensor = aten.histc(x.double(), bins, low, high)
    return counts.to(x.dtype)


def rrelu(
    x: Tensor,
    lower: Number = 1 / 8,
    upper: Number = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> Tensor:
    """Not in training, so its slope is fixed."""
    result: Tensor = NotImplemented if training else aten.leaky_relu(x, (lower + upper) / 2)
    return result


def convolution(  # noqa: PLR0917 - torch's own arguments
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """What every convolution comes down to, by the name of its number of dims."""
    dims = weight.dim() - 2
    if transposed:
        function = (aten.conv_transpose1d, aten.conv_transpose2d.input,
                    aten.conv_transpose3d.input)[dims - 1]  # fmt: skip
        result: Tensor = function(
            x, weight, bias, stride, padding, output_padding, groups, dilation
        )
        return result
    result = (aten.conv1d, aten.conv2d, aten.conv3d)[dims - 1](
        x, weight, bias, stride, padding, dilation, groups
    )
    return result


def conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """A convolution over time of [time, batch, channel]."""
    rows = aten.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, [1], [pad])
    result: Tensor = rows.permute(2, 0, 1)
    return result


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`native_layer_norm`: the norm, and the mean and reciprocal deviation that it used.

    Torch has a gradient for the first alone.
    """
    out = aten.layer_norm(x, shape, weight, bias, eps)
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    return out, *_moments(x.detach(), dims, eps, keepdim=True)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`native_group_norm`, in the same way."""
    out = aten.group_norm(x, groups, weight, bias, eps)
    rows = x.reshape(samples, groups, -1)
    return out, *_moments(rows, (2,), eps, keepdim=False)


def _moments(
    x: Tensor, dims: tuple[int, ...], eps: float, *, keepdim: bool
) -> tuple[Tensor, Tensor]:
    mean = x.mean(dims, keepdim)
    return mean, (x.var(dims, correction=0, keepdim=keepdim) + eps).rsqrt()


def cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """As torch's kernel: it raises small norms to `eps` where autograd does not see it."""
    dtype = torch.result_type(x, y)
    units = []
    for one in broadcast_tensors([x.to(dtype), y.to(dtype)]):
        norm = torch.linalg.vector_norm(one, 2, dim, keepdim=True)
        units.append(one / torch.where(norm < eps, norm - norm.detach() + eps, norm))
    return (units[0] * units[1]).sum(dim)


def softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_softmax` and `_log_softmax`, which may widen half precision."""

    def made(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return function(x, dim, torch.float32 if half_to_float else None)

    return made


def bags(table: Tensor, rows: Tensor, starts: Tensor, *given: Any, **named: Any) -> Any:
    """`_embedding_bag`, whose padding row is a number: -1 is none."""
    padding = given[5] if len(given) > 5 else named.pop("padding_idx", -1)
    row = None if padding < 0 else padding
    options = {"scale_grad_by_freq": False, "mode": 0, "sparse": False,
               "per_sample_weights": None, "include_last_offset": False}  # fmt: skip
    options |= dict(zip(options, given, strict=False)) | named
    return aten.embedding_bag.padding_idx(table, rows, starts, *options.values(), row)


def padded(kind: str) -> Callable[..., Tensor]:
    """A padding by the name of its mode."""

    def made(x: Tensor, widths: Sequence[int]) -> Tensor:
        result: Tensor = aten.pad(x, widths, kind)
        return result

    return made


def empty_permuted(shape: Sequence[int], _: Sequence[int], **options: Any) -> Tensor:
    """`empty` in another order of memory."""
    return empty(shape, **options)


def grid_sampler(x: Tensor, grid: Tensor, *given: Any) -> Tensor:
    """`grid_sampler_2d` and `grid_sampler_3d`."""
    result: Tensor = aten.grid_sampler(x, grid, *given)
    return result


# What torch's composite operators come down to, where a model calls that itself.
LOWER: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.convolution.default: convolution,
        aten.conv_tbc.default: conv_tbc,
        aten.native_layer_norm.default: layer_norm,
        aten.native_group_norm.default: group_norm,
        aten._softmax.default: softmax(aten.softmax.int),
        aten._log_softmax.default: softmax(aten.log_softmax.int),
        aten._embedding_bag.default: bags,
        aten.empty_permuted.default: empty_permuted,
        aten.grid_sampler_2d.default: grid_sampler,
        aten.grid_sampler_3d.default: grid_sampler,
        **{
            getattr(aten, f"{kind}ion_pad{n}d").default: padded(mode)
            for kind, mode in (("reflect", "reflect"), ("replicat", "replicate"))
            for n in (1, 2, 3)
        },
    }
)

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.zeros_like.default: like(torch.zeros),
        aten.ones_like.default: like(torch.ones),
        aten.full_like.default: full_like,
        aten.empty_like.default: like(torch.zeros),
        aten.zero.default: like(torch.zeros),
        aten.new_zeros.default: new(torch.zeros),
        aten.new_ones.default: new(torch.ones),
        aten.new_full.default: new_full,
        aten.new_empty.default: new(torch.zeros),
        aten.new_empty_strided.default: new_strided,
        aten.empty.memory_format: empty,
        aten.empty_strided.default: empty,
        aten.fill.Scalar: full_like,
        aten.fill.Tensor: fill,
        aten.copy.default: copy,
        aten.type_as.default: type_as,
        aten.broadcast_tensors.default: broadcast_tensors,
        aten.repeat_interleave.self_int: repeat_interleave,
        aten.slice_scatter.default: slice_scatter,
        aten.select_scatter.default: select_scatter,
        aten.max.other: torch.maximum,
        aten.min.other: torch.minimum,
        aten.masked_scatter.default: masked_scatter,
        aten.index_put.default: index_put,
        aten.histc.default: histc,
        aten.rrelu.default: rrelu,
        aten.cosine_similarity.default: cosine_similarity,
        aten.rand_like.default: like(torch.rand),
        aten.randn_like.default: like(torch.randn),
    }
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What to trace instead of an operator; torch's composite ones without an entry come apart."""
    composite = {
        op: _get_decomp_for_cia(op)
        for op in _collect_all_valid_cia_ops_for_aten_namespace()
        if isinstance(op, torch._ops.OpOverload) and comes_apart(op._schema)
    }
    return composite | dict(LOWER) | dict(DECOMPOSITIONS) | dict(DRAWS)


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """The program in base operators.

    torch looks up its composite operators for each of 27 namespaces, and makes the annotations of
    some 6,000 kernels, twice: together a third of the time that a small model takes.
    """
    table = decompositions()  # looks them up
    once = replaced(export_utils, "_materialize_cpp_cia_ops", lambda: None)
    cached = replaced(torch._ops, "Callable", typing.Callable)
    fewer = replaced(exported_program, "_override_composite_implicit_decomp", _override)
    with once, cached, fewer:
        functional: ExportedProgram = exported.run_decompositions(table)
    return functional


def _override(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Kernels for composite operators that are kept or spelled otherwise; the dispatcher takes
    others apart without any (294 of 513: half of the time that they take).
    """
    spelled = {*LOWER, *DECOMPOSITIONS, *DRAWS}
    needed = {
        op: kernel
        for op, kernel in kernels.items()
        if op in spelled or not isinstance(op, torch._ops.OpOverload) or not comes_apart(op._schema)
    }
    override: AbstractContextManager[None] = _override_composite_implicit_decomp(needed)
    return override


def comes_apart(schema: Any) -> bool:
    """Whether a composite operator is traced as what it consists of."""
    namespace, name = schema.name.split("::")
    tensors = all("Tensor" in str(result.type) for result in schema.returns)
    return namespace == "aten" and tensors and name not in OPS and name not in RECURRENT


def with_plain_dropout(module: fx.GraphModule) -> None:
    """Dropout that drops something alone, and with a result of its own.

    Otherwise it returns its argument, of which a trace makes a copy. What writes to its argument
    would, functional, come apart into a draw, a quotient and a product.
    """
    for graph in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in list(graph.graph.nodes):
            if node.target not in (aten.dropout.default, aten.dropout_.default):
                continue
            argument, p, train = node.args
            if not p or not train:
                node.replace_all_uses_with(argument)
                graph.graph.erase_node(node)
            elif node.target is aten.dropout_.default:
                _copied_back(graph, node)
        graph.recompile()


def _copied_back(module: fx.GraphModule, node: fx.Node) -> None:
    """Dropout in place as dropout and a copy."""
    with module.graph.inserting_before(node):
        made = module.graph.call_function(aten.dropout.default, node.args)
        written = module.graph.call_function(aten.copy_.default, (node.args[0], made))
    # Memory of its own: it is not what it is written to.
    made.meta = node.meta | {"val": torch.empty_like(node.meta["val"])}
    written.meta = dict(node.meta)
    node.replace_all_uses_with(written)
    module.graph.erase_node(node)
