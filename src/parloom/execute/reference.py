"""The reference: a captured graph evaluated on one device, operator by operator.

It calls ATen by name on whole tensors and shares nothing with the code that emits parallel
programs, so that the two can disagree. Autograd works through it. Randomness comes from torch, or
from a hook that gives the masks, which is how a parallel run is compared bit by bit.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from parloom.capture.microbatch import split_of
from parloom.capture.operators import packet
from parloom.errors import InputError
from parloom.execute.experts import experts
from parloom.ir.graph import Arg, Call, Dtype, Function, Graph, Node, Ref, node_key
from parloom.ir.ops.cache import WRITE_CACHE
from parloom.runtime.memory import separate


class DropoutHook(Protocol):
    """Gives the keep mask (0 or 1) of a dropout by the decision key of its node, and other draws.

    For attention the shape is that of the weights, `[..., query, key]`.
    """

    def mask(self, key: str, shape: tuple[int, ...], p: float) -> Tensor: ...

    def draw(self, key: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor: ...


class Results(TypedDict):
    """The loss (None in an evaluation program without one), outputs and new buffer values."""

    loss: Tensor | None
    outputs: dict[str, Tensor]
    updates: dict[str, Tensor]


def evaluate(
    graph: Graph, tensors: Mapping[str, Tensor], *, dropout: DropoutHook | None = None
) -> Results:
    """Run the graph on `tensors`, one per input value name (constants may be left out).

    Raises: InputError where a tensor is missing or has another shape.
    """
    values = dict(input_values(graph, tensors))
    results = run_function(graph, graph.main, values, "", dropout)
    return {
        "loss": None if graph.loss is None else results[graph.loss],
        "outputs": {name: results[value] for name, value in graph.outputs},
        "updates": {name: results[value] for name, value in graph.updates},
    }


def run_step(
    graph: Graph,
    state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    hook: Callable[[int, int], DropoutHook | None],
) -> Results:
    """One step on a whole batch: gradients are added to those of `state`, parameters and buffers.

    Of a program of one microbatch this is gradient accumulation: passes of all microbatches in
    turn, each with the buffers that the one before left, and the sum of their shares of the loss.
    `hook(index, count)` gives the draws of a microbatch. An evaluation program has no backward
    pass.
    """
    split = split_of(graph, batch)
    total: Tensor | None = None
    outputs: dict[str, Tensor] = {}
    updates: dict[str, Tensor] = {}
    for index, part in enumerate(split.of(batch)):
        given = {"batch": part, "parameter": state, "buffer": {**state, **updates}}
        values = {i.value.name: given[i.kind][i.target] for i in graph.inputs if i.kind in given}
        results = evaluate(graph, values, dropout=hook(index, split.count))
        loss, outputs = results["loss"], results["outputs"]
        if loss is not None:
            if graph.training:
                loss.backward()  # type: ignore[no-untyped-call]
                separate(state.values())
            total = loss.detach() if total is None else total + loss.detach()
        # Memory of its own: a buffer may be given a weight's value.
        updates |= {name: value.detach().clone() for name, value in results["updates"].items()}
    return {"loss": total, "outputs": outputs, "updates": updates}


def input_values(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The value of every input, checked against its spec's shape."""
    devices = [t.device for t in tensors.values()]
    device = devices[0] if devices else torch.device("cpu")
    values: dict[str, Tensor] = {}
    for item in graph.inputs:
        name, spec = item.value.name, item.value.spec
        if name in tensors:
            values[name] = tensors[name]
        elif item.kind == "constant":
            dtype = getattr(torch, spec.dtype)
            values[name] = torch.tensor(item.data, dtype=dtype, device=device).reshape(spec.shape)
        else:
            raise InputError(f"no tensor for {item.kind} {item.target!r} (value {name!r})")
        if tuple(values[name].shape) != spec.shape:
            raise InputError(
                f"{item.kind} {item.target!r} has shape {tuple(values[name].shape)};"
                f" the program was captured with {spec.shape}"
            )
    return values


def run_function(
    graph: Graph,
    function: Function,
    values: dict[str, Tensor],
    prefix: str,
    dropout: DropoutHook | None,
) -> dict[str, Tensor]:
    """All values of a function, by name, given those of its inputs."""
    values = dict(values)
    for item in function.body:
        if isinstance(item, Call):
            callee = graph.by_name[item.function]
            formals = (v.name for v in callee.inputs)
            actuals = dict(zip(formals, (values[a] for a in item.args), strict=True))
            inner = run_function(graph, callee, actuals, item.prefix, dropout)
            returned = [inner[name] for name in callee.outputs]
        else:
            returned = run_node(item, node_key(prefix, item), values, dropout)
        values.update(zip((v.name for v in item.results), returned, strict=True))
    return values


def run_node(
    node: Node, key: str, values: Mapping[str, Tensor], dropout: DropoutHook | None
) -> list[Tensor]:
    """The results of one operator call."""
    args: list[Any] = [torch_argument(a, values) for a in node.args]
    kwargs: dict[str, Any] = {name: torch_argument(a, values) for name, a in node.kwargs}
    if "memory_format" in kwargs:
        kwargs["memory_format"] = getattr(torch, str(kwargs["memory_format"]))
    if node.op.startswith("as_strided"):  # strides of memory: of a tensor in one piece, its own
        args[0] = args[0].clone(memory_format=torch.contiguous_format)
    match node.op:
        case "view":
            result: Any = torch.ops.aten.reshape(*args)
        case "view_dtype":
            result = torch.ops.aten.view.dtype(*args)
        case "_conj":  # not lazily: a trace says nothing of where that is resolved
            result = torch.conj_physical(args[0])
        case "dropout":
            result = drop(args[0], float(args[1]), key, dropout)
        case "rand" | "randn" if dropout is not None:
            result = dropout.draw(key, tuple(args[0]), node.op, kwargs["dtype"])
        case "batch_norm":
            return batch_norm(*args)
        case "scaled_dot_product_attention" if dropout is not None and attention_p(node) > 0:
            result = attention(args, kwargs, key, dropout)
        case _:
            own = OWN.get(node.op)
            result = own(*args, **kwargs) if own else packet(node.op)(*args, **kwargs)
    return list(result) if isinstance(result, tuple | list) else [result]


def torch_argument(arg: Arg, values: Mapping[str, Tensor]) -> object:
    """A graph argument as torch takes it."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, Dtype):
        return getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [torch_argument(a, values) for a in arg]
    return arg


def drop(x: Tensor, p: float, key: str, hook: DropoutHook | None) -> Tensor:
    """Inverted dropout: native, or with the hook's mask."""
    if hook is None:
        return torch.dropout(x, p, True)
    mask = hook.mask(key, tuple(x.shape), p).to(x.dtype)
    return x * mask / (1 - p) if p < 1 else x * 0


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Tensor]:
    """The output, and in training the new running statistics (ATen updates copies in place)."""
    if mean is None or var is None:
        return [torch.ops.aten.batch_norm(x, weight, bias, None, None, True, momentum, eps, True)]
    mean, var = mean.detach().clone(), var.detach().clone()
    out = torch.ops.aten.batch_norm(x, weight, bias, mean, var, training, momentum, eps, True)
    return [out, mean, var] if training else [out]


def bags(
    table: Tensor,
    rows: Tensor,
    starts: Tensor | None,
    mode: str,
    weights: Tensor | None,
    padding: int,
    last: bool = False,
) -> Tensor:
    """Sums, means or maxima of rows of a table."""
    row = padding if padding >= 0 else None
    return torch.nn.functional.embedding_bag(
        rows, table, starts, mode=mode, per_sample_weights=weights, include_last_offset=last,
        padding_idx=row,
    )  # fmt: skip


def attention_p(node: Node) -> float:
    """The dropout probability of an attention node."""
    p = node.arg(4, "dropout_p", 0.0)
    return float(p) if isinstance(p, int | float) else 0.0


def attention(args: list[Any], kwargs: Mapping[str, Any], key: str, hook: DropoutHook) -> Tensor:
    """softmax(q k^T * scale + mask) with the hook's dropout, times v."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, keys, values = (given[n] for n in names[:3])
    if given.get("enable_gqa"):
        groups = query.shape[-3] // keys.shape[-3]
        keys = keys.repeat_interleave(groups, dim=-3)
        values = values.repeat_interleave(groups, dim=-3)
    scale = given.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ keys.transpose(-2, -1) * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if isinstance(mask, Tensor):
        allowed = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if allowed else scores + mask
    unseeing = scores.isneginf().all(-1, keepdim=True)  # such a query gets zeros
    weights = torch.softmax(scores.masked_fill(unseeing, 0.0), dim=-1).masked_fill(unseeing, 0.0)
    dropped: Tensor = drop(weights, float(given["dropout_p"]), key, hook) @ values
    return dropped


def padded_bags(
    table: Tensor, rows: Tensor, mode: str, weights: Tensor | None, padding: int
) -> Tensor:
    """Bags that are the rows of `rows`."""
    return bags(table, rows, None, mode, weights, padding)


def index_each(x: Tensor, indices: list[Tensor | None], each: list[list[int]]) -> Tensor:
    """Advanced indexing, the ranges of `each` written out."""
    result: Tensor = torch.ops.aten.index(x, with_ranges(x, indices, each))
    return result


def put_each(
    x: Tensor,
    indices: list[Tensor | None],
    each: list[list[int]],
    values: Tensor,
    accumulate: bool,
) -> Tensor:
    """Writing by index in the same way."""
    places = with_ranges(x, indices, each)
    result: Tensor = torch.ops.aten.index_put(x, places, values, accumulate)
    return result


def with_ranges(
    x: Tensor, indices: list[Tensor | None], each: list[list[int]]
) -> list[Tensor | None]:
    """Indices with those of dims that are read in order, (dim, index dims after it) in `each`."""
    given: list[Tensor | None] = list(indices)
    for dim, after in each:
        given[dim] = torch.arange(x.shape[dim], device=x.device)[(...,) + (None,) * after]
    return given


def segments(data: Tensor, reduction: str, **options: Any) -> Tensor:
    """`segment_reduce` by offsets that ascend: torch reads beyond its data by others."""
    offsets = options.get("offsets")
    if offsets is not None:
        torch._assert_async((offsets.diff(dim=-1) >= 0).all(), "offsets of segments descend")
    result: Tensor = torch.ops.aten.segment_reduce(data, reduction, **options)
    return result


def written(cache: Tensor, dim: int, position: Tensor | None, new: Tensor) -> Tensor:
    """A copy of a cache with new rows from a position on."""
    rows = torch.arange(new.shape[dim], device=cache.device)
    return torch.index_copy(cache, dim, rows if position is None else rows + position, new)


# Operators that capture writes and ATen does not have, or does not check.
OWN: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "parloom.experts": experts,
        "parloom.index_each": index_each,
        "parloom.put_each": put_each,
        "parloom.embedding_bag": padded_bags,
        "parloom.ragged_bag": bags,
        WRITE_CACHE: written,
        "segment_reduce": segments,
    }
)
